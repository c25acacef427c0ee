// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests exchanges by index lists with one process per rank. Random lists and exchanges are compared, byte by byte, with
// a reference that every rank computes. Errors on one rank must be errors on all ranks.
//
// Run by mpirun with any number of ranks, on the host backend, or on GPUs if nvcc has compiled this file. Environment:
// TEST_CASES is the number of random cases, TEST_SEED the seed, which is printed. An argument states that the ranks are
// on several nodes, which tests/cpp/nodes emulates. Without an argument, groups of 1, 2 or 3 ranks are treated as
// nodes.
#include "halo_part.hpp"
#include "index_reference.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_indexed.hpp>

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace reference = index_reference;
using ranks_test::require;
using ranks_test::world_rank;
using reference::any;
using reference::random_engine;

std::uint64_t number_from(const char *variable, std::uint64_t otherwise) {
    const char *const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

halo::index_options options_for([[maybe_unused]] const mpgpu::context &ctx, std::size_t entry_bytes) {
    halo::index_options how;
    how.entry_bytes = entry_bytes;
#ifdef __CUDACC__
    if (!halo_test::on_host_backend(ctx)) {
        how.kernel = halo::cuda_indexed();
    }
#endif
    return how;
}

/// Index lists of this rank in arrays of various integer types. The first entry of a vector has index `first`.
class own_lists {
  public:
    own_lists(const reference::lists &all, std::size_t rank, random_engine &random, std::int64_t first)
        : first_(first) {
        for (std::size_t other = 0; other < all.ranks; ++other) {
            const reference::pair_lists &out = all.pair(rank, other);
            const reference::pair_lists &in = all.pair(other, rank);
            if (!out.send.empty() || !in.receive.empty() || any(random, 0, 3) == 0) {
                neighbours_.push_back({static_cast<int>(other), list(out.send, random), list(in.receive, random)});
            }
        }
        std::shuffle(neighbours_.begin(), neighbours_.end(), random);
    }

    [[nodiscard]] const std::vector<halo::index_neighbour> &neighbours() const { return neighbours_; }

  private:
    halo::index_list list(std::vector<std::int64_t> indices, random_engine &random) {
        for (std::int64_t &index : indices) {
            index += first_;
        }
        bool is_range = true;
        for (std::size_t i = 1; i < indices.size(); ++i) {
            is_range = is_range && indices[i] == indices[i - 1] + 1;
        }
        if (is_range && any(random, 0, 3) != 0) {
            return halo::index_list::range(indices.empty() ? first_ : indices[0], indices.size());
        }
        switch (any(random, 0, 3)) {
        case 0:
            return *signed_.emplace_back(std::make_unique<std::vector<std::int32_t>>(indices.begin(), indices.end()));
        case 1:
            return *small_.emplace_back(std::make_unique<std::vector<std::uint32_t>>(indices.begin(), indices.end()));
        case 2:
            return *wide_.emplace_back(std::make_unique<std::vector<std::int64_t>>(indices.begin(), indices.end()));
        default:
            return *large_.emplace_back(std::make_unique<std::vector<std::uint64_t>>(indices.begin(), indices.end()));
        }
    }

    std::int64_t first_;
    std::vector<std::unique_ptr<std::vector<std::int32_t>>> signed_;
    std::vector<std::unique_ptr<std::vector<std::uint32_t>>> small_;
    std::vector<std::unique_ptr<std::vector<std::int64_t>>> wide_;
    std::vector<std::unique_ptr<std::vector<std::uint64_t>>> large_;
    std::vector<halo::index_neighbour> neighbours_;
};

/// Memory with the vectors of one exchange, on the device and in host memory.
class vectors {
  public:
    vectors(const mpgpu::context &ctx, mpgpu::device where, std::size_t rank, std::size_t entries, std::size_t most)
        : rank_(rank), entries_(entries), on_device_(ctx, where, entries * (most + 256) + 1024),
          before_(ctx, mpgpu::device::host(), on_device_.size()), between_(ctx, before_.location(), before_.size()),
          after_(ctx, before_.location(), before_.size()), up_(ctx, {mpgpu::make_transfer(on_device_, before_)}),
          up_between_(ctx, {mpgpu::make_transfer(on_device_, between_)}),
          down_(ctx, {mpgpu::make_transfer(after_, on_device_)}) {}

    /// Places the fields in memory at random distances and alignments, and sets all bytes.
    void fill(const reference::exchange &e, random_engine &random) {
        exchange_ = e;
        fields_.clear();
        const bool adds = e.operation != halo::index_operation::copy;
        const bool are_interleaved = any(random, 0, 2) == 0;
        const std::size_t unit = adds ? sizeof(double) : std::size_t{1} << any(random, 0, 4);
        const auto round_up = [unit](std::size_t bytes) { return (bytes + unit - 1) / unit * unit; };
        std::size_t all = 0;
        for (const reference::field &f : e.fields) {
            all += round_up(f.bytes);
        }
        std::size_t at = unit * any(random, 0, 3);
        for (const reference::field &f : e.fields) {
            const std::size_t step = are_interleaved ? all : round_up(f.bytes) + unit * any(random, 0, 1);
            fields_.push_back({on_device_.data() + at, on_device_.location(), f.bytes, step, entries_, f.values});
            at += are_interleaved ? round_up(f.bytes) : step * entries_;
        }
        for (std::uint64_t version : {0U, 1U}) {
            mpgpu::memory &to = version == 0 ? before_ : between_;
            std::fill_n(to.data(), to.size(), static_cast<std::byte>(random()));
            for (std::size_t f = 0; f < fields_.size(); ++f) {
                for (std::size_t i = 0; i < entries_; ++i) {
                    reference::write_value(entry(to, f, i), e, version, rank_, f, i);
                }
            }
        }
    }

    /// Enqueues the exchange. If it is split, all entries are overwritten between its two parts.
    void enqueue(halo::indexed &ex, const mpgpu::stream &stream, unsigned delay) const {
        up_.enqueue(stream);
        if (exchange_.is_split) {
            ex.start(stream, fields_, exchange_.operation);
            stream.launch_host([delay] { std::this_thread::sleep_for(std::chrono::microseconds(delay)); });
            up_between_.enqueue(stream);
            ex.finish(stream);
        } else {
            ex.exchange(stream, fields_, exchange_.operation);
        }
        down_.enqueue(stream);
    }

    /// Compares all bytes with the reference.
    void check(const reference::lists &all, const std::string &what) {
        mpgpu::memory &expected = exchange_.is_split ? between_ : before_;
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            reference::apply(all, exchange_, rank_, f, [&](std::size_t i) { return entry(expected, f, i); });
        }
        const std::byte *const first = expected.data();
        const std::byte *const end = first + expected.size();
        const std::byte *const differs = std::mismatch(first, end, static_cast<const std::byte *>(after_.data())).first;
        if (differs != end) {
            require(false, what + ": byte " + std::to_string(differs - first) + " is wrong; operation " +
                               std::to_string(static_cast<int>(exchange_.operation)) + ", " +
                               std::to_string(fields_.size()) + " fields, the first of " +
                               std::to_string(fields_[0].entry_bytes) + " bytes, split " +
                               std::to_string(static_cast<int>(exchange_.is_split)));
        }
    }

  private:
    [[nodiscard]] std::byte *entry(mpgpu::memory &in, std::size_t f, std::size_t i) const {
        const auto *const first = static_cast<const std::byte *>(fields_[f].data);
        return in.data() + (first - on_device_.data()) + i * fields_[f].stride_bytes;
    }

    std::size_t rank_;
    std::size_t entries_;
    mpgpu::memory on_device_;
    mpgpu::memory before_;  ///< contents before the exchange
    mpgpu::memory between_; ///< contents that are written between the two parts of a split exchange
    mpgpu::memory after_;
    mpgpu::plan up_;
    mpgpu::plan up_between_;
    mpgpu::plan down_;
    reference::exchange exchange_;
    std::vector<halo::index_field> fields_;
};

/// Executes random exchanges with random lists. Several exchanges, each with other vectors, are enqueued before the
/// host waits. Returns the number of exchanges.
std::size_t run_case(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::uint64_t seed) {
    const auto rank = static_cast<std::size_t>(node.communicator_rank());
    const auto ranks = static_cast<std::size_t>(node.communicator_size());
    random_engine random(seed);                                 // equal on all ranks
    random_engine own(reference::mix(seed, rank));              // different on each rank
    const bool are_large = any(random, 0, 5) == 0;              // few large entries
    const bool are_many = !are_large && any(random, 0, 9) == 0; // many small entries
    const std::size_t most = are_large ? any(random, 1024, 6000) : any(random, 1, 80);
    const reference::lists all = reference::make_lists(random, ranks, are_large ? 12 : are_many ? 3000 : 60);
    const mpgpu::device where = halo_test::device_of(ctx, world_rank);
    halo::index_options how = options_for(ctx, most);
    how.first_index = static_cast<std::int64_t>(any(own, 0, 1));
    const own_lists lists(all, rank, own, how.first_index);
    halo::indexed ex(ctx, node, where, all.entries[rank], lists.neighbours(), how);
    const std::vector<mpgpu::stream> streams = [&] {
        std::vector<mpgpu::stream> made;
        made.emplace_back(ctx, where);
        made.emplace_back(ctx, where);
        return made;
    }();
    const std::size_t depth = any(random, 1, 5);
    std::vector<std::unique_ptr<vectors>> sets;
    for (std::size_t s = 0; s < depth; ++s) {
        sets.push_back(std::make_unique<vectors>(ctx, where, rank, all.entries[rank], most));
    }
    const std::size_t rounds = any(random, 2, are_many ? 4 : 16);
    for (std::size_t round = 0; round < rounds; ++round) {
        for (const auto &set : sets) {
            set->fill(reference::make_exchange(random, most), own);
        }
        for (std::size_t s = 0; s < depth; ++s) {
            sets[s]->enqueue(ex, streams[any(own, 0, 1)], static_cast<unsigned>(any(own, 0, 20)));
        }
        for (const mpgpu::stream &stream : streams) {
            stream.synchronize();
        }
        for (std::size_t s = 0; s < depth; ++s) {
            sets[s]->check(all, "seed " + std::to_string(seed) + ", round " + std::to_string(round) + ", exchange " +
                                    std::to_string(s));
        }
    }
    ex.destroy();
    return rounds * depth;
}

