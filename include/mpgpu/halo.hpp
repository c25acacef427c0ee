// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_HPP
#define MPGPU_HALO_HPP

/// @file
/// Halo exchange on structured grids of one, two and three dimensions: a header over mpgpu.hpp and nothing else.
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
/// halo.exchange(stream);                                            // every time step; or, around other work:
/// halo.start(stream);  interior(stream);  halo.finish(stream);  boundary(stream);
/// @endcode
///
/// A rank's array of a variable has `array_extents(grid, rank)` elements, ghost cells included, without padding, x
/// fastest. Each exchange copies the outermost computed cells of every neighbour into the ghost cells on that side:
/// straight where they lie in few pieces, all else packed into one message for each pair of ranks, which travels as one
/// transfer and is unpacked by the receiver. What counts as few is measured when the plan is made
/// (`options::direct_pieces`).
///
/// Pack and unpack are CPU loops in stream order on the host backend. On CUDA they are a kernel, which the caller's
/// nvcc compiles: the one of mpgpu/halo.cuh, or the caller's own, see `copier`. Without one nothing is packed, and a
/// plan that has too many pieces for that is refused.
///
/// With mpgpu/halo_mpi.hpp a plan is also made of one process for each rank.
///
/// Errors are thrown, as in mpgpu.hpp.

#include <mpgpu/halo/measure.hpp>
#include <mpgpu/halo/mesh.hpp>
#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/pieces.hpp>
#include <mpgpu/halo/plan.hpp>
#include <mpgpu/halo/pushed.hpp>
#include <mpgpu/halo/schedule.hpp>

#endif // MPGPU_HALO_HPP
