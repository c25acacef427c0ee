// SPDX-License-Identifier: MIT OR Apache-2.0
// Random exchanges by index lists, and their expected results. Every rank creates the same cases from the same seed, so
// it can compute the entries that other ranks send.
#ifndef MPGPU_TEST_INDEX_REFERENCE_HPP
#define MPGPU_TEST_INDEX_REFERENCE_HPP

#include <mpgpu/halo/index_arrays.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace index_reference {

namespace halo = mpgpu::halo;

using random_engine = std::mt19937_64;

/// Returns a random number from `least` to `most`.
inline std::size_t any(random_engine &random, std::size_t least, std::size_t most) {
    return least + random() % (most - least + 1);
}

/// Entries that one rank sends to another.
struct pair_lists {
    std::vector<std::int64_t> send;    ///< entries of the sender
    std::vector<std::int64_t> receive; ///< entries of the receiver
};

/// Lengths of the vectors of all ranks, and the lists of all pairs of ranks.
struct lists {
    std::size_t ranks;
    std::vector<std::size_t> entries;
    std::vector<pair_lists> pairs; ///< from rank `i` to rank `j`: element `i * ranks + j`

    [[nodiscard]] const pair_lists &pair(std::size_t from, std::size_t to) const { return pairs[from * ranks + to]; }
};

/// Returns random lists. Some pairs exchange nothing, some in one direction only. Entries may be sent several times,
/// and are received at most once.
inline lists make_lists(random_engine &random, std::size_t ranks, std::size_t most_entries) {
    lists made{ranks, std::vector<std::size_t>(ranks), std::vector<pair_lists>(ranks * ranks)};
    for (std::size_t &entries : made.entries) {
        entries = any(random, 0, 7) == 0 ? any(random, 0, 2) : any(random, 0, most_entries);
    }
    const std::size_t empty_of_4 = any(random, 0, 3); // of every four pairs, how many exchange nothing, on average
    for (std::size_t to = 0; to < ranks; ++to) {
        std::vector<std::int64_t> free(made.entries[to]);
        std::iota(free.begin(), free.end(), 0);
        if (any(random, 0, 1) == 0) { // otherwise the received entries are contiguous
            std::shuffle(free.begin(), free.end(), random);
        }
        std::size_t used = 0;
        for (std::size_t from = 0; from < ranks; ++from) {
            if (any(random, 0, 3) < empty_of_4 || made.entries[from] == 0) {
                continue;
            }
            pair_lists &p = made.pairs[from * ranks + to];
            const std::size_t count = any(random, 0, (free.size() - used) / (any(random, 0, 1) == 0 ? 1 : ranks));
            const std::size_t sender = made.entries[from];
            const bool is_range = count <= sender && any(random, 0, 2) == 0;
            const std::size_t first = is_range ? any(random, 0, sender - count) : 0;
            for (std::size_t i = 0; i < count; ++i) {
                p.send.push_back(static_cast<std::int64_t>(is_range ? first + i : any(random, 0, sender - 1)));
                p.receive.push_back(free[used++]);
            }
        }
    }
    return made;
}

/// Field of an exchange, equal on all ranks.
struct field {
    std::size_t bytes; ///< size of an entry
    halo::number values;
};

/// Exchange, equal on all ranks.
struct exchange {
    std::uint64_t seed = 0; ///< seed of the values of all entries
    std::vector<field> fields;
    halo::index_operation operation = halo::index_operation::copy;
    bool is_split = false; ///< true if the exchange is started and finished by separate calls
};

