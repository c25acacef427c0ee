// SPDX-License-Identifier: MIT OR Apache-2.0
// Pipeline of three GPUs. The first GPU computes words and sends them to the second, which computes other words from
// them and sends those to the third. The kernel of the second GPU either processes each partition as soon as it has
// arrived, or starts when all partitions have arrived.
#include "forms.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>

namespace {

/// Locations of the data in the pipeline. With fewer than three GPUs, the output of a kernel is sent to host memory,
/// and the second kernel reads its input from there.
struct places {
    mpgpu::device first = mpgpu::device::gpu(0);
    mpgpu::device second; ///< device that receives the output of the first kernel
    int second_gpu;       ///< GPU on which the second kernel runs
    mpgpu::device third;  ///< device that receives the output of the second kernel
};

places places_of(const machine &m) {
    if (m.gpus == 1) {
        return {mpgpu::device::gpu(0), mpgpu::device::host(), 0, mpgpu::device::host()};
    }
    return {mpgpu::device::gpu(0), mpgpu::device::gpu(1), 1,
            m.gpus > 2 ? mpgpu::device::gpu(2) : mpgpu::device::host()};
}

/// Memory and settings that all forms of the pipeline use.
struct task {
    task(const machine &made_of, std::size_t count)
        : m(made_of), words(count), where(places_of(made_of)), source(m.ctx, where.first, count),
          input(m.ctx, where.second, count), result(m.ctx, mpgpu::device::gpu(where.second_gpu), count),
          output(m.ctx, where.third, count), seen(m.ctx, mpgpu::device::host(), count) {}
    const machine &m;
    std::size_t words;
    places where;
    mpgpu::buffer<word> source;
    mpgpu::buffer<word> input;
    mpgpu::buffer<word> result;
    mpgpu::buffer<word> output;
    mpgpu::buffer<word> seen;
    unsigned work = 64;
    word step = 0;

    /// Overwrites all received data, so that stale results of an earlier time step are detected.
    void poison() {
        std::fill_n(seen.data(), words, word{0});
        copy_now(m, input, seen);
        copy_now(m, output, seen);
    }

    /// Returns the number of received words that differ from the expected result of both kernels in the last time step.
    std::size_t wrong() {
        word scale = 1;
        word offset = 0;
        for (unsigned k = 0; k < 2 * work; ++k) {
            scale *= factor;
            offset = offset * factor + addend;
        }
        copy_now(m, seen, output);
        return count_wrong(words, [&](std::size_t i) { return seen.data()[i] != (i ^ step) * scale + offset; });
    }
};

/// Pipeline with all resources to run it in one form.
class piped {
  public:
    piped(task &t, const form &way, bool early)
        : name(way.name + (way.how != form::way::agent ? ""
                           : early                     ? "; processed on arrival"
                                                       : "; processed after all")),
          t_(t), early_(early), streams_{mpgpu::stream(t.m.ctx, t.where.first),
                                         mpgpu::stream(t.m.ctx, mpgpu::device::gpu(t.where.second_gpu))},
          begun_(t.m.ctx), sent_(t.m.ctx), consumed_(t.m.ctx),
          first_(t.m, way, {mpgpu::make_transfer(t.input, t.source)}, 0, early,
                 [this](const mpgpu::stream &stream, const outputs &out) { make(stream, out); }),
          second_(t.m, way, {mpgpu::make_transfer(t.output, t.result)}, 0, false,
                  [this](const mpgpu::stream &stream, const outputs &out) {
                      t_.m.code.consume(stream, t_.where.second_gpu, what_is_there(), out);
                  }),
          arrived_(t.m.ctx, mpgpu::device::gpu(t.where.second_gpu), 1) {
        mpgpu::buffer<std::uint64_t> zero(t.m.ctx, mpgpu::device::host(), 1);
        *zero.data() = 0;
        copy_now(t.m, arrived_, zero);
    }

    /// Runs `steps` time steps one after the other. Returns the mean time of one in seconds, from the start of the
    /// first kernel until all data has arrived.
    double seconds(int steps) {
        streams_[1].synchronize();
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < steps; ++i) {
            step();
        }
        streams_[0].synchronize();
        streams_[1].synchronize();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        return took.count() / steps;
    }

    std::string name;

  private:
    /// Enqueues the kernel of the first GPU.
    void make(const mpgpu::stream &stream, const outputs &out) const {
        t_.m.code.make(stream, t_.where.first.id(), {t_.source.data(), t_.words, t_.step, t_.work}, out);
    }

    /// Returns the argument for the second kernel if it does not wait for partitions.
    [[nodiscard]] consuming what_is_there() const {
        consuming second{};
        second.in = t_.input.data();
        second.out = t_.result.data();
        second.words = t_.words;
        second.work = t_.work;
        second.shares = t_.where.second_gpu == t_.where.first.id();
        return second;
    }

