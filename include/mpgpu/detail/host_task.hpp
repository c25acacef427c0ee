// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_HOST_TASK_HPP
#define MPGPU_DETAIL_HOST_TASK_HPP

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace mpgpu::detail {

template <class Task> void run_task(void *user) noexcept {
    (*static_cast<Task *>(user))();
}

template <class Task> void release_task(void *user) noexcept {
    delete static_cast<Task *>(user); // was allocated in `launch_host`
}

/// Enqueues a call of a copy of `task` in a stream. The library destroys the copy when it will not be called again.
template <class Task> mp_status_t launch_host(mp_context_t context, mp_stream_t stream, Task &&task) {
    using stored = std::decay_t<Task>;
    static_assert(std::is_invocable_v<stored &>, "mpgpu: a host task is called without arguments");
    auto copy = std::make_unique<stored>(std::forward<Task>(task));
    const mp_status_t status =
        mp_stream_launch_host(context, stream, &run_task<stored>, copy.get(), &release_task<stored>);
    if (status == MP_SUCCESS) {
        static_cast<void>(copy.release()); // the library owns it until it calls release_task
    }
    return status;
}

} // namespace mpgpu::detail

#endif // MPGPU_DETAIL_HOST_TASK_HPP
