// SPDX-License-Identifier: MIT OR Apache-2.0
// Vector that is replicated on all GPUs. In each time step, each GPU computes a part of the vector and sends it to all
// others. There are two such vectors: a time step reads one and writes the other.
#ifndef MPGPU_EXAMPLES_TRIGGERED_REPLICATED_HPP
#define MPGPU_EXAMPLES_TRIGGERED_REPLICATED_HPP

#include "forms.hpp"

#include <algorithm>
#include <array>
#include <memory>

/// Range of elements that one GPU computes.
struct share {
    std::size_t first;
    std::size_t count;
};

/// Kernels of all GPUs with their data, which are the same in each time step.
template <class Value> struct on_devices {
    /// Enqueues the kernel of a GPU for a time step, which reads `x` and computes the GPU's share of `x_new`.
    std::function<void(const mpgpu::stream &stream, int gpu, const Value *x, Value *x_new, int step,
                       const outputs &out)>
        launch;
    std::function<void()> reset;             ///< called before the first time step; may be empty
    std::function<bool(int step)> has_ended; ///< see `application::has_ended`; may be empty
};

template <class Value> struct problem {
    std::vector<Value> first;                ///< values before the first time step
    std::array<std::vector<Value>, 2> after; ///< CPU results of the last time step, and of the one before if needed
    int steps = 1;
    int check = 0; ///< see `application::check`
    /// Copies to the GPUs the data that they need, according to `shares`, and returns their kernels.
    std::function<on_devices<Value>(const std::vector<share> &shares)> prepare;
};

template <class Value> class replicated {
  public:
    /// Divides the vector among `gpus` GPUs. If `to_host` is true, the only GPU sends its output to host memory instead
    /// of another GPU.
    replicated(const machine &m, const problem<Value> &task, int gpus, bool to_host, placement where = placement::each)
        : machine_(m), task_(task), unified_(where == placement::unified), count_(task.first.size()),
          first_(m.ctx, mpgpu::device::host(), count_), seen_(m.ctx, mpgpu::device::host(), count_) {
        std::copy(task.first.begin(), task.first.end(), first_.data());
        if (to_host) {
            to_host_ = mpgpu::buffer<Value>(m.ctx, mpgpu::device::host(), count_);
        }
        for (int gpu = 0; gpu < gpus; ++gpu) {
            const auto [index, all] = std::pair(static_cast<std::size_t>(gpu), static_cast<std::size_t>(gpus));
            const std::size_t begin = count_ * index / all;
            shares_.push_back({begin, count_ * (index + 1) / all - begin});
        }
        for (auto &x : x_) {
            if (unified_) {
                shared_.push_back(share_memory(m, count_ * sizeof(Value)));
                x.assign(shares_.size(), static_cast<Value *>(shared_.back().get()));
                continue;
            }
            for (int gpu = 0; gpu < gpus; ++gpu) {
                own_.emplace_back(m.ctx, mpgpu::device::gpu(gpu), count_);
                x.push_back(own_.back().data());
            }
        }
        work_ = task.prepare(shares_);
        app_.gpus = gpus;
        app_.steps = task.steps;
        app_.all_read = unified_;
        app_.sends = [this](int gpu, int parity) { return sends(gpu, parity); };
        app_.launch = [this](const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
            const auto [index, from] = std::pair(static_cast<std::size_t>(gpu), static_cast<std::size_t>(step % 2));
            work_.launch(stream, gpu, x_.at(from)[index], x_.at(1 - from)[index], step, out);
        };
        app_.reset = [this] { reset(); };
        app_.wrong = [this] { return wrong(); };
        app_.check = task.check;
        app_.has_ended = work_.has_ended;
    }

    [[nodiscard]] const application &app() const { return app_; }

  private:
    /// Returns the whole vector on one GPU.
    mpgpu::device_span<Value> whole(std::size_t parity, std::size_t gpu) {
        return own_[parity * shares_.size() + gpu].subspan(0, count_);
    }

    std::vector<mpgpu::transfer> sends(int gpu, int parity) {
        std::vector<mpgpu::transfer> copies;
        if (unified_) {
            return copies;
        }
        const auto [here, written] = std::pair(static_cast<std::size_t>(gpu), static_cast<std::size_t>(1 - parity));
        const auto [first, count] = shares_[here];
        const auto made = whole(written, here).subspan(first, count);
        for (std::size_t other = 0; other < shares_.size(); ++other) {
            if (other != here) {
                copies.push_back(mpgpu::make_transfer(whole(written, other).subspan(first, count), made));
            }
        }
        if (to_host_.size() > 0) {
            copies.push_back(mpgpu::make_transfer(to_host_, made));
        }
        return copies;
    }

    void reset() {
        // The vector is filled with zeros, so that the result is wrong if data was not copied.
        std::fill_n(seen_.data(), count_, Value{});
        std::fill_n(to_host_.data(), to_host_.size(), Value{});
        if (unified_) {
            std::copy_n(first_.data(), count_, x_[0][0]);
            std::copy_n(seen_.data(), count_, x_[1][0]);
            for (const auto &x : x_) {
                for (std::size_t gpu = 0; gpu < shares_.size(); ++gpu) {
                    machine_.code.place(x[gpu] + shares_[gpu].first, shares_[gpu].count * sizeof(Value),
                                        static_cast<int>(gpu), app_.gpus);
                }
            }
        } else {
            for (std::size_t gpu = 0; gpu < shares_.size(); ++gpu) {
                copy_now(machine_, whole(0, gpu), first_);
                copy_now(machine_, whole(1, gpu), seen_);
            }
        }
        if (work_.reset) {
            work_.reset();
        }
    }

    /// Compares the vector of the last time step on each GPU, and that of the previous time step if the program
    /// requires it. Returns the number of wrong elements.
    std::size_t wrong() {
        std::size_t bad = 0;
        const auto compare = [&](const Value *found, const std::vector<Value> &expected) {
            bad += count_wrong(expected.size(), [&](std::size_t i) { return !(found[i] == expected[i]); });
        };
        for (std::size_t back = 0; back < 2; ++back) {
            const std::vector<Value> &expected = task_.after.at(back);
            if (expected.empty()) {
                continue;
            }
            const std::size_t parity = (static_cast<std::size_t>(app_.steps) + back) % 2;
            if (unified_) {
                compare(x_.at(parity)[0], expected);
                continue;
            }
            for (std::size_t gpu = 0; gpu < shares_.size(); ++gpu) {
                copy_now(machine_, seen_, whole(parity, gpu));
                compare(seen_.data(), expected);
            }
        }
        if (to_host_.size() > 0) {
            compare(to_host_.data(), task_.after[0]);
        }
        return bad;
    }

    const machine &machine_;
    const problem<Value> &task_;
    bool unified_;
    std::size_t count_;
    mpgpu::buffer<Value> first_;
    mpgpu::buffer<Value> seen_;
    mpgpu::buffer<Value> to_host_;
    std::vector<share> shares_;
    std::vector<mpgpu::buffer<Value>> own_; ///< vectors of all GPUs; even time steps read the first half
    std::vector<shared_memory> shared_;
    std::array<std::vector<Value *>, 2> x_; ///< addresses of the two vectors of each GPU, which alternate
    on_devices<Value> work_;
    application app_;
};

/// Compares all forms on several GPUs with one GPU, and with unified memory.
template <class Value> int compare_all(const machine &m, const problem<Value> &task, const options &opt) {
    const replicated<Value> one(m, task, 1, false);
    const replicated<Value> all(m, task, m.gpus, m.gpus == 1);
    if (!shares_memory(m)) {
        return compare(m, all.app(), &one.app(), opt);
    }
    const replicated<Value> unified(m, task, m.gpus, false, placement::unified);
    return compare(m, all.app(), &one.app(), opt, &unified.app());
}

/// Allocates memory on a GPU, copies `count` elements into it, and returns it.
template <class T> mpgpu::buffer<T> on_gpu(const machine &m, mpgpu::device where, const T *first, std::size_t count) {
    mpgpu::buffer<T> here(m.ctx, mpgpu::device::host(), std::max<std::size_t>(1, count));
    mpgpu::buffer<T> there(m.ctx, where, here.size());
    std::copy_n(first, count, here.data());
    copy_now(m, there, here);
    return there;
}

#endif // MPGPU_EXAMPLES_TRIGGERED_REPLICATED_HPP
