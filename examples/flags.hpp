// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_FLAGS_HPP
#define MPGPU_EXAMPLES_FLAGS_HPP

#include <array>
#include <charconv>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

/// Parser for the command lines of the examples. An invalid argument throws `std::invalid_argument`, with a message
/// that names the flag, the value and the remedy.
namespace flags {

/// Command-line arguments, which are read one after the other.
class arguments {
  public:
    arguments(int count, const char *const *values) : rest_(values + 1, values + count) {}

    /// Advances to the next argument, which must be a flag. Returns false if there is none.
    bool next() {
        if (at_ == rest_.size()) {
            return false;
        }
        flag_ = rest_[at_++];
        return true;
    }

    [[nodiscard]] std::string_view flag() const { return flag_; }

    /// Returns the value of the current flag, which is the next argument.
    std::string_view value() {
        if (at_ == rest_.size()) {
            throw std::invalid_argument(std::string(flag_) + ": a value must follow");
        }
        return rest_[at_++];
    }

  private:
    std::vector<std::string_view> rest_;
    std::size_t at_ = 0;
    std::string_view flag_;
};

template <class Number> bool read(std::string_view text, Number least, Number most, Number &value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() && value >= least && value <= most;
}

template <class Number>
[[noreturn]] void refuse(std::string_view flag, std::string_view text, const char *what, Number least, Number most,
                         const char *such_as) {
    const bool has_most = most != std::numeric_limits<Number>::max();
    const std::string range = has_most ? " from " + std::to_string(least) + " to " + std::to_string(most)
                                       : ", " + std::to_string(least) + " or more";
    throw std::invalid_argument(std::string(flag) + " " + std::string(text) + ": must be " + what + range + such_as);
}

/// Parses a whole number.
template <class Number>
Number number(std::string_view flag, std::string_view text, Number least,
              Number most = std::numeric_limits<Number>::max()) {
    Number value = 0;
    if (!read(text, least, most, value)) {
        refuse(flag, text, "a whole number", least, most, "");
    }
    return value;
}

/// Parses whole numbers separated by commas.
template <class Number>
std::vector<Number> numbers(std::string_view flag, std::string_view text, Number least,
                            Number most = std::numeric_limits<Number>::max()) {
    std::vector<Number> values;
    std::string_view rest = text;
    for (bool more = true; more;) {
        const std::size_t end = rest.find(',');
        more = end != std::string_view::npos;
        if (!read(rest.substr(0, end), least, most, values.emplace_back(0))) {
            refuse(flag, text, "whole numbers", least, most, ", such as 32,64");
        }
        rest.remove_prefix(more ? end + 1 : rest.size());
    }
    return values;
}

/// Parses three whole numbers, one for each dimension, separated by `_`.
template <class Number> std::array<Number, 3> triple(std::string_view flag, std::string_view text, Number least) {
    std::array<Number, 3> values{};
    std::string_view rest = text;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::size_t end = d < 2 ? rest.find('_') : rest.size();
        const Number most = std::numeric_limits<Number>::max();
        if (end == std::string_view::npos || !read(rest.substr(0, end), least, most, values.at(d))) {
            refuse(flag, text, "three whole numbers", least, most, ", such as 4_2_1");
        }
        rest.remove_prefix(d < 2 ? end + 1 : end);
    }
    return values;
}

/// Throws the error for a flag that an example does not have.
[[noreturn]] inline void unknown(std::string_view flag, const char *what = "flag") {
    throw std::invalid_argument(std::string(flag) + ": there is no such " + what + "; -help lists them");
}

} // namespace flags

#endif // MPGPU_EXAMPLES_FLAGS_HPP
