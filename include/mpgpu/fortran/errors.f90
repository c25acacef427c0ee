! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Error reporting, and conversion of text between C and Fortran. Part of module mpgpu; use that module.
module mpgpu_errors
    use mpgpu_c
    implicit none
    private

    public :: mpgpu_last_error, mpgpu_status_name
    public :: mpgpu_report, mpgpu_refuse, mpgpu_text_of, mpgpu_c_text

    interface
        pure function c_strlen(text) bind(c, name="strlen") result(length)
            import
            type(c_ptr), value :: text
            integer(c_size_t) :: length
        end function c_strlen
    end interface

contains

    ! Returns the full error text of the last call that failed on this thread. The text is empty if no call has failed.
    function mpgpu_last_error() result(text)
        character(:), allocatable :: text
        text = mpgpu_text_of(mp_last_error())
    end function mpgpu_last_error

    ! Returns the name of a status, for example "MP_ERROR_OVERLAP".
    function mpgpu_status_name(status) result(name)
        integer, intent(in) :: status
        character(:), allocatable :: name
        name = mpgpu_text_of(mp_status_string(int(status, c_int)))
    end function mpgpu_status_name

    ! Reports the status of a call in the way of the statement `allocate`. `stat` receives the status, which is 0 on success. On
    ! failure `errmsg` receives the error text. If the caller has not passed `stat`, an error stops the program with its text.
    subroutine mpgpu_report(outcome, stat, errmsg)
        integer(c_int), intent(in) :: outcome
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        character(*), parameter :: null = " is NULL"
        character(:), allocatable :: text
        integer :: length
        if (outcome == MP_SUCCESS) then
            if (present(stat)) stat = 0
            return
        end if
        text = mpgpu_last_error()
        length = len(text) - len(null)
        if (outcome == MP_ERROR_INVALID_HANDLE .and. length > 0) then
            if (text(length + 1:) == null) text = text(:length) // " is empty: call its create first"
        end if
        call end_with(outcome, text, stat, errmsg)
    end subroutine mpgpu_report

    ! Reports an error that the Fortran modules have detected.
    subroutine mpgpu_refuse(text, stat, errmsg)
        character(*), intent(in) :: text
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        call end_with(MP_ERROR_INVALID_ARGUMENT, text, stat, errmsg)
    end subroutine mpgpu_refuse

    subroutine end_with(outcome, text, stat, errmsg)
        integer(c_int), intent(in) :: outcome
        character(*), intent(in) :: text
        integer, intent(out), optional :: stat
        character(*), intent(inout), optional :: errmsg
        character(:), allocatable :: line
        if (present(errmsg)) errmsg = text
        if (present(stat)) then
            stat = int(outcome)
        else
            line = "mpgpu: " // mpgpu_status_name(int(outcome)) // ": " // text
            error stop line
        end if
    end subroutine end_with

    ! Converts a C string to a Fortran character value.
    function mpgpu_text_of(address) result(text)
        type(c_ptr), intent(in) :: address
        character(:), allocatable :: text
        character(kind=c_char), pointer :: letters(:)
        integer :: i
        if (.not. c_associated(address)) then
            text = ""
            return
        end if
        call c_f_pointer(address, letters, [c_strlen(address)])
        allocate(character(size(letters)) :: text)
        do i = 1, size(letters)
            text(i:i) = letters(i)
        end do
    end function mpgpu_text_of

    ! Converts a Fortran character value to a C string. Trailing blanks are removed.
    pure function mpgpu_c_text(text) result(letters)
        character(*), intent(in) :: text
        character(kind=c_char) :: letters(len_trim(text) + 1)
        integer :: i
        do i = 1, len_trim(text)
            letters(i) = text(i:i)
        end do
        letters(len_trim(text) + 1) = c_null_char
    end function mpgpu_c_text
end module mpgpu_errors
