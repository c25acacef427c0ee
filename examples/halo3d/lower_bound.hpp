// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP
#define MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP

#include "cycles.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <cstdint>

/// Lower bound for the time of an exchange with ranks on other nodes, in which a rank sends one message to each of up
/// to 26 neighbours. The bound is the time to pack the shortest message, to communicate, and to unpack the longest
/// message; everything else may overlap. Source: B. Elis et al., Non-Blocking GPU-CPU Notifications to Enable More
/// GPU-CPU Parallelism, HPC Asia 2024, section 6.4, equation 1.
///
/// The time to communicate follows the K-model of J. Choi et al., End-to-End Performance Modeling of Distributed GPU
/// Applications, ICS 2020 (equations 3 and 4 there):
///
///     latency + share * ranks * bytes / (alone + (share * ranks - 1) * more)
///
/// All terms of this formula are measured, in seconds, bytes and bytes per second.
struct lower_bound {
    double pack = 0;         ///< seconds to pack the shortest message
    double unpack = 0;       ///< seconds to unpack the longest message
    double latency = 0;      ///< one-way latency of MPI for 8 bytes, in seconds
    double share = 0;        ///< fraction of the messages that go to other nodes
    int ranks = 0;           ///< number of ranks on one machine that communicate
    std::uint64_t bytes = 0; ///< size of the longest message in bytes
    double alone = 0;        ///< rate of a single pair of ranks, in bytes/s
    double more = 0;         ///< increase of the total rate for each further rank, in bytes/s

    [[nodiscard]] double communication() const;
    [[nodiscard]] double seconds() const { return pack + communication() + unpack; }
};

/// Measures the terms of the bound. Must be called on all ranks; all get the same result. `bytes` is 0 in the result if
/// no messages go to other nodes.
lower_bound measure_lower_bound(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const mpgpu::halo::grid &g,
                                part &mine, bool device_memory);

/// Prints the bound and its terms.
void print(const lower_bound &bound);

#endif // MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP
