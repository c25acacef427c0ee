! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Contexts, memory, streams and events. Part of module mpgpu; use that module.
module mpgpu_streams
    use mpgpu_c
    use mpgpu_errors
    implicit none
    private

    public :: mpgpu_context, mpgpu_stream, mpgpu_event, mpgpu_host_device, mpgpu_described

    ! Context: the library's state for one process: backend, topology, plan cache, streams and memory. Usually a process creates
    ! one.
    type :: mpgpu_context
        type(c_ptr) :: handle = c_null_ptr
    contains
        procedure :: create => context_create
        procedure :: destroy => context_destroy
        procedure :: devices => context_devices
        procedure :: describe => context_describe
        procedure :: alloc => context_alloc
        procedure :: free => context_free
    end type mpgpu_context

    ! Stream: a queue whose work runs in order.
    type :: mpgpu_stream
        type(c_ptr) :: handle = c_null_ptr
        type(c_ptr) :: context = c_null_ptr
        logical :: is_owned = .false.
    contains
        procedure :: create => stream_create
        generic :: borrow => stream_borrow, stream_borrow_number
        procedure, private :: stream_borrow
        procedure, private :: stream_borrow_number
        procedure :: synchronize => stream_synchronize
        procedure :: wait => stream_wait
        procedure :: launch_host => stream_launch_host
        procedure :: destroy => stream_destroy
    end type mpgpu_stream

    ! Event: a point in a stream for which other streams and the host can wait.
    type :: mpgpu_event
        type(c_ptr) :: handle = c_null_ptr
        type(c_ptr) :: context = c_null_ptr
    contains
        procedure :: create => event_create
        procedure :: record => event_record
        procedure :: synchronize => event_synchronize
        procedure :: destroy => event_destroy
    end type mpgpu_event

