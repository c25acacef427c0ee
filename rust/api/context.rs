//! Contexts of the Rust API: the library's state for one process.

use crate::buffer::End;
use crate::plan::{Plan, Transfer};
use mpgpu_contexts::{self as context, Config, ContextOptions, DeviceStatistics, Error, PlanOptions, Statistics};
use mpgpu_core::topology::DeviceId;
use std::sync::Arc;

/// Context: the library's state for one process: backend, topology, plan cache, streams and memory. Usually a process creates one context.
/// A clone refers to the same context.
///
/// Buffers, streams and plans also keep their context alive. Dropping the last reference blocks until all work of the context has finished.
#[derive(Clone, Debug)]
pub struct Context {
    /// Internal context. It is never passed to callers, because they could free memory of buffers through it.
    pub(crate) runtime: Arc<context::Context>,
}

impl Context {
    /// Creates a context: chooses the backend, reads the topology, and reads the environment variables. Allocates no device memory.
    ///
    /// # Errors
    ///
    /// Returns an error if an `MPGPU_` variable or the topology is invalid, or if a requested backend is not available.
    pub fn new() -> Result<Context, Error> {
        Context::with_options(&ContextOptions::default())
    }

    /// Creates a context with options. The options take precedence over the environment variables.
    ///
    /// ```
    /// use mpgpu::{BackendChoice, Context, ContextOptions};
    ///
    /// let virtual_devices = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..Default::default() };
    /// let ctx = Context::with_options(&virtual_devices)?;
    /// assert_eq!((ctx.gpus(), ctx.backend()), (4, "host"));
    ///
    /// let unknown = ContextOptions { topology: Some("no such machine".into()), ..virtual_devices };
    /// assert!(Context::with_options(&unknown).unwrap_err().to_string().contains("no such machine"));
    /// # Ok::<(), mpgpu::Error>(())
    /// ```
    pub fn with_options(options: &ContextOptions) -> Result<Context, Error> {
        Ok(Context { runtime: Arc::new(context::Context::open(options, Config::from_environment()?)?) })
    }

    /// Returns the name of the backend: `cuda` for GPUs, or `host` for virtual devices that CPU threads implement.
    pub fn backend(&self) -> &'static str {
        self.runtime.backend().name()
    }

    /// Returns the number of GPUs of the context. The GPUs are numbered from 0.
    pub fn gpus(&self) -> u32 {
        self.runtime.machine().gpu_count()
    }

    /// Returns the number of NUMA domains of the host memory. The domains are numbered from 0.
    pub fn host_domains(&self) -> u32 {
        self.runtime.machine().host_count()
    }

    /// Plans a batch of transfers together, so that they do not compete for links. A transfer is a pair of a destination and a source of
    /// equal size. Blocks for some microseconds. Planning the same transfers again takes only a look-up.
    ///
    /// The transfers run in no particular order. No destination may overlap another destination or a source.
    ///
    /// # Errors
    ///
    /// Returns an error if the source and destination of a transfer differ in size, overlap or belong to another context, or if no path
    /// connects their devices. The text contains the index of the transfer.
    pub fn plan<T: Into<Transfer>>(&self, transfers: impl IntoIterator<Item = T>) -> Result<Plan, Error> {
        self.plan_with(transfers, &PlanOptions::default())
    }

    /// Plans a batch of transfers together, with options, for example the maximum number of paths. [`plan`](Context::plan) describes the
    /// rules for the transfers and the errors.
    ///
    /// ```
    /// # use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, PlanOptions};
    /// # let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..Default::default() };
    /// # let ctx = Context::with_options(&options)?;
    /// let a = Buffer::<u8>::zeroed(&ctx, Device::gpu(0), 64 << 20)?;
    /// let b = Buffer::<u8>::zeroed(&ctx, Device::gpu(1), 64 << 20)?;
    /// assert!(ctx.plan([(&b, &a)])?.paths() > 1);
    /// assert_eq!(ctx.plan_with([(&b, &a)], &PlanOptions { max_paths: Some(1), ..Default::default() })?.paths(), 1);
    /// # Ok::<(), mpgpu::Error>(())
    /// ```
    pub fn plan_with<T: Into<Transfer>>(&self, transfers: impl IntoIterator<Item = T>, options: &PlanOptions) -> Result<Plan, Error> {
        let transfers: Vec<Transfer> = transfers.into_iter().map(Into::into).collect();
        let mut planned = Vec::with_capacity(transfers.len());
        for (index, Transfer { dst, src }) in transfers.iter().enumerate() {
            self.check_ends(index, [dst, src])?;
            if dst.bytes != src.bytes {
                return Err(refused(
                    index,
                    format!("the destination has {} bytes and the source {}: they must have the same size", dst.bytes, src.bytes),
                ));
            }
            planned.push(context::Transfer {
                dst: dst.address,
                dst_device: dst.device,
                src: src.address,
                src_device: src.device,
                bytes: dst.bytes,
            });
        }
        let plan = self.runtime.plan(&planned, options)?;
        let keep = transfers.into_iter().flat_map(|transfer| [transfer.dst.keep, transfer.src.keep]).flatten().collect();
        Ok(Plan::own(self.clone(), plan, keep))
    }

    /// Rejects memory of another context, which could be freed while this context still copies.
    pub(crate) fn check_ends<'a>(&self, index: usize, ends: impl IntoIterator<Item = &'a End>) -> Result<(), Error> {
        let is_foreign = |end: &End| end.context.as_ref().is_some_and(|context| !self.is(context));
        if ends.into_iter().any(is_foreign) {
            return Err(refused(
                index,
                "the source or destination is memory of another context: allocate all memory of a plan in one context".into(),
            ));
        }
        Ok(())
    }

    pub(crate) fn is(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.runtime, &other.runtime)
    }

    /// Returns a description of the context as text: the machine, and each setting with its origin, for example an environment variable.
    pub fn describe(&self) -> String {
        self.runtime.describe()
    }

    /// Returns the statistics of the context since its creation.
    pub fn statistics(&self) -> Statistics {
        self.runtime.statistics()
    }

    /// Returns the resources that the context holds on a device now.
    ///
    /// # Errors
    ///
    /// Returns an error if the device does not exist.
    pub fn device_statistics(&self, device: DeviceId) -> Result<DeviceStatistics, Error> {
        self.runtime.device_statistics(device)
    }
}

pub(crate) fn refused(transfer: usize, reason: String) -> Error {
    Error::Option { name: "transfer", value: transfer.to_string(), reason }
}
