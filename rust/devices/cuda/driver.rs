//! Loads the CUDA driver library at run time and looks up its functions by name.
//!
//! Types and constants come from the bindings of the crate cudarc. Its wrappers are not used, because they panic if a symbol is missing,
//! whereas mpgpu supports drivers that lack newer functions. Its result type is not used either. A newer driver may return a code that the
//! enumeration lacks, so result codes are stored as integers.

use crate::backend::BackendError;
use crate::backend::static_program::check_can_load;
use crate::took::took;
use cudarc::driver::sys;
use libloading::Library;
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, transmute};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub(super) use sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstream};

/// Result code of a driver function (`CUresult`), as an integer.
pub(super) type Code = c_int;

/// Result codes of the driver that this backend treats specially, with the driver's names.
pub(super) mod code {
    use super::Code;
    pub const INVALID_VALUE: Code = 1;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const DEINITIALIZED: Code = 4;
    pub const INVALID_CONTEXT: Code = 201;
    pub const NOT_READY: Code = 600;
    pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
    pub const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
    pub const CONTEXT_IS_DESTROYED: Code = 709;
    pub const ALREADY_MAPPED: Code = 208;

    /// True for the codes that the driver returns for a request that it does not support. Depending on the driver's version, the code is
    /// INVALID_VALUE, NOT_PERMITTED or NOT_SUPPORTED.
    pub fn says_no(code: i64) -> bool {
        matches!(code, 1 | 800 | 801)
    }
}

/// True for error codes after which every call in the GPU's context fails for the rest of the process. Faults of a kernel or a link cause
/// such errors.
fn is_sticky(code: Code) -> bool {
    // ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, and the hardware faults up to LAUNCH_FAILED.
    matches!(code, 214 | 220 | 700 | 702 | 710 | 714..=719)
}

/// Wraps a driver function for a test. Each call is counted and passed to the test's substitute for the driver, unless the test makes this
/// call fail.
#[cfg(test)]
macro_rules! counted {
    ($name:ident, |$inner:ident| $function:expr, ($($types:ty),*)) => {
        counted!(@ $name, |$inner| $function, [] [$($types,)*] [a b c d e f g h i j k])
    };
    (@ $name:ident, |$inner:ident| $function:expr, [$($taken:ident: $of:ty,)*] [] [$($free:ident)*]) => {{
        unsafe extern "C" fn counted($($taken: $of),*) -> Code {
            super::tests::double::counted(stringify!($name), |$inner| {
                // SAFETY: The caller of the wrapper guarantees what the driver function requires.
                unsafe { ($function)($($taken),*) }
            })
        }
        counted
    }};
    (@ $name:ident, |$inner:ident| $function:expr, [$($taken:ident: $of:ty,)*] [$next:ty, $($types:ty,)*] [$free:ident $($more:ident)*]) => {
        counted!(@ $name, |$inner| $function, [$($taken: $of,)* $free: $next,] [$($types,)*] [$($more)*])
    };
}

