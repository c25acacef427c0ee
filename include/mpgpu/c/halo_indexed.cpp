// SPDX-License-Identifier: MIT OR Apache-2.0
// Implements the functions of mpgpu/halo_indexed.h and the C functions of the Fortran module mpgpu_indexed. They use
// the C++ header mpgpu/halo_indexed.hpp. Programs compile this source with their own MPI. Exchanges on GPUs require
// that it is compiled as CUDA source. In CMake, the target mpgpu::halo_c compiles it.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif

#include <mpgpu/halo_indexed.h>
#include <mpgpu/halo_indexed.hpp>
#ifdef __CUDACC__
#include <mpgpu/halo.cuh>
#endif

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if !MPGPU_EXCEPTIONS
#error "mpgpu: compile mpgpu/c/halo_indexed.cpp with exceptions; no exception leaves its functions"
#endif

namespace {

namespace halo = mpgpu::halo;

/// Language of the program, which determines the names in error texts.
enum class language { c, fortran };

/// Name in an error text of the C++ header, and the corresponding names in C and in Fortran.
struct translation {
    const char *cpp;
    const char *c;
    const char *fortran;
};

// The texts are replaced in this order. A text that contains another one must come before it.
constexpr std::array<translation, 10> translations{{
    {"use field_of with a vector of float or double, or set index_field::values",
     "set mp_index_field_t::values to MP_NUMBER_F32 or MP_NUMBER_F64",
     "set the component values to MP_NUMBER_F32 or MP_NUMBER_F64"},
    {"end the lifetime of the halo::indexed object without calling destroy()", "call mp_halo_indexed_leave",
     "call its leave instead of destroy"},
    {"must be copy, add or reverse_add", "must be MP_INDEX_COPY, MP_INDEX_ADD or MP_INDEX_REVERSE_ADD",
     "must be MP_INDEX_COPY, MP_INDEX_ADD or MP_INDEX_REVERSE_ADD"},
    {"halo::indexed::destroy", "mp_halo_indexed_destroy", "mpgpu_index_exchange%destroy"},
    {"several halo::indexed objects", "several objects", "several objects"},
    {"halo::indexed object", "exchange object", "exchange object"},
    {"halo::indexed", "mp_halo_indexed_create", "mpgpu_index_exchange%create"},
    {"index_options::", "options->", ""},
    {"index_neighbour", "mp_index_neighbour_t", "mpgpu_index_neighbour"},
    {"mpi::node", "mp_halo_indexed_create", "mpgpu_index_exchange%create"},
}};

/// Returns an error text with the names of the program's language.
std::string translated(std::string text, language names) {
    for (const translation &t : translations) {
        const std::string from = t.cpp;
        const std::string to = names == language::c ? t.c : t.fortran;
        for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
            text.replace(at, from.size(), to);
        }
    }
    return text;
}

/// Makes an error the last error of this thread, and returns its status.
mp_status_t report(const mpgpu::error &e, language names) noexcept {
    const auto status = static_cast<mp_status_t>(e.status());
    std::string argument;
    std::string message;
    try {
        argument = e.argument() == "how" ? "options" : e.argument() == "where" ? "device" : e.argument();
        message = translated(e.what(), names);
    } catch (const std::exception &) { // no memory for the text
        static_cast<void>(mp_last_error_set(status, e.driver_code(), nullptr, e.what()));
        return status;
    }
    static_cast<void>(
        mp_last_error_set(status, e.driver_code(), argument.empty() ? nullptr : argument.c_str(), message.c_str()));
    return status;
}

/// Calls `body()`. Returns `MP_SUCCESS`, or the status of the exception, which becomes the last error of this thread.
template <class Body> mp_status_t guarded(language names, const Body &body) noexcept {
    mp_status_t status = MP_ERROR_INTERNAL;
    const char *text = "unknown exception; please report this";
    try {
        body();
        return MP_SUCCESS;
    } catch (const mpgpu::error &e) {
        return report(e, names);
    } catch (const std::bad_alloc &) {
        status = MP_ERROR_OUT_OF_MEMORY;
        text = "the host has no memory for the arguments of the call";
    } catch (const std::length_error &) {
        status = MP_ERROR_OUT_OF_MEMORY;
        text = "an array of the arguments is larger than the memory of the host: check its number of elements";
    } catch (const std::exception &e) {
        static_cast<void>(mp_last_error_set(status, 0, nullptr, e.what()));
        return status;
    } catch (...) {
    }
    static_cast<void>(mp_last_error_set(status, 0, nullptr, text));
    return status;
}

