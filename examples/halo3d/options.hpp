// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_OPTIONS_HPP
#define MPGPU_EXAMPLES_HALO3D_OPTIONS_HPP

#include "spaces.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Command-line options, with the same flags as LLNL's Comb. Three numbers, x first, are joined by `_`.
struct options {
    std::array<int, 3> mesh = {100, 100, 100};           ///< cells of the whole mesh
    std::array<int, 3> divide = {0, 0, 0};               ///< ranks in each dimension; 0_0_0: all in z
    std::array<int, 3> periodic = {0, 0, 0};             ///< 1: the dimension is a ring
    std::array<int, 3> ghost = {1, 1, 1};                ///< ghost cells at either end
    int vars = 1;                                        ///< variables, of 8 bytes
    int cycles = 5;                                      ///< exchanges
    std::optional<std::uint64_t> direct;                 ///< halo::options::direct_pieces; empty: measured
    std::optional<bool> pushed;                          ///< halo::options::pushed
    bool both = false;                                   ///< run both with `pushed` true and with `pushed` false
    std::vector<int> each;                               ///< cells of each rank in each dimension, instead of `mesh`
    int nodes = 0;                                       ///< divide the ranks among this number of virtual nodes; 0: no
    bool persistent = false;                             ///< also use persistent kernels between nodes
    bool half_transfers = false;                         ///< also use send and receive descriptors
    bool messages = false;                               ///< also use messages in streams
    bool plain = false;                                  ///< also use cudaMemcpyPeerAsync and events
    bool mpi = false;                                    ///< also use MPI
    space mesh_space = space::device;                    ///< of the cells that MPI exchanges
    std::vector<space> message_spaces = {space::device}; ///< an exchange by MPI for each, with each of `packings`
    std::vector<packing> packings = {packing::fused};
    int threads = 4;        ///< of packing::threads
    bool gpu_aware = false; ///< assume that MPI supports GPU pointers, whatever it reports
    std::string topology;   ///< preset or file; empty: this machine
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_HALO3D_OPTIONS_HPP
