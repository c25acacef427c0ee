//! Sends log records to the caller's callback and to standard error.

use super::argument::bad_value;
use super::guard::{Failure, c_text, guard};
use super::types::{mp_log_callback_t, mp_log_level_value, mp_status_t};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::{OnceLock, PoisonError, RwLock};

/// Sets the callback that receives the library's log records of `max_level` and all lower levels, for the whole
/// process. A NULL `callback` or `MP_LOG_OFF` removes the callback. The library passes `user` to the callback
/// unchanged.
///
/// While a callback is set, the library writes no log records to standard error unless `MPGPU_LOG` is set. When this
/// call returns, the previous callback is no longer running on any thread, so the memory behind its `user` may be
/// freed. May be called from any thread, but not from inside the callback.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an unknown level, and for a call from inside the callback.
/// - `MP_ERROR_NOT_SUPPORTED` if the program has installed its own logger of the Rust crate `log`. That logger receives
///   the records instead.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_log_set_callback(max_level: mp_log_level_value, callback: mp_log_callback_t, user: *mut c_void) -> mp_status_t {
    guard(|| {
        // Levels are listed in the order of their numbers.
        let level = usize::try_from(max_level).ok().and_then(|level| LevelFilter::iter().nth(level));
        let level = level.ok_or_else(|| bad_value(c"max_level", max_level, "from 0 (MP_LOG_OFF) to 5 (MP_LOG_TRACE)"))?;
        if INSIDE.get() {
            return Err(Failure::invalid(c"callback", "a log callback cannot replace itself: set the log callback outside of it"));
        }
        if !install() {
            let message = "this process has its own Rust logger, which receives the log records of mpgpu";
            return Err(Failure::argument(mp_status_t::MP_ERROR_NOT_SUPPORTED, c"callback", message));
        }
        let mut sinks = SINKS.write().unwrap_or_else(PoisonError::into_inner);
        sinks.callback = callback.filter(|_| level > LevelFilter::Off).map(|function| Callback { level, function, user: User(user) });
        log::set_max_level(sinks.most());
        Ok(())
    })
}

/// Sets the level of records that go to standard error, from `MPGPU_LOG`. `None` selects the default.
///
/// Rust programs without their own logger call this function. Creating a context through the C ABI calls it too.
pub fn configure(level: Option<LevelFilter>) {
    if install() {
        let mut sinks = SINKS.write().unwrap_or_else(PoisonError::into_inner);
        sinks.stderr = level;
        log::set_max_level(sinks.most());
    }
}

struct Sinks {
    callback: Option<Callback>,
    stderr: Option<LevelFilter>,
}

struct Callback {
    level: LevelFilter,
    function: unsafe extern "C" fn(i32, *const c_char, *const c_char, *mut c_void),
    user: User,
}

struct User(*mut c_void);
// SAFETY: this code never dereferences the pointer, and the header states that the callback is called on any thread.
unsafe impl Send for User {}
// SAFETY: as for `Send`.
unsafe impl Sync for User {}

static SINKS: RwLock<Sinks> = RwLock::new(Sinks { callback: None, stderr: None });

thread_local! {
    /// True while this thread is inside the callback. Records that the callback itself causes are dropped, because they
    /// would call it recursively without end.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Sinks {
    /// Returns the most detailed level that is written to standard error. By default warnings are shown, so that they
    /// reach the user of a program that does not configure logging.
    fn stderr(&self) -> LevelFilter {
        self.stderr.unwrap_or(if self.callback.is_some() { LevelFilter::Off } else { LevelFilter::Warn })
    }

    fn most(&self) -> LevelFilter {
        self.stderr().max(self.callback.as_ref().map_or(LevelFilter::Off, |c| c.level))
    }
}

/// Installs this library's logger in the `log` crate. Returns false if the program has installed a logger before; that
/// logger then stays.
fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| log::set_logger(&Forward).is_ok())
}

struct Forward;

impl Log for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Other crates that this library uses also log. Their records are not forwarded.
        let from = metadata.target().split("::").next().unwrap_or_default();
        from == "mpgpu" || from.starts_with("mpgpu_")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) || INSIDE.get() {
            return;
        }
        let sinks = SINKS.read().unwrap_or_else(PoisonError::into_inner);
        if record.level() <= sinks.stderr() {
            // `eprintln!` panics if standard error is closed, and a lost log line must not cause a failure.
            let line = format!("mpgpu {}: {}\n", name(record.level()), record.args());
            let _ = std::io::Write::write_all(&mut std::io::stderr().lock(), line.as_bytes());
        }
        if let Some(callback) = sinks.callback.as_ref().filter(|c| record.level() <= c.level) {
            let target = c_text(record.target());
            let message = c_text(&record.args().to_string());
            INSIDE.set(true);
            // SAFETY: the caller passed a function of this type and guarantees that it may be called on any thread. The
            // lock is held, so that `mp_log_set_callback` waits for the call to return.
            unsafe { (callback.function)(record.level() as i32, target.as_ptr(), message.as_ptr(), callback.user.0) };
            INSIDE.set(false);
        }
    }

    fn flush(&self) {}
}

fn name(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warning",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}
