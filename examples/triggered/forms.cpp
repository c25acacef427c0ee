// SPDX-License-Identifier: MIT OR Apache-2.0
#include "forms.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

namespace {

const device_code &code_for(const mpgpu::context &ctx) {
#ifdef TRIGGERED_CUDA
    if (ctx.backend() != mpgpu::backend::host) {
        return on_gpus;
    }
#endif
    static_cast<void>(ctx);
    return on_virtual_devices;
}

mpgpu::context_options machine_of(const options &opt) {
    mpgpu::context_options result;
    result.topology = opt.topology;
#ifndef TRIGGERED_CUDA
    result.backend = mpgpu::backend::host; // the kernels are CPU code, which can access only memory of virtual devices
#endif
    return result;
}

constexpr int most_gpus = 4; // maximum unless the command line requests more

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

} // namespace

machine::machine(const options &opt) : ctx(machine_of(opt)), code(code_for(ctx)), node(ctx) {
    const int available = ctx.devices().gpus;
    gpus = opt.gpus > 0 ? opt.gpus : std::min(available, most_gpus);
    if (gpus > available) {
        throw std::invalid_argument("-gpus " + std::to_string(gpus) + ": this machine has " +
                                    std::to_string(available));
    }
    code.connect(gpus);
}

std::vector<form> all_forms(const options &opt) {
    using way = form::way;
    std::vector<form> forms{{way::alone, "kernels alone (the limit)"},
                            {way::told, "kernels that report ready partitions"},
                            {way::copies, "plain copies after the kernel"},
                            {way::plan, "plan after the kernel"}};
    const auto add = [&](mpgpu::agent mover, const std::string &name) {
        for (const std::uint32_t count : opt.partitions) {
            forms.push_back({way::agent,
                             name + (count > 0 ? ", " + std::to_string(count) + " partitions" : std::string()),
                             {count, mover}});
        }
    };
    add(mpgpu::agent::producer, "inline");
    add(mpgpu::agent::copy_engine, "copy engines");
    add(mpgpu::agent::automatic, "as the library chooses");
    if (!opt.tune.empty()) {
        forms.push_back({way::agent, "as tuned", {}, opt.tune});
    }
    return forms;
}

namespace {

/// Returns the fastest partitioning, which is determined by trials with the program's own kernel, or read from `file`.
mpgpu::partitioning tuned(const machine &m, const std::string &file, const std::vector<mpgpu::window> &windows,
                          const std::vector<mpgpu::node_transfer> &transfers, mpgpu::device where,
                          const mpgpu::plan_options &options, bool arrivals, const producer &launch) {
    mpgpu::partition_tuning trials;
    trials.agents = {mpgpu::agent::copy_engine, mpgpu::agent::producer};
    if (!arrivals) {
        trials.agents.push_back(mpgpu::agent::automatic);
    }
    trials.arrivals = arrivals;
    trials.file = file;
    const mpgpu::stream stream(m.ctx, where);
    mpgpu::event begin(m.ctx);
    mpgpu::event end(m.ctx);
    const auto produce = [&](mpgpu::array_view<const mp_trigger_t> triggers, mpgpu::stream_view step) {
        outputs out;
        out.count = static_cast<unsigned>(triggers.size());
        std::copy(triggers.begin(), triggers.end(), out.to.begin());
        begin.record(step);
        stream.wait(begin);
        launch(stream, out);
        end.record(stream);
        m.ctx.wait(step, end);
    };
    return m.node.tune_partitions(windows, transfers, produce, trials, options);
}

} // namespace

mover::mover(const machine &m, const form &way, const std::vector<mpgpu::transfer> &copies, std::uint32_t paths,
             bool arrivals, const producer &launch)
    : machine_(m) {
    if (copies.empty() || way.how == form::way::alone) {
        return;
    }
    mpgpu::plan_options plan_options;
    plan_options.max_paths = paths;
    if (way.how == form::way::copies) {
        copies_ = copies;
    } else if (way.how == form::way::plan) {
        plan_.emplace(m.ctx, copies, plan_options);
    } else {
        std::vector<mpgpu::window> windows;
        std::vector<mpgpu::node_transfer> transfers;
        for (const mpgpu::transfer &copy : copies) {
            const auto first = static_cast<std::uint32_t>(windows.size());
            // This window is only read, because the transfer uses it as its source.
            // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
            windows.push_back({const_cast<void *>(copy.src), copy.bytes});
            windows.push_back({copy.dst, copy.bytes});
            transfers.push_back({{0, first + 1, 0}, {0, first, 0}, copy.bytes});
        }
        mpgpu::partitioning how = way.partitions;
        if (!way.tuned.empty()) {
            const mpgpu::device where = mpgpu::device::from_id(copies[0].src_device);
            how = tuned(m, way.tuned, windows, transfers, where, plan_options, arrivals, launch);
        }
        how.arrivals = arrivals;
        how.stores = true; // the kernels can store their output themselves
        plan_.emplace(m.node.plan(windows, transfers, how, plan_options));
        is_armed_ = way.how != form::way::told;
        out_.count = static_cast<unsigned>(copies.size());
        for (std::size_t i = 0; i < copies.size(); ++i) {
            out_.to.at(i) = plan_->trigger(0, i);
        }
    }
}

