! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Tests of exchanges by index lists with one process per rank. Random lists and exchanges are compared, entry by entry, with a
! reference that every rank computes. A failure of one rank must make all ranks fail.
program indexed
    use mpgpu_indexed
    use mpgpu
    use checks
    use mpi
    implicit none

    integer, parameter :: most_entries = 40, most_ranks = 8, cases = 24, rounds = 5
    ! Components of an entry of each field, and their number in memory. The last field consists of real(4).
    integer, parameter :: used(3) = [1, 3, 2], stored(3) = [1, 4, 3]
    type(mpgpu_context) :: ctx
    integer(c_int64_t) :: state
    integer :: entries(0:most_ranks - 1)
    ! Entries that a rank (second index) sends to another rank (third index), and their number.
    integer, dimension(most_entries, 0:most_ranks - 1, 0:most_ranks - 1) :: sends, receives
    integer :: counts(0:most_ranks - 1, 0:most_ranks - 1)
    integer :: code, rank, ranks, i, local
    real(c_double), pointer :: u(:, :), v(:, :)
    real(c_float), pointer :: w(:, :)

    call MPI_Init(code)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, code)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, code)
    call ctx%create(topology="beluga")
    call refusals_reach_all_ranks()
    call invalid_exchanges_are_refused()
    if (ranks > 1) call a_missing_rank_is_reported()
    call MPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, local, code) ! nodes of two ranks
    do i = 1, cases
        call every_entry_is_right(i, modulo(i, 3) == 0)
    end do
    call MPI_Comm_free(local, code)
    call ctx%destroy()
    call MPI_Finalize(code)
    call finish()

