// SPDX-License-Identifier: MIT OR Apache-2.0
#include "cycles.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <numeric>
#include <stdexcept>

namespace halo = mpgpu::halo;

namespace {

using seconds = std::chrono::duration<double>;
using steady = std::chrono::steady_clock;

/// Number of cycles at the start in which resources are created, and which are not timed. Their cells are verified too.
constexpr int warm_up = 2;

mesh mesh_of(const halo::grid &g, int rank) {
    const halo::box own = halo::box_of(g, rank);
    mesh m{};
    for (std::size_t d = 0; d < 3; ++d) {
        m.cells[d] = g.cells.at(d);
        m.first[d] = own.first.at(d);
        m.own[d] = own.cells.at(d);
        m.ghost[d] = g.ghost.at(d);
        m.periodic[d] = g.periodic.at(d);
    }
    return m;
}

/// Work of all ranks of this process in one exchange method. Each rank has its own stream.
class work {
  public:
    work(const mpgpu::context &ctx, const std::vector<mpgpu::stream> &streams, std::vector<part> &parts)
        : ctx_(ctx), streams_(streams), parts_(parts) {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            done_.emplace_back(ctx);
        }
    }

    void set(int cycle) {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            part &p = parts_[i];
            for (std::size_t v = 0; v < p.vars.size(); ++v) {
                p.cells_by->set(streams_[i], of(p, v, cycle));
            }
        }
        synchronize();
    }

    /// Compares all cells with the expected values. Throws `std::runtime_error` if a cell is wrong.
    void compare(const std::string &name, int cycle) {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            part &p = parts_[i];
            const bool on_device = p.cells_by == p.code;
            if (on_device) {
                p.reset.enqueue(streams_[i]);
            }
            for (std::size_t v = 0; v < p.vars.size(); ++v) {
                unsigned long long *const wrong = on_device ? p.wrong.data() : p.wrong_on_host.data();
                p.cells_by->compare(streams_[i], of(p, v, cycle), wrong + v);
            }
            if (on_device) {
                p.fetch.enqueue(streams_[i]);
            }
        }
        synchronize();
        for (part &p : parts_) {
            for (std::size_t v = 0; v < p.vars.size(); ++v) {
                if (p.wrong_on_host.data()[v] != none_wrong) {
                    throw std::runtime_error(name + ": " + say(p, v, cycle, p.wrong_on_host.data()[v]));
                }
            }
        }
    }

    /// Starts an exchange in the first stream, after the earlier work of all streams.
    void start(exchange &by) {
        join();
        by.start(streams_[0]);
    }
    void finish(exchange &by) {
        for (const mpgpu::stream &stream : streams_) {
            by.finish(stream);
        }
    }
    void run(exchange &by) {
        join();
        by.run(streams_[0]);
        for (std::size_t i = 1; i < parts_.size(); ++i) {
            by.finish(streams_[i]);
        }
    }

    void synchronize() const {
        for (const mpgpu::stream &stream : streams_) {
            stream.synchronize();
        }
    }

  private:
    void join() {
        for (std::size_t i = 1; i < parts_.size(); ++i) {
            done_[i].record(streams_[i]);
            streams_[0].wait(done_[i]);
        }
    }

    static variable of(part &p, std::size_t v, int cycle) {
        return {p.cells, p.vars[v].get(), p.where.id(), static_cast<int>(v), cycle};
    }

    std::string say(part &p, std::size_t v, int cycle, unsigned long long element) const {
        double *const found = p.vars[v].get() + element;
        mpgpu::buffer<double> is(ctx_, mpgpu::device::host(), 1);
        if (p.in == space::device) {
            const mpgpu::device_span<double> there({found, 1}, p.where);
            mpgpu::plan(ctx_, {mpgpu::make_transfer(is, there)}).execute(streams_[0]).synchronize();
        } else {
            *is.data() = *found;
        }
        const auto at = static_cast<std::int64_t>(element);
        const cell c = cell_of(p.cells, at);
        return "cycle " + std::to_string(cycle) + ", rank " + std::to_string(p.rank) + ", variable " +
               std::to_string(v) + ", cell " + std::to_string(c.at[0]) + "_" + std::to_string(c.at[1]) + "_" +
               std::to_string(c.at[2]) + ": is " + std::to_string(*is.data()) + ", must be " +
               std::to_string(value_after(p.cells, at, static_cast<int>(v), cycle));
    }

    const mpgpu::context &ctx_;
    const std::vector<mpgpu::stream> &streams_;
    std::vector<part> &parts_;
    std::vector<mpgpu::event> done_;
};

