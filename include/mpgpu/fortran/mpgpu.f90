! SPDX-License-Identifier: MIT OR Apache-2.0
!
! mpgpu for Fortran: contexts, memory, streams, events, plans, requests, nodes, and halo exchange on arrays with ghost cells.
!
!     use mpgpu
!     type(mpgpu_context) :: ctx
!     type(mpgpu_stream) :: stream
!     type(mpgpu_plan) :: halo
!     call ctx%create()                                    ! reads the topology and the environment variables
!     call stream%create(ctx, 0)                           ! or an existing one: call stream%borrow(ctx, cuda_stream)
!     call halo%create(ctx, grid, arrays)                  ! or a plan of transfers, or of all ranks of a node
!     do step = 1, steps
!         call compute(stream)                             ! work in the same stream
!         call halo%enqueue(stream)                        ! in stream order; does not block
!     end do
!     call stream%synchronize()
!
! Units are bytes and seconds. Devices are numbers: GPUs are 0, 1, 2 and so on, and host memory is MP_DEVICE_HOST. Ranks are
! numbered from 0, as in MPI.
!
! Memory is passed as a type(c_ptr). It may come from any of these sources:
! - `alloc` of this module,
! - c_loc of a host array with the target attribute,
! - c_devloc of CUDA Fortran,
! - c_loc within `host_data use_device` of OpenACC or `target data use_device_addr` of OpenMP.
! Pass whole arrays to asynchronous copies. For an array section the compiler may create a temporary copy, which is freed too early.
!
! Ownership: `create` creates an object and `destroy` destroys it. There are no finalizers, and a copy of an object refers to the
! same object. Destroying a context frees everything that belongs to it. Memory must stay allocated as long as plans that use it are
! executed.
!
! Errors: `stat` and `errmsg` work as in the statement `allocate`. `stat` receives 0 on success, otherwise one of MP_ERROR_*. On
! failure `errmsg` receives the error text with the remedy; otherwise it is unchanged. If `stat` is omitted, an error stops the
! program. `mpgpu_last_error` returns the whole error text.
!
! Threads: any thread may call any procedure. An object must not be used while another thread creates or destroys it.
!
! Every function of mpgpu.h is also available under its own name (module mpgpu_c), for example for signals, memory of other
! processes, messages and partitions. Pass the component `handle` of an object to these functions.
module mpgpu
    use mpgpu_c
    use mpgpu_errors
    use mpgpu_mesh
    use mpgpu_streams
    implicit none
    public
    private :: plan_transfers, plan_node_windows, plan_exchange, plan_halo, plan_node_halo
    private :: plan_enqueue, plan_execute, plan_prepare, plan_describe, plan_info, plan_destroy
    private :: request_wait, request_test, request_destroy
    private :: node_create, node_device, node_devices, node_fail, node_destroy
    private :: address_at, is_none, wrong_halo

    ! Request: an execution of a plan that the program can wait for.
    type :: mpgpu_request
        type(c_ptr) :: handle = c_null_ptr
    contains
        procedure :: wait => request_wait
        procedure :: test => request_test
        procedure :: destroy => request_destroy
    end type mpgpu_request

    ! Node: group of processes (ranks) on one machine that plan their transfers together. Module mpgpu_mpi creates a node from an
    ! MPI communicator.
    type :: mpgpu_node
        type(c_ptr) :: handle = c_null_ptr
        integer :: rank = 0  ! rank of this process, from 0
        integer :: ranks = 1 ! number of ranks in the node
    contains
        procedure :: create => node_create
        procedure :: device => node_device
        procedure :: devices => node_devices
        procedure :: fail => node_fail
        procedure :: destroy => node_destroy
    end type mpgpu_node

    ! Send or receive descriptor: one rank's side of a transfer. It contains this rank's memory, the other rank and a tag. It does
    ! not contain the position in the other rank's memory. `mpgpu_send_to` and `mpgpu_receive_from` create it.
    type :: mpgpu_half
        type(c_ptr) :: memory = c_null_ptr
        integer(c_int64_t) :: bytes = 0
        integer :: rank = -1
        integer(c_int64_t) :: tag = 0
        logical :: is_send = .false.
    end type mpgpu_half

    ! Plan: a prepared batch of copies. It is created once and executed any number of times.
    type :: mpgpu_plan
        type(c_ptr) :: handle = c_null_ptr
    contains
        generic :: create => plan_transfers, plan_node_windows, plan_exchange, plan_halo, plan_node_halo
        procedure, private :: plan_transfers
        procedure, private :: plan_node_windows
        procedure, private :: plan_exchange
        procedure, private :: plan_halo
        procedure, private :: plan_node_halo
        procedure :: enqueue => plan_enqueue
        procedure :: execute => plan_execute
        procedure :: prepare => plan_prepare
        procedure :: describe => plan_describe
        procedure :: info => plan_info
        procedure :: destroy => plan_destroy
    end type mpgpu_plan

