// SPDX-License-Identifier: MIT OR Apache-2.0

//! Jacobi relaxation on the devices of a node, in one process: `cargo run --example jacobi`.
//!
//! The rows of the mesh are divided among the devices. For each of two arrays, one plan exchanges the edge rows between devices, once per
//! time step. Streams and events order the work. The sweeps are host functions in the same streams, where a GPU program would launch
//! kernels. The result is compared, bit by bit, with that of the whole mesh on one device.

use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, Error, Event, Stream, Transfer};
use std::ops::Range;

/// Number of elements in a row, including the two fixed elements at its ends.
const ROW: usize = 1 << 12;
/// Number of rows of the whole mesh that are computed.
const ROWS: usize = 61;
const STEPS: usize = 50;

/// Rows that one device computes, with a ghost row above and below.
struct Part {
    rows: Range<usize>,
    stream: Stream,
    /// Two arrays, which alternate as old and new values.
    arrays: [Buffer<f64>; 2],
}

impl Part {
    fn new(ctx: &Context, device: Device, rows: Range<usize>) -> Result<Part, Error> {
        let start: Vec<f64> = (rows.start..rows.end + 2).flat_map(row_at_start).collect();
        let array = || Buffer::from_slice(ctx, device, &start);
        Ok(Part { stream: Stream::new(ctx, device)?, arrays: [array()?, array()?], rows })
    }

    /// Returns row `index` of an array. Row 0 is the upper ghost row.
    fn row(&self, array: usize, index: usize) -> mpgpu::Slice<f64> {
        self.arrays[array].slice(index * ROW..(index + 1) * ROW)
    }

    /// Enqueues a sweep that reads the array with index `old` and writes the other array.
    fn sweep(&self, old: usize) -> Result<(), Error> {
        let (old, new, rows) = (self.arrays[old].clone(), self.arrays[1 - old].clone(), self.rows.len());
        self.stream.launch_host(move || {
            // SAFETY: streams and events order sweeps and exchanges, so nothing else uses these arrays now.
            let (old, new) = unsafe { (old.as_slice(), new.as_mut_slice()) };
            // On the host backend, the CPU can access the memory of the devices.
            let (Some(old), Some(new)) = (old, new) else { return };
            for row in 1..=rows {
                for x in row * ROW + 1..(row + 1) * ROW - 1 {
                    new[x] = 0.25 * ((old[x - 1] + old[x + 1]) + (old[x - ROW] + old[x + ROW]));
                }
            }
        })
    }
}

/// Returns the initial values of a row of the whole mesh. The first and the last row of the mesh, and both ends of each row, are fixed.
fn row_at_start(row: usize) -> Vec<f64> {
    let fixed = |x: usize| 1.0 + 0.01 * (row * 7 + x % 13) as f64;
    (0..ROW).map(|x| if row == 0 || row == ROWS + 1 || x == 0 || x == ROW - 1 { fixed(x) } else { 0.0 }).collect()
}

/// Solves the problem on `devices` devices. Returns the computed rows after all time steps.
fn relax(ctx: &Context, devices: usize) -> Result<Vec<f64>, Error> {
    let first = |part: usize| part * ROWS / devices;
    let parts: Vec<Part> = (0..devices)
        .map(|part| Part::new(ctx, Device::gpu(part as u32 % ctx.gpus()), first(part)..first(part + 1)))
        .collect::<Result<_, _>>()?;
    // The edge rows of each part are copied into the ghost rows of its neighbours.
    let exchange = |array: usize| {
        let transfers = parts.windows(2).flat_map(|pair| {
            let (low, high) = (&pair[0], &pair[1]);
            let up: Transfer = (high.row(array, 0), low.row(array, low.rows.len())).into();
            [up, (low.row(array, low.rows.len() + 1), high.row(array, 1)).into()]
        });
        ctx.plan(transfers)
    };
    let (plans, exchanged) = ([exchange(0)?, exchange(1)?], Event::new(ctx)?);
    let swept: Vec<Event> = parts.iter().map(|_| Event::new(ctx)).collect::<Result<_, _>>()?;
    let order = &parts[0].stream;
    for step in 0..STEPS {
        for event in &swept {
            order.wait(event)?;
        }
        plans[step % 2].enqueue(order)?;
        exchanged.record(order)?;
        for (part, event) in parts.iter().zip(&swept) {
            part.stream.wait(&exchanged)?;
            part.sweep(step % 2)?;
            event.record(&part.stream)?;
        }
    }
    if devices > 1 {
        println!("{}", plans[0].describe());
    }
    let mut result = Vec::new();
    for part in &parts {
        part.stream.synchronize()?;
        result.extend(part.arrays[STEPS % 2].slice(ROW..(part.rows.len() + 1) * ROW).to_vec(&part.stream)?);
    }
    Ok(result)
}

/// Runs the example. Returns true if the result is bitwise equal to that of one device.
pub fn run() -> Result<bool, Error> {
    // The sweeps run on the CPU, so the devices are virtual.
    let ctx = Context::with_options(&ContextOptions { backend: Some(BackendChoice::Host), ..Default::default() })?;
    let (one, several) = (relax(&ctx, 1)?, relax(&ctx, 4)?);
    Ok(one.len() == ROWS * ROW && one.iter().map(|x| x.to_bits()).eq(several.iter().map(|x| x.to_bits())))
}

#[allow(dead_code)] // Used only by the program; the tests call `run`.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !run()? {
        return Err("the result of four devices differs from that of one".into());
    }
    println!("{ROWS} rows of {ROW} on 4 devices, {STEPS} steps: equal to one device, bit by bit");
    Ok(())
}
