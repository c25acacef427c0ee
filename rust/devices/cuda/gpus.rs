//! Tracks the visible GPUs: which of them are in use, and which can access each other's memory.
//!
//! A GPU is in use once its primary context has been retained. Before a GPU works for an execution, it gets access to the `cuMemAlloc`
//! memory of all GPUs in use, as far as the hardware supports it. This module has no lock of its own. The bit masks are atomics, and
//! [`Device`] prevents a context from being retained twice.

use super::device::{Device, Primary};
use super::driver::{Driver, call};
use crate::backend::{BackendError, uuid_of_number};
use crate::topology::DeviceId;
use cudarc::driver::sys;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Maximum number of GPUs of one node. The limit is 64, because bit masks of GPUs have 64 bits.
pub(super) const MOST_DEVICES: usize = 64;

#[derive(Debug)]
#[repr(C)] // Fields that every execution reads come first.
pub(super) struct Gpus {
    pub driver: &'static Driver,
    pub devices: Vec<Device>,
    /// Bit mask of the GPUs whose primary context this backend has retained.
    pub used: AtomicU64,
    /// True if the kernels of a GPU are loaded as soon as its primary context is retained (see [`Gpus::load_kernels`]).
    loads_kernels: AtomicBool,
    pub hosts: u32,
}

/// Returns the number of GPUs that the process can use, or [`BackendError::NoDriver`] with the reason if there are none.
pub fn device_count() -> Result<u32, BackendError> {
    count_devices(Driver::get()?)
}

pub(super) fn count_devices(driver: &Driver) -> Result<u32, BackendError> {
    // The driver returns the error "no device" (code 100) instead of a count of 0.
    match driver.device_count() {
        Ok(0) | Err(BackendError::Driver { code: 100, .. }) => {
            Err(BackendError::NoDriver("the driver shows no GPU to this process; check nvidia-smi and CUDA_VISIBLE_DEVICES".into()))
        }
        other => other,
    }
}

impl Gpus {
    pub fn new(driver: &'static Driver, hosts: u32) -> Result<Gpus, BackendError> {
        let count = count_devices(driver)? as usize;
        if count > MOST_DEVICES {
            return Err(BackendError::NotSupported(format!(
                "{count} GPUs are visible, more than {MOST_DEVICES}; select GPUs with CUDA_VISIBLE_DEVICES"
            )));
        }
        let mut devices = Vec::with_capacity(count);
        for index in 0..count as i32 {
            let mut ordinal = 0;
            // SAFETY: The driver writes to a variable that outlives the call.
            unsafe { call!(driver, cuDeviceGet(&mut ordinal, index)) }?;
            devices.push(Device::new(ordinal));
        }
        Ok(Gpus { driver, devices, used: AtomicU64::new(0), loads_kernels: AtomicBool::new(false), hosts })
    }

    pub fn check_device(&self, device: DeviceId) -> Result<(), BackendError> {
        let exists = if device.is_host() { (!device.0 as u32) < self.hosts } else { (device.0 as usize) < self.devices.len() };
        if exists { Ok(()) } else { Err(BackendError::InvalidDevice(device.0)) }
    }

    /// Returns the primary context of a GPU. The first call for a GPU retains the context.
    pub fn primary(&self, gpu: usize) -> Result<&Primary, BackendError> {
        let device = self.devices.get(gpu).ok_or(BackendError::InvalidDevice(gpu as i32))?;
        if let Some(primary) = device.used() {
            return Ok(primary);
        }
        let primary = device.primary(self.driver)?;
        self.used.fetch_or(1 << gpu, Ordering::SeqCst);
        if self.loads_kernels.load(Ordering::SeqCst) {
            primary.kernel();
        }
        Ok(primary)
    }

    /// Returns the primary context of a GPU, after giving the GPU access to the memory of every GPU in use, as far as the hardware supports
    /// it. Once access is enabled, the call costs only two memory loads.
    pub fn peered(&self, gpu: usize) -> Result<&Primary, BackendError> {
        let primary = self.primary(gpu)?;
        let mut missing = self.used.load(Ordering::Acquire) & !primary.peers.load(Ordering::Acquire);
        while missing != 0 {
            let peer = missing.trailing_zeros() as usize;
            primary.enable_access(self.primary(peer)?)?;
            missing &= missing - 1;
        }
        Ok(primary)
    }

    /// True if `gpu` can access memory that was allocated on `peer` by `cuMemAlloc`. Enables the access first if necessary.
    pub fn has_access(&self, gpu: usize, peer: usize) -> Result<bool, BackendError> {
        Ok(self.peered(gpu)?.access.load(Ordering::Acquire) & (1 << peer) != 0)
    }

    /// True if the hardware allows `gpu` to access memory of `owner`.
    pub fn can_access(&self, gpu: usize, owner: usize) -> bool {
        let mut can = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        let code = unsafe { (self.driver.cuDeviceCanAccessPeer)(&mut can, self.devices[gpu].ordinal, self.devices[owner].ordinal) };
        gpu == owner || (code == 0 && can != 0)
    }