/// Runs one cycle and adds the time of each phase to the results. The host waits between phases only to time them.
void run_cycle(work &all, exchange &by, int cycle, const std::function<void()> &align, timings *measured) {
    std::array<steady::time_point, 7> at{};
    at[0] = steady::now();
    all.set(cycle);
    at[1] = steady::now();
    align();
    at[2] = steady::now();
    all.start(by);
    at[3] = steady::now();
    all.finish(by);
    at[4] = steady::now();
    all.synchronize();
    at[5] = steady::now();
    all.compare(by.name(), cycle);
    at[6] = steady::now();
    if (measured != nullptr) {
        const auto between = [&](std::size_t from, std::size_t to) { return seconds(at.at(to) - at.at(from)).count(); };
        const std::array<double, timings::names.size()> phases = {between(0, 1), between(2, 3), between(3, 4),
                                                                  between(4, 5), between(2, 5), between(5, 6)};
        for (std::size_t i = 0; i < phases.size(); ++i) {
            measured->seconds.at(i).push_back(phases.at(i));
        }
    }
}

} // namespace

std::vector<halo::grid> grids_of(const options &opt, int ranks) {
    halo::grid g;
    for (std::size_t d = 0; d < 3; ++d) {
        g.cells.at(d) = opt.mesh.at(d);
        g.periodic.at(d) = opt.periodic.at(d) != 0;
        g.ghost.at(d) = opt.ghost.at(d);
    }
    g.ranks = opt.divide[0] != 0 ? opt.divide : std::array<int, 3>{1, 1, ranks};
    std::vector<halo::grid> grids;
    for (const int each : opt.each) {
        for (std::size_t d = 0; d < 3; ++d) {
            g.cells.at(d) = std::int64_t{each} * g.ranks.at(d);
        }
        grids.push_back(g);
    }
    return grids.empty() ? std::vector<halo::grid>{g} : grids;
}

mpgpu::context open_machine(const options &opt) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
#ifndef HALO3D_CUDA
    // The cells are set and compared by CPU code, which can access only memory of virtual devices.
    machine.backend = mpgpu::backend::host;
#endif
    return mpgpu::context(machine);
}

part::part(const mpgpu::context &ctx, const halo::grid &g, int number, int device, int count, space memory)
    : rank(number), where(mpgpu::device::gpu(device)), in(memory), cells(mesh_of(g, number)),
      wrong(ctx, where, static_cast<std::size_t>(count)),
      wrong_on_host(ctx, mpgpu::device::host(), 2 * static_cast<std::size_t>(count)),
      reset(ctx, {mpgpu::make_transfer(wrong, wrong_on_host.subspan(static_cast<std::size_t>(count), wrong.size()))}),
      fetch(ctx, {mpgpu::make_transfer(wrong_on_host.subspan(0, wrong.size()), wrong)}) {
    code = &code_for(wrong.data());
    cells_by = in == space::pageable && !code->reaches_pageable(device) ? &on_virtual_devices : code;
    std::fill_n(wrong_on_host.data(), wrong_on_host.size(), none_wrong); // second half: reset value
    for (int v = 0; v < count; ++v) {
        const auto bytes = static_cast<std::size_t>(element_count(cells)) * sizeof(double);
        const std::shared_ptr<std::byte> made = allocate(ctx, in, *code, where, bytes);
        vars.emplace_back(made, reinterpret_cast<double *>(made.get()));
    }
}

