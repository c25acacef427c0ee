// Looks up the driver's functions, for the interposer itself and for programs.
#include "driver.hpp"

#include <cstring>
#include <dlfcn.h>
#include <initializer_list>

#if defined(__has_cpp_attribute) && __has_cpp_attribute(clang::musttail)
#define MPGPU_MUST_TAIL [[clang::musttail]]
#else
#define MPGPU_MUST_TAIL // GCC does it from -O2 on, which CMakeLists.txt sets for this file.
#endif

namespace mpgpu_preload {

// This object and the following ones are initialized without a constructor. Constructors of other libraries may call
// dlsym before the constructors of this library have run.
std::array<std::atomic<void *>, symbols> originals;

namespace {

using dlsym_t = void *(*)(void *, const char *) noexcept;

constexpr std::array<const char *, symbols> names = {
#define MPGPU_NAME(name) #name,
    MPGPU_INTERPOSED(MPGPU_NAME) MPGPU_ASKED(MPGPU_NAME)
#undef MPGPU_NAME
};

std::atomic<dlsym_t> of_libc;
std::atomic<dlsym_t> of_next;

/// Returns the C library's dlsym, bypassing all interposers. The look-up names a version, and therefore finds no
/// function of an interposer, because those have no version.
dlsym_t libc_dlsym() {
    dlsym_t found = of_libc.load(std::memory_order_relaxed);
    if (found == nullptr) {
        for (const char *version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
            found = reinterpret_cast<dlsym_t>(dlvsym(RTLD_NEXT, "dlsym", version));
            if (found != nullptr) {
                break;
            }
        }
        of_libc.store(found, std::memory_order_relaxed);
    }
    return found;
}

/// Returns the dlsym function that would be found without this library: that of another interposer, or that of the C
/// library.
dlsym_t next_dlsym() {
    dlsym_t found = of_next.load(std::memory_order_relaxed);
    if (found == nullptr) {
        found = reinterpret_cast<dlsym_t>(libc_dlsym()(RTLD_NEXT, "dlsym"));
        of_next.store(found, std::memory_order_relaxed);
    }
    return found;
}

} // namespace

void *look_up(symbol name) {
    // All functions are looked up together. This code never loads the driver, because the program decides when it is
    // loaded.
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    for (std::size_t i = 0; driver != nullptr && i < symbols; ++i) {
        originals[i].store(libc_dlsym()(driver, names[i]), std::memory_order_release);
    }
    return originals[static_cast<std::size_t>(name)].load(std::memory_order_acquire);
}

void *replaced(void *found) {
    if (found != nullptr && original(symbol::cuMemcpyAsync) != nullptr) {
        for (std::size_t i = 0; i < symbols; ++i) {
            if (originals[i].load(std::memory_order_acquire) == found) {
                void *ours = hook(static_cast<symbol>(i));
                return ours == nullptr ? found : ours;
            }
        }
    }
    return found;
}

} // namespace mpgpu_preload

using namespace mpgpu_preload;

/// Target of the library's own look-ups (`--wrap=dlsym`), which find the driver itself.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming): the linker's name
extern "C" void *__wrap_dlsym(void *handle, const char *name) noexcept {
    MPGPU_MUST_TAIL return libc_dlsym()(handle, name);
}

/// Replaces the result of look-ups in the driver. All other look-ups continue by a jump, so that the next dlsym
/// function sees the original caller. The result for RTLD_NEXT depends on the caller, and with a wrong caller another
/// interposer would find itself.
extern "C" __attribute__((visibility("default"))) void *dlsym(void *handle, const char *name) noexcept {
    if (handle != RTLD_DEFAULT && handle != RTLD_NEXT && std::strncmp(name, "cu", 2) == 0) {
        return replaced(next_dlsym()(handle, name));
    }
    MPGPU_MUST_TAIL return next_dlsym()(handle, name);
}
