#include "owners.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mpgpu_preload {
namespace {

/// A process, told from all others that have or had its number.
struct process {
    std::uint64_t number;
    /// In clock ticks since the machine started.
    std::uint64_t started;
    /// Numbers of processes are those of a namespace.
    std::uint64_t name_space;

    bool operator==(const process &other) const {
        return number == other.number && started == other.started && name_space == other.name_space;
    }
};

struct entry {
    ipc_handle handle;
    process maker;
    owner memory;
};

struct table {
    std::uint64_t version;
    /// Where a place is looked for when none is free.
    std::uint64_t next;
    std::array<entry, 4096> entries;
};
// Another layout must get another number: processes of two versions of this library may meet.
constexpr std::uint64_t version = 1;
static_assert(sizeof(entry) == 120);

/// 0 where there is no such process.
std::uint64_t start_of(std::uint64_t number) {
    std::array<char, 64> path{};
    std::snprintf(path.data(), path.size(), "/proc/%llu/stat", static_cast<unsigned long long>(number));
    const int file = open(path.data(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    std::array<char, 1024> text{};
    const ssize_t length = read(file, text.data(), text.size() - 1);
    close(file);
    // The name, in parentheses, may contain anything. Behind it the 20th field is the start.
    const char *at = length <= 0 ? nullptr : std::strrchr(text.data(), ')');
    for (int field = 0; at != nullptr && field < 20; ++field) {
        at = std::strchr(at + 1, ' ');
    }
    return at == nullptr ? 0 : std::strtoull(at + 1, nullptr, 10);
}

std::uint64_t name_space_here() {
    struct stat status {};
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

process this_process() {
    const auto number = static_cast<std::uint64_t>(getpid());
    return {number, start_of(number), name_space_here()};
}

bool runs(const process &maker, std::uint64_t name_space) {
    return maker.number != 0 && maker.name_space == name_space && start_of(maker.number) == maker.started;
}

/// The table, locked for as long as this lives. Null where it cannot be had, or where another process keeps it for
/// long, as one that was stopped.
class locked_table {
  public:
    locked_table() {
        std::array<char, 64> name{};
        std::snprintf(name.data(), name.size(), "/mpgpu-owners-%u", static_cast<unsigned>(geteuid()));
        file_ = shm_open(name.data(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        struct stat status {};
        // Nobody else may have made it, or may write to it.
        if (file_ < 0 || fstat(file_, &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid() ||
            (status.st_mode & 077) != 0 || !lock() || fstat(file_, &status) != 0) {
            return;
        }
        if (status.st_size == 0 && ftruncate(file_, sizeof(table)) == 0) {
            status.st_size = sizeof(table);
        }
        if (status.st_size != sizeof(table)) {
            return;
        }
        void *at = mmap(nullptr, sizeof(table), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (at == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr): the system's own macro
            return;
        }
        table_ = static_cast<table *>(at);
        if (table_->version == 0) {
            table_->version = version;
        }
    }
    ~locked_table() {
        if (table_ != nullptr) {
            munmap(table_, sizeof(table));
        }
        if (file_ >= 0) {
            close(file_);
        }
    }
    locked_table(const locked_table &) = delete;
    locked_table(locked_table &&) = delete;
    locked_table &operator=(const locked_table &) = delete;
    locked_table &operator=(locked_table &&) = delete;

    table *get() { return table_ != nullptr && table_->version == version ? table_ : nullptr; }

  private:
    [[nodiscard]] bool lock() const {
        for (int tries = 0; tries < 10000; ++tries) {
            if (flock(file_, LOCK_EX | LOCK_NB) == 0) {
                return true;
            }
            sched_yield();
        }
        return false;
    }

    int file_ = -1;
    table *table_ = nullptr;
};

bool same(const ipc_handle &one, const ipc_handle &other) {
    return one.bytes == other.bytes;
}

/// Where an entry for this handle goes.
entry &place_for(table &all, const ipc_handle &handle, std::uint64_t name_space) {
    for (entry &known : all.entries) {
        if (known.maker.number == 0 || same(known.handle, handle)) {
            return known;
        }
    }
    // The table is full: one of the next few whose process has ended, or else the next. Of another namespace nobody
    // here can tell.
    constexpr int looked_at = 64;
    entry *place = nullptr;
    for (int i = 0; i < looked_at; ++i) {
        place = &all.entries.at(all.next++ % all.entries.size());
        if (place->maker.name_space == name_space && !runs(place->maker, name_space)) {
            break;
        }
    }
    return *place;
}

} // namespace

void publish(const ipc_handle &handle, const owner &memory) noexcept {
    locked_table all;
    const process maker = this_process();
    if (all.get() != nullptr && maker.started != 0 && maker.name_space != 0) {
        place_for(*all.get(), handle, maker.name_space) = {handle, maker, memory};
    }
}

std::optional<owner> find_owner(const ipc_handle &handle) noexcept {
    locked_table all;
    if (all.get() != nullptr) {
        for (const entry &known : all.get()->entries) {
            if (known.maker.number != 0 && same(known.handle, handle)) {
                return runs(known.maker, name_space_here()) ? std::optional(known.memory) : std::nullopt;
            }
        }
    }
    return std::nullopt;
}

} // namespace mpgpu_preload
