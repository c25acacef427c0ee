// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MEASURE_HPP
#define MPGPU_HALO_MEASURE_HPP

/// @file
/// Selection of the fastest exchange method by measurement. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/schedule.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace mpgpu::halo {

/// Exchange method that was measured when a plan was created, and the measured time.
struct measured_form {
    std::uint64_t direct_pieces; ///< limit for copies without packing; see `options::direct_pieces`
    double seconds; ///< time of one exchange on the slowest rank (shortest of several measurements), seconds
    bool pushed;    ///< true if the packing kernel wrote directly to the receiving rank; see `options::pushed`
};

namespace detail {

/// Returns the shortest time of one exchange for each of several exchange methods, in seconds. The time is infinity for
/// a method that fails. The methods alternate, so that a disturbance of the machine affects all of them.
///
/// `run(method, exchanges)` returns the duration of several exchanges that are all enqueued before the host waits. It
/// returns infinity if they fail. It returns equal values on all ranks, so that all ranks make equally many
/// measurements and get the same result.
///
/// Up to 16 back-to-back exchanges are timed, as in a time loop. The reason is that two methods may be equally fast if
/// the host waits for each exchange, but differ by a factor of three if exchanges are queued. Slow methods are timed
/// with fewer exchanges. Each method first runs two single exchanges. Then it runs series of exchanges until they have
/// taken a tenth of a second in total.
template <class Run> [[nodiscard]] std::vector<double> least_seconds(std::size_t forms, const Run &run) {
    constexpr double enough = 0.1;
    constexpr int most_rounds = 8;
    constexpr double most_in_a_row = 16;
    constexpr double never = std::numeric_limits<double>::infinity();
    std::vector<bool> refused(forms, false);
    std::vector<double> least(forms, never);
    double spent = 0;
    double quickest = never;
    int row = 1;
    for (int round = 0; round < most_rounds && spent < enough; ++round) {
        double all = 0;
        for (std::size_t form = 0; form < forms; ++form) {
            const double seconds = refused[form] ? never : run(form, row);
            refused[form] = seconds == never;
            if (refused[form]) {
                least[form] = never;
            } else {
                least[form] = std::min(least[form], seconds / row);
                all += seconds;
            }
        }
        // The length of the series is computed from the faster of two single exchanges. The first also loads kernels
        // and maps memory, and either of them may be slowed by a short disturbance.
        quickest = std::min(quickest, all);
        spent += round > 1 ? all : round * quickest;
        if (round == 1) {
            row = static_cast<int>(std::clamp(enough / 2 / quickest, 1.0, most_in_a_row));
        }
        if (round == 0 || (round == 1 && row > 1)) {
            least.assign(forms, never);
        }
    }
    return least;
}

/// Returns the index of the selected exchange method. Selects the first method, which is the simplest, unless a later
/// method is faster by more than the variation of the measurements.
[[nodiscard]] inline std::size_t fastest_of(const std::vector<double> &seconds) noexcept {
    constexpr double margin = 0.05;
    std::size_t best = 0;
    for (std::size_t form = 1; form < seconds.size(); ++form) {
        best = seconds[form] < seconds[best] * (1 - margin) ? form : best;
    }
    return best;
}

/// Exchange method that can be measured.
struct form {
    std::uint64_t direct_pieces; ///< value of `options::direct_pieces` to use
    bool pushed = false;         ///< value of `options::pushed` to use
};

/// Exchange method that is not possible on this machine or with these arguments.
struct refused_form {
    form which;
    std::string why;
    std::exception_ptr error; ///< error of the method; null if the error occurred in another process
};

/// Calls `step()`, which performs a part of an exchange method. Returns the error if the method is not possible:
/// because it exceeds a limit, is not supported by the machine, exhausts memory or fails on another rank. Throws other
/// errors.
template <class Step> [[nodiscard]] std::optional<refused_form> refused(form which, const Step &step) {
#if MPGPU_EXCEPTIONS
    const auto out = [&](const error &e) { return refused_form{which, e.what(), std::current_exception()}; };
    try {
        step();
    } catch (const argument_error &e) {
        return out(e);
    } catch (const not_supported &e) {
        return out(e);
    } catch (const out_of_memory &e) {
        return out(e);
    } catch (const rank_failed &e) {
        return out(e);
    }
#else
    static_cast<void>(which);
    step(); // without exceptions, a failure ends the process
#endif
    return std::nullopt;
}

/// Throws the error of the first exchange method. Called if all methods have failed.
[[noreturn]] inline void fail_as_first(const std::vector<refused_form> &all) {
    const refused_form &first = *std::min_element(all.begin(), all.end(), [](const auto &a, const auto &b) {
        return a.which.direct_pieces < b.which.direct_pieces;
    });
    if (first.error) {
        std::rethrow_exception(first.error);
    }
    fail(invalid("arrays", first.why));
}

/// Returns the error if the options contradict each other, otherwise nothing.
[[nodiscard]] inline std::optional<error_details> wrong(const options &how) {
    if (how.pushed.value_or(false) && how.direct_pieces.value_or(0) != 0) {
        return invalid("how", "options::pushed with direct_pieces=" + std::to_string(*how.direct_pieces) +
                                  ": pushed messages are all packed; set only one of the two");
    }
    if (how.time_limit && how.time_limit->count() <= 0) {
        return invalid("how", "options::time_limit=" + std::to_string(how.time_limit->count()) +
                                  " ns: must be more than 0; without a limit, leave it empty");
    }
    return std::nullopt;
}

/// Returns the options. Throws if they contradict each other.
[[nodiscard]] inline const options &checked(const options &how) {
    std::optional<error_details> found = wrong(how);
    if (found) {
        fail(std::move(*found));
    }
    return how;
}

/// Returns true if the options request pushed messages, or request that they are measured.
[[nodiscard]] inline bool tries_pushed(const connections &all, const options &how, bool can_push) {
    return how.pushed.value_or(can_push && !how.direct_pieces && packs(all, 0));
}

/// Calls `work()` and returns its duration in seconds.
template <class Work> [[nodiscard]] double seconds_of(const Work &work) {
    const auto started = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

/// Returns the values of `options::direct_pieces` whose plans are measured. If the caller has set the option, this is
/// the caller's value only. If no function can pack (`can_pack` is false), values that require packing are left out. If
/// all values require packing, one value is returned nevertheless, and creating its plan throws the error.
[[nodiscard]] inline std::vector<std::uint64_t> limits_to_try(const connections &all, const options &how, bool can_pack,
                                                              int ranks_in_a_plan) {
    if (how.direct_pieces) {
        return {*how.direct_pieces};
    }
    std::vector<std::uint64_t> limits = limits_of(all, ranks_in_a_plan);
    if (!can_pack) {
        limits.erase(
            std::remove_if(limits.begin(), limits.end(), [&](std::uint64_t limit) { return packs(all, limit); }),
            limits.end());
    }
    return limits.empty() ? std::vector<std::uint64_t>{1} : limits;
}

[[nodiscard]] inline std::string text_of(const std::vector<measured_form> &measured,
                                         const std::vector<refused_form> &refused) {
    const auto name = [](const auto &of) {
        return of.pushed ? "pushed: " : "planned, up to " + std::to_string(of.direct_pieces) + ": ";
    };
    std::string text;
    for (const measured_form &one : measured) {
        char microseconds[32];
        static_cast<void>(std::snprintf(microseconds, sizeof microseconds, "%.1f", one.seconds * 1e6));
        text += (text.empty() ? "\nchosen by measurement, back to back (a later form must be faster by more than 5 %): "
                              : ", ") +
                name(one) + microseconds + " us";
    }
    for (const refused_form &one : refused) {
        text += "\nnot possible here: " + name(one.which) + one.why;
    }
    return text;
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_MEASURE_HPP
