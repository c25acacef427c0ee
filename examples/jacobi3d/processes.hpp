// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
#define MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP

#include <functional>
#include <string>

/// Runs `task` in a separate process and returns the result of `task`, from 0 to 254. If `task` throws, the message is
/// printed and the result is 2.
int in_process(const std::function<int()> &task);

/// Runs `task` in `ranks` processes at the same time. Arguments of `task` are the rank, and the path of a socket
/// through which the processes connect. If there are GPUs, each process sees one of them, as under a job scheduler;
/// several processes share a GPU if there are fewer. Returns the largest result of all processes. If `task` throws, the
/// message is printed and the result is 2; the result of a killed process is 1.
///
/// At the time of the call this process must have only one thread and no context, because a child of `fork` can use
/// neither other threads nor contexts of its parent.
int in_processes(int ranks, int gpus, const std::function<int(int rank, const std::string &meeting)> &task);

#endif // MPGPU_EXAMPLES_JACOBI3D_PROCESSES_HPP
