// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two-dimensional Jacobi relaxation on the devices of one node, in one process. The problem, the flags and the output
// are those of NVIDIA's multi-gpu-programming-models, with the halo exchange by mpgpu.
//
// The ny rows are divided among the devices. Each device keeps its rows between two halo rows, and an iteration is
//
//     every device:  sweep a -> a_new              in the device's own stream
//     exchange:      both halo rows of a_new       one plan for all devices, in a stream that waits for every sweep
//     every device:  waits for its halo rows, and a and a_new are swapped
//
// With -plain the problem is also solved with plain copies and events instead of the plan, for comparison. In both
// cases streams and events order all work, and the host waits only when it checks convergence.
//
// The domain is periodic in y and has fixed values at both ends of x. All memory is set and read by transfers from and
// to host memory, so nothing here assumes that the CPU can reach a device's memory.
#include "exchange.hpp"
#include "options.hpp"
#include "sweep.hpp"

#include <mpgpu/mpgpu.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr double tolerance = 1.0e-8; // of the norm, as in the samples
constexpr int turns = 5;             // solutions by each method with -plain; the methods alternate

/// Part of the domain that one device computes.
struct part {
    part(const mpgpu::context &ctx, int index, int nx, int first_row, int row_count)
        : first(first_row), rows(row_count), width(static_cast<std::size_t>(nx)),
          stream(ctx, mpgpu::device::gpu(index)), swept(ctx), a{{block(ctx, index), block(ctx, index)}},
          row_norm(ctx, mpgpu::device::gpu(index), static_cast<std::size_t>(row_count)) {}

    int first; // first row of the domain that is computed here
    int rows;  // rows that are computed here; the blocks have one more at either end
    std::size_t width;
    mpgpu::stream stream;
    mpgpu::event swept;
    std::array<mpgpu::buffer<float>, 2> a; // a and a_new, alternating
    mpgpu::buffer<double> row_norm;

    /// Returns one row of a block. Row 0 is the upper halo row.
    [[nodiscard]] mpgpu::device_span<float> row(std::size_t parity, int index) {
        return a.at(parity).subspan(static_cast<std::size_t>(index) * width, width);
    }

  private:
    [[nodiscard]] mpgpu::buffer<float> block(const mpgpu::context &ctx, int index) const {
        return {ctx, mpgpu::device::gpu(index), static_cast<std::size_t>(rows + 2) * width};
    }
};

/// Divides rows 1 to ny - 2 among the devices into parts that are as equal as possible. If they do not divide evenly,
/// the last parts have one more row, as in NVIDIA's samples.
std::vector<part> divide(const mpgpu::context &ctx, int devices, int nx, int ny) {
    std::vector<part> parts;
    const int rows = (ny - 2) / devices;
    const int first_with_extra = devices - (ny - 2) % devices;
    int first = 1;
    for (int index = 0; index < devices; ++index) {
        const int count = rows + (index >= first_with_extra ? 1 : 0);
        parts.emplace_back(ctx, index, nx, first, count);
        first += count;
    }
    return parts;
}

/// Returns the transfers of both halo rows of every device, for the array with index `parity`.
std::vector<mpgpu::transfer> halo_rows(std::vector<part> &parts, std::size_t parity) {
    std::vector<mpgpu::transfer> halos;
    for (std::size_t here = 0; here < parts.size(); ++here) {
        const std::size_t below = (here + 1) % parts.size();
        part &upper = parts[here];
        part &lower = parts[below];
        halos.push_back(mpgpu::make_transfer(lower.row(parity, 0), upper.row(parity, upper.rows)));
        halos.push_back(mpgpu::make_transfer(upper.row(parity, upper.rows + 1), lower.row(parity, 1)));
    }
    return halos;
}

