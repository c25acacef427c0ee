// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Jacobi relaxation as in examples/jacobi, but with one process for each device. Problem, flags, sweeps and check are
// those of that example.
//
// The ny rows are divided among the ranks. Each rank keeps its rows between two halo rows, and an iteration is
//
//     sweep a -> a_new             in the rank's stream
//     exchange                     both halo rows of a_new, in the same stream; then a and a_new are swapped
//
// The halo exchange is that of mpgpu/halo_mpi.hpp: rows are copied directly into the neighbours' memory, in stream
// order. In the time loop, MPI is called only to check convergence. With -plain the problem is also solved, alternating
// with mpgpu, by MPI with device pointers, and on GPUs by copies into memory that is opened by CUDA IPC.
#include "../gpu_aware.hpp"
#include "../jacobi/options.hpp"
#include "../jacobi/sweep.hpp"
#include "exchanges.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

constexpr double tolerance = 1.0e-8; // of the norm, as in the samples
constexpr int turns = 5;             // with -plain

/// Returns the grid of the computed rows, divided among `ranks` ranks. The domain is periodic in y; its first and last
/// row are halo rows of the last and first rank.
halo::grid grid_of(const options &opt, int ranks) {
    halo::grid g;
    g.cells = {opt.nx, opt.ny - 2, 1};
    g.ranks = {1, ranks, 1};
    g.periodic = {false, true, false};
    g.ghost = {0, 1, 0};
    g.reach = halo::neighbours::faces;
    return g;
}

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

/// Part of the domain that one rank computes.
struct part {
    part(const mpgpu::context &ctx, const halo::grid &g, int rank, mpgpu::device on)
        : where(on), first(static_cast<int>(halo::box_of(g, rank).first[1]) + 1),
          rows(static_cast<int>(halo::box_of(g, rank).cells[1])), width(static_cast<std::size_t>(g.cells[0])),
          stream(ctx, on), memory{{block(ctx), block(ctx)}}, a{{elements(0), elements(1)}},
          row_norm(ctx, on, static_cast<std::size_t>(rows)),
          row_norm_on_host(ctx, mpgpu::device::host(), row_norm.size()),
          fetch_norm(ctx, {mpgpu::make_transfer(row_norm_on_host, row_norm)}) {}

    mpgpu::device where;
    int first; // first row of the domain that is computed here
    int rows;  // rows that are computed here; the blocks have one more at either end
    std::size_t width;
    mpgpu::stream stream;
    std::array<mpgpu::buffer<float>, 2> memory;
    std::array<mpgpu::device_span<float>, 2> a; // a and a_new, alternating
    mpgpu::buffer<double> row_norm;
    mpgpu::buffer<double> row_norm_on_host;
    mpgpu::plan fetch_norm;

  private:
    [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(rows + 2) * width; }
    /// Allocates memory for an array in whole 2 MiB blocks of the driver, because a handle of CUDA IPC gives access to
    /// the whole block.
    [[nodiscard]] mpgpu::buffer<float> block(const mpgpu::context &ctx) const {
        constexpr std::size_t whole = (std::size_t{2} << 20) / sizeof(float);
        return {ctx, where, (size() + whole - 1) / whole * whole};
    }
    [[nodiscard]] mpgpu::device_span<float> elements(std::size_t parity) {
        return memory.at(parity).subspan(0, size());
    }
};

/// Exchange by mpgpu, with a plan for each of the two arrays.
class by_mpgpu final : public exchange {
  public:
    by_mpgpu(const mpgpu::stream &stream, std::array<halo::plan, 2> plans)
        : stream_(stream), plans_(std::move(plans)) {}
    by_mpgpu(const by_mpgpu &) = delete;
    by_mpgpu(by_mpgpu &&) = delete;
    by_mpgpu &operator=(const by_mpgpu &) = delete;
    by_mpgpu &operator=(by_mpgpu &&) = delete;
    ~by_mpgpu() override {
        for (halo::plan &one : plans_) {
            one.destroy();
        }
    }

    void before_sweep(std::size_t /*device*/) override {} // sweep and exchange are in the same stream
    void start(std::size_t parity) override { plans_.at(parity).exchange(stream_); }
    void finish() override { stream_.synchronize(); }
    [[nodiscard]] std::string describe() const { return plans_[0].transfers()->describe(); }

  private:
    const mpgpu::stream &stream_;
    std::array<halo::plan, 2> plans_;
};

