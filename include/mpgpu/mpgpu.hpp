// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HPP
#define MPGPU_HPP

/// @file
/// The C++ API of mpgpu: a header over mpgpu.h and nothing else. C++17, no CUDA headers, no library of its own.
///
/// @code
/// mpgpu::context ctx;
/// mpgpu::buffer<float> a(ctx, mpgpu::device::gpu(0), n), b(ctx, mpgpu::device::gpu(1), n);
/// mpgpu::plan halo(ctx, {mpgpu::make_transfer(b, a)});
/// mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
/// mpgpu::request done = halo.execute(stream);
/// done.wait();
/// @endcode
///
/// Errors. A function that can fail throws `mpgpu::error` or one of the classes derived from it. Each has an overload
/// with a trailing `std::error_code &` that reports there instead, as `std::filesystem` does; it throws at most
/// `std::bad_alloc`, and only where it makes a string or stores a callable. A constructor that reports so leaves the
/// object empty. `mpgpu::last_error()` has the details either way. Destructors never throw. Without exceptions
/// (`-fno-exceptions`) the throwing form prints the error to `stderr` and calls `std::abort`.
///
/// Ownership. `context`, `plan`, `request`, `stream`, `event` and `buffer` own one thing each and can be moved, not
/// copied. A moved-from object is empty: it may be destroyed, assigned to and tested; a call on it reports
/// `errc::invalid_handle`. Objects made from a context may outlive it: they are then invalid, which is reported and
/// never dereferenced.
///
/// Threads. The library may be called from any thread. Of one object, `const` functions may run at the same time; the
/// others need the caller's own synchronisation, as everywhere in the standard library.
///
/// Units are bytes and seconds, except that sizes of `buffer<T>` and of spans count elements.

#include <mpgpu/mpgpu.h>

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define MPGPU_EXCEPTIONS 1
#else
#define MPGPU_EXCEPTIONS 0
#endif

namespace mpgpu {

class event;

// ---- errors --------------------------------------------------------------------------

/// The statuses of the C API. A `std::error_code` set by this header compares equal to one of them.
enum class errc : int {
    success = MP_SUCCESS,
    invalid_argument = MP_ERROR_INVALID_ARGUMENT,
    invalid_handle = MP_ERROR_INVALID_HANDLE,
    invalid_device = MP_ERROR_INVALID_DEVICE,
    invalid_pointer = MP_ERROR_INVALID_POINTER,
    overlap = MP_ERROR_OVERLAP,
    no_route = MP_ERROR_NO_ROUTE,
    out_of_memory = MP_ERROR_OUT_OF_MEMORY,
    not_supported = MP_ERROR_NOT_SUPPORTED,
    no_driver = MP_ERROR_NO_DRIVER,
    driver = MP_ERROR_DRIVER,
    topology = MP_ERROR_TOPOLOGY,
    environment = MP_ERROR_ENVIRONMENT,
    version_mismatch = MP_ERROR_VERSION_MISMATCH,
    data_corruption = MP_ERROR_DATA_CORRUPTION,
    internal = MP_ERROR_INTERNAL,
    peer_gone = MP_ERROR_PEER_GONE,
    timeout = MP_ERROR_TIMEOUT
};

namespace detail {

class category_type final : public std::error_category {
  public:
    [[nodiscard]] const char *name() const noexcept override { return "mpgpu"; }

    [[nodiscard]] std::string message(int condition) const override {
        return mp_status_string(static_cast<mp_status_t>(condition));
    }

    [[nodiscard]] std::error_condition default_error_condition(int condition) const noexcept override {
        switch (static_cast<errc>(condition)) {
        case errc::invalid_argument:
            return std::errc::invalid_argument;
        case errc::invalid_device:
            return std::errc::no_such_device;
        case errc::invalid_pointer:
            return std::errc::bad_address;
        case errc::out_of_memory:
            return std::errc::not_enough_memory;
        case errc::not_supported:
            return std::errc::not_supported;
        case errc::timeout:
            return std::errc::timed_out;
        default:
            return {condition, *this};
        }
    }
};

} // namespace detail

/// The category of the error codes that this header sets.
inline const std::error_category &category() noexcept {
    static const detail::category_type instance;
    return instance;
}

/// The error code of a status; found by `std::error_code` itself.
inline std::error_code make_error_code(errc status) noexcept {
    return {static_cast<int>(status), category()};
}

/// What the last failed call on this thread had to say.
struct error_details {
    /// Its status; `MP_SUCCESS` when no call on this thread has failed.
    mp_status_t status = MP_SUCCESS;
    /// What the driver or the operating system returned; 0 when neither was involved.
    std::int64_t driver_code = 0;
    /// The name of the argument at fault; empty when no single one is.
    std::string argument;
    /// What was wrong, with the value, and what to do about it.
    std::string message;
};

/// Copies the details of the last failed call of the library on the calling thread. Throws nothing but
/// `std::bad_alloc`.
[[nodiscard]] inline error_details last_error() {
    mp_error_info_t last{};
    last.size = sizeof(last);
    error_details details;
    if (mp_last_error_info(&last) == MP_SUCCESS) {
        details.status = last.status;
        details.driver_code = last.driver_code;
        details.argument = last.argument != nullptr ? last.argument : "";
        details.message = last.message != nullptr ? last.message : "";
    }
    return details;
}

/// The base of every exception of this header. `what()` says what was wrong, with the value, and what to do about it.
class error : public std::runtime_error {
  public:
    /// An error with the details of a failed call.
    explicit error(error_details details)
        : std::runtime_error(details.message), details_(std::make_shared<const error_details>(std::move(details))) {}

    /// The status that the C API returned.
    [[nodiscard]] mp_status_t status() const noexcept { return details_->status; }

    /// The same as a `std::error_code`.
    [[nodiscard]] std::error_code code() const noexcept { return make_error_code(static_cast<errc>(status())); }

    /// What the driver or the operating system returned; 0 when neither was involved.
    [[nodiscard]] std::int64_t driver_code() const noexcept { return details_->driver_code; }

    /// The name of the argument at fault; empty when no single one is.
    [[nodiscard]] const std::string &argument() const noexcept { return details_->argument; }

