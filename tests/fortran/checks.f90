! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Checks of all Fortran tests: counts checks and reports failures.
module checks
    implicit none
    private
    public :: check, finish

    integer :: failures = 0, made = 0

contains

    subroutine check(holds, what)
        logical, intent(in) :: holds
        character(*), intent(in) :: what
        made = made + 1
        if (.not. holds) then
            failures = failures + 1
            print '(2a)', "failed: ", what
        end if
    end subroutine check

    ! Ends the program with 1 if a check has failed, or none was made.
    subroutine finish()
        print '(i0, a, i0, a)', made, " checks, ", failures, " failed"
        if (failures > 0 .or. made == 0) stop 1
    end subroutine finish
end module checks
