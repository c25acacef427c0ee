//! Runs the test program again as a child process, for work that may crash or hang. Crashes and hangs then become test results and do not
//! end the tests.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Result of a child process.
pub struct Ended {
    /// Exit status of the child. `None` if the child was still running after the time limit and was killed.
    pub status: Option<ExitStatus>,
    /// Output of the child.
    pub text: String,
}

impl Ended {
    pub fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Returns a text that describes how the child ended.
    pub fn how(&self) -> String {
        self.status.map_or_else(|| "it hung and was killed".into(), |status| status.to_string())
    }
}

/// Runs the test `test` of this program in a child process, with the environment variable `variable` set to `value`, for at most `seconds`.
pub fn run(test: &str, variable: &str, value: &str, seconds: u64) -> Ended {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"]).env(variable, value);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("this program runs");
    fn gather(from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
        let mut from = from;
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = from.read_to_end(&mut text);
            text
        })
    }
    let texts = [gather(child.stdout.take().expect("a pipe")), gather(child.stderr.take().expect("a pipe"))];
    let end = Instant::now() + Duration::from_secs(seconds);
    let status = loop {
        match child.try_wait().expect("a child of this process") {
            Some(status) => break Some(status),
            None if Instant::now() >= end => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = texts.map(|text| String::from_utf8_lossy(&text.join().expect("no panic")).into_owned()).concat();
    Ended { status, text }
}
