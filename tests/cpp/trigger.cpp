// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the CPU form of mpgpu/trigger.cuh, in which each CPU thread represents a block of one thread. The tests cover
// every mapping from blocks to partitions, in random order, with consumers that check each partition as soon as it has
// arrived.
#include <doctest/doctest.h>

#include <mpgpu/mpgpu.hpp>
#include <mpgpu/trigger.cuh>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

uint8_t value(uint64_t offset, uint64_t step) {
    return static_cast<uint8_t>(offset * 29 ^ offset >> 8 ^ step * 113);
}

/// Transfer of one process from device 0 to device 1.
class transfer {
  public:
    transfer(size_t bytes, uint32_t partitions, mpgpu::agent mover)
        : node_(ctx_), source_(ctx_, mpgpu::device::gpu(0), bytes), destination_(ctx_, mpgpu::device::gpu(1), bytes),
          plan_(node_.plan({mpgpu::make_window(source_), mpgpu::make_window(destination_)},
                           {{{0, 1, 0}, {0, 0, 0}, bytes}}, {partitions, mover})),
          stream_(ctx_, mpgpu::device::gpu(0)), mover_(mover) {}

    /// Runs one step: `blocks` threads call `produce(block)` in random order.
    template <class Produce> void step(uint64_t number, uint32_t blocks, std::mt19937_64 &random, Produce produce) {
        const mpgpu::trigger in = trigger();
        plan_.arm(stream_);
        stream_.synchronize();
        std::vector<uint32_t> order(blocks);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        std::atomic<size_t> next{0};
        std::vector<std::thread> producers;
        producers.reserve(3);
        for (int i = 0; i < 3; ++i) {
            producers.emplace_back([&] {
                for (size_t at = next++; at < order.size(); at = next++) {
                    produce(order[at]);
                }
            });
        }
        std::atomic<size_t> wrong{0};
        std::thread consumer([&] {
            std::vector<uint32_t> left(in.partitions());
            std::iota(left.begin(), left.end(), 0U);
            while (!left.empty()) {
                const auto arrived =
                    std::partition(left.begin(), left.end(), [&](uint32_t p) { return !in.arrived(p); });
                for (auto it = arrived; it != left.end(); ++it) {
                    for (uint64_t at = in.begin(*it); at < in.end(*it); ++at) {
                        wrong += destination_.data()[at] != value(at, number) ? 1 : 0;
                    }
                }
                left.erase(arrived, left.end());
                std::this_thread::yield();
            }
        });
        const auto join = [&] {
            for (std::thread &producer : producers) {
                producer.join();
            }
        };
        if (mover_ == mpgpu::agent::producer) {
            join();
            plan_.enqueue(stream_);
        } else {
            plan_.enqueue(stream_);
            join();
        }
        plan_.synchronize(60);
        consumer.join();
        CHECK(wrong == 0);
        uint64_t at = 0;
        CHECK(std::all_of(destination_.data(), destination_.data() + destination_.size(),
                          [&](uint8_t found) { return found == value(at++, number); }));
        std::fill(destination_.data(), destination_.data() + destination_.size(), uint8_t{0xee});
    }

    [[nodiscard]] mpgpu::trigger trigger() const { return mpgpu::trigger(plan_.trigger(0, 0)); }
    [[nodiscard]] uint8_t *data() const { return static_cast<uint8_t *>(trigger().destination()); }
    [[nodiscard]] const mpgpu::plan &plan() const { return plan_; }
    [[nodiscard]] const mpgpu::stream &stream() const { return stream_; }
    void write(uint64_t first, uint64_t bytes, uint64_t step) const {
        for (uint64_t at = first; at < first + bytes; ++at) {
            data()[at] = value(at, step);
        }
    }

  private:
    mpgpu::context ctx_;
    mpgpu::node node_;
    mpgpu::buffer<uint8_t> source_;
    mpgpu::buffer<uint8_t> destination_;
    mpgpu::plan plan_;
    mpgpu::stream stream_;
    mpgpu::agent mover_;
};

const std::vector<mpgpu::agent> movers{mpgpu::agent::copy_engine, mpgpu::agent::producer};

} // namespace

