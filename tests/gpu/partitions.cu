// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures a kernel that computes for as long as its result takes to move (PROACT's microbenchmark). The result is
// moved after the kernel, or during the kernel by copy engines or by the kernel itself. It is moved from GPU 0 to GPU
// 1, or to host memory if there is only one GPU. Every byte of every form is checked. Prints medians of the rounds.
//   partitions [MiB, 256] [rounds, 15] [blocks of the kernel, one for each 8 KiB]
#include <mpgpu/mpgpu.hpp>
#include <mpgpu/trigger.cuh>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using word = unsigned long long;

constexpr unsigned threads = 256;
constexpr word factor = 6364136223846793005ULL;
constexpr word addend = 1442695040888963407ULL;

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}

/// Contiguous words that a block computes. Blocks that start first compute the first words.
struct share {
    std::size_t first;
    std::size_t end;
};
__device__ share share_of(std::size_t words) {
    const std::size_t each = (words + gridDim.x - 1) / gridDim.x;
    const std::size_t first = blockIdx.x * each;
    return {first < words ? first : words, first + each < words ? first + each : words};
}

/// One kernel for all forms, with an argument that determines whether it marks ready partitions. nvcc 13.0 generates
/// different code for a function in two kernels, even if it is not inlined: the loop had 10 integer multiplications in
/// one kernel and 12 in the other.
__global__ void __launch_bounds__(threads)
    produce(word *source, std::size_t words, word step, unsigned work, mpgpu::trigger ready, bool is_told) {
    word *const out = is_told ? static_cast<word *>(ready.destination()) : source;
    const share mine = share_of(words);
    for (std::size_t i = mine.first + threadIdx.x; i < mine.end; i += threads) {
        word value = i ^ step;
        for (unsigned k = 0; k < work; ++k) {
            value = value * factor + addend;
        }
        out[i] = value;
    }
    if (is_told) {
        ready.ready_range(mine.first * sizeof(word), (mine.end - mine.first) * sizeof(word));
    }
}

/// Returns the number of words that differ from the kernel's result for `step`.
std::size_t wrong(const word *found, std::size_t words, word step, unsigned work) {
    word scale = 1;
    word offset = 0;
    for (unsigned k = 0; k < work; ++k) {
        scale *= factor;
        offset = offset * factor + addend;
    }
    std::size_t count = 0;
    for (std::size_t i = 0; i < words; ++i) {
        count += found[i] != (i ^ step) * scale + offset ? 1 : 0;
    }
    return count;
}

/// Gives GPU `by` access to the memory of GPU `peer`, unless it already has access.
void let_in(int by, int peer) {
    check(cudaSetDevice(by), "cudaSetDevice");
    const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled) {
        static_cast<void>(cudaGetLastError());
        return;
    }
    check(code, "cudaDeviceEnablePeerAccess");
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

struct timing {
    double all;    ///< seconds until everything has been moved
    double kernel; ///< seconds of the kernel only
};

class benchmark {
  public:
    benchmark(std::size_t bytes, int rounds, unsigned blocks)
        : bytes_(bytes), words_(bytes / sizeof(word)), rounds_(rounds), blocks_(blocks), from_(mpgpu::device::gpu(0)),
          to_(ctx_.devices().gpus > 1 ? mpgpu::device::gpu(1) : mpgpu::device::host()), node_(ctx_),
          source_(ctx_, from_, words_), destination_(ctx_, to_, words_),
          looked_at_(ctx_, mpgpu::device::host(), words_), stream_(ctx_, from_),
          raw_(reinterpret_cast<cudaStream_t>(stream_.get())) {
        if (to_.id() > 0) {
            // Without this access the reference copies would go through host memory.
            let_in(1, 0);
            let_in(0, 1);
        }
        check(cudaSetDevice(0), "cudaSetDevice");
        for (cudaEvent_t &event : events_) {
            check(cudaEventCreate(&event), "cudaEventCreate");
        }
    }
    benchmark(const benchmark &) = delete;
    benchmark(benchmark &&) = delete;
    benchmark &operator=(const benchmark &) = delete;
    benchmark &operator=(benchmark &&) = delete;
    ~benchmark() {
        for (cudaEvent_t event : events_) {
            cudaEventDestroy(event);
        }
    }

