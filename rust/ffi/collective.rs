//! Named batches.

use super::argument::{Out, array, bad_value};
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_core::collective::{Collective, Sizes};

/// The most participants: more are no devices of one machine, and an all-to-all of them no list.
const MOST: u32 = 1024;

/// Writes what moves in a collective between so many participants, as pieces without memory. Of a piece a process makes an
/// `mp_transfer_t` between two of its devices; of all of `from` or `to` its own rank, a rank makes halves of `mp_node_plan`, with
/// `MP_BY_TAG`. Where both addresses of a piece are the same (in place) nothing moves: leave it out. Then `mp_plan` plans them
/// together, and again by a look-up; bytes that several want are passed on by those who have them.
///
/// Blocks that a participant sends from or receives into lie one behind the other, in the order of participants. All have
/// `bytes` bytes; or `sizes` says how many, and `bytes` is not read: one number for a broadcast, one for each participant for
/// a scatter, a gather and an all-gather, and for an all-to-all one for each sender and receiver, sender by sender. `root` is
/// read by a broadcast, a scatter and a gather. Pieces of no bytes are left out. `*count` becomes how many there are. With `pieces`
/// NULL that is all; else it has room for `capacity`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` for `count` NULL, a collective or a root that there is not, more than 1024 participants, sizes that no
/// address can count, or too little room: then `*count` still has what is needed, and nothing is written to `pieces`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_collective(
    collective: mp_collective_value,
    participants: u32,
    root: u32,
    bytes: u64,
    sizes: *const u64,
    pieces: *mut mp_piece_t,
    capacity: usize,
    count: *mut usize,
) -> mp_status_t {
    guard(|| {
        let count = Out::new(count, c"count")?;
        let collective = match collective {
            0 => Collective::Broadcast,
            1 => Collective::Scatter,
            2 => Collective::Gather,
            3 => Collective::AllGather,
            4 => Collective::AllToAll,
            other => return Err(bad_value(c"collective", other, "0 (MP_BROADCAST) to 4 (MP_ALL_TO_ALL)")),
        };
        if participants > MOST {
            return Err(Failure::invalid(c"participants", format!("participants is {participants}: at most {MOST}")));
        }
        let sizes = match sizes.is_null() {
            true => Sizes::Equal(bytes),
            false => Sizes::Each(array(sizes, collective.size_count(participants), c"sizes", c"participants")?),
        };
        let found = collective.pieces(participants, root, sizes).map_err(|error| Failure::invalid(c"collective", error.to_string()))?;
        count.write(found.len());
        if pieces.is_null() {
            return Ok(());
        }
        if capacity < found.len() {
            return Err(Failure::invalid(c"capacity", format!("capacity is {capacity}, but there are {} pieces", found.len())));
        }
        for (at, piece) in found.into_iter().enumerate() {
            let piece = mp_piece_t {
                from: piece.from,
                to: piece.to,
                send_offset: piece.send_offset,
                receive_offset: piece.receive_offset,
                bytes: piece.bytes,
            };
            // SAFETY: not null, and the header demands room for `capacity` pieces, which is enough.
            unsafe { pieces.add(at).write(piece) };
        }
        Ok(())
    })
}
