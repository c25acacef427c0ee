// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP

#include <cstdint>
#include <string>
#include <vector>

/// Command-line options. A size of 0 is replaced by a size that suits the backend: large on GPUs, small on virtual
/// devices.
struct options {
    std::string program;                       ///< name of the program to run
    int gpus = 0;                              ///< number of GPUs to use; 0: all, at most four
    int rounds = 7;                            ///< number of timed rounds, after one that is not timed
    std::vector<std::uint32_t> partitions{0U}; ///< numbers of partitions, one form each; 0: chosen by the model
    std::string topology;                      ///< preset or file; empty: this machine
    std::size_t mib = 0;                       ///< size of the data of the microbenchmark and the pipeline in MiB
    std::size_t nx = 0;     ///< number of points in x of the Jacobi domain, along which rows are contiguous
    std::size_t ny = 0;     ///< number of points in y, divided among the GPUs
    unsigned scale = 0;     ///< the graph has 2^scale vertices
    unsigned degree = 16;   ///< mean number of edges per vertex
    std::uint64_t seed = 1; ///< seed of the graph
    int steps = 0;          ///< number of time steps that are timed together
    std::size_t rows = 0;   ///< number of equations of the banded system
    std::size_t band = 15;  ///< number of coefficients on each side of the diagonal
    std::string matrix;     ///< file of a graph; empty: one is generated
    std::string csv;        ///< file to which the table is appended; empty: none
    std::string tune;       ///< tuning file for the results of trials; empty: no tuning
    int check = 4;          ///< for shortest paths: number of sweeps between two tests for the end
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP
