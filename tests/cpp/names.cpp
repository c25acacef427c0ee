// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests that no public name is ambiguous in a program that imports all names of the standard library and of mpgpu. Each
// name is used without qualification. The standard and system headers that declare similar names are included.
// Compiling is the test.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <future>
#include <iostream>
#include <locale>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <valarray>
#include <vector>
#if __cplusplus > 201703L
#include <ranges>
#include <span>
#include <version>
#if __has_include(<format>)
#include <format>
#endif
#endif

#include <unistd.h>

#include <mpgpu/halo.hpp>
#include <mpgpu/mpgpu.hpp>

using namespace std; // NOLINT(google-build-using-namespace): the case that is tested

namespace all_of_mpgpu {

using namespace mpgpu;

template <class...> constexpr bool are_types = true;
static_assert(are_types<array_view<int>, argument_error, backend, buffer<int>, configuration_error, context,
                        context_options, context_statistics, data_corruption, description, device, device_count,
                        device_span<int>, device_statistics, driver_error, engine, error, error_details, event,
                        imported_memory<int>, internal_error, memory, memory_handle, not_supported, on_error,
                        out_of_memory, peer_gone, plan, plan_info, plan_options, probe_options, request,
                        signal_counters, signal_value, signal_wait, status, stream, stream_view, timeout, transfer>);

int use() {
    error_code ec = make_error_code(status::success);
    const bool known = ec.category() == category() && last_error().status == status::success;
    set_log_callback(MP_LOG_OFF, nullptr, nullptr, ec);
    const context ctx;
    buffer<int> from(ctx, device::gpu(0), 1);
    buffer<int> to(ctx, device::gpu(1), 1);
    static_cast<void>(make_transfer(to, from));
    int one[1] = {};
    static_cast<void>(make_transfer(to, span_of(one, device::host())));
    // The test double exports nothing, so the function is not called.
    static_cast<void>(sizeof(export_memory(ctx, from)));
    return known && version() == MP_VERSION ? 0 : 1;
}

} // namespace all_of_mpgpu

namespace all_of_halo {

using namespace mpgpu::halo;

template <class...> constexpr bool are_types = true;
static_assert(are_types<box, copier, direction, grid, launch_function, measured_form, mpi_memory, neighbours, options,
                        piece, plan, rank_array, rank_arrays>);

int use() {
    const grid g;
    mpgpu::device_span<int> none({nullptr, 0}, mpgpu::device::host());
    copy_on_cpu({}, direction::pack);
    return rank_count(g) == 1 && place_of(g, 0)[0] == 0 && box_of(g, 0).cells[0] == 1 && array_extents(g, 0)[0] == 1 &&
                   array_of(none).size == 0
               ? 0
               : 1;
}

} // namespace all_of_halo

int main() {
    return all_of_mpgpu::use() + all_of_halo::use();
}
