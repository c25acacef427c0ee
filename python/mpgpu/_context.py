# SPDX-License-Identifier: MIT OR Apache-2.0
"""Contexts, and the memory that they allocate."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from . import _dropped, _library
from ._library import AUTO, BACKEND, HEADER_VERSION, HOST, NULL, SIGNAL_WAIT, check, ffi, lib, sized
from ._memory import Memory, memory_of
from ._names import WITHOUT_NUMPY, Elements, device_number, element_type, itemsize_of
from .errors import ArgumentError, OutOfMemory
from .typing import Array, Device, ElementType


class Statistics(NamedTuple):
    """Statistics of a context since its creation. ``bytes`` is the total size of all executed transfers in bytes. All other fields are
    counts. ``mp_statistics_t`` in mpgpu.h describes them.
    """

    plan_cache_hits: int
    plan_cache_misses: int
    plan_cache_evictions: int
    plan_cache_entries: int
    executions: int
    bytes: int
    plan_cache_shape_hits: int
    graph_launches: int
    graph_hits: int
    graph_misses: int
    graph_instantiations: int
    graph_repoints: int
    graph_waits: int
    graph_programs: int
    graph_entries: int


class DeviceStatistics(NamedTuple):
    """Resources that a context holds on one device: staging memory in bytes, allocated memory in bytes, and number of streams."""

    staging_bytes: int
    allocated_bytes: int
    streams: int


def host(domain: int = 0) -> int:
    """Returns the device number of the host memory of NUMA domain ``domain``. ``host(0)`` equals ``HOST``, which is -1."""
    number = _library.whole(domain)
    if number is None:
        raise TypeError(f"domain={domain!r}: must be a whole number")
    if number < 0:
        raise ArgumentError(f"domain={domain}: NUMA domains are numbered from 0 up", argument="domain")
    return HOST - number


class Context(_library.Owner):
    """Context: the library's state for one process. It contains the topology, backend, plan cache, staging memory and streams.

    A process may create several contexts; they share no state. Any thread may use a context. A context exists as long as any object that
    was created with it. Releasing the last of these objects blocks until all work that is enqueued in the context has finished. A child of
    ``fork`` cannot use its parent's contexts. ``multiprocessing`` with ``spawn`` has no such limit.

    Args:
        backend: ``"cuda"``, or ``"host"`` for virtual devices that CPU threads implement. ``None`` selects the value of ``MPGPU_BACKEND``
            and, if that is not set, CUDA if there is a GPU.
        topology: name of a built-in preset, or path of a topology file. ``None`` selects the value of ``MPGPU_TOPOLOGY`` and, if that is
            not set, the detected topology.
        staging_bytes: maximum size of the staging memory on each device, bytes.
        cache_plans: maximum number of plans in the plan cache. Planning the same copies again takes only a look-up.
        signal_wait: ``"operation"`` or ``"kernel"``, the method by which streams wait for other ranks (docs/reference/waiting.md).
        host_threads: maximum number of CPU threads that copy between pageable and pinned host memory. With 0 the driver copies pageable
            memory.
        cache_graphs: maximum number of plans whose CUDA graphs the context keeps. Plans that differ only in their addresses count once. The
            most recently launched ones stay in the cache.

    Raises:
        ConfigurationError: the topology or an environment variable is invalid.
        NotSupported: the backend is not available.
        ArgumentError: an option is invalid.
    """

    __slots__ = ("__weakref__", "_backend", "_device_count", "_handle", "_lock", "_streams")

    def __init__(
        self,
        backend: str | None = None,
        *,
        topology: str | os.PathLike[str] | None = None,
        staging_bytes: int | None = None,
        cache_plans: int | None = None,
        signal_wait: str | None = None,
        host_threads: int | None = None,
        cache_graphs: int | None = None,
    ) -> None:
        self._handle = NULL
        options = sized("mp_context_options_t *")
        options.backend = _library.choice("backend", BACKEND, backend)
        name = NULL if topology is None else _library.path_text(topology)
        options.topology = name
        options.staging_bytes = _library.option("staging_bytes", staging_bytes)
        options.cache_plans = _library.option("cache_plans", cache_plans)
        options.cache_graphs = _library.option("cache_graphs", cache_graphs)
        options.signal_wait = _library.choice("signal_wait", SIGNAL_WAIT, signal_wait)
        threads = _library.option("host_threads", host_threads, 256)
        options.host_threads = -1 if threads == 0 and host_threads is not None else threads
        made = ffi.new("mp_context_t *")
        check(lib.mp_context_create_versioned(options, HEADER_VERSION, made))
        self._handle = made[0]
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()
        backend_now = ffi.new("mp_backend_t *")
        counts = ffi.new("int32_t[2]")
        check(lib.mp_context_get_info(self._handle, backend_now, counts, counts + 1))
        self._backend = "cuda" if backend_now[0] == lib.MP_BACKEND_CUDA else "host"
        self._device_count: tuple[int, int] = (counts[0], counts[1])

    def __del__(self, destroy: Any = lib.mp_context_destroy) -> None:
        # If the constructor rejected its arguments, there is no handle.
        if getattr(self, "_handle", NULL) != NULL:
            # Blocks until all work has finished, because memory that the work uses may be released with this object. Errors are raised by
            # waits, not here.
            destroy(self._handle)

    @property
    def backend(self) -> str:
        """Backend of the context: ``"cuda"`` or ``"host"``."""
        return self._backend

    @property
    def gpus(self) -> int:
        """Number of GPUs of the context. Their device numbers are 0 to ``gpus - 1``."""
        return self._device_count[0]

    @property
    def host_domains(self) -> int:
        """Number of NUMA domains of the host memory. Their devices are ``host(0)``, ``host(1)`` and so on."""
        return self._device_count[1]

    @property
    def devices(self) -> list[int]:
        """Numbers of all devices of the context: the GPUs (0, 1, …), then the host domains (-1, -2, …)."""
        return [*range(self.gpus), *(HOST - domain for domain in range(self.host_domains))]

    def uuid(self, device: Device) -> bytes:
        """Returns a 16-byte identifier of a device that is equal in all processes on the machine."""
        text = ffi.new("uint8_t[16]")
        check(lib.mp_device_uuid(self._handle, device_number(device), text))
        return bytes(ffi.buffer(text))

    def empty(self, shape: int | Sequence[int], dtype: ElementType | None = None, device: Device = HOST, *, shared: bool = False) -> Buffer:
        """Allocates memory with this context. Arguments and errors are those of :class:`Buffer`."""
        return Buffer(shape, dtype, device, shared=shared, context=self)

    def topo(self) -> dict[str, Any]:
        """Returns a summary of the machine for which plans are made: name, description, number of GPUs and number of host domains. It does
        not contain the links; the command ``mpgpu topo`` prints them with their bandwidths and latencies.
        """
        described: dict[str, Any] = self.describe_json()["topology"]
        return described

    def describe(self) -> str:
        """Returns a description of the context as text: version, backend, topology and settings."""
        return _library.text_of(lib.mp_context_describe, self._handle, lib.MP_FORMAT_TEXT)

    def describe_json(self) -> dict[str, Any]:
        """Returns the description of :meth:`describe` as a dict."""
        return _library.json_of(_library.text_of(lib.mp_context_describe, self._handle, lib.MP_FORMAT_JSON))

    def probe(self, file: str | os.PathLike[str] | None = None, *, keep: bool | None = None, quick: bool | None = None) -> str:
        """Probes (measures) the machine and returns the resulting topology file as TOML text. Blocks for seconds and uses all links and
        devices. The context keeps its current topology. Contexts that are created later use the new topology if it is written to
        the default file.

        Args:
            file: path of the topology file to write. ``None`` selects a file in the user's cache directory, where contexts find it.
            keep: ``True`` to write the topology to the file.
            quick: ``True`` for fewer and shorter measurements without tuning.
        """
        options = sized("mp_probe_options_t *")
        name = NULL if file is None else _library.path_text(file)
        options.file = name
        options.keep = _library.choice("keep", _library.SWITCH, keep)
        options.quick = _library.choice("quick", _library.SWITCH, quick)
        check(lib.mp_context_probe(self._handle, options))
        return _library.text_of(lib.mp_context_probed, self._handle)

    def statistics(self) -> Statistics:
        """Returns the statistics of the context since its creation."""
        found = sized("mp_statistics_t *")
        check(lib.mp_context_statistics(self._handle, found))
        return Statistics(*(getattr(found, name) for name in Statistics._fields))

    def device_statistics(self, device: Device) -> DeviceStatistics:
        """Returns the resources that the context holds on a device now."""
        found = sized("mp_device_statistics_t *")
        check(lib.mp_context_device_statistics(self._handle, device_number(device), found))
        return DeviceStatistics(*(getattr(found, name) for name in DeviceStatistics._fields))

    def __repr__(self) -> str:
        return f"<mpgpu.Context: {self._backend} backend, {self.gpus} GPUs, {self.host_domains} host domains>"

    def _own_stream(self, device: int) -> Any:
        """Returns the handle of the context's own stream on a device. It is used if the caller passes no stream."""
        handle = self._streams.get(device)
        if handle is None:
            with self._lock:
                handle = self._streams.get(device)
                if handle is None:
                    made = ffi.new("mp_stream_t *")
                    check(lib.mp_stream_create(self._handle, device, made))
                    handle = self._streams[device] = made[0]
        return handle


