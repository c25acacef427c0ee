/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Exchange of vector entries by index lists, for C programs with MPI. This header is the C interface of
 * mpgpu/halo_indexed.hpp.
 *
 *     mp_index_neighbour_t neighbours[2] = {
 *         {2, mp_index_list32(boundary_2, count_2), mp_index_range(owned, ghosts_2)}, rank, entries to send, to receive
 *         {5, mp_index_list32(boundary_5, count_5), mp_index_list32(ghost_list_5, ghosts_5)}};
 *     mp_halo_indexed_options_t options = MP_HALO_INDEXED_OPTIONS_INIT;
 *     options.entry_bytes = 4 * sizeof(double);         maximum bytes per entry, summed over the fields of an exchange
 *     mp_halo_indexed_t ex;
 *     mp_halo_indexed_create(context, MPI_COMM_WORLD, gpu, local_entries, neighbours, 2, &options, &ex);
 *     mp_index_field_t x = {values, local_entries, sizeof(double), 0, MP_NUMBER_F64};
 *     mp_halo_indexed_exchange(ex, stream, &x, 1, MP_INDEX_COPY);
 *     mp_halo_indexed_destroy(ex);
 *
 * The library does not contain these functions, because they call the program's MPI and launch a CUDA kernel that the
 * program's CUDA compiler compiles. The program compiles mpgpu/c/halo_indexed.cpp, with its own MPI and, for GPUs, as
 * CUDA source. In CMake, the target mpgpu::halo_c does so.
 *
 * The rules of mpgpu.h apply to these functions. All ranks of the communicator must call the collective functions in
 * the same order. MPI must allow calls from the threads that call these functions. A context must not be destroyed
 * before the objects that were created in it.
 */
#ifndef MPGPU_HALO_INDEXED_H
#define MPGPU_HALO_INDEXED_H

#include <mpgpu/mpgpu.h>

#include <mpi.h>

#include <stddef.h>
#include <stdint.h>

/// Exchange object: exchanges entries of vectors between the ranks of a communicator. The handle is a number, not an
/// address. Several threads must not use an object at the same time.
typedef struct mp_halo_indexed_s *mp_halo_indexed_t;

/// Type of the numbers in an entry. Only operations that add need it.
typedef enum {
    /// Unknown type. The entries are copied as bytes.
    MP_NUMBER_NONE = 0,
    /// `float`.
    MP_NUMBER_F32 = 1,
    /// `double`.
    MP_NUMBER_F64 = 2
} mp_number_t;

/// Operation of an exchange.
typedef enum {
    /// The entries of the send lists are copied to the entries of the receive lists.
    MP_INDEX_COPY = 0,
    /// The entries of the send lists are added to the entries of the receive lists.
    MP_INDEX_ADD = 1,
    /// The entries of the receive lists are sent back and added to the entries of the send lists.
    MP_INDEX_REVERSE_ADD = 2
} mp_index_operation_t;

/// Largest number of fields in an exchange.
#define MP_INDEX_MOST_FIELDS 8

/// List of indices of entries of a vector, or a contiguous range of entries. The first entry has index 0, unless
/// `mp_halo_indexed_options_t::first_index` is 1. mp_index_list32, mp_index_list64 and mp_index_range create lists.
typedef struct {
    /// Address of `count` signed integers in host memory. NULL selects the range of `count` entries from index `first`.
    const void *indices;
    /// Number of entries. 0 is allowed.
    uint64_t count;
    /// First index of a range. Ignored if `indices` is not NULL.
    int64_t first;
    /// Size of an index, bytes: 4 or 8. Ignored for a range. The array must be aligned to this size.
    uint32_t index_bytes;
    /// Must be 0.
    uint32_t reserved;
} mp_index_list_t;

/// Neighbour of a rank, and the entries that the two ranks exchange. A neighbour may be the rank itself.
typedef struct {
    /// Rank of the neighbour in the communicator.
    int32_t rank;
    /// Entries to send, in the order of the message. An entry may occur several times, in one or several send lists.
    mp_index_list_t send;
    /// Entries that receive the neighbour's message, in the order of the message. An entry may occur only once in all
    /// receive lists.
    mp_index_list_t receive;
} mp_index_neighbour_t;

