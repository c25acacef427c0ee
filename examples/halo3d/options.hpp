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
    std::array<int, 3> mesh = {100, 100, 100}; ///< number of cells of the whole mesh
    std::array<int, 3> divide = {0, 0, 0};     ///< number of ranks in each dimension; 0_0_0: all ranks in z
    std::array<int, 3> periodic = {0, 0, 0};   ///< 1 if the dimension is periodic
    std::array<int, 3> ghost = {1, 1, 1};      ///< number of ghost cells at each end
    int vars = 1;                              ///< number of variables, each of 8 bytes
    int cycles = 5;                            ///< number of cycles
    std::optional<std::uint64_t> direct;       ///< value of halo::options::direct_pieces; empty: chosen by measurement
    std::optional<bool> pushed;                ///< value of halo::options::pushed
    bool both = false;                         ///< run with `pushed` true and with `pushed` false
    std::vector<int> each;                     ///< cells of each rank per dimension, one run each; replaces `mesh`
    int nodes = 0;                             ///< number of virtual nodes among which ranks are divided; 0: none
    bool persistent = false;                   ///< also use persistent kernels between nodes
    bool half_transfers = false;               ///< also use send and receive descriptors
    bool messages = false;                     ///< also use messages in streams
    bool plain = false;                        ///< also use cudaMemcpyPeerAsync and events
    bool mpi = false;                          ///< also use MPI
    space mesh_space = space::device;          ///< memory of the cells that MPI exchanges
    std::vector<space> message_spaces = {space::device}; ///< memory of messages; one run by MPI for each
    std::vector<packing> packings = {packing::fused};
    int threads = 4;        ///< number of threads for packing::threads
    bool gpu_aware = false; ///< assume that MPI supports GPU pointers, whatever it reports
    std::string topology;   ///< preset or file; empty: this machine
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_HALO3D_OPTIONS_HPP
