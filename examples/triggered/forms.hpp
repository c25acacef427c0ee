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

/// Method of moving a kernel's output to its destinations.
struct form {
    enum class way {
        alone,  ///< no copies, so received data is wrong: the limit in which transfers cost nothing
        told,   ///< no copies, but the kernel reports what is ready: shows the cost of reporting
        copies, ///< plain copies after the kernel
        plan,   ///< mpgpu plan after the kernel
        agent   ///< copies in partitions while the kernel runs
    };
    way how = way::alone;
    std::string name;
    mpgpu::partitioning partitions{}; ///< partitions and the agent that moves them
    std::string tuned{};              ///< file with results of trials that determine the partitions
};

/// Function that enqueues the kernel whose output must be moved.
using producer = std::function<void(const mpgpu::stream &stream, const outputs &out)>;

/// Returns the forms to compare. The first two copy nothing, the next two copy the whole output after the kernel, and
/// the others copy it in partitions.
std::vector<form> all_forms(const options &opt);

/// Computation on several GPUs in time steps, with the transfers of each time step.
struct application {
    int gpus = 1;
    int steps = 1; ///< number of time steps, which run back to back
    /// Returns the transfers of a GPU's output in time steps with this parity.
    std::function<std::vector<mpgpu::transfer>(int gpu, int parity)> sends;
    /// Enqueues the kernel of a GPU for a time step. The `i`-th entry of `out` belongs to the `i`-th transfer of
    /// `sends`.
    std::function<void(const mpgpu::stream &stream, int gpu, int step, const outputs &out)> launch;
    /// Sets all memory to its state before the first time step, and overwrites memory for received data with wrong
    /// values.
    std::function<void()> reset;
    /// Returns the number of elements that differ from the CPU's result after `steps` time steps.
    std::function<std::size_t()> wrong;
    /// True if each GPU reads the output of all others from the previous time step directly, without transfers.
    bool all_read = false;
    /// Number of time steps between two tests for the end, for which the host waits; 0 if there are no tests.
    int check = 0;
    /// Returns true if the previous time step changed nothing, so that the computation has ended.
    std::function<bool(int step)> has_ended;
};

/// Context, node and device operations that all programs use.
struct machine {
    mpgpu::context ctx;
    const device_code &code;
    mpgpu::node node;
    int gpus; ///< number of GPUs to use

    /// Throws `std::invalid_argument` if the machine has too few GPUs.
    explicit machine(const options &opt);
    [[nodiscard]] bool is_virtual() const { return ctx.backend() == mpgpu::backend::host; }
};

/// Location of data that all GPUs read.
enum class placement {
    each,   ///< a copy on each GPU
    unified ///< one copy in unified memory, with hints; no transfers
};

using shared_memory = std::unique_ptr<void, void (*)(void *)>;
shared_memory share_memory(const machine &m, std::size_t bytes);

/// True if several GPUs can access unified memory at the same time.
bool shares_memory(const machine &m);

/// Moves the output of one kernel by the transfers of a time step, in one form.
class mover {
  public:
    /// Prepares the transfers. `paths` is used as `mpgpu::plan_options::max_paths`, and `arrivals` as
    /// `mpgpu::partitioning::arrivals`. `launch` enqueues the kernel for trials in forms that are tuned. Throws
    /// `mpgpu::not_supported` if the form is not supported.
    mover(const machine &m, const form &way, const std::vector<mpgpu::transfer> &copies, std::uint32_t paths,
          bool arrivals, const producer &launch);
    /// Prepares the transfers for the next time step. Must be called before the kernel, in the same stream.
    void arm(const mpgpu::stream &stream) const;
    /// Completes the transfers of the time step. Must be called after the kernel, in the same stream.
    void move(const mpgpu::stream &stream, int gpu) const;
    /// Returns the argument that the kernel needs to report or store its output.
    [[nodiscard]] const outputs &out() const { return out_; }

  private:
    const machine &machine_;
    std::vector<mpgpu::transfer> copies_; ///< transfers that are made by plain copies
    std::optional<mpgpu::plan> plan_;
    bool is_armed_ = false; ///< true if the plan is armed before each time step
    outputs out_;
};

/// Application with all resources to run it in one form.
class run {
  public:
    run(const machine &m, const application &app, form way);
    /// Runs all time steps back to back and returns the mean time of one in seconds. `enqueued` receives the part of
    /// this time in which the host enqueues work.
    double seconds(double &enqueued);
    [[nodiscard]] const std::string &name() const { return form_.name; }
    [[nodiscard]] bool moves() const { return form_.how != form::way::alone && form_.how != form::way::told; }
    /// True if the last run ended after a different number of time steps than on the CPU.
    [[nodiscard]] bool ended_wrong() const { return ended_wrong_; }
    [[nodiscard]] const application &app() const { return app_; }

  private:
    struct part {
        mpgpu::stream stream;
        mpgpu::event done;         ///< end of the last time step
        std::vector<mover> movers; ///< one for even and one for odd time steps
        std::vector<int> senders;  ///< GPUs that send to this one
    };
    const application &app_;
    form form_;
    std::vector<part> parts_;
    bool ended_wrong_ = false;
};

/// Runs an application in all forms, which alternate, and prints a table. The table has medians, spread, speed-up
/// compared with `one` (the application on one GPU, null if unknown) and with bulk transfers, fraction of the limit,
/// and the part of the copy time that is hidden. `unified` is the application in unified memory, if available. Verifies
/// every form before the first round and after the last. Returns the number of forms with a wrong result.
int compare(const machine &m, const application &app, const application *one, const options &opt,
            const application *unified = nullptr);

double median(std::vector<double> values);

/// Divides `count` elements among several threads, calls `task(first, end)` for each part, and waits for all threads.
void in_parallel(std::size_t count, const std::function<void(std::size_t first, std::size_t end)> &task);

/// Returns the number of elements, out of `count`, that are wrong.
std::size_t count_wrong(std::size_t count, const std::function<bool(std::size_t index)> &is_wrong);

/// Copies `src` to `dst` and waits until the copy has finished.
template <class Dst, class Src> void copy_now(const machine &m, Dst &&dst, Src &&src) {
    const mpgpu::plan plan(m.ctx, {mpgpu::make_transfer(dst, src)});
    const mpgpu::stream stream(m.ctx, mpgpu::device::gpu(0));
    plan.execute(stream).synchronize();
}

/// The programs of this example. Each function returns the number of wrong results.
int microbenchmark(const machine &m, const options &opt);
int jacobi(const machine &m, const options &opt);
int banded(const machine &m, const options &opt);
int graphs(const machine &m, const options &opt);
int stores(const machine &m, const options &opt);
int pipeline(const machine &m, const options &opt);

#endif // MPGPU_EXAMPLES_TRIGGERED_FORMS_HPP
