// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MPI_HPP
#define MPGPU_HALO_MPI_HPP

/// @file
/// Halo exchange with one process per rank: combines halo.hpp and mpi.hpp.
///
/// @code
/// mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);                       // its ranks are those of the grid
/// mpgpu::halo::plan halo(ctx, node, grid, arrays);                  // this rank's arrays; collective
/// halo.exchange(stream);                                            // each time step
/// halo.destroy();                                                   // collective, before MPI_Finalize
/// @endcode

#include <mpgpu/halo.hpp>
#include <mpgpu/halo/processes.hpp>
#include <mpgpu/mpi.hpp>

#endif // MPGPU_HALO_MPI_HPP