macro_rules! driver_functions {
    (
        required { $($required:ident = $required_symbol:literal ($($required_argument:ty),*);)* }
        optional { $($optional:ident = $optional_symbol:literal ($($optional_argument:ty),*);)* }
    ) => {
        /// Functions of the driver that mpgpu calls, with the names in the driver's manual.
        #[allow(non_snake_case)]
        #[derive(Clone)]
        #[repr(C)] // Keeps the fields in the order of the lists below.
        pub(super) struct Driver {
            $(pub $required: unsafe extern "C" fn($($required_argument),*) -> Code,)*
            $(pub $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> Code>,)*
        }

        impl Driver {
            /// Looks up all functions of the driver. `find` returns the address of a symbol, or `None` if the driver lacks the symbol.
            ///
            /// # Safety
            /// Each address that `find` returns is that of the driver's function with this name, and stays valid until the process ends.
            unsafe fn look_up(find: impl Fn(&'static str) -> Option<NonNull<c_void>>) -> Result<Driver, BackendError> {
                Ok(Driver {
                    $($required: {
                        let symbol = find($required_symbol).ok_or_else(|| BackendError::NoDriver(
                            concat!("the driver has no ", $required_symbol, "; mpgpu needs a driver of CUDA 11.1 or later").into(),
                        ))?;
                        // SAFETY: The caller guarantees that the address is that of this driver function, and the type is the one in the
                        // driver's manual.
                        unsafe { transmute::<NonNull<c_void>, unsafe extern "C" fn($($required_argument),*) -> Code>(symbol) }
                    },)*
                    $($optional: {
                        // SAFETY: The caller guarantees that the address is that of this driver function, and the type is the one in the
                        // driver's manual.
                        find($optional_symbol).map(|symbol| unsafe {
                            transmute::<NonNull<c_void>, unsafe extern "C" fn($($optional_argument),*) -> Code>(symbol)
                        })
                    },)*
                })
            }

            /// Returns the names of the optional functions that this driver lacks.
            pub fn missing(&self) -> Vec<&'static str> {
                let optional = [$((stringify!($optional), self.$optional.is_none())),*];
                optional.into_iter().filter(|(_, missing)| *missing).map(|(name, _)| name).collect()
            }

            /// Returns a copy of this driver without the optional function `function`.
            #[cfg(any(test, feature = "fault-injection"))]
            pub fn without(mut self, function: &str) -> Driver {
                match function {
                    $(stringify!($optional) => self.$optional = None,)*
                    _ => panic!("the driver may not lack {function}"),
                }
                self
            }

            /// Wraps a test's substitute for the driver, so that every call is counted.
            #[cfg(test)]
            pub fn counted(inner: &Driver) -> Driver {
                Driver {
                    $($required: counted!($required, |inner| inner.$required, ($($required_argument),*)),)*
                    $($optional: inner.$optional.map(|_| -> unsafe extern "C" fn($($optional_argument),*) -> Code {
                        counted!($optional, |inner| inner.$optional.expect("it has this"), ($($optional_argument),*))
                    }),)*
                }
            }

            /// Returns a substitute for the driver for tests. Its required functions do nothing and return success, and it has no optional
            /// functions.
            #[cfg(test)]
            pub fn inert() -> Driver {
                Driver {
                    $($required: {
                        unsafe extern "C" fn nothing($(_: $required_argument),*) -> Code {
                            0
                        }
                        nothing
                    },)*
                    $($optional: None,)*
                }
            }
        }
    };
}

