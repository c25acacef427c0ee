//! Functions that are called when work has finished: one thread for each context, from the first that asks until the context closes.

use super::error::Error;
use crate::backend::{BackendError, Completion};
use crate::ipc::signal::rest;
use crate::sync::{Condvar, Mutex, held, lock};
use crate::threads::without_signals;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Called once, with what the work has come to.
pub type Callback = Box<dyn FnOnce(Result<(), BackendError>) + Send>;

/// Work, if it is not done already, and who is to be told of its end.
pub(super) struct Awaited {
    pub completion: Option<Completion>,
    pub callback: Callback,
}

#[derive(Default)]
struct CallbackState {
    /// Not yet seen by the thread.
    new: Vec<Awaited>,
    is_ending: bool,
    thread: Option<JoinHandle<()>>,
}

thread_local! {
    /// On a thread of callbacks the address of its queue's state. `std::thread::current` would leave memory behind on the caller's threads.
    static SERVED: Cell<usize> = const { Cell::new(0) };
}

/// The callbacks of one context.
#[derive(Default)]
pub(super) struct CallbackQueue {
    shared: Arc<(Mutex<CallbackState>, Condvar)>,
}

impl CallbackQueue {
    /// Has the thread wait for one more.
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
                what: "a thread for callbacks".into(),
                reason: error.to_string(),
                code: i64::from(error.raw_os_error().unwrap_or(0)),
            })?);
        }
        state.new.push(awaited);
        changed.notify_one();
        Ok(())
    }

    /// Calls all that are left, whose work has finished, and ends the thread. Called by a callback it does not wait.
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
            log::error!("the thread of callbacks panicked; please report this");
        }
    }
}

/// What the thread does from start to end.
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
        // Much comes soon after something has come.
        round = if done.is_empty() { round + 1 } else { 0 };
        for Awaited { completion, callback } in done {
            callback(completion.map_or(Ok(()), |work| work.wait()));
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
