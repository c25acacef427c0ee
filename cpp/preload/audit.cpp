// Library libmpgpu_audit.so, which is loaded by LD_AUDIT in addition to libmpgpu_preload.so. Libraries loaded with
// RTLD_DEEPBIND search their own dependencies first, so they would find the driver's functions and not the replacements
// in a preloaded library. The loader calls this library for each symbol that it binds, and this library returns the
// address of the replacement in the preloaded library.
//
// The loader keeps this library in a separate namespace. This library only uses the addresses of the program's
// libraries and does not call them.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <link.h>
#include <string_view>

namespace {

/// Link map of the interposer (libmpgpu_preload.so). Null until the interposer is loaded.
std::atomic<link_map *> interposer;

constexpr std::string_view interposer_name = "libmpgpu_preload.so";
constexpr std::string_view driver_name = "libcuda.so.1";

std::string_view name_of(const link_map *object) {
    const std::string_view path = object->l_name;
    return path.substr(path.find_last_of('/') + 1); // the whole path if it has no slash
}

const char *address_of(const link_map *object, Elf64_Sxword tag) {
    for (const Elf64_Dyn *entry = object->l_ld; entry->d_tag != DT_NULL; ++entry) {
        if (entry->d_tag == tag) {
            return reinterpret_cast<const char *>(entry->d_un.d_ptr); // NOLINT(performance-no-int-to-ptr)
        }
    }
    return nullptr;
}

/// Returns the address of the symbol `name` that `object` exports, or 0 if it exports no such symbol. Reads the GNU
/// hash table of the object. dlsym cannot be used, because the object was not opened by this library.
std::uintptr_t find(const link_map *object, const char *name) {
    const auto *words = reinterpret_cast<const std::uint32_t *>(address_of(object, DT_GNU_HASH));
    const auto *symbols = reinterpret_cast<const Elf64_Sym *>(address_of(object, DT_SYMTAB));
    const char *names = address_of(object, DT_STRTAB);
    if (words == nullptr || symbols == nullptr || names == nullptr) {
        return 0;
    }
    std::uint32_t hash = 5381;
    for (const char *at = name; *at != 0; ++at) {
        hash = hash * 33 + static_cast<unsigned char>(*at);
    }
    // The table has a header of four words, followed by the filter, the buckets and the hashes. The header contains the
    // number of buckets, the index of the first symbol, the number of 64-bit filter words and the filter shift.
    const std::uint32_t *buckets = words + 4 + std::size_t{2} * words[2];
    const std::uint32_t *hashes = buckets + words[0];
    for (std::uint32_t i = buckets[hash % words[0]]; i >= words[1]; ++i) {
        const std::uint32_t found = hashes[i - words[1]];
        if ((found | 1U) == (hash | 1U) && std::strcmp(names + symbols[i].st_name, name) == 0) {
            return object->l_addr + symbols[i].st_value;
        }
        if ((found & 1U) != 0) { // last entry of the bucket
            break;
        }
    }
    return 0;
}

} // namespace

#define MPGPU_EXPORTED __attribute__((visibility("default")))

// NOLINTBEGIN(readability-identifier-naming): the loader's names, rtld-audit(7)
extern "C" {

MPGPU_EXPORTED unsigned la_version(unsigned version) {
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

MPGPU_EXPORTED unsigned la_objopen(link_map *object, Lmid_t space, std::uintptr_t *cookie) {
    *cookie = reinterpret_cast<std::uintptr_t>(object);
    if (space != LM_ID_BASE) {
        return 0;
    }
    if (name_of(object) == interposer_name) {
        interposer = object;
        return 0;
    }
    return LA_FLG_BINDTO | LA_FLG_BINDFROM;
}

MPGPU_EXPORTED std::uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned /*number*/, std::uintptr_t *from,
                                           std::uintptr_t *in, unsigned * /*flags*/, const char *name) {
    // NOLINTBEGIN(performance-no-int-to-ptr): cookies are what la_objopen has made of them
    const link_map *ours = interposer.load();
    const auto *definer = reinterpret_cast<const link_map *>(*in);
    // Look-ups by the interposer itself must find the functions that it replaces.
    const bool is_other = ours != nullptr && definer != ours && reinterpret_cast<const link_map *>(*from) != ours;
    // NOLINTEND(performance-no-int-to-ptr)
    const bool is_looked_at = is_other && (name_of(definer) == driver_name || std::strcmp(name, "dlsym") == 0);
    const std::uintptr_t hook = is_looked_at ? find(ours, name) : 0;
    return hook != 0 ? hook : symbol->st_value;
}

} // extern "C"
// NOLINTEND(readability-identifier-naming)
