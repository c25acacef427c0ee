// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include "../flags.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>

const char *const usage =
    "usage: triggered PROGRAM [flags]\n"
    "programs:\n"
    "  microbenchmark   a kernel that computes for as long as its result takes to move, from one GPU to one and to\n"
    "                   all others\n"
    "  stores           rate of stores of 4 to 128 bytes\n"
    "  jacobi           two-dimensional Jacobi relaxation, halo rows\n"
    "  banded           Jacobi's method for a system of equations with a band matrix\n"
    "  pagerank         PageRank of a generated graph\n"
    "  shortest-paths   shortest paths from one vertex of the graph\n"
    "  als              alternating least squares over the graph, eight factors for each vertex\n"
    "  pipeline         three GPUs; the second processes each partition as soon as it has arrived\n"
    "flags (defaults on GPUs / on virtual devices):\n"
    "  -gpus N          number of GPUs (all, at most four)\n"
    "  -rounds N        timed rounds (7)\n"
    "  -partitions N,.. partitions of each transfer; each number is tested; 0: determined by the model (0)\n"
    "  -tune FILE       finds the fastest mover (copy engines or kernels) and number of partitions, measured with the\n"
    "                   program's own kernels; stores all times in FILE, which mpgpu tune partitions FILE prints\n"
    "  -steps N         consecutive steps that are timed together (20 / 6)\n"
    "  -topology T      preset such as beluga, or a topology file (this machine)\n"
    "  -mib N           microbenchmark, pipeline: MiB to move (256 / 2)\n"
    "  -nx N, -ny N     jacobi: points in x and y (2097152 and 258 / 4096 and 66)\n"
    "  -rows N          banded: equations (8388608 / 4096)\n"
    "  -band N          banded: coefficients on either side of the diagonal (15)\n"
    "  -matrix FILE     graphs: read from a file in Matrix Market's coordinate format; each entry is an edge\n"
    "  -scale N         graphs: 2^N vertices (23, als 21 / 11)\n"
    "  -degree N        graphs: edges for each vertex (16)\n"
    "  -seed N          graphs: seed of the generator (1)\n"
    "  -csv FILE        append the table to a file\n"
    "  -check N         shortest-paths: sweeps between two tests for convergence (4)\n"
    "  -help            print this\n";

namespace {

constexpr std::array<std::string_view, 8> programs{"microbenchmark", "stores",         "jacobi", "banded",
                                                   "pagerank",       "shortest-paths", "als",    "pipeline"};

} // namespace

options parse(int argc, const char *const *argv) {
    options result;
    flags::arguments given(argc, argv);
    while (given.next()) {
        const std::string_view flag = given.flag();
        const auto value = [&] { return given.value(); };
        if (std::find(programs.begin(), programs.end(), flag) != programs.end() && result.program.empty()) {
            result.program = flag;
        } else if (flag == "-gpus") {
            result.gpus = flags::number(flag, value(), 1, 8);
        } else if (flag == "-rounds") {
            result.rounds = flags::number(flag, value(), 1, 10'000);
        } else if (flag == "-partitions") {
            result.partitions = flags::numbers<std::uint32_t>(flag, value(), 0, 1024);
        } else if (flag == "-rows") {
            result.rows = flags::number<std::size_t>(flag, value(), 1, std::size_t{1} << 31);
        } else if (flag == "-band") {
            result.band = flags::number<std::size_t>(flag, value(), 1, 4096);
        } else if (flag == "-matrix") {
            result.matrix = value();
        } else if (flag == "-csv") {
            result.csv = value();
        } else if (flag == "-tune") {
            result.tune = value();
        } else if (flag == "-steps") {
            result.steps = flags::number(flag, value(), 1, 1'000'000);
        } else if (flag == "-topology") {
            result.topology = value();
        } else if (flag == "-mib") {
            result.mib = flags::number<std::size_t>(flag, value(), 1, 16384);
        } else if (flag == "-nx") {
            result.nx = flags::number<std::size_t>(flag, value(), 3, std::size_t{1} << 30);
        } else if (flag == "-ny") {
            result.ny = flags::number<std::size_t>(flag, value(), 4, std::size_t{1} << 30);
        } else if (flag == "-scale") {
            result.scale = flags::number(flag, value(), 4U, 30U);
        } else if (flag == "-degree") {
            result.degree = flags::number(flag, value(), 1U, 1024U);
        } else if (flag == "-seed") {
            result.seed = flags::number<std::uint64_t>(flag, value(), 0, ~std::uint64_t{0});
        } else if (flag == "-check") {
            result.check = flags::number(flag, value(), 1, 1000);
        } else if (flag == "-help" || flag == "--help") {
            result.help = true;
        } else {
            flags::unknown(flag, "program or flag");
        }
    }
    if (result.program.empty() && !result.help) {
        throw std::invalid_argument("no program was given; -help lists the programs");
    }
    return result;
}