/// Requires that the creation of an exchange throws `argument_error` on every rank. On ranks with `has_text`, the error
/// contains `text`. On the other ranks it contains "another rank".
void check_refusal(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::size_t entries,
                   const std::vector<halo::index_neighbour> &neighbours, const std::string &text, bool has_text,
                   std::size_t entry_bytes = 8) {
    std::string why;
    try {
        const halo::indexed ex(ctx, node, halo_test::device_of(ctx, world_rank), entries, neighbours,
                               options_for(ctx, entry_bytes));
    } catch (const mpgpu::argument_error &e) {
        why = e.what();
    }
    require(!why.empty(), "the creation of an exchange was not refused; the error must contain '" + text + "'");
    require(!has_text || why.find(text) != std::string::npos,
            "the error is '" + why + "', but must contain '" + text + "'");
    require(has_text || why.find("another rank") != std::string::npos,
            "the error is '" + why + "', but must contain 'another rank'");
}

/// Tests arguments that are invalid on one rank only.
void check_refusals(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const int last = node.communicator_size() - 1;
    const bool is_last = world_rank == last;
    const auto on_last = [&](const std::vector<halo::index_neighbour> &neighbours, const std::string &text) {
        check_refusal(ctx, node, 100, is_last ? neighbours : std::vector<halo::index_neighbour>(), text, is_last);
    };
    const std::string own = std::to_string(last);
    const std::vector<std::int32_t> high = {5, 100};
    const std::vector<std::int64_t> low = {-1};
    const std::vector<std::uint32_t> twice = {7, 3, 7};
    const auto range = [](std::int64_t first, std::size_t count) { return halo::index_list::range(first, count); };
    on_last({{last, high, range(0, 2)}},
            "send list of neighbour " + own + ": index 100 at position 1: must be 0 to 99");
    on_last({{last, range(0, 1), low}}, "receive list of neighbour " + own + ": index -1 at position 0");
    on_last({{last, range(0, 20), range(90, 20)}}, "receive list of neighbour " + own + ": index 100 at position 10");
    on_last({{last, range(0, 3), twice}}, "index 7 is twice in the receive list of neighbour " + own);
    on_last({{last + 1, {}, {}}}, "neighbour " + std::to_string(last + 1) + ": the communicator has");
    on_last({{last, {}, {}}, {last, {}, {}}}, "neighbour " + own + " is given twice");
    on_last({{last, range(0, 3), range(5, 2)}},
            "rank " + own + " sends 3 entries to rank " + own + ", which expects 2");
    check_refusal(ctx, node, 100, {}, "index_options::entry_bytes: 0: must be 1 to", is_last, is_last ? 0 : 8);
    if (last == 0) {
        return;
    }
    check_refusal(ctx, node, 100, {}, "index_options::entry_bytes is", true, is_last ? 16 : 8);
    std::vector<halo::index_neighbour> neighbours;
    if (world_rank < 2) {
        neighbours.push_back({1 - world_rank, range(0, 255), range(255, world_rank == 1 ? 256 : 255)});
    }
    check_refusal(ctx, node, 1000, neighbours, "rank 0 sends 255 entries to rank 1, which expects 256", world_rank < 2);
    neighbours.clear();
    if (world_rank == 0) {
        neighbours.push_back({1, range(0, 4), {}});
    }
    check_refusal(ctx, node, 1000, neighbours, "rank 0 sends 4 entries to rank 1, which expects 0", world_rank < 2);
    neighbours.clear();
    if (is_last) {
        neighbours = {{0, {}, range(0, 4)}, {last, range(0, 4), range(3, 4)}};
    }
    check_refusal(ctx, node, 1000, neighbours, "index 3 is in the receive lists of neighbours 0 and " + own, is_last);
}

