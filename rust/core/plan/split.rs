//! Divides transfers among paths: computes the bytes of each path with which the whole batch finishes as early as possible.
//!
//! With known fixed costs `f_p` and rates of the paths, this is a linear program. Its variables are the bytes `x_p` of each path and the
//! time `T`. Each transfer gives an equation, and each resource an inequality:
//!
//! ```text
//! minimise T   subject to   Σ_p∈transfer x_p = bytes,   f_r + Σ_p weight(p, r) · x_p / capacity_r ≤ T
//! ```
//!
//! Here `f_r` is the smallest fixed cost among the paths that use resource `r`. The equations are eliminated before solving: one path of
//! each transfer carries the bytes that the others leave. So the simplex method starts from one path for each transfer and not from an
//! empty solution.
//!
//! If no two paths share a resource (one transfer between directly connected GPUs), the inequalities are independent, and [`fill`] finds
//! the optimum directly: paths with the lowest fixed time start first, and T rises until they carry all bytes. It models the time to fill
//! each pipeline exactly, in proportion to the path's bytes. The linear program treats that time as a fixed cost, because inequalities for
//! single paths would fill the gaps of pipelines with tiny parts on other paths. A property test compares the two methods.

use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem, SolveOptions, SolveOutcome};
use smallvec::{SmallVec, smallvec};

/// Path in the linear program: one column of its matrix.
#[derive(Clone, Debug)]
pub(super) struct Column {
    /// Transfer that the path belongs to, as an index into the list of transfers.
    pub transfer: u32,
    /// Fixed cost of the path in seconds, for about the expected number of bytes: the time for which the path leaves its resources idle.
    pub fixed: f64,
    /// Fixed time of the path in seconds and its time per byte in seconds, if no other path uses its resources.
    pub line: (f64, f64),
    /// Time for which one byte on the path keeps each resource busy, as pairs of resource index and seconds.
    pub work: SmallVec<[(u32, f64); 8]>,
    /// Sum over the hops of the time for which one byte occupies the links, seconds. Among equally fast divisions, the one that occupies
    /// links for less time is preferred.
    pub link_time: f64,
}

/// Error: the solver failed. It contains the reason. The caller then uses one path for each transfer.
#[derive(Clone, Debug)]
pub(super) struct Unsolved(pub String);

/// Weight of the link time ([`Column::link_time`]) relative to the finishing time `T` in the objective function. Many divisions have the
/// same `T`, for example if a relay only uses a link that another transfer could use. The weight selects the division with the least link
/// time. It is so small that `T` does not grow measurably.
const TIE_BREAK: f64 = 1e-4;

/// Largest fraction by which rounding errors of the solver may exceed a transfer's bytes.
const WHOLE: f64 = 1e-7;

/// Returns the bytes of each path. Each column is a path. `demands` contains the bytes of each transfer; every transfer has at least one
/// path.
pub(super) fn split(columns: &[Column], demands: &[f64], resources: usize) -> Result<Vec<f64>, Unsolved> {
    if columns.is_empty() {
        return Ok(Vec::new());
    }
    if disjoint(columns, resources) { Ok(fill(columns, demands)) } else { solve(columns, demands, resources) }
}

/// True if no two paths (columns) use the same resource.
fn disjoint(columns: &[Column], resources: usize) -> bool {
    let mut used = vec![false; resources];
    columns.iter().flat_map(|c| &c.work).all(|&(r, _)| !std::mem::replace(&mut used[r as usize], true))
}

/// Returns the optimal bytes of each path (column) if no two paths share a resource. Each transfer then has its own finishing time.
pub(super) fn fill(columns: &[Column], demands: &[f64]) -> Vec<f64> {
    let (fixed, each) = (|i: usize| columns[i].line.0, |i: usize| columns[i].line.1);
    let mut bytes = vec![0.0; columns.len()];
    let mut own: Vec<usize> = Vec::new();
    let mut rest = 0..columns.len();
    for (transfer, &demand) in demands.iter().enumerate() {
        own.clear();
        // The columns of a transfer are contiguous, in the order of the transfers.
        while let Some(i) = rest.clone().next().filter(|&i| columns[i].transfer as usize == transfer) {
            own.push(i);
            rest.next();
        }
        own.sort_by(|&a, &b| fixed(a).total_cmp(&fixed(b)).then(a.cmp(&b)));
        // A path without resources, which is a copy inside one device, takes no time per byte.
        if let Some(&free) = own.iter().find(|&&i| each(i) == 0.0) {
            bytes[free] = demand;
            continue;
        }
        // The first k paths carry Σ (T − fixed) · rate = demand. Path k + 1 is used only if its fixed time is below that T.
        let (mut rates, mut started, mut finish) = (0.0, 0.0, f64::INFINITY);
        let mut joined = 0;
        for &i in &own {
            if fixed(i) >= finish {
                break;
            }
            let rate = each(i).recip();
            rates += rate;
            started += rate * fixed(i);
            finish = (demand + started) / rates;
            joined += 1;
        }
        for &i in &own[..joined] {
            bytes[i] = (finish - fixed(i)).max(0.0) / each(i);
        }
    }
    bytes
}

