// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_OPTIONS_HPP
#define MPGPU_EXAMPLES_JACOBI_OPTIONS_HPP

#include <string>

/// Command-line options, with the same flags as NVIDIA's multi-gpu-programming-models. The defaults are small enough
/// for a laptop.
struct options {
    int niter = 200;        ///< iterations at most
    int nccheck = 100;      ///< iterations from one check for convergence to the next
    int nx = 2048;          ///< points in x, the contiguous direction
    int ny = 2048;          ///< points in y, divided among the devices
    int devices = 0;        ///< devices to use; 0: all
    std::string topology;   ///< preset or file; empty: this machine
    bool csv = false;       ///< one line of comma separated values, nothing else
    bool plan = false;      ///< print the plan of the halo exchange and stop
    bool plain = false;     ///< also exchange halos by plain copies and events, and compare
    bool gpu_aware = false; ///< jacobi_mpi: assume that MPI supports GPU pointers, whatever it reports
    bool help = false;
};

/// Text printed by `-help`.
extern const char *const usage;

/// Reads the command line; throws `std::invalid_argument` with a message that names the flag, the value and the remedy.
options parse(int argc, const char *const *argv);

#endif // MPGPU_EXAMPLES_JACOBI_OPTIONS_HPP