/// Tests arguments that are invalid in one exchange. The object can be used after the error.
void check_fields(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const mpgpu::device where = halo_test::device_of(ctx, world_rank);
    const mpgpu::stream stream(ctx, where);
    halo::indexed ex(ctx, node, where, 10, {{world_rank, halo::index_list::range(0, 5), halo::index_list::range(5, 5)}},
                     options_for(ctx, 16));
    mpgpu::buffer<double> x(ctx, where, 20);
    mpgpu::buffer<std::int64_t> whole(ctx, where, 10);
    const halo::index_field good = halo::field_of(x, 2);
    const auto is_refused = [&](const std::vector<halo::index_field> &fields,
                                halo::index_operation operation = halo::index_operation::copy) {
        return ranks_test::failure_of([&] { ex.exchange(stream, fields, operation); }) ==
               mpgpu::status::invalid_argument;
    };
    require(is_refused({}), "an exchange without fields was not refused");
    require(is_refused(std::vector<halo::index_field>(9, halo::field_of(whole))),
            "an exchange with nine fields was not refused");
    require(is_refused({good, good}), "an exchange of 32 bytes per entry was not refused, but the maximum is 16");
    require(is_refused({halo::field_of(x, 3)}), "an exchange with a field that is too short was not refused");
    require(is_refused({halo::field_of(x, 0)}), "an exchange with entries of 0 bytes was not refused");
    require(is_refused({halo::field_of(whole)}, halo::index_operation::add), "an addition of integers was not refused");
    require(is_refused({{x.data(), where, 8, 4, 10, halo::number::none}}),
            "an exchange with entries that overlap was not refused");
    require(is_refused({{x.data(), mpgpu::device::host(), 8, 8, 10, halo::number::none}}),
            "an exchange with a field in host memory was not refused");
    require(is_refused({{reinterpret_cast<std::byte *>(x.data()) + 4, where, 8, 8, 10, halo::number::f64}},
                       halo::index_operation::reverse_add),
            "an addition of numbers that are not aligned was not refused");
    require(ranks_test::failure_of([&] { ex.finish(stream); }) == mpgpu::status::invalid_argument,
            "finish without start was not refused");
    ex.start(stream, x);
    require(ranks_test::failure_of([&] { ex.start(stream, x); }) == mpgpu::status::invalid_argument,
            "a second start without finish was not refused");
    ex.finish(stream);
    ex.exchange(stream, {good});
    ex.exchange(stream, x);
    ex.add(stream, x);
    ex.add(stream, good);
    ex.add(stream, {halo::field_of(x), halo::field_of(x)});
    stream.synchronize();
    require(ex.sent() == 5 && ex.received() == 5 && ex.entries() == 10,
            "sent, received or entries returns a wrong number");
    ex.destroy();
    require(!ex && ex.entries() == 0, "the object is not empty after destroy");
    ex = halo::indexed(ctx, node, where, 4, {}, options_for(ctx, 8));
    halo::indexed moved = std::move(ex); // exchanges without neighbours
    moved.exchange(stream, x);
    moved.add(stream, x);
    stream.synchronize();
    moved.destroy();
    require(ranks_test::failure_of([&] { moved.exchange(stream, x); }) == mpgpu::status::invalid_handle,
            "an exchange of an empty object was not refused");
}

