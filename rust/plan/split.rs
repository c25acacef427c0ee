//! How many bytes each path gets, so that the whole batch is done as early as possible.
//!
//! With the fixed cost `f_p` and the rate of each path known, this is a linear program: the bytes `x_p` and the time `T` are the
//! variables, each transfer gives an equation and each resource a row
//!
//! ```text
//! minimise T   subject to   Σ_p∈transfer x_p = bytes,   f_r + Σ_p weight(p, r) · x_p / capacity_r ≤ T
//! ```
//!
//! where `f_r` is the smallest fixed cost among the paths that draw on `r`. Where no two paths share a resource (one transfer on a
//! directly wired node), the rows decouple and the optimum is found by filling: the cheapest paths start first and T rises until
//! they carry all bytes. A property test holds the two against each other.

use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem, SolveOptions};
use smallvec::SmallVec;

/// A path as the split sees it.
#[derive(Clone, Debug)]
pub(super) struct Column {
    /// Index into the demands.
    pub transfer: u32,
    /// Seconds before the path's resources carry its first byte, and after they carry the last one.
    pub fixed: f64,
    /// Seconds per byte on each resource.
    pub work: SmallVec<[(u32, f64); 8]>,
    /// Seconds per byte of link time: breaks ties in favour of paths that occupy less.
    pub toll: f64,
}

/// The solver gave up. The caller plans without several paths.
#[derive(Clone, Debug)]
pub(super) struct Unsolved(pub String);

/// Weight of the tie-break against T. Ties are common (a relay that only takes another transfer's link changes nothing), and the
/// tie-break must not buy link time with finishing time: 10⁻⁴ of it is below any measurement.
const TIE_BREAK: f64 = 1e-4;

/// Bytes for each column. `demands` are the bytes of each transfer; every transfer has at least one column.
pub(super) fn split(columns: &[Column], demands: &[f64], resources: usize) -> Result<Vec<f64>, Unsolved> {
    if columns.is_empty() {
        return Ok(Vec::new());
    }
    if disjoint(columns, resources) { Ok(fill(columns, demands)) } else { solve(columns, demands, resources) }
}

/// Whether no resource serves two columns.
fn disjoint(columns: &[Column], resources: usize) -> bool {
    let mut used = vec![false; resources];
    columns.iter().flat_map(|c| &c.work).all(|&(r, _)| !std::mem::replace(&mut used[r as usize], true))
}

/// The optimum where no two columns share a resource. Each transfer then has its own finishing time.
fn fill(columns: &[Column], demands: &[f64]) -> Vec<f64> {
    let slowest = |c: &Column| c.work.iter().map(|w| w.1).fold(0.0, f64::max);
    let mut bytes = vec![0.0; columns.len()];
    let mut own: Vec<usize> = Vec::new();
    for (transfer, &demand) in demands.iter().enumerate() {
        own.clear();
        own.extend((0..columns.len()).filter(|&i| columns[i].transfer as usize == transfer));
        own.sort_by(|&a, &b| columns[a].fixed.total_cmp(&columns[b].fixed).then(a.cmp(&b)));
        // A path without any resource (a copy inside one device) takes no time per byte.
        if let Some(&free) = own.iter().find(|&&i| slowest(&columns[i]) == 0.0) {
            bytes[free] = demand;
            continue;
        }
        // The first k paths carry Σ (T − fixed) · rate = demand. Path k + 1 joins only if it could start before that T.
        let (mut rates, mut started, mut finish) = (0.0, 0.0, f64::INFINITY);
        let mut joined = 0;
        for &i in &own {
            if columns[i].fixed >= finish {
                break;
            }
            let rate = slowest(&columns[i]).recip();
            rates += rate;
            started += rate * columns[i].fixed;
            finish = (demand + started) / rates;
            joined += 1;
        }
        for &i in &own[..joined] {
            bytes[i] = (finish - columns[i].fixed).max(0.0) / slowest(&columns[i]);
        }
    }
    bytes
}

/// The inequality of one resource.
#[derive(Clone)]
struct Row {
    /// The smallest fixed cost of its columns.
    fixed: f64,
    /// Columns, and their seconds per byte.
    terms: SmallVec<[(u32, f64); 8]>,
}