/// Returns a random exchange whose entries have at most `most` bytes in all fields together. `most` must be at
/// least 1.
inline exchange make_exchange(random_engine &random, std::size_t most) {
    exchange made;
    made.seed = random();
    made.is_split = any(random, 0, 2) == 0;
    made.operation = static_cast<halo::index_operation>(any(random, 0, 2));
    const bool adds = made.operation != halo::index_operation::copy;
    const std::size_t count = any(random, 0, 1) == 0 ? 1 : any(random, 2, halo::most_fields);
    for (std::size_t f = 0; f < count && most > 0; ++f) {
        const std::size_t left = f + 1 < count ? std::max<std::size_t>(most / 2, 1) : most;
        const std::size_t kind = any(random, 0, 3);
        std::size_t bytes = kind == 0   ? any(random, 1, left)
                            : kind == 1 ? std::min<std::size_t>(left, 8 * any(random, 1, 4))
                                        : std::min<std::size_t>(left, any(random, 1, 16));
        bytes = std::min<std::size_t>(bytes, 4096);
        halo::number values = halo::number::none;
        if (adds) {
            values = bytes >= sizeof(double) && any(random, 0, 1) == 0 ? halo::number::f64 : halo::number::f32;
            const std::size_t size = values == halo::number::f64 ? sizeof(double) : sizeof(float);
            bytes = bytes / size * size;
        }
        if (bytes > 0) {
            made.fields.push_back({bytes, values});
            most -= bytes;
        }
    }
    if (made.fields.empty()) {
        made.operation = halo::index_operation::copy;
        made.fields.push_back({1, halo::number::none});
    }
    return made;
}

/// Returns 64 bits that depend on all arguments.
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t x = a ^ (b + 0x9E3779B97F4A7C15U + (a << 6U) + (a >> 2U));
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31U);
}

/// Writes the value of an entry to `to`. Numbers are fractions of both signs, so that sums depend on their order.
inline void write_value(std::byte *to, const exchange &e, std::uint64_t version, std::size_t rank, std::size_t f,
                        std::size_t entry) {
    const field &of = e.fields[f];
    std::uint64_t word = mix(mix(mix(e.seed, version), rank * 64 + f), entry);
    const std::size_t step = of.values == halo::number::f32 ? sizeof(float) : sizeof(double);
    for (std::size_t at = 0; at < of.bytes; at += step) {
        word = mix(word, at);
        constexpr double scale = 1e-17;
        const double number = static_cast<double>(static_cast<std::int64_t>(word)) * scale;
        const auto small = static_cast<float>(number);
        const void *const from = of.values == halo::number::f64   ? static_cast<const void *>(&number)
                                 : of.values == halo::number::f32 ? static_cast<const void *>(&small)
                                                                  : static_cast<const void *>(&word);
        std::memcpy(to + at, from, std::min(step, of.bytes - at));
    }
}

template <class Number> void add_numbers(std::byte *to, const std::byte *terms, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += sizeof(Number)) {
        Number sum{};
        Number term{};
        std::memcpy(&sum, to + at, sizeof(Number));
        std::memcpy(&term, terms + at, sizeof(Number));
        sum += term;
        std::memcpy(to + at, &sum, sizeof(Number));
    }
}

/// Applies what rank `rank` receives in an exchange to field `f` of its own vector. `entry(i)` returns the address of
/// entry `i`.
template <class Entry>
void apply(const lists &all, const exchange &e, std::size_t rank, std::size_t f, const Entry &entry) {
    const field &of = e.fields[f];
    const bool is_reverse = e.operation == halo::index_operation::reverse_add;
    std::vector<std::byte> value(of.bytes);
    for (std::size_t other = 0; other < all.ranks; ++other) {
        const pair_lists &p = is_reverse ? all.pair(rank, other) : all.pair(other, rank);
        for (std::size_t i = 0; i < p.send.size(); ++i) {
            const auto from = static_cast<std::size_t>(is_reverse ? p.receive[i] : p.send[i]);
            std::byte *const to = entry(static_cast<std::size_t>(is_reverse ? p.send[i] : p.receive[i]));
            write_value(value.data(), e, 0, other, f, from);
            if (e.operation == halo::index_operation::copy) {
                std::memcpy(to, value.data(), of.bytes);
            } else if (of.values == halo::number::f32) {
                add_numbers<float>(to, value.data(), of.bytes);
            } else {
                add_numbers<double>(to, value.data(), of.bytes);
            }
        }
    }
}

} // namespace index_reference

#endif // MPGPU_TEST_INDEX_REFERENCE_HPP
