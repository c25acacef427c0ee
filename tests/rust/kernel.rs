//! Compares the fused copy kernel, compiled for the CPU, with plain copies.

use mpgpu_devices::host::kernel::{Grid, Segment, copy_segments};
use proptest::prelude::*;

const CANARY: u8 = 0xa5;
/// Number of bytes between two destinations. They hold a known value that must not change.
const MARGIN: usize = 64;

/// Copy segment of a test: its size, and the alignments of source and destination.
#[derive(Copy, Clone, Debug)]
struct Piece {
    bytes: usize,
    dst_align: usize,
    src_align: usize,
}

/// Runs the kernel on `pieces` and compares the destinations and their surroundings with the result of a plain copy.
fn check(pieces: &[Piece], grid: Grid) {
    // Number of bytes for an aligned start, the requested alignment, and guard bytes on both sides.
    let room = |bytes: usize| (bytes + 2 * MARGIN + 32).next_multiple_of(32);
    let total: usize = pieces.iter().map(|piece| room(piece.bytes)).sum();
    let mut random = 0x2545_f491u32;
    let source: Vec<u8> = (0..total + 32)
        .map(|_| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 24) as u8
        })
        .collect();
    let mut target = vec![CANARY; total + 32];
    let mut expected = target.clone();
    // Offsets from here are multiples of 32 away from an address that is one.
    let src_base = source.as_ptr().align_offset(32);
    let dst_base = target.as_mut_ptr().align_offset(32);
    let mut at = 0;
    let mut segments = Vec::new();
    for piece in pieces {
        let (dst, src) = (dst_base + at + MARGIN + piece.dst_align, src_base + at + MARGIN + piece.src_align);
        // The address of an empty segment need not be valid.
        let nothing = piece.bytes == 0;
        segments.push(Segment {
            dst: if nothing { 1 } else { target[dst..].as_mut_ptr() as u64 },
            src: if nothing { 3 } else { source[src..].as_ptr() as u64 },
            bytes: piece.bytes as u64,
        });
        expected[dst..dst + piece.bytes].copy_from_slice(&source[src..src + piece.bytes]);
        at += room(piece.bytes);
    }
    // SAFETY: every range lies inside `source` or `target`, `room` keeps destinations apart, and both vectors are alive.
    unsafe { copy_segments(&segments, grid) };
    if let Some(offset) = target.iter().zip(&expected).position(|(a, b)| a != b) {
        panic!("byte {offset} is {:#x}, not {:#x}: {grid:?} {pieces:?}", target[offset], expected[offset]);
    }
}

fn grids() -> impl Strategy<Value = Grid> {
    let lanes = prop_oneof![Just(1), Just(2), Just(31), Just(32), Just(33), Just(128), Just(256)];
    (4u32..=12, prop_oneof![Just(1), Just(2), Just(3), Just(8), Just(132)], lanes).prop_map(|(tile_shift, blocks, lanes)| Grid {
        tile_shift,
        blocks,
        lanes,
    })
}

fn sizes(tile_shift: u32) -> impl Strategy<Value = usize> {
    let tile = 1usize << tile_shift;
    prop_oneof![
        4 => prop::sample::select(vec![0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33]),
        2 => prop::sample::select(vec![tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 5 * tile + 3]),
        1 => 0..=3000usize,
    ]
}

fn pieces() -> impl Strategy<Value = (Grid, Vec<Piece>)> {
    grids().prop_flat_map(|grid| {
        let piece = (sizes(grid.tile_shift), 0..32usize, 0..32usize).prop_map(|(bytes, dst_align, src_align)| Piece {
            bytes,
            dst_align,
            src_align,
        });
        (Just(grid), prop::collection::vec(piece, 0..40))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_lists_are_copied_as_by_a_plain_copy((grid, pieces) in pieces()) {
        check(&pieces, grid);
    }

    /// Tests long lists. One launch copies at most 120 segments. Lists whose length is near a multiple of that must be divided at the right
    /// places, with and without empty segments.
    #[test]
    fn long_lists_take_several_launches(
        count in prop::sample::select(vec![119usize, 120, 121, 239, 240, 241, 500]),
        bytes in prop::collection::vec(prop_oneof![Just(0usize), 1..60usize], 1..7),
        lanes in prop_oneof![Just(1u32), Just(32)],
    ) {
        let pieces: Vec<_> = (0..count).map(|i| Piece { bytes: bytes[i % bytes.len()], dst_align: i % 32, src_align: (i / 3) % 32 }).collect();
        check(&pieces, Grid { tile_shift: 4, blocks: 3, lanes });
    }
}

#[test]
fn every_pair_of_alignments_is_right_at_every_border() {
    for bytes in [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1000] {
        let pieces: Vec<_> = (0..32 * 32).map(|i| Piece { bytes, dst_align: i / 32, src_align: i % 32 }).collect();
        check(&pieces, Grid { tile_shift: 6, blocks: 2, lanes: 5 });
        check(&pieces, Grid::SEQUENTIAL);
    }
}

#[test]
fn the_default_tile_is_right_at_its_borders() {
    let pieces: Vec<_> = [(1 << 14) - 1, 1 << 14, (1 << 14) + 1, (3 << 14) + 5, 1 << 20]
        .into_iter()
        .flat_map(|bytes| [(0, 0), (8, 16), (4, 0), (1, 0), (9, 25)].map(|(dst_align, src_align)| Piece { bytes, dst_align, src_align }))
        .collect();
    check(&pieces, Grid::SEQUENTIAL);
    check(&pieces, Grid { lanes: 256, blocks: 8, ..Grid::SEQUENTIAL });
}

#[test]
fn nothing_at_all_is_fine() {
    check(&[], Grid::SEQUENTIAL);
    check(&[Piece { bytes: 0, dst_align: 0, src_align: 0 }; 130], Grid::SEQUENTIAL);
}

#[test]
fn layouts_out_of_range_are_brought_into_it() {
    let pieces = [Piece { bytes: 100, dst_align: 1, src_align: 1 }; 3];
    check(&pieces, Grid { tile_shift: 0, blocks: 0, lanes: 0 });
    check(&pieces, Grid { tile_shift: 64, blocks: 1, lanes: 1 });
}