  private:
    std::shared_ptr<const error_details> details_; // shared, because copying an exception must not throw
};

/// The caller passed something wrong: a value, a handle, a device, a pointer, or transfers that overlap.
class invalid_argument : public error {
  public:
    using error::error;
};

/// A device or the host has no memory left.
class out_of_memory : public error {
  public:
    using error::error;
};

/// This machine, driver or build cannot do it: no route between two devices, no driver, an engine that does not exist
/// here.
class not_supported : public error {
  public:
    using error::error;
};

/// The library was set up wrongly: a topology file, an environment variable, or a header of another version.
class configuration_error : public error {
  public:
    using error::error;
};

/// The driver or the operating system refused; `driver_code()` is what it returned.
class driver_error : public error {
  public:
    using error::error;
};

/// Bytes arrived wrong. Only where verification is switched on.
class data_corruption : public error {
  public:
    using error::error;
};

/// Another process has ended, or has freed what it shared.
class peer_gone : public error {
  public:
    using error::error;
};

/// What was waited for has not come in time.
class timeout : public error {
  public:
    using error::error;
};

/// A defect of the library itself.
class internal_error : public error {
  public:
    using error::error;
};

namespace detail {

template <class Exception> [[noreturn]] void fail_as(error_details &&details) {
#if MPGPU_EXCEPTIONS
    throw Exception(std::move(details));
#else
    std::fprintf(stderr, "mpgpu: %s\n", details.message.c_str());
    std::abort();
#endif
}

[[noreturn]] inline void fail(error_details &&details) {
    switch (details.status) {
    case MP_ERROR_INVALID_ARGUMENT:
    case MP_ERROR_INVALID_HANDLE:
    case MP_ERROR_INVALID_DEVICE:
    case MP_ERROR_INVALID_POINTER:
    case MP_ERROR_OVERLAP:
        fail_as<invalid_argument>(std::move(details));
    case MP_ERROR_OUT_OF_MEMORY:
        fail_as<out_of_memory>(std::move(details));
    case MP_ERROR_NO_ROUTE:
    case MP_ERROR_NOT_SUPPORTED:
    case MP_ERROR_NO_DRIVER:
        fail_as<not_supported>(std::move(details));
    case MP_ERROR_TOPOLOGY:
    case MP_ERROR_ENVIRONMENT:
    case MP_ERROR_VERSION_MISMATCH:
        fail_as<configuration_error>(std::move(details));
    case MP_ERROR_DRIVER:
        fail_as<driver_error>(std::move(details));
    case MP_ERROR_DATA_CORRUPTION:
        fail_as<data_corruption>(std::move(details));
    case MP_ERROR_INTERNAL:
        fail_as<internal_error>(std::move(details));
    case MP_ERROR_PEER_GONE:
        fail_as<peer_gone>(std::move(details));
    case MP_ERROR_TIMEOUT:
        fail_as<timeout>(std::move(details));
    default: // a status that is newer than this header
        fail_as<error>(std::move(details));
    }
}

inline void check(mp_status_t status) {
    if (status != MP_SUCCESS) {
        error_details details = last_error();
        details.status = status;
        fail(std::move(details));
    }
}

inline std::error_code code_of(mp_status_t status) noexcept {
    return make_error_code(static_cast<errc>(status));
}

// ---- ownership -----------------------------------------------------------------------

/// Move-only ownership of one C handle, the same for every owning type below. `Owner` is called with the handle to give
/// it back and holds what that needs; it moves with the handle, so that a moved-from object is empty altogether.
template <class T, class Owner> class handle : private Owner {
  public:
    handle() noexcept = default;
    explicit handle(T value, Owner owner = {}) noexcept : Owner(owner), value_(value) {}
    handle(handle &&other) noexcept
        : Owner(std::exchange(static_cast<Owner &>(other), Owner{})), value_(std::exchange(other.value_, nullptr)) {}
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;

    handle &operator=(handle &&other) noexcept {
        handle moved(std::move(other)); // empties `other` first, so that moving an object into itself changes nothing
        std::swap(static_cast<Owner &>(*this), static_cast<Owner &>(moved));
        std::swap(value_, moved.value_);
        return *this;
    }

    ~handle() {
        if (value_ != nullptr) {
            static_cast<Owner &> (*this)(value_);
        }
    }

    [[nodiscard]] T get() const noexcept { return value_; }
    [[nodiscard]] const Owner &owner() const noexcept { return *this; }

    /// Where a C function writes a handle, or clears it.
    [[nodiscard]] T *address() noexcept { return &value_; }

    explicit operator bool() const noexcept { return value_ != nullptr; }

  private:
    T value_ = nullptr;
};

/// Owner of a handle that knows its context.
template <auto Destroy> struct destroyed_by {
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(value)); }
};

/// Owner of a handle that is given back to the context it came from.
template <auto Destroy> struct destroyed_in {
    mp_context_t context = nullptr;
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(context, value)); }
};

struct forgotten {
    void operator()(mp_request_t value) const noexcept { static_cast<void>(mp_request_free(&value)); }
};

/// Owner of device memory, and what is known about that memory.
struct freed_in {
    mp_context_t context = nullptr;
    std::size_t size = 0;
    std::int32_t device = 0;
    void operator()(void *memory) const noexcept { static_cast<void>(mp_free(context, memory)); }
};

/// Owner of a mapping of another process's memory, and what is known about that memory.
struct closed_in {
    mp_context_t context = nullptr;
    std::size_t size = 0;
    std::int32_t device = 0;
    void operator()(void *memory) const noexcept { static_cast<void>(mp_memory_close(context, memory)); }
};

/// Calls `write(text, capacity, length)` until the text fits: a description may grow between two calls.
template <class Write> mp_status_t describe(std::string &text, Write &&write) {
    std::size_t length = 0; // with the final NUL
    mp_status_t status = write(nullptr, 0, &length);
    while (status == MP_SUCCESS) {
        text.resize(length);
        status = write(text.data(), text.size(), &length);
        if (status == MP_SUCCESS) {
            text.resize(length - 1);
            return status;
        }
        if (length > text.size()) {
            status = MP_SUCCESS; // it has grown; anything else that fails leaves the length as it was
        }
    }
    return status;
}

template <class Task> void run_task(void *user) noexcept {
    (*static_cast<Task *>(user))();
}

template <class Task> void release_task(void *user) noexcept {
    delete static_cast<Task *>(user); // made in `launch_host`
}

/// Enqueues a copy of `task`, which the library gives back when it will not run again.
template <class Task> mp_status_t launch_host(mp_context_t context, mp_stream_t stream, Task &&task) {
    using stored = std::decay_t<Task>;
    static_assert(std::is_invocable_v<stored &>, "mpgpu: a host task is called without arguments");
    auto copy = std::make_unique<stored>(std::forward<Task>(task));
    const mp_status_t status =
        mp_stream_launch_host_owned(context, stream, &run_task<stored>, copy.get(), &release_task<stored>);
    if (status == MP_SUCCESS) {
        static_cast<void>(copy.release()); // the library's until release_task
    }
    return status;
}

} // namespace detail

// ---- values --------------------------------------------------------------------------

/// The version of the library at run time, as `MP_VERSION` counts; the header's own is `MP_VERSION`.
[[nodiscard]] inline std::uint32_t version() noexcept {
    return mp_version();
}

