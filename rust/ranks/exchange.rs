//! Implements collective calls, in which the ranks of a node exchange data. If a call fails on one rank, it fails on all ranks, so that no
//! rank continues alone.
//!
//! Each exchange starts with a header that identifies the call. Without the header, a rank whose call failed early could mistake the other
//! ranks' data of the failed call for data of its next call.

use crate::backend::BackendError;
use crate::contexts::Error;
use crate::ipc::fork;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::topology::DeviceId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::TryReserveError;
use std::ffi::CStr;
use std::fmt;
use std::io;

/// Maximum number of ranks of a node. It exceeds the number of cores of any node.
pub const MOST_RANKS: u32 = 1024;

/// Allgather operation like `MPI_Allgather`: every rank passes the same number of bytes, and receives the bytes of all ranks in rank order.
/// All ranks call it together.
pub trait Allgather: Send {
    /// Sends `send` to all ranks, and fills `receive` with the data of all ranks, including this one, in rank order. If the function
    /// returns an error text, the collective call fails with an error that contains this text.
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String>;
}

/// [`Allgather`] for a node with a single rank.
#[derive(Copy, Clone, Debug)]
pub struct Alone;

impl Allgather for Alone {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        receive.copy_from_slice(send);
        Ok(())
    }
}

/// Maximum length in bytes of the name of a collective call.
const NAME: usize = 46;

/// Size in bytes of the encoded identity of a collective call: its origin (library or program), its name, and a zero byte.
const CALL: usize = 1 + NAME + 1;

/// Identity of a collective call, which all ranks of a node make together. It consists of the origin of the call (library or program) and
/// the name that error messages quote. The calls of two ranks match if their origins and their names are equal.
#[derive(Copy, Clone, PartialEq, Eq)]
pub struct Collective([u8; CALL]);

impl Collective {
    /// Identity of the collective call that creates a node group (the group of all ranks of a node).
    pub const CREATE: Collective = Collective::new(Collective::OF_LIBRARY, "node object creation");
    /// Identity of the collective call that creates a node plan (a communication plan that all ranks of a node execute together).
    pub const PLAN: Collective = Collective::new(Collective::OF_LIBRARY, "node plan creation");
    /// Identity of the collective call that creates a node plan (communication plan that all ranks of a node execute together) whose
    /// transfers are copied in partitions.
    pub const PLAN_PARTITIONED: Collective = Collective::new(Collective::OF_LIBRARY, "node plan creation with partitions");
    /// Identity of the collective call that measures which number of partitions is fastest.
    pub const TUNE_PARTITIONS: Collective = Collective::new(Collective::OF_LIBRARY, "the tuning of partitions");
    /// Identity of the collective call that creates a messenger (endpoint for messages between ranks).
    pub const MESSENGER: Collective = Collective::new(Collective::OF_LIBRARY, "messenger creation");
    /// Identity of the collective call by which a rank reports that it has failed. It matches any call of the other ranks.
    pub const FAIL: Collective = Collective::new(Collective::OF_LIBRARY, "the report of a failure");
    /// Identity used for an allgather whose name was refused. It matches no other call.
    pub const NAMELESS: Collective = Collective::new(Collective::OF_LIBRARY, "an allgather");

    const OF_LIBRARY: u8 = 1;
    const OF_PROGRAM: u8 = 2;

    const fn new(of: u8, name: &str) -> Collective {
        let (mut bytes, mut at) = ([0; CALL], 0);
        bytes[0] = of;
        while at < name.len() {
            bytes[1 + at] = name.as_bytes()[at];
            at += 1;
        }
        Collective(bytes)
    }

    /// Returns the identity of the program's collective call with this name. Fails if the name is too long or contains characters that are
    /// not allowed.
    pub fn named(name: &str) -> Result<Collective, Error> {
        if name.is_empty() || name.len() > NAME || name.contains(char::is_control) {
            let reason = format!("call={name:?}: must be a name of 1 to {NAME} bytes, without control characters");
            return Err(Error::NodeArgument { argument: c"call", reason });
        }
        Ok(Collective::new(Collective::OF_PROGRAM, name))
    }

