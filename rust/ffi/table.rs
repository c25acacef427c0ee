//! Tables of handles. A handle is a key of a slot map, cast to a pointer that is never dereferenced.
//!
//! A key consists of a slot number and a count of how often the slot was used. A destroyed handle is therefore detected,
//! even if its slot is in use again. Four bits of a key contain the kind of the object, for example context or plan, so
//! that a handle of the wrong kind is detected. Four more bits identify the process, so that a child of `fork` detects
//! handles of its parent.

use super::argument::{Name, bad_handle};
use super::guard::Failure;
use super::types::mp_status_t::MP_ERROR_OUT_OF_MEMORY;
use mpgpu_contexts::Error;
use mpgpu_ipc::fork::{self, OfProcess};
use slotmap::{DefaultKey, Key, KeyData, SlotMap};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

// A key has 64 bits and must fit into a pointer.
const _: () = assert!(size_of::<*mut ()>() == size_of::<u64>(), "mpgpu needs a 64-bit target");

/// Index of the lowest of the four bits of a handle's key that contain the kind of the object. Bits 24 to 27 identify
/// the process. These eight bits are free because the slot number would need them only with 2^24 live handles.
const KIND_SHIFT: u32 = 28;
const PROCESS_SHIFT: u32 = 24;
const KIND: u64 = 0xF << KIND_SHIFT;
const PROCESS: u64 = 0xF << PROCESS_SHIFT;

const _: () = assert!(fork::DEPTH == 1 << (KIND_SHIFT - PROCESS_SHIFT));

/// Table of all live handles of one kind.
pub(super) struct Table<T> {
    kind: u64,
    slots: OfProcess<RwLock<SlotMap<DefaultKey, T>>>,
}

impl<T> Table<T> {
    /// Creates an empty table. `kind` is a number from 1 to 15 that no other table has.
    pub const fn new(kind: u64) -> Self {
        Table { kind: kind << KIND_SHIFT, slots: OfProcess::new(|| RwLock::new(SlotMap::new())) }
    }

    /// Returns the kind and process bits that handles of this table have in the current process.
    fn tag(&self) -> u64 {
        self.kind | (u64::from(fork::generation()) << PROCESS_SHIFT & PROCESS)
    }

    /// Returns true if the handle was created by a process from which this process was forked. Such a handle is invalid in
    /// this process.
    pub fn is_inherited(&self, handle: usize) -> bool {
        let bits = handle as u64;
        fork::generation() > 0 && bits & KIND == self.kind && bits & (KIND | PROCESS) != self.tag()
    }

    // A panic inside the slot map leaves it consistent, because it allocates memory before it changes anything.
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
        // Handle 0 has no kind and fails this check too.
        if bits & (KIND | PROCESS) == tag { Ok(KeyData::from_ffi(bits ^ tag).into()) } else { Err(bad_handle(handle, name)) }
    }

    /// Inserts `value` and returns a new handle, unless `refuse` returns an error. `refuse` is called under the lock of the
    /// table. Therefore, if a thread first makes `refuse` return an error and then calls [`purge`](Table::purge), it finds
    /// every value that was inserted before.
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

    /// Inserts `value` and returns a new handle.
    pub fn insert(&self, value: T) -> Result<usize, Failure> {
        self.insert_unless(value, |_| None)
    }

    /// Calls `get` with the value of a handle and returns the result. `get` is called under the lock of the table, so it
    /// should be fast.
    pub fn with<R>(&self, handle: usize, name: Name, get: impl FnOnce(&T) -> R) -> Result<R, Failure> {
        let key = self.key(handle, name)?;
        self.read().get(key).map(get).ok_or_else(|| bad_handle(handle, name))
    }

    /// Removes the value of a handle and returns it. The handle is then invalid.
    pub fn remove(&self, handle: usize, name: Name) -> Result<T, Failure> {
        let key = self.key(handle, name)?;
        self.write().remove(key).ok_or_else(|| bad_handle(handle, name))
    }

    /// Removes every value for which `belongs` returns true. The values are dropped after the lock is released.
    pub fn purge(&self, belongs: impl Fn(&T) -> bool) {
        let mut slots = self.write();
        let keys: Vec<DefaultKey> = slots.iter().filter(|(_, value)| belongs(value)).map(|(key, _)| key).collect();
        let purged: Vec<T> = keys.into_iter().filter_map(|key| slots.remove(key)).collect();
        drop(slots);
        drop(purged);
    }
}
