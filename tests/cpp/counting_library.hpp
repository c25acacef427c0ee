// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_COUNTING_LIBRARY_HPP
#define MPGPU_TESTS_COUNTING_LIBRARY_HPP

#include <mpgpu/mpgpu.h>

#include <cstddef>
#include <cstdint>
#include <string>

/// A double of the library for the tests of `mpgpu.hpp` alone. It does everything at once in the calling thread, counts
/// what it hands out and gets back, and fails when told to. One thread only.
namespace counting {

enum class kind { context, plan, request, stream, event, memory };

/// Handles of this kind that were handed out and not given back.
int live(kind what);
/// Handles of this kind that were handed out since the start.
int made(kind what);
/// Handles given back that were not live: a second destruction, or one in the wrong context.
int misuses();
/// Requests that were waited for, and requests that were forgotten.
int waited();
int forgotten();
/// The options that the last plan and the last context were made with.
mp_plan_options_t last_plan_options();
mp_context_options_t last_context_options();
std::string last_topology();
/// The bytes that the last allocation asked for.
std::uint64_t last_bytes();
/// The stream in whose order memory was freed last; null before.
mp_stream_t freed_in();
/// The stream that a plan was prepared for last; null before.
mp_stream_t prepared_for();

/// The next call that can fail does so, with these details.
void fail_next(mp_status_t status, std::int64_t driver_code, const char *argument, const char *message);
/// Requests stay pending until this is called with false.
void hold(bool pending);
/// Plans of more than so many transfers are refused with this status, when they are made or when they are executed.
void refuse_plans(std::size_t more_than, mp_status_t status);
void refuse_executions(std::size_t more_than, mp_status_t status);
/// What an execution takes, in seconds, which who synchronises a stream waits for.
struct duration {
    double alone;  ///< the first since the last synchronisation
    double behind; ///< those enqueued behind it
};
void executions_take(std::size_t more_than, duration of_those, duration of_others);
/// Host functions become a graph's from now on, in place of running.
void capture();
/// Launches that graph, and destroys it.
void launch_captured();
void destroy_captured();
/// What descriptions say: `text` when asked for its length, `grown` from then on.
void describe_as(const std::string &text, const std::string &grown);

} // namespace counting

#endif // MPGPU_TESTS_COUNTING_LIBRARY_HPP
