//! Tests that all ranks use the same variant of a node plan in each communication step, even if they request the step at different times.

use super::*;
use crate::sync::thread;
use std::sync::Arc;

/// Shared memory in which `ranks` ranks agree on variants.
struct Memory(Vec<AtomicU64>);

impl Memory {
    fn new(ranks: u32) -> Memory {
        Memory((0..Spans::bytes(ranks) / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn spans(&self, rank: u32, ranks: u32) -> Spans {
        Spans::at(self.0.as_ptr().expose_provenance() as u64, rank, ranks)
    }
}

/// Returns the variant that a rank prefers for a communication step. It differs between ranks, stays the same for some steps, and is
/// sometimes measured.
fn wanted(rank: u32, step: u64) -> Choice {
    let mixed = (step * 31 + u64::from(rank) * 17).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    Choice { variant: if step % 16 < 5 { (mixed % 3) as usize } else { 1 }, measure: mixed.is_multiple_of(5) }
}

/// Requests all communication steps for one rank and returns the agreed variants.
fn ask(memory: &Memory, rank: u32, ranks: u32, steps: u64, ahead: Option<usize>) -> Vec<Choice> {
    let mut spans = Spans { ahead, ..memory.spans(rank, ranks) };
    (1..=steps).map(|step| spans.agree(step, wanted(rank, step))).collect()
}

fn all_take_the_same(ranks: u32, steps: u64, ahead: Option<usize>) {
    let memory = Arc::new(Memory::new(ranks));
    let threads: Vec<_> = (0..ranks)
        .map(|rank| {
            let memory = Arc::clone(&memory);
            thread::spawn(move || ask(&memory, rank, ranks, steps, ahead))
        })
        .collect();
    let taken: Vec<Vec<Choice>> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert!(taken.iter().all(|of_rank| *of_rank == taken[0]), "seen by all");
    let is_wanted = |step: usize| (0..ranks).any(|rank| wanted(rank, step as u64 + 1).variant == taken[0][step].variant);
    assert!(is_wanted(0), "the first to come decides");
}

#[cfg(shuttle)]
#[test]
fn shuttle_ranks_take_the_same_variants_whoever_comes_first() {
    shuttle::check_random(|| all_take_the_same(2, 12, None), 3000);
    shuttle::check_random(|| all_take_the_same(2, 24, Some(1)), 1000);
    shuttle::check_pct(|| all_take_the_same(3, 9, None), 3000, 3);
}

#[cfg(not(shuttle))]
#[test]
fn ranks_take_the_same_variants_whoever_comes_first() {
    for ranks in 1..=5 {
        all_take_the_same(ranks, 20_000, None);
        all_take_the_same(ranks, 20_000, Some(1));
    }
}

#[cfg(not(shuttle))]
mod alone {
    use super::*;
    use crate::backend::MomentState;
    use std::any::Any;

    #[test]
    fn a_rank_far_ahead_waits_for_nobody_and_the_others_follow() {
        let memory = Memory::new(3);
        let by_turns = |step: u64| Choice { variant: (step % 3) as usize, measure: false };
        let ask = |rank| {
            let mut spans = memory.spans(rank, 3);
            (1..=100).map(|step| spans.agree(step, by_turns(step)).variant as u64).collect::<Vec<_>>()
        };
        let first = ask(2);
        // A span of steps is extended if another rank still needs the word in which the span is stored.
        let expected: Vec<u64> = (1..=100).map(|step: u64| step.min(SPANS - 1) % 3).collect();
        assert_eq!(first, expected);
        for rank in [0, 1] {
            assert_eq!(ask(rank), first);
        }
        let again: Vec<Choice> = {
            let mut spans: Vec<Spans> = (0..3).map(|rank| memory.spans(rank, 3)).collect();
            spans.iter_mut().for_each(|spans| _ = spans.agree(100, Choice { variant: 0, measure: false }));
            let steps = (101..=120).map(|step| {
                let taken: Vec<Choice> = spans.iter_mut().map(|spans| spans.agree(step, by_turns(step))).collect();
                assert!(taken.iter().all(|choice| *choice == taken[0]));
                taken[0]
            });
            steps.collect()
        };
        assert!(again.windows(2).all(|pair| pair[0].variant != pair[1].variant), "all have come, and there is room again");
    }

    #[test]
    fn a_captured_step_fixes_the_variant_for_all_steps_that_follow() {
        let plain = |variant| Choice { variant, measure: false };
        let memory = Memory::new(2);
        let mut spans = [0, 1].map(|rank| memory.spans(rank, 2));
        for step in 1..=3 {
            assert_eq!(spans[0].agree(step, plain(1)), plain(1));
        }
        assert_eq!(spans[0].agree(4, Choice { variant: 0, measure: true }), Choice { variant: 0, measure: true }, "a try");
        // The rank that captures first is behind, at a communication step with another variant.
        assert_eq!((1..=3).map(|step| spans[1].agree(step, plain(0)).variant).collect::<Vec<_>>(), [1, 1, 1]);
        assert_eq!(spans[1].fix(4, 1), Some(0), "the other has begun the step, and no further one");
        assert_eq!(spans[0].agree(5, plain(1)), plain(0));
        assert_eq!((spans[0].fix(6, 1), spans[1].fix(4, 1)), (Some(0), Some(0)));

        let memory = Memory::new(2);
        let mut spans = [0, 1].map(|rank| memory.spans(rank, 2));
        spans[0].agree(1, Choice { variant: 2, measure: true });
        assert_eq!(spans[0].fix(2, 1), Some(1), "a try is not what all go on with");
        assert_eq!(spans[1].agree(1, plain(0)).variant, 2);
        assert_eq!((spans[1].fix(2, 0), spans[1].agree(9, plain(0))), (Some(1), plain(1)));

        let memory = Memory::new(2);
        let mut spans = [0, 1].map(|rank| memory.spans(rank, 2));
        (1..=3).for_each(|step| _ = spans[0].agree(step, plain(step as usize % 2)));
        assert_eq!(spans[1].fix(1, 0), None, "its graph would be launched beside steps of two variants");
        assert_eq!(spans[1].agree(1, plain(0)), plain(1), "nothing has changed");
    }

    #[test]
    fn a_time_is_known_when_all_have_told_it_and_lost_when_its_word_is_another_spans() {
        let memory = Memory::new(2);
        let mut spans = [0, 1].map(|rank| memory.spans(rank, 2));
        let measured = Choice { variant: 1, measure: true };
        spans.iter_mut().for_each(|spans| assert_eq!(spans.agree(1, measured), measured));
        let [one, other] = [0, 1].map(|rank: usize| spans[rank].words);
        assert_eq!(spans[0].span, 1);
        one.tell_time(1, 700);
        assert!(matches!(one.slowest(1), Reading::Later));
        other.tell_time(1, 900);
        assert!(matches!([one.slowest(1), other.slowest(1)], [Reading::Known(900), Reading::Known(900)]));
        one.tell_time(2, 5);
        for step in 2..=SPANS + 2 {
            spans.iter_mut().for_each(|spans| _ = spans.agree(step, measured));
        }
        assert!(matches!(one.slowest(2), Reading::Never), "the other rank will not tell it any more");
    }

    /// Time of the test's simulated clock.
    #[derive(Debug)]
    struct At(u64);

    impl MomentState for At {
        fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError> {
            Ok(Some(self.0 - earlier.as_any().downcast_ref::<At>().expect("of this clock").0))
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn while_one_ranks_kernel_waits_for_long_all_take_streams_and_a_graph_takes_the_kernel() {
        let memory = Memory::new(2);
        let late = [AtomicU64::new(0), AtomicU64::new(0)];
        let mut ranks: Vec<StepVariants> = (0..2)
            .map(|rank: u32| {
                let word = (&raw const late[rank as usize]).expose_provenance() as u64;
                StepVariants::by_lateness(memory.spans(rank, 2), Lateness::of(Some(word)))
            })
            .collect();
        let mut step = 0;
        let mut take = |ranks: &mut [StepVariants], first: usize| {
            step += 1;
            let taken = [first, 1 - first].map(|rank| ranks[rank].next(step));
            assert_eq!(taken[0], taken[1]);
            assert!(!taken[0].measure, "no time decides");
            taken[0].variant
        };
        assert!((0..2 * AHEAD).all(|_| take(&mut ranks, 0) == BY_KERNEL));
        late[1].store(1, Ordering::Relaxed);
        // The late rank comes second. It executes by kernels only the communication steps that were agreed on before, at most up to the
        // last of them.
        let mut until = |ranks: &mut [StepVariants], form: usize| (0..).take_while(|_| take(ranks, 1) != form).count() as u64;
        assert!(until(&mut ranks, BY_STREAMS) < AHEAD);
        let by_streams = 1 + until(&mut ranks, BY_KERNEL);
        assert!(by_streams > 1);
        assert_eq!(ranks.iter().map(StepVariants::by_streams).collect::<Vec<_>>(), [Some(by_streams); 2]);
        late[1].store(1, Ordering::Relaxed);
        assert!(until(&mut ranks, BY_STREAMS) <= 1, "a kernel that is tried is one");
        let fixed = ranks[0].fix(step + 1).expect("no other is further");
        assert_eq!((fixed.variant, ranks[1].next(step + 1).variant), (BY_KERNEL, BY_KERNEL));
    }

    #[test]
    fn all_ranks_go_on_with_what_is_fastest_for_the_slowest_and_follow_when_that_changes() {
        const RANKS: u32 = 3;
        let memory = Memory::new(RANKS);
        let mut ranks: Vec<StepVariants> = (0..RANKS).map(|rank| StepVariants::measured(memory.spans(rank, RANKS), &[0.0; 3], 7)).collect();
        let mut step = 0;
        // Times of each variant on each rank. If each rank chose by its own times, the first two would choose differently from the last.
        for times in [[[100, 100, 260], [110, 110, 200], [150, 150, 150]], [[90, 90, 90], [160, 80, 80], [150, 150, 150]]] {
            let mut run = |steps: u64| {
                let mut taken = [0; 3];
                for _ in 0..steps {
                    step += 1;
                    // The ranks alternate in being first.
                    let order = (0..RANKS as usize).map(|rank| (rank + step as usize) % RANKS as usize);
                    let of_all = order.map(|rank| {
                        let choice = ranks[rank].next(step);
                        if choice.measure {
                            let [begin, end]: [Box<dyn MomentState>; 2] =
                                [0, 1000 * times[choice.variant][rank]].map(|ns| Box::new(At(ns)) as _);
                            ranks[rank].measure(Ok(Moments { variant: choice.variant, begin, end }));
                        }
                        choice.variant
                    });
                    let of_all: Vec<usize> = of_all.collect();
                    assert!(of_all.iter().all(|variant| *variant == of_all[0]), "step {step}: {of_all:?}");
                    taken[of_all[0]] += 1;
                }
                taken
            };
            run(2000);
            let taken = run(1000);
            let slowest = times.map(|of_ranks| of_ranks.into_iter().max());
            let best = (0..3).min_by_key(|variant| slowest[*variant]).expect("three");
            assert!(taken[best] >= 980, "{times:?}: {taken:?}");
            for rank in &mut ranks {
                let known = rank.known([("", 0.0); 3].into_iter());
                assert!(known[best].is_in_force, "{}", known[best].sentence());
                let median = rank.medians().in_force.map(|seconds| (seconds * 1e6).round() as u64);
                assert_eq!(median, slowest[best], "of the slowest");
            }
        }
    }
}