/// The memory of a GPU or of a host NUMA domain. A type of its own, so that a device is never mistaken for a size or a
/// rank.
class device {
  public:
    /// The GPU with this index, as the context counts, from 0. A negative index gives a device that no machine has.
    [[nodiscard]] static constexpr device gpu(int index) noexcept {
        return device(index >= 0 ? index : std::numeric_limits<std::int32_t>::max());
    }

    /// The host memory of a NUMA domain, from 0. A negative domain gives a device that no machine has.
    [[nodiscard]] static constexpr device host(int domain = 0) noexcept {
        return device(domain >= 0 ? -1 - domain : std::numeric_limits<std::int32_t>::min());
    }

    /// In a transfer: whichever device the address belongs to, `MP_DEVICE_AUTO`. An address that the library does not
    /// know is ordinary host memory.
    [[nodiscard]] static constexpr device automatic() noexcept { return device(MP_DEVICE_AUTO); }

    /// The device with this number in the C API: GPUs count up from 0, host NUMA domains down from -1.
    [[nodiscard]] static constexpr device from_id(std::int32_t id) noexcept { return device(id); }

    /// Its number in the C API.
    [[nodiscard]] constexpr std::int32_t id() const noexcept { return id_; }

    /// Whether it is host memory.
    [[nodiscard]] constexpr bool is_host() const noexcept { return id_ < 0; }

    friend constexpr bool operator==(device a, device b) noexcept { return a.id_ == b.id_; }
    friend constexpr bool operator!=(device a, device b) noexcept { return a.id_ != b.id_; }

  private:
    constexpr explicit device(std::int32_t id) noexcept : id_(id) {}
    std::int32_t id_;
};

/// A contiguous sequence of elements that someone else owns: the part of `std::span` that C++17 lacks. Made from an
/// array or from anything with `data()` and `size()`, `std::span` included, and convertible to `std::span`.
template <class T> class span {
    template <class C>
    using element_of = std::remove_pointer_t<decltype(std::declval<C &>().data(), std::declval<C &>().size(),
                                                      std::declval<C &>().data())>;
    template <class C>
    static constexpr bool is_other = !std::is_array_v<std::remove_reference_t<C>> &&
                                     !std::is_same_v<std::remove_cv_t<std::remove_reference_t<C>>, span>;

  public:
    using element_type = T;
    using value_type = std::remove_cv_t<T>;

    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N> constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}

    /// The elements of a container. A temporary is accepted only where the elements are const, as a function's
    /// argument.
    template <class C, std::enable_if_t<is_other<C> && (std::is_lvalue_reference_v<C> || std::is_const_v<T>), int> = 0,
              std::enable_if_t<std::is_convertible_v<element_of<std::remove_reference_t<C>> (*)[], T (*)[]>, int> = 0>
    constexpr span(C &&container) noexcept(noexcept(container.data()))
        : data_(container.data()), size_(container.size()) {}

    [[nodiscard]] constexpr T *data() const noexcept { return data_; }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
    [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }

    [[nodiscard]] constexpr T &operator[](std::size_t index) const {
        assert(index < size_);
        return data_[index];
    }

    /// `count` elements from `offset` on, both inside the span.
    [[nodiscard]] constexpr span subspan(std::size_t offset, std::size_t count) const {
        assert(offset <= size_ && count <= size_ - offset);
        return {data_ + offset, count};
    }

  private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/// A span and the device whose memory it lies in: one end of a transfer. Owns nothing.
template <class T> class device_span {
    static_assert(std::is_trivially_copyable_v<T>, "mpgpu: a transfer copies bytes, so the elements must allow that");

  public:
    using element_type = T;

    constexpr device_span(span<T> elements, device location) noexcept : elements_(elements), location_(location) {}

    /// A read-only view of the same elements.
    template <class U, std::enable_if_t<std::is_same_v<const U, T>, int> = 0>
    constexpr device_span(device_span<U> other) noexcept
        : elements_(other.data(), other.size()), location_(other.location()) {}

    [[nodiscard]] constexpr T *data() const noexcept { return elements_.data(); }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return elements_.size(); }
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return elements_.size_bytes(); }
    [[nodiscard]] constexpr device location() const noexcept { return location_; }

    /// `count` elements from `offset` on, both inside the span.
    [[nodiscard]] constexpr device_span subspan(std::size_t offset, std::size_t count) const {
        return {elements_.subspan(offset, count), location_};
    }

  private:
    span<T> elements_;
    device location_;
};

/// One copy of a batch: the C struct, a plain value. `make_transfer` fills it from two spans.
using transfer = mp_transfer_t;

/// A counter of 64 bits in memory of `buffer<std::uint64_t>`, or in imported memory, and the value that it is raised to
/// or waited for. The C struct, a plain value.
using signal = mp_signal_t;

/// A stream that someone else owns: a `cudaStream_t`, or the view of an `mpgpu::stream`. An integer or `nullptr` is
/// refused at compile time; the default stream is asked for by name.
class stream_view {
  public:
    stream_view() = delete;
    stream_view(int) = delete;
    stream_view(std::nullptr_t) = delete;
    constexpr stream_view(mp_stream_t stream) noexcept : stream_(stream) {}

    /// The default stream of the backend in use: CUDA's legacy default stream.
    [[nodiscard]] static constexpr stream_view default_stream() noexcept { return {static_cast<mp_stream_t>(nullptr)}; }

    [[nodiscard]] constexpr mp_stream_t get() const noexcept { return stream_; }

    friend constexpr bool operator==(stream_view a, stream_view b) noexcept { return a.stream_ == b.stream_; }
    friend constexpr bool operator!=(stream_view a, stream_view b) noexcept { return a.stream_ != b.stream_; }

  private:
    mp_stream_t stream_;
};

/// Where bytes move.
enum class backend : std::int32_t {
    automatic = MP_BACKEND_AUTO, ///< CUDA where a driver is found, else the host backend
    host = MP_BACKEND_HOST,      ///< virtual devices on CPU threads
    cuda = MP_BACKEND_CUDA
};

/// What runs a plan.
enum class engine : std::int32_t {
    automatic = MP_ENGINE_AUTO, ///< the one that the model finds fastest
    stream = MP_ENGINE_STREAM,  ///< copies on internal streams, joined by events
    graph = MP_ENGINE_GRAPH,    ///< the same copies as one graph launch
    batch = MP_ENGINE_BATCH,    ///< direct copies in batched calls
    kernel = MP_ENGINE_KERNEL   ///< direct copies in fused kernels
};

/// Form of a description.
enum class format : std::int32_t { text = MP_FORMAT_TEXT, json = MP_FORMAT_JSON };

/// How to set up a context. A field left alone is decided by the environment, then by the library.
struct context_options {
    /// Where bytes move.
    mpgpu::backend backend = mpgpu::backend::automatic;
    /// Name of a preset, or path of a topology file; empty: the machine is discovered.
    std::string topology;
    /// The most staging memory on each device, bytes; 0: left to the library.
    std::uint64_t staging_bytes = 0;
    /// How many plans are kept for reuse; 0: left to the library.
    std::uint64_t cache_plans = 0;
};