    void run() {
        std::printf("%zu MiB, gpu0 to %s, by a kernel of %u blocks\n", bytes_ >> 20,
                    to_.id() < 0 ? "host memory" : "gpu1", blocks_);
        const auto copy = [&] {
            check(cudaMemcpyAsync(destination_.data(), source_.data(), bytes_, cudaMemcpyDefault, raw_),
                  "cudaMemcpyAsync");
        };
        const double alone = measure([&](word) {}, copy, false).all;
        // The loop adjusts the work of the kernel until it takes as long as the copy.
        for (int i = 0; i < 6; ++i) {
            const double kernel = kernel_alone().all;
            work_ = std::max(1U, static_cast<unsigned>(work_ * alone / kernel + 0.5));
        }
        const double limit = kernel_alone().all;
        std::printf("copy alone %.1f us (%.1f GB/s), kernel alone %.1f us (%u operations of each word)\n", alone * 1e6,
                    static_cast<double>(bytes_) / alone * 1e-9, limit * 1e6, work_);
        const timing bulk = measure([&](word step) { launch(step); }, copy);
        report("plain copy after it", bulk, bulk.all, limit);
        const mpgpu::node_transfer transfer{{0, 1, 0}, {0, 0, 0}, bytes_};
        const std::vector<mpgpu::window> windows{mpgpu::make_window(source_), mpgpu::make_window(destination_)};
        const mpgpu::plan whole(
            ctx_, {mpgpu::make_transfer(mpgpu::device_span<word>(destination_), mpgpu::device_span<word>(source_))});
        report("plan after it", measure([&](word step) { launch(step); }, [&] { whole.enqueue(stream_); }), bulk.all,
               limit);
        for (const std::uint32_t count : {0U, 8U, 16U, 24U, 32U, 64U}) {
            const mpgpu::partitioning how{count, mpgpu::agent::copy_engine, count != 32};
            const mpgpu::plan plan = node_.plan(windows, {transfer}, how);
            const mp_trigger_t made = plan.trigger(0, 0);
            const std::string name = "copy engines, " + std::to_string(made.partitions) + " partitions" +
                                     (count == 0 ? " (model)" : "") + (how.arrivals ? "" : ", untold");
            report(name, step_of(plan, made), bulk.all, limit);
            if (count == 16) {
                report(name + ", captured", captured(plan, made), bulk.all, limit);
                std::printf("%s", plan.describe().c_str());
            }
        }
        tuned(windows, transfer, bulk.all, limit);
        {
            // This measures the cost of the trigger in the kernel, while no data moves.
            const mpgpu::plan plan = node_.plan(windows, {transfer}, {16, mpgpu::agent::copy_engine});
            const mp_trigger_t made = plan.trigger(0, 0);
            const auto begin = [&](word step) { launch_armed(plan, made, step); };
            const auto end = [&] {
                stream_.synchronize();
                plan.enqueue(stream_);
            };
            report("triggers, and moved after it", measure(begin, end), bulk.all, limit);
        }
        const mpgpu::plan stored = node_.plan(windows, {transfer}, {16, mpgpu::agent::producer});
        const mp_trigger_t made = stored.trigger(0, 0);
        report("stored by the kernel, 16 partitions", step_of(stored, made), bulk.all, limit);
        std::printf("%s\n", failures_ == 0 ? "every byte of every form was right" : "BYTES WERE WRONG");
        if (failures_ != 0) {
            throw std::runtime_error("bytes were wrong");
        }
    }