/// Pairs of a group of paths and the time for which one byte of that group keeps a resource busy, in seconds.
type Terms = SmallVec<[(u32, f64); 8]>;

/// Inequality of the linear program for one resource.
#[derive(Clone)]
struct Row {
    /// Smallest fixed cost of the groups of paths in this inequality, seconds.
    fixed: f64,
    terms: Terms,
}

/// Returns the bytes of each column in the general case, by the simplex method.
fn solve(columns: &[Column], demands: &[f64], resources: usize) -> Result<Vec<f64>, Unsolved> {
    // Values are scaled to about 1, because the solver's tolerances are absolute.
    let scale = demands.iter().copied().fold(0.0, f64::max);
    let longest = columns.iter().map(|c| c.fixed + scale * c.work.iter().map(|w| w.1).fold(0.0, f64::max)).fold(0.0, f64::max);
    if !(scale > 0.0 && longest > 0.0 && longest.is_finite()) {
        return Err(Unsolved(format!("the size ({scale} bytes) or the time ({longest} s) of the batch is not positive and finite")));
    }
    let groups = alike(columns, resources);
    let transfers = transfers(&groups, demands);
    let (settled, rows): (Vec<_>, Vec<_>) =
        rows(&groups, resources).iter().map(|row| over_rests(row, &groups, &transfers)).partition(|row| row.terms.is_empty());

    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let soonest = settled.iter().map(|row| row.fixed).fold(0.0, f64::max);
    let time = problem.add_var(1.0, (soonest / longest, f64::INFINITY));
    let mut variables = vec![None; groups.len()];
    for transfer in &transfers {
        for i in transfer.others() {
            let link_time = (groups[i].link_time - groups[transfer.rest].link_time) * scale / longest;
            variables[i] = Some(problem.add_var(TIE_BREAK * link_time, (0.0, f64::INFINITY)));
        }
    }
    let sum = |terms: &mut dyn Iterator<Item = (usize, f64)>| {
        let mut sum = LinearExpr::empty();
        terms.for_each(|(i, factor)| variables[i].into_iter().for_each(|variable| sum.add(variable, factor)));
        sum
    };
    for Row { fixed, terms } in &rows {
        let mut row = sum(&mut terms.iter().map(|&(i, work)| (i as usize, work * scale / longest)));
        row.add(time, -1.0);
        problem.add_constraint(row, ComparisonOp::Le, -fixed / longest);
    }
    let mut options = SolveOptions::default();
    options.presolve = false;
    let solved = |outcome: Result<SolveOutcome, microlp::Error>| {
        outcome.map_err(|e| Unsolved(e.to_string()))?.into_solution().map_err(|_| Unsolved("interrupted".into()))
    };
    let mut solution = solved(problem.solve_with(options))?;
    // Non-negativity constraints of the eliminated variables are added lazily: few transfers need them, and each further inequality costs
    // time in every iteration of the solver.
    let mut free: Vec<&Transfer> = transfers.iter().collect();
    loop {
        let others = |transfer: &Transfer| transfer.others().filter_map(|i| variables[i]).map(|v| solution.var_value(v)).sum::<f64>();
        let Some(at) = free.iter().position(|transfer| others(transfer) * scale > transfer.demand * (1.0 + WHOLE)) else { break };
        let transfer = free.swap_remove(at);
        let all = sum(&mut transfer.others().map(|i| (i, 1.0)));
        solution = solved(solution.add_constraint(all, ComparisonOp::Le, transfer.demand / scale))?;
    }
    let finish = solution.var_value(time) * longest;
    let mut bytes = vec![0.0; columns.len()];
    for transfer in &transfers {
        let mut rest = transfer.demand;
        for i in transfer.others() {
            let share = variables[i].map_or(0.0, |variable| solution.var_value(variable)) * scale;
            groups[i].hand_out(share, finish, columns, &mut bytes);
            rest -= share;
        }
        groups[transfer.rest].hand_out(rest, finish, columns, &mut bytes);
    }
    if bytes.iter().all(|b| b.is_finite()) { Ok(bytes) } else { Err(Unsolved("a share is not a number".into())) }
}

