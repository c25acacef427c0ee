// How the interposer, and clients that look functions up, come by those of the driver.
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

// No constructor runs for this, nor for what follows: other libraries' constructors may call dlsym before any of this
// library's does.
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

/// The C library's dlsym, past all interposers. A versioned look-up takes none that has no version.
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

/// The dlsym that would be found if this library were not there: another interposer's, or the C library's.
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
    // All at once. The driver is never loaded here: that is for the program to do.
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

/// What the library's own look-ups are linked to (`--wrap=dlsym`): they find the driver itself.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming): the linker's name
extern "C" void *__wrap_dlsym(void *handle, const char *name) noexcept {
    MPGPU_MUST_TAIL return libc_dlsym()(handle, name);
}

/// Looks in the driver alone are answered here. All others go on by a jump, so that the next function sees who has
/// called: the answer to RTLD_NEXT depends on that, and another interposer would find itself.
extern "C" __attribute__((visibility("default"))) void *dlsym(void *handle, const char *name) noexcept {
    if (handle != RTLD_DEFAULT && handle != RTLD_NEXT && std::strncmp(name, "cu", 2) == 0) {
        return replaced(next_dlsym()(handle, name));
    }
    MPGPU_MUST_TAIL return next_dlsym()(handle, name);
}