/// How to plan. A field left alone is decided by the environment, then by the tuning file, then by the model.
struct plan_options {
    /// What runs the plan.
    mpgpu::engine engine = mpgpu::engine::automatic;
    /// The most paths that one transfer may use; 0: left to the model.
    std::uint32_t max_paths = 0;
    /// Whether a copy between GPUs may also pass through host memory. Left alone, it may not in plans with an end in
    /// another process's memory.
    std::optional<bool> host_path;
    /// Bytes of one chunk on staged paths; 0: left to the model.
    std::uint64_t chunk_bytes = 0;
    /// Transfers below this many bytes take one path; 0: left to the model.
    std::uint64_t min_bytes = 0;
    /// The most staging memory on each device, bytes; 0: the context's bound.
    std::uint64_t staging_bytes = 0;
};

/// How to probe a machine.
struct probe_options {
    /// The file to write; empty: one in the user's cache directory, where contexts on these GPUs find it, and beside it
    /// what was tuned for it.
    std::string file;
    /// Whether to write a file.
    bool keep = true;
    /// Fewer and shorter measurements, for a first look. Nothing is tuned.
    bool quick = false;
};

/// What a plan promises: bytes, paths, and modelled (never measured) seconds. The C struct.
using plan_info = mp_plan_info_t;
/// What a context has done. The C struct.
using context_statistics = mp_statistics_t;
/// What a context holds on one device. The C struct.
using device_statistics = mp_device_statistics_t;

/// How many devices a context has.
struct device_count {
    /// GPUs, `device::gpu(0)` to `device::gpu(gpus - 1)`.
    int gpus = 0;
    /// Host NUMA domains, `device::host(0)` to `device::host(host_domains - 1)`.
    int host_domains = 0;
};

// ---- context -------------------------------------------------------------------------

/// A machine and everything that the library holds on it. One per process is the rule; it may be used from all threads.
class context {
  public:
    /// Finds the machine and reads the environment, here and only here. Allocates nothing on a device: that waits for
    /// the first plan that uses it. Throws `configuration_error`, `not_supported`, `invalid_argument`, `driver_error`.
    explicit context(const context_options &options = {}) { detail::check(create(options)); }
    /// As above, reporting to `ec`.
    context(const context_options &options, std::error_code &ec) noexcept { ec = detail::code_of(create(options)); }

    context(context &&) noexcept = default;
    context &operator=(context &&) noexcept = default;
    context(const context &) = delete;
    context &operator=(const context &) = delete;
    /// Waits for the work of this context, then frees what it holds, all its memory included. Its other objects become
    /// invalid.
    ~context() = default;

    /// How many devices there are. Throws `invalid_argument` when this is empty.
    [[nodiscard]] device_count devices() const {
        device_count count;
        detail::check(count_devices(count));
        return count;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] device_count devices(std::error_code &ec) const noexcept {
        device_count count;
        ec = detail::code_of(count_devices(count));
        return count;
    }

    /// The machine as the library sees it: devices, links, resources. Throws `invalid_argument` when this is empty.
    [[nodiscard]] std::string describe(format form = format::text) const {
        std::string text;
        detail::check(write_description(text, form));
        return text;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] std::string describe(format form, std::error_code &ec) const {
        std::string text;
        ec = detail::code_of(write_description(text, form));
        return text;
    }

    /// Measures the machine: how fast copies are, which slow each other down, whether their bytes arrive. Contexts made
    /// later use the result, this one does not. A full probe that is kept for them also tunes copies of host memory and
    /// all-to-alls, see `mp_context_probe`. Takes seconds, memory on every device and all links, and must run alone.
    /// Throws `invalid_argument`, `out_of_memory`, `not_supported`, `configuration_error`, `driver_error`.
    void probe(const probe_options &options = {}) const { detail::check(measure(options)); }
    /// As above, reporting to `ec`.
    void probe(const probe_options &options, std::error_code &ec) const noexcept {
        ec = detail::code_of(measure(options));
    }

    /// The topology file of the last `probe`. Throws `configuration_error` when there was none.
    [[nodiscard]] std::string probed() const {
        std::string text;
        detail::check(write_probed(text));
        return text;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] std::string probed(std::error_code &ec) const {
        std::string text;
        ec = detail::code_of(write_probed(text));
        return text;
    }

    /// Counts since the context was made. Throws `invalid_argument` when this is empty.
    [[nodiscard]] context_statistics statistics() const {
        auto counts = sized<context_statistics>();
        detail::check(mp_context_statistics(get(), &counts));
        return counts;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] context_statistics statistics(std::error_code &ec) const noexcept {
        auto counts = sized<context_statistics>();
        ec = detail::code_of(mp_context_statistics(get(), &counts));
        return counts;
    }

    /// What the context holds on one device now, bytes. Throws `invalid_argument` when there is no such device.
    [[nodiscard]] device_statistics statistics(device where) const {
        auto held = sized<device_statistics>();
        detail::check(mp_context_device_statistics(get(), where.id(), &held));
        return held;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] device_statistics statistics(device where, std::error_code &ec) const noexcept {
        auto held = sized<device_statistics>();
        ec = detail::code_of(mp_context_device_statistics(get(), where.id(), &held));
        return held;
    }

