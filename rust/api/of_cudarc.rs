//! Slices and streams of cudarc, of the version that the workspace has.

use crate::buffer::{Element, End, Keep};
use crate::context::Context;
use crate::stream::Stream;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use mpgpu_contexts::Error;
use mpgpu_core::topology::DeviceId;
use std::sync::Arc;

/// cudarc's memory means nothing to virtual devices.
fn check(ctx: &Context) -> Result<(), Error> {
    if ctx.backend() == "cuda" {
        return Ok(());
    }
    Err(Error::NotSupported("memory and streams of cudarc are of GPUs, and this context has virtual devices on CPU threads".into()))
}

impl End {
    /// All elements of a slice of cudarc, which the end keeps. Waits for the work of the slice's stream, in which it was allocated.
    ///
    /// cudarc knows nothing of executions: order them with its own work by a common stream ([`Stream::of_cudarc`]) or by waiting.
    ///
    /// # Errors
    /// On the host backend; of the driver.
    pub fn of_cudarc<T: Element>(ctx: &Context, slice: &Arc<CudaSlice<T>>) -> Result<End, Error> {
        check(ctx)?;
        let stream = slice.stream();
        stream.synchronize().map_err(|error| Error::NotSupported(format!("the stream of a slice of cudarc has failed: {error}")))?;
        let address = slice.device_ptr(stream).0;
        let bytes = slice.num_bytes() as u64;
        Ok(End { address, device: DeviceId::AUTO, bytes, context: Some(ctx.clone()), keep: Some(Keep::new(slice.clone(), true)) })
    }
}

impl Stream {
    /// A stream of cudarc, which this keeps.
    ///
    /// # Errors
    /// On the host backend.
    pub fn of_cudarc(ctx: &Context, stream: &Arc<CudaStream>) -> Result<Stream, Error> {
        check(ctx)?;
        Ok(Stream::kept(ctx, stream.cu_stream().addr(), stream.clone()))
    }
}
