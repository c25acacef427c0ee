! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Tests of the Fortran API on the host backend: layouts, copies in stream order, errors, and ownership.
module host_functions
    use mpgpu
    implicit none

contains

    subroutine double_it(user) bind(c)
        type(c_ptr), value :: user
        integer(c_int), pointer :: value
        call c_f_pointer(user, value)
        value = 2 * value
    end subroutine double_it
end module host_functions

program api
    use mpgpu
    use host_functions
    use checks
    implicit none

    character(256) :: text
    integer :: stat, gpus

    call structs_have_the_sizes_that_the_library_expects()
    call a_plan_copies_in_stream_order()
    call a_host_function_runs_in_stream_order()
    call errors_come_as_status_and_text()
    call a_node_of_one_rank_moves_halves()
    call wrong_grids_are_refused()
    call finish()

contains

    subroutine structs_have_the_sizes_that_the_library_expects()
        type(mp_error_info_t) :: error
        type(mp_context_options_t) :: context
        type(mp_statistics_t) :: statistics
        type(mp_device_statistics_t) :: device
        type(mp_plan_options_t) :: plan
        type(mp_plan_info_t) :: info
        type(mp_message_info_t) :: message
        type(mp_probe_options_t) :: probe
        type(mp_node_options_t) :: node
        type(mp_partition_options_t) :: partition
        type(mp_trigger_t) :: trigger
        type(mp_partition_tuning_t) :: tuning
        type(mp_messenger_options_t) :: messenger
        type(mp_blocks_t) :: blocks
        type(mp_piece_options_t) :: pieces
        call check(c_sizeof(error) == error%size, "mp_error_info_t")
        call check(c_sizeof(context) == context%size, "mp_context_options_t")
        call check(c_sizeof(statistics) == statistics%size, "mp_statistics_t")
        call check(c_sizeof(device) == device%size, "mp_device_statistics_t")
        call check(c_sizeof(plan) == plan%size, "mp_plan_options_t")
        call check(c_sizeof(info) == info%size, "mp_plan_info_t")
        call check(c_sizeof(message) == message%size, "mp_message_info_t")
        call check(c_sizeof(probe) == probe%size, "mp_probe_options_t")
        call check(c_sizeof(node) == node%size, "mp_node_options_t")
        call check(c_sizeof(partition) == partition%size, "mp_partition_options_t")
        call check(c_sizeof(trigger) == trigger%size, "mp_trigger_t")
        call check(c_sizeof(tuning) == tuning%size, "mp_partition_tuning_t")
        call check(c_sizeof(messenger) == messenger%size, "mp_messenger_options_t")
        call check(c_sizeof(blocks) == blocks%size .and. blocks%index_bytes == 8, "mp_blocks_t")
        call check(c_sizeof(pieces) == pieces%size, "mp_piece_options_t")
        call check(mp_version() == MP_HEADER_VERSION, "the module and the library have one version")
    end subroutine structs_have_the_sizes_that_the_library_expects

    subroutine a_plan_copies_in_stream_order()
        integer, parameter :: n = 1000003
        type(mpgpu_context) :: ctx
        type(mpgpu_stream) :: stream, other
        type(mpgpu_event) :: event
        type(mpgpu_plan) :: there, back
        type(mpgpu_request) :: request
        type(mp_plan_info_t) :: info
        type(mp_statistics_t) :: statistics
        type(c_ptr) :: a, b
        integer(c_int64_t), pointer :: from(:), to(:)
        integer(c_int64_t), allocatable, target :: here(:)
        integer(c_int) :: backend
        integer(c_int64_t) :: bytes
        integer :: i
        logical :: done
        call ctx%create(topology="beluga")
        call ctx%devices(gpus, backend=backend)
        call check(gpus == 4 .and. backend == MP_BACKEND_HOST, "beluga has four GPUs, here virtual ones")
        bytes = n * 8_c_int64_t
        call ctx%alloc(0, bytes, a)
        call ctx%alloc(1, bytes, b)
        call c_f_pointer(a, from, [n])
        call c_f_pointer(b, to, [n])
        allocate(here(n))
        from = [(int(i, c_int64_t) * 7, i = 1, n)]
        to = 0
        here = 0
        call stream%create(ctx, 0)
        call other%create(ctx, 1)
        call event%create(ctx)
        call there%create(ctx, [mpgpu_transfer(b, a, bytes)])
        call back%create(ctx, [mpgpu_transfer(c_loc(here), b, bytes, MP_DEVICE_HOST, 1)], mp_plan_options_t(max_paths=1))
        call there%prepare(stream)
        call there%enqueue(stream)
        call event%record(stream)
        call other%wait(event)
        call back%execute(other, request)
        call check(c_associated(request%handle), "an execution gives a request")
        call request%wait()
        call check(.not. c_associated(request%handle), "a request that was waited for is empty")
        call check(all(to == from) .and. all(here == from), "every byte has come, in stream order")
        call event%synchronize()
        call there%execute(stream, request)
        done = .false.
        do while (.not. done)
            call request%test(done)
        end do
        call check(.not. c_associated(request%handle), "a request that is done is empty")
        call there%info(info)
        call check(info%bytes == bytes .and. info%paths > 1 .and. info%predicted_seconds < info%direct_seconds, &
            "a large copy takes several paths")
        call back%info(info)
        call check(info%paths == 1, "and one where the options say so")
        call check(index(there%describe(), "via gpu2") > 0, "a plan describes its relays")
        call check(index(there%describe(MP_FORMAT_JSON), "{") == 1, "as JSON too")
        call check(index(ctx%describe(), "beluga") > 0, "a context describes its machine")
        stat = mp_context_statistics(ctx%handle, statistics)
        call check(stat == 0 .and. statistics%executions == 3, "the C functions take the same handles")
        call there%destroy()
        call back%destroy()
        call event%destroy()
        call ctx%free(a, stream)
        call check(.not. c_associated(a), "freed memory is null")
        call ctx%free(b)
        call stream%destroy()
        call other%destroy()
        call ctx%destroy()
        call check(.not. c_associated(ctx%handle), "a destroyed context is empty")
    end subroutine a_plan_copies_in_stream_order

    subroutine a_host_function_runs_in_stream_order()
        type(mpgpu_context) :: ctx
        type(mpgpu_stream) :: stream, same
        type(mpgpu_plan) :: copy
        type(c_funptr) :: doubles
        integer(c_int), target :: value, copied
        doubles = c_funloc(double_it)
        value = 21
        copied = 0
        call ctx%create()
        call stream%create(ctx, 0)
        call same%borrow(ctx, transfer(stream%handle, 0_c_intptr_t))
        call copy%create(ctx, [mpgpu_transfer(c_loc(copied), c_loc(value), 4_c_int64_t)])
        call stream%launch_host(doubles, c_loc(value))
        call copy%enqueue(same)
        call stream%launch_host(doubles, c_loc(copied))
        call stream%synchronize()
        call check(value == 42 .and. copied == 84, "host functions run in stream order")
        call same%destroy()
        call stream%synchronize(stat)
        call check(stat == 0, "a borrowed stream is not destroyed")
        call ctx%destroy()
    end subroutine a_host_function_runs_in_stream_order

    subroutine errors_come_as_status_and_text()
        type(mpgpu_context) :: ctx
        type(mpgpu_plan) :: plan
        integer(c_int), target :: here(4)
        type(c_ptr) :: memory
        call ctx%create(topology="no such machine", stat=stat, errmsg=text)
        call check(stat == MP_ERROR_TOPOLOGY .and. index(text, "no such machine") > 0, "an unknown topology is named")
        call ctx%create()
        text = "as it was"
        call ctx%devices(gpus, stat=stat, errmsg=text)
        call check(stat == 0 .and. text == "as it was", "success leaves errmsg alone")
        call ctx%alloc(999, 8_c_int64_t, memory, stat=stat)
        call check(stat == MP_ERROR_INVALID_DEVICE, "there is no device 999")
        call check(mpgpu_status_name(stat) == "MP_ERROR_INVALID_DEVICE", "a status has a name")
        call check(index(mpgpu_last_error(), "999") > 0, "the last error has the whole text")
        call plan%create(ctx, [mpgpu_transfer(c_loc(here(1)), c_loc(here(2)), 8_c_int64_t)], stat=stat, errmsg=text)
        call check(stat == MP_ERROR_OVERLAP, "an overlap is refused")
        call check(len_trim(text) > 0 .and. .not. c_associated(plan%handle), "and there is no plan")
        call plan%destroy(stat, text)
        call check(stat == MP_ERROR_INVALID_HANDLE .and. text == "plan is empty: call its create first", &
            "no plan cannot be destroyed")
        call ctx%destroy()
        call ctx%destroy(stat)
        call check(stat == MP_ERROR_INVALID_HANDLE, "a context is destroyed once")
    end subroutine errors_come_as_status_and_text

    subroutine a_node_of_one_rank_moves_halves()
        type(mpgpu_context) :: ctx
        type(mpgpu_node) :: node
        type(mpgpu_stream) :: stream
        type(mpgpu_plan) :: plan
        type(c_ptr) :: a, b
        integer(c_int), pointer :: from(:), to(:)
        call ctx%create(topology="beluga")
        call node%create(ctx, 0, 1, devices=[0, 1])
        call check(all(node%devices() == [0, 1]), "a rank works for the GPUs that it names")
        call check(node%device() == 0, "the first of them is the rank's GPU")
        call stream%create(ctx, 0)
        call ctx%alloc(0, 4000_c_int64_t, a)
        call ctx%alloc(1, 4000_c_int64_t, b)
        call c_f_pointer(a, from, [1000])
        call c_f_pointer(b, to, [1000])
        from = 5
        to = 0
        call plan%create(node, [mpgpu_send_to(0, 9_c_int64_t, a, 4000_c_int64_t), &
            mpgpu_receive_from(-1, 9_c_int64_t, b, 4000_c_int64_t), mpgpu_receive_from(0, 9_c_int64_t, b, 4000_c_int64_t)])
        call plan%enqueue(stream)
        call stream%synchronize()
        call check(all(to == 5), "halves meet by their tag, and a rank below 0 moves nothing")
        call plan%destroy()
        call plan%create(node, [mpgpu_send_to(MP_FIRST_ELSEWHERE - 5, 1_c_int64_t, a, 8_c_int64_t)], stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "rank 5 is on another node") > 0, "a rank of another node")
        call plan%create(node, [mpgpu_send_to(MP_ANY_RANK, 1_c_int64_t, a, 8_c_int64_t)], stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "rank=any") > 0, "any rank is none to send to")
        call ctx%free(a)
        call ctx%free(b)
        call node%destroy()
        call node%fail("too late", stat)
        call check(stat == MP_ERROR_INVALID_HANDLE, "a node that was destroyed is refused")
        call ctx%destroy()
    end subroutine a_node_of_one_rank_moves_halves

    subroutine wrong_grids_are_refused()
        type(mpgpu_context) :: ctx
        type(mpgpu_plan) :: plan
        type(mpgpu_grid) :: grid
        type(mpgpu_array) :: arrays(1, 2)
        integer(c_int), target :: cells(12)
        call ctx%create()
        arrays%element_bytes = 4
        arrays%data = c_loc(cells)
        grid = mpgpu_grid(cells=[1, 4, 1], ranks=[1, 3, 1], ghost=[0, 1, 0])
        call plan%create(ctx, grid, arrays, stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "ranks of the grid") > 0, "arrays of two ranks for three")
        grid%ranks(2) = 5
        call plan%create(ctx, grid, arrays, stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "ranks in y: 5") > 0, "more ranks than cells")
        grid%ranks(2) = 2
        grid%ghost(2) = 3
        call plan%create(ctx, grid, arrays, stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "ghost cells in y: 3") > 0, "more ghost cells than cells")
        grid%ghost(2) = 1
        arrays(1, 2)%data = c_null_ptr
        call plan%create(ctx, grid, arrays, stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "variable 1 of rank 1") > 0, "an address that is null")
        grid%reach = 4
        call plan%create(ctx, grid, arrays, stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "reach: 4") > 0, "a reach that is none")
        grid = mpgpu_grid(cells=[99999999, 1, 1], periodic=[.true., .false., .false.], ghost=[100000000, 0, 0])
        call plan%create(ctx, grid, arrays(:, :1), stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "in x: 100000000: must be 0 to 99999999, the cells") > 0, &
            "a refusal of long numbers is returned whole")
        grid = mpgpu_grid(cells=[-huge(0_c_int64_t) - 1, 1_c_int64_t, 1_c_int64_t])
        call plan%create(ctx, grid, arrays(:, :1), stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "-9223372036854775808") > 0, "the longest number")
        grid = mpgpu_grid(cells=[65536, 65536, 1], ranks=[65536, 65536, 1])
        call plan%create(ctx, grid, arrays(:, :0), stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "more than 2^31 - 2 ranks") > 0, "2^32 ranks are not none")
        call check(mpgpu_rank_count(grid) == huge(1), "they are counted as the most that can be")
        grid = mpgpu_grid(cells=[2_c_int64_t ** 40, 2_c_int64_t ** 24, 1_c_int64_t])
        call plan%create(ctx, grid, arrays(:, :1), stat=stat, errmsg=text)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(text, "more bytes than an address can count") > 0, &
            "an array that no memory holds")
        call ctx%destroy()
    end subroutine wrong_grids_are_refused
end program api