driver_functions! {
    required {
        cuInit = "cuInit" (c_uint);
        cuDriverGetVersion = "cuDriverGetVersion" (*mut c_int);
        cuGetErrorName = "cuGetErrorName" (Code, *mut *const c_char);
        cuGetErrorString = "cuGetErrorString" (Code, *mut *const c_char);
        cuDeviceGetCount = "cuDeviceGetCount" (*mut c_int);
        cuDeviceGet = "cuDeviceGet" (*mut CUdevice, c_int);
        cuDeviceGetName = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid = "cuDeviceGetUuid" (*mut [u8; 16], CUdevice);
        cuDeviceGetAttribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, CUdevice);
        cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer" (*mut c_int, CUdevice, CUdevice);
        cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        cuDevicePrimaryCtxGetState = "cuDevicePrimaryCtxGetState" (CUdevice, *mut c_uint, *mut c_int);
        cuCtxGetDevice = "cuCtxGetDevice" (*mut CUdevice);
        cuCtxEnablePeerAccess = "cuCtxEnablePeerAccess" (CUcontext, c_uint);
        cuCtxSynchronize = "cuCtxSynchronize" ();
        cuMemAlloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        cuMemFree = "cuMemFree_v2" (CUdeviceptr);
        cuMemHostAlloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        cuMemFreeHost = "cuMemFreeHost" (*mut c_void);
        cuMemHostRegister = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        cuMemHostUnregister = "cuMemHostUnregister" (*mut c_void);
        cuPointerGetAttributes = "cuPointerGetAttributes" (c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr);
        cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
        cuStreamCreate = "cuStreamCreate" (*mut CUstream, c_uint);
        cuStreamDestroy = "cuStreamDestroy_v2" (CUstream);
        cuStreamQuery = "cuStreamQuery" (CUstream);
        cuStreamSynchronize = "cuStreamSynchronize" (CUstream);
        cuStreamWaitEvent = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        cuEventCreate = "cuEventCreate" (*mut CUevent, c_uint);
        cuEventDestroy = "cuEventDestroy_v2" (CUevent);
        cuEventQuery = "cuEventQuery" (CUevent);
        cuEventSynchronize = "cuEventSynchronize" (CUevent);
        cuLaunchHostFunc = "cuLaunchHostFunc" (CUstream, unsafe extern "C" fn(*mut c_void), *mut c_void);
        cuModuleLoadData = "cuModuleLoadData" (*mut CUmodule, *const c_void);
        cuModuleGetFunction = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        cuModuleUnload = "cuModuleUnload" (CUmodule);
        cuFuncGetAttribute = "cuFuncGetAttribute" (*mut c_int, c_uint, CUfunction);
        cuLaunchKernel = "cuLaunchKernel" (
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
        );
        cuGraphCreate = "cuGraphCreate" (*mut CUgraph, c_uint);
        cuGraphDestroy = "cuGraphDestroy" (CUgraph);
        cuGraphAddMemcpyNode = "cuGraphAddMemcpyNode" (
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_MEMCPY3D, CUcontext
        );
        cuGraphExecMemcpyNodeSetParams = "cuGraphExecMemcpyNodeSetParams" (CUgraphExec, CUgraphNode, *const sys::CUDA_MEMCPY3D, CUcontext);
        cuGraphExecDestroy = "cuGraphExecDestroy" (CUgraphExec);
        // Functions that every execution calls. They are adjacent in memory, so that they share cache lines.
        cuStreamGetCtx = "cuStreamGetCtx" (CUstream, *mut CUcontext);
        cuCtxPushCurrent = "cuCtxPushCurrent_v2" (CUcontext);
        cuCtxPopCurrent = "cuCtxPopCurrent_v2" (*mut CUcontext);
        cuMemcpyAsync = "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuCtxGetCurrent = "cuCtxGetCurrent" (*mut CUcontext);
        cuStreamIsCapturing = "cuStreamIsCapturing" (CUstream, *mut c_uint);
        cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
        cuGraphLaunch = "cuGraphLaunch" (CUgraphExec, CUstream);
        cuEventRecord = "cuEventRecord" (CUevent, CUstream);
    }
    optional {
        // Functions since CUDA 12.0.
        cuCtxGetId = "cuCtxGetId" (CUcontext, *mut c_ulonglong);
        cuStreamGetId = "cuStreamGetId" (CUstream, *mut c_ulonglong);
        // All supported drivers have this function. It is optional here, because only messages use it.
        cuStreamGetFlags = "cuStreamGetFlags" (CUstream, *mut c_uint);
        // All supported drivers have this function. It is optional here, because only timed executions use it.
        cuEventElapsedTime = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
        // Functions since CUDA 11.2.
        cuMemPoolGetAccess = "cuMemPoolGetAccess" (*mut c_uint, *mut c_void, *mut sys::CUmemLocation);
        cuMemPoolSetAccess = "cuMemPoolSetAccess" (sys::CUmemoryPool, *const sys::CUmemAccessDesc, usize);
        cuMemPoolDestroy = "cuMemPoolDestroy" (sys::CUmemoryPool);
        cuMemPoolExportToShareableHandle = "cuMemPoolExportToShareableHandle" (*mut c_void, sys::CUmemoryPool, c_uint, c_ulonglong);
        cuMemPoolImportFromShareableHandle = "cuMemPoolImportFromShareableHandle" (
            *mut sys::CUmemoryPool, *mut c_void, c_uint, c_ulonglong
        );
        cuMemPoolExportPointer = "cuMemPoolExportPointer" (*mut sys::CUmemPoolPtrExportData, CUdeviceptr);
        cuMemPoolImportPointer = "cuMemPoolImportPointer" (*mut CUdeviceptr, sys::CUmemoryPool, *mut sys::CUmemPoolPtrExportData);
        // Functions since CUDA 11.3. Since CUDA 12.3, the second version replaces the first and also returns edges.
        cuStreamGetCaptureInfo_v2 = "cuStreamGetCaptureInfo_v2" (
            CUstream, *mut c_uint, *mut c_ulonglong, *mut CUgraph, *mut *const CUgraphNode, *mut usize
        );
        cuStreamGetCaptureInfo_v3 = "cuStreamGetCaptureInfo_v3" (
            CUstream, *mut c_uint, *mut c_ulonglong, *mut CUgraph, *mut *const CUgraphNode, *mut *const sys::CUgraphEdgeData, *mut usize
        );
        cuUserObjectCreate = "cuUserObjectCreate" (*mut sys::CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint);
        cuUserObjectRelease = "cuUserObjectRelease" (sys::CUuserObject, c_uint);
        cuGraphRetainUserObject = "cuGraphRetainUserObject" (CUgraph, sys::CUuserObject, c_uint, c_uint);
        // Function since CUDA 11.4.
        cuGraphInstantiateWithFlags = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, c_ulonglong);
        // Functions since CUDA 10. CUDA 12 has newer versions, which are not used because older drivers lack them.
        cuGraphAddKernelNode = "cuGraphAddKernelNode" (
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_KERNEL_NODE_PARAMS_v1
        );
        cuGraphExecKernelNodeSetParams = "cuGraphExecKernelNodeSetParams" (
            CUgraphExec, CUgraphNode, *const sys::CUDA_KERNEL_NODE_PARAMS_v1
        );
        // Function since CUDA 11.8.
        cuLaunchKernelEx = "cuLaunchKernelEx" (*const sys::CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        // Function since CUDA 11.7.
        cuStreamBatchMemOp = "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut sys::CUstreamBatchMemOpParams, c_uint);
        // Some platforms lack these functions, for example those without their own file system.
        cuIpcGetMemHandle = "cuIpcGetMemHandle" (*mut sys::CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle = "cuIpcOpenMemHandle_v2" (*mut CUdeviceptr, sys::CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle = "cuIpcCloseMemHandle" (CUdeviceptr);
        cuMemGetAllocationGranularity = "cuMemGetAllocationGranularity" (*mut usize, *const sys::CUmemAllocationProp, c_uint);
        cuMemCreate = "cuMemCreate" (*mut sys::CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, c_ulonglong);
        cuMemRetainAllocationHandle = "cuMemRetainAllocationHandle" (*mut sys::CUmemGenericAllocationHandle, *mut c_void);
        cuMemExportToShareableHandle = "cuMemExportToShareableHandle" (
            *mut c_void, sys::CUmemGenericAllocationHandle, c_uint, c_ulonglong
        );
        cuMemImportFromShareableHandle = "cuMemImportFromShareableHandle" (*mut sys::CUmemGenericAllocationHandle, *mut c_void, c_uint);
        cuMemAddressReserve = "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        cuMemAddressFree = "cuMemAddressFree" (CUdeviceptr, usize);
        cuMemMap = "cuMemMap" (CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
        cuMemUnmap = "cuMemUnmap" (CUdeviceptr, usize);
        cuMemSetAccess = "cuMemSetAccess" (CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        cuMemRelease = "cuMemRelease" (sys::CUmemGenericAllocationHandle);
        // Function since CUDA 13.0. The version of CUDA 12.8 has one more argument and is not used.
        cuMemcpyBatchAsync = "cuMemcpyBatchAsync_v2" (
            *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize, usize, CUstream
        );
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// Calls a function of the driver. Converts a result code other than success to an error that names the function. Must be used in an
/// `unsafe` block.
macro_rules! call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.$function)($($argument),*))
    };
}
pub(super) use call;

/// Calls a function that a driver may lack. If the driver lacks it, returns an error. Otherwise converts the result code like `call!`.
macro_rules! call_optional {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $driver.$function {
            Some(function) => $driver.check(stringify!($function), function($($argument),*)),
            None => Err($driver.lacks(stringify!($function))),
        }
    };
}
pub(super) use call_optional;

