// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP

#include <cstdint>
#include <string>
#include <vector>

/// The command line. 0 is what fits the backend: large on GPUs, small on virtual devices.
struct options {
    std::string program;                       ///< which one to run
    int gpus = 0;                              ///< GPUs to use; 0: all, at most four
    int rounds = 7;                            ///< that are timed, after one that is not
    std::vector<std::uint32_t> partitions{0U}; ///< of each transfer, one form after the other; 0: as the model says
    std::string topology;                      ///< preset or file; empty: this machine
    std::size_t mib = 0;                       ///< MiB that the microbenchmark and the pipeline move
    std::size_t nx = 0;                        ///< points in x of the Jacobi domain, whose rows are contiguous in x
    std::size_t ny = 0;                        ///< points in y, divided over the GPUs
    unsigned scale = 0;                        ///< the graph has 2^scale vertices
    unsigned degree = 16;                      ///< edges for each vertex
    std::uint64_t seed = 1;                    ///< of the graph
    int steps = 0;                             ///< steps in a row that are timed together
    std::size_t rows = 0;                      ///< equations of the banded system
    std::size_t band = 15;                     ///< coefficients on either side of its diagonal
    std::string matrix;                        ///< file of a graph; empty: one is generated
    std::string csv;                           ///< to which the table is added; empty: none
    std::string tune;                          ///< tuning file in which trials are kept; empty: nothing is tuned
    int check = 4;                             ///< shortest paths: sweeps between two tests whether anything changed
    bool help = false;
};

/// What `-help` prints.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_TRIGGERED_OPTIONS_HPP