    /// Returns the driver's access descriptors that give every GPU access to memory of `owner`, except GPUs that the hardware does not
    /// allow to access it.
    pub fn access_to(&self, owner: usize) -> Vec<sys::CUmemAccessDesc> {
        let able = (0..self.devices.len()).filter(|gpu| self.can_access(*gpu, owner));
        let access = able.map(|gpu| sys::CUmemAccessDesc {
            location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.devices[gpu].ordinal },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        });
        access.collect()
    }

    /// Returns the GPU through which memory of another process on GPU `owner` is mapped. The first choice is the GPU of the calling thread,
    /// the second is another GPU in use, and both must be able to access the memory. The last choice is `owner`, because a rank accesses
    /// its neighbours' memory from its own GPU.
    pub fn mapping_gpu(&self, owner: usize) -> usize {
        let others = (0..self.devices.len()).filter(|gpu| *gpu != owner && self.devices[*gpu].used().is_some());
        self.current_gpu().into_iter().chain(others).find(|gpu| self.can_access(*gpu, owner)).unwrap_or(owner)
    }

    /// Returns the primary contexts that this backend has retained.
    pub fn in_use(&self) -> impl Iterator<Item = &Primary> {
        self.devices.iter().filter_map(Device::used)
    }

    /// True if the primary context of `gpu` exists, so that retaining it is fast.
    pub fn has_context(&self, gpu: usize) -> bool {
        let device = &self.devices[gpu];
        let (mut flags, mut active) = (0, 0);
        // SAFETY: The driver writes to variables that outlive the call.
        device.used().is_some()
            || unsafe { (self.driver.cuDevicePrimaryCtxGetState)(device.ordinal, &mut flags, &mut active) } == 0 && active != 0
    }

    /// Returns the number of a GPU in use. If there is none, returns the GPU of the calling thread's current context, or else any GPU on
    /// which the program has created a context, or else 0. A rank that only allocates host memory therefore does not create a context on
    /// the first GPU of the node.
    pub fn any_used(&self) -> usize {
        match self.used.load(Ordering::Acquire) {
            0 => self.current_gpu().or_else(|| self.active_gpu()).unwrap_or(0),
            used => used.trailing_zeros() as usize,
        }
    }

    /// Returns a primary context that this backend has retained. If there is none, retains and returns one that other code of the process
    /// has created. Returns `None` if no context exists. Does not create a context.
    pub fn any_active(&self) -> Result<Option<&Primary>, BackendError> {
        match self.in_use().next() {
            Some(primary) => Ok(Some(primary)),
            None => self.active_gpu().map(|gpu| self.primary(gpu)).transpose(),
        }
    }

    /// Returns the GPU of the calling thread's current context, or `None` if the thread has no current context.
    pub fn current_gpu(&self) -> Option<usize> {
        let mut ordinal = 0;
        // SAFETY: The output is a variable that outlives the call. Without a current context the call only returns an error.
        let code = unsafe { (self.driver.cuCtxGetDevice)(&mut ordinal) };
        self.devices.iter().position(|device| code == 0 && device.ordinal == ordinal)
    }

    /// Returns the number of a GPU whose primary context exists in this process. Returns `None` if there is no such GPU.
    fn active_gpu(&self) -> Option<usize> {
        self.devices.iter().position(|device| {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: The driver writes to variables that outlive the call.
            let code = unsafe { (self.driver.cuDevicePrimaryCtxGetState)(device.ordinal, &mut flags, &mut active) };
            code == 0 && active != 0
        })
    }

    /// True if this GPU is in use and was reset by `cudaDeviceReset`.
    pub fn is_lost(&self, gpu: usize) -> bool {
        self.devices[gpu].used().is_some_and(Primary::is_lost)
    }

    /// True if any GPU in use was reset by `cudaDeviceReset`.
    pub fn has_lost(&self) -> bool {
        self.in_use().any(Primary::is_lost)
    }

    /// Returns an error if any GPU in use was reset by `cudaDeviceReset`.
    pub fn check_alive(&self) -> Result<(), BackendError> {
        self.in_use().try_for_each(Primary::check)
    }

    /// Waits for all work that was enqueued before the call on any GPU in use. A GPU that was reset has no such work.
    pub fn drain(&self) -> Result<(), BackendError> {
        let mut result = Ok(());
        for primary in self.in_use().filter(|primary| !primary.is_lost()) {
            // An error on one GPU does not prevent waiting for the others.
            result = result.and(primary.drain());
        }
        result
    }

    /// Loads the kernels of all GPUs in use, and requests that the kernels of every other GPU are loaded when it comes into use. Must be
    /// called before any stream waits for a signal. Loading waits for the device, and the device could be waiting for a signal that the
    /// loading thread is to set.
    pub fn load_kernels(&self) {
        self.loads_kernels.store(true, Ordering::SeqCst);
        let used = self.used.load(Ordering::SeqCst);
        for (_, device) in self.devices.iter().enumerate().filter(|(gpu, _)| used >> gpu & 1 != 0) {
            device.used().and_then(Primary::kernel);
        }
    }

    pub fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        self.check_device(device)?;
        let Some(gpu) = usize::try_from(device.0).ok().and_then(|gpu| self.devices.get(gpu)) else {
            return Ok(uuid_of_number(device));
        };
        let mut uuid = [0; 16];
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(self.driver, cuDeviceGetUuid(&mut uuid, gpu.ordinal)) }?;
        Ok(uuid)
    }
}