void mover::arm(const mpgpu::stream &stream) const {
    if (is_armed_) {
        plan_->arm(stream);
    }
}

void mover::move(const mpgpu::stream &stream, int gpu) const {
    // In the form that only reports readiness, the plan exists only to provide triggers and is not executed.
    if (plan_ && (is_armed_ || out_.count == 0)) {
        plan_->enqueue(stream);
    }
    for (const mpgpu::transfer &copy : copies_) {
        machine_.code.copy(stream, gpu, copy);
    }
}

run::run(const machine &m, const application &app, form way) : app_(app), form_(std::move(way)) {
    int producers = 0;
    for (int gpu = 0; gpu < app.gpus; ++gpu) {
        producers += app.sends(gpu, 0).empty() ? 0 : 1;
    }
    // If several GPUs send at the same time, each transfer uses only the direct link, because independent plans would
    // compete for the bandwidth of host memory.
    const std::uint32_t paths = producers > 1 ? 1 : 0;
    std::vector<std::set<int>> senders(static_cast<std::size_t>(app.gpus));
    for (int gpu = 0; gpu < app.gpus; ++gpu) {
        const mpgpu::device where = mpgpu::device::gpu(gpu);
        parts_.push_back({mpgpu::stream(m.ctx, where), mpgpu::event(m.ctx), {}, {}});
        for (int parity = 0; parity < 2; ++parity) {
            const std::vector<mpgpu::transfer> copies = app.sends(gpu, parity);
            // The receivers wait for the end of a time step, not for single partitions.
            const auto launch = [&app, gpu, parity](const mpgpu::stream &stream, const outputs &out) {
                app.launch(stream, gpu, parity, out);
            };
            parts_.back().movers.emplace_back(m, form_, copies, paths, false, launch);
            for (const mpgpu::transfer &copy : copies) {
                if (copy.dst_device >= 0 && copy.dst_device < app.gpus) {
                    senders[static_cast<std::size_t>(copy.dst_device)].insert(gpu);
                }
            }
        }
        for (int other = 0; app.all_read && other < app.gpus; ++other) {
            if (other != gpu) {
                senders[static_cast<std::size_t>(gpu)].insert(other);
            }
        }
    }
    for (std::size_t gpu = 0; gpu < parts_.size(); ++gpu) {
        parts_[gpu].senders.assign(senders[gpu].begin(), senders[gpu].end());
    }
}

double run::seconds(double &enqueued) {
    app_.reset();
    const auto synchronize = [&] {
        for (const part &p : parts_) {
            p.stream.synchronize();
        }
    };
    const auto begin = std::chrono::steady_clock::now();
    double waited = 0;
    int step = 0;
    while (step < app_.steps) {
        const auto parity = static_cast<std::size_t>(step % 2);
        // All waits are enqueued before the first event of this time step is recorded, because they refer to the
        // previous time step.
        for (const part &p : parts_) {
            for (const int sender : p.senders) {
                if (step > 0) {
                    p.stream.wait(parts_[static_cast<std::size_t>(sender)].done);
                }
            }
        }
        for (int gpu = 0; gpu < app_.gpus; ++gpu) {
            const part &p = parts_[static_cast<std::size_t>(gpu)];
            p.movers[parity].arm(p.stream);
            app_.launch(p.stream, gpu, step, p.movers[parity].out());
        }
        for (int gpu = 0; gpu < app_.gpus; ++gpu) {
            part &p = parts_[static_cast<std::size_t>(gpu)];
            p.movers[parity].move(p.stream, gpu);
            p.done.record(p.stream);
        }
        ++step;
        if (app_.check > 0 && step % app_.check == 0) {
            const auto enqueued_so_far = std::chrono::steady_clock::now();
            synchronize();
            waited += seconds_since(enqueued_so_far);
            // The CPU's result determines after which number of time steps the computation must end.
            if (app_.has_ended(step) != (step == app_.steps) && moves()) {
                ended_wrong_ = true;
                break;
            }
        }
    }
    enqueued = (seconds_since(begin) - waited) / step;
    synchronize();
    return seconds_since(begin) / step;
}

shared_memory share_memory(const machine &m, std::size_t bytes) {
    return {m.code.share(bytes), m.code.release};
}