    void step() {
        t_.step += 0x9e3779b97f4a7c15ULL;
        const outputs &out = first_.out();
        consuming second = what_is_there();
        second.early = early_;
        second.in_trigger = out.to[0];
        second.arrived = arrived_.data();
        second.before = steps_++ * out.to[0].partitions;

        if (steps_ > 1) {
            streams_[0].wait(consumed_); // the next work overwrites the input and resets its arrival flags
        }
        first_.arm(streams_[0]);
        begun_.record(streams_[0]);
        make(streams_[0], out);
        first_.move(streams_[0], t_.where.first.id());
        sent_.record(streams_[0]);
        // A kernel that waits for arrivals must be enqueued after the work that causes the arrivals.
        streams_[1].wait(early_ ? begun_ : sent_);
        second_.arm(streams_[1]);
        t_.m.code.consume(streams_[1], t_.where.second_gpu, second, second_.out());
        second_.move(streams_[1], t_.where.second_gpu);
        consumed_.record(streams_[1]);
    }

    task &t_;
    bool early_;
    std::array<mpgpu::stream, 2> streams_; ///< streams of the first and the second kernel
    mpgpu::event begun_;                   ///< recorded when the first transfer is armed
    mpgpu::event sent_;                    ///< recorded after the first transfer
    mpgpu::event consumed_;                ///< recorded at the end of a time step
    mover first_;
    mover second_;
    mpgpu::buffer<std::uint64_t> arrived_;
    std::uint64_t steps_ = 0;
};

} // namespace

int pipeline(const machine &m, const options &opt) {
    const std::size_t mib = opt.mib > 0 ? opt.mib : m.is_virtual() ? 2 : 256;
    const int steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 3 : 10;
    task t(m, (mib << 20) / sizeof(word));
    // The amount of work is adjusted until a kernel takes as long as a plain copy.
    const auto time_of = [&](auto enqueue) {
        const mpgpu::stream stream(m.ctx, t.where.first);
        std::vector<double> times;
        for (int round = 0; round < 4; ++round) {
            const auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < steps; ++i) {
                enqueue(stream);
            }
            stream.synchronize();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
            if (round > 0) {
                times.push_back(took.count() / steps);
            }
        }
        return median(times);
    };
    const double copy =
        time_of([&](const mpgpu::stream &stream) { m.code.copy(stream, 0, mpgpu::make_transfer(t.input, t.source)); });
    for (int i = 0; i < 5; ++i) {
        const double kernel = time_of([&](const mpgpu::stream &stream) {
            m.code.make(stream, 0, {t.source.data(), t.words, 0, t.work}, {});
        });
        t.work = std::max(1U, static_cast<unsigned>(std::lround(t.work * copy / kernel)));
    }
    std::printf(
        "\npipeline, %zu MiB from GPU 0 to %s to %s; a plain copy takes %.1f us, and each kernel alone takes as long\n",
        mib, m.gpus > 1 ? "GPU 1" : "host memory and back to GPU 0 (the only GPU)",
        m.gpus > 2 ? "GPU 2" : "host memory", copy * 1e6);

    std::vector<std::unique_ptr<piped>> forms;
    std::vector<int> of_all; // for each form that works on arrival, index of the form that does not; -1 for the others
    for (const form &way : all_forms(opt)) {
        if (way.how == form::way::alone || way.how == form::way::told) {
            continue;
        }
        try {
            forms.push_back(std::make_unique<piped>(t, way, false));
            of_all.push_back(-1);
            if (way.how == form::way::agent) {
                forms.push_back(std::make_unique<piped>(t, way, true));
                of_all.push_back(static_cast<int>(forms.size()) - 2);
            }
        } catch (const mpgpu::not_supported &error) {
            std::printf("%-50s not supported: %s\n", way.name.c_str(), error.what());
        }
    }
    std::vector<std::vector<double>> times(forms.size());
    int wrong = 0;
    for (int round = 0; round <= opt.rounds; ++round) {
        for (std::size_t i = 0; i < forms.size(); ++i) {
            t.poison();
            const double took = forms[i]->seconds(steps);
            if (round > 0) {
                times[i].push_back(took);
            }
            const std::size_t bad = round == 0 || round == opt.rounds ? t.wrong() : 0;
            if (bad > 0) {
                std::printf("%s, round %d: %zu words are WRONG\n", forms[i]->name.c_str(), round, bad);
                ++wrong;
            }
        }
    }
    std::printf("%-50s %10s %21s  %9s %16s\n", m.is_virtual() ? "CPU threads, not GPUs" : "", "us/step",
                "minimum to maximum", "x copies", "x after all");
    for (std::size_t i = 0; i < forms.size(); ++i) {
        const auto [least, most] = std::minmax_element(times[i].begin(), times[i].end());
        const double took = median(times[i]);
        std::printf("%-50s %10.1f %10.1f %10.1f  %9.3f", forms[i]->name.c_str(), took * 1e6, *least * 1e6, *most * 1e6,
                    median(times[0]) / took);
        if (of_all[i] >= 0) {
            std::printf(" %16.3f", median(times[static_cast<std::size_t>(of_all[i])]) / took);
        }
        std::printf("\n");
    }
    std::printf("%s\n", wrong == 0 ? "all results are right" : "RESULTS ARE WRONG");
    return wrong;
}