/// Groups of interchangeable paths of one transfer, and the size of the transfer in bytes. The group with the smallest `link_time` (`rest`)
/// carries the bytes that the other groups leave.
struct Transfer {
    groups: std::ops::Range<usize>,
    rest: usize,
    demand: f64,
}

impl Transfer {
    fn others(&self) -> impl Iterator<Item = usize> {
        let rest = self.rest;
        self.groups.clone().filter(move |&i| i != rest)
    }
}

fn transfers(groups: &[Group], demands: &[f64]) -> Vec<Transfer> {
    let mut transfers: Vec<Transfer> = Vec::with_capacity(demands.len());
    for (own, &demand) in groups.chunk_by(|a, b| a.transfer == b.transfer).zip(demands) {
        let first = transfers.last().map_or(0, |before| before.groups.end);
        let of = first..first + own.len();
        let rest = of.clone().min_by(|&a, &b| groups[a].link_time.total_cmp(&groups[b].link_time)).unwrap_or(first);
        transfers.push(Transfer { groups: of, rest, demand });
    }
    transfers
}

/// Returns the inequalities of the resources that may limit the time: resources that several paths share, and resources that only one group
/// of paths uses.
fn rows(groups: &[Group], resources: usize) -> Vec<Row> {
    let mut rows = vec![Row { fixed: f64::INFINITY, terms: Terms::new() }; resources];
    for (i, group) in groups.iter().enumerate() {
        for &(resource, work) in &group.shared {
            let row = &mut rows[resource as usize];
            row.fixed = row.fixed.min(group.fixed);
            row.terms.push((i as u32, work));
        }
    }
    drop_implied(&mut rows);
    rows.retain(|row| !row.terms.is_empty());
    let own = groups.iter().enumerate().filter(|(_, group)| group.rate.is_finite());
    rows.extend(own.map(|(i, group)| Row { fixed: group.fixed, terms: smallvec![(i as u32, group.rate.recip())] }));
    rows
}

/// Returns the inequality after elimination of each transfer's `rest` group. The time that this group would need for its whole transfer
/// becomes part of the fixed cost, and is reduced by each byte that another group carries.
fn over_rests(row: &Row, groups: &[Group], transfers: &[Transfer]) -> Row {
    let mut over = Row { fixed: row.fixed, terms: Terms::new() };
    let mut add = |i: usize, work: f64| match over.terms.iter_mut().find(|term| term.0 == i as u32) {
        Some(term) => term.1 += work,
        None => over.terms.push((i as u32, work)),
    };
    for &(i, work) in &row.terms {
        let transfer = &transfers[groups[i as usize].transfer as usize];
        if transfer.rest == i as usize {
            over.fixed += work * transfer.demand;
            transfer.others().for_each(|other| add(other, -work));
        } else {
            add(i as usize, work);
        }
    }
    // If both groups use the resource equally, the difference consists of rounding errors only.
    let most = row.terms.iter().map(|term| term.1).fold(0.0, f64::max);
    over.terms.retain(|term| term.1.abs() > 1e-9 * most);
    over
}

/// Interchangeable paths (columns) of a transfer. They have the same fixed cost and use shared resources equally. No other path uses their
/// other resources. One variable represents all of them, so the seven relays into a GPU become two or three variables.
struct Group {
    transfer: u32,
    members: SmallVec<[u32; 8]>,
    /// Fixed cost of each column of the group, seconds.
    fixed: f64,
    link_time: f64,
    shared: SmallVec<[(u32, f64); 8]>,
    /// Sum of the rates of the resources that only one path of the group uses, bytes/s; infinite if there are none.
    rate: f64,
}

fn alike(columns: &[Column], resources: usize) -> Vec<Group> {
    let mut users = vec![0_u32; resources];
    columns.iter().flat_map(|c| &c.work).for_each(|w| users[w.0 as usize] += 1);
    let mut groups: Vec<Group> = Vec::with_capacity(columns.len());
    for (i, column) in columns.iter().enumerate() {
        let shared: SmallVec<[(u32, f64); 8]> = column.work.iter().copied().filter(|w| users[w.0 as usize] > 1).collect();
        let rate = own_work(column, &shared).recip();
        // The columns of a transfer are contiguous.
        let mut same = groups.iter_mut().rev().take_while(|g| g.transfer == column.transfer);
        match same.find(|g| g.rate.is_finite() && rate.is_finite() && g.fixed == column.fixed && g.shared == shared) {
            Some(group) => {
                group.members.push(i as u32);
                group.link_time = group.link_time.min(column.link_time);
                group.rate += rate;
            }
            None => groups.push(Group {
                transfer: column.transfer,
                members: smallvec![i as u32],
                fixed: column.fixed,
                link_time: column.link_time,
                shared,
                rate,
            }),
        }
    }
    groups
}

