// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two-dimensional Jacobi relaxation over the devices of one node, in one process: the problem, the flags and the output
// of NVIDIA's multi-gpu-programming-models, with the halo exchange done by mpgpu.
//
// The ny rows are divided among the devices. Each device keeps its rows between two halo rows, and an iteration is
//
//     every device:  sweep a -> a_new              in the device's own stream
//     exchange:      both halo rows of a_new       one plan for all devices, in a stream that waits for every sweep
//     every device:  waits for the exchange, and a and a_new change places
//
// Only streams and events order this. The host waits for nothing, except where convergence is checked.
//
// The domain is periodic in y and has fixed values at both ends of x. All memory is set and read by transfers from and
// to host memory, so nothing here assumes that the CPU can reach a device's memory.
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
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr double tolerance = 1.0e-8; // of the norm, as in the samples

/// One device's part of the domain.
struct part {
    part(const mpgpu::context &ctx, int index, int nx, int first_row, int row_count)
        : first(first_row), rows(row_count), width(static_cast<std::size_t>(nx)),
          stream(ctx, mpgpu::device::gpu(index)), swept(ctx), a{{block(ctx, index), block(ctx, index)}},
          row_norm(ctx, mpgpu::device::gpu(index), static_cast<std::size_t>(row_count)) {}

    int first; // of the domain's rows, the first that is computed here
    int rows;  // computed here; the blocks have one more at either end
    std::size_t width;
    mpgpu::stream stream;
    mpgpu::event swept;
    std::array<mpgpu::buffer<float>, 2> a; // a and a_new, by turns
    mpgpu::buffer<double> row_norm;

    /// One row of a block, counted with the halo row above as 0.
    [[nodiscard]] mpgpu::device_span<float> row(std::size_t parity, int index) {
        return a.at(parity).subspan(static_cast<std::size_t>(index) * width, width);
    }

  private:
    [[nodiscard]] mpgpu::buffer<float> block(const mpgpu::context &ctx, int index) const {
        return {ctx, mpgpu::device::gpu(index), static_cast<std::size_t>(rows + 2) * width};
    }
};

/// Rows 1 to ny - 2, in as equal parts as possible; the last parts have the extra rows, as in the samples.
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

/// Both halo rows of every device, in one plan: planned together, transfers do not get in each other's way.
mpgpu::plan plan_halos(const mpgpu::context &ctx, std::vector<part> &parts, std::size_t parity) {
    std::vector<mpgpu::transfer> halos;
    for (std::size_t here = 0; here < parts.size(); ++here) {
        const std::size_t below = (here + 1) % parts.size();
        part &upper = parts[here];
        part &lower = parts[below];
        halos.push_back(mpgpu::make_transfer(lower.row(parity, 0), upper.row(parity, upper.rows)));
        halos.push_back(mpgpu::make_transfer(upper.row(parity, upper.rows + 1), lower.row(parity, 1)));
    }
    return {ctx, halos};
}

/// The whole domain in host memory, before the first iteration: zero, with a sine at both ends of x.
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
    double seconds = 0.0; // of the iterations alone
    std::string plan;     // of one halo exchange
    mpgpu::plan_info modelled{};
};

/// Solves on the first `devices` devices and leaves the result in `domain`. Progress is printed when `print` is set.
solution solve(const mpgpu::context &ctx, const options &opt, int devices, mpgpu::buffer<float> &domain, bool print) {
    std::vector<part> parts = divide(ctx, devices, opt.nx, opt.ny);
    const std::array<mpgpu::plan, 2> halos = {plan_halos(ctx, parts, 0), plan_halos(ctx, parts, 1)};
    const mpgpu::stream exchange(ctx, mpgpu::device::gpu(0));
    mpgpu::event exchanged(ctx);

    // Three more plans: the domain to the devices, the result back, and the norms of all rows, in order, to the host.
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
    mpgpu::plan(ctx, scatter).enqueue(exchange);
    for (const mpgpu::plan &halo : halos) { // also warms up: the first execution of a plan sets up what it needs
        halo.enqueue(exchange);
    }
    exchange.synchronize();
    exchanged.record(exchange);

    const auto start = std::chrono::steady_clock::now();
    double norm = 1.0;
    int iteration = 0;
    for (; norm > tolerance && iteration < opt.niter; ++iteration) {
        const bool report = print && iteration % 100 == 0;
        const bool check = report || iteration % opt.nccheck == 0;
        const std::size_t from = iteration % 2 == 0 ? 0 : 1;
        const std::size_t to = 1 - from;
        for (part &p : parts) {
            p.stream.wait(exchanged);
            launch(p.stream,
                   {p.a.at(from).data(), p.a.at(to).data(), check ? p.row_norm.data() : nullptr, opt.nx, p.rows});
            p.swept.record(p.stream);
            exchange.wait(p.swept);
        }
        halos.at(to).enqueue(exchange);
        mpgpu::request norms_arrived = check ? norms.execute(exchange) : mpgpu::request();
        exchanged.record(exchange);
        if (check) {
            norms_arrived.wait();
            norm = std::sqrt(std::accumulate(row_norm.data(), row_norm.data() + row_norm.size(), 0.0));
        }
        if (report) {
            std::printf("%5d, %0.6f\n", iteration, norm);
        }
    }
    exchange.synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

    mpgpu::plan(ctx, gather.at(iteration % 2 == 0 ? 0 : 1)).execute(exchange).wait();
    return {iteration, elapsed.count(), halos[0].describe(), halos[0].info()};
}

/// Whether both results are the same, bit by bit: sweep_row says why they must be. The samples allow 1e-8.
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

int run(const options &opt) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
    // The sweep is CPU code that reads and writes the devices' memory, which virtual devices alone allow.
    machine.backend = mpgpu::backend::host;
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
                                    " devices, one row each and two at the ends");
    }
    if (opt.plan) {
        std::vector<part> parts = divide(ctx, devices, opt.nx, opt.ny);
        const mpgpu::plan halo = plan_halos(ctx, parts, 0);
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
    const solution one = solve(ctx, opt, 1, reference, !opt.csv);
    if (!opt.csv) {
        std::printf("Jacobi relaxation: %d iterations on %d x %d mesh with norm check every %d iterations\n", opt.niter,
                    opt.ny, opt.nx, opt.nccheck);
    }
    const solution all = solve(ctx, opt, devices, result, !opt.csv);

    if (one.iterations != all.iterations) {
        std::fprintf(stderr, "ERROR: %d iterations on %d devices, %d on one\n", all.iterations, devices,
                     one.iterations);
        return 1;
    }
    if (!same(result, reference, static_cast<std::size_t>(opt.nx))) {
        return 1;
    }
    if (opt.csv) {
        std::printf("mpgpu, %d, %d, %d, %d, %d, 1, %f, %f\n", opt.nx, opt.ny, opt.niter, opt.nccheck, devices,
                    all.seconds, one.seconds);
    } else {
        std::printf("Num GPUs: %d.\n", devices);
        std::printf("%dx%d: 1 GPU: %8.4f s, %d GPUs: %8.4f s, speedup: %8.2f, efficiency: %8.2f \n", opt.ny, opt.nx,
                    one.seconds, devices, all.seconds, one.seconds / all.seconds,
                    one.seconds / (devices * all.seconds) * 100);
        print_plan(all.plan, all.modelled);
    }
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