contains

    ! Returns a random number from `least` to `most`, equal on all ranks.
    integer function any_of(least, most)
        integer, intent(in) :: least, most
        state = modulo(state * 48271_c_int64_t, 2147483647_c_int64_t)
        any_of = least + int(modulo(state, int(most - least + 1, c_int64_t)))
    end function any_of

    subroutine make_lists()
        integer :: from, to, order(most_entries), free, n, j, k
        do to = 0, ranks - 1
            entries(to) = any_of(1, most_entries)
        end do
        do to = 0, ranks - 1
            do n = 1, entries(to) ! random order; each entry is received at most once
                k = any_of(1, n)
                order(n) = order(k)
                order(k) = n
            end do
            free = 1
            do from = 0, ranks - 1
                counts(from, to) = merge(0, any_of(0, (entries(to) - free + 2) / 2), any_of(0, 3) == 0)
                do j = 1, counts(from, to)
                    sends(j, from, to) = any_of(1, entries(from))
                    receives(j, from, to) = order(free)
                    free = free + 1
                end do
            end do
        end do
    end subroutine make_lists

    function list_of(places) result(list)
        integer, intent(in) :: places(:)
        type(mpgpu_index_list) :: list
        integer :: k
        if (all([(places(k) == places(1) + k - 1, k = 1, size(places))]) .and. size(places) > 0) then
            list = mpgpu_index_range(places(1), size(places))
        else if (modulo(size(places), 2) == 0) then
            list = mpgpu_index_list(places)
        else
            list = mpgpu_index_list(int(places, c_int64_t))
        end if
    end function list_of

    ! Returns the value of a component of an entry: a fraction, so that sums depend on their order.
    pure real(c_double) function value_of(version, at, field, component, entry)
        integer, intent(in) :: version, at, field, component, entry
        integer(c_int64_t) :: word
        word = modulo((((version * 11_c_int64_t + at) * 13 + field) * 17 + component) * 1009 + entry * 7919, 1000003_c_int64_t)
        value_of = (real(word, c_double) - 500000) / 3001
    end function value_of

    ! Sets all components of this rank's vectors, also those that are not exchanged.
    subroutine fill(version, a, b, c)
        integer, intent(in) :: version
        real(c_double), intent(inout) :: a(:, :), b(:, :)
        real(c_float), intent(inout) :: c(:, :)
        integer :: e, k
        do e = 1, entries(rank)
            a(:, e) = [(value_of(version, rank, 1, k, e), k = 1, stored(1))]
            b(:, e) = [(value_of(version, rank, 2, k, e), k = 1, stored(2))]
            c(:, e) = [(real(value_of(version, rank, 3, k, e), c_float), k = 1, stored(3))]
        end do
    end subroutine fill

    ! Applies what this rank receives to the expected vectors.
    subroutine apply(operation, a, b, c)
        integer(c_int), intent(in) :: operation
        real(c_double), intent(inout) :: a(:, :), b(:, :)
        real(c_float), intent(inout) :: c(:, :)
        real(c_double) :: keep
        integer :: other, j, k, n, from, to
        keep = merge(0.0_c_double, 1.0_c_double, operation == MP_INDEX_COPY)
        do other = 0, ranks - 1
            n = merge(counts(rank, other), counts(other, rank), operation == MP_INDEX_REVERSE_ADD)
            do j = 1, n
                if (operation == MP_INDEX_REVERSE_ADD) then
                    from = receives(j, rank, other)
                    to = sends(j, rank, other)
                else
                    from = sends(j, other, rank)
                    to = receives(j, other, rank)
                end if
                do k = 1, 3
                    if (k <= used(1)) a(k, to) = keep * a(k, to) + value_of(0, other, 1, k, from)
                    if (k <= used(2)) b(k, to) = keep * b(k, to) + value_of(0, other, 2, k, from)
                    if (k <= used(3)) c(k, to) = real(keep, c_float) * c(k, to) + real(value_of(0, other, 3, k, from), c_float)
                end do
            end do
        end do
    end subroutine apply

    ! Executes random exchanges with random lists.
    subroutine every_entry_is_right(seed, between_nodes)
        integer, intent(in) :: seed
        logical, intent(in) :: between_nodes
        type(mpgpu_index_exchange) :: ex
        type(mpgpu_index_neighbour), allocatable :: neighbours(:)
        type(mpgpu_index_field) :: fields(3)
        type(mpgpu_stream) :: stream
        integer(c_int64_t) :: length, sent, received
        integer :: other, round, n
        state = seed
        call make_lists()
        allocate(neighbours(count(counts(rank, :ranks - 1) + counts(:ranks - 1, rank) > 0)))
        n = 0
        do other = ranks - 1, 0, -1
            if (counts(rank, other) + counts(other, rank) == 0) cycle
            n = n + 1
            neighbours(n) = mpgpu_index_neighbour(other, list_of(sends(:counts(rank, other), rank, other)), &
                list_of(receives(:counts(other, rank), other, rank)))
        end do
        if (between_nodes) then
            call ex%create(ctx, MPI_COMM_WORLD, modulo(rank, 2), entries(rank), neighbours, entry_bytes=40, &
                time_limit=60.0_c_double, local=local)
        else
            call ex%create(ctx, MPI_COMM_WORLD, modulo(rank, 2), int(entries(rank), c_int64_t), neighbours, 40)
        end if
        deallocate(neighbours) ! the lists are copied
        call ex%info(length, sent, received)
        call check(length == entries(rank) .and. sent == sum(counts(rank, :ranks - 1)) .and. &
            received == sum(counts(:ranks - 1, rank)), "an exchange object knows its numbers of entries")
        call stream%create(ctx, modulo(rank, 2))
        do n = 1, 3
            fields(n) = mpgpu_index_field(entries=entries(rank), entry_bytes=merge(4, 8, n == 3) * used(n), &
                stride_bytes=merge(4, 8, n == 3) * stored(n), values=merge(MP_NUMBER_F32, MP_NUMBER_F64, n == 3))
            call ctx%alloc(modulo(rank, 2), fields(n)%stride_bytes * entries(rank), fields(n)%data)
        end do
        fields(1)%stride_bytes = 0
        call c_f_pointer(fields(1)%data, u, [stored(1), entries(rank)])
        call c_f_pointer(fields(2)%data, v, [stored(2), entries(rank)])
        call c_f_pointer(fields(3)%data, w, [stored(3), entries(rank)])
        do round = 1, rounds
            call exchange_once(ex, stream, fields)
        end do
        call ex%destroy()
        call check(.not. c_associated(ex%handle), "an exchange object is empty after destroy")
        call stream%destroy()
        do n = 1, 3
            call ctx%free(fields(n)%data)
        end do
    end subroutine every_entry_is_right

    subroutine exchange_once(ex, stream, fields)
        type(mpgpu_index_exchange), intent(in) :: ex
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: fields(:)
        real(c_double) :: a(stored(1), entries(rank)), b(stored(2), entries(rank))
        real(c_float) :: c(stored(3), entries(rank))
        integer(c_int) :: operation
        character(80) :: what
        logical :: is_split
        integer :: wrong
        operation = any_of(0, 2)
        is_split = any_of(0, 1) == 1
        call fill(0, u, v, w)
        if (is_split) then
            call ex%start(stream, fields, operation)
            call stream%synchronize()
            call fill(1, u, v, w)
            call ex%finish(stream)
        else if (operation == MP_INDEX_REVERSE_ADD) then ! one field, then two
            call ex%add(stream, fields(1))
            call ex%add(stream, fields(2:))
        else
            call ex%exchange(stream, fields, operation)
        end if
        call stream%synchronize()
        call fill(merge(1, 0, is_split), a, b, c)
        call apply(operation, a, b, c)
        wrong = count(.not. abs(a - u) <= 0) + count(.not. abs(b - v) <= 0) + count(.not. abs(c - w) <= 0)
        write (what, '(i0, a, i0)') wrong, " wrong components after operation ", operation
        call check(wrong == 0, trim(what))
    end subroutine exchange_once

    ! Requires that the creation of an exchange is refused on all ranks, on the last rank with this text.
    subroutine check_refusal(neighbours, text, entry_bytes, time_limit, device)
        type(mpgpu_index_neighbour), intent(in) :: neighbours(:)
        character(*), intent(in) :: text
        integer, intent(in), optional :: entry_bytes, device
        real(c_double), intent(in), optional :: time_limit
        type(mpgpu_index_exchange) :: ex
        type(mpgpu_index_neighbour) :: none(0)
        character(300) :: message
        integer :: stat, gpu
        message = ""
        gpu = 0
        if (present(device)) gpu = device
        if (rank == ranks - 1) then
            call ex%create(ctx, MPI_COMM_WORLD, gpu, 100, neighbours, entry_bytes, time_limit, stat=stat, errmsg=message)
            call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, text) > 0, &
                "the error is '" // trim(message) // "', but must contain '" // text // "'")
        else
            call ex%create(ctx, MPI_COMM_WORLD, 0, 100, none, stat=stat, errmsg=message)
            call check(stat /= 0 .and. index(message, "another rank") > 0, "the others are told: " // trim(message))
        end if
        call check(.not. c_associated(ex%handle), "an exchange object that was not created is empty")
    end subroutine check_refusal

    subroutine refusals_reach_all_ranks()
        type(mpgpu_index_neighbour) :: self
        type(mpgpu_index_exchange) :: ex
        character(200) :: message
        integer :: stat, last
        last = ranks - 1
        self = mpgpu_index_neighbour(last, mpgpu_index_list([5, 101]), mpgpu_index_range(1, 2))
        call check_refusal([self], "index 101 at position 2: must be 1 to 100, because the vectors have 100 entries")
        self%send = mpgpu_index_range(0, 2)
        call check_refusal([self], "index 0 at position 1: must be 1 to 100")
        self%send = mpgpu_index_range(91, 20)
        call check_refusal([self], "index 101 at position 11")
        self%send = mpgpu_index_range(1, 3)
        call check_refusal([self], "sends 3 entries to rank")
        self%receive = mpgpu_index_list([7_c_int64_t, 3_c_int64_t, 7_c_int64_t])
        call check_refusal([self], "index 7 is twice in the receive list of neighbour")
        self%rank = ranks
        call check_refusal([self], "the communicator has")
        self = mpgpu_index_neighbour(last)
        if (ranks > 1) call check_refusal([self, self], "merge its lists into one mpgpu_index_neighbour")
        call check_refusal([self], "entry_bytes: 2097152: must be 1 to 1048576", entry_bytes=2097152)
        call check_refusal([self], "time_limit is -1", time_limit=-1.0_c_double)
        call check_refusal([self], "device -1 is host memory", device=-1)
        call ex%create(ctx, MPI_COMM_NULL, 0, 1, [self], stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "MPI_COMM_NULL") > 0, "a null communicator is refused")
    end subroutine refusals_reach_all_ranks

    subroutine invalid_exchanges_are_refused()
        type(mpgpu_index_exchange) :: ex
        type(mpgpu_stream) :: stream
        type(mpgpu_index_field) :: field, bad
        type(mpgpu_index_neighbour) :: none(0)
        character(200) :: message
        integer :: stat
        call ex%create(ctx, MPI_COMM_WORLD, 1, 10, none)
        call stream%create(ctx, 1)
        field = mpgpu_index_field(entries=10)
        call ctx%alloc(1, 80_c_int64_t, field%data)
        bad = field
        bad%entries = 9
        call ex%exchange(stream, bad, stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "a field of 9 entries") > 0, "short field: " // message)
        call ex%add(stream, field, stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "set the component values to MP_NUMBER_F32") > 0, &
            "field without a type of numbers: " // message)
        bad = field
        bad%values = 3
        call ex%start(stream, [field, bad], stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "field 2: values is 3") > 0, "unknown type: " // message)
        call ex%exchange(stream, [field, field], stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "create it with a larger entry_bytes") > 0, &
            "large entries: " // message)
        call ex%finish(stream, stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_ARGUMENT .and. index(message, "call start before finish") > 0, "finish: " // message)
        call ex%destroy()
        call ex%exchange(stream, field, stat=stat, errmsg=message)
        call check(stat == MP_ERROR_INVALID_HANDLE .and. message == "indexed is empty: call its create first", "empty: " // message)
        call ex%info(stat=stat)
        call check(stat == MP_ERROR_INVALID_HANDLE, "an empty object has no numbers of entries")
        call ctx%free(field%data)
        call stream%destroy()
    end subroutine invalid_exchanges_are_refused

    ! Each rank is a node. Rank 1 does not take part in the exchange of rank 0.
    subroutine a_missing_rank_is_reported()
        type(mpgpu_index_exchange) :: ex
        type(mpgpu_stream) :: stream
        type(mpgpu_index_field) :: field
        type(mpgpu_index_neighbour) :: other(1)
        character(300) :: message
        integer :: stat
        other(1) = mpgpu_index_neighbour(1 - rank, mpgpu_index_range(1, 5), mpgpu_index_range(6, 5))
        call ex%create(ctx, MPI_COMM_WORLD, 0, 10, other(:merge(1, 0, rank < 2)), time_limit=0.2_c_double, local=MPI_COMM_SELF)
        call stream%create(ctx, 0)
        field = mpgpu_index_field(entries=10)
        call ctx%alloc(0, 80_c_int64_t, field%data)
        if (rank == 0) then
            call ex%exchange(stream, field, stat=stat, errmsg=message)
            call check(stat == MP_ERROR_TIMEOUT .and. index(message, "messages have not arrived from rank 1") > 0 .and. &
                index(message, "call its leave instead of destroy") > 0, "timeout: " // message)
        end if
        call MPI_Barrier(MPI_COMM_WORLD, code)
        call ex%leave()
        call check(.not. c_associated(ex%handle), "an exchange object is empty after leave")
        call ctx%free(field%data)
        call stream%destroy()
    end subroutine a_missing_rank_is_reported
end program indexed