[[noreturn]] void refuse(const char *argument, std::string message,
                         mpgpu::status status = mpgpu::status::invalid_argument) {
    halo::detail::fail(halo::detail::refusal(status, argument, std::move(message)));
}

/// Exchange object with the resources that it requires. The members are destroyed in reverse order.
struct exchange_object {
    language names;
    mpgpu::context context; ///< context of the program, not owned by this object
    mpgpu::device where;
    mpgpu::mpi::node node;
    halo::indexed exchange;
};

/// Table of all exchange objects. Numbers of handles are not reused, so that handles of destroyed objects are detected.
class object_table {
  public:
    /// Reserves a place for an object, so that `fill` cannot fail. Returns the handle of the place.
    std::uintptr_t reserve() {
        const std::lock_guard<std::mutex> locked(mutex_);
        next_ += step;
        objects_[next_] = nullptr;
        return next_;
    }
    void fill(std::uintptr_t handle, std::unique_ptr<exchange_object> made) noexcept {
        const std::lock_guard<std::mutex> locked(mutex_);
        objects_.find(handle)->second = std::move(made);
    }
    void release(std::uintptr_t handle) noexcept {
        const std::lock_guard<std::mutex> locked(mutex_);
        objects_.erase(handle);
    }

    /// Returns the object of a handle. Throws if there is none.
    exchange_object &at(mp_halo_indexed_t handle) {
        const std::lock_guard<std::mutex> locked(mutex_);
        return *place_of(handle)->second;
    }
    /// Removes the object of a handle and returns it. Throws if there is none.
    std::unique_ptr<exchange_object> remove(mp_halo_indexed_t handle) {
        const std::lock_guard<std::mutex> locked(mutex_);
        const auto place = place_of(handle);
        std::unique_ptr<exchange_object> removed = std::move(place->second);
        objects_.erase(place);
        return removed;
    }

  private:
    using objects = std::map<std::uintptr_t, std::unique_ptr<exchange_object>>;

    // Bits 28 to 31 of a handle of the library contain the kind of its object, which is not 0. In the first 2^24
    // handles of this table, these bits are 0. These handles therefore differ from all handles of the library.
    static constexpr std::uintptr_t step = 16;

    objects::iterator place_of(mp_halo_indexed_t handle) {
        const auto number = reinterpret_cast<std::uintptr_t>(handle);
        const auto found = objects_.find(number);
        if (found == objects_.end() || found->second == nullptr) {
            refuse("indexed",
                   number == 0 ? "indexed is NULL"
                               : "indexed is " + std::to_string(number) +
                                     ", which is not the handle of an exchange object or was destroyed already",
                   mpgpu::status::invalid_handle);
        }
        return found;
    }

    std::mutex mutex_;
    objects objects_;
    std::uintptr_t next_ = 0;
};

/// Returns the table of this process. It is never destroyed, because objects must not be destroyed after
/// `MPI_Finalize`.
object_table &table() {
    static auto *const all = new object_table;
    return *all;
}

/// Owner of a place in the table until the object is complete.
class reserved_place {
  public:
    reserved_place() = default;
    reserved_place(const reserved_place &) = delete;
    reserved_place(reserved_place &&) = delete;
    reserved_place &operator=(const reserved_place &) = delete;
    reserved_place &operator=(reserved_place &&) = delete;
    ~reserved_place() {
        if (handle_ != 0) {
            table().release(handle_);
        }
    }
    void reserve() { handle_ = table().reserve(); }
    /// Stores the object and returns its handle.
    mp_halo_indexed_t fill(std::unique_ptr<exchange_object> made) noexcept {
        table().fill(handle_, std::move(made));
        // A number that is never dereferenced. NOLINTNEXTLINE(performance-no-int-to-ptr)
        return reinterpret_cast<mp_halo_indexed_t>(std::exchange(handle_, 0));
    }

  private:
    std::uintptr_t handle_ = 0;
};

