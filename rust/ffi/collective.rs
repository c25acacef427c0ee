//! Collectives, expressed as lists of copies.

use super::argument::{Out, array, bad_value};
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_core::collective::{Collective, Sizes};

/// Largest number of participants of a collective. No machine has more devices, and the list of a larger all-to-all
/// would be too long.
const MOST: u32 = 1024;

/// Lists the copies of a collective operation between `participants` participants. Moves no data. May be called from
/// any thread.
///
/// Turn each element of `pieces` into a transfer and plan all of them together:
/// - In one process, turn it into an `mp_transfer_t` between two devices, and call `mp_plan`.
/// - Between ranks, turn each element in which `from` or `to` is this rank into a send or receive descriptor with
///   `MP_BY_TAG`, and call `mp_node_plan`.
///
/// Leave out an element whose source and destination address are equal (in-place operation). Data that several
/// participants receive are forwarded by participants that already have them. Planning the same collective again takes
/// only a look-up.
///
/// The blocks that a participant sends are contiguous in its send buffer, in the order of the participants. The blocks
/// that it receives are contiguous in its receive buffer, in the same order. If `sizes` is NULL, every block has
/// `bytes` bytes. Otherwise `bytes` is ignored, and `sizes` contains the size of each block: one number for a
/// broadcast; one per participant for a scatter, gather and all-gather; one for each pair of sender and receiver,
/// ordered by sender, for an all-to-all. `root` is used only by broadcast, scatter and gather. Empty blocks are left
/// out.
///
/// `*count` receives the number of elements. If `pieces` is NULL, only `*count` is written. Otherwise `pieces` has room
/// for `capacity` elements.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` in these cases:
/// - `count` is NULL, or the collective or the root is unknown.
/// - There are more than 1024 participants, or the sum of the sizes overflows.
/// - `capacity` is too small. `*count` then receives the number of elements, and `pieces` is not written.
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