/// Field of an exchange: a vector in the memory of the exchange object's device. Entry `i`, counted from 0, has
/// `entry_bytes` bytes and begins at `data + i * stride_bytes`.
typedef struct {
    /// Address of the first entry.
    void *data;
    /// Number of entries.
    uint64_t entries;
    /// Size of an entry, bytes.
    uint64_t entry_bytes;
    /// Distance from the beginning of an entry to the beginning of the next, bytes. 0 selects `entry_bytes`.
    uint64_t stride_bytes;
    /// Type of the numbers in an entry.
    mp_number_t values;
} mp_index_field_t;

/// Options of mp_halo_indexed_create. Initialise with `MP_HALO_INDEXED_OPTIONS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_HALO_INDEXED_OPTIONS_INIT` sets it.
    size_t size;
    /// Largest number of bytes per entry in an exchange: the sum of `mp_index_field_t::entry_bytes` over all fields
    /// that are exchanged together. At most 1 MiB. Equal on all ranks. 0 selects 8, which is one `double`.
    uint64_t entry_bytes;
    /// Time limit for messages to and from other nodes, seconds. The time begins at the end of mp_halo_indexed_start.
    /// If not all messages have been transferred after this time, mp_halo_indexed_finish returns `MP_ERROR_TIMEOUT`.
    /// mp_halo_indexed_exchange has the same limit. 0 selects no limit. Neighbours on this node are not affected.
    double time_limit;
    /// Index of the first entry of a vector in the index lists: 0 or 1. Indices and positions in error texts are
    /// counted from the same number.
    int32_t first_index;
    /// Communicator of the ranks that share memory. It contains all or some of the ranks on this machine.
    /// `MPI_COMM_NULL` selects all of them. Either all ranks pass `MPI_COMM_NULL`, or none does.
    MPI_Comm local;
} mp_halo_indexed_options_t;

/// Initial value of `mp_halo_indexed_options_t`: all defaults.
#define MP_HALO_INDEXED_OPTIONS_INIT                                                                                   \
    { sizeof(mp_halo_indexed_options_t), 0, 0.0, 0, MPI_COMM_NULL }

/// Returns a list of 32-bit indices.
static inline mp_index_list_t mp_index_list32(const int32_t *indices, uint64_t count) {
    const mp_index_list_t list = {indices, count, 0, 4, 0};
    return list;
}

/// Returns a list of 64-bit indices.
static inline mp_index_list_t mp_index_list64(const int64_t *indices, uint64_t count) {
    const mp_index_list_t list = {indices, count, 0, 8, 0};
    return list;
}

/// Returns the contiguous range of `count` entries that begins at index `first`.
static inline mp_index_list_t mp_index_range(int64_t first, uint64_t count) {
    const mp_index_list_t list = {NULL, count, first, 0, 0};
    return list;
}

