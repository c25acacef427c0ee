//! Collectives, expressed as lists of copies.

use super::argument::{Out, array, bad_value};
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_core::collective::{Collective, Sizes};

/// Largest number of participants of a collective. No machine has more devices, and the list of a larger all-to-all
/// would be too long.
const MOST: u32 = 1024;

/// Writes the copies of a collective between `participants` participants, as pieces without addresses.
///
/// A process turns each piece into an `mp_transfer_t` between two of its devices, and plans them together by `mp_plan`.
/// A rank turns each piece whose `from` or `to` is its own rank into a send or receive descriptor of `mp_node_plan`,
/// with `MP_BY_TAG`. Leave out a piece whose source and destination address are equal (in place). Planning the same
/// collective again is a look-up. Bytes that several participants receive are forwarded by participants that already
/// have them.
///
/// The blocks that a participant sends or receives are contiguous, in participant order. If `sizes` is NULL, every
/// block has `bytes` bytes. Otherwise `bytes` is ignored and `sizes` holds the sizes of the blocks: one number for a
/// broadcast, one per participant for a scatter, a gather and an all-gather, and for an all-to-all one per sender and
/// receiver, ordered by sender. Only a broadcast, a scatter and a gather read `root`. Empty pieces are left out.
///
/// `*count` receives the number of pieces. If `pieces` is NULL, nothing else is written; otherwise it has room for
/// `capacity` pieces. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `count` is NULL, for an unknown collective or root, for more than 1024
/// participants, for sizes whose sum overflows, or if `capacity` is too small. In the last case `*count` still receives
/// the number of pieces and `pieces` is not written.
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
            // SAFETY: not null, and the header requires memory for `capacity` pieces, which is enough.
            unsafe { pieces.add(at).write(piece) };
        }
        Ok(())
    })
}
