//! Shares memory of CUDA memory pools (`cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`) with other processes.
//!
//! A pool is shared as a file descriptor. Each allocation is shared as 64 bytes that have a meaning only for the imported pool. A backend
//! imports a pool when it opens the first allocation of the pool, and destroys the imported pool when it closes the last one. The driver
//! requires that the pool was created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, and that importers free an allocation before the
//! exporter does. After the import, at first only the GPU that owns the memory can access it.

use super::driver::{CUdeviceptr, OutsideCapture, call, call_optional, code, handle, lock};
use super::gpus::Gpus;
use crate::backend::PAYLOAD_BYTES;
use crate::backend::{Allocation, BackendError};
use cudarc::driver::sys::{self, CUmemoryPool};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

/// Memory pools that this process has exported to or imported from other processes.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// Pools that this process has exported, by the driver's pool handle.
    exported: Mutex<HashMap<usize, Exported>>,
    /// Pools of other processes that this process has imported, by the number that the exporter has chosen.
    imported: Mutex<HashMap<u64, Imported>>,
}

/// Memory pool of this process that was exported to other processes.
#[derive(Debug)]
struct Exported {
    number: u64,
    /// First address of each shared allocation of the pool, by allocation identifier.
    shared: BTreeMap<u64, u64>,
    /// Number of shared allocations at which entries of freed allocations are next removed from the table.
    sweep_at: usize,
}

/// Memory pool of another process that this process has imported.
#[derive(Debug)]
struct Imported {
    pool: usize,
    /// Number of allocations of the imported pool that are open in this process.
    open: usize,
}

/// Handle type with which the driver shares a pool or memory as a file descriptor (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`).
pub(super) const POSIX_FILE_DESCRIPTOR: c_uint = 1;

const SWEEP_FROM: usize = 64;

/// Data that another process needs to open an allocation: the pool's file descriptor, the pool's number, and the driver's description of
/// the allocation.
pub(super) type PoolShare = (OwnedFd, u64, [u8; PAYLOAD_BYTES]);

impl Pools {
    /// Exports the allocation `allocation` of `pool`. The function `lives(id, address)` must return true if the allocation `id` still
    /// exists at this address. Requires a current context.
    pub fn export(
        &self,
        gpus: &Gpus,
        pool: u64,
        allocation: &Allocation,
        lives: impl Fn(u64, u64) -> bool,
    ) -> Result<PoolShare, BackendError> {
        let (driver, base) = (gpus.driver, allocation.base);
        let mut descriptor: c_int = -1;
        // SAFETY: The driver returned this pool for memory that the caller keeps allocated, so the pool exists. For this handle type the
        // driver writes a file descriptor, and the output is a variable of that type.
        let exported = unsafe {
            call_optional!(
                driver,
                cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), handle(pool as usize), POSIX_FILE_DESCRIPTOR, 0)
            )
        };
        exported.map_err(|error| match &error {
            BackendError::Driver { code, .. } if code::says_no(*code) => BackendError::NotSupported(format!(
                "{base:#x} cannot be shared with another process: it is memory of a pool that was not created for that, such as the \
                 default pool of cudaMallocAsync; create a pool with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and allocate with \
                 cudaMallocFromPoolAsync, or allocate with cudaMalloc or mpgpu ({error})"
            )),
            _ => error,
        })?;
        // SAFETY: The driver has just created the descriptor, and nothing else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let mut pointer = sys::CUmemPoolPtrExportData { reserved: [0; PAYLOAD_BYTES] };
        // SAFETY: The output is a variable that outlives the call. The address is the first address of an allocation of that pool.
        unsafe { call_optional!(driver, cuMemPoolExportPointer(&mut pointer, base)) }?;
        Ok((descriptor, self.number_of(pool as usize, allocation, lives)?, pointer.reserved))
    }

    /// Returns the number by which importers identify a pool. The driver may reuse the handle of a destroyed pool. However, a pool exists
    /// as long as memory in it exists, so the number is kept until the last allocation that was shared with this number has been freed.
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
        // The number is random, so that pools of different processes have different numbers.
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

    /// Opens memory of another process's pool through `gpu`, and returns its address. `owner` is the GPU that owns the memory.
    pub fn open(&self, gpus: &Gpus, gpu: usize, share: (&OwnedFd, u64, &[u8; PAYLOAD_BYTES]), owner: usize) -> Result<u64, BackendError> {
        let (descriptor, number, payload) = share;
        let _outside = OutsideCapture::enter(gpus.driver);
        let _current = gpus.primary(gpu)?.enter()?;
        let mut imported = lock(&self.imported);
        let known = imported.get(&number).map(|known| known.pool);
        let pool = known.map_or_else(|| import(gpus, descriptor, owner), Ok)?;
        let mut pointer = sys::CUmemPoolPtrExportData { reserved: *payload };
        let mut base: CUdeviceptr = 0;
        // SAFETY: The output is a variable that outlives the call. This backend imported the pool and has not destroyed it.
        if let Err(error) = unsafe { call_optional!(gpus.driver, cuMemPoolImportPointer(&mut base, handle(pool), &mut pointer)) } {
            if known.is_none() {
                destroy(gpus, pool);
            }
            return Err(error);
        }
        imported.entry(number).or_insert(Imported { pool, open: 0 }).open += 1;
        Ok(base)
    }

    /// Closes memory that [`Pools::open`] has opened. Destroys the imported pool when its last allocation is closed.
    pub fn close(&self, gpus: &Gpus, gpu: usize, number: u64, base: u64) -> Result<(), BackendError> {
        if gpus.is_lost(gpu) {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(gpus.driver);
        // The memory is closed even if the context cannot be made current, because no other code would close it.
        let _current = gpus.primary(gpu)?.enter();
        // The lock is not held, because freeing may wait for work. The pool exists until its count of open allocations is decremented
        // below.
        // SAFETY: `open` opened the memory. The caller guarantees that all work which uses it has finished.
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

/// Imports a pool of another process, gives access to every GPU that can access memory of the GPU `owner`, and returns the driver's handle
/// of the pool.
fn import(gpus: &Gpus, descriptor: &OwnedFd, owner: usize) -> Result<usize, BackendError> {
    let driver = gpus.driver;
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    let number = handle(descriptor.as_raw_fd() as usize);
    // SAFETY: The output is a variable that outlives the call. For this handle type, the driver reads the pointer argument as a file
    // descriptor.
    unsafe { call_optional!(driver, cuMemPoolImportFromShareableHandle(&mut pool, number, POSIX_FILE_DESCRIPTOR, 0)) }?;
    let access = gpus.access_to(owner);
    // SAFETY: The pool was just imported, and `access` has the given length.
    let opened = unsafe { call_optional!(driver, cuMemPoolSetAccess(pool, access.as_ptr(), access.len())) };
    let pool = pool.expose_provenance();
    if let Err(error) = opened {
        destroy(gpus, pool);
        return Err(error);
    }
    Ok(pool)
}

fn destroy(gpus: &Gpus, pool: usize) {
    // SAFETY: This backend imported the pool, and none of the pool's memory is open.
    if let Err(error) = unsafe { call_optional!(gpus.driver, cuMemPoolDestroy(handle(pool))) } {
        log::warn!("{error}");
    }
}