    /// Blocks the calling thread until everything enqueued in a stream so far has finished. For streams that are not an
    /// `mpgpu::stream`. Throws as `stream::synchronize` does.
    void synchronize(stream_view stream) const { detail::check(mp_stream_synchronize(get(), stream.get())); }
    /// As above, reporting to `ec`.
    void synchronize(stream_view stream, std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_stream_synchronize(get(), stream.get()));
    }

    /// Enqueues a call of `task()` on a CPU thread in the order of a stream that is not an `mpgpu::stream`. See
    /// `stream::launch_host`.
    template <class Task> void launch_host(stream_view stream, Task &&task) const {
        detail::check(detail::launch_host(get(), stream.get(), std::forward<Task>(task)));
    }
    /// As above, reporting to `ec`.
    template <class Task> void launch_host(stream_view stream, Task &&task, std::error_code &ec) const {
        ec = detail::code_of(detail::launch_host(get(), stream.get(), std::forward<Task>(task)));
    }

    /// Work enqueued from now on in a stream that is not an `mpgpu::stream` starts after what `ev` stands for now. See
    /// `stream::wait`.
    inline void wait(stream_view stream, const event &ev) const;
    /// As above, reporting to `ec`.
    inline void wait(stream_view stream, const event &ev, std::error_code &ec) const noexcept;

    /// Work enqueued from now on in `stream` starts when the counters of all signals have reached their values; it sees
    /// what was written before they were raised. Does not block. The counters lie in memory of this context. Throws
    /// `invalid_argument`, `not_supported` for imported memory, `peer_gone` for what a process that has ended was to
    /// raise, `driver_error`.
    void wait(stream_view stream, span<const signal> signals) const {
        detail::check(mp_stream_wait_signals(get(), stream.get(), signals.data(), signals.size()));
    }
    /// As above, reporting to `ec`.
    void wait(stream_view stream, span<const signal> signals, std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_stream_wait_signals(get(), stream.get(), signals.data(), signals.size()));
    }
    void wait(stream_view stream, std::initializer_list<signal> signals) const {
        wait(stream, span<const signal>(signals.begin(), signals.size()));
    }
    void wait(stream_view stream, std::initializer_list<signal> signals, std::error_code &ec) const noexcept {
        wait(stream, span<const signal>(signals.begin(), signals.size()), ec);
    }

    /// Raises the counters of all signals after all work enqueued in `stream` so far. Does not block. Throws
    /// `invalid_argument`, `peer_gone` when the owner of a counter's memory has ended or freed it, `driver_error`.
    void raise(stream_view stream, span<const signal> signals) const {
        detail::check(mp_stream_raise_signals(get(), stream.get(), signals.data(), signals.size()));
    }
    /// As above, reporting to `ec`.
    void raise(stream_view stream, span<const signal> signals, std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_stream_raise_signals(get(), stream.get(), signals.data(), signals.size()));
    }
    void raise(stream_view stream, std::initializer_list<signal> signals) const {
        raise(stream, span<const signal>(signals.begin(), signals.size()));
    }
    void raise(stream_view stream, std::initializer_list<signal> signals, std::error_code &ec) const noexcept {
        raise(stream, span<const signal>(signals.begin(), signals.size()), ec);
    }

    /// Blocks the calling thread until a counter in host memory of this context has reached a value, at most `seconds`.
    /// Throws `timeout`, `peer_gone` when a process that might have raised it has ended, `invalid_argument`.
    void wait(const std::uint64_t *counter, std::uint64_t value, double seconds) const {
        detail::check(mp_signal_wait(get(), counter, value, seconds));
    }
    /// As above, reporting to `ec`.
    void wait(const std::uint64_t *counter, std::uint64_t value, double seconds, std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_signal_wait(get(), counter, value, seconds));
    }

    /// The C handle, still owned by this object.
    [[nodiscard]] mp_context_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a context.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    template <class Struct> static Struct sized() noexcept {
        Struct value{};
        value.size = sizeof(Struct);
        return value;
    }

    mp_status_t create(const context_options &options) noexcept {
        auto c = sized<mp_context_options_t>();
        c.backend = static_cast<std::int32_t>(options.backend);
        c.topology = options.topology.empty() ? nullptr : options.topology.c_str();
        c.staging_bytes = options.staging_bytes;
        c.cache_plans = options.cache_plans;
        return mp_context_create(&c, handle_.address()); // inline in the C header: passes the version of this header
    }

    mp_status_t count_devices(device_count &count) const noexcept {
        std::int32_t gpus = 0;
        std::int32_t host_domains = 0;
        const mp_status_t status = mp_context_device_count(get(), &gpus, &host_domains);
        count = {gpus, host_domains};
        return status;
    }

    [[nodiscard]] mp_status_t measure(const probe_options &options) const noexcept {
        auto c = sized<mp_probe_options_t>();
        c.file = options.file.empty() ? nullptr : options.file.c_str();
        c.keep = options.keep ? MP_ON : MP_OFF;
        c.quick = options.quick ? MP_ON : MP_OFF;
        return mp_context_probe(get(), &c);
    }

    mp_status_t write_probed(std::string &text) const {
        return detail::describe(text, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_probed(get(), out, capacity, length);
        });
    }

    mp_status_t write_description(std::string &text, format form) const {
        return detail::describe(text, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    detail::handle<mp_context_t, detail::destroyed_by<mp_context_destroy>> handle_;
};

// ---- memory --------------------------------------------------------------------------

/// Memory of one device for `size()` elements of `T`, uninitialised, aligned to 256 bytes or more, host memory pinned.
template <class T> class buffer {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                  "mpgpu: elements are moved as bytes and never constructed");

  public:
    using element_type = T;

    /// Owns nothing.
    buffer() noexcept = default;
    /// Allocates `size` elements on `where`; none at all when `size` is 0. Throws `out_of_memory`, `invalid_argument`,
    /// `driver_error`.
    buffer(const context &ctx, device where, std::size_t size) { detail::check(allocate(ctx, where, size)); }
    /// As above, reporting to `ec`.
    buffer(const context &ctx, device where, std::size_t size, std::error_code &ec) noexcept {
        ec = detail::code_of(allocate(ctx, where, size));
    }

    buffer(buffer &&) noexcept = default;
    buffer &operator=(buffer &&) noexcept = default;
    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;
    /// Waits until everything enqueued so far has finished, as `cudaFree` does, because a copy may still use the
    /// memory; then frees it.
    ~buffer() = default;

    /// The first element. On a GPU of the CUDA backend it is an address that only GPUs and copies may follow.
    [[nodiscard]] T *data() noexcept { return handle_.get(); }
    [[nodiscard]] const T *data() const noexcept { return handle_.get(); }
    /// Elements.
    [[nodiscard]] std::size_t size() const noexcept { return handle_.owner().size; }
    /// Bytes.
    [[nodiscard]] std::size_t size_bytes() const noexcept { return size() * sizeof(T); }
    /// Whose memory it is; meaningless when empty.
    [[nodiscard]] device location() const noexcept { return device::from_id(handle_.owner().device); }
    /// Whether this owns memory.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

    /// All elements, as one end of a transfer.
    operator device_span<T>() noexcept { return {{data(), size()}, location()}; }
    operator device_span<const T>() const noexcept { return {{data(), size()}, location()}; }

    /// `count` elements from `offset` on, both inside the buffer, as one end of a transfer.
    [[nodiscard]] device_span<T> subspan(std::size_t offset, std::size_t count) {
        return device_span<T>(*this).subspan(offset, count);
    }
    [[nodiscard]] device_span<const T> subspan(std::size_t offset, std::size_t count) const {
        return device_span<const T>(*this).subspan(offset, count);
    }

  private:
    mp_status_t allocate(const context &ctx, device where, std::size_t size) noexcept {
        if (size == 0) {
            handle_ = handle_type(nullptr, {ctx.get(), 0, where.id()});
            return MP_SUCCESS;
        }
        // More bytes than can be counted are asked for as the most that can: the library then says what it was asked
        // for.
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        const std::uint64_t bytes = size <= most / sizeof(T) ? size * sizeof(T) : most;
        void *memory = nullptr;
        const mp_status_t status = mp_alloc(ctx.get(), where.id(), bytes, &memory);
        if (status == MP_SUCCESS) {
            handle_ = handle_type(static_cast<T *>(memory), {ctx.get(), size, where.id()});
        }
        return status;
    }

    using handle_type = detail::handle<T *, detail::freed_in>;
    handle_type handle_;
};

