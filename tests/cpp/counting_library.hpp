// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_COUNTING_LIBRARY_HPP
#define MPGPU_TESTS_COUNTING_LIBRARY_HPP

#include <mpgpu/mpgpu.h>

#include <cstddef>
#include <cstdint>
#include <string>

/// Double of the library for tests of `mpgpu.hpp` only. It executes everything immediately in the calling thread,
/// counts the objects that it creates and destroys, and fails on request. For one thread only.
namespace counting {

enum class kind { context, plan, request, stream, event, memory };

/// Returns the number of live handles of this kind.
int live(kind what);
/// Returns the number of handles of this kind that were created since the start.
int made(kind what);
/// Returns the number of destroyed handles that were not live: destroyed twice, or in the wrong context.
int misuses();
/// Return the number of requests that were waited for, and that were dropped.
int waited();
int forgotten();
/// Return the options of the last plan and of the last context.
mp_plan_options_t last_plan_options();
mp_context_options_t last_context_options();
std::string last_topology();
/// Returns the size of the last allocation in bytes.
std::uint64_t last_bytes();
/// Returns the stream in whose order memory was last freed; null if there is none.
mp_stream_t freed_in();
/// Returns the stream for which a plan was last prepared; null if there is none.
mp_stream_t prepared_for();

/// Makes the next call that can fail return this error.
void fail_next(mp_status_t status, std::int64_t driver_code, const char *argument, const char *message);
/// With true, requests stay pending until it is called with false.
void hold(bool pending);
/// Refuses plans of more than `more_than` transfers with this status, when they are created or when they are executed.
void refuse_plans(std::size_t more_than, mp_status_t status);
void refuse_executions(std::size_t more_than, mp_status_t status);
/// Seconds that an execution takes. Synchronising its stream waits for them.
struct duration {
    double alone;  ///< the first since the last synchronisation
    double behind; ///< those enqueued after it
};
void executions_take(std::size_t more_than, duration of_those, duration of_others);
/// Host functions are recorded in a graph from now on instead of running.
void capture();
/// Launch and destroy this graph.
void launch_captured();
void destroy_captured();
/// Sets the descriptions: `text` when the length is requested, `grown` afterwards.
void describe_as(const std::string &text, const std::string &grown);

} // namespace counting

#endif // MPGPU_TESTS_COUNTING_LIBRARY_HPP