#ifdef __cplusplus
extern "C" {
#endif

/// Creates an exchange object. Collective over `communicator`. Blocks.
///
/// - `communicator` contains the ranks that exchange entries. It is duplicated.
/// - `device` is the GPU of the vectors of this rank. On the host backend it is a virtual device.
/// - `entries` is the length of the vectors of this rank, in entries.
/// - `neighbours` are the ranks with which this rank exchanges entries. A rank may occur at most once. If a rank sends
///   entries to another, each must list the other. All lists are copied. NULL is allowed if `neighbour_count` is 0.
/// - `options` may be NULL, which selects all defaults.
/// - The caller owns `*indexed` and destroys it with mp_halo_indexed_destroy.
///
/// Several objects of one communicator may exist. Each has its own node (`mp_node_t`) and message buffers.
///
/// If one rank fails, the call fails on all ranks. The error of that rank gives the reason. The other ranks get an
/// error which states that another rank has failed. Exception: if a rank passes `MPI_COMM_NULL` as `communicator`, or
/// makes the call before MPI_Init or after MPI_Finalize, only this rank gets an error, and the other ranks block.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if an index is out of range, if an entry occurs twice in the receive lists, if a send
///   list and the corresponding receive list of the neighbour have different lengths, or if another argument is
///   invalid.
/// - `MP_ERROR_NOT_SUPPORTED` if the memory of a neighbour on this node cannot be mapped, or if the context uses CUDA
///   and mpgpu/c/halo_indexed.cpp was not compiled as CUDA source.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_RANK_FAILED`,
///   `MP_ERROR_DRIVER`.
mp_status_t mp_halo_indexed_create(mp_context_t context, MPI_Comm communicator, int32_t device, uint64_t entries,
                                   const mp_index_neighbour_t *neighbours, size_t neighbour_count,
                                   const mp_halo_indexed_options_t *options, mp_halo_indexed_t *indexed);

/// Enqueues an exchange of `field_count` fields after all earlier work in `stream` and before all later work.
/// `field_count` is 1 to `MP_INDEX_MOST_FIELDS`. Blocks only if this rank has neighbours on other nodes. `fields` is
/// read only during the call. The vectors must exist until the exchange has finished.
///
/// All ranks execute the same exchanges in the same order, with the same operations. They pass the same number of
/// fields with the same entry sizes. The fields may differ in each exchange.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if the fields are not valid; nothing is enqueued then. `MP_ERROR_PEER_GONE` if a
/// neighbour has exited. `MP_ERROR_TIMEOUT` if neighbours on other nodes exceed the time limit.
/// `MP_ERROR_NOT_SUPPORTED` if the stream is being captured and this rank has neighbours on other nodes.
/// `MP_ERROR_RANK_FAILED` if an earlier exchange with ranks on other nodes has failed. `MP_ERROR_INVALID_HANDLE`,
/// `MP_ERROR_DRIVER`.
mp_status_t mp_halo_indexed_exchange(mp_halo_indexed_t indexed, mp_stream_t stream, const mp_index_field_t *fields,
                                     size_t field_count, mp_index_operation_t operation);

/// Starts an exchange after all earlier work in `stream`: gathers the entries and sends them. Later work in `stream`
/// does not wait for other ranks, and may write to all entries. mp_halo_indexed_finish stores the received values to
/// the entries, or adds them to the values that the entries then have.
///
/// Errors: those of mp_halo_indexed_exchange. `MP_ERROR_INVALID_ARGUMENT` if another exchange was started and not
/// finished.
mp_status_t mp_halo_indexed_start(mp_halo_indexed_t indexed, mp_stream_t stream, const mp_index_field_t *fields,
                                  size_t field_count, mp_index_operation_t operation);

/// Finishes the exchange that was started: waits for the messages and stores or adds the received entries, after all
/// earlier work in `stream` and before all later work. The fields are those of mp_halo_indexed_start.
///
/// Errors: those of mp_halo_indexed_exchange. `MP_ERROR_INVALID_ARGUMENT` if no exchange was started.
mp_status_t mp_halo_indexed_finish(mp_halo_indexed_t indexed, mp_stream_t stream);

/// Returns the length of the vectors of this rank in `*entries`, the number of entries that this rank sends in an
/// exchange in `*sent`, and the number that it receives in `*received`. Both numbers include the entries that the rank
/// sends to itself. With `MP_INDEX_REVERSE_ADD`, the rank sends `*received` entries and receives `*sent` entries. Each
/// pointer may be NULL.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_halo_indexed_get_info(mp_halo_indexed_t indexed, uint64_t *entries, uint64_t *sent, uint64_t *received);

/// Destroys an exchange object. Collective; all ranks call it before `MPI_Finalize`. Blocks until the exchanges of this
/// rank have finished and the ranks of this node have called it. The handle is then invalid, also after an error.
///
/// Errors: `MP_ERROR_PEER_GONE` if a rank of this node has exited. `MP_ERROR_RANK_FAILED` if a rank of this node is in
/// a different collective call. `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_DRIVER`.
mp_status_t mp_halo_indexed_destroy(mp_halo_indexed_t indexed);

/// Destroys the exchange object of this rank after an exchange has failed. Not collective. Blocks until the enqueued
/// work of this rank has finished. The other ranks of this node get `MP_ERROR_PEER_GONE` in later exchanges. The handle
/// is then invalid. Some memory of the object remains allocated if MPI can neither complete nor cancel a message.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_halo_indexed_leave(mp_halo_indexed_t indexed);

#ifdef __cplusplus
} // extern "C"
#endif

#endif /* MPGPU_HALO_INDEXED_H */