    /// Decodes the identity of a collective call. Returns `None` for bytes that no rank sends.
    fn decode(bytes: &[u8]) -> Option<Collective> {
        let call = Collective(bytes.try_into().ok()?);
        (call.name().len() <= NAME && Collective::new(call.0[0], call.name()) == call).then_some(call)
    }

    fn name(&self) -> &str {
        CStr::from_bytes_until_nul(&self.0[1..]).ok().and_then(|name| name.to_str().ok()).unwrap_or_default()
    }
}

impl fmt::Debug for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Header that every rank sends before its data in each exchange of a collective call. It has a fixed size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Head {
    node: u64,
    call: Collective,
    /// Sequence number of the collective call among all collective calls that this rank has made on this node.
    number: u64,
    /// Sequence number of the exchange within its collective call.
    exchange: u64,
    /// Number of bytes that this rank sends after the header.
    bytes: u64,
}

/// Magic number at the start of a header. Its last character is the version of the protocol.
const MAGIC: [u8; 8] = *b"mpgpu-x2";
/// Offset in bytes of the four numbers in an encoded header. The magic number and the identity of the call precede them.
const WORDS: usize = 8 + CALL;
const HEAD: usize = WORDS + 4 * 8;

impl Head {
    fn encode(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&MAGIC);
        let words = [self.node, self.number, self.exchange, self.bytes];
        bytes[8..WORDS].copy_from_slice(&self.call.0);
        for (place, word) in bytes[WORDS..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Head> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[WORDS + at * 8 + byte]));
        let call = Collective::decode(&bytes[8..WORDS])?;
        (bytes[..8] == MAGIC).then(|| Head { node: word(0), call, number: word(1), exchange: word(2), bytes: word(3) })
    }

    /// True if both headers belong to the same exchange of the same collective call.
    fn goes_with(&self, other: &Head) -> bool {
        let is_any = [self.call, other.call].contains(&Collective::FAIL);
        (is_any || self.call == other.call) && (self.node, self.number, self.exchange) == (other.node, other.number, other.exchange)
    }
}

/// Maximum total number of bytes that all ranks together send in one exchange. This is enough for several million transfers.
const MOST_BYTES: u64 = 1 << 30;

/// Maximum total number of bytes that one allgather collects from all ranks. Longer data is split over several allgathers.
const PIECES: usize = 4 << 20;

/// State of one rank that is needed to make collective calls on a node.
pub(super) struct Exchange {
    pub rank: u32,
    pub ranks: u32,
    /// Number that identifies the node group among all groups that use the same allgather function. 0 until the ranks have agreed on
    /// it.
    pub node: u64,
    generation: u32,
    turn: Mutex<GatherState>,
    caller: Mutex<CallingThreads>,
}

/// Allgather function and number of calls so far. A thread locks this state during a collective call.
struct GatherState {
    gather: Box<dyn Allgather>,
    calls: u64,
}

thread_local! {
    /// Variable whose address identifies the current thread. `std::thread::current` is not used, because it would leave allocated memory
    /// behind on the caller's threads.
    static THREAD: u8 = const { 0 };
}

/// Identity of the thread that makes a collective call, and number of threads that wait for that call to finish.
#[derive(Default)]
struct CallingThreads {
    inside: Option<(usize, Collective)>,
    waiting: u32,
}

/// Collective call that this rank is making. It consists of one or more exchanges of data.
pub(super) struct CollectiveCall<'a> {
    exchange: &'a Exchange,
    turn: MutexGuard<'a, GatherState>,
    call: Collective,
    exchanges: u64,
    /// True if another thread of this rank was in a collective call when this call began.
    is_crowded: bool,
}

impl Exchange {
    pub fn new(rank: u32, ranks: u32, gather: Box<dyn Allgather>) -> Result<Exchange, Error> {
        check_rank(rank, ranks)?;
        let turn = Mutex::new(GatherState { gather, calls: 0 });
        Ok(Exchange { rank, ranks, node: 0, generation: fork::generation(), turn, caller: Mutex::default() })
    }

