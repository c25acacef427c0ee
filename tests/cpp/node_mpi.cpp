// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests plans of the ranks of a node. Each rank sees all GPUs or only one. The data of every step is checked. Run by
// mpirun with any number of ranks, on the host backend or on GPUs. At the first error the program ends all ranks with a
// message. An argument is the number of steps of the longest test.
#include "ranks.hpp"

#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

constexpr unsigned char untouched = 0xC7;
/// Memory windows of each rank: send buffers on its GPU and in host memory, and receive buffers on its GPU and in host
/// memory.
constexpr std::uint32_t send_gpu = 0;
constexpr std::uint32_t receive_gpu = 2;
constexpr std::uint32_t window_count = 4;

int world_size = 0;

unsigned char byte(std::size_t index, std::size_t offset, std::size_t step) {
    return static_cast<unsigned char>((offset * 31) ^ (offset >> 9U) ^ (index * 101) ^ (step * 59));
}

/// Transfers of all ranks in one step. The list is equal on all ranks.
struct batch {
    std::vector<mpgpu::node_transfer> transfers;
    std::vector<std::array<std::size_t, window_count>> sizes; ///< for each rank, sizes of its windows
};

batch random_batch(std::mt19937_64 &random) {
    const auto ranks = static_cast<std::uint32_t>(world_size);
    const auto below = [&](std::uint64_t bound) { return random() % bound; };
    batch made;
    made.sizes.resize(ranks);
    const auto to_one = below(4) == 0 ? below(ranks) : ranks;
    for (std::uint64_t left = below(3 * std::uint64_t{ranks} + 1); left > 0; --left) {
        const auto from = static_cast<std::uint32_t>(below(ranks));
        const auto to = static_cast<std::uint32_t>(to_one < ranks ? to_one : below(ranks));
        const std::array<std::size_t, 4> kinds{below(3), 1 + below(9000), below(300'000), below(1U << 20U)};
        const std::size_t bytes = kinds[below(4)];
        const auto window = [&](std::uint32_t first) { return first + static_cast<std::uint32_t>(below(5) == 0); };
        const std::uint32_t source = window(send_gpu);
        const std::uint32_t target = window(receive_gpu);
        // The transfer leaves gaps, and the bytes in the gaps must not be written.
        made.transfers.push_back(
            {{to, target, made.sizes[to][target]}, {from, source, made.sizes[from][source]}, bytes});
        made.sizes[to][target] += bytes + below(3);
        made.sizes[from][source] += bytes + below(3);
    }
    return made;
}

/// Memory windows of a rank. Each window has host memory of the same size, from which and to which it is copied.
struct memory {
    std::vector<mpgpu::buffer<unsigned char>> windows;
    std::vector<mpgpu::buffer<unsigned char>> copies;

    memory(const mpgpu::context &ctx, mpgpu::device gpu, const std::array<std::size_t, window_count> &sizes) {
        for (std::uint32_t i = 0; i < window_count; ++i) {
            windows.push_back(
                mpgpu::buffer<unsigned char>::shared(ctx, i % 2 == 0 ? gpu : mpgpu::device::host(), sizes.at(i) + 1));
            copies.emplace_back(ctx, mpgpu::device::host(), sizes.at(i) + 1);
            std::fill_n(copies.back().data(), sizes.at(i) + 1, untouched);
        }
    }

    [[nodiscard]] std::vector<mpgpu::window> named() {
        std::vector<mpgpu::window> made;
        for (auto &window : windows) {
            made.push_back(mpgpu::make_window(window));
        }
        return made;
    }

    /// Returns a plan that copies either all send windows or all receive windows of a rank from or to host memory.
    [[nodiscard]] mpgpu::plan copy(const mpgpu::context &ctx, std::uint32_t first, bool to_windows) {
        std::vector<mpgpu::transfer> transfers;
        for (std::uint32_t i = first; i < first + 2; ++i) {
            auto &window = windows.at(i);
            auto &copy = copies.at(i);
            transfers.push_back(to_windows ? mpgpu::make_transfer(window, copy) : mpgpu::make_transfer(copy, window));
        }
        return {ctx, transfers};
    }
};

void random_steps(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::uint64_t seed,
                  std::size_t steps) {
    std::mt19937_64 random(seed);
    const batch all = random_batch(random);
    std::mt19937_64 delays(seed ^ static_cast<std::uint64_t>(world_rank));
    const auto rank = static_cast<std::uint32_t>(world_rank);
    memory mine(ctx, gpu, all.sizes[rank]);
    std::vector<mpgpu::node_transfer> handed_in;
    std::copy_if(all.transfers.begin(), all.transfers.end(), std::back_inserter(handed_in),
                 [&](const mpgpu::node_transfer &t) { return t.src.rank == rank; });
    mpgpu::plan_options options;
    options.min_bytes = 1;
    options.chunk_bytes = std::size_t{1} << (12 + (seed % 6));
    const mpgpu::plan plan = node.plan(mine.named(), handed_in, options);
    const mpgpu::plan fill = mine.copy(ctx, send_gpu, true);
    const mpgpu::plan clear = mine.copy(ctx, receive_gpu, true);
    const mpgpu::plan fetch = mine.copy(ctx, receive_gpu, false);
    const mpgpu::stream stream(ctx, gpu);
    const std::string where = "seed " + std::to_string(seed) + ", step ";
    for (std::size_t step = 0; step < steps; ++step) {
        for (std::size_t index = 0; index < all.transfers.size(); ++index) {
            const mpgpu::node_transfer &t = all.transfers[index];
            for (std::size_t i = 0; t.src.rank == rank && i < t.bytes; ++i) {
                mine.copies[t.src.window].data()[t.src.offset + i] = byte(index, i, step);
            }
        }
        for (std::uint32_t i = receive_gpu; i < window_count; ++i) {
            std::fill_n(mine.copies[i].data(), mine.copies[i].size(), untouched);
        }
        if (delays() % 3 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(delays() % 300));
        }
        fill.enqueue(stream);
        clear.enqueue(stream);
        plan.enqueue(stream);
        fetch.enqueue(stream);
        stream.synchronize();
        for (std::size_t index = 0; index < all.transfers.size(); ++index) {
            const mpgpu::node_transfer &t = all.transfers[index];
            for (std::size_t i = 0; t.dst.rank == rank && i < t.bytes; ++i) {
                unsigned char &found = mine.copies[t.dst.window].data()[t.dst.offset + i];
                require(found == byte(index, i, step), where + std::to_string(step) + ": byte " + std::to_string(i) +
                                                           " of transfer " + std::to_string(index) + " is wrong");
                found = untouched;
            }
        }
        for (std::uint32_t i = receive_gpu; i < window_count; ++i) {
            const unsigned char *first = mine.copies[i].data();
            require(std::all_of(first, first + mine.copies[i].size(), [](unsigned char c) { return c == untouched; }),
                    where + std::to_string(step) + ": bytes that nobody sends were written");
        }
    }
}

/// Moves a token of each rank around the ring, one rank further in each step. The host checks the tokens only in some
/// steps.
void ring(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::size_t steps) {
    constexpr std::size_t words = 24;
    const auto ranks = static_cast<std::size_t>(world_size);
    const auto rank = static_cast<std::size_t>(world_rank);
    mpgpu::buffer<std::uint64_t> sent(ctx, gpu, words);
    mpgpu::buffer<std::uint64_t> received(ctx, gpu, words);
    mpgpu::buffer<std::uint64_t> seen(ctx, mpgpu::device::host(), words);
    std::fill_n(seen.data(), words, rank);
    const mpgpu::stream stream(ctx, gpu);
    mpgpu::plan(ctx, {mpgpu::make_transfer(sent, seen)}).enqueue(stream);
    stream.synchronize();
    const auto next = static_cast<std::uint32_t>((rank + 1) % ranks);
    const mpgpu::plan pass =
        node.plan({mpgpu::make_window(sent), mpgpu::make_window(received)},
                  {{{next, 1, 0}, {static_cast<std::uint32_t>(rank), 0, 0}, words * sizeof(std::uint64_t)}});
    const mpgpu::plan back(ctx, {mpgpu::make_transfer(sent, received)});
    const mpgpu::plan look(ctx, {mpgpu::make_transfer(seen, received)});
    for (std::size_t step = 1; step <= steps; ++step) {
        pass.enqueue(stream);
        back.enqueue(stream);
        if (step % 97 == rank || step == steps) {
            look.enqueue(stream);
            stream.synchronize();
            const std::uint64_t expected = (rank + ranks - (step % ranks)) % ranks;
            require(std::all_of(seen.data(), seen.data() + words, [&](std::uint64_t w) { return w == expected; }),
                    "step " + std::to_string(step) + ": the token of rank " + std::to_string(seen.data()[0]) +
                        " is here in place of that of rank " + std::to_string(expected));
        }
    }
}

/// Tests that an error of one rank makes the call fail on all ranks, and that the next plan can be created.
void refusals(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu) {
    mpgpu::buffer<unsigned char> window(ctx, gpu, 4096);
    const auto rank = static_cast<std::uint32_t>(world_rank);
    const auto wrong = static_cast<std::uint32_t>(world_size - 1);
    const std::size_t bytes = rank == wrong ? 5000 : 100;
    const auto failure = ranks_test::failure_of([&] {
        static_cast<void>(node.plan({mpgpu::make_window(window)}, {{{rank, 0, 2000}, {rank, 0, 0}, bytes}}));
    });
    const auto expected = rank == wrong ? mpgpu::status::invalid_argument : mpgpu::status::rank_failed;
    require(failure == expected, "a window that is too small is refused on every rank");
    const mpgpu::plan plan = node.plan({mpgpu::make_window(window)}, {{{rank, 0, 2000}, {rank, 0, 0}, 100}});
    const mpgpu::stream stream(ctx, gpu);
    plan.enqueue(stream);
    stream.synchronize();
}

/// Tests a plan that contains only transfers of rank 0, between its host memory and its GPU. The other ranks contribute
/// the links of their GPUs.
void one_asks_and_all_take_part(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu) {
    constexpr std::size_t bytes = 8U << 20U;
    const bool asks = world_rank == 0;
    auto host = mpgpu::buffer<unsigned char>::shared(ctx, mpgpu::device::host(), asks ? 2 * bytes : 0);
    mpgpu::buffer<unsigned char> there(ctx, gpu, asks ? bytes : 0);
    const std::array<mpgpu::window, 2> windows{mpgpu::make_window(host), mpgpu::make_window(there)};
    const auto move = [&](const mpgpu::node_transfer &transfer) {
        return asks ? node.plan(windows, {transfer}) : node.plan(windows, {});
    };
    const mpgpu::plan load = move({{0, 1, 0}, {0, 0, 0}, bytes});
    const mpgpu::plan store = move({{0, 0, bytes}, {0, 1, 0}, bytes});
    const mpgpu::stream stream(ctx, gpu);
    for (std::size_t step = 0; step < 3; ++step) {
        for (std::size_t i = 0; asks && i < bytes; ++i) {
            host.data()[i] = byte(1, i, step);
        }
        load.enqueue(stream);
        store.enqueue(stream);
        stream.synchronize();
        require(!asks || std::equal(host.data(), host.data() + bytes, host.data() + bytes),
                "the bytes that one rank asked for");
    }
    // The topology of the host backend is known: the link of another GPU increases the bandwidth.
    const std::string text = load.describe();
    require(world_size == 1 || ctx.backend() != mpgpu::backend::host || text.find("via gpu1") != std::string::npos,
            "another rank's GPU takes part:\n" + text);
}

/// Tests a row of ranks, each of which knows only its own buffers. Each rank sends two messages with one tag to the
/// right, which match in order, and one message with another tag to the left. No message leaves the row at its ends.
void by_halves(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu) {
    constexpr std::size_t bytes = 70'001;
    const int right = world_rank + 1 < world_size ? world_rank + 1 : MPI_PROC_NULL;
    const int left = world_rank > 0 ? world_rank - 1 : MPI_PROC_NULL;
    mpgpu::buffer<unsigned char> sent(ctx, gpu, 3 * bytes);
    mpgpu::buffer<unsigned char> received(ctx, gpu, 3 * bytes);
    mpgpu::buffer<unsigned char> host(ctx, mpgpu::device::host(), 3 * bytes);
    const auto third = [&](auto &buffer, std::size_t i) {
        return mpgpu::device_span<unsigned char>(buffer).subspan(i * bytes, bytes);
    };
    const mpgpu::plan plan = node.plan_exchange({
        mpgpu::send_to(right, 5, third(sent, 0)),
        mpgpu::receive_from(right, 6, third(received, 2)),
        mpgpu::send_to(right, 5, third(sent, 1)),
        mpgpu::send_to(left, 6, third(sent, 2)),
        mpgpu::receive_from(left, 5, third(received, 0)),
        mpgpu::receive_from(left, 5, third(received, 1)),
    });
    const mpgpu::plan fill(ctx, {mpgpu::make_transfer(sent, host)});
    const mpgpu::plan reset(ctx, {mpgpu::make_transfer(received, host)});
    const mpgpu::plan look(ctx, {mpgpu::make_transfer(host, received)});
    const mpgpu::stream stream(ctx, gpu);
    const auto value = [](int rank, std::size_t i, std::size_t at) {
        return byte(static_cast<std::size_t>(rank) * 3 + i, at, 1);
    };
    const auto each = [&](auto &&what) {
        for (std::size_t i = 0; i < 3 * bytes; ++i) {
            what(host.data()[i], i / bytes, i % bytes);
        }
    };
    each([&](unsigned char &at, std::size_t, std::size_t) { at = untouched; });
    reset.enqueue(stream);
    stream.synchronize();
    each([&](unsigned char &at, std::size_t i, std::size_t offset) { at = value(world_rank, i, offset); });
    fill.enqueue(stream);
    plan.enqueue(stream);
    look.enqueue(stream);
    stream.synchronize();
    each([&](unsigned char at, std::size_t i, std::size_t offset) {
        const int from = i == 2 ? right : left;
        require(at == (from < 0 ? untouched : value(from, i, offset)), "the bytes of halves that have met");
    });
    // A descriptor without a match makes the call fail on all ranks.
    const int to = (world_rank + 1) % world_size;
    std::error_code ec;
    const mpgpu::plan none = node.plan_exchange({mpgpu::send_to(to, 9, sent)}, {}, ec);
    require(!none && ec, "a half that meets none is refused");
    require(mpgpu::last_error().message.find("with tag 9, but that rank has no matching receive in its transfers") !=
                std::string::npos,
            "the text says which");
}

void collectives(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu) {
    const auto ranks = static_cast<std::size_t>(world_size);
    const auto self = static_cast<std::size_t>(world_rank);
    const int root = world_size - 1;
    for (const std::size_t n : {std::size_t{70}, std::size_t{400'001}}) {
        using words = mpgpu::buffer<std::uint32_t>;
        words one(ctx, gpu, n);
        words many(ctx, gpu, ranks * n);
        words other(ctx, gpu, ranks * n);
        words host(ctx, mpgpu::device::host(), ranks * n);
        const mpgpu::stream stream(ctx, gpu);
        const auto value = [](std::size_t rank, std::size_t at) {
            return static_cast<std::uint32_t>(rank * 7919 + at);
        };
        const auto fill = [&](words &target, auto &&of) {
            for (std::size_t at = 0; at < target.size(); ++at) {
                host.data()[at] = of(at);
            }
            const auto part = mpgpu::device_span<std::uint32_t>(host).subspan(0, target.size());
            mpgpu::plan(ctx, {mpgpu::make_transfer(target, part)}).enqueue(stream);
            stream.synchronize();
        };
        const auto holds = [&](words &found, const std::string &what, auto &&of) {
            const auto part = mpgpu::device_span<std::uint32_t>(host).subspan(0, found.size());
            mpgpu::plan(ctx, {mpgpu::make_transfer(part, found)}).enqueue(stream);
            stream.synchronize();
            for (std::size_t at = 0; at < found.size(); ++at) {
                require(host.data()[at] == of(at), what + " of " + std::to_string(n) + ", word " + std::to_string(at));
            }
        };
        const auto run = [&](const std::vector<mpgpu::half_transfer> &halves) {
            const mpgpu::plan plan = node.plan_exchange(halves);
            plan.enqueue(stream);
            plan.enqueue(stream);
            stream.synchronize();
        };
        const auto own = [&](std::size_t at) { return value(self, at); };
        const auto of_all = [&](std::size_t at) { return value(at / n, at % n); };
        const auto nothing = [](std::size_t) { return 0U; };
        fill(one, own);
        run(mpgpu::broadcast(node, root, one));
        holds(one, "broadcast", [&](std::size_t at) { return value(ranks - 1, at); });
        fill(one, own);
        fill(many, nothing);
        run(mpgpu::all_gather(node, one, many));
        holds(many, "all-gather", of_all);
        fill(other, nothing);
        run(mpgpu::gather(node, root, one, other));
        if (world_rank == root) {
            holds(other, "gather", of_all);
        }
        fill(one, nothing);
        run(mpgpu::scatter(node, root, many, one));
        holds(one, "scatter", own);
        fill(many, [&](std::size_t at) { return value(self * ranks + at / n, at % n); });
        run(mpgpu::all_to_all(node, many, other));
        holds(other, "all-to-all", [&](std::size_t at) { return value(at / n * ranks + self, at % n); });
        // Each rank sends all of its elements to the next rank.
        std::vector<std::size_t> sent(ranks, 0);
        std::vector<std::size_t> received(ranks, 0);
        sent[(self + 1) % ranks] = n;
        received[(self + ranks - 1) % ranks] = n;
        words from(ctx, gpu, n);
        fill(from, own);
        run(mpgpu::all_to_all(node, from, one, sent, received));
        holds(one, "all-to-all of sizes", [&](std::size_t at) { return value((self + ranks - 1) % ranks, at); });
        if (ranks > 1) {
            // Rank 0 sends less than rank 1 receives.
            const std::size_t less = world_rank == 0 ? n - 1 : n;
            sent[(self + 1) % ranks] = less;
            const auto part = mpgpu::device_span<std::uint32_t>(from).subspan(0, less);
            std::error_code ec;
            const mpgpu::plan none = node.plan_exchange(mpgpu::all_to_all(node, part, one, sent, received), {}, ec);
            require(!none && ec, "sizes that differ are refused on all ranks");
        }
    }
}

void with_sight_of(bool all_gpus, std::size_t steps) {
    int gpus = 0;
    {
        const mpgpu::context ctx;
        gpus = ctx.devices().gpus;
    }
    const int mine = world_rank % gpus;
    if (!all_gpus) {
        setenv("MPGPU_HOST_VISIBLE_DEVICES", std::to_string(mine).c_str(), 1);
    }
    const mpgpu::context ctx;
    const bool alone = ctx.devices().gpus == 1;
    const mpgpu::device gpu = mpgpu::device::gpu(alone ? 0 : mine);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    // If several ranks have the same GPU, the first of them uses it in the plan. The launcher may have set the visible
    // GPU of a rank.
    const char *visible = std::getenv("CUDA_VISIBLE_DEVICES");
    std::array<char, 64> name{};
    std::snprintf(name.data(), name.size(), "%s/%d", visible != nullptr ? visible : "", mine);
    std::vector<std::array<char, 64>> names(static_cast<std::size_t>(world_size));
    MPI_Allgather(name.data(), static_cast<int>(name.size()), MPI_CHAR, names.data(), static_cast<int>(name.size()),
                  MPI_CHAR, MPI_COMM_WORLD);
    const bool is_first = std::find(names.begin(), names.end(), name) - names.begin() == world_rank;
    const std::vector<mpgpu::device> own{gpu};
    require(node.rank() == world_rank && node.devices() == (is_first ? own : std::vector<mpgpu::device>()),
            "who this is, and its GPU");
    std::string none;
    try {
        require(node.device() == gpu && is_first, "its GPU");
    } catch (const mpgpu::argument_error &error) {
        none = error.what();
    }
    require(is_first == none.empty() && (is_first || none.find("has no GPU") != std::string::npos), none);
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        random_steps(ctx, node, gpu, seed + (all_gpus ? 100 : 0), std::max<std::size_t>(steps / 100, 6));
    }
    ring(ctx, node, gpu, steps);
    one_asks_and_all_take_part(ctx, node, gpu);
    by_halves(ctx, node, gpu);
    collectives(ctx, node, gpu);
    refusals(ctx, node, gpu);
}

} // namespace

int main(int argc, char **argv) {
    return ranks_test::run_together(argc, argv, "ok", [&] {
        MPI_Comm_size(MPI_COMM_WORLD, &world_size);
        const std::size_t steps = argc > 1 ? std::stoull(argv[1]) : std::getenv("LONG_TESTS") != nullptr ? 10'000 : 200;
        with_sight_of(true, steps);
        with_sight_of(false, steps);
    });
}
