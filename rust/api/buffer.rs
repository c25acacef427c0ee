//! Memory of a context, and ends of transfers.

use crate::context::Context;
use crate::plan::Request;
use crate::stream::Stream;
use mpgpu_contexts::{Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Element types: those of which any bytes are a value, as zerocopy knows them, numbers and arrays of them among them. A struct derives
/// `FromBytes`, `IntoBytes` and `Immutable` of zerocopy 0.8.
pub trait Element: Copy + FromBytes + IntoBytes + Immutable + Send + Sync + 'static {}

impl<T: Copy + FromBytes + IntoBytes + Immutable + Send + Sync + 'static> Element for T {}

/// Memory that the context has allocated. Its bytes are written before anybody reads them.
#[derive(Debug)]
struct Memory {
    context: Context,
    address: u64,
    device: DeviceId,
}

impl Drop for Memory {
    /// Waits for all work that the context has enqueued, because it may use this.
    fn drop(&mut self) {
        if let Err(error) = self.context.runtime.free(self.address) {
            log::warn!("memory at {:#x} of {} was not freed: {error}", self.address, self.device.in_words());
        }
    }
}

/// Elements in memory of a device. A clone is the same memory; the last one frees it, and blocks for that as `cudaFree` does.
#[derive(Clone)]
pub struct Buffer<T> {
    memory: Arc<Memory>,
    len: usize,
    of: PhantomData<T>,
}

/// A range of a buffer, which it keeps.
#[derive(Clone, Debug)]
pub struct Slice<T> {
    buffer: Buffer<T>,
    range: Range<usize>,
}

impl<T: Element> Buffer<T> {
    /// `len` elements on `device`, all of whose bytes are 0. With `Device::HOST` host memory that GPUs reach (pinned).
    ///
    /// # Errors
    /// For a device that does not exist, and where it has no memory left.
    pub fn zeroed(ctx: &Context, device: DeviceId, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::allocate(ctx, device, len, false)?.cleared()
    }

    /// The same in memory that other processes can map, as ranks of a [`Node`](crate::Node) do. Of a GPU they map that of
    /// [`zeroed`](Buffer::zeroed) too.
    ///
    /// # Errors
    /// As `zeroed`, and where the system gives no memory file.
    pub fn shared(ctx: &Context, device: DeviceId, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::allocate(ctx, device, len, true)?.cleared()
    }

    /// The elements of a slice, copied to `device`.
    ///
    /// # Errors
    /// As `zeroed`.
    pub fn from_slice(ctx: &Context, device: DeviceId, elements: &[T]) -> Result<Buffer<T>, Error> {
        let buffer = Buffer::allocate(ctx, device, elements.len(), false)?;
        buffer.write(&Stream::new(ctx, device)?, elements)?;
        Ok(buffer)
    }

    /// Its bytes are to be written before safe code gets hold of it.
    fn allocate(ctx: &Context, device: DeviceId, len: usize, is_shared: bool) -> Result<Buffer<T>, Error> {
        // The library allocates no empty memory.
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes.max(1)).ok());
        let bytes = bytes.ok_or_else(|| Error::Option {
            name: "len",
            value: len.to_string(),
            reason: "more bytes than an address space has".into(),
        })?;
        let address = if is_shared { ctx.runtime.allocate_shared(device, bytes) } else { ctx.runtime.allocate(device, bytes) }?;
        Ok(Buffer { memory: Arc::new(Memory { context: ctx.clone(), address, device }), len, of: PhantomData })
    }

    fn cleared(self) -> Result<Buffer<T>, Error> {
        const AT_ONCE: usize = 8 << 20;
        let bytes = self.len * size_of::<T>();
        if self.is_reached() {
            // SAFETY: the CPU reaches this memory, which is `bytes` long and which nobody else knows of yet.
            unsafe { std::ptr::write_bytes(self.as_ptr().cast::<u8>(), 0, bytes) };
            return Ok(self);
        }
        let (zeros, stream) = (vec![0_u8; bytes.min(AT_ONCE)], Stream::new(&self.memory.context, self.memory.device)?);
        for at in (0..bytes).step_by(AT_ONCE) {
            let part = (bytes - at).min(AT_ONCE);
            let there = End { address: self.memory.address + at as u64, bytes: part as u64, ..End::from(&self) };
            // SAFETY: `copy_now` returns when the zeros have been read.
            copy_now(&self.memory.context, &stream, there, unsafe { End::of_host(zeros.as_ptr(), part) })?;
        }
        Ok(self)
    }

    /// The elements of a range, as an end of transfers.
    ///
    /// # Panics
    /// Where the range leaves the buffer, as slices do.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice<T> {
        // Wider than an index: the end of `0..=usize::MAX` is none.
        let start = match range.start_bound() {
            Bound::Included(start) => *start as u128,
            Bound::Excluded(start) => *start as u128 + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(end) => *end as u128 + 1,
            Bound::Excluded(end) => *end as u128,
            Bound::Unbounded => self.len as u128,
        };
        assert!(start <= end && end <= self.len as u128, "elements {start} to {end} of a buffer of {}", self.len);
        Slice { buffer: self.clone(), range: start as usize..end as usize }
    }

    /// Copies elements into the buffer, after all earlier work in `stream`, and waits for that.
    ///
    /// # Errors
    /// For another number of elements, a stream of another context or one that is being captured, and those of work in the stream.
    pub fn write(&self, stream: &Stream, elements: &[T]) -> Result<(), Error> {
        self.slice(..).write(stream, elements)
    }

    /// Copies the buffer's elements out of it, after all earlier work in `stream`, and waits for that.
    ///
    /// # Errors
    /// As [`write`](Buffer::write).
    pub fn read(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Error> {
        self.slice(..).read(stream, elements)
    }

    /// The same into a new vector.
    ///
    /// # Errors
    /// As [`write`](Buffer::write).
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.slice(..).to_vec(stream)
    }

    /// The elements, where the CPU reaches them: host memory, and all memory on the host backend. `None` elsewhere.
    ///
    /// # Safety
    /// Until the slice goes nothing writes to the buffer: no execution that was enqueued, here or by another rank, and no other slice.
    pub unsafe fn as_slice(&self) -> Option<&[T]> {
        // SAFETY: the memory is that long, initialised, aligned to 256 bytes and kept by `self`; the caller sees to the rest.
        self.is_reached().then(|| unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// The same to be written.
    ///
    /// # Safety
    /// Until the slice goes nothing else reads or writes the buffer.
    #[allow(clippy::mut_from_ref)] // A handle of memory, as a pointer is.
    pub unsafe fn as_mut_slice(&self) -> Option<&mut [T]> {
        // SAFETY: as above.
        self.is_reached().then(|| unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) })
    }
}

