// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
#define MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP

#include <functional>
#include <string>

/// Runs `task` in a process of its own, and returns what it returns, from 0 to 254. An exception is printed, and is 2.
int in_process(const std::function<int()> &task);

/// Runs `task` in so many processes at once, each with its rank and a path at which they can meet. Where there are
/// GPUs, each process sees one, as under a job scheduler; where there are fewer GPUs than processes they share them.
/// Returns the largest of what the tasks return. An exception is printed, and is 2; a process that is killed is 1.
///
/// To be called while this process has one thread, and no context: a child of `fork` can use neither.
int in_processes(int ranks, int gpus, const std::function<int(int rank, const std::string &meeting)> &task);

#endif // MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
