// SPDX-License-Identifier: MIT OR Apache-2.0
// PageRank and shortest paths. The vertices are divided over the GPUs, each has the whole vector of values, and what a
// GPU makes of its part goes to all others.
#include "forms.hpp"
#include "graph.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <type_traits>

namespace {

constexpr float damping = 0.85F;

/// An application on a graph. `Value` is `float` for PageRank, `std::uint32_t` for distances.
template <class Value> class on_graph {
  public:
    on_graph(const machine &m, const graph &g, int gpus, bool to_host, const std::vector<Value> &first,
             const std::vector<Value> &expected, int steps, int check)
        : machine_(m), first_(m.ctx, mpgpu::device::host(), first.size()),
          seen_(m.ctx, mpgpu::device::host(), first.size()), expected_(expected),
          changed_(m.ctx, mpgpu::device::host(), static_cast<std::size_t>(gpus)) {
        std::copy(first.begin(), first.end(), first_.data());
        if (to_host) {
            to_host_ = mpgpu::buffer<Value>(m.ctx, mpgpu::device::host(), first.size());
        }
        const auto count = static_cast<std::size_t>(gpus);
        for (std::size_t gpu = 0; gpu < count; ++gpu) {
            parts_.push_back(std::make_unique<part>(m, g, static_cast<int>(gpu), g.vertices() * gpu / count,
                                                    g.vertices() * (gpu + 1) / count));
        }
        app_.gpus = gpus;
        app_.steps = steps;
        app_.sends = [this](int gpu, int parity) { return sends(gpu, parity); };
        app_.launch = [this](const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
            launch(stream, gpu, step, out);
        };
        app_.reset = [this] { reset(); };
        app_.wrong = [this] { return wrong(); };
        if (check > 0) {
            app_.check = check;
            app_.has_ended = [this](int step) { return has_ended(step); };
        }
    }

    [[nodiscard]] const application &app() const { return app_; }

  private:
    struct part {
        part(const machine &m, const graph &g, int gpu, std::size_t first_vertex, std::size_t end)
            : first(first_vertex), rows(end - first_vertex),
              where(mpgpu::device::gpu(gpu)), x{{{m.ctx, where, g.vertices()}, {m.ctx, where, g.vertices()}}},
              offsets(m.ctx, where, rows + 1),
              sources(m.ctx, where, std::max<std::uint64_t>(1, g.offsets[end] - g.offsets[first])),
              weight(m.ctx, where, rows), changed(m.ctx, where, 1) {
            mpgpu::buffer<std::uint64_t> here(m.ctx, mpgpu::device::host(), rows + 1);
            mpgpu::buffer<std::uint32_t> edges(m.ctx, mpgpu::device::host(), sources.size());
            mpgpu::buffer<float> weights(m.ctx, mpgpu::device::host(), rows);
            for (std::size_t row = 0; row <= rows; ++row) {
                here.data()[row] = g.offsets[first + row] - g.offsets[first];
            }
            std::copy(g.sources.begin() + static_cast<std::ptrdiff_t>(g.offsets[first]),
                      g.sources.begin() + static_cast<std::ptrdiff_t>(g.offsets[end]), edges.data());
            for (std::size_t row = 0; row < rows; ++row) {
                const std::uint32_t outgoing = g.outgoing[first + row];
                weights.data()[row] = outgoing > 0 ? 1.0F / static_cast<float>(outgoing) : 0.0F;
            }
            copy_now(m, offsets, here);
            copy_now(m, sources, edges);
            copy_now(m, weight, weights);
        }
        std::size_t first;
        std::size_t rows;
        mpgpu::device where;
        std::array<mpgpu::buffer<Value>, 2> x; ///< before and after a step, by turns
        mpgpu::buffer<std::uint64_t> offsets;
        mpgpu::buffer<std::uint32_t> sources;
        mpgpu::buffer<float> weight;
        mpgpu::buffer<std::uint32_t> changed;
    };

    std::vector<mpgpu::transfer> sends(int gpu, int parity) {
        const auto written = static_cast<std::size_t>(1 - parity);
        part &here = *parts_[static_cast<std::size_t>(gpu)];
        const auto made = here.x.at(written).subspan(here.first, here.rows);
        std::vector<mpgpu::transfer> copies;
        for (const std::unique_ptr<part> &other : parts_) {
            if (other.get() != &here) {
                copies.push_back(mpgpu::make_transfer(other->x.at(written).subspan(here.first, here.rows), made));
            }
        }
        if (to_host_.size() > 0) {
            copies.push_back(mpgpu::make_transfer(to_host_, made));
        }
        return copies;
    }

    void launch(const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
        part &p = *parts_[static_cast<std::size_t>(gpu)];
        const auto from = static_cast<std::size_t>(step % 2);
        const graph_part rows{p.offsets.data(), p.sources.data(), p.first, p.rows};
        if constexpr (std::is_same_v<Value, float>) {
            const float base = (1.0F - damping) / static_cast<float>(first_.size());
            machine_.code.rank(
                stream, gpu, {rows, p.x.at(from).data(), p.x.at(1 - from).data(), p.weight.data(), damping, base}, out);
        } else {
            machine_.code.shorten(stream, gpu,
                                  {rows, p.x.at(from).data(), p.x.at(1 - from).data(), p.changed.data(),
                                   static_cast<std::uint32_t>(step + 1)},
                                  out);
        }
    }

    void reset() {
        // Zeros: neighbours of what was not moved get ranks and distances that are too small.
        std::fill_n(seen_.data(), seen_.size(), Value{0});
        std::fill_n(changed_.data(), changed_.size(), 0U);
        for (const std::unique_ptr<part> &p : parts_) {
            copy_now(machine_, p->x[0], first_);
            copy_now(machine_, p->x[1], seen_);
            copy_now(machine_, p->changed, changed_.subspan(0, 1));
        }
        std::fill_n(to_host_.data(), to_host_.size(), Value{0});
    }

    bool has_ended(int step) {
        std::vector<mpgpu::transfer> copies;
        for (std::size_t gpu = 0; gpu < parts_.size(); ++gpu) {
            copies.push_back(mpgpu::make_transfer(changed_.subspan(gpu, 1), parts_[gpu]->changed));
        }
        const mpgpu::stream stream(machine_.ctx, mpgpu::device::gpu(0));
        mpgpu::plan(machine_.ctx, copies).execute(stream).synchronize();
        return std::none_of(changed_.data(), changed_.data() + changed_.size(),
                            [&](std::uint32_t last) { return last == static_cast<std::uint32_t>(step); });
    }

    std::size_t wrong() {
        const auto last = static_cast<std::size_t>(app_.steps % 2);
        std::size_t bad = 0;
        const auto compare = [&](const Value *found) {
            bad += count_wrong(expected_.size(), [&](std::size_t i) { return found[i] != expected_[i]; });
        };
        for (const std::unique_ptr<part> &p : parts_) {
            copy_now(machine_, seen_, p->x.at(last));
            compare(seen_.data());
        }
        if (to_host_.size() > 0) {
            compare(to_host_.data());
        }
        return bad;
    }

    const machine &machine_;
    mpgpu::buffer<Value> first_;
    mpgpu::buffer<Value> seen_;
    const std::vector<Value> &expected_;
    mpgpu::buffer<Value> to_host_;
    std::vector<std::unique_ptr<part>> parts_;
    mpgpu::buffer<std::uint32_t> changed_;
    application app_;
};

template <class Value>
int compare_on(const machine &m, const options &opt, const graph &g, const std::vector<Value> &first,
               const std::vector<Value> &expected, int steps, int check) {
    std::printf(
        "\n%s, %zu vertices, %zu edges over %d GPUs, %d steps, %zu bytes from each GPU to %s; bitwise equal to a "
        "CPU's\n",
        opt.program.c_str(), g.vertices(), g.sources.size(), m.gpus, steps,
        g.vertices() / static_cast<std::size_t>(m.gpus) * sizeof(Value),
        m.gpus > 1 ? "all others" : "host memory, as there is one");
    on_graph<Value> one(m, g, 1, false, first, expected, steps, check);
    on_graph<Value> all(m, g, m.gpus, m.gpus == 1, first, expected, steps, check);
    return compare(m, all.app(), &one.app(), opt);
}

} // namespace

int graphs(const machine &m, const options &opt) {
    const graph g = generate(opt.scale > 0 ? opt.scale : m.is_virtual() ? 11 : 23, opt.degree, opt.seed);
    if (opt.program == "pagerank") {
        const int steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 6 : 20;
        return compare_on(m, opt, g, ranks(g, damping, 0), ranks(g, damping, steps), steps, 0);
    }
    // From the vertex with most edges, so that most others are reached.
    const auto root =
        static_cast<std::uint32_t>(std::max_element(g.outgoing.begin(), g.outgoing.end()) - g.outgoing.begin());
    int sweeps = 0;
    const std::vector<std::uint32_t> expected = distances(g, root, sweeps);
    std::vector<std::uint32_t> first(g.vertices(), unreached);
    first[root] = 0;
    // The end is noticed at the next test.
    const int steps = (sweeps + opt.check - 1) / opt.check * opt.check;
    return compare_on(m, opt, g, first, expected, steps, opt.check);
}