  private:
    /// Measures the plan that tuning finds, and the plan that is chosen without tuning.
    void tuned(const std::vector<mpgpu::window> &windows, const mpgpu::node_transfer &transfer, double bulk,
               double limit) {
        const auto produce_in = [&](mpgpu::array_view<const mp_trigger_t> sent, mpgpu::stream_view stream) {
            produce<<<blocks_, threads, 0, reinterpret_cast<cudaStream_t>(stream.get())>>>(
                source_.data(), words_, word{1}, work_, mpgpu::trigger(sent[0]), true);
        };
        const auto begin = std::chrono::steady_clock::now();
        const mpgpu::partitioning best = node_.tune_partitions(windows, {transfer}, produce_in);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::printf("tuning took %.2f s\n", took.count());
        const mpgpu::partitioning untold{0, mpgpu::agent::automatic, false};
        const mpgpu::partitioning stores{0, mpgpu::agent::automatic, false, true};
        for (const mpgpu::partitioning &how : {best, mpgpu::partitioning{}, untold, stores}) {
            const mpgpu::plan plan = node_.plan(windows, {transfer}, how);
            const std::string description = plan.describe();
            const std::size_t line = description.rfind("transfer 0 of rank 0: ");
            const std::string name = description.substr(line + 22, description.find('\n', line) - line - 22);
            // Steps without a trigger have chosen their method after this number of steps.
            for (int i = 0; !how.arrivals && i < 400; ++i) {
                launch_armed(plan, plan.trigger(0, 0), word{1});
                plan.enqueue(stream_);
                stream_.synchronize();
            }
            report((how.mover != mpgpu::agent::automatic ? "tuned: "
                    : how.arrivals                       ? "automatic: "
                    : how.stores                         ? "automatic, untold, or stored: "
                                                         : "automatic, untold: ") +
                       name,
                   step_of(plan, plan.trigger(0, 0)), bulk, limit);
        }
    }

    timing step_of(const mpgpu::plan &plan, const mp_trigger_t &made) {
        return measure([&](word step) { launch_armed(plan, made, step); }, [&] { plan.enqueue(stream_); });
    }

    void launch(word step) {
        check(cudaEventRecord(events_[2], raw_), "cudaEventRecord");
        produce<<<blocks_, threads, 0, raw_>>>(source_.data(), words_, step, work_, mpgpu::trigger(mp_trigger_t{}),
                                               false);
        check(cudaEventRecord(events_[3], raw_), "cudaEventRecord");
    }

    /// Starts a step and launches the kernel that makes its partitions ready.
    void launch_armed(const mpgpu::plan &plan, const mp_trigger_t &made, word step) {
        plan.arm(stream_);
        check(cudaEventRecord(events_[2], raw_), "cudaEventRecord");
        produce<<<blocks_, threads, 0, raw_>>>(source_.data(), words_, step, work_, mpgpu::trigger(made), true);
        check(cudaEventRecord(events_[3], raw_), "cudaEventRecord");
    }

    timing kernel_alone() {
        return measure([&](word step) { launch(step); }, [] {}, false);
    }

    timing measure(const std::function<void(word)> &begin, const std::function<void()> &end, bool moves = true) {
        std::vector<double> all;
        std::vector<double> kernel;
        for (int round = 0; round <= rounds_; ++round) {
            const word step = ++step_ * 0x9e3779b97f4a7c15ULL;
            if (moves && (round == 0 || round == rounds_)) {
                std::fill_n(looked_at_.data(), words_, word{0});
                check(cudaMemcpy(destination_.data(), looked_at_.data(), bytes_, cudaMemcpyDefault), "cudaMemcpy");
            }
            check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            check(cudaEventRecord(events_[0], raw_), "cudaEventRecord");
            begin(step);
            end();
            check(cudaEventRecord(events_[1], raw_), "cudaEventRecord");
            stream_.synchronize();
            float elapsed = 0;
            check(cudaEventElapsedTime(&elapsed, events_[0], events_[1]), "cudaEventElapsedTime");
            if (round > 0) {
                all.push_back(elapsed * 1e-3);
                if (cudaEventElapsedTime(&elapsed, events_[2], events_[3]) == cudaSuccess) {
                    kernel.push_back(elapsed * 1e-3);
                } else {
                    cudaGetLastError();
                    kernel.push_back(0);
                }
            }
            if (moves && (round == 0 || round == rounds_)) {
                look(step);
            }
        }
        return {median(all), median(kernel)};
    }