/// Untyped memory, its size in bytes.
using memory = buffer<std::byte>;

// ---- memory of other processes -------------------------------------------------------

/// A range of memory for another process of the node: 128 bytes that may travel over MPI or anything else. The C
/// struct, trivially copyable; it owns nothing.
using memory_handle = mp_memory_handle_t;

/// Describes memory for other processes of the node, which map it as `imported_memory`. It stays its owner's: it can be
/// mapped until it is freed or the context is destroyed. Throws `invalid_argument`, `not_supported` for memory that
/// cannot be shared, `driver_error`.
template <class T> [[nodiscard]] memory_handle export_memory(const context &ctx, device_span<T> range) {
    memory_handle handle{};
    detail::check(mp_memory_export(ctx.get(), range.data(), range.size_bytes(), &handle));
    return handle;
}
/// As above, reporting to `ec`.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, device_span<T> range, std::error_code &ec) noexcept {
    memory_handle handle{};
    ec = detail::code_of(mp_memory_export(ctx.get(), range.data(), range.size_bytes(), &handle));
    return handle;
}
/// All elements of a buffer.
template <class T> [[nodiscard]] memory_handle export_memory(const context &ctx, const buffer<T> &whole) {
    return export_memory(ctx, device_span<const T>(whole));
}
/// As above, reporting to `ec`.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, const buffer<T> &whole, std::error_code &ec) noexcept {
    return export_memory(ctx, device_span<const T>(whole), ec);
}

/// Memory of another process, mapped here: `size()` elements of `T`, as an end of transfers.
template <class T> class imported_memory {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                  "mpgpu: elements are moved as bytes and never constructed");

  public:
    using element_type = T;

    /// Owns nothing.
    imported_memory() noexcept = default;
    /// Maps what a handle of `export_memory` describes; bytes at its end that make no whole `T` are left out. A handle
    /// of this process gives the memory's own address. Waits at most five seconds for the exporter's answer. Throws
    /// `invalid_argument` for bytes that are no handle, `not_supported` for one from another node, container or user,
    /// `configuration_error` for one of another version, `peer_gone`, `timeout`, `driver_error`.
    imported_memory(const context &ctx, const memory_handle &handle) { detail::check(map(ctx.get(), handle)); }
    /// As above, reporting to `ec`.
    imported_memory(const context &ctx, const memory_handle &handle, std::error_code &ec) noexcept
        : imported_memory(ctx.get(), handle, ec) {}
    /// As above, for a context's C handle.
    imported_memory(mp_context_t ctx, const memory_handle &handle, std::error_code &ec) noexcept {
        ec = detail::code_of(map(ctx, handle));
    }

    imported_memory(imported_memory &&) noexcept = default;
    imported_memory &operator=(imported_memory &&) noexcept = default;
    imported_memory(const imported_memory &) = delete;
    imported_memory &operator=(const imported_memory &) = delete;
    /// With the last import of an allocation, waits until everything enqueued so far has finished, and unmaps it.
    ~imported_memory() = default;

    /// The first element. On a GPU of the CUDA backend it is an address that only GPUs and copies may follow.
    [[nodiscard]] T *data() noexcept { return handle_.get(); }
    [[nodiscard]] const T *data() const noexcept { return handle_.get(); }
    /// Elements.
    [[nodiscard]] std::size_t size() const noexcept { return handle_.owner().size; }
    /// Bytes.
    [[nodiscard]] std::size_t size_bytes() const noexcept { return size() * sizeof(T); }
    /// Whose memory it is, as this process numbers devices; meaningless when empty.
    [[nodiscard]] device location() const noexcept { return device::from_id(handle_.owner().device); }
    /// Whether this owns an import.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

    /// All elements, as one end of a transfer.
    operator device_span<T>() noexcept { return {{data(), size()}, location()}; }
    operator device_span<const T>() const noexcept { return {{data(), size()}, location()}; }

    /// `count` elements from `offset` on, both inside, as one end of a transfer.
    [[nodiscard]] device_span<T> subspan(std::size_t offset, std::size_t count) {
        return device_span<T>(*this).subspan(offset, count);
    }
    [[nodiscard]] device_span<const T> subspan(std::size_t offset, std::size_t count) const {
        return device_span<const T>(*this).subspan(offset, count);
    }

  private:
    mp_status_t map(mp_context_t ctx, const memory_handle &handle) noexcept {
        void *mapped = nullptr;
        std::int32_t where = 0;
        std::uint64_t bytes = 0;
        const mp_status_t status = mp_memory_import(ctx, &handle, &mapped, &where, &bytes);
        if (status == MP_SUCCESS) {
            const auto size = static_cast<std::size_t>(bytes / sizeof(T));
            handle_ = handle_type(static_cast<T *>(mapped), {ctx, size, where});
        }
        return status;
    }

    using handle_type = detail::handle<T *, detail::closed_in>;
    handle_type handle_;
};

namespace detail {

template <class T> device_span<T> as_device_span(device_span<T> whole) noexcept {
    return whole;
}
template <class T> device_span<T> as_device_span(buffer<T> &whole) noexcept {
    return whole;
}
template <class T> device_span<const T> as_device_span(const buffer<T> &whole) noexcept {
    return whole;
}

template <class T> device_span<T> as_device_span(imported_memory<T> &whole) noexcept {
    return whole;
}
template <class T> device_span<const T> as_device_span(const imported_memory<T> &whole) noexcept {
    return whole;
}

template <class Dst, class Src> bool fill(transfer &copy, const Dst &dst, const Src &src) noexcept {
    using to = typename Dst::element_type;
    static_assert(!std::is_const_v<to>, "mpgpu: the destination of a transfer is written");
    static_assert(std::is_same_v<to, std::remove_const_t<typename Src::element_type>>,
                  "mpgpu: source and destination of a transfer have elements of one type");
    if (dst.size() != src.size()) {
        return false;
    }
    copy.dst = dst.data();
    copy.dst_device = dst.location().id();
    copy.src = src.data();
    copy.src_device = src.location().id();
    copy.bytes = src.size_bytes();
    return true;
}

} // namespace detail

