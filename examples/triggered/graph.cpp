// SPDX-License-Identifier: MIT OR Apache-2.0
#include "graph.hpp"
#include "fit.hpp"
#include "forms.hpp"
#include "work.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <utility>

namespace {

std::uint64_t mix(std::uint64_t value) { // SplitMix64
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27U)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31U);
}

/// Maps a number below 2^scale to another one. The function is a permutation, because each of its operations is
/// invertible.
std::uint32_t renumbered(std::uint32_t vertex, unsigned scale) {
    const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << scale) - 1);
    for (int round = 0; round < 3; ++round) {
        vertex = (vertex * 0x9e3779b1U) & mask;
        vertex ^= vertex >> (scale / 2);
    }
    return vertex;
}

/// Returns source and target of edge number `index`. The four quarters of the adjacency matrix have 0.45, 0.22, 0.22
/// and 0.11 of the edges. This distribution is less skewed than that of Graph500, in which the largest vertex would
/// keep one block busy long after all others have finished.
std::pair<std::uint32_t, std::uint32_t> edge(std::uint64_t index, unsigned scale, std::uint64_t seed) {
    constexpr std::uint32_t a = 29491;
    constexpr std::uint32_t b = a + 14418;
    constexpr std::uint32_t c = b + 14418;
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    std::uint64_t random = 0;
    for (unsigned level = 0; level < scale; ++level) {
        if (level % 4 == 0) {
            random = mix(mix(seed) ^ (index * 8 + level / 4));
        }
        const std::uint32_t draw = random & 0xffffU;
        random >>= 16U;
        from = from * 2 + (draw >= b ? 1 : 0);
        to = to * 2 + ((draw >= a && draw < b) || draw >= c ? 1 : 0);
    }
    return {renumbered(from, scale), renumbered(to, scale)};
}

} // namespace

graph generate(unsigned scale, unsigned degree, std::uint64_t seed) {
    const std::size_t vertices = std::size_t{1} << scale;
    const std::size_t edges = vertices * degree;
    graph made;
    // Several threads count and insert the edges. Sorting the edges of each vertex makes the result reproducible.
    std::vector<std::atomic<std::uint32_t>> incoming(vertices);
    std::vector<std::atomic<std::uint32_t>> outgoing(vertices);
    in_parallel(edges, [&](std::size_t first, std::size_t end) {
        for (std::size_t i = first; i < end; ++i) {
            const auto [from, to] = edge(i, scale, seed);
            outgoing[from].fetch_add(1, std::memory_order_relaxed);
            incoming[to].fetch_add(1, std::memory_order_relaxed);
        }
    });
    made.outgoing.assign(outgoing.begin(), outgoing.end());
    made.offsets.resize(vertices + 1);
    for (std::size_t vertex = 0; vertex < vertices; ++vertex) {
        made.offsets[vertex + 1] = made.offsets[vertex] + incoming[vertex];
    }
    made.sources.resize(edges);
    in_parallel(edges, [&](std::size_t first, std::size_t end) {
        for (std::size_t i = first; i < end; ++i) {
            const auto [from, to] = edge(i, scale, seed);
            made.sources[made.offsets[to] + incoming[to].fetch_sub(1, std::memory_order_relaxed) - 1] = from;
        }
    });
    in_parallel(vertices, [&](std::size_t first, std::size_t end) {
        for (std::size_t vertex = first; vertex < end; ++vertex) {
            const auto begin = made.sources.begin();
            std::sort(begin + static_cast<std::ptrdiff_t>(made.offsets[vertex]),
                      begin + static_cast<std::ptrdiff_t>(made.offsets[vertex + 1]));
        }
    });
    return made;
}

