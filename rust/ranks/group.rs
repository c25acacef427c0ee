//! Defines the group of all ranks of a node: how the ranks connect, and which rank uses each GPU.

use super::exchange::{Allgather, Collective, Exchange};
use super::order::StepOrder;
use super::rendezvous::Rendezvous;
use super::sight::{Uuid, device_of, topology_of};
use crate::backend::SignalWait;
use crate::contexts::{Context, Error, GpuClaim};
use crate::ipc::{Departure, ProcessIdentity};
use crate::topology::{self, DeviceId, Machine};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// GPU of the node, with the rank that uses it.
#[derive(Clone, Debug)]
pub(super) struct NodeGpu {
    pub uuid: Uuid,
    /// Rank that uses this GPU.
    pub owner: u32,
    /// Device number of the GPU in this process. `None` if the GPU is not visible to this process.
    pub here: Option<DeviceId>,
}

/// Group of all ranks of a node. Each rank has its own object, which represents the group on that rank.
pub struct NodeGroup {
    pub(super) context: Arc<Context>,
    pub(super) exchange: Exchange,
    /// Machine that contains all GPUs of the node. Its GPUs are numbered as in [`NodeGroup::gpus`].
    pub(super) machine: Arc<Machine>,
    pub(super) gpus: Vec<NodeGpu>,
    /// Record of this rank's GPUs. Node groups that are created later in the context use only these GPUs for this process.
    _claim: Arc<GpuClaim>,
    /// Number of plans that were created on this group so far. Plans are numbered from 1.
    pub(super) plans: AtomicU64,
    pub(super) order: StepOrder,
}

/// Random number of this process, which is drawn once. See [`Hello::drawn`].
static DRAWN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(()));

/// Description of a rank. Each rank sends its description to all others when a node group is created.
#[derive(Serialize, Deserialize)]
struct Hello {
    version: String,
    backend: String,
    boot: [u8; 16],
    network: u32,
    user: u32,
    process: u32,
    /// Random number that each process draws once. It distinguishes processes of different PID namespaces, which may have equal process
    /// ids.
    drawn: u64,
    hosts: u32,
    gpus: Vec<Uuid>,
    /// Number of node groups whose creation the process had begun before this one.
    nodes: u32,
}

/// Connects `ranks` ranks over a Unix socket at `path`, and returns an allgather function that uses the connection. Rank 0 creates the
/// socket and removes it. All ranks call this function together. The call blocks until all ranks have connected, for at most a minute.
pub fn meet_at(path: &Path, rank: u32, ranks: u32) -> Result<Box<dyn Allgather>, Error> {
    Ok(Box::new(Rendezvous::meet(path, rank, ranks)?))
}

impl NodeGroup {
    /// Creates the group of the `ranks` ranks of a node. The calling process is rank `rank` and uses the GPUs in `gpus`. If `gpus` is
    /// empty, all GPUs visible to this rank are distributed among the ranks. If another node group of the context exists, only the GPUs
    /// that the oldest one has assigned to the ranks are distributed. All ranks call this function together.
    pub fn new(context: &Arc<Context>, rank: u32, ranks: u32, gather: Box<dyn Allgather>, gpus: &[DeviceId]) -> Result<NodeGroup, Error> {
        let mut exchange = Exchange::new(rank, ranks, gather)?;
        let mut call = exchange.call(Collective::CREATE)?;
        let hellos = call.all(Hello::of(context, gpus))?;
        check(&hellos, rank as usize)?;
        let gpus = share_out(&hellos, |uuid| device_of(context, uuid));
        // All ranks use the topology of the first rank whose topology covers all GPUs.
        let uuids: Vec<Uuid> = gpus.iter().map(|gpu| gpu.uuid).collect();
        let known = topology_of(context, &uuids);
        let who = call.all(known.as_ref().map(Option::is_some).map_err(Error::clone))?.into_iter().position(|knows| knows);
        let own = known?.filter(|_| who == Some(rank as usize));
        let Some(text) = call.all(Ok(own.map(|topology| topology.to_toml())))?.into_iter().flatten().next() else {
            return Err(Error::NotSupported(format!(
                "no rank knows how the {} GPUs of this node are connected: name a topology file that contains all of them \
                 (MPGPU_TOPOLOGY), run `mpgpu probe` \
                 once where all of them are visible, or make them visible to NVML",
                uuids.len()
            )));
        };
        let mut topology = topology::parse(&text)?;
        topology.costs = topology.costs.between_ranks();
        let machine = Machine::new(topology)?;
        if machine.gpu_count() as usize != gpus.len() {
            let reason = format!("the topology that was found has {} GPUs, but the ranks have {}", machine.gpu_count(), gpus.len());
            return Err(Error::Option { name: "topology", value: machine.topology().name.clone(), reason });
        }
        drop(call);
        let own = gpus.iter().filter(|gpu| gpu.owner == rank).filter_map(|gpu| gpu.here).collect();
        exchange.node = hellos[0].drawn ^ (u64::from(hellos[0].process) << 32 | u64::from(hellos[0].nodes));
        Ok(NodeGroup {
            context: context.clone(),
            exchange,
            machine: Arc::new(machine),
            gpus,
            _claim: context.state().claims.add(own),
            plans: AtomicU64::new(0),
            order: StepOrder::default(),
        })
    }