/// Sets the initial values of rows `first` to `first + rows - 1` of the domain: zero, with a sine at both ends of x.
void set_initial_values(mpgpu::buffer<float> &some, std::size_t nx, int ny, int first) {
    const auto rows = static_cast<int>(some.size() / nx);
    std::fill_n(some.data(), some.size(), 0.0F);
    const double pi = 2.0 * std::asin(1.0);
    for (int y = 0; y < rows; ++y) {
        const auto value = static_cast<float>(std::sin(2.0 * pi * (first + y) / (ny - 1)));
        float *row = some.data() + static_cast<std::size_t>(y) * nx;
        row[0] = value;
        row[nx - 1] = value;
    }
}

struct solution {
    int iterations = 0;
    double seconds = 0.0; // time of the iterations only
};

/// Ranks that solve one problem, with the rows of each rank.
struct team {
    MPI_Comm ranks;
    int size;
    std::vector<int> counts; // rows of each rank
    std::vector<int> starts; // first row of each rank, relative to the first computed row
};

team team_of(MPI_Comm ranks, const halo::grid &g) {
    team all{ranks, halo::rank_count(g), {}, {}};
    for (int rank = 0; rank < all.size; ++rank) {
        all.counts.push_back(static_cast<int>(halo::box_of(g, rank).cells[1]));
        all.starts.push_back(static_cast<int>(halo::box_of(g, rank).first[1]));
    }
    return all;
}

/// Returns the initial values of this rank's rows and halo rows, in host memory.
mpgpu::buffer<float> initial_values(const mpgpu::context &ctx, const options &opt, const part &mine) {
    mpgpu::buffer<float> rows(ctx, mpgpu::device::host(), mine.a[0].size());
    set_initial_values(rows, mine.width, opt.ny, mine.first - 1);
    return rows;
}

/// Solves the problem and copies this rank's rows to `result`, which is in host memory.
solution solve(const mpgpu::context &ctx, const options &opt, const team &all, part &mine, exchange &halos,
               const mpgpu::buffer<float> &initial, mpgpu::buffer<float> &result, bool print) {
    const device_code &code = code_for(mine.a[0].data());
    mpgpu::plan(ctx, {mpgpu::make_transfer(mine.a[0], initial), mpgpu::make_transfer(mine.a[1], initial)})
        .execute(mine.stream)
        .synchronize();
    std::vector<double> row_norms(static_cast<std::size_t>(opt.ny - 2)); // of all ranks, in order
    MPI_Barrier(all.ranks);
    for (std::size_t parity : {0U, 1U}) { // also a warm-up, because the first execution of a plan creates its resources
        halos.start(parity);
        halos.finish();
    }
    MPI_Barrier(all.ranks);

    const auto start = std::chrono::steady_clock::now();
    double norm = 1.0;
    int iteration = 0;
    for (; norm > tolerance && iteration < opt.niter; ++iteration) {
        const bool report = !opt.csv && iteration % 100 == 0; // equal on all ranks, because it is collective
        const bool check = report || iteration % opt.nccheck == 0;
        const std::size_t from = iteration % 2 == 0 ? 0 : 1;
        const std::size_t to = 1 - from;
        halos.before_sweep(0);
        code.launch(mine.stream, {mine.a.at(from).data(), mine.a.at(to).data(), check ? mine.row_norm.data() : nullptr,
                                  opt.nx, mine.rows, mine.where.id()});
        halos.start(to);
        if (check) {
            mine.fetch_norm.execute(mine.stream).synchronize();
            MPI_Allgatherv(mine.row_norm_on_host.data(), mine.rows, MPI_DOUBLE, row_norms.data(), all.counts.data(),
                           all.starts.data(), MPI_DOUBLE, all.ranks);
            norm = std::sqrt(std::accumulate(row_norms.begin(), row_norms.end(), 0.0));
        }
        if (report && print) {
            std::printf("%5d, %0.6f\n", iteration, norm);
        }
    }
    halos.finish();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

    mpgpu::plan(
        ctx, {mpgpu::make_transfer(result, mine.a.at(iteration % 2 == 0 ? 0 : 1).subspan(mine.width, result.size()))})
        .execute(mine.stream)
        .synchronize();
    double slowest = elapsed.count();
    MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, all.ranks);
    return {iteration, slowest};
}

