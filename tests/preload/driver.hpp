// Declares the part of the driver's interface that the client programs and the fake driver use, and the functions by
// which tests query the fake driver. Names, types and numbers are those of the real driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// NOLINTBEGIN(readability-identifier-naming): the driver's names

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct fake_context *;
using CUstream = struct fake_stream *;
using CUevent = struct fake_event *;
using CUgraph = struct fake_graph *;
using CUgraphExec = struct fake_graph *;
using CUgraphNode = std::size_t *;
using CUhostFn = void (*)(void *);
struct CUipcMemHandle {
    std::array<std::uint8_t, 64> bytes;
};

/// Attributes of consecutive copies of a batch, `CUmemcpyAttributes`.
struct batch_attributes {
    int source_access;
    std::array<int, 4> locations;
    unsigned flags;
};

extern "C" {

// Functions that the client programs look up by each method. The functions that query the fake driver follow.
#define CLIENT_FUNCTIONS(X)                                                                                            \
    X(cuInit, unsigned)                                                                                                \
    X(cuDevicePrimaryCtxRetain, CUcontext *, CUdevice)                                                                 \
    X(cuDevicePrimaryCtxGetState, CUdevice, unsigned *, int *)                                                         \
    X(cuCtxCreate_v2, CUcontext *, unsigned, CUdevice)                                                                 \
    X(cuCtxSetCurrent, CUcontext)                                                                                      \
    X(cuCtxEnablePeerAccess, CUcontext, unsigned)                                                                      \
    X(cuCtxDisablePeerAccess, CUcontext)                                                                               \
    X(cuMemAlloc_v2, CUdeviceptr *, std::size_t)                                                                       \
    X(cuMemAllocManaged, CUdeviceptr *, std::size_t, unsigned)                                                         \
    X(cuMemAllocAsync, CUdeviceptr *, std::size_t, CUstream)                                                           \
    X(cuMemFree_v2, CUdeviceptr)                                                                                       \
    X(cuMemHostAlloc, void **, std::size_t, unsigned)                                                                  \
    X(cuMemHostRegister_v2, void *, std::size_t, unsigned)                                                             \
    X(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, std::size_t, CUstream)                                                  \
    X(cuMemcpyAsync_ptsz, CUdeviceptr, CUdeviceptr, std::size_t, CUstream)                                             \
    X(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, std::size_t, CUstream)                                           \
    X(cuMemcpyDtoDAsync_v2_ptsz, CUdeviceptr, CUdeviceptr, std::size_t, CUstream)                                      \
    X(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, std::size_t, CUstream)                                          \
    X(cuMemcpyHtoDAsync_v2_ptsz, CUdeviceptr, const void *, std::size_t, CUstream)                                     \
    X(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, std::size_t, CUstream)                                                \
    X(cuMemcpyDtoHAsync_v2_ptsz, void *, CUdeviceptr, std::size_t, CUstream)                                           \
    X(cuMemcpyHtoD_v2, CUdeviceptr, const void *, std::size_t)                                                         \
    X(cuMemcpyHtoD_v2_ptds, CUdeviceptr, const void *, std::size_t)                                                    \
    X(cuMemcpyDtoH_v2, void *, CUdeviceptr, std::size_t)                                                               \
    X(cuMemcpyDtoH_v2_ptds, void *, CUdeviceptr, std::size_t)                                                          \
    X(cuMemcpyPeerAsync, CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, std::size_t, CUstream)                        \
    X(cuMemcpyPeerAsync_ptsz, CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, std::size_t, CUstream)                   \
    X(cuMemcpyBatchAsync, CUdeviceptr *, CUdeviceptr *, std::size_t *, std::size_t, batch_attributes *, std::size_t *, \
      std::size_t, std::size_t *, CUstream)                                                                            \
    X(cuMemcpyBatchAsync_ptsz, CUdeviceptr *, CUdeviceptr *, std::size_t *, std::size_t, batch_attributes *,           \
      std::size_t *, std::size_t, std::size_t *, CUstream)                                                             \
    X(cuMemcpyBatchAsync_v2, CUdeviceptr *, CUdeviceptr *, std::size_t *, std::size_t, batch_attributes *,             \
      std::size_t *, std::size_t, CUstream)                                                                            \
    X(cuMemcpyBatchAsync_v2_ptsz, CUdeviceptr *, CUdeviceptr *, std::size_t *, std::size_t, batch_attributes *,        \
      std::size_t *, std::size_t, CUstream)                                                                            \
    X(cuStreamCreate, CUstream *, unsigned)                                                                            \
    X(cuStreamSynchronize, CUstream)                                                                                   \
    X(cuStreamBeginCapture_v2, CUstream, int)                                                                          \
    X(cuStreamEndCapture, CUstream, CUgraph *)                                                                         \
    X(cuGraphInstantiateWithFlags, CUgraphExec *, CUgraph, std::uint64_t)                                              \
    X(cuGraphLaunch, CUgraphExec, CUstream)                                                                            \
    X(cuLaunchHostFunc, CUstream, CUhostFn, void *)                                                                    \
    X(cuIpcGetMemHandle, CUipcMemHandle *, CUdeviceptr)                                                                \
    X(cuIpcOpenMemHandle_v2, CUdeviceptr *, CUipcMemHandle, unsigned)                                                  \
    X(cuIpcCloseMemHandle, CUdeviceptr)                                                                                \
    X(fake_copies_into, CUdeviceptr, std::size_t, fake_copies *)                                                       \
    X(fake_forget_copies, int)                                                                                         \
    X(fake_map, CUdeviceptr *, std::size_t, std::size_t, std::uint64_t)                                                \
    X(fake_let_in, CUdevice, std::uint64_t)                                                                            \
    X(fake_trespasses, long *)                                                                                         \
    X(fake_lose, int)                                                                                                  \
    X(fake_fail_after, long)                                                                                           \
    X(fake_failed, const char **)

/// Calls of the driver that have written to a memory range.
struct fake_copies {
    std::size_t count;
    /// Name of the last call if it wrote the whole range. Otherwise null.
    const char *whole;
    CUdeviceptr src;
    CUstream stream;
};

#define DECLARE_FUNCTION(name, ...) CUresult name(__VA_ARGS__);
CLIENT_FUNCTIONS(DECLARE_FUNCTION)
#undef DECLARE_FUNCTION

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, std::uint64_t flags, int *found);
}

// NOLINTEND(readability-identifier-naming)
