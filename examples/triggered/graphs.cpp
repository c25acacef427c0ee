// SPDX-License-Identifier: MIT OR Apache-2.0
// PageRank, shortest paths and alternating least squares. The vertices are divided among the GPUs. Each GPU has the
// whole vector of values, and sends its part to all others.
#include "graph.hpp"
#include "replicated.hpp"

#include <cstdio>
#include <utility>

namespace {

constexpr float damping = 0.85F;

/// Edges that lead to the vertices of one GPU, in memory of that GPU.
class edges_on {
  public:
    edges_on(const machine &m, const graph &g, int gpu, share rows)
        : rows_(rows), offsets_(on_gpu(m, mpgpu::device::gpu(gpu), shifted(g, rows).data(), rows.count + 1)),
          sources_(on_gpu(m, mpgpu::device::gpu(gpu), g.sources.data() + g.offsets[rows.first],
                          g.offsets[rows.first + rows.count] - g.offsets[rows.first])) {}
    [[nodiscard]] graph_part part() { return {offsets_.data(), sources_.data(), rows_.first, rows_.count}; }

  private:
    static std::vector<std::uint64_t> shifted(const graph &g, share rows) {
        const auto first = g.offsets.begin() + static_cast<std::ptrdiff_t>(rows.first);
        std::vector<std::uint64_t> here(first, first + static_cast<std::ptrdiff_t>(rows.count) + 1);
        std::for_each(here.rbegin(), here.rend(), [&](std::uint64_t &offset) { offset -= here.front(); });
        return here;
    }

