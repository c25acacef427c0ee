//! Uses what two Rust runtimes in one program could disturb for each other: threads, thread-local values with destructors,
//! allocation, and a panic that unwinds over a value with a destructor and is caught.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

struct Notes<'a>(&'a Cell<bool>);

impl Drop for Notes<'_> {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

thread_local! {
    static SEEN: Cell<Option<String>> = const { Cell::new(None) };
}

/// `value` after a round through a thread; -1 when the caught panic did not carry its message or did not drop what it passed.
#[cfg_attr(feature = "hidden", unsafe(export_name = "mp_check"))]
#[cfg_attr(not(feature = "hidden"), unsafe(export_name = "second_check"))]
pub extern "C" fn check(value: i32) -> i32 {
    let text = thread::spawn(move || {
        SEEN.set(Some(value.to_string()));
        SEEN.take()
    })
    .join();
    let Ok(Some(text)) = text else { return -1 };
    let dropped = Cell::new(false);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let _notes = Notes(&dropped);
        panic!("{text}");
    }));
    match caught {
        Err(payload) if dropped.get() => payload.downcast_ref::<String>().and_then(|t| t.parse().ok()).unwrap_or(-1),
        _ => -1,
    }
}