bool shares_memory(const machine &m) {
    return m.gpus > 1 && share_memory(m, 1);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void in_parallel(std::size_t count, const std::function<void(std::size_t first, std::size_t end)> &task) {
    const std::size_t parts = std::max(1U, std::min(std::thread::hardware_concurrency(), 32U));
    const std::size_t each = (count + parts - 1) / parts;
    std::vector<std::thread> threads;
    for (std::size_t first = 0; first < count; first += each) {
        threads.emplace_back(task, first, std::min(first + each, count));
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

std::size_t count_wrong(std::size_t count, const std::function<bool(std::size_t index)> &is_wrong) {
    std::atomic<std::size_t> wrong{0};
    in_parallel(count, [&](std::size_t first, std::size_t end) {
        std::size_t here = 0;
        for (std::size_t i = first; i < end; ++i) {
            here += is_wrong(i) ? 1 : 0;
        }
        wrong += here;
    });
    return wrong;
}

int compare(const machine &m, const application &app, const application *one, const options &opt,
            const application *unified) {
    std::vector<std::unique_ptr<run>> runs;
    if (one != nullptr) {
        runs.push_back(std::make_unique<run>(m, *one, form{form::way::alone, "one GPU"}));
    }
    for (const form &way : all_forms(opt)) {
        try {
            runs.push_back(std::make_unique<run>(m, app, way));
        } catch (const mpgpu::not_supported &error) {
            std::printf("%-38s not supported: %s\n", way.name.c_str(), error.what());
        }
    }
    if (unified != nullptr) {
        runs.push_back(std::make_unique<run>(m, *unified, form{form::way::alone, "unified memory, with hints"}));
    }
    const auto is_checked = [&](const run &each) {
        return each.moves() || &each.app() == one || &each.app() == unified;
    };
    std::vector<std::vector<double>> times(runs.size());
    std::vector<std::vector<double>> enqueued(runs.size());
    std::set<std::string> wrong;
    // The forms alternate, so that other load of the machine affects all of them equally.
    for (int round = 0; round <= opt.rounds; ++round) {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            double enqueuing = 0;
            const double took = runs[i]->seconds(enqueuing);
            if (round > 0) {
                times[i].push_back(took);
                enqueued[i].push_back(enqueuing);
            }
            if (runs[i]->ended_wrong()) {
                std::printf("%s, round %d: WRONG number of steps\n", runs[i]->name().c_str(), round);
                wrong.insert(runs[i]->name());
            }
            if (is_checked(*runs[i]) && (round == 0 || round == opt.rounds)) {
                const std::size_t bad = runs[i]->app().wrong();
                if (bad > 0) {
                    std::printf("%s, round %d: %zu elements are WRONG\n", runs[i]->name().c_str(), round, bad);
                    wrong.insert(runs[i]->name());
                }
            }
        }
    }
    const std::size_t first = one != nullptr ? 1 : 0;
    const double limit = median(times[first]);
    const double told = median(times[first + 1]);
    const double copies = median(times[first + 2]);
    const double plan = median(times[first + 3]);
    std::printf("%-38s %10s %21s %11s speed-up over\n%-38s %10s %21s %10s  %s%9s %9s %9s %9s\n", "", "us per", "",
                "us per step", m.is_virtual() ? "CPU threads, not GPUs" : "", "step", "minimum to maximum",
                "to enqueue", one != nullptr ? "  one GPU " : "", "copies", "plan", "limit",
                m.is_virtual() ? "" : "hidden");
    std::ofstream table;
    if (!opt.csv.empty()) {
        table.open(opt.csv, std::ios::app);
    }
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const double took = median(times[i]);
        const auto [least, most] = std::minmax_element(times[i].begin(), times[i].end());
        std::printf("%-38s %10.1f %10.1f %10.1f %10.1f  ", runs[i]->name().c_str(), took * 1e6, *least * 1e6,
                    *most * 1e6, median(enqueued[i]) * 1e6);
        if (one != nullptr) {
            std::printf("%9.3f ", median(times[0]) / took);
        }
        // Percentage of the plain copies' time that is hidden behind the kernel, relative to kernels that only report
        // readiness (PROACT, section V.C). On shared CPUs this value is noise.
        const double hidden = 100 * (1 - (took - told) / (copies - limit));
        const bool overlaps = !m.is_virtual() && runs[i]->moves() && i > first + 3 && copies > 1.01 * limit;
        std::printf("%9.3f %9.3f %9.3f", copies / took, plan / took, limit / took);
        if (overlaps) {
            std::printf(" %7.1f %%", hidden);
        }
        std::printf("%s\n", is_checked(*runs[i]) ? "" : "            not checked: no transfers");
        table << opt.program << ',' << app.gpus << ",\"" << runs[i]->name() << "\"," << took * 1e6 << ','
              << (one != nullptr ? median(times[0]) / took : 0) << ',' << copies / took << ',' << limit / took * 100
              << ',' << (overlaps ? std::to_string(hidden) : "") << '\n';
    }
    if (!opt.csv.empty() && !table.flush()) {
        throw std::invalid_argument("-csv " + opt.csv + ": cannot be written");
    }
    if (!m.is_virtual()) { // noise on shared CPUs
        std::printf("reporting ready partitions slows the kernels down by %.1f %%\n", (told / limit - 1) * 100);
    }
    std::printf("%s\n", wrong.empty() ? "all results are right" : "RESULTS ARE WRONG");
    return static_cast<int>(wrong.size());
}
