//! Handles: keys of slot maps, cast to pointers that nobody dereferences.
//!
//! A key carries the number of its slot and how often the slot has been used, so a handle that was destroyed finds nothing even
//! when its slot is in use again. Four bits tell contexts, plans and requests apart, so that a handle of the wrong kind finds
//! nothing either, and four more the process that made it from those of its children by `fork`.

use super::argument::{Name, bad_handle};
use super::guard::Failure;
use super::types::mp_status_t::MP_ERROR_OUT_OF_MEMORY;
use mpgpu_contexts::Error;
use mpgpu_ipc::fork::{self, OfProcess};
use slotmap::{DefaultKey, Key, KeyData, SlotMap};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

// A key has 64 bits and must fit into a pointer.
const _: () = assert!(size_of::<*mut ()>() == size_of::<u64>(), "mpgpu needs a 64-bit target");

/// Bits 28 to 31 of a key, which belong to the slot number, tell the kind, and bits 24 to 27 the process; 2^24 live handles would need them.
const KIND_SHIFT: u32 = 28;
const PROCESS_SHIFT: u32 = 24;
const KIND: u64 = 0xF << KIND_SHIFT;
const PROCESS: u64 = 0xF << PROCESS_SHIFT;

const _: () = assert!(fork::DEPTH == 1 << (KIND_SHIFT - PROCESS_SHIFT));

/// All live handles of one kind.
pub(super) struct Table<T> {
    kind: u64,
    slots: OfProcess<RwLock<SlotMap<DefaultKey, T>>>,
}

impl<T> Table<T> {
    /// `kind` is from 1 to 15, and each table's own.
    pub const fn new(kind: u64) -> Self {
        Table { kind: kind << KIND_SHIFT, slots: OfProcess::new(|| RwLock::new(SlotMap::new())) }
    }

    /// What the handles of this kind and process have in those bits.
    fn tag(&self) -> u64 {
        self.kind | (u64::from(fork::generation()) << PROCESS_SHIFT & PROCESS)
    }

    /// Whether a handle was made by the process that this one was forked from: in this one there is nothing behind it.
    pub fn is_inherited(&self, handle: usize) -> bool {
        let bits = handle as u64;
        fork::generation() > 0 && bits & KIND == self.kind && bits & (KIND | PROCESS) != self.tag()
    }

    // A panic inside the slot map leaves it consistent: it allocates before it changes anything.
    fn read(&self) -> RwLockReadGuard<'_, SlotMap<DefaultKey, T>> {
        self.slots.get().read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, SlotMap<DefaultKey, T>> {
        self.slots.get().write().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, handle: usize, name: Name) -> Result<DefaultKey, Failure> {
        if self.is_inherited(handle) {
            return Err(Failure { argument: Some(name), ..Error::Forked.into() });
        }
        let (bits, tag) = (handle as u64, self.tag());
        // Handle 0 has no kind, and is refused with the rest.
        if bits & (KIND | PROCESS) == tag { Ok(KeyData::from_ffi(bits ^ tag).into()) } else { Err(bad_handle(handle, name)) }
    }

    /// A handle for `value`, unless `refuse` says no. `refuse` runs under the table's lock: whoever changes its answer and then
    /// calls [`purge`](Table::purge) misses no value.
    pub fn insert_unless(&self, value: T, refuse: impl FnOnce(&T) -> Option<Failure>) -> Result<usize, Failure> {
        let mut slots = self.write();
        if let Some(failure) = refuse(&value) {
            return Err(failure);
        }
        let key = slots.insert(value);
        let bits = key.data().as_ffi();
        if bits & (KIND | PROCESS) != 0 {
            slots.remove(key);
            let message = "2^24 handles are in use; destroy plans, and wait for or destroy requests that are done".to_owned();
            return Err(Failure { status: MP_ERROR_OUT_OF_MEMORY, driver_code: 0, argument: None, message });
        }
        Ok((bits | self.tag()) as usize)
    }

    /// A handle for `value`.
    pub fn insert(&self, value: T) -> Result<usize, Failure> {
        self.insert_unless(value, |_| None)
    }

    /// What `get` takes of the value of this handle, under the lock, so it should be quick.
    pub fn with<R>(&self, handle: usize, name: Name, get: impl FnOnce(&T) -> R) -> Result<R, Failure> {
        let key = self.key(handle, name)?;
        self.read().get(key).map(get).ok_or_else(|| bad_handle(handle, name))
    }

    /// Takes the value of this handle out; the handle is invalid from then on.
    pub fn remove(&self, handle: usize, name: Name) -> Result<T, Failure> {
        let key = self.key(handle, name)?;
        self.write().remove(key).ok_or_else(|| bad_handle(handle, name))
    }

    /// Takes out every value that `belongs`. They are dropped after the lock is released.
    pub fn purge(&self, belongs: impl Fn(&T) -> bool) {
        let mut slots = self.write();
        let keys: Vec<DefaultKey> = slots.iter().filter(|(_, value)| belongs(value)).map(|(key, _)| key).collect();
        let purged: Vec<T> = keys.into_iter().filter_map(|key| slots.remove(key)).collect();
        drop(slots);
        drop(purged);
    }
}
