// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP
#define MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP

#include <array>
#include <cstdint>
#include <string>
#include <vector>

/// Command-line options. Three numbers, x first, are joined by `_`.
struct options {
    std::array<std::int64_t, 3> domain = {96, 96, 96}; ///< cells of the domain; with `weak` of one rank
    std::vector<int> ranks; ///< numbers of processes, one problem after the other; default: 2
    int blocks = 1;         ///< blocks of each process
    bool weak = false;      ///< the domain grows with the number of ranks
    int iterations = 20;    ///< iterations per round
    int rounds = 7;         ///< rounds whose median is printed
    int check = 5;          ///< iterations before the comparison with one block on the CPU
    bool staged = true;     ///< faces go through host memory
    bool direct = true;     ///< faces are sent from device memory
    bool gpu_aware = false; ///< assume that MPI supports GPU pointers, whatever it reports
    std::string topology;   ///< preset or file; empty: this machine
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_JACOBI3D_OPTIONS_HPP
