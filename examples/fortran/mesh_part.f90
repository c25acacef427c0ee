! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Jacobi relaxation in two dimensions, on a part of the mesh or on the whole mesh. Both programs use this module.
module mesh_part
    use mpgpu
    implicit none
    private
    public :: real8, start, sweep, differ, argument

    integer, parameter :: real8 = c_double

contains

    ! Sets inner cells to 0. Sets boundary cells, which are ghost cells, to a value that depends on their position in the whole
    ! mesh.
    subroutine start(grid, box, u)
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_box), intent(in) :: box
        real(real8), intent(out) :: u(0:, 0:)
        integer(c_int64_t) :: x, y
        u = 0
        do y = 0, box%cells(2) + 1
            u(0, y) = 1 + 0.01_real8 * real(box%first(2) + y, real8)
            u(box%cells(1) + 1, y) = -1
        end do
        do x = 0, box%cells(1) + 1
            if (box%first(2) == 1) u(x, 0) = 2
            if (box%first(2) + box%cells(2) > grid%cells(2)) u(x, box%cells(2) + 1) = 3
        end do
    end subroutine start

    ! Computes one time step. If the arrays are on a GPU (their c_ptr passed to `deviceptr` of OpenACC or `is_device_ptr` of
    ! OpenMP), these loops are the kernel. The operands of a cell are always added in the same order, so the result does not depend
    ! on how the mesh is divided.
    subroutine sweep(box, old, new)
        type(mpgpu_box), intent(in) :: box
        real(real8), intent(in) :: old(0:, 0:)
        real(real8), intent(inout) :: new(0:, 0:)
        integer(c_int64_t) :: x, y
        do y = 1, box%cells(2)
            do x = 1, box%cells(1)
                new(x, y) = 0.25_real8 * ((old(x - 1, y) + old(x + 1, y)) + (old(x, y - 1) + old(x, y + 1)))
            end do
        end do
    end subroutine sweep

    ! Returns the number of computed cells of a part that differ, in any bit, from the same cells of the whole mesh.
    integer(c_int64_t) function differ(box, part, whole) result(cells)
        type(mpgpu_box), intent(in) :: box
        real(real8), intent(in) :: part(0:, 0:), whole(0:, 0:)
        integer(c_int64_t) :: x, y
        cells = 0
        do y = 1, box%cells(2)
            do x = 1, box%cells(1)
                if (transfer(part(x, y), 0_c_int64_t) /= transfer(whole(x, box%first(2) - 1 + y), 0_c_int64_t)) cells = cells + 1
            end do
        end do
    end function differ

    ! Returns the number at position `place` of the command line, or `default` if there is none.
    integer function argument(place, default)
        integer, intent(in) :: place, default
        character(32) :: text
        integer :: stat
        argument = default
        if (command_argument_count() < place) return
        call get_command_argument(place, text)
        read (text, *, iostat=stat) argument
        if (stat /= 0 .or. argument < 1) then
            print '(3a)', "argument ", trim(text), ": must be a number, 1 or more"
            stop 2
        end if
    end function argument
end module mesh_part
