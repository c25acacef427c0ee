! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Exchange of vector entries by index lists, for programs with finite elements, graphs and sparse matrices. Each rank is a process.
! Needs module mpgpu and the C functions of mpgpu/halo_indexed.h.
!
!     use mpgpu_indexed
!     type(mpgpu_index_exchange) :: ex
!     type(mpgpu_index_neighbour) :: neighbours(2)       ! rank, entries to send, entries to receive
!     neighbours(1) = mpgpu_index_neighbour(2, mpgpu_index_list(boundary_2), mpgpu_index_range(owned + 1, ghosts_2))
!     neighbours(2) = mpgpu_index_neighbour(5, mpgpu_index_list(boundary_5), mpgpu_index_list(ghost_list_5))
!     call ex%create(ctx, MPI_COMM_WORLD, gpu, local_entries, neighbours)     ! collective
!     call ex%exchange(stream, mpgpu_index_field(x, local_entries))
!     call ex%destroy()                                                       ! collective, before MPI_Finalize
!
! Indices are counted from 1: the first entry of a vector has index 1. Error texts count positions in lists from 1, too. Ranks are
! counted from 0, as in MPI.
! `stat` and `errmsg` work as in module mpgpu.
!
! mpgpu/halo_indexed.h documents the exchange and its errors. MPI must allow calls from the threads that call these procedures.
module mpgpu_indexed
    use mpgpu
    implicit none
    private

    public :: mpgpu_index_exchange, mpgpu_index_neighbour, mpgpu_index_list, mpgpu_index_range, mpgpu_index_field

    ! Type of the numbers in an entry: not known, real(4), real(8). Only operations that add need it.
    integer(c_int), parameter, public :: MP_NUMBER_NONE = 0, MP_NUMBER_F32 = 1, MP_NUMBER_F64 = 2
    ! Operation of an exchange. MP_INDEX_COPY copies the entries of the send lists to the entries of the receive lists. MP_INDEX_ADD
    ! adds them to the entries of the receive lists. MP_INDEX_REVERSE_ADD sends the entries of the receive lists back and adds them to
    ! the entries of the send lists.
    integer(c_int), parameter, public :: MP_INDEX_COPY = 0, MP_INDEX_ADD = 1, MP_INDEX_REVERSE_ADD = 2
    ! Largest number of fields in an exchange.
    integer, parameter, public :: MP_INDEX_MOST_FIELDS = 8

    ! List of indices of entries of a vector, or a contiguous range of entries. Initially empty. Contains a copy of the indices.
    type :: mpgpu_index_list
        private
        integer(c_int64_t), allocatable :: indices(:) ! not allocated for a range
        integer(c_int64_t) :: first = 1
        integer(c_int64_t) :: count = 0
    end type mpgpu_index_list

    ! Returns a list with a copy of an array of 32-bit or 64-bit indices.
    interface mpgpu_index_list
        module procedure list_of_32, list_of_64
    end interface mpgpu_index_list

    ! Returns the contiguous range of `count` entries that begins at index `first`.
    interface mpgpu_index_range
        module procedure range_of_32, range_of_64
    end interface mpgpu_index_range

    ! Neighbour of a rank, and the entries that the two ranks exchange. A neighbour may be the rank itself.
    type :: mpgpu_index_neighbour
        integer :: rank = 0                ! rank in the communicator, from 0
        type(mpgpu_index_list) :: send     ! entries to send, in the order of the message; an entry may occur several times
        type(mpgpu_index_list) :: receive  ! entries to receive; an entry may occur only once in all receive lists
    end type mpgpu_index_neighbour

    ! Field of an exchange: a vector in the memory of the exchange object's device. Does not own the memory.
    type, bind(c) :: mpgpu_index_field
        type(c_ptr) :: data = c_null_ptr           ! address of the first entry, as in mpgpu_array
        integer(c_int64_t) :: entries = 0          ! number of entries
        integer(c_int64_t) :: entry_bytes = 8      ! size of an entry, bytes
        integer(c_int64_t) :: stride_bytes = 0     ! distance from an entry to the next, bytes; 0 selects entry_bytes
        integer(c_int) :: values = MP_NUMBER_NONE  ! type of the numbers in an entry
    end type mpgpu_index_field

    ! Exchange object: exchanges entries of vectors between the ranks of a communicator.
    type :: mpgpu_index_exchange
        type(c_ptr) :: handle = c_null_ptr
    contains
        generic :: create => create_32, create_64
        generic :: exchange => exchange_one, exchange_all
        generic :: start => start_one, start_all
        generic :: add => add_one, add_all
        procedure, private :: create_32
        procedure, private :: create_64
        procedure, private :: exchange_one
        procedure, private :: exchange_all
        procedure, private :: start_one
        procedure, private :: start_all
        procedure, private :: add_one
        procedure, private :: add_all
        procedure :: finish
        procedure :: info
        procedure :: destroy
        procedure :: leave
    end type mpgpu_index_exchange

    type, bind(c) :: c_list
        type(c_ptr) :: indices = c_null_ptr
        integer(c_int64_t) :: count = 0
        integer(c_int64_t) :: first = 0
        integer(c_int32_t) :: index_bytes = 8
        integer(c_int32_t) :: reserved = 0
    end type c_list

    type, bind(c) :: c_neighbour
        integer(c_int32_t) :: rank
        type(c_list) :: send
        type(c_list) :: receive
    end type c_neighbour

    interface
        function mp_halo_indexed_create_fortran(context, communicator, local, device, entries, neighbours, neighbour_count, &
                entry_bytes, time_limit, indexed) bind(c) result(status)
            import
            type(c_ptr), value :: context
            integer(c_int64_t), value :: communicator
            integer(c_int64_t), intent(in), optional :: local
            integer(c_int32_t), value :: device
            integer(c_int64_t), value :: entries
            type(c_neighbour), intent(in) :: neighbours(*)
            integer(c_size_t), value :: neighbour_count
            integer(c_int64_t), value :: entry_bytes
            real(c_double), value :: time_limit
            type(c_ptr), intent(inout) :: indexed
            integer(c_int) :: status
        end function mp_halo_indexed_create_fortran

        function mp_halo_indexed_exchange(indexed, stream, fields, field_count, operation) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            type(c_ptr), value :: stream
            type(mpgpu_index_field), intent(in) :: fields(*)
            integer(c_size_t), value :: field_count
            integer(c_int), value :: operation
            integer(c_int) :: status
        end function mp_halo_indexed_exchange

        function mp_halo_indexed_start(indexed, stream, fields, field_count, operation) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            type(c_ptr), value :: stream
            type(mpgpu_index_field), intent(in) :: fields(*)
            integer(c_size_t), value :: field_count
            integer(c_int), value :: operation
            integer(c_int) :: status
        end function mp_halo_indexed_start

        function mp_halo_indexed_finish(indexed, stream) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            type(c_ptr), value :: stream
            integer(c_int) :: status
        end function mp_halo_indexed_finish

        function mp_halo_indexed_get_info(indexed, entries, sent, received) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            integer(c_int64_t), intent(inout), optional :: entries, sent, received
            integer(c_int) :: status
        end function mp_halo_indexed_get_info

        function mp_halo_indexed_destroy(indexed) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            integer(c_int) :: status
        end function mp_halo_indexed_destroy

        function mp_halo_indexed_leave(indexed) bind(c) result(status)
            import
            type(c_ptr), value :: indexed
            integer(c_int) :: status
        end function mp_halo_indexed_leave
    end interface