contains

    ! Returns the device number of the host memory of a NUMA domain. Domains are numbered from 0. Corresponds to
    ! `MP_DEVICE_HOST_NUMA` in C.
    pure integer(c_int32_t) function mpgpu_host_device(domain) result(device)
        integer, intent(in) :: domain
        device = int(-1 - domain, c_int32_t)
    end function mpgpu_host_device

    ! --- contexts and memory -------------------------------------------------------------------------------------------------

    ! Creates a context: chooses the backend, reads the topology, and reads the environment variables. `backend` is one of
    ! MP_BACKEND_*. `topology` is the name of a built-in preset or the path of a topology file.
    subroutine context_create(self, backend, topology, staging_bytes, stat, errmsg)
        class(mpgpu_context), intent(inout) :: self
        integer(c_int), intent(in), optional :: backend
        character(*), intent(in), optional :: topology
        integer(c_int64_t), intent(in), optional :: staging_bytes
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(mp_context_options_t) :: options
        character(kind=c_char), allocatable, target :: name(:)
        if (present(backend)) options%backend = backend
        if (present(staging_bytes)) options%staging_bytes = staging_bytes
        if (present(topology)) then
            allocate(name(len_trim(topology) + 1))
            name(:) = mpgpu_c_text(topology)
            options%topology = c_loc(name)
        end if
        call mpgpu_report(mp_context_create_versioned(options, MP_HEADER_VERSION, self%handle), stat, errmsg)
    end subroutine context_create

    ! Destroys the context. Blocks until all of its work has finished, and then frees everything that belongs to it.
    subroutine context_destroy(self, stat, errmsg)
        class(mpgpu_context), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_context_destroy(self%handle), stat, errmsg)
        self%handle = c_null_ptr
    end subroutine context_destroy

    ! Returns the numbers of GPUs and host domains, and the backend: MP_BACKEND_CUDA for GPUs, MP_BACKEND_HOST for virtual devices.
    subroutine context_devices(self, gpus, host_domains, backend, stat, errmsg)
        class(mpgpu_context), intent(in) :: self
        integer, intent(out), optional :: gpus, host_domains
        integer(c_int), intent(out), optional :: backend
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer(c_int) :: kind
        integer(c_int32_t) :: counts(2)
        kind = MP_BACKEND_AUTO
        counts = 0
        call mpgpu_report(mp_context_get_info(self%handle, kind, counts(1), counts(2)), stat, errmsg)
        if (present(gpus)) gpus = counts(1)
        if (present(host_domains)) host_domains = counts(2)
        if (present(backend)) backend = kind
    end subroutine context_devices

    ! Returns a description of the context: version, backend, topology and settings. It is text or, with `format` MP_FORMAT_JSON,
    ! JSON.
    function context_describe(self, format, stat, errmsg) result(text)
        class(mpgpu_context), intent(in) :: self
        integer(c_int), intent(in), optional :: format
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        character(:), allocatable :: text
        text = mpgpu_described(self%handle, .false., format, stat, errmsg)
    end function context_describe

    ! Allocates `bytes` bytes on a device: GPU memory or, with MP_DEVICE_HOST, pinned host memory that GPUs can access. With
    ! `shared` other processes can map it. The program can access host memory, and on the host backend all memory; c_f_pointer
    ! converts it to an array pointer.
    subroutine context_alloc(self, device, bytes, memory, shared, stat, errmsg)
        class(mpgpu_context), intent(in) :: self
        integer, intent(in) :: device
        integer(c_int64_t), intent(in) :: bytes
        type(c_ptr), intent(inout) :: memory
        logical, intent(in), optional :: shared
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        logical :: is_shared
        is_shared = .false.
        if (present(shared)) is_shared = shared
        if (is_shared) then
            call mpgpu_report(mp_alloc_shared(self%handle, int(device, c_int32_t), bytes, memory), stat, errmsg)
        else
            call mpgpu_report(mp_alloc(self%handle, int(device, c_int32_t), bytes, memory), stat, errmsg)
        end if
    end subroutine context_alloc

    ! Frees memory from `alloc`. Without `stream` it blocks until all work of the context has finished. With `stream` it does not
    ! block: the memory is freed after the work that is now enqueued in that stream. `memory` becomes null.
    subroutine context_free(self, memory, stream, stat, errmsg)
        class(mpgpu_context), intent(in) :: self
        type(c_ptr), intent(inout) :: memory
        type(mpgpu_stream), intent(in), optional :: stream
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer(c_int) :: outcome
        if (present(stream)) then
            outcome = mp_free_async(self%handle, memory, stream%handle)
        else
            outcome = mp_free(self%handle, memory)
        end if
        if (outcome == MP_SUCCESS) memory = c_null_ptr
        call mpgpu_report(outcome, stat, errmsg)
    end subroutine context_free

    ! --- streams and events ------------------------------------------------------------------------------------------------------

    ! Creates a stream of a device. On CUDA the handle is a cudaStream_t.
    subroutine stream_create(self, ctx, device, stat, errmsg)
        class(mpgpu_stream), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(in) :: device
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer(c_int) :: outcome
        self%context = ctx%handle
        outcome = mp_stream_create(ctx%handle, int(device, c_int32_t), self%handle)
        self%is_owned = outcome == MP_SUCCESS
        call mpgpu_report(outcome, stat, errmsg)
    end subroutine stream_create

    ! Makes the object refer to an existing stream of the program: a cudaStream_t as a c_ptr. A null pointer is the default stream.
    ! Never fails.
    pure subroutine stream_borrow(self, ctx, handle)
        class(mpgpu_stream), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        type(c_ptr), intent(in) :: handle
        self%context = ctx%handle
        self%handle = handle
        self%is_owned = .false.
    end subroutine stream_borrow

    ! Makes the object refer to an existing stream that is given as a number, as in CUDA Fortran (cuda_stream_kind) and OpenACC
    ! (acc_get_cuda_stream).
    pure subroutine stream_borrow_number(self, ctx, handle)
        class(mpgpu_stream), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer(c_intptr_t), intent(in) :: handle
        call self%stream_borrow(ctx, transfer(handle, c_null_ptr))
    end subroutine stream_borrow_number

    ! Blocks until all work that is enqueued in the stream so far has finished.
    subroutine stream_synchronize(self, stat, errmsg)
        class(mpgpu_stream), intent(in) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_stream_synchronize(self%context, self%handle), stat, errmsg)
    end subroutine stream_synchronize

    ! Makes all work that is enqueued in the stream from now on wait for the work that is recorded in the event now. Does not block.
    subroutine stream_wait(self, event, stat, errmsg)
        class(mpgpu_stream), intent(in) :: self
        type(mpgpu_event), intent(in) :: event
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_stream_wait_event(self%context, self%handle, event%handle), stat, errmsg)
    end subroutine stream_wait

    ! Enqueues a call of `function` with the argument `user` on a CPU thread, after earlier and before later work in the stream.
    ! `function` is the c_funloc of a procedure with the interface mp_host_function_t. It must not call this library. `function` and
    ! `user` must stay valid until the call has returned.
    subroutine stream_launch_host(self, function, user, stat, errmsg)
        class(mpgpu_stream), intent(in) :: self
        type(c_funptr), intent(in) :: function
        type(c_ptr), intent(in) :: user
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_stream_launch_host(self%context, self%handle, function, user, c_null_funptr), stat, errmsg)
    end subroutine stream_launch_host

    ! Destroys a stream from `create`. Work that is already enqueued still finishes. For a stream from `borrow` it only clears the
    ! handle.
    subroutine stream_destroy(self, stat, errmsg)
        class(mpgpu_stream), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer(c_int) :: outcome
        outcome = MP_SUCCESS
        if (self%is_owned) outcome = mp_stream_destroy(self%context, self%handle)
        self%handle = c_null_ptr
        self%is_owned = .false.
        call mpgpu_report(outcome, stat, errmsg)
    end subroutine stream_destroy

    ! Creates an event. It works with streams of all devices, and counts as completed until it is recorded.
    subroutine event_create(self, ctx, stat, errmsg)
        class(mpgpu_event), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        self%context = ctx%handle
        call mpgpu_report(mp_event_create(ctx%handle, self%handle), stat, errmsg)
    end subroutine event_create

    ! Records in the event all work that is enqueued in the stream so far.
    subroutine event_record(self, stream, stat, errmsg)
        class(mpgpu_event), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_event_record(self%context, self%handle, stream%handle), stat, errmsg)
    end subroutine event_record

    ! Blocks until the work that is recorded in the event has finished.
    subroutine event_synchronize(self, stat, errmsg)
        class(mpgpu_event), intent(in) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_event_synchronize(self%context, self%handle), stat, errmsg)
    end subroutine event_synchronize

    ! Destroys the event. Waits for the event that are already enqueued remain in effect.
    subroutine event_destroy(self, stat, errmsg)
        class(mpgpu_event), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_event_destroy(self%context, self%handle), stat, errmsg)
        self%handle = c_null_ptr
    end subroutine event_destroy

    ! Returns the description of a plan or a context. Calls the C function twice: first for the length, then for the text.
    function mpgpu_described(handle, is_plan, format, stat, errmsg) result(text)
        type(c_ptr), intent(in) :: handle
        logical, intent(in) :: is_plan
        integer(c_int), intent(in), optional :: format
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        character(:), allocatable :: text
        integer(c_int) :: form, outcome
        integer(c_size_t) :: length
        form = MP_FORMAT_TEXT
        if (present(format)) form = format
        length = 0
        text = ""
        if (is_plan) then
            outcome = mp_plan_describe(handle, form, capacity=0_c_size_t, length=length)
        else
            outcome = mp_context_describe(handle, form, capacity=0_c_size_t, length=length)
        end if
        if (outcome == MP_SUCCESS) then
            deallocate(text)
            allocate(character(length) :: text)
            if (is_plan) then
                outcome = mp_plan_describe(handle, form, text, length, length)
            else
                outcome = mp_context_describe(handle, form, text, length, length)
            end if
            text = text(:int(length) - 1) ! without the final NUL
        end if
        call mpgpu_report(outcome, stat, errmsg)
    end function mpgpu_described
end module mpgpu_streams
