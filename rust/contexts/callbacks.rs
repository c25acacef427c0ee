//! Calls the caller's functions when work has finished. Each context has one thread for these calls, which runs from the first request
//! until the context closes.

use super::error::Error;
use crate::backend::{BackendError, Completion, panics};
use crate::ipc::signal::rest;
use crate::sync::{Condvar, Mutex, held, lock};
use crate::threads::without_signals;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Function that is called once when work has finished, with the result of the work.
pub type Callback = Box<dyn FnOnce(Result<(), BackendError>) + Send>;

/// Callback with the work for which it waits. The work is `None` if it has already finished.
pub(super) struct Awaited {
    pub completion: Option<Completion>,
    pub callback: Callback,
}

#[derive(Default)]
struct CallbackState {
    /// Callbacks that were added and that the callback thread has not picked up yet.
    new: Vec<Awaited>,
    is_ending: bool,
    thread: Option<JoinHandle<()>>,
}

thread_local! {
    /// Address of the [`CallbackState`] of the queue that this callback thread serves; 0 on all other threads. `std::thread::current` is
    /// not used for this, because it would allocate memory on the caller's threads that is never freed.
    static SERVED: Cell<usize> = const { Cell::new(0) };
}

/// Queue of the callbacks of one context.
#[derive(Default)]
pub(super) struct CallbackQueue {
    shared: Arc<(Mutex<CallbackState>, Condvar)>,
}

impl CallbackQueue {
    /// Adds a callback to the queue, and starts the callback thread if it does not run yet.
    pub fn add(&self, awaited: Awaited) -> Result<(), Error> {
        let (state, changed) = &*self.shared;
        let mut state = lock(state);
        if state.is_ending {
            return Err(Error::ContextDestroyed);
        }
        if state.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let named = std::thread::Builder::new().name("mpgpu-callback".into());
            let serve = move || {
                SERVED.set(Arc::as_ptr(&shared).addr());
                serve(&shared.0, &shared.1);
            };
            let thread = without_signals(|| named.spawn(serve));
            state.thread = Some(thread.map_err(|error| BackendError::Driver {
                what: "starting the thread for callbacks".into(),
                reason: error.to_string(),
                code: i64::from(error.raw_os_error().unwrap_or(0)),
            })?);
        }
        state.new.push(awaited);
        changed.notify_one();
        Ok(())
    }

    /// Calls all remaining callbacks, whose work must have finished, and ends the callback thread. If a callback calls this function, the
    /// function does not wait for the thread.
    pub fn end(&self) {
        let (state, changed) = &*self.shared;
        let thread = {
            let mut state = lock(state);
            state.is_ending = true;
            changed.notify_one();
            state.thread.take()
        };
        if let Some(thread) = thread.filter(|_| SERVED.get() != Arc::as_ptr(&self.shared).addr())
            && thread.join().is_err()
        {
            log::error!("the callback thread panicked; please report this");
        }
    }
}

/// Body of the callback thread: polls the work of all queued callbacks, and calls each callback when its work has finished.
fn serve(state: &Mutex<CallbackState>, changed: &Condvar) {
    let mut awaited: Vec<Awaited> = Vec::new();
    let mut round = 0;
    loop {
        {
            let mut state = lock(state);
            while awaited.is_empty() && state.new.is_empty() {
                if state.is_ending {
                    return;
                }
                state = held(changed.wait(state));
            }
            awaited.append(&mut state.new);
        }
        let (done, rest_of): (Vec<Awaited>, Vec<Awaited>) =
            awaited.into_iter().partition(|one| !matches!(one.completion.as_ref().map(|work| work.is_done()), Some(Ok(false))));
        awaited = rest_of;
        // Work often finishes soon after other work, so the polling interval starts small again after each finished work.
        round = if done.is_empty() { round + 1 } else { 0 };
        for Awaited { completion, callback } in done {
            // The callback is code of the caller. A panic in it must not end the thread, which also serves other callbacks.
            let call = AssertUnwindSafe(|| callback(completion.map_or(Ok(()), |work| work.wait())));
            if let Err(payload) = catch_unwind(call) {
                log::error!("a callback for finished work {}; other callbacks are still called", panics::text(payload));
            }
        }
        if !awaited.is_empty() {
            rest(round / 4);
        }
    }
}

impl fmt::Debug for CallbackQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallbackQueue")
    }
}