/// Exchange by mpgpu. Each device has a plan that writes its edge rows into the neighbours' memory, and executes the
/// plan in a stream of its own after its sweep. The next sweep of a device waits for the rows that the device receives,
/// not for the rows that it sends.
///
/// If rows are so long that several paths are faster, there is a single plan for all devices instead, because their
/// paths share links. It is executed in one stream, which waits for every sweep, and every next sweep waits for that
/// stream.
class by_plan final : public exchange {
  public:
    by_plan(const mpgpu::context &ctx, const halo_exchange &halos)
        : ctx_(ctx), halos_(halos), together_{{{ctx, halos.copies[0]}, {ctx, halos.copies[1]}}}, exchanged_(ctx, 0) {
        const bool pays = plan().info().direct_seconds - plan().info().predicted_seconds > meeting_seconds;
        for (std::size_t device = 0; device < halos.sweeps.size(); ++device) {
            swept_.emplace_back(ctx);
            if (!pays) {
                pushes_.emplace_back(ctx, static_cast<int>(device));
                apart_.push_back({{own(device, 0), own(device, 1)}});
            }
        }
    }

    void before_sweep(std::size_t device) override {
        if (apart_.empty()) {
            ctx_.wait(halos_.sweeps[device], exchanged_.done);
            return;
        }
        // The sweep need not wait for the rows that it has sent. They have been read by the time the neighbours' rows
        // arrive, because the neighbours have finished a sweep since.
        std::set<int> senders;
        for (const mpgpu::transfer &copy : halos_.copies[0]) {
            if (copy.dst_device == static_cast<int>(device) && senders.insert(copy.src_device).second) {
                ctx_.wait(halos_.sweeps[device], pushes_.at(static_cast<std::size_t>(copy.src_device)).done);
            }
        }
    }

    void start(std::size_t parity) override {
        for (std::size_t device = 0; device < swept_.size(); ++device) {
            swept_[device].record(halos_.sweeps[device]);
            if (!apart_.empty()) {
                pushes_[device].stream.wait(swept_[device]);
                pushes_[device].run(apart_[device].at(parity));
            }
        }
        if (apart_.empty()) {
            for (const mpgpu::event &swept : swept_) {
                exchanged_.stream.wait(swept);
            }
            exchanged_.run(together_.at(parity));
        }
    }

    void finish() override {
        exchanged_.stream.synchronize();
        for (const lane &push : pushes_) {
            push.stream.synchronize();
        }
    }

    [[nodiscard]] const mpgpu::plan &plan() const { return together_[0]; }

  private:
    /// Minimum predicted gain in seconds for which one plan for all devices is used. Joining the streams of several
    /// devices with one stream and back costs 14 us per iteration on two H200.
    static constexpr double meeting_seconds = 20e-6;

    /// Stream with an event that is recorded after the last plan in it.
    struct lane {
        lane(const mpgpu::context &ctx, int device) : stream(ctx, mpgpu::device::gpu(device)), done(ctx) {}
        void run(const mpgpu::plan &plan) {
            plan.enqueue(stream);
            done.record(stream);
        }
        mpgpu::stream stream;
        mpgpu::event done;
    };

    /// Maximum number of bytes of rows that a kernel copies instead of a copy engine. Between the kernels of two
    /// sweeps, a copy engine takes 5 to 7 us longer to start and finish than a kernel (docs/guide/gpus.md). For longer
    /// rows the higher rate of the copy engine outweighs that.
    static constexpr std::size_t most_bytes_by_kernel = std::size_t{8} << 20;

    /// Returns a plan for the rows that a device sends, with one path for each row.
    [[nodiscard]] mpgpu::plan own(std::size_t device, std::size_t parity) const {
        std::vector<mpgpu::transfer> rows;
        for (const mpgpu::transfer &copy : halos_.copies.at(parity)) {
            if (copy.src_device == static_cast<int>(device)) {
                rows.push_back(copy);
            }
        }
        mpgpu::plan_options one_path;
        one_path.max_paths = 1;
        if (rows.front().bytes <= most_bytes_by_kernel) {
            one_path.engine = mpgpu::engine::kernel;
        }
        return {ctx_, rows, one_path};
    }

