//! Implements NVTX ranges for profilers: opens one range in the domain `mpgpu` around each call that plans or executes.
//!
//! The library links to no NVTX library. A profiler that supports NVTX sets `NVTX_INJECTION64_PATH` to the path of its own library. This
//! module loads that library, calls its function `InitializeInjectionNvtx2` and passes it tables of empty function pointers ("slots"). The
//! profiler's library stores its functions in the slots of the NVTX calls that it wants to observe. This protocol is defined by
//! `nvtxDetail/nvtxInit.h` and `nvtxTypes.h` of NVTX 3. NVIDIA's crate implements it by compiling the C headers, which would require
//! libclang wherever mpgpu is built.
//!
//! The variable is read once, when the process creates its first context. If no profiler is attached, a range costs one relaxed atomic
//! load.

use crate::backend::static_program::check_can_load;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::{null, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering, fence};

/// Call of the library around which a range is opened.
#[derive(Copy, Clone, Debug)]
pub enum Call {
    /// The call makes a plan or finds it in the cache.
    Plan,
    /// The call executes a plan.
    Execute,
}

/// Open NVTX range of the calling thread. The range ends when the value is dropped. The value must stay on its thread, because ranges nest
/// per thread.
#[must_use]
pub struct NvtxRange {
    profiler: Option<&'static Profiler>,
    _of_this_thread: PhantomData<*const ()>,
}

/// Opens a range that shows the size of the batch in bytes. `bytes`, which returns this size, is called only if a profiler is attached.
#[inline]
pub fn range(call: Call, bytes: impl FnOnce() -> u64) -> NvtxRange {
    let profiler = PROFILER.load(Ordering::Relaxed);
    if profiler.is_null() {
        return NvtxRange { profiler: None, _of_this_thread: PhantomData };
    }
    fence(Ordering::Acquire);
    // SAFETY: the pointer is written once, with all that it points to, before the release store that pairs with the fence; it is never
    // freed.
    let profiler = unsafe { &*profiler };
    profiler.push(call, bytes());
    NvtxRange { profiler: Some(profiler), _of_this_thread: PhantomData }
}

impl Drop for NvtxRange {
    #[inline]
    fn drop(&mut self) {
        if let Some(profiler) = self.profiler {
            // SAFETY: the function and the domain belong to the profiler; the innermost open range of this thread belongs to this library.
            unsafe { (profiler.pop)(profiler.domain) };
        }
    }
}

/// Attaches the profiler that the environment names, if any. Only the first call in a process has an effect.
pub fn attach() {
    static ATTACH: Once = Once::new();
    ATTACH.call_once(|| {
        let Some(path) = std::env::var_os("NVTX_INJECTION64_PATH") else { return };
        match Profiler::load(&path) {
            // The profiler is leaked, because its library also stays loaded for the rest of the process.
            Ok(profiler) => PROFILER.store(Box::into_raw(Box::new(profiler)), Ordering::Release),
            Err(why) => log::info!("no NVTX ranges, because the profiler of NVTX_INJECTION64_PATH={} {why}", path.display()),
        }
    });
}

static PROFILER: AtomicPtr<Profiler> = AtomicPtr::new(null_mut());

type Domain = *mut c_void;
type Push = unsafe extern "C" fn(Domain, *const EventAttributes) -> c_int;
type Pop = unsafe extern "C" fn(Domain) -> c_int;

/// Functions of the attached profiler, with mpgpu's NVTX domain and the registered names of its ranges.
struct Profiler {
    domain: Domain,
    push: Push,
    pop: Pop,
    names: [Message; 2],
}

/// Message in the form of `nvtxEventAttributes_t`: the kind, and a text or the handle of a registered text.
#[derive(Copy, Clone)]
struct Message(i32, *const c_void);

const ASCII: i32 = 1;
const REGISTERED: i32 = 3;

/// Struct with the layout of `nvtxEventAttributes_t`.
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

const _: () = assert!(size_of::<EventAttributes>() == 48);

/// Value of `NVTX_VERSION`, which is part of the attributes and of the export table.
const VERSION: u16 = 3;
/// Value of `NVTX_PAYLOAD_TYPE_UNSIGNED_INT64`.
const UNSIGNED: i32 = 1;

