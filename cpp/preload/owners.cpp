#include "owners.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <sched.h>
#include <string>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mpgpu_preload {
namespace {

/// Identity of a process. It differs from the identities of all processes that had the same process id before.
struct process {
    std::uint64_t number;
    /// Start time in clock ticks since the machine started.
    std::uint64_t started;
    /// Inode number of the PID namespace in which the process id is valid.
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
    /// Index of the entry to replace next if no entry is unused.
    std::uint64_t next;
    std::array<entry, 4096> entries;
};
// The version must change with the layout of the table, because processes with different versions of this library may
// use the same table.
constexpr std::uint64_t version = 1;
static_assert(sizeof(entry) == 112);

/// Returns the start time of a process, or 0 if there is no such process.
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
    // The command name, in parentheses, may contain any characters. The start time is the 20th field after it.
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

std::string name_of_table() {
    return "/mpgpu-owners-" + std::to_string(geteuid());
}

/// Opens the table in shared memory, and creates it if `create` is `O_CREAT`. Returns -1 on an error, and if the table
/// belongs to another user or is accessible to other users.
int open_table(int create) {
    const int file = shm_open(name_of_table().c_str(), O_RDWR | create | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat status {};
    if (file >= 0 && (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid() ||
                      (status.st_mode & 077) != 0)) {
        close(file);
        return -1;
    }
    return file;
}

bool has_name(int file) {
    struct stat status {};
    return fstat(file, &status) == 0 && status.st_nlink > 0;
}

/// Lock by which a process that has published information keeps the table in existence. The last such process removes
/// the table when it exits.
class presence {
  public:
    presence() {
        for (int tries = 0; tries < 100; ++tries) {
            file_ = open_table(O_CREAT);
            if (file_ < 0 || (flock(file_, LOCK_SH | LOCK_NB) == 0 && has_name(file_))) {
                return;
            }
            // The last process has removed the table in the meantime, so it is created again.
            close(file_);
            file_ = -1;
        }
    }
    /// True in the process that created this object. A child of fork shares the lock of its parent.
    [[nodiscard]] bool is_here() const { return process_ == getpid(); }
    void leave() const {
        if (file_ >= 0 && is_here() && flock(file_, LOCK_EX | LOCK_NB) == 0) {
            shm_unlink(name_of_table().c_str());
        }
    }
    static std::atomic<const presence *> here;

  private:
    int file_ = -1;
    pid_t process_ = getpid();
};
std::atomic<const presence *> presence::here;

[[gnu::destructor]] void leave() {
    if (const presence *here = presence::here) {
        here->leave();
    }
}

/// Table in shared memory, locked for the lifetime of the object. Null if the table is not available. Also null if
/// another process does not release the lock, for example because it is stopped.
class locked_table {
  public:
    locked_table() : file_(open_table(0)) {
        struct stat status {};
        if (file_ < 0 || !lock() || fstat(file_, &status) != 0) {
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
    /// Locks the file by an open file description lock, so that threads of one process exclude each other too. This
    /// lock is independent of the lock of `presence`.
    [[nodiscard]] bool lock() const {
        struct flock whole {};
        whole.l_type = F_WRLCK;
        whole.l_whence = SEEK_SET;
        for (int tries = 0; tries < 10000; ++tries) {
            if (fcntl(file_, F_OFD_SETLK, &whole) == 0) {
                return true;
            }
            sched_yield();
        }
        return false;
    }

    int file_;
    table *table_ = nullptr;
};

bool same(const ipc_handle &one, const ipc_handle &other) {
    return one.bytes == other.bytes;
}

/// Returns the entry for this handle if there is one, and otherwise an unused entry or the entry to replace.
entry &place_for(table &all, const ipc_handle &handle, std::uint64_t name_space) {
    for (entry &known : all.entries) {
        if (known.maker.number == 0 || same(known.handle, handle)) {
            return known;
        }
    }
    // The table is full. Among the next few entries, the first one whose process has exited is replaced, or else the
    // last one. Processes of another PID namespace cannot be checked here.
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
    // The object is never destroyed, because threads may publish while the process ends. A child of fork creates its
    // own object.
    const presence *here = presence::here;
    if (here == nullptr || !here->is_here()) {
        presence::here = new (std::nothrow) presence;
    }
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
