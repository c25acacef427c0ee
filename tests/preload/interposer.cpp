// Simulates another preloaded library with its own dlsym, such as a profiler or tracer. It counts look-ups and forwards
// them to the next library.
#include <atomic>
#include <cstdio>
#include <dlfcn.h>
#include <initializer_list>

namespace {

using dlsym_t = void *(*)(void *, const char *) noexcept;

std::atomic<long> asked;

dlsym_t next() {
    static const dlsym_t found = [] {
        const auto of_libc = [] {
            for (const char *version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
                if (void *known = dlvsym(RTLD_NEXT, "dlsym", version)) {
                    return reinterpret_cast<dlsym_t>(known);
                }
            }
            return dlsym_t{nullptr};
        }();
        return reinterpret_cast<dlsym_t>(of_libc(RTLD_NEXT, "dlsym"));
    }();
    return found;
}

/// Symbol that this library looks up in the libraries after it. With another interposer in between, the look-up must
/// not find this function itself.
long process_id() {
    using getpid_t = int (*)();
    static const auto known = reinterpret_cast<getpid_t>(dlsym(RTLD_NEXT, "getpid"));
    return known();
}

[[gnu::destructor]] void tell() {
    std::fprintf(stderr, "second interposer[%ld]: asked %ld times\n", process_id(), asked.load());
}

} // namespace

extern "C" __attribute__((visibility("default"))) int getpid() {
    return static_cast<int>(process_id());
}

extern "C" __attribute__((visibility("default"))) void *dlsym(void *handle, const char *name) noexcept {
    ++asked;
    return next()(handle, name);
}
