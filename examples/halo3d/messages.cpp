// SPDX-License-Identifier: MIT OR Apache-2.0
#include "messages.hpp"

#include <optional>

namespace halo = mpgpu::halo;

namespace {

constexpr std::uint64_t cell_bytes = sizeof(double);

std::uint64_t aligned(std::uint64_t bytes, std::uint64_t to) {
    return (bytes + to - 1) / to * to;
}

std::optional<int> neighbour(const halo::grid &g, int rank, const std::array<int, 3> &step) {
    std::array<int, 3> place = halo::place_of(g, rank);
    for (std::size_t d = 0; d < 3; ++d) {
        place.at(d) += step.at(d);
        if (place.at(d) < 0 || place.at(d) >= g.ranks.at(d)) {
            if (!g.periodic.at(d)) {
                return std::nullopt;
            }
            place.at(d) = (place.at(d) + g.ranks.at(d)) % g.ranks.at(d);
        }
    }
    return place[0] + g.ranks[0] * (place[1] + g.ranks[1] * place[2]);
}

/// Returns the cells at the side `step` of a rank's array. These are the outermost computed cells, or, if `ghosts` is
/// set, the ghost cells outside them.
halo::box side(const halo::grid &g, int rank, const std::array<int, 3> &step, bool ghosts) {
    const halo::box own = halo::box_of(g, rank);
    halo::box cells;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t first = g.ghost.at(d); // index of the first computed cell
        const std::int64_t last = first + own.cells.at(d);
        const std::int64_t width = g.ghost.at(d);
        cells.cells.at(d) = step.at(d) == 0 ? own.cells.at(d) : width;
        cells.first.at(d) = first;
        if (step.at(d) < 0 && ghosts) {
            cells.first.at(d) = 0;
        } else if (step.at(d) > 0) {
            cells.first.at(d) = ghosts ? last : last - width;
        }
    }
    return cells;
}

std::uint64_t cells_of(const halo::box &b) {
    return static_cast<std::uint64_t>(b.cells[0] * b.cells[1] * b.cells[2]);
}

/// Returns the number of bytes that one variable takes in a message, rounded up to the alignment of the widest words.
std::uint64_t variable_bytes(const halo::box &b) {
    return aligned(cells_of(b) * cell_bytes, 16);
}

void add(std::vector<message> &all, std::uint64_t &buffer_bytes, int tag, int rank, const halo::box &cells,
         std::size_t vars) {
    const std::uint64_t bytes = variable_bytes(cells) * vars;
    all.push_back({tag, rank, cells, bytes, buffer_bytes});
    buffer_bytes += aligned(bytes, 256);
}

} // namespace

messages messages_of(const halo::grid &g, int rank, std::size_t vars) {
    messages found;
    for (int direction = 0; direction < 27; ++direction) {
        const std::array<int, 3> step = {direction % 3 - 1, direction / 3 % 3 - 1, direction / 9 - 1};
        bool ghosts = direction != 13; // direction 13 is the rank itself
        for (std::size_t d = 0; d < 3; ++d) {
            ghosts = ghosts && (step.at(d) == 0 || g.ghost.at(d) > 0);
        }
        const std::optional<int> other = ghosts ? neighbour(g, rank, step) : std::nullopt;
        if (other) {
            add(found.sent, found.outbox_bytes, direction, *other, side(g, rank, step, false), vars);
            // The neighbour has sent this message in the opposite direction.
            add(found.received, found.inbox_bytes, 26 - direction, *other, side(g, rank, step, true), vars);
        }
    }
    return found;
}

std::vector<halo::piece> pieces_of(const halo::grid &g, int rank, const message &m, const halo::rank_arrays &arrays,
                                   std::byte *at) {
    const std::array<std::int64_t, 3> e = halo::array_extents(g, rank);
    const std::int64_t first = m.box.first[0] + e[0] * (m.box.first[1] + e[1] * m.box.first[2]);
    const std::uint64_t row = static_cast<std::uint64_t>(e[0]) * cell_bytes;
    std::vector<halo::piece> pieces;
    for (const halo::rank_array &one : arrays) {
        pieces.push_back({static_cast<std::byte *>(one.data) + static_cast<std::uint64_t>(first) * cell_bytes,
                          at,
                          cell_bytes,
                          {static_cast<std::uint64_t>(m.box.cells[0]), static_cast<std::uint64_t>(m.box.cells[1]),
                           static_cast<std::uint64_t>(m.box.cells[2])},
                          row,
                          row * static_cast<std::uint64_t>(e[1])});
        at += variable_bytes(m.box);
    }
    return pieces;
}

std::vector<halo::launch_function> launches_of(const mpgpu::context &ctx, const halo::copier &copier,
                                               const halo::grid &g, int rank, const std::vector<message> &all,
                                               const halo::rank_arrays &arrays, std::byte *buffer,
                                               halo::direction way) {
    std::vector<halo::launch_function> launches;
    launches.reserve(all.size());
    for (const message &m : all) {
        launches.push_back(copier(ctx, arrays[0].location, pieces_of(g, rank, m, arrays, buffer + m.offset), way));
    }
    return launches;
}
