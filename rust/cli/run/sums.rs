//! Reads counters of copies in memory that `mpgpu run` shares with the processes that it starts. `cpp/preload/report.cpp` writes these
//! counters.

use rustix::fs::{self, MemfdFlags, SealFlags};
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const MARK: &[u8; 8] = b"mpgpusum";
const BYTES: usize = 4096;
/// Number of 8-byte words in the memory before the counters of the outcomes. The words hold a magic number, the number of outcomes that
/// count as accelerated, the number of outcomes, the number of processes, the nanoseconds saved, the number of copies that were compared,
/// and the number of wrong copies.
const HEAD: usize = 7;
/// Number of bytes that are reserved for the name of an outcome. As many are reserved for the remedy: advice for programs whose copies mostly
/// have this outcome. The names of all outcomes precede the remedies.
const NAME: usize = 96;

/// Counters of all processes in shared memory. They include the copies of processes that were killed.
pub struct Sums(File);

impl Sums {
    /// Creates the counters with the value 0. The memory file is sealed, so that no process can shrink it while others write.
    pub fn new() -> io::Result<Sums> {
        let file = File::from(fs::memfd_create("mpgpu-sums", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(BYTES as u64)?;
        fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        file.write_all_at(MARK, 0)?;
        Ok(Sums(file))
    }

    /// Returns a path by which other processes of this user can open the memory. The path is valid as long as this process lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Returns a report with one line for each outcome of copies that occurred, or a single line if no process has made a copy. A further
    /// line contains the time saved. If no copy was accelerated, this line instead contains the most frequent reason for passing copies
    /// through, and its remedy. If some copies were accelerated but most bytes were passed through, the last line contains this reason and
    /// remedy.
    pub fn report(&self, compared: bool) -> io::Result<String> {
        let mut bytes = [0; BYTES];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(report(&bytes, compared))
    }
}

fn report(bytes: &[u8; BYTES], compared: bool) -> String {
    let word = |at: usize| bytes.get(8 * at..8 * at + 8).map_or(0, |word| u64::from_le_bytes(std::array::from_fn(|i| word[i])));
    // Processes of the user can write anything into this memory, so no value may lead to an access outside of it.
    let outcomes = (word(2) as usize).min((BYTES - 8 * HEAD) / (2 * NAME + 16));
    let text_at = |at: usize| {
        let text = &bytes[8 * (HEAD + 2 * outcomes) + NAME * at..][..NAME];
        String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()
    };
    let (mut accelerated_bytes, mut passed_bytes, mut most) = (0_u64, 0_u64, (0, 0));
    let (accelerated, processes, saved) = (word(1), word(3), word(4));
    let mut text = String::new();
    for outcome in 0..outcomes {
        let [copies, size] = [0, 1].map(|i| word(HEAD + 2 * outcome + i));
        if copies != 0 {
            let is_accelerated = (outcome as u64) < accelerated;
            let what = if is_accelerated { "accelerated" } else { "passed through" };
            let _ = writeln!(text, "mpgpu: {what:14} {copies:8} copies, {size:14} bytes: {}", text_at(outcome));
            let sum = if is_accelerated { &mut accelerated_bytes } else { &mut passed_bytes };
            *sum = sum.saturating_add(size);
            if !is_accelerated && size >= most.0 {
                most = (size, outcome);
            }
        }
    }
    if text.is_empty() {
        return "mpgpu: no process called a CUDA copy function\n".to_owned();
    }
    let processes = if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") };
    let reason = format!("{}; remedy: {}", text_at(most.1), text_at(outcomes + most.1));
    let _ = match accelerated_bytes {
        0 => writeln!(text, "mpgpu: no copy was accelerated in {processes}; most frequent reason: {reason}"),
        _ => writeln!(text, "mpgpu: time saved: {:.6} s in {processes} (measured or modelled)", saved as f64 * 1e-9),
    };
    if compared {
        let _ = writeln!(text, "mpgpu: {} accelerated copies compared byte by byte, {} wrong", word(5), word(6));
    }
    if accelerated_bytes > 0 && passed_bytes > accelerated_bytes {
        let _ = writeln!(text, "mpgpu: most bytes were passed through: {reason}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_told_and_what_cannot_be_is_left_out() {
        let mut bytes = [0; BYTES];
        assert_eq!(report(&bytes, true), "mpgpu: no process called a CUDA copy function\n");
        let mut put = |at: usize, word: u64| bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        for (at, word) in [(1, 1), (2, 2), (3, 1), (4, 1_500_000), (5, 4), (6, 1), (7, 4), (8, 4096), (9, 0), (10, 0)].into_iter() {
            put(at, word);
        }
        bytes[88..98].copy_from_slice(b"GPU to GPU");
        bytes[184..198].copy_from_slice(b"managed memory");
        bytes[376..386].copy_from_slice(b"cudaMalloc");
        let text = "mpgpu: accelerated           4 copies,           4096 bytes: GPU to GPU\nmpgpu: time saved: 0.001500 s in 1 process (measured or modelled)\n";
        assert_eq!(report(&bytes, false), text);
        assert_eq!(report(&bytes, true), format!("{text}mpgpu: 4 accelerated copies compared byte by byte, 1 wrong\n"));
        bytes[72..80].copy_from_slice(&3_u64.to_le_bytes());
        bytes[80..88].copy_from_slice(&5000_u64.to_le_bytes());
        let last = report(&bytes, false).lines().next_back().map(str::to_owned);
        assert_eq!(last.as_deref(), Some("mpgpu: most bytes were passed through: managed memory; remedy: cudaMalloc"));
        bytes[56..72].fill(0);
        let last = report(&bytes, false).lines().next_back().map(str::to_owned);
        let expected = "mpgpu: no copy was accelerated in 1 process; most frequent reason: managed memory; remedy: cudaMalloc";
        assert_eq!(last.as_deref(), Some(expected));
        // Whatever the bytes contain, `report` must not read outside of them.
        assert!(report(&[255; BYTES], true).contains("passed through") || report(&[255; BYTES], true).contains("accelerated"));
    }
}
