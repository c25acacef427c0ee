// SPDX-License-Identifier: MIT OR Apache-2.0
#include "options.hpp"

#include <charconv>
#include <cstddef>
#include <stdexcept>
#include <string_view>

const char *const usage =
    "usage: jacobi3d [X_Y_Z] [flags]\n"
    "  X_Y_Z          cells of the whole domain (96_96_96)\n"
    "  -weak          X_Y_Z are cells of one process; dimensions double in turn, x first\n"
    "  -ranks N,N,... processes, each with one GPU: one problem after the other (2)\n"
    "  -blocks N      blocks of each process (1)\n"
    "  -form F        staged: faces go through host memory; direct: from device memory; both (both)\n"
    "  -iterations N  of a round (20)\n"
    "  -rounds N      rounds, of which the median and the quartiles are printed (7)\n"
    "  -check N       iterations that are compared with one block on the CPU, cell by cell; 0: none (5)\n"
    "  -topology T    preset such as beluga, or a topology file (this machine)\n"
    "  -help          print this\n";

namespace {

template <class Number> bool read(std::string_view text, Number least, Number &value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() && value >= least;
}

int number(std::string_view flag, std::string_view text, int least) {
    int value = 0;
    if (!read(text, least, value)) {
        throw std::invalid_argument(std::string(flag) + " " + std::string(text) + ": must be a whole number, " +
                                    std::to_string(least) + " or more");
    }
    return value;
}

std::array<std::int64_t, 3> cells(std::string_view text) {
    std::array<std::int64_t, 3> values{};
    std::string_view rest = text;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::size_t end = d < 2 ? rest.find('_') : rest.size();
        if (end == std::string_view::npos || !read<std::int64_t>(rest.substr(0, end), 1, values.at(d))) {
            throw std::invalid_argument("domain " + std::string(text) +
                                        ": must be three whole numbers, 1 or more, such as 512_256_256");
        }
        rest.remove_prefix(d < 2 ? end + 1 : end);
    }
    return values;
}

std::vector<int> list(std::string_view flag, std::string_view text) {
    std::vector<int> values;
    std::string_view rest = text;
    for (bool more = true; more;) {
        const std::size_t end = rest.find(',');
        more = end != std::string_view::npos;
        if (!read(rest.substr(0, end), 1, values.emplace_back(0))) {
            throw std::invalid_argument(std::string(flag) + " " + std::string(text) +
                                        ": must be whole numbers, 1 or more, such as 1,2,4");
        }
        rest.remove_prefix(more ? end + 1 : rest.size());
    }
    return values;
}

} // namespace

options parse(int argc, const char *const *argv) {
    options result;
    for (int i = 1; i < argc; ++i) {
        const std::string_view flag = argv[i];
        const auto value = [&]() -> std::string_view {
            if (i + 1 == argc) {
                throw std::invalid_argument(std::string(flag) + ": a value must follow");
            }
            return argv[++i];
        };
        if (!flag.empty() && flag.front() != '-') {
            result.domain = cells(flag);
        } else if (flag == "-weak") {
            result.weak = true;
        } else if (flag == "-ranks") {
            result.ranks = list(flag, value());
        } else if (flag == "-blocks") {
            result.blocks = number(flag, value(), 1);
        } else if (flag == "-form") {
            const std::string_view form = value();
            if (form != "staged" && form != "direct" && form != "both") {
                throw std::invalid_argument("-form " + std::string(form) + ": must be staged, direct or both");
            }
            result.staged = form != "direct";
            result.direct = form != "staged";
        } else if (flag == "-iterations") {
            result.iterations = number(flag, value(), 1);
        } else if (flag == "-rounds") {
            result.rounds = number(flag, value(), 1);
        } else if (flag == "-check") {
            result.check = number(flag, value(), 0);
        } else if (flag == "-topology") {
            result.topology = value();
        } else if (flag == "-help" || flag == "--help") {
            result.help = true;
        } else {
            throw std::invalid_argument(std::string(flag) + ": there is no such flag; -help lists them");
        }
    }
    return result;
}