    const mpgpu::context &ctx_;
    halo_exchange halos_;
    std::array<mpgpu::plan, 2> together_;
    lane exchanged_;
    std::vector<mpgpu::event> swept_;               // by device
    std::vector<lane> pushes_;                      // one for each device; empty if one plan for all devices is used
    std::vector<std::array<mpgpu::plan, 2>> apart_; // plans of each device; empty in the same case
};

/// Sets the initial values of the whole domain in host memory: zero, with a sine at both ends of x.
void set_initial_values(mpgpu::buffer<float> &domain, int nx, int ny) {
    std::fill_n(domain.data(), domain.size(), 0.0F);
    const double pi = 2.0 * std::asin(1.0);
    for (int y = 0; y < ny; ++y) {
        const auto value = static_cast<float>(std::sin(2.0 * pi * y / (ny - 1)));
        float *row = domain.data() + static_cast<std::size_t>(y) * static_cast<std::size_t>(nx);
        row[0] = value;
        row[nx - 1] = value;
    }
}

struct solution {
    int iterations = 0;
    double seconds = 0.0; // time of the iterations only
    std::string plan;     // description of the plan of one halo exchange
    mpgpu::plan_info modelled{};
};

enum class by { mpgpu, plain_copies };

/// Returns the device operations for the kind of device to which `memory` belongs.
const device_code &code_for(const void *memory) {
#ifdef JACOBI_CUDA
    if (is_on_gpu(memory)) {
        return on_gpus;
    }
#endif
    static_cast<void>(memory);
    return on_virtual_devices;
}

/// Solves the problem on the first `devices` devices and writes the result to `domain`. Prints progress if `print` is
/// true.
solution solve(const mpgpu::context &ctx, const options &opt, int devices, by manner, mpgpu::buffer<float> &domain,
               bool print) {
    std::vector<part> parts = divide(ctx, devices, opt.nx, opt.ny);
    const device_code &code = code_for(parts[0].a[0].data());
    halo_exchange rows = {{halo_rows(parts, 0), halo_rows(parts, 1)}, {}};
    for (const part &p : parts) {
        rows.sweeps.emplace_back(p.stream);
    }
    solution result;
    std::unique_ptr<exchange> halos;
    const by_plan *planned = nullptr;
    if (manner == by::mpgpu) {
        auto made = std::make_unique<by_plan>(ctx, rows);
        planned = made.get();
        halos = std::move(made);
    } else {
        halos = code.plain_exchange(ctx, rows);
    }

    // Three more plans copy data from and to host memory: the domain to the devices, the result back, and the norms of
    // all rows in order.
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    mpgpu::buffer<double> row_norm(ctx, mpgpu::device::host(), static_cast<std::size_t>(opt.ny - 2));
    std::vector<mpgpu::transfer> scatter;
    std::vector<mpgpu::transfer> gather_norm;
    std::array<std::vector<mpgpu::transfer>, 2> gather;
    const mpgpu::device_span<float> whole = domain;
    for (part &p : parts) {
        const std::size_t start = static_cast<std::size_t>(p.first) * p.width;
        const std::size_t count = static_cast<std::size_t>(p.rows) * p.width;
        for (std::size_t parity : {0U, 1U}) {
            scatter.push_back(
                mpgpu::make_transfer(p.a.at(parity), whole.subspan(start - p.width, count + 2 * p.width)));
            gather.at(parity).push_back(
                mpgpu::make_transfer(whole.subspan(start, count), p.a.at(parity).subspan(p.width, count)));
        }
        gather_norm.push_back(mpgpu::make_transfer(
            row_norm.subspan(static_cast<std::size_t>(p.first - 1), static_cast<std::size_t>(p.rows)), p.row_norm));
    }
    const mpgpu::plan norms(ctx, gather_norm);

    set_initial_values(domain, opt.nx, opt.ny);
    mpgpu::plan(ctx, scatter).execute(stream).synchronize();
    for (std::size_t parity : {0U, 1U}) { // also a warm-up, because the first execution of a plan creates its resources
        halos->start(parity);
        halos->finish();
    }

    const auto start = std::chrono::steady_clock::now();
    double norm = 1.0;
    int iteration = 0;
    for (; norm > tolerance && iteration < opt.niter; ++iteration) {
        const bool report = print && iteration % 100 == 0;
        const bool check = report || iteration % opt.nccheck == 0;
        const std::size_t from = iteration % 2 == 0 ? 0 : 1;
        const std::size_t to = 1 - from;
        for (std::size_t index = 0; index < parts.size(); ++index) {
            part &p = parts[index];
            halos->before_sweep(index);
            code.launch(p.stream, {p.a.at(from).data(), p.a.at(to).data(), check ? p.row_norm.data() : nullptr, opt.nx,
                                   p.rows, static_cast<int>(index)});
        }
        halos->start(to);
        if (check) {
            for (part &p : parts) {
                p.swept.record(p.stream);
                stream.wait(p.swept);
            }
            norms.execute(stream).synchronize();
            norm = std::sqrt(std::accumulate(row_norm.data(), row_norm.data() + row_norm.size(), 0.0));
        }
        if (report) {
            std::printf("%5d, %0.6f\n", iteration, norm);
        }
    }
    halos->finish();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

    mpgpu::plan(ctx, gather.at(iteration % 2 == 0 ? 0 : 1)).execute(stream).synchronize();
    if (planned != nullptr) { // described after its executions, so that their number is shown
        result.plan = planned->plan().describe();
        result.modelled = planned->plan().info();
    }
    result.iterations = iteration;
    result.seconds = elapsed.count();
    return result;
}

