//! Memory of pools (`cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`) between processes.
//!
//! A pool goes to another process as a descriptor, an allocation of it as 64 bytes that mean something in the imported pool alone. A
//! backend imports a pool once, with the first allocation, and destroys what it imported with the last. The driver's rules: the pool
//! was created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, an imported pool is at first open to the GPU that has the memory
//! alone, and importers free before the exporter does.

use super::driver::{CUdeviceptr, OutsideCapture, call, call_optional, code, handle, lock};
use super::gpus::Gpus;
use crate::backend::PAYLOAD_BYTES;
use crate::backend::{Allocation, BackendError};
use cudarc::driver::sys::{self, CUmemoryPool};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

/// Pools that others may import, and pools of theirs.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// By the driver's handle.
    exported: Mutex<HashMap<usize, Exported>>,
    /// By the exporter's number.
    imported: Mutex<HashMap<u64, Imported>>,
}

/// A pool of this process.
#[derive(Debug)]
struct Exported {
    number: u64,
    /// What was shared of it: first addresses, by id.
    shared: BTreeMap<u64, u64>,
    /// With this many, those that were freed are dropped.
    sweep_at: usize,
}

/// A pool of another process.
#[derive(Debug)]
struct Imported {
    pool: usize,
    /// Allocations of it that are open.
    open: usize,
}

/// As a handle type of the driver.
pub(super) const POSIX_FILE_DESCRIPTOR: c_uint = 1;

const SWEEP_FROM: usize = 64;

/// What an importer needs: the pool, its number, and the allocation in it.
pub(super) type PoolShare = (OwnedFd, u64, [u8; PAYLOAD_BYTES]);