    /// Begins a collective call. Only one thread of a rank may be in a collective call at a time, because ranks match calls by their order.
    /// If several threads are in calls, the order is undefined, and each of these calls fails on all ranks.
    pub fn call(&self, call: Collective) -> Result<CollectiveCall<'_>, Error> {
        if self.generation != fork::generation() {
            return Err(Error::Forked);
        }
        let own = THREAD.with(|mark| std::ptr::from_ref(mark).addr());
        let is_crowded = {
            let mut caller = lock(&self.caller);
            if let Some((_, outer)) = caller.inside.filter(|(thread, _)| *thread == own) {
                let (inner, outer) = (call.name(), outer.name());
                let reason = format!(
                    "{inner} was started by a callback during {outer} on the same node object: the outer call waits for its callback, so \
                     both \
                     would wait forever; start the inner call after the outer call has returned"
                );
                return Err(Error::NodeArgument { argument: c"node", reason });
            }
            caller.waiting += 1;
            self.ranks > 1 && (caller.inside.is_some() || caller.waiting > 1)
        };
        let mut turn = lock(&self.turn);
        let mut caller = lock(&self.caller);
        caller.waiting -= 1;
        caller.inside = Some((own, call));
        turn.calls += u64::from(call != Collective::CREATE);
        Ok(CollectiveCall { exchange: self, turn, call, exchanges: 0, is_crowded })
    }

    /// Returns the error that this rank reports for an invalid argument of rank `rank`. If this rank is `rank`, the result is an argument
    /// error. Otherwise the result is [`Error::RankFailed`].
    pub fn blame(&self, rank: u32, argument: &'static CStr, reason: String) -> Error {
        if rank == self.rank { Error::NodeArgument { argument, reason } } else { Error::RankFailed { rank, reason } }
    }

    /// Returns an error if options that must be equal differ between ranks. `all` contains the options of each rank, in the same order on
    /// all ranks.
    pub fn check_alike(&self, argument: &'static CStr, all: &[&Named]) -> Result<(), Error> {
        for (rank, of_rank) in (0..).zip(all) {
            if let Some(((name, value), (_, first))) = of_rank.iter().zip(all[0]).find(|(value, first)| value != first) {
                let reason = format!(
                    "{name}={value}, but rank 0 has {name}={first}: pass the same options and set the same MPGPU_* variables on all ranks"
                );
                return Err(self.blame(rank, argument, reason));
            }
        }
        Ok(())
    }
}

/// Names and values of options, in a fixed order.
pub(super) type Named = Vec<(String, String)>;

/// Returns an error if a rank number or a number of ranks is out of range.
pub(super) fn check_rank(rank: u32, ranks: u32) -> Result<(), Error> {
    if ranks == 0 || ranks > MOST_RANKS || rank >= ranks {
        let (rank, ranks) = (rank.cast_signed(), ranks.cast_signed());
        let reason = format!("rank {rank} of {ranks}: ranks are numbered from 0, and a node has 1 to {MOST_RANKS} ranks");
        return Err(Error::NodeArgument { argument: c"rank", reason });
    }
    Ok(())
}

/// Data that one rank sends in an exchange: a value, or the reason for its failure. The boolean is true if the failure is that something is
/// not supported.
type Said<T> = Result<T, (bool, String)>;

/// Encoded data of all ranks, in rank order.
pub(super) type Texts = Vec<Vec<u8>>;

