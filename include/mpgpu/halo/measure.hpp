// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MEASURE_HPP
#define MPGPU_HALO_MEASURE_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: forms of an exchange, compared by running them.

#include <mpgpu/halo/schedule.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace mpgpu::halo {

/// A form of an exchange that was measured when a plan was made.
struct measured_form {
    std::uint64_t direct_pieces; ///< as in `options`
    double seconds;              ///< of an exchange, from the call until the slowest rank has finished: the least seen
};

namespace detail {

/// The least time of an exchange in each of several forms, in seconds. The forms take turns, so that what disturbs the
/// machine disturbs all. `run(form, exchanges)` returns how long so many exchanges take, and the same on all ranks, so
/// that all measure as often and find the same. Two exchanges of each are made, and more while that takes less than a
/// tenth of a second.
template <class Run> [[nodiscard]] std::vector<double> least_seconds(std::size_t forms, const Run &run) {
    constexpr double enough = 0.1;
    constexpr int most_rounds = 8;
    std::vector<double> least(forms, std::numeric_limits<double>::infinity());
    double spent = 0;
    for (int round = 0; round < most_rounds && spent < enough; ++round) {
        const int exchanges = round < 2 ? 1 : 4;
        for (std::size_t form = 0; form < forms; ++form) {
            const double seconds = run(form, exchanges);
            if (round > 0) { // the first exchange of a plan also loads kernels and maps memory
                spent += seconds;
                least[form] = std::min(least[form], seconds / exchanges);
            }
        }
    }
    return least;
}

/// How long `work()` takes, in seconds.
template <class Work> [[nodiscard]] double seconds_of(const Work &work) {
    const auto started = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

/// The limits to choose from: what the caller asks for, or all that are worth measuring. Without something that packs
/// (`can_pack`), those that need none; where all need it, one that says so when the plan is made.
[[nodiscard]] inline std::vector<std::uint64_t> limits_to_try(const grid &g,
                                                              const std::vector<std::size_t> &element_bytes,
                                                              const options &how, bool can_pack, bool in_one_plan) {
    if (how.direct_pieces) {
        return {*how.direct_pieces};
    }
    std::vector<std::uint64_t> limits = limits_of(g, element_bytes, in_one_plan);
    if (!can_pack) {
        limits.erase(std::remove_if(limits.begin(), limits.end(), [&](std::uint64_t limit) { return packs(g, limit); }),
                     limits.end());
    }
    return limits.empty() ? std::vector<std::uint64_t>{1} : limits;
}

[[nodiscard]] inline std::string text_of(const std::vector<measured_form> &measured) {
    std::string text;
    for (const measured_form &form : measured) {
        char microseconds[32];
        static_cast<void>(std::snprintf(microseconds, sizeof microseconds, "%.1f", form.seconds * 1e6));
        text +=
            (text.empty() ? "up to " : ", up to ") + std::to_string(form.direct_pieces) + ": " + microseconds + " us";
    }
    return text;
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_MEASURE_HPP
