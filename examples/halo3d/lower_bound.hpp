// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP
#define MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP

#include "cycles.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <cstdint>

/// What an exchange with ranks on other nodes takes at least, with a message for each of up to 26 neighbours: the pack
/// of the shortest message, the communication, and the unpack of the longest message; all else may overlap. B. Elis et
/// al., Non-Blocking GPU-CPU Notifications to Enable More GPU-CPU Parallelism, HPC Asia 2024, section 6.4, equation 1.
///
/// The communication is the K-model of J. Choi et al., End-to-End Performance Modeling of Distributed GPU Applications,
/// ICS 2020 (equations 3 and 4 there):
///
///     latency + share * ranks * bytes / (alone + (share * ranks - 1) * more)
///
/// All that it takes is measured here, in seconds and bytes per second.
struct lower_bound {
    double pack = 0;         ///< of the shortest message
    double unpack = 0;       ///< of the longest message
    double latency = 0;      ///< of MPI, one way, 8 bytes
    double share = 0;        ///< of messages to other ranks those that go to other nodes
    int ranks = 0;           ///< that communicate on one machine
    std::uint64_t bytes = 0; ///< of the longest message
    double alone = 0;        ///< rate of one pair of ranks, which send to each other
    double more = 0;         ///< what the rate of all grows by for each further rank

    [[nodiscard]] double communication() const;
    [[nodiscard]] double seconds() const { return pack + communication() + unpack; }
};

/// Measures it. Collective over all ranks; the same on all. `bytes` is 0 where nothing goes to other nodes.
lower_bound measure_lower_bound(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const mpgpu::halo::grid &g,
                                part &mine, bool device_memory);

/// Prints the terms.
void print(const lower_bound &bound);

#endif // MPGPU_EXAMPLES_HALO3D_LOWER_BOUND_HPP