/// Throws if an array has elements and is NULL or not aligned.
void check_array(const void *array, std::uint64_t count, std::size_t alignment, const std::string &what,
                 const char *argument) {
    if (count > 0 && array == nullptr) {
        refuse(argument, what + " is NULL, but must have " + std::to_string(count) + " elements");
    }
    if (count > 0 && reinterpret_cast<std::uintptr_t>(array) % alignment != 0) {
        refuse(argument, what + " is not aligned to " + std::to_string(alignment) + " bytes");
    }
}

halo::index_list list_of(const mp_index_list_t &list, const char *name, std::int32_t rank) {
    const std::string whose = std::string(name) + " list of neighbour " + std::to_string(rank);
    if (list.reserved != 0) {
        refuse("neighbours", whose + ": reserved is " + std::to_string(list.reserved) +
                                 ": must be 0; create lists by mp_index_list32, mp_index_list64 or mp_index_range");
    }
    if (list.indices == nullptr) {
        return halo::index_list::range(list.first, static_cast<std::size_t>(list.count));
    }
    if (list.index_bytes != 4 && list.index_bytes != 8) {
        refuse("neighbours", whose + ": index_bytes is " + std::to_string(list.index_bytes) + ": must be 4 or 8");
    }
    if (list.count > std::numeric_limits<std::uint32_t>::max()) { // before the array is read
        refuse("neighbours", whose + ": " + std::to_string(list.count) +
                                 " entries: the maximum is 2^32 - 1; use several exchange objects");
    }
    check_array(list.indices, list.count, list.index_bytes, "the array of the " + whose, "neighbours");
    const auto count = static_cast<std::size_t>(list.count);
    if (list.index_bytes == 4) {
        return mpgpu::array_view<const std::int32_t>(static_cast<const std::int32_t *>(list.indices), count);
    }
    return mpgpu::array_view<const std::int64_t>(static_cast<const std::int64_t *>(list.indices), count);
}

/// Arguments of the creation of an object, as a C or Fortran program passes them.
struct creation {
    language names;
    mp_context_t context;
    MPI_Comm communicator;
    MPI_Comm local;
    std::int32_t device;
    std::uint64_t entries;
    const mp_index_neighbour_t *neighbours;
    std::size_t neighbour_count;
    std::uint64_t entry_bytes;
    double time_limit;
    std::int32_t first_index;
};

std::vector<halo::index_neighbour> neighbours_of(const creation &with) {
    int ranks = 0;
    mpgpu::mpi::detail::check(MPI_Comm_size(with.communicator, &ranks), "MPI_Comm_size");
    if (with.neighbour_count > static_cast<std::size_t>(ranks)) {
        refuse("neighbours", std::to_string(with.neighbour_count) + " neighbours: the communicator has " +
                                 std::to_string(ranks) + " ranks, each of which may be a neighbour once");
    }
    check_array(with.neighbours, with.neighbour_count, alignof(mp_index_neighbour_t), "neighbours", "neighbours");
    std::vector<halo::index_neighbour> made;
    for (std::size_t i = 0; i < with.neighbour_count; ++i) {
        const mp_index_neighbour_t &n = with.neighbours[i];
        made.push_back({n.rank, list_of(n.send, "send", n.rank), list_of(n.receive, "receive", n.rank)});
    }
    return made;
}

halo::index_options options_of(const creation &with, [[maybe_unused]] mpgpu::backend backend) {
    halo::index_options how;
    how.entry_bytes = with.entry_bytes == 0 ? sizeof(double) : static_cast<std::size_t>(with.entry_bytes);
    how.first_index = with.first_index;
    constexpr double longest = 1e9; // about 30 years, which nanoseconds can represent
    if (!(with.time_limit >= 0 && with.time_limit <= longest)) {
        refuse("options",
               "time_limit is " + std::to_string(with.time_limit) + " s: must be 0 to 1e9; 0 selects no time limit");
    }
    if (with.time_limit > 0) {
        const std::chrono::duration<double> seconds(with.time_limit);
        how.time_limit = std::max(std::chrono::duration_cast<std::chrono::nanoseconds>(seconds),
                                  std::chrono::nanoseconds(1)); // a limit below 1 ns would be rounded to 0
    }
#ifdef __CUDACC__
    if (backend != mpgpu::backend::host) {
        how.kernel = halo::cuda_indexed();
    }
#else
    if (backend != mpgpu::backend::host) {
        refuse("context",
               "the context uses CUDA, but mpgpu/c/halo_indexed.cpp was not compiled as CUDA source: enable the "
               "language CUDA in CMake before find_package(mpgpu), or compile this source by nvcc",
               mpgpu::status::not_supported);
    }
#endif
    return how;
}