/// Solves the whole problem on one device, without the other processes.
solution solve_alone(const mpgpu::context &ctx, const options &opt, mpgpu::buffer<float> &result, bool print) {
    const halo::grid g = grid_of(opt, 1);
    part mine(ctx, g, 0, mpgpu::device::gpu(0));
    const auto plan = [&](mpgpu::device_span<float> array) {
        const std::vector<halo::rank_arrays> arrays = {{halo::array_of(array)}};
        return halo::plan(ctx, g, arrays);
    };
    by_mpgpu halos(mine.stream, {plan(mine.a[0]), plan(mine.a[1])});
    return solve(ctx, opt, team_of(MPI_COMM_SELF, g), mine, halos, initial_values(ctx, opt, mine), result, print);
}

/// True if this rank's rows are bitwise equal to those computed on one device.
bool same(const mpgpu::buffer<float> &result, const float *reference, const part &mine) {
    const auto differ = std::mismatch(result.data(), result.data() + result.size(), reference);
    if (differ.first == result.data() + result.size()) {
        return true;
    }
    const auto index = static_cast<std::size_t>(differ.first - result.data());
    std::fprintf(stderr, "ERROR: a[%zu * %zu + %zu] = %.9g does not match %.9g (one device)\n",
                 static_cast<std::size_t>(mine.first) + index / mine.width, mine.width, index % mine.width,
                 double{*differ.first}, double{*differ.second});
    return false;
}

void check_options(const options &opt, int ranks) {
    if (opt.devices > 0) {
        throw std::invalid_argument("-devices: each rank has one device; set the number of ranks with mpirun -n");
    }
    if (ranks > opt.ny - 2) {
        throw std::invalid_argument("-ny " + std::to_string(opt.ny) + ": must be " + std::to_string(ranks + 2) +
                                    " or more for " + std::to_string(ranks) +
                                    " ranks: one row for each and two boundary rows");
    }
}

/// Method of exchanging the halo rows, with the arrays and times of its runs.
struct form {
    std::string name;
    std::unique_ptr<part> mine;
    std::unique_ptr<exchange> halos;
    std::vector<double> seconds; // one for each run
};

form form_of(const char *name, const mpgpu::context &ctx, const halo::grid &g, int rank, mpgpu::device gpu) {
    return {name, std::make_unique<part>(ctx, g, rank, gpu), nullptr, {}};
}

