// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include "../flags.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

const char *const usage =
    "usage: halo3d [X_Y_Z] [flags]\n"
    "  X_Y_Z            cells of the whole mesh (100_100_100)\n"
    "  -divide X_Y_Z    ranks in each dimension (all of them in z)\n"
    "  -periodic X_Y_Z  1 for each periodic dimension (0_0_0)\n"
    "  -ghost X_Y_Z     ghost cells at each end of each dimension (1_1_1)\n"
    "  -vars N          variables of 8 bytes (1)\n"
    "  -cycles N        exchanges (5)\n"
    "  -direct N        copy a message of up to N contiguous pieces directly into ghost cells, pack others (measured)\n"
    "  -pushed WHEN     the pack kernel writes directly to the receiver's memory: on, off, measured, or\n"
    "                   both, to compare (measured)\n"
    "  -each N,N,...    cells of each rank in each dimension, instead of X_Y_Z: runs one problem for\n"
    "                   each number and prints a table\n"
    "  -nodes N         divide the ranks among N virtual nodes, with MPI between them (the actual nodes)\n"
    "  -persistent      also use one kernel between nodes, in two forms: one block for each message, all blocks for "
    "each\n"
    "  -half-transfers  also use one message for each neighbour with the example's kernels: pack, a node plan of\n"
    "                   send and receive descriptors, unpack\n"
    "  -messages        the same with messages in streams, each unpacked when it arrives\n"
    "  -plain           also use pack, cudaMemcpyPeerAsync, event and unpack for each message\n"
    "  -mpi             also use MPI with GPU pointers, if MPI reports that it is GPU-aware\n"
    "                   (one kernel packs all messages, in device memory)\n"
    "  -mesh-space S    -mpi with the cells in this memory, separate for each exchange: device, pinned, pageable or\n"
    "                   managed (device)\n"
    "  -message-space S,...  -mpi with messages in each of these spaces (device)\n"
    "  -pack HOW,...    -mpi with each of these methods of packing (fused): serial and threads: on the CPU,\n"
    "                   one message after the other; each: a kernel for each message; fused: one kernel;\n"
    "                   graph: a CUDA graph of kernels\n"
    "  -threads N       number of threads for -pack threads (4)\n"
    "  -gpu-aware       -mpi, assuming that MPI is GPU-aware: an MPI built without CUDA may be, through UCX,\n"
    "                   without reporting it\n"
    "  -topology T      preset such as beluga, or a topology file (this machine)\n"
    "  -help            print this\n";

namespace {

/// Returns the enumerator whose name is `text`. Names are in the order of the enumerators.
template <class Word, std::size_t Count>
Word word(std::string_view flag, std::string_view text, const std::array<const char *, Count> &names) {
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) {
        std::string all = names.front();
        for (std::size_t i = 1; i < Count; ++i) {
            all += std::string(i + 1 < Count ? ", " : " or ") + names.at(i);
        }
        throw std::invalid_argument(std::string(flag) + " " + std::string(text) + ": must be " + all);
    }
    return static_cast<Word>(found - names.begin());
}

/// Parses several names separated by commas, as enumerators.
template <class Word, std::size_t Count>
std::vector<Word> words(std::string_view flag, std::string_view text, const std::array<const char *, Count> &names) {
    std::vector<Word> found;
    for (bool more = true; more;) {
        const std::size_t end = text.find(',');
        more = end != std::string_view::npos;
        found.push_back(word<Word>(flag, text.substr(0, end), names));
        text.remove_prefix(more ? end + 1 : text.size());
    }
    return found;
}

} // namespace

options parse(int argc, const char *const *argv) {
    options result;
    flags::arguments given(argc, argv);
    while (given.next()) {
        const std::string_view flag = given.flag();
        const auto value = [&] { return given.value(); };
        if (!flag.empty() && flag.front() != '-') {
            result.mesh = flags::triple("mesh", flag, 1);
        } else if (flag == "-divide") {
            result.divide = flags::triple(flag, value(), 1);
        } else if (flag == "-periodic") {
            result.periodic = flags::triple(flag, value(), 0);
        } else if (flag == "-ghost") {
            result.ghost = flags::triple(flag, value(), 0);
        } else if (flag == "-vars") {
            result.vars = flags::number(flag, value(), 1);
        } else if (flag == "-cycles") {
            result.cycles = flags::number(flag, value(), 1);
        } else if (flag == "-direct") {
            result.direct = static_cast<std::uint64_t>(flags::number(flag, value(), 0));
        } else if (flag == "-pushed") {
            const std::string_view text = value();
            if (text != "on" && text != "off" && text != "measured" && text != "both") {
                throw std::invalid_argument("-pushed " + std::string(text) + ": must be on, off, measured or both");
            }
            result.both = text == "both";
            result.pushed = text == "on" || text == "off" ? std::optional<bool>(text == "on") : std::nullopt;
        } else if (flag == "-each") {
            result.each = flags::numbers(flag, value(), 1);
        } else if (flag == "-nodes") {
            result.nodes = flags::number(flag, value(), 1);
        } else if (flag == "-persistent") {
            result.persistent = true;
        } else if (flag == "-half-transfers") {
            result.half_transfers = true;
        } else if (flag == "-messages") {
            result.messages = true;
        } else if (flag == "-plain") {
            result.plain = true;
        } else if (flag == "-mpi") {
            result.mpi = true;
        } else if (flag == "-mesh-space") {
            result.mpi = true;
            result.mesh_space = word<space>(flag, value(), space_names);
        } else if (flag == "-message-space") {
            result.mpi = true;
            result.message_spaces = words<space>(flag, value(), space_names);
        } else if (flag == "-pack") {
            result.mpi = true;
            result.packings = words<packing>(flag, value(), packing_names);
        } else if (flag == "-threads") {
            result.threads = flags::number(flag, value(), 1);
        } else if (flag == "-gpu-aware") {
            result.mpi = result.gpu_aware = true;
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
