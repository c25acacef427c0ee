//! Named points at which a test can make the library panic, to prove that a panic inside becomes a status outside, that locks
//! survive it, and that the context stays usable. Without the feature `fault-injection` a point compiles to nothing.

#[cfg(feature = "fault-injection")]
mod armed {
    use std::cell::RefCell;

    thread_local! {
        // Of this thread, so that tests in one process do not strike each other.
        static ARMED: RefCell<Option<&'static str>> = const { RefCell::new(None) };
    }

    /// The next time that this thread reaches the point `name`, it panics there. Once.
    pub fn arm(name: &'static str) {
        ARMED.with_borrow_mut(|armed| *armed = Some(name));
    }

    /// Whether a fault is still waiting to strike this thread.
    pub fn is_armed() -> bool {
        ARMED.with_borrow(Option::is_some)
    }

    /// A place where a fault can strike.
    pub fn point(name: &str) {
        let strikes = ARMED.with_borrow_mut(|armed| armed.take_if(|a| *a == name).is_some());
        if strikes {
            panic!("fault injected at {name}");
        }
    }
}

#[cfg(feature = "fault-injection")]
pub use armed::{arm, is_armed, point};

/// A place where a fault can strike.
#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub fn point(_name: &str) {}