contains

    ! Returns a transfer that copies `bytes` bytes from `src` to `dst`. If a device is omitted, the library determines it from the
    ! address (MP_DEVICE_AUTO).
    pure function mpgpu_transfer(dst, src, bytes, dst_device, src_device) result(made)
        type(c_ptr), intent(in) :: dst, src
        integer(c_int64_t), intent(in) :: bytes
        integer, intent(in), optional :: dst_device, src_device
        type(mp_transfer_t) :: made
        made%dst = dst
        made%dst_device = MP_DEVICE_AUTO
        if (present(dst_device)) made%dst_device = int(dst_device, c_int32_t)
        made%src = src
        made%src_device = MP_DEVICE_AUTO
        if (present(src_device)) made%src_device = int(src_device, c_int32_t)
        made%bytes = bytes
    end function mpgpu_transfer

    ! Returns a descriptor that sends `bytes` bytes to a rank of the node. That rank passes a `mpgpu_receive_from` descriptor with
    ! the calling rank, the same tag and the same number of bytes.
    !
    ! With a negative rank, such as MPI_PROC_NULL, nothing is copied. MP_ANY_RANK is rejected. So are MP_FIRST_ELSEWHERE and all
    ! smaller numbers, which represent ranks on other nodes.
    pure function mpgpu_send_to(rank, tag, memory, bytes) result(half)
        integer, intent(in) :: rank
        integer(c_int64_t), intent(in) :: tag
        type(c_ptr), intent(in) :: memory
        integer(c_int64_t), intent(in) :: bytes
        type(mpgpu_half) :: half
        half = mpgpu_half(memory, bytes, rank, tag, .true.)
    end function mpgpu_send_to

    ! Returns a descriptor that receives `bytes` bytes from a rank of the node. That rank passes a `mpgpu_send_to` descriptor with
    ! the calling rank, the same tag and the same number of bytes.
    pure function mpgpu_receive_from(rank, tag, memory, bytes) result(half)
        integer, intent(in) :: rank
        integer(c_int64_t), intent(in) :: tag
        type(c_ptr), intent(in) :: memory
        integer(c_int64_t), intent(in) :: bytes
        type(mpgpu_half) :: half
        half = mpgpu_half(memory, bytes, rank, tag, .false.)
    end function mpgpu_receive_from

    ! --- plans -------------------------------------------------------------------------------------------------------------------

    ! Plans a batch of transfers together, so that they do not compete for links. No destination may overlap another destination or
    ! a source.
    subroutine plan_transfers(self, ctx, transfers, options, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        type(mp_transfer_t), intent(in) :: transfers(:)
        type(mp_plan_options_t), intent(in), optional :: options
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_plan(ctx%handle, transfers, size(transfers, kind=c_size_t), options, self%handle), stat, errmsg)
    end subroutine plan_transfers

    ! Plans all transfers between the ranks of a node together. Collective. Each rank passes its windows (memory ranges) and its
    ! transfers, or send and receive descriptors, as for mp_node_plan.
    subroutine plan_node_windows(self, node, windows, transfers, options, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        class(mpgpu_node), intent(in) :: node
        type(mp_window_t), intent(in) :: windows(:)
        type(mp_node_transfer_t), intent(in) :: transfers(:)
        type(mp_plan_options_t), intent(in), optional :: options
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_node_plan(node%handle, windows, size(windows, kind=c_size_t), transfers, &
            size(transfers, kind=c_size_t), options=options, plan=self%handle), stat, errmsg)
    end subroutine plan_node_windows

    ! Plans the transfers that are described by the send and receive descriptors of all ranks. Collective. Sends match receives by
    ! source, destination and tag, in the order in which each rank passes them.
    subroutine plan_exchange(self, node, halves, options, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        class(mpgpu_node), intent(in) :: node
        type(mpgpu_half), intent(in) :: halves(:)
        type(mp_plan_options_t), intent(in), optional :: options
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(mp_window_t), allocatable :: windows(:)
        type(mp_node_transfer_t), allocatable :: transfers(:)
        type(mp_node_end_t) :: own, other
        integer :: i, n
        n = count(.not. is_none(halves%rank))
        allocate(windows(n), transfers(n))
        n = 0
        do i = 1, size(halves)
            if (is_none(halves(i)%rank)) cycle
            own = mp_node_end_t(rank=int(node%rank, c_int32_t), window=int(n, c_int32_t))
            other = mp_node_end_t(rank=int(halves(i)%rank, c_int32_t), window=MP_BY_TAG, offset=halves(i)%tag)
            n = n + 1
            windows(n) = mp_window_t(halves(i)%memory, halves(i)%bytes)
            if (halves(i)%is_send) then
                transfers(n) = mp_node_transfer_t(dst=other, src=own, bytes=halves(i)%bytes)
            else
                transfers(n) = mp_node_transfer_t(dst=own, src=other, bytes=halves(i)%bytes)
            end if
        end do
        call self%plan_node_windows(node, windows, transfers, options, stat, errmsg)
    end subroutine plan_exchange

    ! Plans a halo exchange in which this process contains all ranks of the grid. `arrays` has the dimensions (variable, rank + 1).
    ! All arrays of a rank are on its device. Each execution copies the outermost computed cells of every neighbour into the ghost
    ! cells on that side.
    !
    ! Cells are copied directly from array to array, without packing. Each contiguous row is a separate copy. This is fast for grids
    ! that are divided in y and z, where rows and planes are contiguous. It is slow for faces across x, which have one element per
    ! row. Pack such faces in the program, and plan them as separate transfers.
    subroutine plan_halo(self, ctx, grid, arrays, options, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_array), intent(in) :: arrays(:, :)
        type(mp_plan_options_t), intent(in), optional :: options
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(mp_transfer_t), allocatable :: transfers(:)
        type(mpgpu_array) :: dst, src
        type(mpgpu_piece), allocatable :: pieces(:)
        character(:), allocatable :: wrong
        integer(c_int64_t) :: i, n
        integer :: pass, rank, direction, v
        wrong = mpgpu_wrong_grid(grid)
        if (wrong == "" .and. size(arrays, 2) /= mpgpu_rank_count(grid)) then
            wrong = "arrays: the last dimension must have the ranks of the grid"
        end if
        do rank = 0, size(arrays, 2) - 1
            if (wrong == "") wrong = wrong_halo(grid, arrays(:, rank + 1), rank)
            if (wrong == "" .and. any(arrays(:, rank + 1)%element_bytes /= arrays(:, 1)%element_bytes)) then
                wrong = "arrays: elements of a variable must have the same size on all ranks"
            end if
        end do
        if (wrong /= "") then
            call mpgpu_refuse(wrong, stat, errmsg)
            return
        end if
        do pass = 1, 2 ! counts, then fills
            n = 0
            do rank = 0, size(arrays, 2) - 1
                do direction = 1, mpgpu_directions
                    pieces = mpgpu_pieces_of(grid, rank, direction)
                    if (pass == 2) then
                        do v = 1, size(arrays, 1)
                            if (size(pieces) == 0) cycle
                            src = arrays(v, rank + 1)
                            dst = arrays(v, mpgpu_neighbour(grid, rank, direction) + 1)
                            do i = 1, size(pieces)
                                transfers(n + (v - 1) * size(pieces) + i) = mpgpu_transfer( &
                                    address_at(dst%data, pieces(i)%to * dst%element_bytes), &
                                    address_at(src%data, pieces(i)%from * src%element_bytes), &
                                    pieces(i)%elements * src%element_bytes, int(dst%device), int(src%device))
                            end do
                        end do
                    end if
                    n = n + size(pieces, kind=c_int64_t) * size(arrays, 1)
                end do
            end do
            if (pass == 1) allocate(transfers(n))
        end do
        call self%plan_transfers(ctx, transfers, options, stat, errmsg)
    end subroutine plan_halo

    ! Plans a halo exchange in which each rank of the grid is a process. Collective over the ranks of the node. Rank numbers in the
    ! grid are those of the node. `arrays` are the variables of this rank. Other processes must be able to map their memory: on a
    ! GPU it comes from `alloc`, on the host from `alloc` with `shared`.
    subroutine plan_node_halo(self, node, grid, arrays, options, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        class(mpgpu_node), intent(in) :: node
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_array), intent(in) :: arrays(:)
        type(mp_plan_options_t), intent(in), optional :: options
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(mp_window_t) :: windows(size(arrays))
        type(mp_node_transfer_t), allocatable :: transfers(:)
        type(mpgpu_piece), allocatable :: pieces(:)
        character(:), allocatable :: wrong
        integer(c_int64_t) :: i, n, bytes
        integer(c_int) :: told
        integer :: pass, direction, v
        wrong = mpgpu_wrong_grid(grid)
        if (wrong == "" .and. node%ranks /= mpgpu_rank_count(grid)) &
            wrong = "grid: the product of ranks must be the number of ranks of the node object"
        if (wrong == "") wrong = wrong_halo(grid, arrays, node%rank)
        if (wrong /= "") then
            told = mp_node_fail(node%handle, mpgpu_c_text(wrong)) ! otherwise the other ranks would wait
            call mpgpu_refuse(wrong, stat, errmsg)
            return
        end if
        do v = 1, size(arrays)
            bytes = product(mpgpu_array_extents(grid, node%rank)) * arrays(v)%element_bytes
            windows(v) = mp_window_t(arrays(v)%data, bytes)
        end do
        do pass = 1, 2
            n = 0
            do direction = 1, mpgpu_directions
                pieces = mpgpu_pieces_of(grid, node%rank, direction)
                do v = 1, size(arrays)
                    do i = 1, size(pieces)
                        n = n + 1
                        if (pass == 1) cycle
                        bytes = arrays(v)%element_bytes
                        transfers(n) = mp_node_transfer_t( &
                            dst=mp_node_end_t(int(mpgpu_neighbour(grid, node%rank, direction), c_int32_t), int(v - 1, c_int32_t), &
                                pieces(i)%to * bytes), &
                            src=mp_node_end_t(int(node%rank, c_int32_t), int(v - 1, c_int32_t), pieces(i)%from * bytes), &
                            bytes=pieces(i)%elements * bytes)
                    end do
                end do
            end do
            if (pass == 1) allocate(transfers(n))
        end do
        call self%plan_node_windows(node, windows, transfers, options, stat, errmsg)
    end subroutine plan_node_halo

    ! Enqueues one execution of the plan, after all earlier work in the stream and before all later work. Does not block. For a plan
    ! of a node every rank enqueues every execution.
    subroutine plan_enqueue(self, stream, stat, errmsg)
        class(mpgpu_plan), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_execute(self%handle, stream%handle), stat, errmsg)
    end subroutine plan_enqueue

    ! Enqueues one execution of the plan, as `enqueue` does, and returns a request for its end. The caller owns the request.
    subroutine plan_execute(self, stream, request, stat, errmsg)
        class(mpgpu_plan), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_request), intent(inout) :: request
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_execute(self%handle, stream%handle, request%handle), stat, errmsg)
    end subroutine plan_execute

    ! Performs the one-time setup for executions in this stream, so that the first execution takes no longer than later ones. Call
    ! it before a time loop.
    subroutine plan_prepare(self, stream, stat, errmsg)
        class(mpgpu_plan), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_plan_prepare(self%handle, stream%handle), stat, errmsg)
    end subroutine plan_prepare

    ! Returns a description of the plan: its paths, the share of the data on each path, predicted times, and why other paths were
    ! rejected. It is text or, with `format` MP_FORMAT_JSON, JSON.
    function plan_describe(self, format, stat, errmsg) result(text)
        class(mpgpu_plan), intent(in) :: self
        integer(c_int), intent(in), optional :: format
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        character(:), allocatable :: text
        text = mpgpu_described(self%handle, .true., format, stat, errmsg)
    end function plan_describe

    ! Returns properties of the plan: size and number of paths of its transfers, predicted and measured times in seconds.
    subroutine plan_info(self, info, stat, errmsg)
        class(mpgpu_plan), intent(in) :: self
        type(mp_plan_info_t), intent(out) :: info
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_plan_get_info(self%handle, info), stat, errmsg)
    end subroutine plan_info

    ! Destroys the plan. Executions in progress still finish. For a plan of a node, each rank destroys its own object, after the
    ! last execution that it enqueues. The call then blocks until the executions of this rank have finished.
    subroutine plan_destroy(self, stat, errmsg)
        class(mpgpu_plan), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_plan_destroy(self%handle), stat, errmsg)
        self%handle = c_null_ptr
    end subroutine plan_destroy

    ! --- requests ----------------------------------------------------------------------------------------------------------------

    ! Blocks until the execution has finished, and then destroys the request. Returns immediately if the request is empty.
    subroutine request_wait(self, stat, errmsg)
        class(mpgpu_request), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_wait(self%handle), stat, errmsg)
    end subroutine request_wait

    ! Checks whether the execution has finished. Does not block. If it has finished, the request is destroyed.
    subroutine request_test(self, done, stat, errmsg)
        class(mpgpu_request), intent(inout) :: self
        logical, intent(out) :: done
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer(c_int32_t) :: answer
        answer = 0
        call mpgpu_report(mp_test(self%handle, answer), stat, errmsg)
        done = answer /= 0
    end subroutine request_test

    ! Destroys the request. Does not block: the execution continues.
    subroutine request_destroy(self, stat, errmsg)
        class(mpgpu_request), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_request_destroy(self%handle), stat, errmsg)
    end subroutine request_destroy

    ! --- nodes -------------------------------------------------------------------------------------------------------------------

    ! Creates a node of `ranks` ranks, in which this process is rank `rank`. Collective. Blocks until all ranks have called it. The
    ! ranks communicate in one of two ways:
    ! - `allgather` is the c_funloc of a function with the interface mp_allgather_t. The library calls it with `user` as long as the
    !   node exists.
    ! - `socket` is the path of a Unix socket over which the ranks connect to each other.
    ! `devices` are the GPUs that this rank uses. By default it uses its share of the visible GPUs.
    subroutine node_create(self, ctx, rank, ranks, allgather, user, socket, devices, stat, errmsg)
        class(mpgpu_node), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(in) :: rank, ranks
        type(c_funptr), intent(in), optional :: allgather
        type(c_ptr), intent(in), optional :: user
        character(*), intent(in), optional :: socket
        integer, intent(in), optional :: devices(:)
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(mp_node_options_t) :: options
        character(kind=c_char), allocatable, target :: path(:)
        integer(c_int32_t), allocatable, target :: gpus(:)
        type(c_funptr) :: gather
        type(c_ptr) :: given
        gather = c_null_funptr
        given = c_null_ptr
        if (present(allgather)) gather = allgather
        if (present(user)) given = user
        if (present(socket)) then
            allocate(path(len_trim(socket) + 1))
            path(:) = mpgpu_c_text(socket)
            options%socket = c_loc(path)
        end if
        if (present(devices)) then
            gpus = int(devices, c_int32_t)
            options%device_count = size(gpus, kind=c_size_t)
            if (size(gpus) > 0) options%devices = c_loc(gpus)
        end if
        self%rank = rank
        self%ranks = ranks
        call mpgpu_report(mp_node_create(ctx%handle, int(rank, c_int32_t), int(ranks, c_int32_t), gather, given, options, &
            self%handle), stat, errmsg)
    end subroutine node_create

    ! Returns the first GPU that this rank uses. Reports an error if it uses none, because there are more ranks than GPUs.
    function node_device(self, stat, errmsg) result(device)
        class(mpgpu_node), intent(in) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer :: device
        integer(c_int32_t) :: number
        number = MP_DEVICE_HOST
        call mpgpu_report(mp_node_device(self%handle, number), stat, errmsg)
        device = int(number)
    end function node_device

    ! Returns the GPUs that this rank uses. The result is empty if there are more ranks than GPUs.
    function node_devices(self, stat, errmsg) result(devices)
        class(mpgpu_node), intent(in) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer, allocatable :: devices(:)
        integer(c_int32_t), allocatable :: numbers(:)
        integer(c_size_t) :: n
        integer(c_int) :: outcome
        n = 0
        outcome = mp_node_devices(self%handle, capacity=0_c_size_t, count=n)
        allocate(numbers(n))
        if (outcome == MP_SUCCESS .and. n > 0) outcome = mp_node_devices(self%handle, numbers, n, n)
        devices = int(numbers)
        call mpgpu_report(outcome, stat, errmsg)
    end function node_devices

    ! Makes the current or next collective call of the other ranks fail with `reason`. Use it if this rank cannot make the call
    ! itself. Blocks until the other ranks have made their call.
    subroutine node_fail(self, reason, stat, errmsg)
        class(mpgpu_node), intent(in) :: self
        character(*), intent(in) :: reason
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_node_fail(self%handle, mpgpu_c_text(reason)), stat, errmsg)
    end subroutine node_fail

    ! Destroys the node. Its plans stay valid and are destroyed separately. Other ranks need not call it at the same time.
    subroutine node_destroy(self, stat, errmsg)
        class(mpgpu_node), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_node_destroy(self%handle), stat, errmsg)
        self%handle = c_null_ptr
    end subroutine node_destroy

    ! --- shared by the above ----------------------------------------------------------------------------------------------------

    ! Returns true if a rank number means that there is no neighbour, like MPI_PROC_NULL. The smaller numbers, which represent ranks
    ! on other nodes, are rejected by the library.
    elemental logical function is_none(rank)
        integer, intent(in) :: rank
        is_none = rank < 0 .and. rank > MP_FIRST_ELSEWHERE
    end function is_none

    ! Returns an error text if the variables of a rank do not match a valid grid, otherwise an empty text.
    pure function wrong_halo(grid, arrays, rank) result(text)
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_array), intent(in) :: arrays(:)
        integer, intent(in) :: rank
        character(:), allocatable :: text
        integer :: v
        text = ""
        if (size(arrays) == 0) text = "arrays: each rank needs one variable or more"
        do v = 1, size(arrays)
            if (text == "") text = mpgpu_wrong_array(grid, arrays(v), v, rank)
        end do
    end function wrong_halo

    pure function address_at(base, bytes) result(address)
        type(c_ptr), intent(in) :: base
        integer(c_int64_t), intent(in) :: bytes
        type(c_ptr) :: address
        address = transfer(transfer(base, 0_c_intptr_t) + bytes, c_null_ptr)
    end function address_at
end module mpgpu
