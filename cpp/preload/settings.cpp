#include "settings.hpp"

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <system_error>

namespace mpgpu_preload {

// The initial value is used until the environment is read, which happens before the program can copy.
std::atomic<std::size_t> looked_at_from{SIZE_MAX};

namespace {

settings values;

/// Reads a size in bytes with an optional unit K, M, G or T (powers of 1024). Returns false if the text is not a valid
/// size.
bool read_size(const char *text, std::size_t &bytes) {
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), number);
    if (error != std::errc()) {
        return false;
    }
    constexpr std::string_view units = "KMGT";
    std::string_view unit = end;
    unsigned shift = 0;
    if (!unit.empty() && units.find(unit.front()) != std::string_view::npos) {
        shift = 10 * static_cast<unsigned>(units.find(unit.front()) + 1);
        unit.remove_prefix(1);
        if (unit == "iB") {
            unit = {};
        }
    }
    bytes = static_cast<std::size_t>(number) << shift;
    return unit.empty() && (bytes >> shift) == number;
}

/// Reads `all`, `used` or a list of GPU numbers, and stores the GPUs as a bit mask. The mask is empty for `used`.
/// Returns false if the text is not valid.
bool read_gpus(std::string_view text, std::optional<std::uint64_t> &gpus) {
    if (text == "used" || text == "all") {
        gpus = text == "all" ? std::optional(every_gpu) : std::nullopt;
        return true;
    }
    gpus = 0;
    for (std::size_t end = 0; end != std::string_view::npos;
         text.remove_prefix(end == std::string_view::npos ? 0 : end + 1)) {
        end = text.find(',');
        const std::string_view number = text.substr(0, end);
        unsigned gpu = 0;
        const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), gpu);
        if (number.empty() || error != std::errc() || stop != number.data() + number.size() || gpu >= 63) {
            return false;
        }
        *gpus |= std::uint64_t{1} << gpu;
    }
    return true;
}

bool read() {
    const char *on = std::getenv("MPGPU_PRELOAD");
    if (on != nullptr) {
        const std::string_view value = on;
        values.on = value == "1" || value == "on";
        if (!values.on && value != "0" && value != "off") {
            std::fprintf(stderr, "mpgpu: MPGPU_PRELOAD=%s: must be one of 0, 1, on, off; copies are not accelerated\n",
                         on);
        }
    }
    const char *bytes = std::getenv("MPGPU_PRELOAD_MIN_BYTES");
    if (bytes != nullptr && !read_size(bytes, values.min_bytes)) {
        std::fprintf(
            stderr,
            "mpgpu: MPGPU_PRELOAD_MIN_BYTES=%s: must be a number of bytes, such as 4M; copies are not accelerated\n",
            bytes);
        values.on = false;
    }
    const char *gpus = std::getenv("MPGPU_PRELOAD_GPUS");
    if (gpus != nullptr && !read_gpus(gpus, values.gpus)) {
        std::fprintf(
            stderr,
            "mpgpu: MPGPU_PRELOAD_GPUS=%s: must be 'used', 'all' or a list of GPU numbers, such as 0,3; copies are not "
            "accelerated\n",
            gpus);
        values.on = false;
    }
    values.names_relays = std::getenv("MPGPU_RELAY_GPUS") != nullptr;
    // The text is copied. Programs that set their title overwrite their initial environment, and the report is written
    // at the end of the program, when static objects may have been destroyed.
    const char *report = std::getenv("MPGPU_PRELOAD_REPORT");
    values.report = report == nullptr ? nullptr : strdup(report);
    values.counts_all = values.report != nullptr || std::getenv("MPGPU_PRELOAD_SUMS") != nullptr;
    const char *verify = std::getenv("MPGPU_VERIFY");
    values.verify = verify != nullptr && std::strcmp(verify, "bytes") == 0;
    return values.on;
}

[[gnu::constructor]] void start() {
    if (read()) {
        looked_at_from.store(values.counts_all ? 0 : values.min_bytes, std::memory_order_relaxed);
    }
}

} // namespace

const settings &asked() {
    return values;
}

} // namespace mpgpu_preload