impl Pools {
    /// Exports an allocation of `pool`. `lives` says whether the allocation of an id is still at an address. A context is current.
    pub fn export(
        &self,
        gpus: &Gpus,
        pool: u64,
        allocation: &Allocation,
        lives: impl Fn(u64, u64) -> bool,
    ) -> Result<PoolShare, BackendError> {
        let (driver, base) = (gpus.driver, allocation.base);
        let mut descriptor: c_int = -1;
        // SAFETY: the pool that the driver has named for memory that the caller keeps; the output is a descriptor, as the type says.
        let exported = unsafe {
            call_optional!(
                driver,
                cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), handle(pool as usize), POSIX_FILE_DESCRIPTOR, 0)
            )
        };
        exported.map_err(|error| match &error {
            BackendError::Driver { code, .. } if code::says_no(*code) => BackendError::NotSupported(format!(
                "{base:#x} cannot be shared with another process: it is memory of a pool that was not created for that, as the one that \
                 cudaMallocAsync takes from by default; create a pool with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and allocate with \
                 cudaMallocFromPoolAsync, or allocate with cudaMalloc or mpgpu ({error})"
            )),
            _ => error,
        })?;
        // SAFETY: a new descriptor, and ours to close.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let mut pointer = sys::CUmemPoolPtrExportData { reserved: [0; PAYLOAD_BYTES] };
        // SAFETY: the output is valid for the call; the address is the first of an allocation of that pool.
        unsafe { call_optional!(driver, cuMemPoolExportPointer(&mut pointer, base)) }?;
        Ok((descriptor, self.number_of(pool as usize, allocation, lives)?, pointer.reserved))
    }

    /// The number by which importers know a pool. The driver may give the handle of a pool that was destroyed to another; but a pool
    /// lives as long as memory of it does, so the number stays while anything that was shared under it lives, and no longer.
    fn number_of(&self, pool: usize, allocation: &Allocation, lives: impl Fn(u64, u64) -> bool) -> Result<u64, BackendError> {
        let mut all = lock(&self.exported);
        if let Some(known) = all.get_mut(&pool) {
            if known.shared.len() >= known.sweep_at {
                known.shared.retain(|id, base| lives(*id, *base));
                known.sweep_at = SWEEP_FROM.max(2 * known.shared.len());
            }
            while known.shared.last_key_value().is_some_and(|(id, base)| !lives(*id, *base)) {
                known.shared.pop_last();
            }
            if !known.shared.is_empty() {
                known.shared.insert(allocation.id, allocation.base);
                return Ok(known.number);
            }
        }
        all.retain(|_, known| known.shared.iter().any(|(id, base)| lives(*id, *base)));
        // At random, so that pools of different processes have different numbers.
        let mut number = [0; 8];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).map_err(|errno| BackendError::Driver {
            what: "getrandom".into(),
            reason: std::io::Error::from(errno).to_string(),
            code: i64::from(errno.raw_os_error()),
        })?;
        let number = u64::from_ne_bytes(number);
        all.insert(pool, Exported { number, shared: [(allocation.id, allocation.base)].into(), sweep_at: SWEEP_FROM });
        Ok(number)
    }

    /// Opens memory of a pool of another process, through `gpu`: its address.
    pub fn open(&self, gpus: &Gpus, gpu: usize, share: (&OwnedFd, u64, &[u8; PAYLOAD_BYTES]), owner: usize) -> Result<u64, BackendError> {
        let (descriptor, number, payload) = share;
        let _outside = OutsideCapture::enter(gpus.driver);
        let _current = gpus.primary(gpu)?.enter()?;
        let mut imported = lock(&self.imported);
        let known = imported.get(&number).map(|known| known.pool);
        let pool = known.map_or_else(|| import(gpus, descriptor, owner), Ok)?;
        let mut pointer = sys::CUmemPoolPtrExportData { reserved: *payload };
        let mut base: CUdeviceptr = 0;
        // SAFETY: the output is valid for the call; a pool that we have imported.
        if let Err(error) = unsafe { call_optional!(gpus.driver, cuMemPoolImportPointer(&mut base, handle(pool), &mut pointer)) } {
            if known.is_none() {
                destroy(gpus, pool);
            }
            return Err(error);
        }
        imported.entry(number).or_insert(Imported { pool, open: 0 }).open += 1;
        Ok(base)
    }

    /// Closes what [`Pools::open`] has returned, and with the last of its pool the pool.
    pub fn close(&self, gpus: &Gpus, gpu: usize, number: u64, base: u64) -> Result<(), BackendError> {
        if gpus.is_lost(gpu) {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(gpus.driver);
        // Tried all the same where that fails: nobody else would.
        let _current = gpus.primary(gpu)?.enter();
        // Not under the lock: it may wait for work. The pool stays for as long as this is counted.
        // SAFETY: opened by `open`; whoever closes vouches that work which uses it has finished.
        let freed = unsafe { call!(gpus.driver, cuMemFree(base)) };
        let last = {
            let mut imported = lock(&self.imported);
            if let Some(known) = imported.get_mut(&number) {
                known.open -= 1;
            }
            if imported.get(&number).is_some_and(|known| known.open == 0) { imported.remove(&number) } else { None }
        };
        if let Some(last) = last {
            destroy(gpus, last.pool);
        }
        freed
    }
}

/// A pool of another process, open to every GPU that reaches its memory.
fn import(gpus: &Gpus, descriptor: &OwnedFd, owner: usize) -> Result<usize, BackendError> {
    let driver = gpus.driver;
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    let number = handle(descriptor.as_raw_fd() as usize);
    // SAFETY: the output is valid for the call, which takes a descriptor in place of a pointer.
    unsafe { call_optional!(driver, cuMemPoolImportFromShareableHandle(&mut pool, number, POSIX_FILE_DESCRIPTOR, 0)) }?;
    let access = gpus.access_to(owner);
    // SAFETY: a pool that was just imported, and a list of this length.
    let opened = unsafe { call_optional!(driver, cuMemPoolSetAccess(pool, access.as_ptr(), access.len())) };
    let pool = pool.expose_provenance();
    if let Err(error) = opened {
        destroy(gpus, pool);
        return Err(error);
    }
    Ok(pool)
}

fn destroy(gpus: &Gpus, pool: usize) {
    // SAFETY: imported by us, and nothing of it is open any more.
    if let Err(error) = unsafe { call_optional!(gpus.driver, cuMemPoolDestroy(handle(pool))) } {
        log::warn!("{error}");
    }
}
