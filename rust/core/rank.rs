//! Special numbers that callers may pass instead of a rank of a node.

/// Value that a caller passes to a receive instead of the number of the sending rank, to accept a message from any rank. No function
/// returns this value.
pub const ANY: i32 = -i32::MAX;

/// Number that stands for rank 0 of a communicator if that rank is on another node. Rank `n` on another node has the number `ELSEWHERE -
/// n`.
const ELSEWHERE: i32 = -0x4000_0000;

/// Returns the number that stands for rank `rank` of a communicator if this rank is on another node.
pub const fn elsewhere(rank: u32) -> i32 {
    ELSEWHERE.wrapping_sub_unsigned(rank)
}

/// Returns an error message if `number` stands for a rank on another node, and `None` otherwise.
pub fn refuse_elsewhere(number: u32) -> Option<String> {
    let number = number.cast_signed();
    (ANY < number && number <= ELSEWHERE).then(|| format!("rank {} is on another node: use MPI, or mpgpu's halo::plan", ELSEWHERE - number))
}

/// Returns an error message if `number` is not a rank of a node with `ranks` ranks, and `None` if it is. In the message, `name` is the name
/// of the invalid argument.
pub fn refuse(name: &str, number: u32, ranks: u32) -> Option<String> {
    if number < ranks {
        return None;
    }
    let most = ranks.saturating_sub(1);
    refuse_elsewhere(number).or_else(|| {
        Some(match number.cast_signed() {
            ANY => format!("{name}=any: only receives and probes accept it; must be 0 to {most}"),
            negative if negative < 0 => {
                format!("{name}={negative}: must be 0 to {most}, a rank of the node; make no call for a neighbour that does not exist")
            }
            _ => format!("{name}={number}: must be 0 to {most}, a rank of the node"),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{ANY, elsewhere, refuse, refuse_elsewhere};

    #[test]
    fn numbers_in_place_of_ranks_are_refused_by_what_they_stand_for() {
        let text = |number: i32| refuse("rank", number.cast_unsigned(), 4).unwrap_or_default();
        assert_eq!(text(3), "");
        assert_eq!(text(4), "rank=4: must be 0 to 3, a rank of the node");
        assert_eq!(text(elsewhere(5)), "rank 5 is on another node: use MPI, or mpgpu's halo::plan");
        assert_eq!(text(elsewhere((1 << 30) - 2)), "rank 1073741822 is on another node: use MPI, or mpgpu's halo::plan");
        assert_eq!(text(ANY), "rank=any: only receives and probes accept it; must be 0 to 3");
        // MPI_PROC_NULL of Open MPI.
        assert_eq!(text(-2), "rank=-2: must be 0 to 3, a rank of the node; make no call for a neighbour that does not exist");
        assert_eq!(refuse_elsewhere(ANY.cast_unsigned()), None);
        assert_eq!(refuse_elsewhere((-2_i32).cast_unsigned()), None);
    }
}
