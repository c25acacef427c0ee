// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_FORMS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_FORMS_HPP

#include "options.hpp"
#include "outputs.hpp"
#include "work.hpp"

#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// How what a kernel makes gets to where it is needed.
struct form {
    enum class way {
        alone,  ///< not at all: the limit in which transfers cost nothing, and what is received is wrong
        told,   ///< not at all, though the kernel says what is ready: what that costs
        copies, ///< by plain copies after the kernel
        plan,   ///< by a plan after the kernel
        agent   ///< in partitions, while the kernel runs
    };
    way how = way::alone;
    std::string name;
    mpgpu::partitioning partitions{}; ///< and who moves them
    std::string tuned{};              ///< file in which trials are kept that say so
};

/// Enqueues the kernel that makes what a mover moves.
using producer = std::function<void(const mpgpu::stream &stream, const outputs &out)>;

/// The forms that this example compares: the two in which nothing moves first, then the two in bulk.
std::vector<form> all_forms(const options &opt);

/// What GPUs compute in a row of steps, and move in each.
struct application {
    int gpus = 1;
    int steps = 1; ///< in a row
    /// What a GPU's kernel makes in a step of this parity, and where it goes.
    std::function<std::vector<mpgpu::transfer>(int gpu, int parity)> sends;
    /// Enqueues a GPU's kernel of a step. The `i`-th output is the `i`-th transfer of `sends`.
    std::function<void(const mpgpu::stream &stream, int gpu, int step, const outputs &out)> launch;
    /// Sets all memory to what it is before the first step, and what is received to what is wrong.
    std::function<void()> reset;
    /// After `steps` steps: how many elements are not what a CPU makes of them.
    std::function<std::size_t()> wrong;
    /// Whether each GPU reads what all others have made in the step before, where nothing is sent.
    bool all_read = false;
    /// Steps between two tests for the end, at which the host waits; 0: never.
    int check = 0;
    /// Whether the step before has changed nothing.
    std::function<bool(int step)> has_ended;
};

/// What all programs need.
struct machine {
    mpgpu::context ctx;
    const device_code &code;
    mpgpu::node node;
    int gpus; ///< to use

    /// Throws `std::invalid_argument` where there are not so many GPUs.
    explicit machine(const options &opt);
    [[nodiscard]] bool is_virtual() const { return ctx.backend() == mpgpu::backend::host; }
};

/// Where what all GPUs use lies.
enum class placement {
    each,   ///< each GPU has its own
    unified ///< all have one in unified memory, with hints, and nothing is moved
};

using shared_memory = std::unique_ptr<void, void (*)(void *)>;
shared_memory share_memory(const machine &m, std::size_t bytes);

/// Whether there are several GPUs that use unified memory at once.
bool shares_memory(const machine &m);

/// Makes copies move in a form.
class mover {
  public:
    /// `paths` as in `mpgpu::plan_options::max_paths`, `arrivals` as in `mpgpu::partitioning`. `launch` is for a form
    /// that is tuned. Throws `mpgpu::not_supported`.
    mover(const machine &m, const form &way, const std::vector<mpgpu::transfer> &copies, std::uint32_t paths,
          bool arrivals, const producer &launch);
    /// Before the kernel, in its stream.
    void arm(const mpgpu::stream &stream) const;
    /// After it.
    void move(const mpgpu::stream &stream, int gpu) const;
    /// For the kernel.
    [[nodiscard]] const outputs &out() const { return out_; }

  private:
    const machine &machine_;
    std::vector<mpgpu::transfer> copies_; ///< that plain copies make
    std::optional<mpgpu::plan> plan_;
    bool is_armed_ = false; ///< before each step
    outputs out_;
};

/// An application in one form.
class run {
  public:
    run(const machine &m, const application &app, form way);
    /// Seconds of a step: of all in a row, over their number. `enqueued` is the part in which the host enqueues.
    double seconds(double &enqueued);
    [[nodiscard]] const std::string &name() const { return form_.name; }
    [[nodiscard]] bool moves() const { return form_.how != form::way::alone && form_.how != form::way::told; }
    /// Whether it has ended after another number of steps than a CPU.
    [[nodiscard]] bool ended_wrong() const { return ended_wrong_; }
    [[nodiscard]] const application &app() const { return app_; }

  private:
    struct part {
        mpgpu::stream stream;
        mpgpu::event done;         ///< the last step
        std::vector<mover> movers; ///< for both parities
        std::vector<int> senders;  ///< GPUs that send to this one
    };
    const application &app_;
    form form_;
    std::vector<part> parts_;
    bool ended_wrong_ = false;
};

/// Runs all forms of an application by turns, and prints a table: medians, spread, speed-up against `one` (the same on
/// one GPU, if that is known), against bulk, fraction of the limit, and how much of the time of the copies is hidden.
/// `unified` is the same in unified memory, if there is one. Checks every form before the first round and after the
/// last. Returns how many forms had a wrong result.
int compare(const machine &m, const application &app, const application *one, const options &opt,
            const application *unified = nullptr);

double median(std::vector<double> values);

/// Calls `task(first, end)` for parts of `count` elements on several threads, and waits.
void in_parallel(std::size_t count, const std::function<void(std::size_t first, std::size_t end)> &task);

/// How many of `count` elements are wrong.
std::size_t count_wrong(std::size_t count, const std::function<bool(std::size_t index)> &is_wrong);

/// Copies, and waits.
template <class Dst, class Src> void copy_now(const machine &m, Dst &&dst, Src &&src) {
    const mpgpu::plan plan(m.ctx, {mpgpu::make_transfer(dst, src)});
    const mpgpu::stream stream(m.ctx, mpgpu::device::gpu(0));
    plan.execute(stream).synchronize();
}

/// The programs: each returns how many results were wrong.
int microbenchmark(const machine &m, const options &opt);
int jacobi(const machine &m, const options &opt);
int banded(const machine &m, const options &opt);
int graphs(const machine &m, const options &opt);
int stores(const machine &m, const options &opt);
int pipeline(const machine &m, const options &opt);

#endif // MPGPU_EXAMPLES_TRIGGERED_FORMS_HPP
