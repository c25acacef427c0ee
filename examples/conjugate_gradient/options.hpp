// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_OPTIONS_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_OPTIONS_HPP

#include <cstdint>
#include <string>

/// Command-line options.
struct options {
    std::int32_t cells = 24; ///< number of cells of the mesh along an edge of the cube, before the cells are divided
    bool lists = true;       ///< exchange by index lists
    bool mpi = false;        ///< exchange by MPI
    bool check = false;      ///< compare the forms with each other and with a serial solver
    int iterations = 2000;   ///< largest number of iterations
    int digits = 10;         ///< the solver stops if the residual has decreased by the factor 10^digits
    bool gpu_aware = false;  ///< assume that MPI supports GPU pointers, whatever it reports
    std::string topology;    ///< preset or file; empty: this machine
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_OPTIONS_HPP
