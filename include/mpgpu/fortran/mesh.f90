! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Part of module mpgpu, which programs use: a structured mesh, its division among ranks, and which bytes a halo exchange moves.
!
! The division is that of mpgpu/halo.hpp, so that a Fortran and a C++ program agree: dimensions are x, y, z, of which x is the first
! index of an array and contiguous; rank (x, y, z) has the number x + ranks(1) * (y + ranks(2) * z), from 0.
module mpgpu_mesh
    use mpgpu_c
    implicit none
    private

    public :: mpgpu_grid, mpgpu_box, mpgpu_array, mpgpu_piece
    public :: mpgpu_rank_count, mpgpu_box_of, mpgpu_array_extents, mpgpu_pieces_of, mpgpu_wrong_grid, mpgpu_wrong_array
    public :: mpgpu_neighbour

    ! Which neighbours take part: those that differ in at most one, two or three dimensions.
    integer, parameter, public :: mpgpu_faces = 1, mpgpu_edges = 2, mpgpu_corners = 3
    ! Directions to neighbours: 3 in each dimension, of which the one in the middle is the rank itself.
    integer, parameter, public :: mpgpu_directions = 27

    ! A mesh and its division among ranks. A dimension that a problem does not have is left as it is.
    type :: mpgpu_grid
        ! Cells of the whole mesh, without ghost cells.
        integer(c_int64_t) :: cells(3) = 1
        ! Ranks in each dimension.
        integer :: ranks(3) = 1
        ! Whether the last cell of a dimension is followed by the first.
        logical :: periodic(3) = .false.
        ! Ghost cells at either end of each dimension: at most as many as any rank has cells there.
        integer(c_int64_t) :: ghost(3) = 0
        ! Whose cells are wanted. Other ghost cells, and those outside a mesh that is not periodic, are left alone.
        integer :: reach = mpgpu_corners
    end type mpgpu_grid

    ! A range of cells of the whole mesh.
    type :: mpgpu_box
        integer(c_int64_t) :: first(3) = 1 ! in each dimension, from 1
        integer(c_int64_t) :: cells(3) = 0 ! in each dimension
    end type mpgpu_box

    ! One variable of one rank: `mpgpu_array_extents` elements, ghost cells included, without padding. Owns nothing.
    type :: mpgpu_array
        ! The first element: c_loc of a host array; of device memory what host_data use_device, use_device_addr or c_devloc give.
        type(c_ptr) :: data = c_null_ptr
        ! The device that it lies on, or MP_DEVICE_AUTO.
        integer(c_int32_t) :: device = MP_DEVICE_AUTO
        ! Bytes of one element.
        integer(c_size_t) :: element_bytes = 8
    end type mpgpu_array

    ! Cells that lie in one piece at both ends, in elements from the start of the array.
    type :: mpgpu_piece
        integer(c_int64_t) :: from = 0, to = 0, elements = 0
    end type mpgpu_piece

