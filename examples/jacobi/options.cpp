// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include "../flags.hpp"

#include <stdexcept>
#include <string_view>

const char *const usage =
    "usage: jacobi [flags]\n"
    "  -niter N       maximum number of iterations (200)\n"
    "  -nccheck N     check for convergence every N iterations (100)\n"
    "  -nx N          points in x (2048)\n"
    "  -ny N          points in y, divided among the devices (2048)\n"
    "  -csv           print one line: mpgpu, nx, ny, niter, nccheck, devices, 1, seconds, seconds "
    "on one device\n"
    "  -devices N     devices to use (all)\n"
    "  -topology T    preset such as beluga, or a topology file (this machine)\n"
    "  -plan          print the plan of the halo exchange and stop\n"
    "  -plain         also solve with plain copies and events instead of mpgpu, alternately, and compare;\n"
    "                 jacobi_mpi: also with MPI and GPU pointers, if MPI reports that it is GPU-aware\n"
    "  -gpu-aware     -plain, assuming that MPI is GPU-aware: an MPI built without CUDA may be, through UCX,\n"
    "                 without reporting it\n"
    "  -help          print this\n";

options parse(int argc, const char *const *argv) {
    options result;
    flags::arguments given(argc, argv);
    while (given.next()) {
        const std::string_view flag = given.flag();
        const auto value = [&] { return given.value(); };
        if (flag == "-niter") {
            result.niter = flags::number(flag, value(), 1);
        } else if (flag == "-nccheck") {
            result.nccheck = flags::number(flag, value(), 1);
        } else if (flag == "-nx") {
            result.nx = flags::number(flag, value(), 3);
        } else if (flag == "-ny") {
            result.ny = flags::number(flag, value(), 3);
        } else if (flag == "-devices") {
            result.devices = flags::number(flag, value(), 1);
        } else if (flag == "-topology") {
            result.topology = value();
        } else if (flag == "-csv") {
            result.csv = true;
        } else if (flag == "-plan") {
            result.plan = true;
        } else if (flag == "-plain") {
            result.plain = true;
        } else if (flag == "-gpu-aware") {
            result.plain = result.gpu_aware = true;
        } else if (flag == "-help" || flag == "--help") {
            result.help = true;
        } else {
            flags::unknown(flag);
        }
    }
    if (result.csv && result.plan) {
        throw std::invalid_argument("-csv and -plan: cannot be combined, -plan runs nothing to time");
    }
    if (result.plain && result.plan) {
        throw std::invalid_argument("-plain and -plan: cannot be combined, -plan runs nothing to compare");
    }
    return result;
}