impl Driver {
    fn load() -> Result<Driver, BackendError> {
        check_can_load().map_err(|why| BackendError::NoDriver(format!("libcuda.so.1 cannot be loaded: {why}")))?;
        // The library name with a version number is tried first. A library without one may be a stub for linking from the CUDA toolkit,
        // without a driver. The library is loaded once and never unloaded, because it has threads and callbacks in the process.
        // SAFETY: Loading libcuda runs only its own initializers, as in every CUDA program.
        let load = |name: &str| unsafe { Library::new(name) };
        let loaded = load("libcuda.so.1").or_else(|error| load("libcuda.so").map_err(|_| error));
        let library = loaded.map_err(|error| {
            // The text of the error does not contain the cause. Only the text of the error's source, which is that of the dynamic loader,
            // contains it.
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            BackendError::NoDriver(format!("libcuda.so.1 cannot be loaded ({reason}); install NVIDIA's driver"))
        })?;
        let library = ManuallyDrop::new(library);
        // SAFETY: The loader returns the address of the function of that name. The library is never unloaded, so the address stays valid.
        unsafe { Driver::look_up(|symbol| library.get::<*mut c_void>(symbol.as_bytes()).ok().and_then(|found| NonNull::new(*found))) }
    }

    /// Returns the driver. The first call loads and initializes it. Returns [`BackendError::NoDriver`] with the reason if this fails.
    pub fn get() -> Result<&'static Driver, BackendError> {
        static DRIVER: OnceLock<Result<Driver, BackendError>> = OnceLock::new();
        let loaded = DRIVER.get_or_init(|| {
            let driver = took("driver loaded", Driver::load)?;
            // SAFETY: 0 is the only value that `cuInit` accepts for its flags.
            match took("driver initialised", || unsafe { (driver.cuInit)(0) }) {
                0 => {
                    log::debug!("CUDA driver {}.{}", driver.version() / 1000, driver.version() % 1000 / 10);
                    Ok(driver)
                }
                code => {
                    Err(BackendError::NoDriver(format!("the driver cannot be initialised: cuInit: {} (code {code})", driver.text(code))))
                }
            }
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Returns the CUDA version that the driver supports, for example 13000 for 13.0.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { (self.cuDriverGetVersion)(&mut version) };
        version
    }

    /// Returns the number of devices that are visible to the process.
    pub fn device_count(&self) -> Result<u32, BackendError> {
        let mut count = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(self, cuDeviceGetCount(&mut count)) }?;
        Ok(count.max(0) as u32)
    }