/// The general case, by the simplex method.
fn solve(columns: &[Column], demands: &[f64], resources: usize) -> Result<Vec<f64>, Unsolved> {
    // Scaled to the order of 1, which is what the solver's tolerances are made for.
    let scale = demands.iter().copied().fold(0.0, f64::max);
    let longest = columns.iter().map(|c| c.fixed + scale * c.work.iter().map(|w| w.1).fold(0.0, f64::max)).fold(0.0, f64::max);
    if !(scale > 0.0 && longest > 0.0 && longest.is_finite()) {
        return Err(Unsolved(format!("the batch has no scale: {scale} bytes in {longest} seconds")));
    }
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let time = problem.add_var(1.0, (0.0, f64::INFINITY));
    let variables: Vec<_> = columns.iter().map(|c| problem.add_var(TIE_BREAK * c.toll * scale / longest, (0.0, f64::INFINITY))).collect();

    let mut rows = vec![Row { fixed: f64::INFINITY, terms: SmallVec::new() }; resources];
    for (i, column) in columns.iter().enumerate() {
        for &(resource, work) in &column.work {
            let row = &mut rows[resource as usize];
            row.fixed = row.fixed.min(column.fixed);
            row.terms.push((i as u32, work));
        }
    }
    drop_implied(&mut rows);
    for Row { fixed, terms } in rows.iter().filter(|row| !row.terms.is_empty()) {
        let mut row = LinearExpr::empty();
        terms.iter().for_each(|&(i, work)| row.add(variables[i as usize], work * scale / longest));
        row.add(time, -1.0);
        problem.add_constraint(row, ComparisonOp::Le, -fixed / longest);
    }
    let mut shares: Vec<LinearExpr> = vec![LinearExpr::empty(); demands.len()];
    for (column, &variable) in columns.iter().zip(&variables) {
        shares[column.transfer as usize].add(variable, 1.0);
    }
    for (share, demand) in shares.into_iter().zip(demands) {
        problem.add_constraint(share, ComparisonOp::Eq, demand / scale);
    }
    let mut options = SolveOptions::default();
    options.presolve = false;
    let solution =
        problem.solve_with(options).map_err(|e| Unsolved(e.to_string()))?.into_solution().map_err(|_| Unsolved("interrupted".into()))?;
    let bytes: Vec<f64> = variables.iter().map(|&v| (solution.var_value(v) * scale).max(0.0)).collect();
    if bytes.iter().all(|b| b.is_finite()) { Ok(bytes) } else { Err(Unsolved("a share is not a number".into())) }
}

/// Many resources lie in a row (both ends of a port, a link and its uplink) and serve the same columns; only the tightest of
/// such a group can bind, and the program is smaller without the others.
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
        // Equal columns give equal fixed costs, so one row implies the other if each of its terms is at least as large.
        let implies = |a: usize, b: usize| rows[a].terms.iter().zip(&rows[b].terms).all(|(x, y)| x.1 >= y.1);
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
        Column { transfer, fixed, work: work.iter().copied().collect(), toll: work.iter().map(|w| w.1).sum() }
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
        // Transfer 0 may use links 0 or 1, transfer 1 only link 1: the first keeps to link 0.
        let columns = [column(0, 0.0, &[(0, 1e-9)]), column(0, 0.0, &[(1, 1e-9)]), column(1, 0.0, &[(1, 1e-9)])];
        let bytes = split(&columns, &[1e6, 1e6], 2).expect("solvable");
        assert!(bytes[1] < 1.0 && bytes[2] > 0.999e6, "{bytes:?}");
    }

    proptest! {
        /// The filling is the optimum of the linear program.
        #[test]
        fn filling_and_simplex_agree(paths in prop::collection::vec((0.0..1e-3f64, 1e-11..1e-9f64), 1..8), demand in 1e6..1e9f64) {
            let mut columns: Vec<_> = paths.iter().enumerate().map(|(i, &(fixed, work))| column(0, fixed, &[(i as u32, work)])).collect();
            let filled = fill(&columns, &[demand]);
            prop_assert!((filled.iter().sum::<f64>() / demand - 1.0).abs() < 1e-9);
            // A row binds even if its only path carries nothing, so the linear program gets just the paths that the filling uses.
            let mut used = filled.iter();
            columns.retain(|_| used.next().is_some_and(|b| *b > 0.0));
            let filled: Vec<f64> = filled.into_iter().filter(|b| *b > 0.0).collect();
            let solved = solve(&columns, &[demand], paths.len()).expect("solvable");
            let (a, b) = (finish(&columns, &filled), finish(&columns, &solved));
            prop_assert!(a <= b * (1.0 + 1e-3) && b <= a * (1.0 + 1e-3), "filling {a}, simplex {b}");
        }
    }
}
