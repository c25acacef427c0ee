// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
#define MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP

#include "../jacobi/exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <array>
#include <cstddef>
#include <memory>

/// Rows of one rank, between its two halo rows, as the exchanges without mpgpu use them.
struct rank_rows {
    MPI_Comm ranks;
    /// Rank above row 0, and rank below the last row. All pairs in these files are in this order.
    std::array<int, 2> neighbours;
    /// The two arrays, which alternate as old and new values.
    std::array<float *, 2> arrays;
    std::size_t width; ///< number of elements in a row
    int rows;          ///< number of rows that this rank computes
    const mpgpu::stream *sweeps;
    int device;

    [[nodiscard]] float *row(std::size_t parity, int number) const {
        return arrays.at(parity) + static_cast<std::size_t>(number) * width;
    }
};

/// Creates an exchange by MPI with device pointers, as in an MPI program without mpgpu. The host waits for the sweep
/// before it sends the rows.
std::unique_ptr<exchange> exchange_by_mpi(const rank_rows &own);

#ifdef JACOBI_CUDA
/// Creates an exchange by cudaMemcpyAsync into the neighbours' arrays, which are opened by CUDA IPC. Empty MPI messages
/// notify the neighbours that an event has been recorded. The arrays must fill whole 2 MiB blocks of the driver's
/// memory, and each rank must see the GPUs of the others.
std::unique_ptr<exchange> exchange_by_peer_copies(const rank_rows &own);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
