// SPDX-License-Identifier: MIT OR Apache-2.0
#include "domain.hpp"

#include <cstddef>
#include <stdexcept>
#include <string>

block division::at(int number) const {
    block b{};
    int rest = number;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t place = rest % blocks.at(d);
        rest /= blocks.at(d);
        b.domain[d] = domain.at(d);
        b.first[d] = place * domain.at(d) / blocks.at(d);
        b.cells[d] = (place + 1) * domain.at(d) / blocks.at(d) - b.first[d];
    }
    return b;
}

int division::neighbour(int number, int face) const {
    int stride = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(face / 2); ++d) {
        stride *= blocks.at(d);
    }
    return face % 2 == 0 ? number - stride : number + stride;
}

division divide(const std::array<std::int64_t, 3> &domain, int blocks) {
    division best{domain, {0, 0, 0}};
    double smallest = 0.0;
    for (int x = 1; x <= blocks; ++x) {
        for (int y = 1; x * y <= blocks; ++y) {
            const int z = blocks / (x * y);
            if (x * y * z != blocks || x > domain[0] || y > domain[1] || z > domain[2]) {
                continue;
            }
            const double cells[] = {static_cast<double>(domain[0]) / x, static_cast<double>(domain[1]) / y,
                                    static_cast<double>(domain[2]) / z};
            const double surface = cells[0] * cells[1] + cells[1] * cells[2] + cells[2] * cells[0];
            if (best.blocks[0] == 0 || surface < smallest) {
                best.blocks = {x, y, z};
                smallest = surface;
            }
        }
    }
    if (best.blocks[0] == 0) {
        throw std::invalid_argument("a domain of " + std::to_string(domain[0]) + "_" + std::to_string(domain[1]) + "_" +
                                    std::to_string(domain[2]) + " cells cannot be divided into " +
                                    std::to_string(blocks) +
                                    " equal blocks: enlarge it, or use fewer ranks or -blocks");
    }
    return best;
}

std::array<std::int64_t, 3> scaled(std::array<std::int64_t, 3> domain, int ranks) {
    std::size_t d = 0;
    for (int factor = 2; ranks > 1; ++factor) {
        for (; ranks % factor == 0; ranks /= factor) {
            domain.at(d % 3) *= factor;
            ++d;
        }
    }
    return domain;
}
