! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Tests of halo exchange with all ranks in this process: every cell of every array, including ghost cells, of many grids.
program halo
    use mpgpu
    use cells
    use checks
    implicit none

    integer, parameter :: variables = 2
    type :: variable_of_rank
        integer(c_int64_t), pointer :: u(:, :, :) => null()
    end type variable_of_rank

    type(mpgpu_context) :: ctx
    integer :: ranks, i

    call ctx%create(topology="beluga")
    call the_division_is_that_of_the_cpp_library()
    call contiguous_cells_are_one_piece()
    do ranks = 1, 4
        associate (tried => grids(ranks))
            do i = 1, size(tried)
                call every_cell_is_right(tried(i))
            end do
        end associate
    end do
    call ctx%destroy()
    call finish()

contains

    ! Uses the numbers that the comment of halo/mesh.hpp states.
    subroutine the_division_is_that_of_the_cpp_library()
        type(mpgpu_grid) :: grid
        type(mpgpu_box) :: box
        grid = mpgpu_grid(cells=[10, 7, 5], ranks=[2, 3, 1], ghost=[1, 0, 2])
        box = mpgpu_box_of(grid, 3) ! place (1, 1, 0)
        call check(all(box%first == [6, 4, 1]) .and. all(box%cells == [5, 2, 5]), "the first parts have the extra cells")
        call check(all(mpgpu_array_extents(grid, 0) == [7, 3, 9]), "extents have the ghost cells")
        call check(mpgpu_rank_count(grid) == 6, "a grid counts its ranks")
    end subroutine the_division_is_that_of_the_cpp_library

    ! Direction +z is number 23 of 27. The pieces are whole planes, one group of rows per plane, or rows.
    subroutine contiguous_cells_are_one_piece()
        integer, parameter :: up = 2 + 3 * 1 + 9 * 2
        type(mpgpu_grid) :: grid
        grid = mpgpu_grid(cells=[6, 5, 8], ranks=[1, 1, 2], ghost=[0, 0, 2])
        call check(size(mpgpu_pieces_of(grid, 0, up)) == 1, "planes without ghost cells in x and y are one piece")
        grid%ghost = [0, 1, 2]
        call check(size(mpgpu_pieces_of(grid, 0, up)) == 2, "without ghost cells in x a plane is one piece")
        grid%ghost = [1, 1, 2]
        call check(size(mpgpu_pieces_of(grid, 0, up)) == 10, "else a row is one piece")
        call check(size(mpgpu_pieces_of(grid, 1, up)) == 0, "and there is none where there is no neighbour")
    end subroutine contiguous_cells_are_one_piece

    subroutine every_cell_is_right(grid)
        type(mpgpu_grid), intent(in) :: grid
        type(variable_of_rank) :: all_of(variables, 0:mpgpu_rank_count(grid) - 1)
        type(mpgpu_array) :: arrays(variables, 0:mpgpu_rank_count(grid) - 1)
        type(mpgpu_stream) :: stream
        type(mpgpu_plan) :: plan
        type(c_ptr) :: memory
        character(80) :: what
        integer :: rank, v, wrong
        do rank = 0, mpgpu_rank_count(grid) - 1
            do v = 1, variables
                call ctx%alloc(rank, 8 * product(mpgpu_array_extents(grid, rank)), memory)
                call c_f_pointer(memory, all_of(v, rank)%u, mpgpu_array_extents(grid, rank))
                call fill(grid, rank, v, all_of(v, rank)%u)
                arrays(v, rank) = mpgpu_array(memory, int(rank, c_int32_t), 8)
            end do
        end do
        call stream%create(ctx, 0)
        call plan%create(ctx, grid, arrays)
        call plan%enqueue(stream)
        call stream%synchronize()
        wrong = 0
        do rank = 0, mpgpu_rank_count(grid) - 1
            do v = 1, variables
                wrong = wrong + wrong_cells(grid, rank, v, all_of(v, rank)%u)
            end do
        end do
        write (what, '(i0, a, 3(i0, 1x), a, 3(i0, 1x))') wrong, " wrong cells of ", grid%cells, "among ", grid%ranks
        call check(wrong == 0, trim(what))
        call plan%destroy()
        call stream%destroy()
        do rank = 0, mpgpu_rank_count(grid) - 1
            do v = 1, variables
                call ctx%free(arrays(v, rank)%data)
            end do
        end do
    end subroutine every_cell_is_right
end program halo