/// The transfer of all elements of `src` to `dst`; each is a `buffer` or a `device_span`, of the same element type and
/// size. Throws `invalid_argument` when the sizes differ.
template <class Dst, class Src> [[nodiscard]] transfer make_transfer(Dst &&dst, Src &&src) {
    const auto to = detail::as_device_span(dst);
    const auto from = detail::as_device_span(src);
    transfer copy{};
    if (!detail::fill(copy, to, from)) {
        detail::fail({MP_ERROR_INVALID_ARGUMENT, 0, "dst",
                      "a transfer of " + std::to_string(from.size()) + " elements into a destination of " +
                          std::to_string(to.size()) + ": take a subspan, so that both have the same size"});
    }
    return copy;
}
/// As above, reporting to `ec` (not to `last_error()`); the transfer is then one of 0 bytes.
template <class Dst, class Src>
[[nodiscard]] transfer make_transfer(Dst &&dst, Src &&src, std::error_code &ec) noexcept {
    transfer copy{};
    const bool equal = detail::fill(copy, detail::as_device_span(dst), detail::as_device_span(src));
    ec = make_error_code(equal ? errc::success : errc::invalid_argument);
    return copy;
}

// ---- streams and events --------------------------------------------------------------

/// A stream of one device: work in it runs in order, and at the same time as work in other streams.
class stream {
  public:
    /// Makes a stream of `where`. Throws `invalid_argument`, `driver_error`.
    stream(const context &ctx, device where) { detail::check(create(ctx, where)); }
    /// As above, reporting to `ec`.
    stream(const context &ctx, device where, std::error_code &ec) noexcept { ec = detail::code_of(create(ctx, where)); }

    stream(stream &&) noexcept = default;
    stream &operator=(stream &&) noexcept = default;
    stream(const stream &) = delete;
    stream &operator=(const stream &) = delete;
    /// Does not wait: work that is enqueued still finishes.
    ~stream() = default;

    /// The view that `plan::execute` and `event::record` take. This must own a stream, which must outlive the view.
    operator stream_view() const &noexcept {
        assert(handle_);
        return handle_.get();
    }
    operator stream_view() const && = delete;

    /// Blocks the calling thread until everything enqueued so far has finished. Throws `invalid_argument`,
    /// `driver_error`, and `peer_gone`, once for each process that has ended while a stream of the context waited for
    /// its signals.
    void synchronize() const { detail::check(mp_stream_synchronize(context_handle(), get())); }
    /// As above, reporting to `ec`.
    void synchronize(std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_stream_synchronize(context_handle(), get()));
    }

    /// Enqueues a call of `task()` on a CPU thread after all earlier work in this stream; later work waits for it. A
    /// copy of `task` is kept until then. While the stream is being captured, the copy belongs to the graph: it is
    /// called at every launch, and kept until the graph and all that was instantiated of it are gone. As with
    /// `cudaLaunchHostFunc`, neither `task` nor its destructor may call this library or CUDA, and an exception that
    /// leaves it ends the program. Throws `invalid_argument`, `driver_error`, `not_supported` in a capture where the
    /// driver is older than CUDA 11.3.
    template <class Task> void launch_host(Task &&task) const {
        detail::check(detail::launch_host(context_handle(), get(), std::forward<Task>(task)));
    }
    /// As above, reporting to `ec`.
    template <class Task> void launch_host(Task &&task, std::error_code &ec) const {
        ec = detail::code_of(detail::launch_host(context_handle(), get(), std::forward<Task>(task)));
    }

    /// Work enqueued from now on starts after what `ev` stands for now. Does not block. Throws `invalid_argument`,
    /// `driver_error`.
    inline void wait(const event &ev) const;
    /// As above, reporting to `ec`.
    inline void wait(const event &ev, std::error_code &ec) const noexcept;

    /// The C handle (a `cudaStream_t` on the CUDA backend), still owned by this object.
    [[nodiscard]] mp_stream_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a stream.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    mp_status_t create(const context &ctx, device where) noexcept {
        mp_stream_t made = nullptr;
        const mp_status_t status = mp_stream_create(ctx.get(), where.id(), &made);
        if (status == MP_SUCCESS) {
            handle_ = handle_type(made, {ctx.get()});
        }
        return status;
    }

    using handle_type = detail::handle<mp_stream_t, detail::destroyed_in<mp_stream_destroy>>;
    handle_type handle_;
};

/// A point in a stream that other streams, of any device, and the host can wait for. Stands for nothing until recorded.
class event {
  public:
    /// Makes an event. Throws `invalid_argument`, `driver_error`.
    explicit event(const context &ctx) { detail::check(create(ctx)); }
    /// As above, reporting to `ec`.
    event(const context &ctx, std::error_code &ec) noexcept { ec = detail::code_of(create(ctx)); }

    event(event &&) noexcept = default;
    event &operator=(event &&) noexcept = default;
    event(const event &) = delete;
    event &operator=(const event &) = delete;
    /// Does not wait: streams that wait for the event still do.
    ~event() = default;

    /// From now on the event stands for all work enqueued in `stream` so far. Throws `invalid_argument`,
    /// `driver_error`.
    void record(stream_view stream) { detail::check(mp_event_record(context_handle(), get(), stream.get())); }
    /// As above, reporting to `ec`.
    void record(stream_view stream, std::error_code &ec) noexcept {
        ec = detail::code_of(mp_event_record(context_handle(), get(), stream.get()));
    }

    /// Blocks the calling thread until what this stands for has finished. Throws `invalid_argument`, `driver_error`,
    /// `peer_gone` as `stream::synchronize` does, until it is recorded in a stream that was told.
    void synchronize() const { detail::check(mp_event_synchronize(context_handle(), get())); }
    /// As above, reporting to `ec`.
    void synchronize(std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_event_synchronize(context_handle(), get()));
    }

    /// The C handle (one of mpgpu's own, no `cudaEvent_t`, also on the CUDA backend), still owned by this object.
    [[nodiscard]] mp_event_t get() const noexcept { return handle_.get(); }
    /// Whether this owns an event.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    mp_status_t create(const context &ctx) noexcept {
        mp_event_t made = nullptr;
        const mp_status_t status = mp_event_create(ctx.get(), &made);
        if (status == MP_SUCCESS) {
            handle_ = handle_type(made, {ctx.get()});
        }
        return status;
    }

    using handle_type = detail::handle<mp_event_t, detail::destroyed_in<mp_event_destroy>>;
    handle_type handle_;
};

inline void context::wait(stream_view stream, const event &ev) const {
    detail::check(mp_stream_wait_event(get(), stream.get(), ev.get()));
}
inline void context::wait(stream_view stream, const event &ev, std::error_code &ec) const noexcept {
    ec = detail::code_of(mp_stream_wait_event(get(), stream.get(), ev.get()));
}

inline void stream::wait(const event &ev) const {
    detail::check(mp_stream_wait_event(context_handle(), get(), ev.get()));
}
inline void stream::wait(const event &ev, std::error_code &ec) const noexcept {
    ec = detail::code_of(mp_stream_wait_event(context_handle(), get(), ev.get()));
}

// ---- plans and requests --------------------------------------------------------------