/// Throws if MPI cannot be called.
void check_mpi() {
    int initialised = 0;
    int finalised = 0;
    static_cast<void>(MPI_Initialized(&initialised));
    static_cast<void>(MPI_Finalized(&finalised));
    if (initialised == 0 || finalised != 0) {
        refuse("communicator", initialised == 0 ? "MPI is not initialised: call MPI_Init first"
                                                : "MPI is finalised: call this function before MPI_Finalize");
    }
}

/// Creates an object. `check()` checks the arguments that `with` does not contain, and throws if one of them is
/// invalid. Collective.
template <class Check> mp_halo_indexed_t create(const creation &with, const Check &check) {
    using ranks = halo::detail::processes<mpgpu::mpi::node>;
    if (with.communicator == MPI_COMM_NULL) { // this rank cannot notify the others
        refuse("communicator", "communicator is MPI_COMM_NULL: pass the communicator of ranks that exchange entries");
    }
    reserved_place place;
    std::unique_ptr<exchange_object> made;
    std::vector<halo::index_neighbour> neighbours;
    halo::index_options how;
    const auto read_arguments = [&] {
        check();
        mpgpu::context context = mpgpu::context::borrow(with.context);
        how = options_of(with, context.backend()); // `backend` throws if the handle is invalid
        neighbours = neighbours_of(with);
        const mpgpu::device where = mpgpu::device::from_id(with.device);
        if (where.is_host()) {
            refuse("device", "device " + std::to_string(with.device) +
                                 " is host memory: the vectors must be on a GPU; on the host backend, use a virtual "
                                 "device");
        }
        place.reserve();
        made = std::make_unique<exchange_object>(
            exchange_object{with.names, std::move(context), where, mpgpu::mpi::node(), halo::indexed()});
    };
    // A rank that continued after an error of another rank would wait for that rank forever.
    ranks::together(with.communicator, read_arguments, "communicator");
    const auto make_node = [&] {
        made->node = mpgpu::mpi::node(made->context, with.communicator, with.local, made->where);
    };
    ranks::together(with.communicator, make_node, "communicator");
    made->exchange =
        halo::indexed(made->context, made->node, made->where, static_cast<std::size_t>(with.entries), neighbours, how);
    return place.fill(std::move(made));
}

void check_output(const mp_halo_indexed_t *indexed) {
    if (indexed == nullptr) {
        refuse("indexed", "indexed is NULL: pass the address of a variable for the handle");
    }
}

/// Returns the fields of an exchange.
std::vector<halo::index_field> fields_of(const exchange_object &object, const mp_index_field_t *fields,
                                         std::size_t count) {
    if (count > halo::most_fields) {
        refuse("fields", std::to_string(count) + " fields: must be 1 to " + std::to_string(halo::most_fields) +
                             "; exchange more fields in several exchanges");
    }
    check_array(fields, count, alignof(mp_index_field_t), "fields", "fields");
    std::vector<halo::index_field> made;
    made.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        const mp_index_field_t &f = fields[i];
        const auto values = static_cast<std::int32_t>(f.values);
        if (values < MP_NUMBER_NONE || values > MP_NUMBER_F64) {
            refuse("fields", "field " + std::to_string(i + (object.names == language::fortran ? 1 : 0)) +
                                 ": values is " + std::to_string(values) +
                                 ": must be MP_NUMBER_NONE, MP_NUMBER_F32 or MP_NUMBER_F64");
        }
        const auto entry_bytes = static_cast<std::size_t>(f.entry_bytes);
        made.push_back({f.data, object.where, entry_bytes,
                        f.stride_bytes == 0 ? entry_bytes : static_cast<std::size_t>(f.stride_bytes),
                        static_cast<std::size_t>(f.entries), static_cast<halo::number>(values)});
    }
    return made;
}

/// Calls `use(object)` with the object of a handle. Returns the status.
template <class Use> mp_status_t with_object(mp_halo_indexed_t indexed, const Use &use) noexcept {
    exchange_object *object = nullptr;
    const mp_status_t found = guarded(language::c, [&] { object = &table().at(indexed); });
    return found != MP_SUCCESS ? found : guarded(object->names, [&] { use(*object); });
}

