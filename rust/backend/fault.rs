//! Defines named points at which a test can make the library panic. Tests verify that a panic inside the library is returned as a status,
//! that locks remain usable, and that the context stays usable. Without the feature `fault-injection`, a point compiles to nothing.

#[cfg(feature = "fault-injection")]
mod armed {
    use std::cell::RefCell;

    thread_local! {
        // The variable is thread-local, so that tests in one process do not affect each other.
        static ARMED: RefCell<Option<&'static str>> = const { RefCell::new(None) };
    }

    /// Requests a fault: the calling thread panics once, when it next reaches the point `name`.
    pub fn arm(name: &'static str) {
        ARMED.with_borrow_mut(|armed| *armed = Some(name));
    }

    /// Returns true if a fault was requested for the calling thread and has not yet occurred.
    pub fn is_armed() -> bool {
        ARMED.with_borrow(Option::is_some)
    }

    /// Marks the point `name`, at which a test can make the thread panic.
    pub fn point(name: &str) {
        let strikes = ARMED.with_borrow_mut(|armed| armed.take_if(|a| *a == name).is_some());
        if strikes {
            panic!("fault injected at {name}");
        }
    }
}

#[cfg(feature = "fault-injection")]
pub use armed::{arm, is_armed, point};

/// Marks a point at which a test could make the thread panic. Without the feature `fault-injection` it does nothing.
#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub fn point(_name: &str) {}
