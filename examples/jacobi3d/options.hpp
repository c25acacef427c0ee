// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP
#define MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP

#include <array>
#include <cstdint>
#include <string>
#include <vector>

/// Command-line options. Three numbers, x first, are joined by `_`.
struct options {
    std::array<std::int64_t, 3> domain = {96, 96, 96}; ///< number of cells of the domain; with `weak`, for one rank
    std::vector<int> ranks;                            ///< numbers of processes, one run for each; default: 2
    int blocks = 1;                                    ///< number of blocks of each process
    bool weak = false;      ///< true if the domain grows with the number of ranks (weak scaling)
    int iterations = 20;    ///< number of iterations in a round
    int rounds = 7;         ///< number of rounds, whose median is printed
    int check = 5;          ///< number of iterations before the comparison with the CPU
    bool staged = true;     ///< run the exchange that stages faces in host memory
    bool direct = true;     ///< run the exchange that sends faces from device memory
    bool gpu_aware = false; ///< assume that MPI supports GPU pointers, whatever it reports
    std::string topology;   ///< preset or file; empty: this machine
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP
