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

/// Method of moving the output of a kernel to its destination.
struct form {
    enum class way {
        alone,  ///< not moved: the limit in which transfers cost nothing; received data is wrong
        told,   ///< not moved, but the kernel reports what is ready: the cost of reporting
        copies, ///< plain copies after the kernel
        plan,   ///< a plan after the kernel
        agent   ///< in partitions, while the kernel runs
    };
    way how = way::alone;
    std::string name;
    mpgpu::partitioning partitions{}; ///< partitions and the agent that moves them
    std::string tuned{};              ///< file with the results of trials that determine the partitions
};

/// Function that enqueues the kernel whose output a mover moves.
using producer = std::function<void(const mpgpu::stream &stream, const outputs &out)>;

/// Returns the forms to compare: first the two without transfers, then the two with bulk transfers.
std::vector<form> all_forms(const options &opt);

/// Computation of GPUs in successive steps, with the transfers of each step.
struct application {
    int gpus = 1;
    int steps = 1; ///< back to back
    /// Returns the outputs and destinations of a GPU's kernel in a step of this parity.
    std::function<std::vector<mpgpu::transfer>(int gpu, int parity)> sends;
    /// Enqueues a GPU's kernel of a step. The `i`-th output belongs to the `i`-th transfer of `sends`.
    std::function<void(const mpgpu::stream &stream, int gpu, int step, const outputs &out)> launch;
    /// Sets all memory to its state before the first step, and memory of received data to wrong values.
    std::function<void()> reset;
    /// Returns the number of elements that differ from the CPU's result after `steps` steps.
    std::function<std::size_t()> wrong;
    /// True if each GPU reads the output of all others from the previous step without transfers.
    bool all_read = false;
    /// Number of steps between two tests for the end, at which the host waits; 0: no tests.
    int check = 0;
    /// Returns true if the previous step changed nothing.
    std::function<bool(int step)> has_ended;
};

/// Resources shared by all programs.
struct machine {
    mpgpu::context ctx;
    const device_code &code;
    mpgpu::node node;
    int gpus; ///< GPUs to use

    /// Throws `std::invalid_argument` if there are not enough GPUs.
    explicit machine(const options &opt);
    [[nodiscard]] bool is_virtual() const { return ctx.backend() == mpgpu::backend::host; }
};

/// Location of data that all GPUs use.
enum class placement {
    each,   ///< a copy on each GPU
    unified ///< one copy in unified memory, with hints; nothing is moved
};

using shared_memory = std::unique_ptr<void, void (*)(void *)>;
shared_memory share_memory(const machine &m, std::size_t bytes);

/// True if several GPUs can use unified memory concurrently.
bool shares_memory(const machine &m);

/// Moves the transfers of a step in one form.
class mover {
  public:
    /// `paths` is `mpgpu::plan_options::max_paths`, and `arrivals` that of `mpgpu::partitioning`. `launch` is used by
    /// forms that are tuned. Throws `mpgpu::not_supported`.
    mover(const machine &m, const form &way, const std::vector<mpgpu::transfer> &copies, std::uint32_t paths,
          bool arrivals, const producer &launch);
    /// Called before the kernel, in its stream.
    void arm(const mpgpu::stream &stream) const;
    /// Called after the kernel.
    void move(const mpgpu::stream &stream, int gpu) const;
    /// Returns the argument for the kernel.
    [[nodiscard]] const outputs &out() const { return out_; }

  private:
    const machine &machine_;
    std::vector<mpgpu::transfer> copies_; ///< copies for plain calls
    std::optional<mpgpu::plan> plan_;
    bool is_armed_ = false; ///< armed before each step
    outputs out_;
};

/// Application in one form.
class run {
  public:
    run(const machine &m, const application &app, form way);
    /// Returns the seconds per step, averaged over all steps back to back. `enqueued` receives the part in which the
    /// host enqueues.
    double seconds(double &enqueued);
    [[nodiscard]] const std::string &name() const { return form_.name; }
    [[nodiscard]] bool moves() const { return form_.how != form::way::alone && form_.how != form::way::told; }
    /// True if it ended after a different number of steps than on the CPU.
    [[nodiscard]] bool ended_wrong() const { return ended_wrong_; }
    [[nodiscard]] const application &app() const { return app_; }

  private:
    struct part {
        mpgpu::stream stream;
        mpgpu::event done;         ///< end of the last step
        std::vector<mover> movers; ///< for both parities
        std::vector<int> senders;  ///< GPUs that send to this one
    };
    const application &app_;
    form form_;
    std::vector<part> parts_;
    bool ended_wrong_ = false;
};

/// Runs all forms of an application in turns and prints a table: medians, spread, speed-up compared with `one` (the
/// application on one GPU, if known) and with bulk transfers, fraction of the limit, and hidden share of the copy time.
/// `unified` is the application in unified memory, if available. Verifies every form before the first round and after
/// the last. Returns the number of forms with a wrong result.
int compare(const machine &m, const application &app, const application *one, const options &opt,
            const application *unified = nullptr);

double median(std::vector<double> values);

/// Calls `task(first, end)` for parts of `count` elements on several threads, and waits for all.
void in_parallel(std::size_t count, const std::function<void(std::size_t first, std::size_t end)> &task);

/// Returns how many of `count` elements are wrong.
std::size_t count_wrong(std::size_t count, const std::function<bool(std::size_t index)> &is_wrong);

/// Copies and waits.
template <class Dst, class Src> void copy_now(const machine &m, Dst &&dst, Src &&src) {
    const mpgpu::plan plan(m.ctx, {mpgpu::make_transfer(dst, src)});
    const mpgpu::stream stream(m.ctx, mpgpu::device::gpu(0));
    plan.execute(stream).synchronize();
}

/// The programs. Each returns the number of wrong results.
int microbenchmark(const machine &m, const options &opt);
int jacobi(const machine &m, const options &opt);
int banded(const machine &m, const options &opt);
int graphs(const machine &m, const options &opt);
int stores(const machine &m, const options &opt);
int pipeline(const machine &m, const options &opt);

#endif // MPGPU_EXAMPLES_TRIGGERED_FORMS_HPP