/// One execution of a plan, to wait for or to ask about.
///
/// Destroying a request that is still pending forgets it, as `MPI_Request_free` does: the copies go on, ordered by
/// their stream, and nothing blocks. A destructor that waited would put a host synchronisation, which nobody wrote,
/// into a time loop that is ordered by streams alone. Whoever frees or reads the memory on the host waits, for the
/// request, the stream or an event.
class request {
  public:
    /// Nothing to wait for.
    request() noexcept = default;
    request(request &&) noexcept = default;
    request &operator=(request &&) noexcept = default;
    request(const request &) = delete;
    request &operator=(const request &) = delete;
    ~request() = default;

    /// Blocks the calling thread until all bytes have arrived; returns at once when empty. Empty afterwards. Throws
    /// `driver_error`, `data_corruption` where the execution met one, `peer_gone` as `stream::synchronize` does.
    void wait() { detail::check(mp_wait(handle_.address())); }
    /// As above, reporting to `ec`.
    void wait(std::error_code &ec) noexcept { ec = detail::code_of(mp_wait(handle_.address())); }

    /// Whether all bytes have arrived, without blocking; empty once they have. Throws as `wait` does.
    [[nodiscard]] bool test() {
        std::int32_t done = 0;
        detail::check(mp_test(handle_.address(), &done));
        return done != 0;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] bool test(std::error_code &ec) noexcept {
        std::int32_t done = 0;
        ec = detail::code_of(mp_test(handle_.address(), &done));
        return done != 0;
    }

    /// Whether there is still something to wait for.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    /// The C handle, still owned by this object.
    [[nodiscard]] mp_request_t get() const noexcept { return handle_.get(); }

  private:
    friend class plan;
    detail::handle<mp_request_t, detail::forgotten> handle_;
};

/// How a batch of transfers is carried out: made once, executed as often as wanted, from any thread.
class plan {
  public:
    /// Plans the transfers of one communication step together, so that they do not fight for links. They are unordered
    /// among each other, so no destination may overlap another destination or a source. The memory must exist whenever
    /// the plan is executed; the array of transfers is not kept. Throws `invalid_argument`, `not_supported`,
    /// `out_of_memory`.
    plan(const context &ctx, span<const transfer> transfers, const plan_options &options = {}) {
        detail::check(create(ctx, transfers, options));
    }
    plan(const context &ctx, std::initializer_list<transfer> transfers, const plan_options &options = {})
        : plan(ctx, span<const transfer>(transfers.begin(), transfers.size()), options) {}
    /// As above, reporting to `ec`.
    plan(const context &ctx, span<const transfer> transfers, const plan_options &options,
         std::error_code &ec) noexcept {
        ec = detail::code_of(create(ctx, transfers, options));
    }
    plan(const context &ctx, std::initializer_list<transfer> transfers, const plan_options &options,
         std::error_code &ec) noexcept
        : plan(ctx, span<const transfer>(transfers.begin(), transfers.size()), options, ec) {}

    plan(plan &&) noexcept = default;
    plan &operator=(plan &&) noexcept = default;
    plan(const plan &) = delete;
    plan &operator=(const plan &) = delete;
    /// Does not wait: executions that are enqueued still finish.
    ~plan() = default;

    /// Enqueues the copies: after all earlier work in `stream`, before all later work in it. Never blocks. Executions
    /// of one plan, or of plans that share staging memory, may be enqueued in different streams at once. Throws
    /// `invalid_argument`, `out_of_memory`, `driver_error`.
    [[nodiscard]] request execute(stream_view stream) const {
        request done;
        detail::check(mp_execute(get(), stream.get(), done.handle_.address()));
        return done;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] request execute(stream_view stream, std::error_code &ec) const noexcept {
        request done;
        ec = detail::code_of(mp_execute(get(), stream.get(), done.handle_.address()));
        return done;
    }

    /// `execute` for code that is ordered by streams alone: makes no request. Throws as `execute` does.
    void enqueue(stream_view stream) const { detail::check(mp_execute(get(), stream.get(), nullptr)); }
    /// As above, reporting to `ec`.
    void enqueue(stream_view stream, std::error_code &ec) const noexcept {
        ec = detail::code_of(mp_execute(get(), stream.get(), nullptr));
    }

    /// Paths, shares, chunks, modelled time, and why each other path was not taken. Throws `invalid_argument` when this
    /// is empty.
    [[nodiscard]] std::string describe(format form = format::text) const {
        std::string text;
        detail::check(write_description(text, form));
        return text;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] std::string describe(format form, std::error_code &ec) const {
        std::string text;
        ec = detail::code_of(write_description(text, form));
        return text;
    }

    /// The plan in numbers; its seconds are modelled, not measured. Throws `invalid_argument` when this is empty.
    [[nodiscard]] plan_info info() const {
        plan_info numbers{};
        numbers.size = sizeof(numbers);
        detail::check(mp_plan_get_info(get(), &numbers));
        return numbers;
    }
    /// As above, reporting to `ec`.
    [[nodiscard]] plan_info info(std::error_code &ec) const noexcept {
        plan_info numbers{};
        numbers.size = sizeof(numbers);
        ec = detail::code_of(mp_plan_get_info(get(), &numbers));
        return numbers;
    }

    /// The C handle, still owned by this object.
    [[nodiscard]] mp_plan_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a plan.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    mp_status_t create(const context &ctx, span<const transfer> transfers, const plan_options &options) noexcept {
        mp_plan_options_t c{};
        c.size = sizeof(c);
        c.engine = static_cast<std::int32_t>(options.engine);
        c.max_paths = options.max_paths;
        c.host_path = options.host_path ? (*options.host_path ? MP_ON : MP_OFF) : MP_DEFAULT;
        c.chunk_bytes = options.chunk_bytes;
        c.min_bytes = options.min_bytes;
        c.staging_bytes = options.staging_bytes;
        return mp_plan(ctx.get(), transfers.data(), transfers.size(), &c, handle_.address());
    }

    mp_status_t write_description(std::string &text, format form) const {
        return detail::describe(text, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_plan_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    detail::handle<mp_plan_t, detail::destroyed_by<mp_plan_destroy>> handle_;
};

// ---- log -----------------------------------------------------------------------------

/// Sends the library's messages up to `max_level` to `callback`, from whatever thread they arise on; a null callback
/// ends it. `user` must outlive that. Throws `invalid_argument`.
inline void set_log_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user) {
    detail::check(mp_log_set_callback(static_cast<std::int32_t>(max_level), callback, user));
}
/// As above, reporting to `ec`.
inline void set_log_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user,
                             std::error_code &ec) noexcept {
    ec = detail::code_of(mp_log_set_callback(static_cast<std::int32_t>(max_level), callback, user));
}

} // namespace mpgpu

/// Lets `std::error_code` be made from, and compared with, `mpgpu::errc`.
template <> struct std::is_error_code_enum<mpgpu::errc> : std::true_type {};

#endif // MPGPU_HPP