    /// Returns the value of a device attribute, or 0 if the driver does not know the attribute.
    pub fn attribute(&self, attribute: sys::CUdevice_attribute, device: CUdevice) -> i32 {
        let mut value = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { (self.cuDeviceGetAttribute)(&mut value, attribute as c_uint, device) };
        value
    }

    /// Returns the driver's unique ID of a stream. The ID of a default stream depends on the current context. Returns `None` if the driver
    /// has no stream IDs.
    pub fn stream_id(&self, stream: CUstream) -> Option<u64> {
        let mut id = 0;
        // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
        let code = unsafe { self.cuStreamGetId?(stream, &mut id) };
        (code == 0).then_some(id)
    }

    /// Returns the driver's unique ID of a device's primary context, or the error `CONTEXT_IS_DESTROYED` if the context was lost by a
    /// reset. The context's handle is not sufficient, because a context that is created later may have the same handle. Returns 0 if the
    /// driver has no context IDs. The call takes 32 ns (H200, driver 580).
    pub fn context_id(&self, device: CUdevice, context: CUcontext) -> Result<u64, Code> {
        if let Some(ask) = self.cuCtxGetId {
            let mut id = 0;
            // SAFETY: `context` is the handle of a primary context. The output is a variable that outlives the call.
            let code = unsafe { ask(context, &mut id) };
            return if code == 0 { Ok(id) } else { Err(code) };
        }
        let (mut flags, mut active) = (0, 0);
        // SAFETY: The driver writes to variables that outlive the call.
        match unsafe { (self.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) } {
            0 if active != 0 => Ok(0),
            0 => Err(code::CONTEXT_IS_DESTROYED),
            code => Err(code),
        }
    }

    /// Returns an error that names the driver function `what` if `code` is not success.
    pub fn check(&self, what: &'static str, code: Code) -> Result<(), BackendError> {
        if code == 0 { Ok(()) } else { Err(self.error(what, code)) }
    }

    /// Returns the driver's ID of a stream. The ID is never reused in the process. Returns `None` if the driver has no stream IDs. Also
    /// returns `None` while the stream is being captured, because the query would invalidate the capture.
    pub fn number_outside_capture(&self, raw: CUstream) -> Option<u64> {
        let mut status = 0;
        // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
        let code = unsafe { (self.cuStreamIsCapturing)(raw, &mut status) };
        if code == 0 && status == 0 { self.stream_id(raw) } else { None }
    }

    /// Returns the number that identifies a stream in [`FailedWaits`](crate::backend::failed_waits::FailedWaits). This is the driver's ID
    /// of the stream. If there is none, it is the stream's handle, which several default streams share. Requires the stream's context to be
    /// current.
    pub fn number_of(&self, raw: CUstream) -> u64 {
        self.number_outside_capture(raw).unwrap_or(raw.addr() as u64)
    }

    /// True if the stream `raw` is being captured.
    pub fn is_capturing(&self, raw: CUstream) -> Result<bool, BackendError> {
        let mut status = 0;
        // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
        self.check("cuStreamIsCapturing", unsafe { (self.cuStreamIsCapturing)(raw, &mut status) })?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32 {
            return Err(BackendError::NotSupported(
                "the capture of the stream was invalidated by an earlier call; end the capture first".into(),
            ));
        }
        Ok(status != 0)
    }

