// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
#define MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP

#include <functional>
#include <string>

/// Runs `task` in a separate process and returns its result, from 0 to 254. An exception is printed and gives 2.
int in_process(const std::function<int()> &task);

/// Runs `task` in `ranks` concurrent processes, each with its rank and a path at which they can meet. If there are
/// GPUs, each process sees one, as under a job scheduler; if there are fewer GPUs than processes, they share them.
/// Returns the largest result. An exception is printed and gives 2; a killed process gives 1.
///
/// Must be called while this process has one thread and no context, because a child of `fork` can use neither.
int in_processes(int ranks, int gpus, const std::function<int(int rank, const std::string &meeting)> &task);

#endif // MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