TEST_CASE("blocks that count themselves") {
    std::mt19937_64 random(1);
    for (const mpgpu::agent mover : movers) {
        transfer moved(100'000, 7, mover);
        const mpgpu::trigger out = moved.trigger();
        REQUIRE(out.partitions() == 7);
        for (uint64_t step = 1; step <= 20; ++step) {
            const auto each = static_cast<uint32_t>(1 + random() % 5); // blocks per partition
            moved.step(step, 7 * each, random, [&](uint32_t block) {
                const uint32_t partition = block / each;
                const uint64_t part = (out.end(partition) - out.begin(partition) + each - 1) / each;
                const uint64_t begin = std::min(out.begin(partition) + block % each * part, out.end(partition));
                moved.write(begin, std::min(part, out.end(partition) - begin), step);
                out.ready(partition, each);
            });
        }
    }
}

TEST_CASE("contiguous and strided blocks of any size, whatever partitions they touch") {
    std::mt19937_64 random(2);
    for (const mpgpu::agent mover : movers) {
        for (const size_t bytes : {size_t{1}, size_t{4097}, size_t{250'001}, size_t{1} << 21}) {
            transfer moved(bytes, static_cast<uint32_t>(1 + random() % 13), mover);
            const mpgpu::trigger out = moved.trigger();
            for (uint64_t step = 1; step <= 4; ++step) {
                const uint64_t piece = 1 + random() % (bytes / 3 + 1);
                const auto pieces = static_cast<uint32_t>((bytes + piece - 1) / piece);
                const uint32_t blocks = 1 + static_cast<uint32_t>(random() % 9);
                moved.step(step, blocks, random, [&](uint32_t block) {
                    for (uint32_t i = block; i < pieces; i += blocks) {
                        const uint64_t first = i * piece;
                        const uint64_t size = std::min<uint64_t>(piece, bytes - first);
                        moved.write(first, size, step);
                        out.ready_range(first, size);
                    }
                });
            }
        }
    }
}

TEST_CASE("blocks of a stencil that write parts of a face's rows") {
    std::mt19937_64 random(3);
    for (const mpgpu::agent mover : movers) {
        constexpr uint64_t row = 600;
        constexpr uint64_t rows = 400;
        transfer moved(row * rows, 9, mover);
        const mpgpu::trigger out = moved.trigger();
        for (uint64_t step = 1; step <= 6; ++step) {
            constexpr uint32_t across = 3;
            constexpr uint32_t down = 8;
            moved.step(step, across * down, random, [&](uint32_t block) {
                const uint64_t left = block % across * (row / across);
                const uint64_t top = block / across * (rows / down);
                for (uint64_t y = top; y < top + rows / down; ++y) {
                    moved.write(y * row + left, row / across, step);
                }
                out.ready_rows(top * row + left, row / across, rows / down, row);
            });
        }
    }
}

TEST_CASE("blocks write where their triggers point, and count once for all destinations") {
    const mpgpu::context ctx;
    const mpgpu::node node(ctx);
    constexpr size_t bytes = 100'000;
    mpgpu::buffer<uint8_t> from(ctx, mpgpu::device::gpu(0), bytes);
    mpgpu::buffer<uint8_t> to(ctx, mpgpu::device::gpu(1), bytes);
    mpgpu::buffer<uint8_t> also_to(ctx, mpgpu::device::gpu(2), bytes);
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    for (const mpgpu::partitioning &how :
         {mpgpu::partitioning{9, mpgpu::agent::copy_engine}, mpgpu::partitioning{9, mpgpu::agent::producer},
          mpgpu::partitioning{9, mpgpu::agent::automatic, false, true}}) {
        const mpgpu::plan plan =
            node.plan({mpgpu::make_window(from), mpgpu::make_window(to), mpgpu::make_window(also_to)},
                      {{{0, 1, 0}, {0, 0, 0}, bytes}, {{0, 2, 0}, {0, 0, 0}, bytes}}, how);
        const std::array<mpgpu::trigger, 2> out{mpgpu::trigger(plan.trigger(0, 0)), mpgpu::trigger(plan.trigger(0, 1))};
        bool is_stored = false;
        bool is_moved = false;
        for (uint64_t step = 1; step <= 60; ++step) {
            plan.arm(stream);
            ctx.launch_host(stream, [&] {
                (out[0].destination() == from.data() ? is_moved : is_stored) = true;
                constexpr uint64_t piece = 777; // bytes per block
                for (uint64_t first = 0; first < bytes; first += piece) {
                    const uint64_t end = std::min<uint64_t>(first + piece, bytes);
                    for (const mpgpu::trigger &each : out) {
                        for (uint64_t at = first; at < end; ++at) {
                            static_cast<uint8_t *>(each.destination())[at] = value(at, step);
                        }
                    }
                    mpgpu::trigger::ready_range(out.data(), 2, first, end - first);
                }
            });
            plan.enqueue(stream);
            plan.synchronize(60);
            for (mpgpu::buffer<uint8_t> *received : {&to, &also_to}) {
                uint64_t at = 0;
                CHECK(std::all_of(received->data(), received->data() + bytes,
                                  [&](uint8_t found) { return found == value(at++, step); }));
                std::fill_n(received->data(), bytes, uint8_t{0xee});
            }
        }
        CHECK(is_moved == (how.mover != mpgpu::agent::producer));
        CHECK(is_stored == (how.mover != mpgpu::agent::copy_engine));
    }
}

TEST_CASE("a consumer waits for a partition") {
    std::mt19937_64 random(4);
    transfer moved(64'000, 4, mpgpu::agent::copy_engine);
    const mpgpu::trigger both = moved.trigger();
    std::thread waiting;
    moved.step(1, 4, random, [&](uint32_t block) {
        moved.write(both.begin(block), both.end(block) - both.begin(block), 1);
        both.ready(block);
    });
    both.wait(3); // the flags stay raised until the next step
    CHECK(both.arrived(0));
    moved.plan().arm(moved.stream());
    moved.stream().synchronize();
    CHECK(!both.arrived(0));
    waiting = std::thread([&] { both.wait(2); });
    for (uint32_t partition = 0; partition < 4; ++partition) {
        both.ready(partition);
    }
    moved.plan().enqueue(moved.stream());
    waiting.join();
    moved.plan().synchronize(60);
}

TEST_CASE("a receiver asks which of its messages has arrived") {
    const mpgpu::context ctx;
    const mpgpu::node node(ctx);
    mpgpu::buffer<uint8_t> from(ctx, mpgpu::device::gpu(0), 2000);
    mpgpu::buffer<uint8_t> to(ctx, mpgpu::device::gpu(1), 2000);
    const auto half = [](auto &buffer, std::size_t i) {
        return mpgpu::device_span<uint8_t>(buffer).subspan(i * 1000, 1000);
    };
    const mpgpu::plan plan =
        node.plan_exchange({mpgpu::send_to(0, 1, half(from, 0)), mpgpu::send_to(0, 2, half(from, 1)),
                            mpgpu::receive_from(0, 2, half(to, 1)), mpgpu::receive_from(0, 1, half(to, 0))},
                           mpgpu::partitioning{1});
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    const mpgpu::trigger second(plan.trigger(0, 2));
    const mpgpu::trigger first(plan.trigger(0, 3));
    for (uint8_t step = 1; step < 4; ++step) {
        plan.arm(stream);
        stream.synchronize();
        std::fill_n(from.data(), 2000, step);
        // The step does not end while a partition is missing.
        std::thread producer([&] {
            mpgpu::trigger(plan.trigger(0, 1)).ready(0);
            while (!second.arrived(0)) {
                std::this_thread::yield();
            }
            CHECK(!first.arrived(0));
            CHECK(std::count(to.data() + 1000, to.data() + 2000, step) == 1000);
            mpgpu::trigger(plan.trigger(0, 0)).ready(0);
        });
        plan.enqueue(stream);
        producer.join();
        plan.synchronize(60);
        CHECK(first.arrived(0));
        CHECK(std::count(to.data(), to.data() + 1000, step) == 1000);
    }
}

TEST_CASE("a plan that does not tell of arrivals never says that one has come") {
    const mpgpu::context ctx;
    const mpgpu::node node(ctx);
    mpgpu::buffer<uint8_t> from(ctx, mpgpu::device::gpu(0), 1000);
    mpgpu::buffer<uint8_t> to(ctx, mpgpu::device::gpu(1), 1000);
    const mpgpu::plan plan = node.plan({mpgpu::make_window(from), mpgpu::make_window(to)},
                                       {{{0, 1, 0}, {0, 0, 0}, 1000}}, {2, mpgpu::agent::copy_engine, false});
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    const mpgpu::trigger both(plan.trigger(0, 0));
    plan.arm(stream);
    stream.synchronize();
    both.ready(0);
    both.ready(1);
    plan.enqueue(stream);
    plan.synchronize(60);
    CHECK(!both.arrived(0));
}

TEST_CASE("a program finds the best partitioning for its kernel by trying") {
    constexpr size_t bytes = 200'000;
    const mpgpu::context ctx;
    const mpgpu::node node(ctx);
    mpgpu::buffer<uint8_t> from(ctx, mpgpu::device::gpu(0), bytes);
    mpgpu::buffer<uint8_t> to(ctx, mpgpu::device::gpu(1), bytes);
    const std::vector<mpgpu::window> windows{mpgpu::make_window(from), mpgpu::make_window(to)};
    const std::vector<mpgpu::node_transfer> transfers{{{0, 1, 0}, {0, 0, 0}, bytes}};
    mpgpu::partition_tuning trials;
    trials.agents.push_back(mpgpu::agent::producer);
    trials.rounds = 2;
    int launches = 0;
    const auto produce = [&](mpgpu::array_view<const mp_trigger_t> triggers, mpgpu::stream_view stream) {
        REQUIRE(triggers.size() == 1);
        ++launches;
        const mpgpu::trigger out(triggers[0]);
        ctx.launch_host(stream, [out] {
            for (uint64_t at = 0; at < out.bytes(); ++at) {
                static_cast<uint8_t *>(out.destination())[at] = value(at, 5);
            }
            out.ready_range(0, out.bytes());
        });
    };
    const mpgpu::partitioning best = node.tune_partitions(windows, transfers, produce, trials);
    CHECK(launches > 10);
    CHECK(best.count > 0);
    CHECK(best.mover != mpgpu::agent::automatic);
    uint64_t at = 0;
    CHECK(std::all_of(to.data(), to.data() + bytes, [&](uint8_t found) { return found == value(at++, 5); }));
    const auto fails = [](mpgpu::array_view<const mp_trigger_t>, mpgpu::stream_view) {
        throw std::runtime_error("the program's own");
    };
    CHECK_THROWS_WITH_AS((void)node.tune_partitions(windows, transfers, fails), "the program's own",
                         std::runtime_error);
    trials.agents.clear();
    trials.agents.push_back(mpgpu::agent::automatic);
    CHECK_THROWS_AS((void)node.tune_partitions(windows, transfers, produce, trials), mpgpu::argument_error);
    trials.agents.push_back(mpgpu::agent::producer);
    trials.arrivals = false;
    launches = 0;
    const mpgpu::partitioning chosen = node.tune_partitions(windows, transfers, produce, trials);
    CHECK(launches > 50);
    CHECK(chosen.stores == (chosen.mover == mpgpu::agent::automatic));
}

TEST_CASE("what is missing is named") {
    for (const mpgpu::agent mover : {mpgpu::agent::copy_engine, mpgpu::agent::automatic}) {
        transfer moved(1000, 10, mover);
        const mpgpu::trigger out = moved.trigger();
        moved.plan().arm(moved.stream());
        moved.stream().synchronize();
        for (uint32_t partition = 0; partition < 9; ++partition) {
            out.ready(partition);
        }
        moved.plan().enqueue(moved.stream());
        try {
            moved.plan().synchronize(0.05);
            FAIL("one partition is missing");
        } catch (const mpgpu::timeout &error) {
            CHECK(std::string(error.what()).find("partition 9 of transfer 0 of rank 0") != std::string::npos);
        }
        out.ready(9);
        moved.plan().synchronize(60);
        std::error_code code;
        moved.plan().enqueue(moved.stream(), code);
        CHECK(code == mpgpu::status::invalid_argument);
    }
}