/// Tests that an exchange ends with an error if a rank on another node does not take part in it.
void check_time_limit(const mpgpu::context &ctx, const mpgpu::mpi::node &alone) {
    const int ranks = alone.communicator_size();
    if (ranks == 1) {
        return;
    }
    const mpgpu::device where = halo_test::device_of(ctx, world_rank);
    const mpgpu::stream stream(ctx, where);
    mpgpu::buffer<double> x(ctx, where, 10);
    std::vector<halo::index_neighbour> neighbours;
    if (world_rank < 2) {
        neighbours.push_back({1 - world_rank, halo::index_list::range(0, 5), halo::index_list::range(5, 5)});
    }
    halo::index_options how = options_for(ctx, 8);
    how.time_limit = std::chrono::milliseconds(200);
    halo::indexed ex(ctx, alone, where, 10, neighbours, how);
    if (world_rank == 0) {
        std::string why;
        try {
            ex.exchange(stream, x);
        } catch (const mpgpu::timeout &e) {
            why = e.what();
        }
        require(why.find("messages have not arrived from rank 1") != std::string::npos,
                "the error is '" + why + "', but must contain 'messages have not arrived from rank 1'");
        require(ranks_test::failure_of([&] { ex.start(stream, x); }) == mpgpu::status::rank_failed,
                "an exchange after one that has failed was not refused");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ex = halo::indexed(); // without destroy, because an exchange has failed
}

/// Runs all tests. `are_nodes` is true if the ranks are on several nodes, which may be emulated.
void run(bool are_nodes) {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, halo_test::device_of(ctx, world_rank));
    require(are_nodes == (node.size() < node.communicator_size()), "the ranks are not on the expected nodes");
    check_refusals(ctx, node);
    check_fields(ctx, node);
    std::vector<mpgpu::mpi::node> nodes; // nodes of 1, 2 or 3 ranks each; of 1 rank if `are_nodes` is true
    for (const int size : are_nodes ? std::vector<int>{1} : std::vector<int>{1, 2, 3}) {
        MPI_Comm local = MPI_COMM_NULL;
        MPI_Comm_split(MPI_COMM_WORLD, world_rank / size, world_rank, &local);
        nodes.emplace_back(ctx, MPI_COMM_WORLD, local, halo_test::device_of(ctx, world_rank));
        MPI_Comm_free(&local);
    }
    check_refusals(ctx, nodes.back());
    check_fields(ctx, nodes[0]);
    check_time_limit(ctx, nodes[0]);
    const std::uint64_t cases = number_from("TEST_CASES", node.communicator_size() > 4 ? 9 : 15);
    const std::uint64_t seed = number_from("TEST_SEED", 1);
    std::size_t exchanges = 0;
    for (std::uint64_t i = 0; i < cases; ++i) {
        exchanges += run_case(ctx, i % 3 == 0 ? nodes[i / 3 % nodes.size()] : node, reference::mix(seed, i));
    }
    if (world_rank == 0) {
        std::printf("%zu exchanges of %llu cases, seed %llu\n", exchanges, static_cast<unsigned long long>(cases),
                    static_cast<unsigned long long>(seed));
    }
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "all entries are right", [argc] { run(argc > 1); });
}