    share rows_;
    mpgpu::buffer<std::uint64_t> offsets_;
    mpgpu::buffer<std::uint32_t> sources_;
};

/// Data of one GPU for PageRank.
struct rank_data {
    edges_on edges;
    mpgpu::buffer<float> weight;
};

int page_rank(const machine &m, const options &opt, const graph &g) {
    problem<float> task;
    task.steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 6 : 20;
    task.first = ranks(g, damping, 0);
    task.after[0] = ranks(g, damping, task.steps);
    task.prepare = [&](const std::vector<share> &shares) {
        auto data = std::make_shared<std::vector<rank_data>>();
        for (const share &rows : shares) {
            const int gpu = static_cast<int>(data->size());
            std::vector<float> weights(rows.count);
            for (std::size_t row = 0; row < rows.count; ++row) {
                const std::uint32_t outgoing = g.outgoing[rows.first + row];
                weights[row] = outgoing > 0 ? 1.0F / static_cast<float>(outgoing) : 0.0F;
            }
            data->push_back(
                {edges_on(m, g, gpu, rows), on_gpu(m, mpgpu::device::gpu(gpu), weights.data(), weights.size())});
        }
        on_devices<float> work;
        work.launch = [&m, &g, data](const mpgpu::stream &stream, int gpu, const float *x, float *x_new, int,
                                     const outputs &out) {
            rank_data &here = (*data)[static_cast<std::size_t>(gpu)];
            const float base = (1.0F - damping) / static_cast<float>(g.vertices());
            m.code.rank(stream, gpu, {here.edges.part(), x, x_new, here.weight.data(), damping, base}, out);
        };
        return work;
    };
    return compare_all(m, task, opt);
}

/// Data of one GPU for shortest paths: its edges, and the number of the last time step in which a distance decreased.
struct distance_data {
    edges_on edges;
    mpgpu::buffer<std::uint32_t> changed;
};

int shortest_paths(const machine &m, const options &opt, const graph &g) {
    // The root is the vertex with the most edges, so that most other vertices are reachable from it.
    const auto root =
        static_cast<std::uint32_t>(std::max_element(g.outgoing.begin(), g.outgoing.end()) - g.outgoing.begin());
    problem<std::uint32_t> task;
    int sweeps = 0;
    task.after[0] = distances(g, root, sweeps);
    task.first.assign(g.vertices(), unreached);
    task.first[root] = 0;
    // The computation ends at the first test after the last change.
    task.steps = (sweeps + opt.check - 1) / opt.check * opt.check;
    task.check = opt.check;
    task.prepare = [&](const std::vector<share> &shares) {
        auto data = std::make_shared<std::vector<distance_data>>();
        for (const share &rows : shares) {
            const int gpu = static_cast<int>(data->size());
            data->push_back(
                {edges_on(m, g, gpu, rows), mpgpu::buffer<std::uint32_t>(m.ctx, mpgpu::device::gpu(gpu), 1)});
        }
        on_devices<std::uint32_t> work;
        work.launch = [&m, data](const mpgpu::stream &stream, int gpu, const std::uint32_t *x, std::uint32_t *x_new,
                                 int step, const outputs &out) {
            distance_data &here = (*data)[static_cast<std::size_t>(gpu)];
            m.code.shorten(stream, gpu,
                           {here.edges.part(), x, x_new, here.changed.data(), static_cast<std::uint32_t>(step + 1)},
                           out);
        };
        auto last = std::make_shared<mpgpu::buffer<std::uint32_t>>(m.ctx, mpgpu::device::host(), data->size());
        work.reset = [&m, data, last] {
            std::fill_n(last->data(), last->size(), 0U);
            for (distance_data &here : *data) {
                copy_now(m, here.changed, last->subspan(0, 1));
            }
        };
        work.has_ended = [&m, data, last](int step) {
            for (std::size_t gpu = 0; gpu < data->size(); ++gpu) {
                copy_now(m, last->subspan(gpu, 1), (*data)[gpu].changed);
            }
            return std::none_of(last->data(), last->data() + last->size(),
                                [&](std::uint32_t changed) { return changed == static_cast<std::uint32_t>(step); });
        };
        return work;
    };
    return compare_all(m, task, opt);
}

/// Runs alternating least squares. Even time steps fit the raters to the rated items, and odd time steps fit the items
/// to the raters. An edge is a rating of its source by its target.
int least_squares(const machine &m, const options &opt, const graph &g) {
    const graph back = transposed(g);
    problem<latent> task;
    task.steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 4 : 10;
    task.first = factors(g, back, 0)[0];
    task.after = factors(g, back, task.steps);
    task.prepare = [&](const std::vector<share> &shares) {
        auto data = std::make_shared<std::vector<std::array<edges_on, 2>>>();
        for (const share &rows : shares) {
            const int gpu = static_cast<int>(data->size());
            data->push_back({edges_on(m, g, gpu, rows), edges_on(m, back, gpu, rows)});
        }
        on_devices<latent> work;
        work.launch = [&m, data](const mpgpu::stream &stream, int gpu, const latent *x, latent *x_new, int step,
                                 const outputs &out) {
            const auto side = static_cast<std::size_t>(step % 2);
            edges_on &edges = (*data)[static_cast<std::size_t>(gpu)].at(side);
            m.code.fit(stream, gpu, {edges.part(), x, x_new, side == 1}, out);
        };
        return work;
    };
    return compare_all(m, task, opt);
}

} // namespace

int graphs(const machine &m, const options &opt) {
    const unsigned scale = opt.scale > 0 ? opt.scale : m.is_virtual() ? 11 : opt.program == "als" ? 21 : 23;
    const graph g = opt.matrix.empty() ? generate(scale, opt.degree, opt.seed) : read_matrix(opt.matrix);
    if (g.vertices() < static_cast<std::size_t>(m.gpus)) {
        throw std::invalid_argument("-gpus " + std::to_string(m.gpus) + ": the graph has " +
                                    std::to_string(g.vertices()) + " vertices");
    }
    std::printf("\n%s, %zu vertices, %zu edges over %d GPUs, results of each GPU go to %s; bitwise equal to the "
                "results of a CPU\n",
                opt.program.c_str(), g.vertices(), g.sources.size(), m.gpus,
                m.gpus > 1 ? "all others" : "host memory, because there is only one GPU");
    return opt.program == "pagerank"         ? page_rank(m, opt, g)
           : opt.program == "shortest-paths" ? shortest_paths(m, opt, g)
                                             : least_squares(m, opt, g);
}
