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
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace mpgpu::halo {

/// A form of an exchange that was measured when a plan was made.
struct measured_form {
    std::uint64_t direct_pieces; ///< as in `options`
    double seconds;              ///< of one of several exchanges in a row, no host waiting between them, from the first
                                 ///< call until the slowest rank has finished the last: the least seen
    bool pushed;                 ///< as in `options`
};

namespace detail {

/// The least time of an exchange in each of several forms, in seconds; infinity where it is refused. The forms take
/// turns, so that what disturbs the machine disturbs all. `run(form, exchanges)` returns how long so many exchanges
/// take, all enqueued before the host waits; infinity if they are refused; and the same on all ranks, so that all
/// measure as often and find the same.
///
/// Up to 16 exchanges in a row are timed, as a time loop makes them: a form may be as fast as another when the host
/// waits for each, and three times as slow when they queue. Slow ones are timed in shorter rows. Two exchanges of each
/// are made, and more rows while all take less than a tenth of a second.
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
        // The first exchange of a plan also loads kernels and maps memory, and the second is alone. Where something
        // else keeps the machine busy for a moment, the quicker of the two says how long rows may be.
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

/// The form to take: the first, which is the simplest, unless a later one is faster by more than readings differ.
[[nodiscard]] inline std::size_t fastest_of(const std::vector<double> &seconds) noexcept {
    constexpr double margin = 0.05;
    std::size_t best = 0;
    for (std::size_t form = 1; form < seconds.size(); ++form) {
        best = seconds[form] < seconds[best] * (1 - margin) ? form : best;
    }
    return best;
}

/// How something can be exchanged, among others.
struct form {
    std::uint64_t direct_pieces; ///< as in `options`
    bool pushed = false;         ///< as in `options`
};

/// A form that cannot be had here.
struct refused_form {
    form which;
    std::string why;
    std::exception_ptr error; ///< null where it was another process's
};

/// Calls `step()`, which is part of a form. An error that says that what was asked for cannot be had rules out the form
/// and is returned: too much for a bound, for this machine or for its memory, or for another rank's. Others are
/// thrown.
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
    step(); // ends the process where it fails
#endif
    return std::nullopt;
}

/// Throws the error of the first of all forms, all of which were refused.
[[noreturn]] inline void fail_as_first(const std::vector<refused_form> &all) {
    const refused_form &first = *std::min_element(all.begin(), all.end(), [](const auto &a, const auto &b) {
        return a.which.direct_pieces < b.which.direct_pieces;
    });
    if (first.error) {
        std::rethrow_exception(first.error);
    }
    fail(invalid("arrays", first.why));
}

/// What is wrong with the form that is asked for.
[[nodiscard]] inline std::optional<error_details> wrong(const options &how) {
    if (how.pushed.value_or(false) && how.direct_pieces.value_or(0) != 0) {
        return invalid("how", "options::pushed with direct_pieces=" + std::to_string(*how.direct_pieces) +
                                  ": pushed messages are all packed; leave the other out");
    }
    return std::nullopt;
}

/// Whether messages are to be pushed, or it is to be tried whether that is faster.
[[nodiscard]] inline bool tries_pushed(const grid &g, const options &how, bool can_push) {
    return how.pushed.value_or(can_push && !how.direct_pieces && packs(g, 0));
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
                                                              const options &how, bool can_pack, int ranks_in_a_plan) {
    if (how.direct_pieces) {
        return {*how.direct_pieces};
    }
    std::vector<std::uint64_t> limits = limits_of(g, element_bytes, ranks_in_a_plan);
    if (!can_pack) {
        limits.erase(std::remove_if(limits.begin(), limits.end(), [&](std::uint64_t limit) { return packs(g, limit); }),
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
        text += (text.empty() ? "\nchosen by measurement, in a row (a later one if faster by more than 5 %): " : ", ") +
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
