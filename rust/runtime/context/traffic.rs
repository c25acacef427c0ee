//! What executions of a plan that was made alone send through host memory: by what other contexts of the node have in flight there.
//!
//! Each execution says until when it copies, and looks who else does. Within 10 ms of a look it only compares two times, so that
//! executions in a row make no system calls. Who comes anew keeps off host memory for [`WATCHED`], so the others see it in time.

use crate::ipc::TrafficPage;
use crate::ipc::traffic::FURTHEST;
use crate::plan::Program;
use crate::sync::{Mutex, lock};
use rustix::io::Result;
use std::path::Path;

const MILLISECOND: u64 = 1_000_000;

/// Others must have been out of the way for so long before more is taken, nanoseconds.
pub const WATCHED: u64 = 100 * MILLISECOND;

/// From one look to the next, nanoseconds.
const PERIOD: u64 = 10 * MILLISECOND;

/// A context is taken to be in flight for twice the time between its last two looks after its copies have ended, so that it does not come
/// and go with each step of a time loop; but within these bounds, nanoseconds.
const LINGER: [u64; 2] = [100 * MILLISECOND, 10_000 * MILLISECOND];

/// Copies end no later than so, nanoseconds. Where the model is slower than the machine, a long loop would seem to run ever further ahead.
const AHEAD: u64 = FURTHEST - LINGER[1];

/// How much of the bytes that the model would send through host memory an execution sends there.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostUse {
    /// Nothing, where there is another path.
    #[default]
    None,
    /// Half.
    Half,
    /// All, as if nobody else were there.
    All,
}

/// The host domains in which a program stages bytes, a bit each.
pub(super) fn host_domains(program: &Program) -> u64 {
    let hosts = program.rings.iter().map(|ring| ring.device).filter(|device| device.is_host());
    hosts.fold(0, |domains, host| domains | 1 << (!host.0 % 64))
}

/// What is allowed by the others that were seen: few of them at every look for [`WATCHED`] allow more, and more of them less at once.
#[derive(Copy, Clone, Debug, Default)]
pub struct Watch {
    /// Since when at most one other has been seen.
    one_since: Option<u64>,
    /// Since when no other has.
    none_since: Option<u64>,
}

impl Watch {
    /// At `now`, nanoseconds, so many others are in flight.
    pub fn look(&mut self, now: u64, others: usize) -> HostUse {
        let since = |since: Option<u64>, still: bool| if still { since.or(Some(now)) } else { None };
        self.one_since = since(self.one_since, others <= 1);
        self.none_since = since(self.none_since, others == 0);
        let long = |since: Option<u64>| since.is_some_and(|since| now.saturating_sub(since) >= WATCHED);
        match (long(self.one_since), long(self.none_since)) {
            (_, true) => HostUse::All,
            (true, false) => HostUse::Half,
            (false, false) => HostUse::None,
        }
    }
}

/// A context's part in the traffic of the node.
#[derive(Debug)]
pub struct Announcer {
    page: TrafficPage,
    watch: Watch,
    allowed: HostUse,
    /// Of all plans so far.
    domains: u64,
    /// When its copies end, as modelled.
    end: u64,
    /// What others are told.
    until: u64,
    looked: Option<u64>,
}

impl Announcer {
    /// On a page of its own opening.
    pub fn new(page: TrafficPage) -> Announcer {
        Announcer { page, watch: Watch::default(), allowed: HostUse::None, domains: 0, end: 0, until: 0, looked: None }
    }

    /// At `now` an execution is enqueued that copies through `domains` and takes so many nanoseconds.
    pub fn execute(&mut self, now: u64, nanoseconds: u64, domains: u64) -> Result<HostUse> {
        self.end = self.end.max(now).saturating_add(nanoseconds).min(now.saturating_add(AHEAD));
        let since = self.looked.map(|looked| now.saturating_sub(looked));
        let is_told = self.end + LINGER[0] / 2 <= self.until && domains & !self.domains == 0;
        if is_told && since.is_some_and(|since| since < PERIOD) {
            return Ok(self.allowed);
        }
        let linger = since.map_or(LINGER[0], |since| since.saturating_mul(2).clamp(LINGER[0], LINGER[1]));
        // Never less than was said: steps may come in bursts.
        self.until = self.until.max(self.end + linger);
        self.domains |= domains;
        self.looked = Some(now);
        let others = self.page.announce(now, self.until, self.domains)?;
        // Whoever is not seen gives way.
        self.allowed = self.watch.look(now, others.unwrap_or(usize::MAX));
        Ok(self.allowed)
    }
}

/// That of a context.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    state: Mutex<Registration>,
}

#[derive(Debug, Default)]
enum Registration {
    /// No plan has needed it yet.
    #[default]
    None,
    Open(Announcer),
    /// It cannot be had, or the context is closed.
    Absent,
}

impl Traffic {
    /// Whether this context is, or is now, among those that know of each other.
    pub fn join(&self, folder: &Path) -> bool {
        let mut state = lock(&self.state);
        if matches!(*state, Registration::None) {
            *state = match TrafficPage::open(folder) {
                Ok(page) => Registration::Open(Announcer::new(page)),
                Err(error) => {
                    log::debug!("{}: {error}; plans with an end in another process's memory keep off host memory", folder.display());
                    Registration::Absent
                }
            };
        }
        matches!(*state, Registration::Open(_))
    }

    /// See [`Announcer::execute`].
    pub fn execute(&self, now: u64, nanoseconds: u64, domains: u64) -> HostUse {
        let mut state = lock(&self.state);
        let Registration::Open(announcer) = &mut *state else { return HostUse::None };
        announcer.execute(now, nanoseconds, domains).unwrap_or_else(|error| {
            log::debug!("what is in flight on this node is no longer known ({error}); plans keep off host memory");
            *state = Registration::Absent;
            HostUse::None
        })
    }

    /// What the last execution was allowed.
    pub fn allowed(&self) -> HostUse {
        if let Registration::Open(announcer) = &*lock(&self.state) { announcer.allowed } else { HostUse::None }
    }

    /// Takes what it has said back.
    pub fn leave(&self) {
        *lock(&self.state) = Registration::Absent;
    }
}