halo::rank_arrays part::arrays() const {
    halo::rank_arrays all;
    for (const std::shared_ptr<double> &var : vars) {
        const auto elements = static_cast<std::size_t>(element_count(cells));
        all.push_back(halo::array_of(mpgpu::device_span<double>({var.get(), elements}, where)));
    }
    return all;
}

std::vector<timings> run_cycles(const options &opt, const mpgpu::context &ctx,
                                const std::vector<mpgpu::stream> &streams, const std::vector<contender> &contenders,
                                const std::function<void()> &align) {
    std::deque<work> works;
    for (const contender &one : contenders) {
        works.emplace_back(ctx, streams, *one.parts);
    }
    std::vector<timings> measured(contenders.size());
    int number = 0; // each cycle has other values, so that stale values are detected
    for (int cycle = 0; cycle < warm_up + opt.cycles; ++cycle) {
        for (std::size_t i = 0; i < contenders.size(); ++i) {
            run_cycle(works[i], *contenders[i].by, number++, align, cycle < warm_up ? nullptr : &measured[i]);
        }
    }
    for (std::size_t i = 0; i < contenders.size(); ++i) {
        work &all = works[i];
        all.set(number);
        align();
        const steady::time_point begin = steady::now();
        for (int cycle = 0; cycle < opt.cycles; ++cycle) {
            all.run(*contenders[i].by);
        }
        measured[i].enqueue = seconds(steady::now() - begin).count() / opt.cycles;
        all.synchronize();
        measured[i].in_a_row = seconds(steady::now() - begin).count() / opt.cycles;
        all.compare(contenders[i].by->name(), number++);
    }
    return measured;
}

void print_problem(const options &opt, const halo::grid &g, const part &first, int devices) {
    std::printf("Num vars %d, cycles %d\n", opt.vars, opt.cycles);
    std::printf("Num cells %lld %lld %lld\n", static_cast<long long>(g.cells[0]), static_cast<long long>(g.cells[1]),
                static_cast<long long>(g.cells[2]));
    std::printf("Divisions %d %d %d, periodic %d %d %d, ghost widths %lld %lld %lld\n", g.ranks[0], g.ranks[1],
                g.ranks[2], g.periodic[0] ? 1 : 0, g.periodic[1] ? 1 : 0, g.periodic[2] ? 1 : 0,
                static_cast<long long>(g.ghost[0]), static_cast<long long>(g.ghost[1]),
                static_cast<long long>(g.ghost[2]));
    if (first.code == &on_virtual_devices) {
        std::printf("%d ranks on %d virtual devices: times are of CPU threads, not of GPUs\n", halo::rank_count(g),
                    devices);
    } else {
        std::printf("%d ranks on %d GPUs\n", halo::rank_count(g), std::min(devices, halo::rank_count(g)));
    }
}

void print_phases(const std::string &name, const timings &measured) {
    std::printf("Exchange by %s\n", name.c_str());
    for (std::size_t i = 0; i < timings::names.size(); ++i) {
        const std::vector<double> &all = measured.seconds.at(i);
        const auto [least, greatest] = std::minmax_element(all.begin(), all.end());
        std::printf("%-10s num %zu avg %.9f s min %.9f s max %.9f s median %.9f s\n", timings::names.at(i), all.size(),
                    std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size()), *least, *greatest,
                    median(all));
    }
    const std::size_t cycles = measured.seconds[timings::comm].size();
    std::printf("%-10s num %zu avg %.9f s\n", "back to back", cycles, measured.in_a_row);
    std::printf("%-10s num %zu avg %.9f s\n", "enqueue", cycles, measured.enqueue);
}

void print_plan(const halo::plan &plan) {
    std::fputs(plan.describe().c_str(), stdout);
    if (plan.transfers() != nullptr) {
        const std::string text = plan.transfers()->describe();
        std::printf("%s\n", text.substr(0, text.find('\n')).c_str());
    }
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}
