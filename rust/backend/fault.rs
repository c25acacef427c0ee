//! Named points at which a test can make the library panic. Tests show that a panic inside becomes a status outside, that locks survive it,
//! and that the context stays usable. Without the feature `fault-injection` a point compiles to nothing.

#[cfg(feature = "fault-injection")]
mod armed {
    use std::cell::RefCell;

    thread_local! {
        // The variable is thread-local, so that tests in one process do not affect each other.
        static ARMED: RefCell<Option<&'static str>> = const { RefCell::new(None) };
    }

    /// Makes this thread panic once, the next time that it reaches the point `name`.
    pub fn arm(name: &'static str) {
        ARMED.with_borrow_mut(|armed| *armed = Some(name));
    }

    /// Returns true if a fault of this thread has not yet occurred.
    pub fn is_armed() -> bool {
        ARMED.with_borrow(Option::is_some)
    }

    /// Marks a point at which a fault can occur.
    pub fn point(name: &str) {
        let strikes = ARMED.with_borrow_mut(|armed| armed.take_if(|a| *a == name).is_some());
        if strikes {
            panic!("fault injected at {name}");
        }
    }
}

#[cfg(feature = "fault-injection")]
pub use armed::{arm, is_armed, point};

/// Marks a point at which a fault can occur.
#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub fn point(_name: &str) {}