impl CollectiveCall<'_> {
    /// Sends this rank's value, or its error, to all ranks. Returns the values of all ranks in rank order.
    ///
    /// If any rank has failed, the call fails on all ranks. If every failure is of the kind [`Error::NotSupported`], all ranks return that
    /// kind, so that they fall back to an alternative together. Otherwise a rank with a failure of another kind returns its own error, and
    /// all other ranks return [`Error::RankFailed`].
    pub fn all<T: Serialize + DeserializeOwned>(&mut self, mine: Result<T, Error>) -> Result<Vec<T>, Error> {
        let (mine, all) = self.tell(mine)?;
        let (mut values, mut failed) = (Vec::with_capacity(all.len()), Vec::new());
        for (rank, text) in (0..).zip(all) {
            let said: Said<T> = serde_json::from_slice(&text).map_err(|error| {
                broken(format!("rank {rank} has sent data that cannot be decoded ({error}): link all ranks with the same version"))
            })?;
            match said {
                Ok(value) => values.push(value),
                Err((is_not_supported, reason)) => failed.push((is_not_supported, rank, reason)),
            }
        }
        // Every rank picks the same failure.
        let Some((is_not_supported, rank, reason)) = failed.into_iter().min() else { return Ok(values) };
        match mine {
            // The rank's own error value is more precise than the text that it has sent.
            Err(own) if own.is_not_supported() == is_not_supported => Err(own),
            _ if is_not_supported => Err(Error::NotSupported(format!("rank {rank}: {reason}"))),
            _ => Err(Error::RankFailed { rank, reason }),
        }
    }

    /// Sends the bytes `mine` to all ranks. Returns the bytes of all ranks in rank order. If the number of bytes differs between ranks, the
    /// call fails on all ranks.
    pub fn all_bytes(&mut self, mine: &[u8]) -> Result<Texts, Error> {
        let sizes = self.all(Ok(mine.len()))?;
        if let Some((rank, size)) = (0..).zip(&sizes).find(|(_, size)| **size != sizes[0]) {
            let reason = format!("the rank passes {size} bytes, but rank 0 passes {}: pass the same number on all ranks", sizes[0]);
            return Err(self.exchange.blame(rank, c"bytes", reason));
        }
        self.gather(mine)
    }

    /// Takes part in the collective call as a rank that has already failed. The call fails on all ranks. On this rank, the error of the
    /// call is `error`.
    pub fn refuse(mut self, error: Error) -> Result<(), Error> {
        self.tell::<()>(Err(error)).map(drop)
    }

    /// Sends this rank's value or error to all ranks. Returns the outcome for this rank's own value, and the encoded data of all ranks.
    fn tell<T: Serialize>(&mut self, mine: Result<T, Error>) -> Result<(Result<(), Error>, Texts), Error> {
        let mut text = Text::default();
        let said = self.uncrowded().and(mine).and_then(|value| text.write(&Said::Ok(value)));
        if let Err(error) = &said {
            text = Text::default();
            text.write(&Said::<()>::Err((error.is_not_supported(), error.to_string())))?;
        }
        let all = self.gather(&text.0);
        if let Err(error @ Error::Backend(BackendError::OutOfMemory { .. })) = &all {
            // The other ranks have received valid data and continue with the next exchange. This rank reports the failure there.
            let mut text = Text::default();
            text.write(&Said::<()>::Err((false, error.to_string())))?;
            self.gather(&text.0)?;
        }
        Ok((said, all?))
    }

    /// Returns an error if several threads of this rank make collective calls at the same time.
    fn uncrowded(&self) -> Result<(), Error> {
        if !self.is_crowded && (self.exchange.ranks == 1 || lock(&self.exchange.caller).waiting == 0) {
            return Ok(());
        }
        let reason = "two threads of this rank are in collective calls on one node at the same time: calls of different ranks match by their order, so \
                      make them one after another, in the same order on all ranks";
        Err(Error::NodeArgument { argument: c"node", reason: reason.into() })
    }

    /// Collects the data of all ranks, whose sizes may differ. The sizes that other ranks announce are not trusted: memory is allocated
    /// only as data arrives.
    fn gather(&mut self, mine: &[u8]) -> Result<Texts, Error> {
        let CollectiveCall { exchange, turn, call, exchanges, .. } = self;
        let (own, ranks) = (exchange.rank as usize, exchange.ranks as usize);
        let GatherState { gather, calls } = &mut **turn;
        let head = Head { node: exchange.node, call: *call, number: *calls, exchange: *exchanges, bytes: mine.len() as u64 };
        *exchanges += 1;
        let mut heads = vec![0; HEAD * ranks];
        gather.allgather(&head.encode(), &mut heads).map_err(broken)?;
        let heads = check_heads(&heads, &head, own)?;
        let said = heads.iter().fold(0, |sum: u64, head| sum.saturating_add(head.bytes));
        if said > MOST_BYTES {
            return Err(Error::NotSupported(format!(
                "the descriptions of the transfers of all ranks have {said} bytes, more than the limit of {MOST_BYTES}: plan fewer \
                 transfers at a time"
            )));
        }
        let most = heads.iter().map(|head| head.bytes as usize).max().unwrap_or(0);
        let piece = most.min((PIECES / ranks).max(1));
        let mut all: Texts = vec![Vec::new(); ranks];
        let mut no_room = None;
        let (mut send, mut receive) = (vec![0; piece], vec![0; piece * ranks]);
        let mut at = 0;
        while at < most {
            let bytes = piece.min(most - at);
            let (send, receive) = (&mut send[..bytes], &mut receive[..bytes * ranks]);
            let rest = &mine[at.min(mine.len())..];
            let filled = rest.len().min(bytes);
            send[..filled].copy_from_slice(&rest[..filled]);
            send[filled..].fill(0);
            gather.allgather(send, receive).map_err(broken)?;
            for ((of_rank, came), head) in all.iter_mut().zip(receive.chunks_exact(bytes)).zip(&heads) {
                let wanted = (head.bytes as usize).saturating_sub(at).min(bytes);
                // A rank that cannot allocate memory still takes part in every remaining allgather.
                match no_room {
                    None => no_room = extend(of_rank, &came[..wanted]).err(),
                    Some(_) => *of_rank = Vec::new(),
                }
            }
            at += bytes;
        }
        if no_room.is_some() { Err(out_of_memory(said)) } else { Ok(all) }
    }
}

