//! Files as sources of transfers.

use crate::buffer::{End, Keep};
use crate::context::Context;
use mpgpu_contexts::{Caching, Error};
use mpgpu_core::topology::DeviceId;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

/// File whose bytes can be the source of transfers. The library maps the whole file read-only, and several threads read the file when it is
/// copied. A clone refers to the same mapping. Dropping the last clone blocks until all work that the context has enqueued so far has
/// finished, and then removes the mapping.
///
/// ```
/// # use mpgpu::{BackendChoice, Buffer, Caching, Context, ContextOptions, Device, MappedFile, Stream};
/// # let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..Default::default() };
/// # let ctx = Context::with_options(&options)?;
/// # let path = std::env::temp_dir().join(format!("mpgpu-{}.bin", std::process::id()));
/// # std::fs::write(&path, [7_u8; 5000])?;
/// let file = MappedFile::new(&ctx, &std::fs::File::open(&path)?, Caching::Keep)?;
/// let on_gpu = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 1000)?;
/// let stream = Stream::new(&ctx, Device::gpu(0))?;
/// ctx.plan([(&on_gpu, file.bytes(1000..5000))])?.enqueue(&stream)?;
/// assert_eq!(on_gpu.to_vec(&stream)?, [0x0707_0707; 1000]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// If the file is truncated, executions that need the missing bytes fail. If the file is modified during an execution, the destination may
/// contain a mixture of old and new bytes.
#[derive(Clone, Debug)]
pub struct MappedFile(Arc<Mapping>);

#[derive(Debug)]
struct Mapping {
    context: Context,
    address: u64,
    bytes: u64,
}

impl MappedFile {
    /// Maps a regular file that is open for reading. The descriptor is duplicated. With [`Caching::Bypass`], bytes that the page cache of
    /// the system does not contain are read by direct I/O.
    ///
    /// # Errors
    ///
    /// Returns an error if the file is empty, is not a regular file, is not open for reading, or if the system cannot map it.
    pub fn new(ctx: &Context, file: &impl AsFd, caching: Caching) -> Result<MappedFile, Error> {
        let (address, bytes) = ctx.runtime.map_file(file.as_fd(), caching)?;
        Ok(MappedFile(Arc::new(Mapping { context: ctx.clone(), address, bytes })))
    }

    /// Returns the size of the mapping in bytes.
    pub fn size(&self) -> u64 {
        self.0.bytes
    }

    /// Returns a range of the file, for use as the source of a transfer. A transfer whose destination is in a mapped file fails.
    ///
    /// # Panics
    ///
    /// Panics if the range is not within the file.
    pub fn bytes(&self, range: Range<u64>) -> End {
        let Mapping { context, address, bytes } = &*self.0;
        assert!(range.start <= range.end && range.end <= *bytes, "bytes {range:?} are not within the {bytes} bytes of the file");
        End {
            address: address + range.start,
            device: DeviceId::HOST,
            bytes: range.end - range.start,
            context: Some(context.clone()),
            keep: Some(Keep::new(self.0.clone(), false)),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Err(error) = self.context.runtime.unmap_file(self.address) {
            log::warn!("could not unmap the file at {:#x}: {error}", self.address);
        }
    }
}
