//! Chooses the executable graph of a program (list of copy operations) that is launched next. No function here calls the driver, so each
//! decision is tested without a GPU.

use smallvec::SmallVec;

/// Maximum number of executable graphs of one program (list of copy operations).
pub(super) const MOST_EXECS: usize = 8;
/// Number of address changes (re-pointings) after which one more executable graph is instantiated for a program (list of copy operations).
/// So many changes cost more than an instantiation. They occur for example if the caller alternates between two sets of buffers.
const REPOINTS_FOR_ONE_EXEC: u32 = 16;

/// Properties of an executable graph that affect the choice of the graph to launch.
#[derive(Copy, Clone)]
pub(super) struct Seen {
    pub same_addresses: bool,
    pub same_stream: bool,
    pub number: u64,
}

/// Decision on which executable graph is launched next, and whether it must be changed first. Numbers are indices in the list of executable
/// graphs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Launch(usize),
    Repoint(usize),
    Instantiate,
    /// All executable graphs are in use. The graph with this index is launched again once its last launch has finished. Its addresses are
    /// changed first if they differ from those of the execution.
    Wait(usize),
}

/// Chooses an executable graph among those that no thread is launching. `seen` contains the properties of these graphs, and `repoints` is
/// the number of address changes since the last instantiation. `is_full` is true if no further graph may be created. `is_idle` queries the
/// driver, so it is called as rarely as possible.
pub(super) fn choose(seen: &[Seen], is_full: bool, repoints: u32, is_idle: impl Fn(usize) -> bool) -> Choice {
    let bound = |index: &usize| seen[*index].same_addresses;
    // An executable graph that is launched in the stream of its last launch starts after that launch, even if the launch has not finished
    // yet.
    if let Some(index) = (0..seen.len()).filter(bound).find(|index| seen[*index].same_stream) {
        return Choice::Launch(index);
    }
    if let Some(index) = (0..seen.len()).filter(bound).find(|index| is_idle(*index)) {
        return Choice::Launch(index);
    }
    let mut oldest: SmallVec<[usize; MOST_EXECS]> = (0..seen.len()).collect();
    oldest.sort_unstable_by_key(|index| seen[*index].number);
    if (is_full || repoints < REPOINTS_FOR_ONE_EXEC)
        && let Some(index) = oldest.iter().find(|index| !seen[**index].same_addresses && is_idle(**index))
    {
        return Choice::Repoint(*index);
    }
    match oldest.iter().find(|index| bound(index)).or(oldest.first()) {
        Some(index) if is_full => Choice::Wait(*index),
        _ => Choice::Instantiate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(same_addresses: bool, same_stream: bool, number: u64) -> Seen {
        Seen { same_addresses, same_stream, number }
    }

    #[test]
    fn an_exec_with_the_addresses_is_launched_without_asking_the_driver_where_the_stream_orders_it() {
        let all = [seen(false, true, 3), seen(true, false, 2), seen(true, true, 1)];
        assert_eq!(choose(&all, false, 0, |_| panic!("asked")), Choice::Launch(2));
        assert_eq!(choose(&all[..2], false, 0, |_| true), Choice::Launch(1));
    }

    #[test]
    fn the_idle_exec_that_was_longest_unused_is_re_pointed() {
        let all = [seen(false, false, 7), seen(false, true, 5), seen(false, false, 6)];
        assert_eq!(choose(&all, false, 0, |_| true), Choice::Repoint(1));
        assert_eq!(choose(&all, false, 0, |index| index != 1), Choice::Repoint(2));
        assert_eq!(choose(&all, false, 0, |_| false), Choice::Instantiate);
        assert_eq!(choose(&[], false, 0, |_| true), Choice::Instantiate);
    }

    #[test]
    fn programs_that_are_re_pointed_again_and_again_get_more_execs_up_to_the_bound() {
        let one = [seen(false, false, 1)];
        assert_eq!(choose(&one, false, REPOINTS_FOR_ONE_EXEC - 1, |_| true), Choice::Repoint(0));
        assert_eq!(choose(&one, false, REPOINTS_FOR_ONE_EXEC, |_| true), Choice::Instantiate);
        assert_eq!(choose(&[one[0]; MOST_EXECS], true, REPOINTS_FOR_ONE_EXEC, |_| true), Choice::Repoint(0));
    }

    #[test]
    fn with_all_execs_at_work_the_launch_waits_for_the_one_with_its_addresses_or_else_the_first_to_end() {
        let mut all: Vec<_> = (0..MOST_EXECS as u64).map(|number| seen(false, false, 10 - number)).collect();
        assert_eq!(choose(&all, true, 0, |_| false), Choice::Wait(MOST_EXECS - 1));
        all[2].same_addresses = true;
        assert_eq!(choose(&all, true, 0, |_| false), Choice::Wait(2));
    }
}
