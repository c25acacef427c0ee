// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_OPTIONS_HPP
#define MPGPU_EXAMPLES_JACOBI_OPTIONS_HPP

#include <string>

/// Command-line options, with the same flags as NVIDIA's multi-gpu-programming-models. The defaults are small enough
/// for a laptop.
struct options {
    int niter = 200;        ///< maximum number of iterations
    int nccheck = 100;      ///< number of iterations between two checks for convergence
    int nx = 2048;          ///< number of points in x, along which rows are contiguous
    int ny = 2048;          ///< number of points in y, divided among the devices
    int devices = 0;        ///< number of devices to use; 0: all
    std::string topology;   ///< preset or file; empty: this machine
    bool csv = false;       ///< print only one line of comma-separated values
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