/// Adds the methods with which mpgpu is compared.
void add_plain_forms(std::vector<form> &forms, const mpgpu::context &ctx, const options &opt, const halo::grid &g,
                     int rank, mpgpu::device gpu) {
    const int ranks = halo::rank_count(g);
    const auto add = [&](const char *name, std::unique_ptr<exchange> (*made)(const rank_rows &)) {
        form &added = forms.emplace_back(form_of(name, ctx, g, rank, gpu));
        part &its = *added.mine;
        added.halos = made({MPI_COMM_WORLD,
                            {(rank + ranks - 1) % ranks, (rank + 1) % ranks},
                            {its.a[0].data(), its.a[1].data()},
                            its.width,
                            its.rows,
                            &its.stream,
                            gpu.id()});
    };
    bool on_gpu = false;
#ifdef JACOBI_CUDA
    on_gpu = is_on_gpu(forms[0].mine->a[0].data());
    if (on_gpu) {
        add("peer copies", exchange_by_peer_copies);
    }
#endif
    const auto reason = on_gpu && !opt.gpu_aware ? why_not_gpu_aware() : std::nullopt;
    if (!reason) {
        add("MPI", exchange_by_mpi);
    } else if (rank == 0) {
        std::fprintf(stderr, "jacobi_mpi: MPI left out: %s; -gpu-aware measures it anyway\n", reason->c_str());
    }
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

int run(const options &opt, int rank, int ranks) {
    check_options(opt, ranks);
    mpgpu::context_options machine;
    machine.topology = opt.topology;
#ifndef JACOBI_CUDA
    // The sweeps are CPU code, which can access only memory of virtual devices.
    machine.backend = mpgpu::backend::host;
#endif
    const mpgpu::context ctx(machine);
    const mpgpu::device gpu = mpgpu::device::gpu(rank % ctx.devices().gpus);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    const halo::grid g = grid_of(opt, ranks);
    const team all = team_of(MPI_COMM_WORLD, g);
    // Each method has its own arrays, because mpgpu may be unable to open memory that MPI has already opened by CUDA
    // IPC.
    std::vector<form> forms;
    forms.push_back(form_of("mpgpu", ctx, g, rank, gpu));
    part &mine = *forms[0].mine;
    {
        const auto plan = [&](mpgpu::device_span<float> array) {
            return halo::plan(ctx, node, g, {halo::array_of(array)});
        };
        auto planned =
            std::make_unique<by_mpgpu>(mine.stream, std::array<halo::plan, 2>{plan(mine.a[0]), plan(mine.a[1])});
        if (opt.plan && rank == 0) {
            std::printf("Plan of the transfers that rank 0 sends:\n%s\n", planned->describe().c_str());
        }
        forms[0].halos = std::move(planned);
    }
    if (opt.plan) {
        return 0;
    }
    if (opt.plain) {
        add_plain_forms(forms, ctx, opt, g, rank, gpu);
    }

    mpgpu::buffer<float> result(ctx, mpgpu::device::host(), static_cast<std::size_t>(mine.rows) * mine.width);
    const bool print = rank == 0 && !opt.csv;
    solution one;
    std::vector<float> reference(rank == 0 ? static_cast<std::size_t>(opt.ny - 2) * mine.width : 0);
    if (rank == 0) {
        if (print) {
            std::printf(
                "Single GPU jacobi relaxation: %d iterations on %d x %d mesh with norm check every %d iterations\n",
                opt.niter, opt.ny, opt.nx, opt.nccheck);
        }
        mpgpu::buffer<float> whole(ctx, mpgpu::device::host(), reference.size());
        one = solve_alone(ctx, opt, whole, print);
        std::copy_n(whole.data(), whole.size(), reference.begin());
        if (print) {
            std::printf("Jacobi relaxation: %d iterations on %d x %d mesh with norm check every %d iterations\n",
                        opt.niter, opt.ny, opt.nx, opt.nccheck);
        }
    }
    MPI_Bcast(&one.iterations, 1, MPI_INT, 0, MPI_COMM_WORLD);
    // Each rank receives the rows of the reference result that correspond to its own. The MPI type is a whole row, so
    // that counts stay below 2^31.
    MPI_Datatype row = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(opt.nx, MPI_FLOAT, &row);
    MPI_Type_commit(&row);
    std::vector<float> expected(result.size());
    MPI_Scatterv(reference.data(), all.counts.data(), all.starts.data(), row, expected.data(), mine.rows, row, 0,
                 MPI_COMM_WORLD);
    MPI_Type_free(&row);

    const mpgpu::buffer<float> initial = initial_values(ctx, opt, mine);
    // The methods alternate, so that other load of the machine affects all of them equally. Each result is verified.
    for (int turn = 0; turn < (opt.plain ? turns : 1); ++turn) {
        for (form &f : forms) {
            const bool first = turn == 0 && &f == forms.data();
            const solution together = solve(ctx, opt, all, *f.mine, *f.halos, initial, result, print && first);
            f.seconds.push_back(together.seconds);
            if (rank == 0 && one.iterations != together.iterations) {
                std::fprintf(stderr, "ERROR: %s: %d iterations on %d ranks, but %d on one device\n", f.name.c_str(),
                             together.iterations, ranks, one.iterations);
            }
            int right = one.iterations == together.iterations && same(result, expected.data(), mine) ? 1 : 0;
            MPI_Allreduce(MPI_IN_PLACE, &right, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
            if (right == 0) {
                return 1;
            }
        }
    }
    if (rank != 0) {
        return 0;
    }
    for (const form &f : forms) {
        if (opt.csv) {
            std::printf("%s, %d, %d, %d, %d, %d, 1, %f, %f\n", f.name.c_str(), opt.nx, opt.ny, opt.niter, opt.nccheck,
                        ranks, median(f.seconds), one.seconds);
        }
    }
    if (opt.csv) {
        return 0;
    }
    const double seconds = median(forms[0].seconds);
    std::printf("Num GPUs: %d.\n", ranks);
    std::printf("%dx%d: 1 GPU: %8.4f s, %d GPUs: %8.4f s, speedup: %8.2f, efficiency: %8.2f \n", opt.ny, opt.nx,
                one.seconds, ranks, seconds, one.seconds / seconds, one.seconds / (ranks * seconds) * 100);
    for (std::size_t i = 1; i < forms.size(); ++i) {
        const double other = median(forms[i].seconds);
        std::printf(
            "Halo rows of %zu bytes, medians of %d rounds: %s %8.4f s, mpgpu %8.4f s, ratio %.3f (above 1 mpgpu "
            "is faster)\n",
            mine.width * sizeof(float), turns, forms[i].name.c_str(), other, seconds, other / seconds);
    }
    return 0;
}

} // namespace

int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int code = 0;
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(rank == 0 ? usage : "", stdout);
        } else {
            code = run(opt, rank, ranks);
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "jacobi_mpi: rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Finalize();
    return code;
}
