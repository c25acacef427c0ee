// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_COUNTING_LIBRARY_HPP
#define MPGPU_TESTS_COUNTING_LIBRARY_HPP

#include <mpgpu/mpgpu.h>

#include <cstddef>
#include <cstdint>
#include <string>

/// Test double of the library for tests of `mpgpu.hpp`. It executes everything immediately on the calling thread,
/// counts the objects that it creates and destroys, and fails on request. Only one thread may use it.
namespace counting {

enum class kind { context, plan, request, stream, event, memory };

/// Returns the number of live handles of this kind.
int live(kind what);
/// Returns the number of handles of this kind that were created since the start of the program.
int made(kind what);
/// Returns the number of attempts to destroy a handle that was not live: destroyed twice, or in the wrong context.
int misuses();
/// Returns the number of requests that were waited for.
int waited();
/// Returns the number of requests that were dropped without a wait.
int forgotten();
/// Returns the options with which the last plan was created.
mp_plan_options_t last_plan_options();
/// Returns the options with which the last context was created.
mp_context_options_t last_context_options();
std::string last_topology();
/// Returns the size of the last allocation in bytes.
std::uint64_t last_bytes();
/// Returns the stream in whose order memory was last freed, or null if no memory was freed.
mp_stream_t freed_in();
/// Returns the stream for which a plan was last prepared, or null if no plan was prepared.
mp_stream_t prepared_for();

/// Makes the next call that can fail return this status, with this driver code, argument name and message.
void fail_next(mp_status_t status, std::int64_t driver_code, const char *argument, const char *message);
/// Keeps requests pending from now on if `pending` is true. Completes them if it is false.
void hold(bool pending);
/// Makes the creation of plans with more than `more_than` transfers fail with this status.
void refuse_plans(std::size_t more_than, mp_status_t status);
/// Makes executions of plans with more than `more_than` transfers fail with this status.
void refuse_executions(std::size_t more_than, mp_status_t status);
/// Duration of an execution in seconds. Synchronising the stream of the execution blocks for this time.
struct duration {
    double alone;  ///< duration of the first execution after a synchronisation
    double behind; ///< duration of each execution enqueued after it
};
void executions_take(std::size_t more_than, duration of_those, duration of_others);
/// Starts a capture: host functions are recorded in a graph from now on instead of being called.
void capture();
/// Calls the host functions of the captured graph.
void launch_captured();
/// Destroys the captured graph.
void destroy_captured();
/// Sets the descriptions of plans: `text` is returned when the length is queried, and `grown` afterwards.
void describe_as(const std::string &text, const std::string &grown);

} // namespace counting

#endif // MPGPU_TESTS_COUNTING_LIBRARY_HPP
