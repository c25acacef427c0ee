//! The ranks of a node, as one of them sees them: how they meet, and which GPU each works for.

use super::exchange::{Allgather, Collective, Exchange};
use super::order::StepOrder;
use super::rendezvous::Rendezvous;
use super::sight::{Uuid, device_of, topology_of};
use crate::backend::SignalWait;
use crate::contexts::{Context, Error};
use crate::ipc::{Departure, ProcessIdentity};
use crate::topology::{self, DeviceId, Machine};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// A GPU of the node.
#[derive(Clone, Debug)]
pub(super) struct NodeGpu {
    pub uuid: Uuid,
    /// The rank that works for it.
    pub owner: u32,
    /// Its number in this process, where this process sees it.
    pub here: Option<DeviceId>,
}

/// The ranks of a node, as one of them sees them.
pub struct NodeGroup {
    pub(super) context: Arc<Context>,
    pub(super) exchange: Exchange,
    /// Of all GPUs of the node, as [`NodeGroup::gpus`] numbers them.
    pub(super) machine: Arc<Machine>,
    pub(super) gpus: Vec<NodeGpu>,
    /// Plans that were asked for: of each the number.
    pub(super) plans: AtomicU64,
    pub(super) order: StepOrder,
}

/// See [`Hello::drawn`].
static DRAWN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(()));

/// What a rank says of itself when a node is made.
#[derive(Serialize, Deserialize)]
struct Hello {
    version: String,
    backend: String,
    boot: [u8; 16],
    network: u32,
    user: u32,
    process: u32,
    /// Drawn at random where the program starts: processes of different PID namespaces may have the same number.
    drawn: u64,
    hosts: u32,
    gpus: Vec<Uuid>,
    /// Nodes that its process had begun to make by then.
    nodes: u32,
}

/// Meets the other ranks at a socket of this path, which rank 0 makes and removes. Blocks for a minute at most.
pub fn meet_at(path: &Path, rank: u32, ranks: u32) -> Result<Box<dyn Allgather>, Error> {
    Ok(Box::new(Rendezvous::meet(path, rank, ranks)?))
}

impl NodeGroup {
    /// Makes a node of `ranks` ranks, of which this is `rank`. `gpus` are those that this rank works for; empty for all that it sees. All
    /// ranks call it together.
    pub fn new(context: &Arc<Context>, rank: u32, ranks: u32, gather: Box<dyn Allgather>, gpus: &[DeviceId]) -> Result<NodeGroup, Error> {
        let mut exchange = Exchange::new(rank, ranks, gather)?;
        let mut call = exchange.call(Collective::CREATE)?;
        let hellos = call.all(Hello::of(context, gpus))?;
        check(&hellos, rank as usize)?;
        let gpus = share_out(&hellos, |uuid| device_of(context, uuid));
        // Whoever knows how all these GPUs are joined says so; where several do, the first is taken.
        let uuids: Vec<Uuid> = gpus.iter().map(|gpu| gpu.uuid).collect();
        let known = topology_of(context, &uuids);
        let who = call.all(known.as_ref().map(Option::is_some).map_err(Error::clone))?.into_iter().position(|knows| knows);
        let own = known?.filter(|_| who == Some(rank as usize));
        let Some(text) = call.all(Ok(own.map(|topology| topology.to_toml())))?.into_iter().flatten().next() else {
            return Err(Error::NotSupported(format!(
                "no rank knows how the {} GPUs of this node are joined: name a topology file that has them all (MPGPU_TOPOLOGY), run `mpgpu probe` \
                 once where all are in sight, or let NVML see them",
                uuids.len()
            )));
        };
        let mut topology = topology::parse(&text)?;
        topology.costs = topology.costs.between_ranks();
        let machine = Machine::new(topology)?;
        if machine.gpu_count() as usize != gpus.len() {
            let reason = format!("the topology that was found has {} GPUs, the ranks have {}", machine.gpu_count(), gpus.len());
            return Err(Error::Option { name: "topology", value: machine.topology().name.clone(), reason });
        }
        drop(call);
        exchange.node = hellos[0].drawn ^ (u64::from(hellos[0].process) << 32 | u64::from(hellos[0].nodes));
        Ok(NodeGroup {
            context: context.clone(),
            exchange,
            machine: Arc::new(machine),
            gpus,
            plans: AtomicU64::new(0),
            order: StepOrder::default(),
        })
    }

