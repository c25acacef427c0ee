! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Expected value of every cell after a halo exchange, computed from its position in the mesh alone.
module cells
    use mpgpu
    implicit none
    private
    public :: fill, wrong_cells, grids

contains

    ! Returns the grids that are tested, with `ranks` ranks each.
    function grids(ranks) result(tried)
        integer, intent(in) :: ranks
        type(mpgpu_grid), allocatable :: tried(:)
        tried = [ &
            mpgpu_grid(cells=[5, 23, 1], ranks=[1, ranks, 1], ghost=[1, 1, 0]), &
            mpgpu_grid(cells=[6, 24, 1], ranks=[1, ranks, 1], ghost=[0, 2, 0], periodic=[.true., .true., .false.]), &
            mpgpu_grid(cells=[29, 3, 2], ranks=[ranks, 1, 1], ghost=[2, 1, 1], periodic=[.true., .true., .false.]), &
            mpgpu_grid(cells=[3, 4, 19], ranks=[1, 1, ranks], ghost=[1, 1, 2], periodic=[.false., .false., .true.], &
                reach=mpgpu_faces), &
            mpgpu_grid(cells=[4, 4, 18], ranks=[1, 1, ranks], ghost=[0, 0, 1]), &
            mpgpu_grid(cells=[4, 5, 18], ranks=[1, 1, ranks], ghost=[0, 1, 1])]
        if (mod(ranks, 2) == 0) then
            tried = [tried, &
                mpgpu_grid(cells=[9, 11, 17], ranks=[1, 2, ranks / 2], ghost=[1, 1, 1], periodic=[.true., .true., .true.]), &
                mpgpu_grid(cells=[7, 8, 16], ranks=[2, 1, ranks / 2], ghost=[1, 2, 1], periodic=[.false., .true., .true.], &
                    reach=mpgpu_edges), &
                mpgpu_grid(cells=[9, 10, 3], ranks=[2, ranks / 2, 1], ghost=[1, 1, 1], reach=mpgpu_faces)]
        end if
    end function grids

    ! Returns the expected number of a cell of the mesh, or -1 for ghost cells that the exchange does not fill.
    pure integer(c_int64_t) function wanted(grid, box, variable, x, y, z) result(number)
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_box), intent(in) :: box
        integer, intent(in) :: variable
        integer(c_int64_t), intent(in) :: x, y, z ! from 1 at the first computed cell
        integer(c_int64_t) :: at(3)
        integer :: outside
        outside = count([x, y, z] < 1 .or. [x, y, z] > box%cells)
        at = box%first + [x, y, z] - 1
        where (grid%periodic) at = 1 + modulo(at - 1, grid%cells)
        if (outside > grid%reach .or. any(at < 1 .or. at > grid%cells)) then
            number = -1
        else
            number = at(1) + 1000 * at(2) + 1000000 * at(3) + 1000000000_c_int64_t * variable
        end if
    end function wanted

    ! Sets the computed cells of a rank's array, and all others to -1.
    subroutine fill(grid, rank, variable, u)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank, variable
        integer(c_int64_t), intent(out) :: u(1 - grid%ghost(1):, 1 - grid%ghost(2):, 1 - grid%ghost(3):)
        type(mpgpu_box) :: box
        integer(c_int64_t) :: x, y, z
        box = mpgpu_box_of(grid, rank)
        u = -1
        do z = 1, box%cells(3)
            do y = 1, box%cells(2)
                do x = 1, box%cells(1)
                    u(x, y, z) = wanted(grid, box, variable, x, y, z)
                end do
            end do
        end do
    end subroutine fill

    ! Returns the number of cells of a rank's array, including ghost cells, that hold a wrong number.
    integer function wrong_cells(grid, rank, variable, u) result(wrong)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank, variable
        integer(c_int64_t), intent(in) :: u(1 - grid%ghost(1):, 1 - grid%ghost(2):, 1 - grid%ghost(3):)
        type(mpgpu_box) :: box
        integer(c_int64_t) :: x, y, z
        box = mpgpu_box_of(grid, rank)
        wrong = 0
        do z = lbound(u, 3), ubound(u, 3)
            do y = lbound(u, 2), ubound(u, 2)
                do x = lbound(u, 1), ubound(u, 1)
                    if (u(x, y, z) /= wanted(grid, box, variable, x, y, z)) wrong = wrong + 1
                end do
            end do
        end do
    end function wrong_cells
end module cells
