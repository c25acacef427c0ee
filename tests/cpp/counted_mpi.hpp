// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_COUNTED_MPI_HPP
#define MPGPU_TESTS_COUNTED_MPI_HPP

/// @file
/// Counts every call to MPI through MPI's profiling interface. A program that includes this file defines the MPI
/// functions itself; each counts the call and then calls the PMPI function. A test checks that the program has no
/// undefined symbols of MPI functions, so all calls are counted. Only one translation unit of a program may include
/// this file.

#include <mpi.h>

#include <atomic>

namespace counted_mpi {

inline std::atomic<long> calls{0};

} // namespace counted_mpi

// The arguments are lists, which must not be enclosed in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses, misc-definitions-in-headers)
#define MPGPU_COUNTED(name, parameters, arguments)                                                                     \
    extern "C" int MPI_##name parameters {                                                                             \
        ++counted_mpi::calls;                                                                                          \
        return PMPI_##name arguments;                                                                                  \
    }

MPGPU_COUNTED(Init, (int *c, char ***v), (c, v))
MPGPU_COUNTED(Init_thread, (int *c, char ***v, int wanted, int *provided), (c, v, wanted, provided))
MPGPU_COUNTED(Query_thread, (int *provided), (provided))
MPGPU_COUNTED(Finalize, (), ())
MPGPU_COUNTED(Finalized, (int *flag), (flag))
MPGPU_COUNTED(Abort, (MPI_Comm comm, int code), (comm, code))
MPGPU_COUNTED(Error_string, (int code, char *text, int *length), (code, text, length))
MPGPU_COUNTED(Comm_rank, (MPI_Comm comm, int *rank), (comm, rank))
MPGPU_COUNTED(Comm_size, (MPI_Comm comm, int *size), (comm, size))
MPGPU_COUNTED(Comm_dup, (MPI_Comm comm, MPI_Comm *made), (comm, made))
MPGPU_COUNTED(Comm_free, (MPI_Comm * comm), (comm))
MPGPU_COUNTED(Comm_split_type, (MPI_Comm comm, int type, int key, MPI_Info hints, MPI_Comm *made),
              (comm, type, key, hints, made))
MPGPU_COUNTED(Barrier, (MPI_Comm comm), (comm))
MPGPU_COUNTED(Allgather,
              (const void *from, int from_count, MPI_Datatype from_type, void *to, int to_count, MPI_Datatype to_type,
               MPI_Comm comm),
              (from, from_count, from_type, to, to_count, to_type, comm))
MPGPU_COUNTED(Allgatherv,
              (const void *from, int from_count, MPI_Datatype from_type, void *to, const int *to_counts,
               const int *offsets, MPI_Datatype to_type, MPI_Comm comm),
              (from, from_count, from_type, to, to_counts, offsets, to_type, comm))
MPGPU_COUNTED(Bcast, (void *data, int count, MPI_Datatype type, int root, MPI_Comm comm),
              (data, count, type, root, comm))
MPGPU_COUNTED(Allreduce, (const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm),
              (from, to, count, type, op, comm))
MPGPU_COUNTED(Type_contiguous, (int count, MPI_Datatype of, MPI_Datatype *made), (count, of, made))
MPGPU_COUNTED(Type_commit, (MPI_Datatype * type), (type))
MPGPU_COUNTED(Type_free, (MPI_Datatype * type), (type))
MPGPU_COUNTED(Send_init,
              (const void *from, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request *made),
              (from, count, type, rank, tag, comm, made))
MPGPU_COUNTED(Recv_init, (void *to, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request *made),
              (to, count, type, rank, tag, comm, made))
MPGPU_COUNTED(Startall, (int count, MPI_Request *requests), (count, requests))
MPGPU_COUNTED(Start, (MPI_Request * request), (request))
MPGPU_COUNTED(Testsome, (int count, MPI_Request *requests, int *done, int *which, MPI_Status *statuses),
              (count, requests, done, which, statuses))
MPGPU_COUNTED(Request_get_status, (MPI_Request request, int *done, MPI_Status *status), (request, done, status))
MPGPU_COUNTED(Cancel, (MPI_Request * request), (request))
MPGPU_COUNTED(Test, (MPI_Request * request, int *done, MPI_Status *status), (request, done, status))
MPGPU_COUNTED(Request_free, (MPI_Request * request), (request))

#undef MPGPU_COUNTED
// NOLINTEND(bugprone-macro-parentheses, misc-definitions-in-headers)

#endif // MPGPU_TESTS_COUNTED_MPI_HPP