halo::index_operation operation_of(mp_index_operation_t operation) noexcept {
    return static_cast<halo::index_operation>(static_cast<std::int32_t>(operation));
}

} // namespace

extern "C" {

mp_status_t mp_halo_indexed_create(mp_context_t context, MPI_Comm communicator, int32_t device, uint64_t entries,
                                   const mp_index_neighbour_t *neighbours, size_t neighbour_count,
                                   const mp_halo_indexed_options_t *options, mp_halo_indexed_t *indexed) {
    return guarded(language::c, [&] {
        check_mpi();
        mp_halo_indexed_options_t how = MP_HALO_INDEXED_OPTIONS_INIT;
        const bool has_options = options != nullptr && options->size == sizeof how;
        how = has_options ? *options : how;
        const auto check = [&] {
            if (options != nullptr && !has_options) {
                refuse("options", "options->size is " + std::to_string(options->size) +
                                      ", but mp_halo_indexed_options_t has " + std::to_string(sizeof how) +
                                      " bytes; initialise it with MP_HALO_INDEXED_OPTIONS_INIT");
            }
            check_output(indexed);
        };
        *indexed = create({language::c, context, communicator, how.local, device, entries, neighbours, neighbour_count,
                           how.entry_bytes, how.time_limit, how.first_index},
                          check);
    });
}

/// Creates an exchange object for the Fortran module. `communicator` and `local` are handles of Fortran's MPI. `local`
/// may be NULL. The first entry of a vector has index 1.
mp_status_t mp_halo_indexed_create_fortran(mp_context_t context, int64_t communicator, const int64_t *local,
                                           int32_t device, uint64_t entries, const mp_index_neighbour_t *neighbours,
                                           size_t neighbour_count, uint64_t entry_bytes, double time_limit,
                                           mp_halo_indexed_t *indexed) {
    return guarded(language::fortran, [&] {
        const auto to_c = [](int64_t handle) { return MPI_Comm_f2c(static_cast<MPI_Fint>(handle)); };
        check_mpi();
        *indexed =
            create({language::fortran, context, to_c(communicator), local != nullptr ? to_c(*local) : MPI_COMM_NULL,
                    device, entries, neighbours, neighbour_count, entry_bytes, time_limit, 1},
                   [&] { check_output(indexed); });
    });
}

mp_status_t mp_halo_indexed_exchange(mp_halo_indexed_t indexed, mp_stream_t stream, const mp_index_field_t *fields,
                                     size_t field_count, mp_index_operation_t operation) {
    return with_object(indexed, [&](exchange_object &object) {
        object.exchange.exchange(stream, fields_of(object, fields, field_count), operation_of(operation));
    });
}

mp_status_t mp_halo_indexed_start(mp_halo_indexed_t indexed, mp_stream_t stream, const mp_index_field_t *fields,
                                  size_t field_count, mp_index_operation_t operation) {
    return with_object(indexed, [&](exchange_object &object) {
        object.exchange.start(stream, fields_of(object, fields, field_count), operation_of(operation));
    });
}

mp_status_t mp_halo_indexed_finish(mp_halo_indexed_t indexed, mp_stream_t stream) {
    return with_object(indexed, [&](exchange_object &object) { object.exchange.finish(stream); });
}

mp_status_t mp_halo_indexed_get_info(mp_halo_indexed_t indexed, uint64_t *entries, uint64_t *sent, uint64_t *received) {
    return with_object(indexed, [&](const exchange_object &object) {
        const auto write = [](uint64_t *to, uint64_t value) {
            if (to != nullptr) {
                *to = value;
            }
        };
        write(entries, object.exchange.entries());
        write(sent, object.exchange.sent());
        write(received, object.exchange.received());
    });
}

mp_status_t mp_halo_indexed_destroy(mp_halo_indexed_t indexed) {
    std::unique_ptr<exchange_object> object;
    const mp_status_t found = guarded(language::c, [&] { object = table().remove(indexed); });
    return found != MP_SUCCESS ? found : guarded(object->names, [&] { object->exchange.destroy(); });
}

mp_status_t mp_halo_indexed_leave(mp_halo_indexed_t indexed) {
    return guarded(language::c, [&] { table().remove(indexed).reset(); });
}

} // extern "C"