    /// Takes part in the creation of a node group as a rank that has already failed, with this reason. The creation fails on all ranks.
    pub fn refuse_new(rank: u32, ranks: u32, gather: Box<dyn Allgather>, reason: &str) -> Result<(), Error> {
        Exchange::new(rank, ranks, gather)?.call(Collective::CREATE)?.refuse(refusal(reason))
    }

    /// Takes part in a collective call on this node as a rank that has already failed, with this reason. The call fails on all ranks.
    pub fn refuse(&self, call: Collective, reason: &str) -> Result<(), Error> {
        self.exchange.call(call)?.refuse(refusal(reason))
    }

    /// Creates the group of the ranks of a node without MPI. The ranks [connect](meet_at) over a Unix socket at `path`.
    pub fn at_socket(context: &Arc<Context>, rank: u32, ranks: u32, path: &Path, gpus: &[DeviceId]) -> Result<NodeGroup, Error> {
        NodeGroup::new(context, rank, ranks, meet_at(path, rank, ranks)?, gpus)
    }

    /// Sends `mine` to all ranks. Returns the data of all ranks in rank order. The number of bytes must be equal on all ranks. All ranks
    /// call this function together, with the same `call`.
    pub fn allgather(&self, call: Collective, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.exchange.call(call)?.all_bytes(mine)
    }

    /// Sends `departure`, the report that this rank stops executing a plan, to the ranks that wait for this rank's flags. `flags` are the
    /// addresses of flag memory of those ranks. This rank sets no flags there afterwards.
    pub(super) fn leave(&self, flags: &[u64], departure: Departure) {
        flags.iter().for_each(|address| self.context.state().leave_memory(*address, departure));
    }

    /// Returns the number of the rank that this process is in the node group.
    pub fn rank(&self) -> u32 {
        self.exchange.rank
    }

    /// Returns the number of ranks in the node group.
    pub fn ranks(&self) -> u32 {
        self.exchange.ranks
    }

    /// Returns the machine model for which plans of this node are made. It contains the GPUs of all ranks.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the context with which this rank has created the node group.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the mechanism (kernel or streams) that waits for other ranks if one kernel could execute this rank's operations. The default
    /// is a kernel only if each rank has a GPU of its own. On a shared GPU, the waiting kernel of one rank may prevent the kernel of
    /// another rank from running.
    pub(super) fn signal_wait(&self) -> SignalWait {
        let has_own = |rank| self.gpus.iter().any(|gpu| gpu.owner == rank);
        let by_default = if (0..self.ranks()).all(has_own) { SignalWait::Kernel } else { SignalWait::Operation };
        self.context.config().signal_wait.unwrap_or(by_default)
    }

    /// Returns the rank that uses each GPU of the node, indexed by GPU.
    pub(super) fn owners(&self) -> Vec<u32> {
        self.gpus.iter().map(|gpu| gpu.owner).collect()
    }

    /// Returns the node-wide number of a device of this context, or `None` if the device does not belong to the node.
    pub(super) fn number_of(&self, device: DeviceId) -> Option<DeviceId> {
        if device.is_host() {
            return self.machine.contains(device).then_some(device);
        }
        self.gpus.iter().position(|gpu| gpu.here == Some(device)).map(|number| DeviceId::gpu(number as u32))
    }

