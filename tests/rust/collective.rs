//! Compares the transfers of collective operations with the definitions of the operations, byte by byte.

use crate::common::Random;
use mpgpu_core::collective::{BlockCopy, Collective, CollectiveError, Sizes};

const ALL: [Collective; 5] = [Collective::Broadcast, Collective::Scatter, Collective::Gather, Collective::AllGather, Collective::AllToAll];

/// Returns the data that one participant sends to another, as marks (source, destination, index) in memory order.
fn block(from: usize, to: usize, bytes: u64) -> Vec<(usize, usize, u64)> {
    (0..bytes).map(|at| (from, to, at)).collect()
}

#[test]
fn each_collective_brings_each_its_blocks_in_the_order_of_participants() {
    let mut random = Random(3);
    for round in 0..400 {
        let participants = 1 + random.below(6) as usize;
        let root = random.below(participants as u64) as usize;
        let collective = ALL[round % 5];
        let equal = random.chance(30);
        let each: Vec<u64> = vec![0; collective.size_count(participants as u32)].iter().map(|_: &u64| random.below(5)).collect();
        let one = random.below(5);
        let sizes = if equal { Sizes::Equal(one) } else { Sizes::Each(&each) };
        let size = |at: usize| if equal { one } else { each[at] };
        let everybody = || 0..participants;
        // The marks that each participant holds, and the marks that it must receive. The destination `usize::MAX` stands for all
        // participants.
        let (mut has, mut wanted) = (vec![Vec::new(); participants], vec![Vec::new(); participants]);
        match collective {
            Collective::Broadcast => {
                has[root] = block(root, usize::MAX, size(0));
                wanted = vec![has[root].clone(); participants];
            }
            Collective::Scatter => {
                has[root] = everybody().flat_map(|to| block(root, to, size(to))).collect();
                wanted = everybody().map(|to| block(root, to, size(to))).collect();
            }
            Collective::Gather => {
                has = everybody().map(|from| block(from, root, size(from))).collect();
                wanted[root] = has.concat();
            }
            Collective::AllGather => {
                has = everybody().map(|from| block(from, usize::MAX, size(from))).collect();
                wanted = vec![has.concat(); participants];
            }
            Collective::AllToAll => {
                let of = |from: usize, to: usize| block(from, to, size(from * participants + to));
                has = everybody().map(|from| everybody().flat_map(|to| of(from, to)).collect()).collect();
                wanted = everybody().map(|to| everybody().flat_map(|from| of(from, to)).collect()).collect();
            }
        }
        let pieces = collective.pieces(participants as u32, root as u32, sizes).expect("it exists");
        let mut found: Vec<Vec<Option<(usize, usize, u64)>>> = wanted.iter().map(|wanted| vec![None; wanted.len()]).collect();
        for BlockCopy { from, to, send_offset, receive_offset, bytes } in pieces {
            assert!(bytes > 0);
            for at in 0..bytes {
                let place = &mut found[to as usize][(receive_offset + at) as usize];
                assert_eq!(place.replace(has[from as usize][(send_offset + at) as usize]), None, "written twice");
            }
        }
        let found: Vec<Vec<_>> = found.into_iter().map(|marks| marks.into_iter().map(|mark| mark.expect("written")).collect()).collect();
        assert_eq!(found, wanted, "{collective:?} of {participants} from {root}, {sizes:?}");
    }
}

#[test]
fn what_there_is_not_is_refused_with_the_number_that_is_wrong() {
    let root = Collective::Gather.pieces(3, 3, Sizes::Equal(8)).expect_err("refused");
    assert_eq!(root, CollectiveError::Root { root: 3, participants: 3 });
    let sizes = Collective::AllToAll.pieces(3, 0, Sizes::Each(&[1; 8])).expect_err("refused");
    assert_eq!(sizes, CollectiveError::SizeCount { given: 8, participants: 3, wanted: 9 });
    let large = Collective::AllGather.pieces(3, 0, Sizes::Equal(u64::MAX / 2)).expect_err("refused");
    assert_eq!(large, CollectiveError::TooLarge { participant: 0 });
    assert!(Collective::AllToAll.pieces(0, 7, Sizes::Equal(8)).expect("nothing").is_empty());
}