    /// Measures a step in a graph that is launched repeatedly.
    timing captured(const mpgpu::plan &plan, const mp_trigger_t &made) {
        check(cudaStreamBeginCapture(raw_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        const word step = 77;
        plan.arm(stream_);
        produce<<<blocks_, threads, 0, raw_>>>(source_.data(), words_, step, work_, mpgpu::trigger(made), true);
        plan.enqueue(stream_);
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(raw_, &graph), "cudaStreamEndCapture");
        cudaGraphExec_t exec = nullptr;
        check(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagUseNodePriority), "cudaGraphInstantiate");
        std::fill_n(looked_at_.data(), words_, word{0});
        check(cudaMemcpy(destination_.data(), looked_at_.data(), bytes_, cudaMemcpyDefault), "cudaMemcpy");
        std::vector<double> all;
        for (int round = 0; round <= 10 * rounds_; ++round) {
            check(cudaEventRecord(events_[0], raw_), "cudaEventRecord");
            check(cudaGraphLaunch(exec, raw_), "cudaGraphLaunch");
            check(cudaEventRecord(events_[1], raw_), "cudaEventRecord");
            stream_.synchronize();
            float elapsed = 0;
            check(cudaEventElapsedTime(&elapsed, events_[0], events_[1]), "cudaEventElapsedTime");
            all.push_back(elapsed * 1e-3);
        }
        look(step);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        return {median(all), 0};
    }

    void look(word step) {
        check(cudaMemcpy(looked_at_.data(), destination_.data(), bytes_, cudaMemcpyDefault), "cudaMemcpy");
        const std::size_t bad = wrong(looked_at_.data(), words_, step, work_);
        if (bad != 0) {
            ++failures_;
            std::printf("%zu words are wrong\n", bad);
        }
    }

    static void report(const std::string &what, timing took, double bulk, double limit) {
        std::printf("%-56s %8.1f us  %5.3f of bulk  %5.3f of the limit", what.c_str(), took.all * 1e6, bulk / took.all,
                    limit / took.all);
        std::printf(took.kernel > 0 ? "  kernel %+.1f %%\n" : "\n", (took.kernel / limit - 1) * 100);
        std::fflush(stdout);
    }

    std::size_t bytes_;
    std::size_t words_;
    int rounds_;
    unsigned blocks_;
    mpgpu::context ctx_;
    mpgpu::device from_;
    mpgpu::device to_;
    mpgpu::node node_;
    mpgpu::buffer<word> source_;
    mpgpu::buffer<word> destination_;
    mpgpu::buffer<word> looked_at_;
    mpgpu::stream stream_;
    cudaStream_t raw_;
    cudaEvent_t events_[4]{};
    unsigned work_ = 64;
    word step_ = 0;
    int failures_ = 0;
};

} // namespace

int main(int count, char **arguments) {
    try {
        const std::size_t mebibytes = count > 1 ? std::stoul(arguments[1]) : 256;
        const int rounds = count > 2 ? std::stoi(arguments[2]) : 15;
        const unsigned long blocks = count > 3 ? std::stoul(arguments[3]) : mebibytes * 128;
        benchmark(mebibytes << 20, rounds, static_cast<unsigned>(blocks)).run();
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "partitions: %s\n", error.what());
        return 1;
    }
}
