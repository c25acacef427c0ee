// SPDX-License-Identifier: MIT OR Apache-2.0
#include "part.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace {

using vector3 = std::array<double, 3>;

/// Vertices that two ranks exchange, sorted by number.
struct shared_vertices {
    std::set<std::int32_t> own;
    std::set<std::int32_t> ghosts;
};

/// Row of the matrix, as pairs of local column and value.
using row = std::vector<std::pair<std::int32_t, double>>;

std::size_t index(std::int32_t number) {
    return static_cast<std::size_t>(number);
}

vector3 difference(const vector3 &a, const vector3 &b) {
    return {a[0] - b[0], a[1] - b[1], a[2] - b[2]};
}

vector3 cross(const vector3 &a, const vector3 &b) {
    return {a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]};
}

double dot(const vector3 &a, const vector3 &b) {
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

/// Volume of a tetrahedron, and gradients of its four basis functions.
struct geometry {
    double volume;
    std::array<vector3, 4> gradients;
};

geometry geometry_of(const mesh &m, const std::array<std::int32_t, 4> &element) {
    const vector3 &origin = m.vertices[index(element[0])];
    const vector3 a = difference(m.vertices[index(element[1])], origin);
    const vector3 b = difference(m.vertices[index(element[2])], origin);
    const vector3 c = difference(m.vertices[index(element[3])], origin);
    const double determinant = dot(a, cross(b, c));
    geometry g{std::abs(determinant) / 6.0, {{{}, cross(b, c), cross(c, a), cross(a, b)}}};
    for (std::size_t d = 0; d < 3; ++d) {
        for (std::size_t k = 1; k < 4; ++k) {
            g.gradients[k][d] /= determinant;
            g.gradients[0][d] -= g.gradients[k][d];
        }
    }
    return g;
}

void add(row &to, std::int32_t column, double value) {
    const auto found = std::find_if(to.begin(), to.end(), [&](const auto &entry) { return entry.first == column; });
    if (found == to.end()) {
        to.emplace_back(column, value);
    } else {
        found->second += value;
    }
}

std::map<int, shared_vertices> find_shared(const mesh &m, const std::vector<int> &owner, int rank) {
    std::map<int, shared_vertices> shared;
    for (const auto &element : m.elements) {
        for (const std::int32_t a : element) {
            if (a >= m.unknowns || owner[index(a)] != rank) {
                continue;
            }
            for (const std::int32_t b : element) {
                if (b < m.unknowns && owner[index(b)] != rank) {
                    shared_vertices &with = shared[owner[index(b)]];
                    with.own.insert(a);
                    with.ghosts.insert(b);
                }
            }
        }
    }
    return shared;
}

/// Numbers the vertices of the rank and sets its neighbours. Returns the local number of each unknown of the mesh, or
/// -1 if the rank needs no value of it.
std::vector<std::int32_t> set_numbers(part &made, const mesh &m, const std::vector<int> &owner, int rank) {
    const std::map<int, shared_vertices> shared = find_shared(m, owner, rank);
    std::vector<bool> is_sent(index(m.unknowns));
    for (const auto &[other, with] : shared) {
        std::for_each(with.own.begin(), with.own.end(), [&](std::int32_t v) { is_sent[index(v)] = true; });
    }
    std::vector<std::int32_t> local(index(m.unknowns), -1);
    const auto append = [&](std::int32_t v) {
        local[index(v)] = static_cast<std::int32_t>(made.size());
        made.vertices.push_back(v);
    };
    for (const bool sent : {false, true}) {
        for (std::int32_t v = 0; v < m.unknowns; ++v) {
            if (owner[index(v)] == rank && is_sent[index(v)] == sent) {
                append(v);
            }
        }
        (sent ? made.owned : made.interior) = static_cast<std::int32_t>(made.size());
    }
    for (const auto &[other, with] : shared) {
        const auto first = static_cast<std::int32_t>(made.size());
        neighbour &n =
            made.neighbours.emplace_back(neighbour{other, {}, first, static_cast<std::int32_t>(with.ghosts.size())});
        for (const std::int32_t v : with.own) {
            n.send.push_back(local[index(v)]);
        }
        std::for_each(with.ghosts.begin(), with.ghosts.end(), append);
    }
    return local;
}

} // namespace

part make_part(const mesh &m, const std::vector<int> &owner, int rank) {
    part made;
    const std::vector<std::int32_t> local = set_numbers(made, m, owner, rank);
    std::vector<row> rows(index(made.owned));
    made.right_side.resize(rows.size());
    for (const auto &element : m.elements) {
        const geometry g = geometry_of(m, element);
        for (std::size_t a = 0; a < 4; ++a) {
            const std::int32_t here = element.at(a) < m.unknowns ? local[index(element.at(a))] : -1;
            if (here < 0 || here >= made.owned) {
                continue;
            }
            made.right_side[index(here)] += g.volume / 4.0;
            for (std::size_t b = 0; b < 4; ++b) {
                if (element.at(b) < m.unknowns) {
                    const double mass = g.volume / (a == b ? 10.0 : 20.0);
                    add(rows[index(here)], local[index(element.at(b))],
                        g.volume * dot(g.gradients.at(a), g.gradients.at(b)) + mass);
                }
            }
        }
    }
    made.starts.push_back(0);
    for (row &one : rows) {
        std::sort(one.begin(), one.end());
        for (const auto &[column, value] : one) {
            made.columns.push_back(column);
            made.values.push_back(value);
        }
        made.starts.push_back(static_cast<std::int32_t>(made.columns.size()));
    }
    return made;
}