/// Returns the time per byte on the slowest resource that no other path shares, in seconds.
fn own_work(column: &Column, shared: &[(u32, f64)]) -> f64 {
    column.work.iter().filter(|w| !shared.contains(w)).map(|w| w.1).fold(0.0, f64::max)
}

impl Group {
    /// Assigns the group's bytes to as few columns as can carry them within `finish` seconds, because each further path costs operations.
    fn hand_out(&self, mut left: f64, finish: f64, columns: &[Column], bytes: &mut [f64]) {
        for &i in &self.members {
            let most = (finish - self.fixed).max(0.0) / own_work(&columns[i as usize], &self.shared);
            let share = if self.members.len() == 1 { left } else { left.min(most) };
            bytes[i as usize] = share.max(0.0);
            left -= share;
        }
        // The remainder is a rounding error.
        bytes[self.members[0] as usize] += left.max(0.0);
    }
}

/// Removes redundant inequalities. Many resources are in series (both ends of a port, a link and its uplink) and are used by the same
/// columns. Only the tightest of them can limit the time, and the linear program is smaller without the others.
fn drop_implied(rows: &mut [Row]) {
    let mut seen: ahash::HashMap<SmallVec<[u32; 8]>, usize> = ahash::HashMap::default();
    for at in 0..rows.len() {
        if rows[at].terms.is_empty() {
            continue;
        }
        let who: SmallVec<[u32; 8]> = rows[at].terms.iter().map(|t| t.0).collect();
        let Some(&first) = seen.get(&who) else {
            seen.insert(who, at);
            continue;
        };
        // An inequality implies another one if its fixed cost and each of its terms are at least as large as those of the other one.
        let implies =
            |a: usize, b: usize| rows[a].fixed >= rows[b].fixed && rows[a].terms.iter().zip(&rows[b].terms).all(|(x, y)| x.1 >= y.1);
        if implies(first, at) {
            rows[at].terms.clear();
        } else if implies(at, first) {
            rows[first].terms.clear();
            seen.insert(who, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn column(transfer: u32, fixed: f64, work: &[(u32, f64)]) -> Column {
        let slowest = work.iter().map(|w| w.1).fold(0.0, f64::max);
        let (work, link_time) = (work.iter().copied().collect(), work.iter().map(|w| w.1).sum());
        Column { transfer, fixed, line: (fixed, slowest), work, link_time }
    }

    fn finish(columns: &[Column], bytes: &[f64]) -> f64 {
        columns
            .iter()
            .zip(bytes)
            .filter(|(_, b)| **b > 0.0)
            .map(|(c, b)| c.fixed + b * c.work.iter().map(|w| w.1).fold(0.0, f64::max))
            .fold(0.0, f64::max)
    }

    #[test]
    fn two_equal_paths_take_half_each() {
        let columns = [column(0, 0.0, &[(0, 1e-9)]), column(0, 0.0, &[(1, 1e-9)])];
        let bytes = split(&columns, &[1e6], 2).expect("solvable");
        assert_eq!(bytes, [5e5, 5e5]);
    }

    #[test]
    fn a_path_that_would_start_too_late_gets_nothing() {
        let columns = [column(0, 0.0, &[(0, 1e-9)]), column(0, 1.0, &[(1, 1e-9)])];
        assert_eq!(split(&columns, &[1e6], 2).expect("solvable"), [1e6, 0.0]);
    }

    #[test]
    fn transfers_that_share_a_link_leave_it_to_the_one_that_needs_it() {
        // Transfer 0 may use links 0 or 1, and transfer 1 only link 1. So transfer 0 uses only link 0.
        let columns = [column(0, 0.0, &[(0, 1e-9)]), column(0, 0.0, &[(1, 1e-9)]), column(1, 0.0, &[(1, 1e-9)])];
        let bytes = split(&columns, &[1e6, 1e6], 2).expect("solvable");
        assert!(bytes[1] < 1.0 && bytes[2] > 0.999e6, "{bytes:?}");
    }

    #[test]
    fn relays_alike_are_used_one_after_the_other() {
        // Resource 0 is an uplink that carries as much as two of the four relays' own links.
        let columns: Vec<Column> = (0..4).map(|i| column(0, 0.0, &[(0, 0.5e-9), (1 + i, 1e-9)])).collect();
        let bytes = split(&columns, &[1e6], 5).expect("solvable");
        assert!((bytes[0] - 5e5).abs() < 1.0 && (bytes[1] - 5e5).abs() < 1.0 && bytes[2] < 1.0, "{bytes:?}");
    }

    proptest! {
        // Failing cases are printed; nothing is written into the source tree.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Random columns and demands: all bytes are distributed, and no resource needs longer than in the best of many random divisions.
        #[test]
        fn no_random_split_is_faster(seed in any::<u64>()) {
            let mut state = seed;
            let mut below = |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % n
            };
            let (transfers, resources) = (1 + below(3) as u32, 2 + below(6) as u32);
            let owners: Vec<u32> = (0..transfers).flat_map(|t| vec![t; 1 + below(5) as usize]).collect();
            let columns: Vec<Column> = owners
                .into_iter()
                .map(|t| {
                    let mut on: Vec<u32> = (0..1 + below(3)).map(|_| below(u64::from(resources)) as u32).collect();
                    on.sort_unstable();
                    on.dedup();
                    let work: Vec<_> = on.into_iter().map(|r| (r, [1e-9, 2e-9, 3e-9][(r % 3) as usize])).collect();
                    column(t, 0.0, &work)
                })
                .collect();
            let demands: Vec<f64> = (0..transfers).map(|_| 1e6 + below(1_000_000) as f64).collect();
            let busiest = |bytes: &[f64]| {
                let mut load = vec![0.0; resources as usize];
                columns.iter().zip(bytes).for_each(|(c, b)| c.work.iter().for_each(|w| load[w.0 as usize] += w.1 * b));
                load.into_iter().fold(0.0, f64::max)
            };
            let bytes = split(&columns, &demands, resources as usize).expect("solvable");
            for (t, demand) in demands.iter().enumerate() {
                let given: f64 = columns.iter().zip(&bytes).filter(|(c, _)| c.transfer as usize == t).map(|(_, b)| b).sum();
                prop_assert!((given / demand - 1.0).abs() < 1e-6, "transfer {t}: {given} of {demand}");
            }
            for _ in 0..200 {
                let weights: Vec<f64> = columns.iter().map(|_| below(1000) as f64 + 1e-3).collect();
                let random: Vec<f64> = columns.iter().zip(&weights).map(|(c, weight)| {
                    let all: f64 = columns.iter().zip(&weights).filter(|(d, _)| d.transfer == c.transfer).map(|(_, w)| w).sum();
                    demands[c.transfer as usize] * weight / all
                }).collect();
                prop_assert!(busiest(&bytes) <= busiest(&random) * (1.0 + 1e-3), "{bytes:?} is slower than {random:?}");
            }
        }

        /// The result of `fill` is the optimum of the linear program.
        #[test]
        fn filling_and_simplex_agree(paths in prop::collection::vec((0.0..1e-3f64, 1e-11..1e-9f64), 1..8), demand in 1e6..1e9f64) {
            agree(&paths, demand)?;
        }
    }

    fn agree(paths: &[(f64, f64)], demand: f64) -> Result<(), TestCaseError> {
        let mut columns: Vec<_> = paths.iter().enumerate().map(|(i, &(fixed, work))| column(0, fixed, &[(i as u32, work)])).collect();
        let filled = fill(&columns, &[demand]);
        prop_assert!((filled.iter().sum::<f64>() / demand - 1.0).abs() < 1e-9);
        // An inequality counts the fixed cost of a path even if the path carries nothing, so the linear program gets only the paths that
        // `fill` uses.
        let mut used = filled.iter();
        columns.retain(|_| used.next().is_some_and(|b| *b > 0.0));
        let filled: Vec<f64> = filled.into_iter().filter(|b| *b > 0.0).collect();
        let solved = solve(&columns, &[demand], paths.len()).expect("solvable");
        let (a, b) = (finish(&columns, &filled), finish(&columns, &solved));
        prop_assert!(a <= b * (1.0 + 1e-3) && b <= a * (1.0 + 1e-3), "filling {a}, simplex {b}");
        Ok(())
    }

    #[test]
    fn filling_and_simplex_agree_where_a_path_starts_when_the_other_ends() {
        let paths = [(0.0, 8.118350090664652e-10), (0.00012470484665065145, 1e-11)];
        agree(&paths, 1e6).expect("the same time");
    }
}
