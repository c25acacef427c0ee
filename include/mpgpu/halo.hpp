// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_HPP
#define MPGPU_HALO_HPP

/// @file
/// Halo exchange on structured grids of one, two and three dimensions. Needs only mpgpu.hpp.
///
/// @code
/// mpgpu::halo::grid grid;
/// grid.cells = {256, 256, 256};                                     // of the whole mesh; x is contiguous
/// grid.ranks = {1, 2, 2};
/// grid.periodic = {true, true, true};
/// grid.ghost = {1, 1, 1};
/// std::vector<mpgpu::halo::rank_arrays> arrays(mpgpu::halo::rank_count(grid));
/// arrays[r] = {mpgpu::halo::array_of(density[r]), mpgpu::halo::array_of(energy[r])};
///
/// mpgpu::halo::plan halo(ctx, grid, arrays);                        // once
/// halo.exchange(stream);                                            // each time step; or overlapped with other work:
/// halo.start(stream);  interior(stream);  halo.finish(stream);  boundary(stream);
/// @endcode
///
/// The array that a rank has for each variable contains `array_extents(grid, rank)` elements including ghost cells,
/// without padding. Elements that are adjacent in x are adjacent in memory. Each exchange copies the outermost computed
/// cells of every neighbour into the ghost cells on that side. Cells that form few contiguous pieces are copied
/// directly. All other cells are packed into one message per pair of ranks, which moves as one transfer and is unpacked
/// by the receiver. The maximum number of directly copied pieces is measured when the plan is made
/// (`options::direct_pieces`).
///
/// On the host backend, CPU loops pack and unpack in stream order. On CUDA, this is done by a kernel, which the
/// caller's nvcc compiles: the kernel of mpgpu/halo.cuh, or the caller's own (`copier`). Without a kernel nothing is
/// packed, and a plan that would need packing fails.
///
/// mpgpu/halo_mpi.hpp adds plans with one process per rank.
///
/// Errors are thrown as described in mpgpu.hpp.

#include <mpgpu/halo/measure.hpp>
#include <mpgpu/halo/mesh.hpp>
#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/pieces.hpp>
#include <mpgpu/halo/plan.hpp>
#include <mpgpu/halo/pushed.hpp>
#include <mpgpu/halo/schedule.hpp>

#endif // MPGPU_HALO_HPP
