//! Memory of a context, and sources and destinations of transfers.

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

/// Element type of a buffer: a type for which any bytes are a valid value, as zerocopy defines it. Numbers and arrays of them are element
/// types. A struct becomes one by deriving `FromBytes`, `IntoBytes` and `Immutable` of zerocopy 0.8.
pub trait Element: Copy + FromBytes + IntoBytes + Immutable + Send + Sync + 'static {}

impl<T: Copy + FromBytes + IntoBytes + Immutable + Send + Sync + 'static> Element for T {}

/// Memory that the context has allocated. It is initialised before safe code can read it.
#[derive(Debug)]
struct Memory {
    context: Context,
    address: u64,
    device: DeviceId,
}

impl Drop for Memory {
    /// Blocks until all work that the context has enqueued has finished, because that work may use this memory.
    fn drop(&mut self) {
        if let Err(error) = self.context.runtime.free(self.address) {
            log::warn!("could not free memory at {:#x} of {}: {error}", self.address, self.device.in_words());
        }
    }
}

/// Array of elements in the memory of one device. A clone refers to the same memory. Dropping the last clone frees the memory. Like
/// `cudaFree`, that drop blocks until all work that the context has enqueued so far has finished.
#[derive(Clone)]
pub struct Buffer<T> {
    memory: Arc<Memory>,
    len: usize,
    of: PhantomData<T>,
}

/// Range of the elements of a buffer, for use as the source or destination of transfers. Keeps the buffer alive.
#[derive(Clone, Debug)]
pub struct Slice<T> {
    buffer: Buffer<T>,
    range: Range<usize>,
}

impl<T: Element> Buffer<T> {
    /// Allocates `len` elements on `device`. All bytes are 0. With `Device::HOST` this is pinned host memory that GPUs can access.
    ///
    /// # Errors
    ///
    /// Returns an error if the device does not exist or has not enough free memory.
    pub fn zeroed(ctx: &Context, device: DeviceId, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::allocate(ctx, device, len, false)?.cleared()
    }

    /// Allocates `len` elements on `device`, in memory that other processes can map. Other ranks of a [`Node`](crate::Node) can access a
    /// host buffer only if this function allocated it. Other ranks can also access GPU memory from [`zeroed`](Buffer::zeroed).
    ///
    /// # Errors
    ///
    /// Returns the errors of `zeroed`, and an error if the system cannot create the shared memory file.
    pub fn shared(ctx: &Context, device: DeviceId, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::allocate(ctx, device, len, true)?.cleared()
    }

    /// Allocates a buffer on `device` and copies the elements of a slice into it. Blocks until the copy has finished.
    ///
    /// # Errors
    /// Returns the errors of `zeroed`.
    pub fn from_slice(ctx: &Context, device: DeviceId, elements: &[T]) -> Result<Buffer<T>, Error> {
        let buffer = Buffer::allocate(ctx, device, elements.len(), false)?;
        buffer.write(&Stream::new(ctx, device)?, elements)?;
        Ok(buffer)
    }

    /// Allocates an uninitialised buffer. The caller must write all of its bytes before safe code can access the buffer.
    fn allocate(ctx: &Context, device: DeviceId, len: usize, is_shared: bool) -> Result<Buffer<T>, Error> {
        // The library allocates no empty memory.
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes.max(1)).ok());
        let bytes = bytes.ok_or_else(|| Error::Option {
            name: "len",
            value: len.to_string(),
            reason: "the buffer would be larger than the address space".into(),
        })?;
        let address = if is_shared { ctx.runtime.allocate_shared(device, bytes) } else { ctx.runtime.allocate(device, bytes) }?;
        Ok(Buffer { memory: Arc::new(Memory { context: ctx.clone(), address, device }), len, of: PhantomData })
    }

    fn cleared(self) -> Result<Buffer<T>, Error> {
        const AT_ONCE: usize = 8 << 20;
        let bytes = self.len * size_of::<T>();
        if self.is_reached() {
            // SAFETY: the CPU can access this memory, which is `bytes` long and not yet visible to others.
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

    /// Returns a range of the elements, for use as the source or destination of transfers.
    ///
    /// # Panics
    ///
    /// Panics if the range exceeds the buffer, like the slices of the standard library.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice<T> {
        // Uses a wider type than an index, because the end of `0..=usize::MAX` would overflow.
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
        assert!(
            start <= end && end <= self.len as u128,
            "elements {start} to {end} are not within the {} elements of the buffer",
            self.len
        );
        Slice { buffer: self.clone(), range: start as usize..end as usize }
    }

    /// Copies `elements` into the buffer, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    ///
    /// Returns an error if the number of elements differs from that of the buffer, if the stream belongs to another context, or if the
    /// stream is being captured. Also returns errors of earlier work in the stream.
    pub fn write(&self, stream: &Stream, elements: &[T]) -> Result<(), Error> {
        self.slice(..).write(stream, elements)
    }

    /// Copies the elements of the buffer into `elements`, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`write`](Buffer::write).
    pub fn read(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Error> {
        self.slice(..).read(stream, elements)
    }

    /// Copies the elements of the buffer into a new vector, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`write`](Buffer::write).
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.slice(..).to_vec(stream)
    }

    /// Returns the elements as a slice, without a copy. Returns `None` if the CPU cannot access them. The CPU can access host memory, and
    /// on the host backend all memory.
    ///
    /// # Safety
    ///
    /// While the slice exists, nothing may write to the buffer. This includes enqueued executions of this process or another rank, and
    /// other slices.
    pub unsafe fn as_slice(&self) -> Option<&[T]> {
        // SAFETY: the memory is that long, initialised, aligned to 256 bytes and kept alive by `self`. The caller guarantees the rest.
        self.is_reached().then(|| unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// Returns the elements as a mutable slice, without a copy. Returns `None` if the CPU cannot access them.
    ///
    /// # Safety
    ///
    /// While the slice exists, nothing else may read or write the buffer.
    #[allow(clippy::mut_from_ref)] // A handle to memory, like a pointer.
    pub unsafe fn as_mut_slice(&self) -> Option<&mut [T]> {
        // SAFETY: as in `as_slice`.
        self.is_reached().then(|| unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) })
    }
}

