! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Nodes that are created from an MPI communicator: the MPI ranks on one machine plan their transfers together. Needs only module
! mpgpu and MPI.
!
!     use mpgpu_mpi
!     type(mpgpu_mpi_node) :: node
!     call node%create_mpi(ctx, communicator)        ! collective
!     call halo%create(node, grid, arrays)           ! as with any node; no MPI call in the time loop
!
! Creating a plan calls MPI, on the calling thread.
module mpgpu_mpi
    use mpgpu
    use mpi
    implicit none
    private

    public :: mpgpu_mpi_node

    ! Node that consists of all ranks of an MPI communicator.
    type, extends(mpgpu_node) :: mpgpu_mpi_node
        integer, pointer :: communicator => null() ! owned by this object
    contains
        procedure :: create_mpi
        procedure :: destroy => destroy_mpi
    end type mpgpu_mpi_node

contains

    ! Creates a node from the ranks of `communicator`. Collective. All of these ranks must be on one machine; MPI_Comm_split_type
    ! with MPI_COMM_TYPE_SHARED creates such a communicator. The node duplicates the communicator. `devices` are the GPUs that this
    ! rank uses. By default it uses its share of the visible GPUs.
    subroutine create_mpi(self, ctx, communicator, devices, stat, errmsg)
        class(mpgpu_mpi_node), intent(inout) :: self
        type(mpgpu_context), intent(in) :: ctx
        integer, intent(in) :: communicator
        integer, intent(in), optional :: devices(:)
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        type(c_funptr) :: function ! a variable, because gfortran stores a c_funloc argument where it cannot be relocated
        integer :: rank, ranks, code
        function = c_funloc(gather)
        allocate(self%communicator)
        call MPI_Comm_dup(communicator, self%communicator, code)
        if (code == MPI_SUCCESS) call MPI_Comm_rank(self%communicator, rank, code)
        if (code == MPI_SUCCESS) call MPI_Comm_size(self%communicator, ranks, code)
        if (code /= MPI_SUCCESS) then
            deallocate(self%communicator)
            call mpgpu_refuse("communicator: MPI refused it", stat, errmsg)
            return
        end if
        call self%create(ctx, rank, ranks, allgather=function, user=c_loc(self%communicator), devices=devices, stat=stat, &
            errmsg=errmsg)
    end subroutine create_mpi

    ! Destroys the node and frees its duplicate of the communicator. Collective. Call it before MPI_Finalize.
    subroutine destroy_mpi(self, stat, errmsg)
        class(mpgpu_mpi_node), intent(inout) :: self
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        integer :: code
        if (associated(self%communicator)) then
            call MPI_Comm_free(self%communicator, code)
            deallocate(self%communicator)
        end if
        call self%mpgpu_node%destroy(stat, errmsg)
    end subroutine destroy_mpi

    function gather(user, send, receive, bytes) bind(c) result(outcome)
        type(c_ptr), value :: user
        type(c_ptr), value :: send
        type(c_ptr), value :: receive
        integer(c_size_t), value :: bytes
        integer(c_int) :: outcome
        integer, pointer :: communicator
        integer(c_int8_t), pointer, contiguous :: mine(:), all_of_them(:)
        integer :: ranks, code
        call c_f_pointer(user, communicator)
        call MPI_Comm_size(communicator, ranks, code)
        if (code == MPI_SUCCESS) then
            call c_f_pointer(send, mine, [bytes])
            call c_f_pointer(receive, all_of_them, [bytes * ranks])
            ! The library sends a few MiB at a time.
            call MPI_Allgather(mine, int(bytes), MPI_BYTE, all_of_them, int(bytes), MPI_BYTE, communicator, code)
        end if
        outcome = merge(0_c_int, 1_c_int, code == MPI_SUCCESS)
    end function gather
end module mpgpu_mpi