impl Drop for CollectiveCall<'_> {
    fn drop(&mut self) {
        lock(&self.exchange.caller).inside = None;
    }
}

/// Decodes the headers of all ranks. Returns an error if the ranks are not in the same exchange of the same call. All ranks return the same
/// result.
fn check_heads(heads: &[u8], mine: &Head, own: usize) -> Result<Vec<Head>, Error> {
    let mut all = Vec::with_capacity(heads.len() / HEAD);
    for (rank, head) in heads.chunks_exact(HEAD).enumerate() {
        all.push(Head::decode(head).ok_or_else(|| {
            broken(format!(
                "rank {rank} has sent data that cannot be decoded: link all ranks with the same version, and make the allgather \
                 function behave like MPI_Allgather"
            ))
        })?);
    }
    if all.get(own) != Some(mine) {
        return Err(broken("the allgather function has not returned the bytes that were sent; it must behave like MPI_Allgather".into()));
    }
    let known = all.iter().find(|head| head.call != Collective::FAIL).unwrap_or(mine);
    if all.iter().all(|head| head.goes_with(known)) {
        return Ok(all);
    }
    // The error names a rank whose header differs from this rank's header, if there is one.
    let other = all.iter().position(|head| !head.goes_with(mine)).or_else(|| all.iter().position(|head| !head.goes_with(known)));
    let (rank, other) = other.map_or((0, known), |rank| (rank, &all[rank]));
    let elsewhere = if other.node == mine.node { "" } else { " of another node object" };
    let reason = format!(
        "the rank is in {}{elsewhere}, its collective call number {}, but this rank is in {}, its collective call number {}: make the same \
         calls on all ranks, in the same order; after an \
         error of the allgather create the node object again on all ranks",
        other.call.name(),
        other.number,
        mine.call.name(),
        mine.number
    );
    Err(Error::RankFailed { rank: rank as u32, reason })
}

/// JSON text in memory. Allocation failures are returned as errors and do not abort the process.
#[derive(Default)]
struct Text(Vec<u8>);

impl Text {
    fn write<T: Serialize>(&mut self, value: &T) -> Result<(), Error> {
        serde_json::to_writer(&mut *self, value).map_err(|error| match error.io_error_kind() {
            Some(io::ErrorKind::OutOfMemory) => out_of_memory(self.0.len() as u64),
            _ => broken(error.to_string()),
        })
    }
}

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        extend(&mut self.0, bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn extend(target: &mut Vec<u8>, bytes: &[u8]) -> Result<(), TryReserveError> {
    target.try_reserve(bytes.len())?;
    target.extend_from_slice(bytes);
    Ok(())
}

fn out_of_memory(bytes: u64) -> Error {
    BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes }.into()
}

fn broken(reason: String) -> Error {
    Error::Allgather(reason)
}