impl<T> Buffer<T> {
    /// Returns the number of elements of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device that owns the memory of the buffer.
    pub fn device(&self) -> DeviceId {
        self.memory.device
    }

    /// Returns the address of the first element, to pass to kernels. The CPU may be unable to access this memory.
    pub fn as_ptr(&self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.memory.address as usize)
    }

    /// Returns true if the CPU can access the memory of the buffer.
    fn is_reached(&self) -> bool {
        self.memory.device.is_host() || self.memory.context.backend() == "host"
    }
}

impl<T: Element> Slice<T> {
    /// Returns the number of elements in the range.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns true if the range has no elements.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Copies `elements` into this range, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    /// Returns the errors of [`Buffer::write`].
    pub fn write(&self, stream: &Stream, elements: &[T]) -> Result<(), Error> {
        // SAFETY: `copy_now` returns when the elements have been read.
        let here = unsafe { End::of_host(elements.as_ptr().cast(), size_of_val(elements)) };
        copy_now(&self.buffer.memory.context, stream, self.into(), here)
    }

    /// Copies the elements of this range into `elements`, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    /// Returns the errors of [`Buffer::write`].
    pub fn read(&self, stream: &Stream, elements: &mut [T]) -> Result<(), Error> {
        // SAFETY: `copy_now` returns when the elements have been written, and any bytes are valid elements.
        let here = unsafe { End::of_host(elements.as_mut_ptr().cast_const().cast(), size_of_val(elements)) };
        copy_now(&self.buffer.memory.context, stream, here, self.into())
    }

    /// Copies the elements of this range into a new vector, after all earlier work in `stream`. Blocks until the copy has finished.
    ///
    /// # Errors
    /// Returns the errors of [`Buffer::write`].
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        let mut elements = vec![T::new_zeroed(); self.len()];
        self.read(stream, &mut elements)?;
        Ok(elements)
    }
}

/// Copies bytes from `src` to `dst` in `stream`. Blocks until the copy has ended, even if the copy fails.
fn copy_now(context: &Context, stream: &Stream, dst: End, src: End) -> Result<(), Error> {
    // A captured copy would run later, when the caller's elements may no longer exist.
    stream.refuse_capture()?;
    let outcome = context.plan_with([(dst, src)], &PlanOptions::default())?.execute(stream).and_then(Request::wait);
    if outcome.is_err() {
        // The driver may have rejected the second part of the copy while the first still runs.
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

/// Reference that keeps an object alive which owns the memory of a transfer.
#[derive(Clone, Debug)]
pub(crate) struct Keep {
    _memory: Arc<dyn Any + Send + Sync>,
    /// True if the memory was not allocated by the context. Freeing such memory does not block until the work of the context has finished,
    /// so a plan that is dropped must block itself.
    pub is_foreign: bool,
}

impl Keep {
    pub(crate) fn new(memory: Arc<dyn Any + Send + Sync>, is_foreign: bool) -> Keep {
        Keep { _memory: memory, is_foreign }
    }
}

/// Source or destination of a transfer: a memory range on a device. Keeps its buffer alive.
#[derive(Clone, Debug)]
pub struct End {
    pub(crate) address: u64,
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    pub(crate) context: Option<Context>,
    pub(crate) keep: Option<Keep>,
}

impl End {
    /// Creates a source or destination from the address of memory that the caller has allocated: a CUDA device pointer or host memory.
    /// `bytes` is the size of the memory range. With [`Device::AUTO`] the library determines the device from the address.
    ///
    /// [`Device::AUTO`]: crate::Device::AUTO
    ///
    /// # Safety
    ///
    /// The library does not check the address. The memory must be allocated when a plan that uses it is created. It must stay allocated
    /// until that plan has been dropped, or until all executions of the plan have ended and none follows. For a copy of pieces, it must
    /// stay allocated until the copy has ended. If the memory is a destination, any bytes must be valid values of its type. Code that reads
    /// or writes the memory must be ordered with each execution, by streams or by waiting.
    pub unsafe fn from_raw(address: u64, device: DeviceId, bytes: u64) -> End {
        End { address, device, bytes, context: None, keep: None }
    }

    /// Creates a source or destination from host memory of the caller.
    ///
    /// # Safety
    /// The requirements are those of `from_raw`.
    pub(crate) unsafe fn of_host(address: *const u8, bytes: usize) -> End {
        End { address: address.expose_provenance() as u64, device: DeviceId::HOST, bytes: bytes as u64, context: None, keep: None }
    }

    /// Returns the size of the memory range in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the device that owns the memory, or `Device::AUTO` if the library finds it from the address.
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