    /// Returns the error for a call of the driver function `what`, which this driver lacks.
    #[cold]
    pub fn lacks(&self, what: &str) -> BackendError {
        let version = self.version();
        BackendError::NotSupported(format!(
            "the driver for CUDA {}.{} has no {what}: install a newer driver",
            version / 1000,
            version % 1000 / 10
        ))
    }

    /// Returns an error that names the driver function `what` and describes the result code.
    #[cold]
    pub fn error(&self, what: &str, code: Code) -> BackendError {
        let mut reason = self.text(code);
        if is_sticky(code) {
            reason.push_str("; the GPU's context is lost with this error: every later call fails, and only a new process can use the GPU");
        }
        BackendError::Driver { what: what.to_owned(), reason, code: i64::from(code) }
    }

    /// Returns the name and the description of a result code of the driver.
    fn text(&self, code: Code) -> String {
        let say = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: The output is a variable that outlives the call. The driver sets it to NULL or to the address of a static string.
            unsafe {
                function(code, &mut text);
                if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
            }
        };
        let name = say(self.cuGetErrorName).unwrap_or_else(|| "an error for which the driver has no name".into());
        say(self.cuGetErrorString).map_or(name.clone(), |text| format!("{name}: {text}"))
    }
}

/// Guard that makes a context current on this thread. Dropping the guard restores the previous context.
pub(super) struct Current {
    driver: &'static Driver,
    pushed: bool,
}

impl Current {
    pub fn enter(driver: &'static Driver, context: CUcontext) -> Result<Current, BackendError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(driver, cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != context;
        if pushed {
            // SAFETY: The driver created the context, and it is retained, so it exists.
            unsafe { call!(driver, cuCtxPushCurrent(context)) }?;
        }
        Ok(Current { driver, pushed })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: The top of the context stack is the context that `enter` pushed, because contexts that were pushed later have been
            // popped again.
            unsafe { (self.driver.cuCtxPopCurrent)(&mut popped) };
        }
    }
}

/// Converts an integer to the handle of a driver object that this integer represents.
pub(super) fn handle<T>(number: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(number)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is used like any other. This backend cannot panic while it holds a lock and has changed the value only partly.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Guard that allows this thread to make calls that are forbidden while any thread captures a stream, for example to create events, to
/// allocate memory or to query. These are calls of the library itself and do not become part of the capture.
pub(super) struct OutsideCapture {
    driver: &'static Driver,
    mode: c_uint,
}

impl OutsideCapture {
    pub fn enter(driver: &'static Driver) -> OutsideCapture {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: The driver reads and writes a variable that outlives the call.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        OutsideCapture { driver, mode }
    }
}

impl Drop for OutsideCapture {
    fn drop(&mut self) {
        // SAFETY: The driver reads and writes a field of this guard, which outlives the call.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut self.mode) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks up the functions of a driver that lacks the function `absent`. No function of the result may be called.
    fn driver_without(absent: &'static str) -> Result<Driver, BackendError> {
        // SAFETY: The test never calls the functions, so their addresses need not be valid.
        unsafe { Driver::look_up(|symbol| (symbol != absent).then_some(NonNull::dangling())) }
    }

    #[test]
    fn a_driver_that_lacks_what_every_driver_has_is_none_and_the_reason_names_it() {
        for absent in ["cuInit", "cuMemcpyAsync", "cuMemHostRegister_v2", "cuGraphLaunch"] {
            let refused = driver_without(absent).map(drop);
            assert!(matches!(&refused, Err(BackendError::NoDriver(why)) if why.contains(absent)), "{refused:?}");
        }
    }

    #[test]
    fn a_driver_may_lack_what_is_newer_than_it() {
        let all = driver_without("nothing").expect("a driver");
        assert!(all.cuMemcpyBatchAsync.is_some() && all.cuGraphInstantiateWithFlags.is_some());
        let old = driver_without("cuMemcpyBatchAsync_v2").expect("a driver");
        assert!(old.cuMemcpyBatchAsync.is_none() && old.cuGraphInstantiateWithFlags.is_some());
        let older = driver_without("cuGraphInstantiateWithFlags").expect("a driver");
        assert!(older.cuMemcpyBatchAsync.is_some() && older.cuGraphInstantiateWithFlags.is_none());
        assert!(all.without("cuMemcpyBatchAsync").cuMemcpyBatchAsync.is_none());
    }
}