_default: Context | None = None
_default_lock = threading.Lock()


def default_context() -> Context:
    """Returns the context that objects use if no context is passed. It is created at the first use, with the options from the environment
    variables.
    """
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Context()
    return _default


def _forget_default() -> None:
    # A child of fork needs its own context and a new lock, because a thread that does not exist in the child may have held the lock.
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_default)


class Buffer(_library.Owner):
    """Contiguous array in memory that mpgpu allocates: on a GPU, or in pinned host memory that GPUs can access.

    Its contents are initially undefined. NumPy, CuPy, torch and Numba can use the memory without a copy (``numpy.asarray(buffer)``), and
    keep it alive. The CPU can access GPU memory only on the host backend. The memory is freed when the last reference is released. Like
    ``cudaFree``, this blocks until all work that is enqueued in the context has finished.

    Args:
        shape: number of elements, or one number per dimension.
        dtype: element type: a name such as ``"float32"``, ``"f4"`` or ``"bfloat16"``, or a NumPy or torch type. ``None`` for raw bytes,
            which can be copied from and to any type.
        device: a GPU, for example ``0`` or ``"cuda:0"``, or a host domain: ``HOST``, ``"cpu"``, ``host(1)``.
        shared: True if other processes can map the memory. :meth:`Node.plan` requires this for host memory.
        context: the context that allocates the memory. The default is :func:`default_context`.

    Raises:
        OutOfMemory: the device or the host has no more memory.
        ArgumentError: the device, shape or type is invalid.
        NotSupported: the memory cannot be shared.
    """

    __slots__ = ("__weakref__", "_base", "_context", "_is_bytes", "address", "device", "dtype", "itemsize", "nbytes", "shape")

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: ElementType | None = None,
        device: Device = HOST,
        *,
        shared: bool = False,
        context: Context | None = None,
    ) -> None:
        one = _library.whole(shape)
        try:
            extents = (one,) if one is not None else tuple(map(operator.index, cast("Sequence[int]", shape)))
        except TypeError:
            raise TypeError(f"shape={shape!r}: must be a whole number, or one for each dimension") from None
        if any(extent < 0 for extent in extents):
            raise ArgumentError(f"shape={shape}: must not be negative", argument="shape")
        self.shape: tuple[int, ...] = extents
        self._is_bytes = dtype is None
        self.dtype: str = "|u1" if dtype is None else element_type(dtype)
        self.itemsize: int = itemsize_of(self.dtype)
        self.nbytes: int = self.itemsize
        for extent in extents:
            self.nbytes *= extent
        if self.nbytes >= 2**63:
            raise OutOfMemory(
                f"shape={shape}, dtype={self.dtype}: {self.nbytes} bytes are more than any memory has",
                status="MP_ERROR_OUT_OF_MEMORY",
                argument="shape",
            )
        self.device: int = device_number(device)
        self._context = context if context is not None else default_context()
        _dropped.collect(1024)
        made = ffi.new("void **")
        # For an empty buffer one byte is allocated, so that every buffer has its own address.
        allocate = lib.mp_alloc_shared if shared else lib.mp_alloc
        check(allocate(self._context._handle, self.device, max(self.nbytes, 1), made))
        # Views keep this object alive, and it frees the memory. The callable keeps the context alive.
        self._base = ffi.gc(made[0], _Freed(self._context))
        self.address: int = int(ffi.cast("uintptr_t", self._base))

    @property
    def context(self) -> Context:
        """Context that allocated the memory."""
        return self._context

    @property
    def on_host(self) -> bool:
        """True if the CPU can access the memory."""
        return self.device < 0 or self._context._backend == "host"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a buffer without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Buffer:
        """Returns a view of some rows (indices of the first dimension), for example ``buffer[2:5]``."""
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            raise TypeError("a buffer supports slices of its first dimension with step 1; for others use numpy.asarray(buffer)")
        first, last, _ = rows.indices(self.shape[0])
        count = max(last - first, 0)
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        return self._view((count, *self.shape[1:]), self.dtype, first * row, count * row)

    def _view(self, shape: tuple[int, ...], dtype: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        view = object.__new__(Buffer)
        view.shape, view.dtype, view.itemsize, view.device = shape, dtype, itemsize_of(dtype), self.device
        view.nbytes, view.address = self.nbytes if nbytes is None else nbytes, self.address + offset
        view._base, view._context, view._is_bytes = self._base, self._context, self._is_bytes
        return view

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._must_be_on_host("__array_interface__")
        return {"version": 3, "shape": self.shape, "typestr": self._typestr(), "data": (self.address, False), "strides": None}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device < 0 or self._context._backend == "host":
            raise AttributeError(
                f"memory of device {self.device} on the {self._context._backend} backend is host memory: use __array_interface__"
            )
        # `stream` is None, because mpgpu uses the memory only in streams that the caller knows.
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self._typestr(),
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.on_host else (2, self.device)

    def __dlpack__(self, **arguments: Any) -> Any:
        """Returns a DLPack capsule. A framework that can view this memory as an array creates the capsule: NumPy for host memory, CuPy or
        torch for GPU memory.
        """
        return self._array().__dlpack__(**arguments)

    def _typestr(self) -> str:
        """Returns NumPy's short name of the element type. If NumPy lacks the type, returns the name of raw bytes of the same size."""
        return f"|V{self.itemsize}" if self.dtype in WITHOUT_NUMPY else self.dtype

    def _array(self) -> Any:
        if self.dtype in WITHOUT_NUMPY:
            return self._tensor()
        if self.on_host:
            return self.numpy()
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            with cupy.cuda.Device(self.device):
                return cupy.asarray(self)
        torch = sys.modules.get("torch")
        if torch is not None:
            return torch.as_tensor(self, device=f"cuda:{self.device}")
        raise BufferError("DLPack for memory of a GPU goes through CuPy or torch: import one of them, or use __cuda_array_interface__")

    def _tensor(self) -> Any:
        """Returns the memory as a torch tensor. Used for element types that NumPy lacks."""
        torch: Any = sys.modules.get("torch")
        dtype = getattr(torch, self.dtype, None)
        if dtype is None:
            raise BufferError(f"DLPack for {self.dtype} goes through torch: import a torch that has this type")
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype, device="cpu" if self.on_host else f"cuda:{self.device}")
        if self.on_host:
            return torch.frombuffer(self.memoryview(), dtype=dtype).view(self.shape)
        as_bytes = self._view((self.nbytes,), "|u1")
        return torch.as_tensor(as_bytes, device=f"cuda:{self.device}").view(dtype).view(self.shape)

    def memoryview(self) -> memoryview:
        """Returns a memoryview of the bytes, for reading and writing by the CPU."""
        self._must_be_on_host("memoryview")
        # This pointer keeps the owning pointer alive.
        start = ffi.cast("char *", self._base) + (self.address - int(ffi.cast("uintptr_t", self._base)))
        return memoryview(ffi.buffer(_held(start, self._base), self.nbytes))

    def numpy(self) -> Any:
        """Returns the memory as a NumPy array, which keeps the memory alive. For ``bfloat16``, the array has the type from the package
        ml_dtypes. If that package is not installed, the array contains raw bytes.
        """
        self._must_be_on_host("a NumPy array")
        import numpy

        array = numpy.asarray(self)
        if self.dtype in WITHOUT_NUMPY:
            with contextlib.suppress(ImportError, AttributeError):
                import ml_dtypes

                return array.view(getattr(ml_dtypes, self.dtype))
        return array

    def _must_be_on_host(self, what: str) -> None:
        if not self.on_host:
            raise AttributeError(
                f"{what}: memory of GPU {self.device} is not accessible to the CPU: copy it to HOST memory, or use __cuda_array_interface__"
            )

    def _mpgpu_memory(self) -> Memory:
        return Memory(
            self.address,
            self.nbytes,
            self._base,
            device=self.device if self.nbytes else AUTO,
            on_gpu=self.device >= 0,
            context=self._context,
        )

    @property
    def _elements(self) -> Elements:
        return None if self._is_bytes else (self.dtype, self.shape)

    def __repr__(self) -> str:
        return f"<mpgpu.Buffer of device {self.device}: shape {self.shape}, dtype {self.dtype}>"