    /// Returns the GPUs that this rank uses, as numbered in this context.
    pub fn own_devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.gpus.iter().filter(|gpu| gpu.owner == self.rank()).filter_map(|gpu| gpu.here)
    }

    /// Returns the first GPU of this rank. Fails if the rank has none.
    pub fn device(&self) -> Result<DeviceId, Error> {
        self.own_devices().next().ok_or_else(|| {
            let reason = format!(
                "rank {} of {} has no GPU: the ranks see {} GPUs, each of which belongs to one rank; start fewer ranks, or name a GPU in `devices` that \
                 no other rank names",
                self.rank(),
                self.ranks(),
                self.gpus.len()
            );
            Error::NodeArgument { argument: c"devices", reason }
        })
    }

    /// Returns the first GPU of this rank, or the host device if the rank has no GPU.
    pub(super) fn own_device(&self) -> DeviceId {
        self.own_devices().next().unwrap_or(DeviceId::HOST)
    }

    /// Returns the number in this context of a device with the given node-wide number. If the device is a GPU that is not visible to this
    /// process, returns instead a GPU of this rank, which maps the memory and makes the copies.
    pub(super) fn device_here(&self, device: DeviceId) -> DeviceId {
        if device.is_host() {
            return device;
        }
        let here = self.gpus.get(device.0 as usize).and_then(|gpu| gpu.here);
        let any = || self.gpus.iter().find_map(|gpu| gpu.here);
        here.or_else(|| Some(self.own_device()).filter(|own| !own.is_host())).or_else(any).unwrap_or(DeviceId::HOST)
    }
}

impl Hello {
    fn of(context: &Context, gpus: &[DeviceId]) -> Result<Hello, Error> {
        static NODES: AtomicU32 = AtomicU32::new(0);
        let _open = context.state().enter()?;
        let identity = ProcessIdentity::here([0; 16])?;
        let mut offered = gpus.to_vec();
        if offered.is_empty() {
            offered = context.state().claims.oldest();
        }
        if offered.is_empty() {
            offered = (0..context.machine().gpu_count()).map(DeviceId::gpu).collect();
        }
        let uuid = |gpu: &DeviceId| {
            if gpu.is_host() {
                return Err(Error::NodeArgument { argument: c"devices", reason: format!("{} is not a GPU", gpu.in_words()) });
            }
            context.state().device_uuid(*gpu)
        };
        Ok(Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            backend: context.backend().name().into(),
            boot: identity.boot,
            network: identity.network,
            user: identity.user,
            process: identity.process,
            drawn: *DRAWN,
            hosts: context.machine().host_count(),
            gpus: offered.iter().map(uuid).collect::<Result<_, _>>()?,
            nodes: NODES.fetch_add(1, Ordering::Relaxed),
        })
    }
}

fn refusal(reason: &str) -> Error {
    Error::NodeArgument { argument: c"node", reason: reason.into() }
}

/// Assigns each GPU to a rank. Among the ranks that have listed a GPU, the one with the fewest GPUs so far gets it. If all ranks see all
/// GPUs, the first GPU goes to rank 0, the next to rank 1, and so on.
fn share_out(hellos: &[Hello], here: impl Fn(&Uuid) -> Option<DeviceId>) -> Vec<NodeGpu> {
    let mut gpus: Vec<NodeGpu> = Vec::new();
    for uuid in hellos.iter().flat_map(|hello| &hello.gpus) {
        if gpus.iter().any(|gpu| gpu.uuid == *uuid) {
            continue;
        }
        let owned = |rank: u32| gpus.iter().filter(|gpu| gpu.owner == rank).count();
        let names = (0..).zip(hellos).filter(|(_, hello)| hello.gpus.contains(uuid)).map(|(rank, _)| rank);
        let owner = names.min_by_key(|rank| (owned(*rank), *rank)).unwrap_or(0);
        gpus.push(NodeGpu { uuid: *uuid, owner, here: here(uuid) });
    }
    gpus
}

/// Returns an error if some rank cannot share memory with this rank. Each rank checks all others, so all ranks get the same result.
fn check(hellos: &[Hello], own: usize) -> Result<(), Error> {
    let here = &hellos[own];
    for (rank, there) in (0..).zip(hellos) {
        let refuse = |reason: String| Err(Error::RankFailed { rank, reason });
        if there.version != here.version {
            return refuse(format!(
                "that rank is linked with mpgpu {}, but this rank with {}: link all ranks with the same version",
                there.version, here.version
            ));
        }
        if there.backend != here.backend {
            return refuse(format!(
                "that rank runs on the {} backend, but this rank on {}: set the same MPGPU_BACKEND on all ranks",
                there.backend, here.backend
            ));
        }
        if there.hosts != here.hosts {
            return refuse(format!(
                "the topology of the rank has {} host domains, but that of this rank has {}: set the same MPGPU_TOPOLOGY on all ranks",
                there.hosts, here.hosts
            ));
        }
        // Ranks in one process can always share memory.
        if (there.process, there.drawn) != (here.process, here.drawn) {
            ProcessIdentity { boot: there.boot, network: there.network, user: there.user, process: there.process, token: [0; 16] }
                .check()?;
        }
    }
    Ok(())
}

impl fmt::Debug for NodeGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeGroup")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("gpus", &self.gpus)
            .finish_non_exhaustive()
    }
}
