// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include "../flags.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

const char *const usage =
    "usage: conjugate_gradient [flags]\n"
    "  -cells N       cells along an edge of the cube; each is divided into 6 tetrahedra (24)\n"
    "  -by FORM       lists: index lists of mpgpu; mpi: packing, MPI_Isend and MPI_Irecv; both (lists)\n"
    "  -check         runs both forms; their residuals must be bitwise equal; compares with a serial solver\n"
    "  -iterations N  largest number of iterations (2000)\n"
    "  -digits N      stops if the residual has decreased by the factor 10^N (10)\n"
    "  -gpu-aware     assume that MPI supports GPU pointers even if it does not report it\n"
    "  -topology T    preset such as beluga, or a topology file (this machine)\n"
    "  -help          print this\n";

options parse(int argc, const char *const *argv) {
    options result;
    flags::arguments given(argc, argv);
    while (given.next()) {
        std::string_view flag = given.flag();
        flag.remove_prefix(flag.substr(0, 2) == "--" ? 1 : 0); // --check is accepted too
        const auto value = [&] { return given.value(); };
        if (flag == "-cells") {
            result.cells = flags::number<std::int32_t>(flag, value(), 2, 400);
        } else if (flag == "-by") {
            const std::string_view form = value();
            if (form != "lists" && form != "mpi" && form != "both") {
                throw std::invalid_argument("-by " + std::string(form) + ": must be lists, mpi or both");
            }
            result.lists = form != "mpi";
            result.mpi = form != "lists";
        } else if (flag == "-check") {
            result.check = true;
        } else if (flag == "-iterations") {
            result.iterations = flags::number(flag, value(), 1);
        } else if (flag == "-digits") {
            result.digits = flags::number(flag, value(), 1, 14);
        } else if (flag == "-gpu-aware") {
            result.gpu_aware = true;
        } else if (flag == "-topology") {
            result.topology = value();
        } else if (flag == "-help") {
            result.help = true;
        } else {
            flags::unknown(given.flag());
        }
    }
    if (result.check) {
        result.lists = result.mpi = true;
    }
    return result;
}