impl Profiler {
    fn load(path: &std::ffi::OsStr) -> Result<Profiler, String> {
        check_can_load()?;
        type Initialize = unsafe extern "C" fn(unsafe extern "C" fn(u32) -> *const c_void) -> c_int;
        for (table, slots) in TABLES.iter().zip(&SLOTS).zip(SIZES).map(|((table, slots), size)| (&table[..size], slots)) {
            for (entry, slot) in table.iter().zip(slots).skip(1) {
                entry.store((&raw const *slot).cast_mut(), Ordering::Relaxed);
            }
        }
        // SAFETY: loading runs the library's initialisers, as the user who set the variable requests.
        let library = unsafe { Library::new(path) }.map_err(|error| format!("cannot be loaded: {error}"))?;
        // SAFETY: the NVTX protocol defines this type.
        let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2") };
        let initialize = *initialize.map_err(|_| "has no InitializeInjectionNvtx2")?;
        // SAFETY: as the NVTX protocol requires, the function is called once, and the tables that `export_table` returns live for ever.
        if unsafe { initialize(export_table) } == 0 {
            return Err("failed to initialise".into());
        }
        // The library keeps pointers to our tables, so it must stay loaded from here on.
        std::mem::forget(library);
        let function = |id: usize| Some(SLOTS[CORE2][id].load(Ordering::Acquire)).filter(|function| !function.is_null());
        let (Some(create), Some(push), Some(pop)) = (function(DOMAIN_CREATE), function(DOMAIN_PUSH), function(DOMAIN_POP)) else {
            return Err("does not support ranges".into());
        };
        // SAFETY: the NVTX protocol defines these types for these slots.
        let (create, push, pop) = unsafe {
            (
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> Domain>(create),
                std::mem::transmute::<*mut c_void, Push>(push),
                std::mem::transmute::<*mut c_void, Pop>(pop),
            )
        };
        // SAFETY: the text ends with NUL.
        let domain = unsafe { create(c"mpgpu".as_ptr()) };
        let register = function(DOMAIN_REGISTER_STRING).map(|function| {
            // SAFETY: the NVTX protocol defines this type for this slot.
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Domain, *const c_char) -> *mut c_void>(function) }
        });
        let name = |text: &'static CStr| match register {
            // SAFETY: the domain is valid, and the text ends with NUL.
            Some(register) => Message(REGISTERED, unsafe { register(domain, text.as_ptr()) }),
            None => Message(ASCII, text.as_ptr().cast()),
        };
        Ok(Profiler { domain, push, pop, names: [name(c"plan"), name(c"execute")] })
    }

    fn push(&self, call: Call, bytes: u64) {
        let Message(message_type, message) = self.names[call as usize];
        let attributes = EventAttributes {
            version: VERSION,
            size: size_of::<EventAttributes>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: UNSIGNED,
            reserved: 0,
            payload: bytes,
            message_type,
            message,
        };
        // SAFETY: the function and the domain belong to the profiler; it reads the attributes only during the call.
        unsafe { (self.push)(self.domain, &attributes) };
    }
}

/// Number of slots in each table, by the number of the NVTX module (`NvtxCallbackModule`). The first slot of a table is unused. The modules
/// are: none, core, CUDA, OpenCL, CUDA runtime, core 2 with the domains, and synchronisation.
const SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const CORE2: usize = 5;
const MOST: usize = 16;

/// Index of the function `nvtxDomainRangePushEx` in the table of the NVTX module core 2 (`NvtxCallbackIdCore2`). The constants below are
/// indices of other functions in the same table.
const DOMAIN_PUSH: usize = 4;
const DOMAIN_POP: usize = 5;
const DOMAIN_REGISTER_STRING: usize = 10;
const DOMAIN_CREATE: usize = 12;

type Slot = AtomicPtr<c_void>;

/// Slots (function pointers) of all modules, in which the profiler stores its functions.
static SLOTS: [[Slot; MOST]; SIZES.len()] = [const { [const { Slot::new(null_mut()) }; MOST] }; SIZES.len()];
/// Addresses of the slots of each module, as the profiler receives them. Each list starts and ends with NULL.
static TABLES: [[AtomicPtr<Slot>; MOST + 1]; SIZES.len()] =
    [const { [const { AtomicPtr::<Slot>::new(null_mut()) }; MOST + 1] }; SIZES.len()];

/// Struct with the layout of `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    function_table: unsafe extern "C" fn(c_int, *mut *const AtomicPtr<Slot>, *mut c_uint) -> c_int,
}

/// Struct with the layout of `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionTable {
    size: usize,
    version: u32,
    reserved: u32,
    set_profiler_version: unsafe extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), function_table };
static VERSION_TABLE: VersionTable =
    VersionTable { size: size_of::<VersionTable>(), version: VERSION as u32, reserved: 0, set_profiler_version };

/// Implements `nvtxGetExportTable`, which the profiler calls to get the table with number `id`. Returns NULL for an unknown number.
unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION_TABLE).cast(),
        _ => null(),
    }
}

unsafe extern "C" fn function_table(module: c_int, table: *mut *const AtomicPtr<Slot>, size: *mut c_uint) -> c_int {
    let Some(module) = usize::try_from(module).ok().filter(|module| (1..SIZES.len()).contains(module)) else { return 0 };
    // SAFETY: according to the NVTX protocol, each pointer is NULL or may be written to.
    unsafe {
        if !size.is_null() {
            size.write(SIZES[module] as c_uint);
        }
        if !table.is_null() {
            table.write(TABLES[module].as_ptr());
        }
    }
    1
}

/// Function that the profiler calls with its own version of NVTX. Ignores the version, because every version has the functions that are
/// used here.
unsafe extern "C" fn set_profiler_version(_: u32) {}