impl<T> Buffer<T> {
    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that they lie on.
    pub fn device(&self) -> DeviceId {
        self.memory.device
    }

    /// Their address, for kernels. The CPU may not reach it.
    pub fn as_ptr(&self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.memory.address as usize)
    }

    /// Whether the CPU reaches the memory.
    fn is_reached(&self) -> bool {
        self.memory.device.is_host() || self.memory.context.backend() == "host"
    }
}

impl<T: Element> Slice<T> {
    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// As [`Buffer::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&self, stream: &Stream, elements: &[T]) -> Result<(), Error> {
        // SAFETY: `copy_now` returns when they have been read.
        let here = unsafe { End::of_host(elements.as_ptr().cast(), size_of_val(elements)) };
        copy_now(&self.buffer.memory.context, stream, self.into(), here)
    }

    /// As [`Buffer::read`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Error> {
        // SAFETY: `copy_now` returns when they have been written, and any bytes are elements.
        let here = unsafe { End::of_host(elements.as_mut_ptr().cast_const().cast(), size_of_val(elements)) };
        copy_now(&self.buffer.memory.context, stream, here, self.into())
    }

    /// As [`Buffer::to_vec`].
    ///
    /// # Errors
    /// As there.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        let mut elements = vec![T::new_zeroed(); self.len()];
        self.read(stream, &mut elements)?;
        Ok(elements)
    }
}

/// A copy that has ended when this returns, whatever it returns.
fn copy_now(context: &Context, stream: &Stream, dst: End, src: End) -> Result<(), Error> {
    // What a graph has recorded would run later, when the caller's elements may be gone.
    stream.refuse_capture()?;
    let outcome = context.plan_with([(dst, src)], &PlanOptions::default())?.execute(stream).and_then(Request::wait);
    if outcome.is_err() {
        // The driver may have refused the second half of it.
        let _ = context.runtime.backend().synchronize();
    }
    outcome
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Memory { address, device, .. } = &*self.memory;
        write!(f, "Buffer({} elements at {address:#x} on {})", self.len, device.in_words())
    }
}

/// What keeps memory allocated.
#[derive(Clone, Debug)]
pub(crate) struct Keep {
    _memory: Arc<dyn Any + Send + Sync>,
    /// Whether freeing it does not wait for the work of the context, as memory of the context does.
    pub is_foreign: bool,
}

impl Keep {
    pub(crate) fn new(memory: Arc<dyn Any + Send + Sync>, is_foreign: bool) -> Keep {
        Keep { _memory: memory, is_foreign }
    }
}

/// Bytes that a transfer starts from or goes to. It keeps the buffer that they lie in.
#[derive(Clone, Debug)]
pub struct End {
    pub(crate) address: u64,
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    pub(crate) context: Option<Context>,
    pub(crate) keep: Option<Keep>,
}

impl End {
    /// `bytes` bytes at an address that somebody else has allocated: a device pointer of CUDA, or host memory. [`Device::AUTO`] has the
    /// library look up the device.
    ///
    /// [`Device::AUTO`]: crate::Device::AUTO
    ///
    /// # Safety
    /// The library takes the address on the caller's word. From the making of a plan with it, until that has gone or every execution of it has
    /// ended, the memory must stay allocated, hold values of which any bytes are valid where it is a destination, and be neither read nor
    /// written by code that does not come after or before the execution, in the order of streams or by waiting for it.
    pub unsafe fn from_raw(address: u64, device: DeviceId, bytes: u64) -> End {
        End { address, device, bytes, context: None, keep: None }
    }

    /// # Safety
    /// As `from_raw`.
    unsafe fn of_host(address: *const u8, bytes: usize) -> End {
        End { address: address.expose_provenance() as u64, device: DeviceId::HOST, bytes: bytes as u64, context: None, keep: None }
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that they lie on, `Device::AUTO` where the library is to look.
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl<T> From<&Buffer<T>> for End {
    fn from(buffer: &Buffer<T>) -> End {
        let Memory { context, address, device } = &*buffer.memory;
        End {
            address: *address,
            device: *device,
            bytes: (buffer.len * size_of::<T>()) as u64,
            context: Some(context.clone()),
            keep: Some(Keep::new(buffer.memory.clone(), false)),
        }
    }
}

impl<T> From<&Slice<T>> for End {
    fn from(slice: &Slice<T>) -> End {
        let whole = End::from(&slice.buffer);
        let size = size_of::<T>();
        End { address: whole.address + (slice.range.start * size) as u64, bytes: (slice.range.len() * size) as u64, ..whole }
    }
}

impl<T> From<Slice<T>> for End {
    fn from(slice: Slice<T>) -> End {
        End::from(&slice)
    }
}