/// True if both results are bitwise equal, as they must be (see sweep_row). NVIDIA's samples allow a difference of
/// 1e-8.
bool same(const mpgpu::buffer<float> &result, const mpgpu::buffer<float> &reference, std::size_t nx) {
    const auto differ = std::mismatch(result.data(), result.data() + result.size(), reference.data());
    if (differ.first == result.data() + result.size()) {
        return true;
    }
    const auto index = static_cast<std::size_t>(differ.first - result.data());
    std::fprintf(stderr, "ERROR: a[%zu * %zu + %zu] = %.9g does not match %.9g (one device)\n", index / nx, nx,
                 index % nx, double{*differ.first}, double{*differ.second});
    return false;
}

void print_plan(const std::string &description, const mpgpu::plan_info &modelled) {
    std::printf("\nThe plan of the halo exchange:\n%s%s", description.c_str(),
                !description.empty() && description.back() == '\n' ? "" : "\n");
    std::printf("Modelled time of one halo exchange (%llu bytes): %.3f us; with one path for each transfer: %.3f us; "
                "speedup: %.2f\n",
                static_cast<unsigned long long>(modelled.bytes), modelled.predicted_seconds * 1e6,
                modelled.direct_seconds * 1e6, modelled.direct_seconds / modelled.predicted_seconds);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

int run(const options &opt) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
#ifndef JACOBI_CUDA
    // The sweeps are CPU code, which can access only memory of virtual devices.
    machine.backend = mpgpu::backend::host;
#endif
    const mpgpu::context ctx(machine);

    const int available = ctx.devices().gpus;
    const int devices = opt.devices > 0 ? opt.devices : available;
    if (devices > available) {
        throw std::invalid_argument("-devices " + std::to_string(devices) + ": this machine has " +
                                    std::to_string(available));
    }
    if (devices > opt.ny - 2) {
        throw std::invalid_argument("-ny " + std::to_string(opt.ny) + ": must be " + std::to_string(devices + 2) +
                                    " or more for " + std::to_string(devices) +
                                    " devices: one row for each and two boundary rows");
    }
    if (opt.plan) {
        std::vector<part> parts = divide(ctx, devices, opt.nx, opt.ny);
        const mpgpu::plan halo(ctx, halo_rows(parts, 0));
        print_plan(halo.describe(), halo.info());
        return 0;
    }

    const std::size_t points = static_cast<std::size_t>(opt.nx) * static_cast<std::size_t>(opt.ny);
    mpgpu::buffer<float> reference(ctx, mpgpu::device::host(), points);
    mpgpu::buffer<float> result(ctx, mpgpu::device::host(), points);
    if (!opt.csv) {
        std::printf("Single GPU jacobi relaxation: %d iterations on %d x %d mesh with norm check every %d iterations\n",
                    opt.niter, opt.ny, opt.nx, opt.nccheck);
    }
    const solution one = solve(ctx, opt, 1, by::mpgpu, reference, !opt.csv);
    if (!opt.csv) {
        std::printf("Jacobi relaxation: %d iterations on %d x %d mesh with norm check every %d iterations\n", opt.niter,
                    opt.ny, opt.nx, opt.nccheck);
    }

    solution all;
    std::vector<double> with_mpgpu;
    std::vector<double> with_plain_copies;
    // The methods alternate, so that other load of the machine affects both equally. Each result is verified.
    for (int turn = 0; turn < (opt.plain ? turns : 1); ++turn) {
        for (const by manner : {by::plain_copies, by::mpgpu}) {
            if (manner == by::plain_copies && !opt.plain) {
                continue;
            }
            const bool print = !opt.csv && turn == 0 && manner == by::mpgpu;
            const solution solved = solve(ctx, opt, devices, manner, result, print);
            if (one.iterations != solved.iterations) {
                std::fprintf(stderr, "ERROR: %d iterations on %d devices, but %d on one device\n", solved.iterations,
                             devices, one.iterations);
                return 1;
            }
            if (!same(result, reference, static_cast<std::size_t>(opt.nx))) {
                return 1;
            }
            (manner == by::mpgpu ? with_mpgpu : with_plain_copies).push_back(solved.seconds);
            if (manner == by::mpgpu) {
                all = solved;
            }
        }
    }
    all.seconds = median(with_mpgpu);

    if (opt.csv) {
        std::printf("mpgpu, %d, %d, %d, %d, %d, 1, %f, %f\n", opt.nx, opt.ny, opt.niter, opt.nccheck, devices,
                    all.seconds, one.seconds);
        if (opt.plain) {
            std::printf("plain, %d, %d, %d, %d, %d, 1, %f, %f\n", opt.nx, opt.ny, opt.niter, opt.nccheck, devices,
                        median(with_plain_copies), one.seconds);
        }
        return 0;
    }
    std::printf("Num GPUs: %d.\n", devices);
    std::printf("%dx%d: 1 GPU: %8.4f s, %d GPUs: %8.4f s, speedup: %8.2f, efficiency: %8.2f \n", opt.ny, opt.nx,
                one.seconds, devices, all.seconds, one.seconds / all.seconds,
                one.seconds / (devices * all.seconds) * 100);
    if (opt.plain) {
        const double plain = median(with_plain_copies);
        std::printf("Halo rows of %zu bytes, medians of %d rounds: plain copies %8.4f s, mpgpu %8.4f s, ratio %.3f "
                    "(above 1 mpgpu is faster)\n",
                    static_cast<std::size_t>(opt.nx) * sizeof(float), turns, plain, all.seconds, plain / all.seconds);
    }
    print_plan(all.plan, all.modelled);
    return 0;
}

} // namespace

int main(int argc, char *argv[]) {
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(usage, stdout);
            return 0;
        }
        return run(opt);
    } catch (const std::exception &e) {
        std::fprintf(stderr, "jacobi: %s\n", e.what());
        return 2;
    }
}