    /// Takes part in the making of a node as a rank that has failed before, for this reason.
    pub fn refuse_new(rank: u32, ranks: u32, gather: Box<dyn Allgather>, reason: &str) -> Result<(), Error> {
        Exchange::new(rank, ranks, gather)?.call(Collective::CREATE)?.refuse(refusal(reason))
    }

    /// The same in a call on this node.
    pub fn refuse(&self, call: Collective, reason: &str) -> Result<(), Error> {
        self.exchange.call(call)?.refuse(refusal(reason))
    }

    /// The same for ranks without MPI, which [meet](meet_at) at a socket.
    pub fn at_socket(context: &Arc<Context>, rank: u32, ranks: u32, path: &Path, gpus: &[DeviceId]) -> Result<NodeGroup, Error> {
        NodeGroup::new(context, rank, ranks, meet_at(path, rank, ranks)?, gpus)
    }

    /// Collects the bytes of every rank, as many of each, in the order of ranks. All ranks call it together, by a call of the same name.
    pub fn allgather(&self, call: Collective, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.exchange.call(call)?.all_bytes(mine)
    }

    /// Tells the ranks that own these flags, which this one raises, that it raises them no more.
    pub(super) fn leave(&self, flags: &[u64], departure: Departure) {
        flags.iter().for_each(|address| self.context.state().leave_memory(*address, departure));
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.exchange.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.exchange.ranks
    }

    /// The machine that plans of this node are made for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The context of this rank.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// How a small part of a step waits for other ranks. A kernel of one rank may keep that of another on the same GPU from running.
    pub(super) fn signal_wait(&self) -> SignalWait {
        let has_own = |rank| self.gpus.iter().any(|gpu| gpu.owner == rank);
        let by_default = if (0..self.ranks()).all(has_own) { SignalWait::Kernel } else { SignalWait::Operation };
        self.context.config().signal_wait.unwrap_or(by_default)
    }

    /// The rank that works for each GPU.
    pub(super) fn owners(&self) -> Vec<u32> {
        self.gpus.iter().map(|gpu| gpu.owner).collect()
    }

    /// A device of this context as the node numbers it.
    pub(super) fn number_of(&self, device: DeviceId) -> Option<DeviceId> {
        if device.is_host() {
            return self.machine.contains(device).then_some(device);
        }
        self.gpus.iter().position(|gpu| gpu.here == Some(device)).map(|number| DeviceId::gpu(number as u32))
    }

    /// The GPUs that this rank works for, as this context numbers them.
    pub fn own_devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.gpus.iter().filter(|gpu| gpu.owner == self.rank()).filter_map(|gpu| gpu.here)
    }

    /// The first of them; refused where there is none.
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

    /// One of them, or host memory where there is none.
    pub(super) fn own_device(&self) -> DeviceId {
        self.own_devices().next().unwrap_or(DeviceId::HOST)
    }

    /// A device of the node as this context numbers it. A GPU out of sight is stood in for by one of this rank's: it maps the memory and
    /// moves the bytes.
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
        let all: Vec<DeviceId> = (0..context.machine().gpu_count()).map(DeviceId::gpu).collect();
        let uuid = |gpu: &DeviceId| {
            if gpu.is_host() {
                return Err(Error::NodeArgument { argument: c"devices", reason: format!("{} is no GPU", gpu.in_words()) });
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
            gpus: if gpus.is_empty() { all.iter() } else { gpus.iter() }.map(uuid).collect::<Result<_, _>>()?,
            nodes: NODES.fetch_add(1, Ordering::Relaxed),
        })
    }
}

fn refusal(reason: &str) -> Error {
    Error::NodeArgument { argument: c"node", reason: reason.into() }
}

/// All GPUs of the ranks, each with the rank that works for it: of those that name it the one that has the fewest by then. So ranks that all
/// see all GPUs get one each, in order.
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

/// Refuses ranks that cannot share memory with this one. All ranks find the same, each from its side.
fn check(hellos: &[Hello], own: usize) -> Result<(), Error> {
    let here = &hellos[own];
    for (rank, there) in (0..).zip(hellos) {
        let refuse = |reason: String| Err(Error::RankFailed { rank, reason });
        if there.version != here.version {
            return refuse(format!("it links mpgpu {}, and this rank {}: link all with the same version", there.version, here.version));
        }
        if there.backend != here.backend {
            return refuse(format!(
                "it runs on the {} backend, and this rank on {}: set MPGPU_BACKEND alike on all",
                there.backend, here.backend
            ));
        }
        if there.hosts != here.hosts {
            return refuse(format!("its topology has {} host domains, and this rank's {}", there.hosts, here.hosts));
        }
        // A process of its own is reached whatever these say.
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
