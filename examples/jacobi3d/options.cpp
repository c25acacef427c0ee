// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include "../flags.hpp"

#include <stdexcept>
#include <string_view>

const char *const usage =
    "usage: jacobi3d [X_Y_Z] [flags]\n"
    "  X_Y_Z          cells of the whole domain (96_96_96)\n"
    "  -weak          X_Y_Z are the cells of one process; dimensions double in turn, x first\n"
    "  -ranks N,N,... processes, each with one GPU: runs one problem for each number (2)\n"
    "  -blocks N      blocks of each process (1)\n"
    "  -form F        staged: faces through host memory; direct: from device memory; both (both)\n"
    "  -gpu-aware     jacobi3d_mpi: assume that MPI supports GPU pointers even if it does not report it\n"
    "  -iterations N  iterations of a round (20)\n"
    "  -rounds N      rounds; their median and quartiles are printed (7)\n"
    "  -check N       iterations that are compared with one block on the CPU, cell by cell; 0: none (5)\n"
    "  -topology T    preset such as beluga, or a topology file (this machine)\n"
    "  -help          print this\n";

options parse(int argc, const char *const *argv) {
    options result;
    flags::arguments given(argc, argv);
    while (given.next()) {
        const std::string_view flag = given.flag();
        const auto value = [&] { return given.value(); };
        if (!flag.empty() && flag.front() != '-') {
            result.domain = flags::triple<std::int64_t>("domain", flag, 1);
        } else if (flag == "-weak") {
            result.weak = true;
        } else if (flag == "-ranks") {
            result.ranks = flags::numbers(flag, value(), 1);
        } else if (flag == "-blocks") {
            result.blocks = flags::number(flag, value(), 1);
        } else if (flag == "-form") {
            const std::string_view form = value();
            if (form != "staged" && form != "direct" && form != "both") {
                throw std::invalid_argument("-form " + std::string(form) + ": must be staged, direct or both");
            }
            result.staged = form != "direct";
            result.direct = form != "staged";
        } else if (flag == "-gpu-aware") {
            result.gpu_aware = true;
        } else if (flag == "-iterations") {
            result.iterations = flags::number(flag, value(), 1);
        } else if (flag == "-rounds") {
            result.rounds = flags::number(flag, value(), 1);
        } else if (flag == "-check") {
            result.check = flags::number(flag, value(), 0);
        } else if (flag == "-topology") {
            result.topology = value();
        } else if (flag == "-help" || flag == "--help") {
            result.help = true;
        } else {
            flags::unknown(flag);
        }
    }
    return result;
}