contains

    pure function list_of_32(indices) result(list)
        integer(c_int32_t), intent(in) :: indices(:)
        type(mpgpu_index_list) :: list
        list = list_of_64(int(indices, c_int64_t))
    end function list_of_32

    pure function list_of_64(indices) result(list)
        integer(c_int64_t), intent(in) :: indices(:)
        type(mpgpu_index_list) :: list
        list%count = size(indices, kind=c_int64_t)
        if (list%count == 0) return
        allocate(list%indices(list%count))
        list%indices(:) = indices
    end function list_of_64

    pure function range_of_32(first, count) result(list)
        integer(c_int32_t), intent(in) :: first, count
        type(mpgpu_index_list) :: list
        list = range_of_64(int(first, c_int64_t), int(count, c_int64_t))
    end function range_of_32

    pure function range_of_64(first, count) result(list)
        integer(c_int64_t), intent(in) :: first, count
        type(mpgpu_index_list) :: list
        list%first = first
        list%count = count
    end function range_of_64

    function c_list_of(list) result(c)
        type(mpgpu_index_list), intent(in), target :: list
        type(c_list) :: c
        c%count = list%count
        c%first = list%first
        if (allocated(list%indices)) c%indices = c_loc(list%indices)
    end function c_list_of

    ! Creates an exchange object. Collective over `communicator`, an integer handle of MPI. For a communicator of mpi_f08, pass its
    ! component MPI_VAL. `device` is the GPU of the vectors of this rank, and `entries` the length of the vectors, in entries.
    !
    ! `entry_bytes` is the maximum number of bytes per entry, summed over the fields that are exchanged together. All ranks pass the
    ! same value. By default it is 8. `time_limit`, in seconds, limits the time of messages between nodes. By default there is no
    ! limit. `local` is the communicator of the ranks on this machine that share memory. By default, these are all ranks of
    ! `communicator` on this machine.
    subroutine create_64(self, ctx, communicator, device, entries, neighbours, entry_bytes, time_limit, local, stat, errmsg)
        class(mpgpu_index_exchange), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(in) :: communicator
        integer, intent(in) :: device
        integer(c_int64_t), intent(in) :: entries
        type(mpgpu_index_neighbour), intent(in), target :: neighbours(:)
        integer, intent(in), optional :: entry_bytes
        real(c_double), intent(in), optional :: time_limit
        integer, intent(in), optional :: local
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(c_neighbour) :: lists(size(neighbours))
        integer(c_int64_t), allocatable :: local_handle ! an argument that is not allocated is not present
        integer(c_int64_t) :: bytes
        real(c_double) :: seconds
        integer :: i
        do i = 1, size(neighbours)
            associate (n => neighbours(i))
                lists(i) = c_neighbour(int(n%rank, c_int32_t), c_list_of(n%send), c_list_of(n%receive))
            end associate
        end do
        if (present(local)) local_handle = int(local, c_int64_t)
        bytes = 8
        if (present(entry_bytes)) bytes = entry_bytes
        seconds = 0
        if (present(time_limit)) seconds = time_limit
        call mpgpu_report(mp_halo_indexed_create_fortran(ctx%handle, int(communicator, c_int64_t), local_handle, &
            int(device, c_int32_t), entries, lists, size(lists, kind=c_size_t), bytes, seconds, self%handle), stat, errmsg)
    end subroutine create_64

    ! Creates an exchange object for vectors whose length is a 32-bit integer.
    subroutine create_32(self, ctx, communicator, device, entries, neighbours, entry_bytes, time_limit, local, stat, errmsg)
        class(mpgpu_index_exchange), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(in) :: communicator
        integer, intent(in) :: device
        integer(c_int32_t), intent(in) :: entries
        type(mpgpu_index_neighbour), intent(in), target :: neighbours(:)
        integer, intent(in), optional :: entry_bytes
        real(c_double), intent(in), optional :: time_limit
        integer, intent(in), optional :: local
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call self%create_64(ctx, communicator, device, int(entries, c_int64_t), neighbours, entry_bytes, time_limit, local, stat, &
            errmsg)
    end subroutine create_32

    ! Returns the operation of an exchange: the argument of the program, by default MP_INDEX_COPY.
    pure integer(c_int) function or_copy(operation)
        integer(c_int), intent(in), optional :: operation
        or_copy = MP_INDEX_COPY
        if (present(operation)) or_copy = operation
    end function or_copy

    ! Enqueues an exchange of all fields, after all earlier work in the stream and before all later work. Blocks only if this rank
    ! has neighbours on other nodes. All ranks execute the same exchanges in the same order. The default operation is MP_INDEX_COPY.
    subroutine exchange_all(self, stream, fields, operation, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: fields(:)
        integer(c_int), intent(in), optional :: operation
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_halo_indexed_exchange(self%handle, stream%handle, fields, size(fields, kind=c_size_t), &
            or_copy(operation)), stat, errmsg)
    end subroutine exchange_all

    ! Enqueues an exchange of one field.
    subroutine exchange_one(self, stream, field, operation, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: field
        integer(c_int), intent(in), optional :: operation
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call self%exchange_all(stream, [field], operation, stat, errmsg)
    end subroutine exchange_one

    ! Enqueues an exchange with the operation MP_INDEX_REVERSE_ADD: the entries of the receive lists are sent back and added to the
    ! entries of the send lists.
    subroutine add_all(self, stream, fields, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: fields(:)
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call self%exchange_all(stream, fields, MP_INDEX_REVERSE_ADD, stat, errmsg)
    end subroutine add_all

    ! Enqueues an exchange of one field with the operation MP_INDEX_REVERSE_ADD.
    subroutine add_one(self, stream, field, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: field
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call self%exchange_all(stream, [field], MP_INDEX_REVERSE_ADD, stat, errmsg)
    end subroutine add_one

    ! Starts an exchange after all earlier work in the stream: gathers the entries and sends them. Later work in the stream does not
    ! wait for other ranks, and may write to all entries.
    subroutine start_all(self, stream, fields, operation, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: fields(:)
        integer(c_int), intent(in), optional :: operation
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_halo_indexed_start(self%handle, stream%handle, fields, size(fields, kind=c_size_t), &
            or_copy(operation)), stat, errmsg)
    end subroutine start_all

    ! Starts an exchange of one field.
    subroutine start_one(self, stream, field, operation, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        type(mpgpu_index_field), intent(in) :: field
        integer(c_int), intent(in), optional :: operation
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call self%start_all(stream, [field], operation, stat, errmsg)
    end subroutine start_one

    ! Finishes the exchange that was started: waits for the messages and stores or adds the received entries, after all earlier work
    ! in the stream and before all later work.
    subroutine finish(self, stream, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        type(mpgpu_stream), intent(in) :: stream
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_halo_indexed_finish(self%handle, stream%handle), stat, errmsg)
    end subroutine finish

    ! Returns the length of the vectors of this rank, and the numbers of entries that this rank sends and receives in an exchange.
    subroutine info(self, entries, sent, received, stat, errmsg)
        class(mpgpu_index_exchange), intent(in) :: self
        integer(c_int64_t), intent(inout), optional :: entries, sent, received
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call mpgpu_report(mp_halo_indexed_get_info(self%handle, entries, sent, received), stat, errmsg)
    end subroutine info

    ! Destroys the exchange object. Collective; all ranks call it before MPI_Finalize. Blocks until the exchanges have finished. The
    ! object is then empty, also after an error.
    subroutine destroy(self, stat, errmsg)
        class(mpgpu_index_exchange), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(c_ptr) :: handle
        handle = self%handle
        self%handle = c_null_ptr
        call mpgpu_report(mp_halo_indexed_destroy(handle), stat, errmsg)
    end subroutine destroy

    ! Destroys the exchange object of this rank after an exchange has failed. Not collective. The object is then empty.
    subroutine leave(self, stat, errmsg)
        class(mpgpu_index_exchange), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(c_ptr) :: handle
        handle = self%handle
        self%handle = c_null_ptr
        call mpgpu_report(mp_halo_indexed_leave(handle), stat, errmsg)
    end subroutine leave
end module mpgpu_indexed