std::vector<std::uint32_t> distances(const graph &g, std::uint32_t root, int &sweeps) {
    std::vector<std::uint32_t> x(g.vertices(), unreached);
    x[root] = 0;
    std::vector<std::uint32_t> x_new = x;
    std::atomic<bool> has_changed{true};
    for (sweeps = 0; has_changed; ++sweeps) {
        has_changed = false;
        in_parallel(g.vertices(), [&](std::size_t first, std::size_t end) {
            for (std::size_t to = first; to < end; ++to) {
                std::uint32_t least = x[to];
                for (std::uint64_t i = g.offsets[to]; i < g.offsets[to + 1]; ++i) {
                    const std::uint32_t from = g.sources[i];
                    if (x[from] != unreached) {
                        least = std::min(least, x[from] + edge_length(from, static_cast<std::uint32_t>(to)));
                    }
                }
                if (least < x[to]) {
                    has_changed = true;
                }
                x_new[to] = least;
            }
        });
        x.swap(x_new);
    }
    return x;
}

std::vector<float> ranks(const graph &g, float damping, int steps) {
    const std::size_t vertices = g.vertices();
    const float base = (1.0F - damping) / static_cast<float>(vertices);
    const auto weight = [&](std::size_t vertex) {
        return g.outgoing[vertex] > 0 ? 1.0F / static_cast<float>(g.outgoing[vertex]) : 0.0F;
    };
    std::vector<float> x(vertices);
    for (std::size_t vertex = 0; vertex < vertices; ++vertex) {
        x[vertex] = 1.0F / static_cast<float>(vertices) * weight(vertex);
    }
    std::vector<float> x_new(vertices);
    for (int step = 0; step < steps; ++step) {
        in_parallel(vertices, [&](std::size_t first, std::size_t end) {
            for (std::size_t to = first; to < end; ++to) {
                std::array<float, lanes> sums{};
                for (std::uint64_t i = g.offsets[to]; i < g.offsets[to + 1]; ++i) {
                    sums[(i - g.offsets[to]) % lanes] += x[g.sources[i]];
                }
                for (std::size_t apart = lanes / 2; apart > 0; apart /= 2) {
                    for (std::size_t lane = 0; lane < apart; ++lane) {
                        sums[lane] += sums[lane + apart];
                    }
                }
                x_new[to] = std::fma(damping, sums[0], base) * weight(to);
            }
        });
        x.swap(x_new);
    }
    return x;
}

graph transposed(const graph &g) {
    graph made;
    made.outgoing.resize(g.vertices());
    made.offsets.assign(g.vertices() + 1, 0);
    for (std::size_t vertex = 0; vertex < g.vertices(); ++vertex) {
        made.outgoing[vertex] = static_cast<std::uint32_t>(g.offsets[vertex + 1] - g.offsets[vertex]);
        made.offsets[vertex + 1] = made.offsets[vertex] + g.outgoing[vertex];
    }
    made.sources.resize(g.sources.size());
    std::vector<std::uint64_t> next = made.offsets;
    for (std::size_t to = 0; to < g.vertices(); ++to) {
        for (std::uint64_t i = g.offsets[to]; i < g.offsets[to + 1]; ++i) {
            made.sources[next[g.sources[i]]++] = static_cast<std::uint32_t>(to);
        }
    }
    return made;
}

std::array<std::vector<latent>, 2> factors(const graph &g, const graph &back, int steps) {
    std::vector<latent> x(g.vertices());
    for (std::size_t vertex = 0; vertex < x.size(); ++vertex) {
        for (unsigned i = 0; i < factor_size; ++i) {
            x[vertex].v[i] = static_cast<float>(edge_length(static_cast<std::uint32_t>(vertex), i)) / 64.0F;
        }
    }
    std::vector<latent> before;
    for (int step = 0; step < steps; ++step) {
        const graph &side = step % 2 == 0 ? g : back;
        std::vector<latent> x_new(x.size());
        in_parallel(x.size(), [&](std::size_t first, std::size_t end) {
            for (std::size_t to = first; to < end; ++to) {
                normal_equations sum;
                for (std::uint64_t i = side.offsets[to]; i < side.offsets[to + 1]; ++i) {
                    const std::uint32_t from = side.sources[i];
                    const auto here = static_cast<std::uint32_t>(to);
                    sum.add(x[from], step % 2 == 0 ? rating(here, from) : rating(from, here));
                }
                x_new[to] = sum.solved();
            }
        });
        before = std::exchange(x, std::move(x_new));
    }
    return {x, before};
}
