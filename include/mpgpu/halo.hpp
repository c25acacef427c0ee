// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_HPP
#define MPGPU_HALO_HPP

/// @file
/// Halo exchange on structured grids of one, two and three dimensions. Needs only mpgpu.hpp.
///
/// @code
/// mpgpu::halo::grid grid;
/// grid.cells = {256, 256, 256};                                     // cells of the whole mesh; x is contiguous
/// grid.ranks = {1, 2, 2};
/// grid.periodic = {true, true, true};
/// grid.ghost = {1, 1, 1};
/// std::vector<mpgpu::halo::rank_arrays> arrays(mpgpu::halo::rank_count(grid));
/// arrays[r] = {mpgpu::halo::array_of(density[r]), mpgpu::halo::array_of(energy[r])};
///
/// mpgpu::halo::plan halo(ctx, grid, arrays);                        // created once
/// halo.exchange(stream);                                            // in each time step; or overlapped with other
/// work: halo.start(stream);  interior(stream);  halo.finish(stream);  boundary(stream);
/// @endcode
///
/// Arrays: a rank has one array for each variable. It contains `array_extents(grid, rank)` elements including ghost
/// cells, without padding, unless an `array_layout` states otherwise. Elements that are adjacent in x are adjacent in
/// memory.
///
/// Boxes: if the mesh is not divided into a regular grid of ranks, a `domain` and the boxes of each rank describe it.
///
/// Exchange: the outermost computed cells of every neighbour are copied into the ghost cells on that side. Regions that
/// consist of few contiguous pieces are copied directly. All other regions are packed into one message per pair of
/// ranks. The message is copied as one transfer, and the receiver unpacks it. The limit between the two methods is
/// measured when the plan is created (`options::direct_pieces`).
///
/// Packing: on the host backend, CPU loops pack and unpack in stream order. On CUDA, a kernel packs and unpacks. The
/// program compiles this kernel with nvcc. It is the kernel of mpgpu/halo.cuh or a kernel of the program (`copier`).
/// Without a kernel, creating a plan that requires packing fails.
///
/// mpgpu/halo_mpi.hpp adds plans with one process per rank.
///
/// Errors are thrown as described in mpgpu.hpp.

#include <mpgpu/halo/boxes.hpp>
#include <mpgpu/halo/division.hpp>
#include <mpgpu/halo/measure.hpp>
#include <mpgpu/halo/mesh.hpp>
#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/pieces.hpp>
#include <mpgpu/halo/plan.hpp>
#include <mpgpu/halo/pushed.hpp>
#include <mpgpu/halo/schedule.hpp>

#endif // MPGPU_HALO_HPP
