//! Opens a context by options and environment: the only place that names a concrete backend.

use super::config::{BackendChoice, Config};
use super::context::{Context, ContextOptions};
use super::error::Error;
use crate::backend::{Backend, host::HostBackend};
use crate::topology::{self, Machine};
use std::sync::Arc;

impl Context {
    /// A context for these options and this environment.
    pub fn open(options: &ContextOptions, environment: Config) -> Result<Context, Error> {
        let mut config = environment;
        if let Some(backend) = options.backend {
            config.backend = backend;
        }
        if let Some(topology) = &options.topology {
            config.topology = Some(topology.clone());
        }
        if let Some(bytes) = options.staging_bytes {
            config.staging_bytes = bytes;
        }
        if let Some(plans) = options.cache_plans {
            config.cache_plans = plans;
        }
        let (machine, backend): (Machine, Arc<dyn Backend>) = match config.backend {
            BackendChoice::Auto => {
                log::info!("using the host backend: this build has no CUDA backend");
                host(&config)?
            }
            BackendChoice::Host => host(&config)?,
            BackendChoice::Cuda => {
                return Err(Error::NotSupported(
                    "backend cuda: this build of mpgpu has no CUDA backend; use host or auto (MP_BACKEND_HOST, MPGPU_BACKEND=host)"
                        .to_owned(),
                ));
            }
        };
        Context::with_backend(Arc::new(machine), backend, config)
    }
}

/// Virtual devices: as many as the topology in force has.
fn host(config: &Config) -> Result<(Machine, Arc<dyn Backend>), Error> {
    let name = config.topology.as_deref().unwrap_or(topology::DEFAULT_PRESET);
    let machine = Machine::new(topology::load(name)?)?;
    let backend = HostBackend::new(machine.gpu_count(), machine.host_count());
    Ok((machine, Arc::new(backend)))
}
