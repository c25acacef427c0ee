//! Extracts the messages of caught panics.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the message of a panic for use in an error.
pub fn text(payload: Box<dyn Any + Send>) -> String {
    let text = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => format!("panicked: {text}"),
        (_, Some(text)) => format!("panicked: {text}"),
        _ => "panicked".into(),
    };
    // A payload may panic when it is dropped, and so may the payload of that panic. The second one is not dropped.
    if let Err(second) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
        std::mem::forget(second);
    }
    text
}