class _Freed:
    """Callable that frees memory of mpgpu. It is called when no object refers to the memory any more."""

    __slots__ = ("context", "free", "keep")

    def __init__(self, context: Context, free: Any = lib.mp_free, keep: object = None) -> None:
        self.context = context
        self.free = free
        # Object that is kept alive until the memory is freed.
        self.keep = keep

    def __call__(self, memory: Any) -> None:
        # In a child of fork the call fails, because the memory belongs to the parent process.
        self.free(self.context._handle, memory)


class Registered(_library.Owner):
    """Registration of pageable host memory. It pins the memory, so that plans created afterwards access it directly.

        with mpgpu.Registered(weights):           # a NumPy array, a tensor on the CPU, a memoryview, mmap.mmap, …
            mpgpu.copy(on_gpu, weights)

    Keeps the memory alive and pinned until :meth:`close`, the end of the ``with`` block, or the release of this object. In all three cases,
    the call blocks until all work that is enqueued in the context has finished. The constructor blocks while threads make the pages
    resident.

    Args:
        memory: contiguous host memory. Read-only memory can be a source, if the driver can pin it.
        huge_pages: True if huge pages may be used for the memory.
        context: the context in which the memory is registered. The default is :func:`default_context`.

    Raises:
        ArgumentError: the memory is already pinned, or is not host memory.
        NotSupported: the driver cannot pin the memory.
        OutOfMemory: the host has no more memory.
    """

    __slots__ = ("__weakref__", "_context", "_pinned", "nbytes")

    def __init__(self, memory: Array, *, huge_pages: bool = False, context: Context | None = None) -> None:
        found = memory_of(memory, "memory")
        if found.on_gpu or found.context is not None:
            raise ArgumentError("memory is an allocation of mpgpu, or memory of a GPU: it needs no registration", argument="memory")
        self.nbytes: int = found.nbytes
        self._context = context if context is not None else default_context()
        check(lib.mp_memory_register(self._context._handle, found.pointer, found.nbytes, int(bool(huge_pages))))
        self._pinned: Any = ffi.gc(ffi.cast("void *", found.pointer), _Freed(self._context, lib.mp_memory_unregister, found))

    def close(self) -> None:
        """Unpins the memory. Blocks until all work that is enqueued in the context has finished. A second call does nothing."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            ffi.gc(pinned, None)
            check(lib.mp_memory_unregister(self._context._handle, pinned))

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mpgpu.Registered: {self.nbytes} bytes{'' if self._pinned is not None else ', closed'}>"


def _held(pointer: Any, owner: Any) -> Any:
    """Returns a pointer object that keeps another object alive."""
    return ffi.gc(pointer, lambda _, owner=owner: None)


def empty(
    shape: int | Sequence[int],
    dtype: ElementType | None = None,
    device: Device = HOST,
    *,
    shared: bool = False,
    context: Context | None = None,
) -> Buffer:
    """Allocates memory on a GPU, or pinned memory on the host. See :class:`Buffer`."""
    return Buffer(shape, dtype, device, shared=shared, context=context)


def probe(file: str | os.PathLike[str] | None = None, *, keep: bool | None = None, quick: bool | None = None) -> str:
    """Measures the machine; see :meth:`Context.probe`."""
    return default_context().probe(file, keep=keep, quick=quick)


def topo() -> dict[str, Any]:
    """Returns a summary of the machine for which plans are made; see :meth:`Context.topo`."""
    return default_context().topo()


def devices() -> list[int]:
    """Returns the numbers of all devices: GPUs from 0 up, host domains from ``HOST`` down."""
    return default_context().devices
