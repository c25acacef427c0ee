! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Tests of halo exchange with one process per rank: every cell of every array, several steps without a call of MPI. A failure of one
! rank must make all ranks fail.
program halo_mpi
    use mpgpu_mpi
    use mpgpu
    use cells
    use checks
    use mpi
    implicit none

    integer, parameter :: variables = 2
    type(mpgpu_context) :: ctx
    type(mpgpu_mpi_node) :: node
    integer :: i, code, rank, ranks

    call MPI_Init(code)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, code)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, code)
    call ctx%create(topology="beluga")
    call node%create_mpi(ctx, MPI_COMM_WORLD, [rank])
    call check(node%rank == rank .and. node%ranks == ranks, "a node has the ranks of its communicator")
    call check(all(node%devices() == [rank]), "a rank works for the GPU that it names")
    associate (tried => grids(ranks))
        do i = 1, size(tried)
            call every_cell_is_right(tried(i))
        end do
    end associate
    call a_refusal_reaches_all_ranks()
    call node%destroy()
    call check(.not. associated(node%communicator), "a node gives its communicator back")
    call ctx%destroy()
    call MPI_Finalize(code)
    call finish()

contains

    subroutine every_cell_is_right(grid)
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_array) :: arrays(variables)
        type(mpgpu_stream) :: stream
        type(mpgpu_plan) :: plan
        integer(c_int64_t), pointer :: u(:, :, :)
        character(80) :: what
        integer :: v, step, wrong
        do v = 1, variables
            arrays(v) = mpgpu_array(device=int(rank, c_int32_t))
            call ctx%alloc(rank, 8 * product(mpgpu_array_extents(grid, rank)), arrays(v)%data)
            call c_f_pointer(arrays(v)%data, u, mpgpu_array_extents(grid, rank))
            u = -1
        end do
        call stream%create(ctx, rank)
        call plan%create(node, grid, arrays)
        wrong = 0
        do step = 1, 3
            do v = 1, variables
                call c_f_pointer(arrays(v)%data, u, mpgpu_array_extents(grid, rank))
                ! Neighbours may be a step ahead or behind. Their cells change in each step, and their ghost cells hold only our
                ! values.
                call fill_computed(grid, v + 10 * step, u)
            end do
            call plan%enqueue(stream)
            call stream%synchronize()
            do v = 1, variables
                call c_f_pointer(arrays(v)%data, u, mpgpu_array_extents(grid, rank))
                wrong = wrong + wrong_cells(grid, rank, v + 10 * step, u)
            end do
        end do
        write (what, '(i0, a, 3(i0, 1x), a, 3(i0, 1x))') wrong, " wrong cells of ", grid%cells, "among ", grid%ranks
        call check(wrong == 0, trim(what))
        call plan%destroy()
        call stream%destroy()
        do v = 1, variables
            call ctx%free(arrays(v)%data)
        end do
    end subroutine every_cell_is_right

    ! Sets the computed cells as `fill` does, and leaves ghost cells unchanged.
    subroutine fill_computed(grid, variable, u)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: variable
        integer(c_int64_t), intent(inout) :: u(1 - grid%ghost(1):, 1 - grid%ghost(2):, 1 - grid%ghost(3):)
        integer(c_int64_t), allocatable :: new(:, :, :)
        type(mpgpu_box) :: box
        allocate(new(size(u, 1), size(u, 2), size(u, 3)))
        call fill(grid, rank, variable, new)
        box = mpgpu_box_of(grid, rank)
        associate (n => box%cells, g => grid%ghost)
            u(1:n(1), 1:n(2), 1:n(3)) = new(g(1) + 1:g(1) + n(1), g(2) + 1:g(2) + n(2), g(3) + 1:g(3) + n(3))
        end associate
    end subroutine fill_computed

    subroutine a_refusal_reaches_all_ranks()
        type(mpgpu_plan) :: plan
        type(mpgpu_array) :: arrays(1)
        type(mpgpu_grid) :: grid
        character(256) :: text
        integer :: stat
        grid = mpgpu_grid(cells=[4, 32, 1], ranks=[1, ranks, 1], ghost=[0, 1, 0])
        call ctx%alloc(rank, 8 * product(mpgpu_array_extents(grid, rank)), arrays(1)%data)
        if (rank == ranks - 1) grid%ranks(3) = 2
        call plan%create(node, grid, arrays, stat=stat, errmsg=text)
        if (rank == ranks - 1) then
            call check(stat == MP_ERROR_INVALID_ARGUMENT, "the rank with the wrong grid is told so")
        else
            call check(stat == MP_ERROR_RANK_FAILED .and. index(text, "grid") > 0, "the others are told the reason: " // trim(text))
        end if
        call ctx%free(arrays(1)%data)
    end subroutine a_refusal_reaches_all_ranks
end program halo_mpi