contains

    ! How many ranks a grid has; the greatest integer for more.
    pure integer function mpgpu_rank_count(grid) result(ranks)
        type(mpgpu_grid), intent(in) :: grid
        integer(c_int64_t) :: count
        integer :: d
        count = 1
        do d = 1, 3
            count = min(count * grid%ranks(d), int(huge(ranks), c_int64_t))
        end do
        ranks = int(count)
    end function mpgpu_rank_count

    pure function place_of(grid, rank) result(place)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank
        integer :: place(3)
        place = [mod(rank, grid%ranks(1)), mod(rank / grid%ranks(1), grid%ranks(2)), rank / grid%ranks(1) / grid%ranks(2)]
    end function place_of

    ! The cells of the mesh that a rank computes: as equal parts as possible, the first ones having the extra cells.
    pure function mpgpu_box_of(grid, rank) result(box)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank
        type(mpgpu_box) :: box
        integer(c_int64_t) :: place(3), least(3), extra(3)
        place = place_of(grid, rank)
        least = grid%cells / grid%ranks
        extra = mod(grid%cells, int(grid%ranks, c_int64_t))
        box%first = 1 + place * least + min(place, extra)
        box%cells = least + merge(1, 0, place < extra)
    end function mpgpu_box_of

    ! Elements of a rank's arrays in each dimension, ghost cells included.
    pure function mpgpu_array_extents(grid, rank) result(extents)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank
        integer(c_int64_t) :: extents(3)
        type(mpgpu_box) :: box
        box = mpgpu_box_of(grid, rank)
        extents = box%cells + 2 * grid%ghost
    end function mpgpu_array_extents

    ! Steps to a neighbour in each dimension.
    pure function steps_of(direction) result(steps)
        integer, intent(in) :: direction
        integer :: steps(3)
        steps = [mod(direction - 1, 3), mod((direction - 1) / 3, 3), (direction - 1) / 9] - 1
    end function steps_of

    ! The rank in one of the `mpgpu_directions`, from 1; -1 where there is none, or its cells are not wanted.
    pure integer function mpgpu_neighbour(grid, rank, direction) result(neighbour)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank, direction
        integer :: steps(3), place(3)
        steps = steps_of(direction)
        place = place_of(grid, rank) + steps
        where (grid%periodic) place = modulo(place, grid%ranks)
        neighbour = -1
        if (all(steps == 0) .or. count(steps /= 0) > grid%reach) return
        if (any(place < 0 .or. place >= grid%ranks) .or. any(steps /= 0 .and. grid%ghost == 0)) return
        neighbour = place(1) + grid%ranks(1) * (place(2) + grid%ranks(2) * place(3))
    end function mpgpu_neighbour

    ! What a rank sends to its neighbour in a direction: its outermost computed cells there, in the order in which they lie in memory.
    ! Both ranks have the same extents in the dimensions that the direction does not leave, and so count the same pieces.
    pure function mpgpu_pieces_of(grid, rank, direction) result(pieces)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank, direction
        type(mpgpu_piece), allocatable :: pieces(:)
        integer :: steps(3), neighbour, whole
        integer(c_int64_t) :: own(3), theirs(3), from(3), to(3), cells(3), y, z, rows, planes, n
        neighbour = mpgpu_neighbour(grid, rank, direction)
        if (neighbour < 0) then
            allocate(pieces(0))
            return
        end if
        steps = steps_of(direction)
        own = mpgpu_array_extents(grid, rank)
        theirs = mpgpu_array_extents(grid, neighbour)
        cells = merge(own - 2 * grid%ghost, grid%ghost, steps == 0)
        ! Indices from 0: the lowest cells, or the highest, of those computed; and the ghost cells on the other side.
        from = grid%ghost
        to = grid%ghost
        where (steps > 0)
            from = own - 2 * grid%ghost
            to = 0
        elsewhere (steps < 0)
            to = theirs - grid%ghost
        end where
        ! Dimensions in which the cells are all that the array has: what lies in them is one piece.
        whole = merge(1, 0, cells(1) == own(1))
        if (whole == 1 .and. cells(2) == own(2)) whole = 2
        rows = merge(cells(2), 1_c_int64_t, whole == 0)
        planes = merge(cells(3), 1_c_int64_t, whole < 2)
        allocate(pieces(rows * planes))
        n = 0
        do z = 0, planes - 1
            do y = 0, rows - 1
                n = n + 1
                pieces(n)%from = from(1) + own(1) * (from(2) + y + own(2) * (from(3) + z))
                pieces(n)%to = to(1) + theirs(1) * (to(2) + y + theirs(2) * (to(3) + z))
                pieces(n)%elements = product(cells) / (rows * planes)
            end do
        end do
    end function mpgpu_pieces_of

    ! A number as text, whatever its size.
    pure function digits_of(number) result(text)
        integer(c_int64_t), intent(in) :: number
        character(:), allocatable :: text
        character(20) :: room ! for every number of 64 bits, its sign included
        write (room, '(i0)') number
        text = trim(room)
    end function digits_of

    ! Says what is wrong with a grid; empty if nothing is.
    pure function mpgpu_wrong_grid(grid) result(text)
        type(mpgpu_grid), intent(in) :: grid
        character(:), allocatable :: text, there
        character(*), parameter :: names = "xyz"
        integer(c_int64_t), parameter :: most = 2_c_int64_t ** 40 ! sums of a few stay far from overflow
        integer(c_int64_t) :: widest
        logical :: shared
        integer :: d
        text = ""
        do d = 1, 3
            there = " in " // names(d:d) // ": "
            if (grid%cells(d) < 1 .or. grid%cells(d) > most) then
                text = "grid: cells" // there // digits_of(grid%cells(d)) // ": must be 1 to 2^40"
                return
            end if
            if (grid%ranks(d) < 1 .or. grid%ranks(d) > grid%cells(d)) then
                text = "grid: ranks" // there // digits_of(int(grid%ranks(d), c_int64_t)) // ": must be 1 to " // &
                    digits_of(grid%cells(d)) // ", the cells there"
                return
            end if
            shared = grid%ranks(d) > 1 .or. grid%periodic(d)
            widest = merge(grid%cells(d) / grid%ranks(d), most, shared)
            if (grid%ghost(d) < 0 .or. grid%ghost(d) > widest) then
                text = "grid: ghost cells" // there // digits_of(grid%ghost(d)) // ": must be 0 to " // digits_of(widest)
                if (shared) text = text // ", the cells of the smallest rank there"
                return
            end if
        end do
        if (mpgpu_rank_count(grid) == huge(1)) then
            text = "grid: more than 2^31 - 2 ranks"
        else if (grid%reach < mpgpu_faces .or. grid%reach > mpgpu_corners) then
            text = "grid: reach: " // digits_of(int(grid%reach, c_int64_t)) // ": must be mpgpu_faces, mpgpu_edges or mpgpu_corners"
        end if
    end function mpgpu_wrong_grid

    ! Says what is wrong with a variable of a rank of a valid grid; empty if nothing is.
    pure function mpgpu_wrong_array(grid, array, variable, rank) result(text)
        type(mpgpu_grid), intent(in) :: grid
        type(mpgpu_array), intent(in) :: array
        integer, intent(in) :: variable, rank
        character(:), allocatable :: text
        integer(c_int64_t) :: extents(3), room
        integer :: d
        text = ""
        if (.not. c_associated(array%data)) then
            text = "its address is null"
        else if (array%element_bytes < 1) then
            text = "its elements have no size"
        else
            extents = mpgpu_array_extents(grid, rank)
            room = huge(room) / array%element_bytes
            do d = 1, 3
                room = room / extents(d)
            end do
            if (room < 1) text = "it has more bytes than an address can count: " // digits_of(extents(1)) // " x " // &
                digits_of(extents(2)) // " x " // digits_of(extents(3)) // " elements of " // &
                digits_of(int(array%element_bytes, c_int64_t)) // " bytes"
        end if
        if (text /= "") text = "arrays: variable " // digits_of(int(variable, c_int64_t)) // " of rank " // &
            digits_of(int(rank, c_int64_t)) // ": " // text
    end function mpgpu_wrong_array
end module mpgpu_mesh
