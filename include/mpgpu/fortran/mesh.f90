! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Structured mesh, its division among ranks, and the memory ranges that a halo exchange copies. Part of module mpgpu; use that
! module.
!
! The mesh is divided as by mpgpu/halo.hpp, so Fortran and C++ programs get equal parts. The dimensions are x, y and z. x is the
! first index of an array, and elements that are adjacent in x are adjacent in memory. Rank (x, y, z) has the number x + ranks(1) *
! (y + ranks(2) * z), from 0.
module mpgpu_mesh
    use mpgpu_c
    implicit none
    private

    public :: mpgpu_grid, mpgpu_box, mpgpu_array, mpgpu_piece
    public :: mpgpu_rank_count, mpgpu_box_of, mpgpu_array_extents, mpgpu_pieces_of, mpgpu_wrong_grid, mpgpu_wrong_array
    public :: mpgpu_neighbour

    ! Neighbours with which a rank exchanges cells: across faces, also across edges, also across corners.
    integer, parameter, public :: mpgpu_faces = 1, mpgpu_edges = 2, mpgpu_corners = 3
    ! Number of directions to neighbours: 3 x 3 x 3. The middle direction is the rank itself.
    integer, parameter, public :: mpgpu_directions = 27

    ! Mesh, and its division among ranks. Keep the defaults in dimensions that a problem does not have.
    type :: mpgpu_grid
        ! Number of cells of the whole mesh in each dimension, without ghost cells.
        integer(c_int64_t) :: cells(3) = 1
        ! Number of ranks in each dimension.
        integer :: ranks(3) = 1
        ! True for each dimension that is periodic: its first cell is the neighbour of its last cell.
        logical :: periodic(3) = .false.
        ! Number of ghost cells on each of the two sides in each dimension. It must not exceed the number of cells that any rank has
        ! in that dimension.
        integer(c_int64_t) :: ghost(3) = 0
        ! Neighbours with which a rank exchanges cells. Other ghost cells are not changed: those that belong to other neighbours,
        ! and those outside a mesh that is not periodic.
        integer :: reach = mpgpu_corners
    end type mpgpu_grid

    ! Box of cells of the whole mesh.
    type :: mpgpu_box
        integer(c_int64_t) :: first(3) = 1 ! index of the first cell in each dimension, from 1
        integer(c_int64_t) :: cells(3) = 0 ! number of cells in each dimension
    end type mpgpu_box

    ! Array of one variable on one rank: `mpgpu_array_extents` elements including ghost cells, without padding. Does not own the
    ! memory.
    type :: mpgpu_array
        ! Address of the first element: c_loc of a host array; for device memory the address from host_data use_device,
        ! use_device_addr or c_devloc.
        type(c_ptr) :: data = c_null_ptr
        ! Device that owns the memory, or MP_DEVICE_AUTO.
        integer(c_int32_t) :: device = MP_DEVICE_AUTO
        ! Size of one element in bytes.
        integer(c_size_t) :: element_bytes = 8
    end type mpgpu_array

    ! Piece: cells that are contiguous in the arrays of the sender and of the receiver. Offsets are in elements from the start of
    ! the array.
    type :: mpgpu_piece
        integer(c_int64_t) :: from = 0, to = 0, elements = 0
    end type mpgpu_piece

contains

    ! Returns the number of ranks of a grid. If it exceeds the range of an integer, returns the largest integer.
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

    ! Returns the box of cells of the mesh that a rank computes. Cells are divided as evenly as possible. If the number of cells is
    ! not a multiple of the number of ranks in a dimension, the first ranks have one cell more.
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

    ! Returns the number of elements of a rank's arrays in each dimension, including ghost cells.
    pure function mpgpu_array_extents(grid, rank) result(extents)
        type(mpgpu_grid), intent(in) :: grid
        integer, intent(in) :: rank
        integer(c_int64_t) :: extents(3)
        type(mpgpu_box) :: box
        box = mpgpu_box_of(grid, rank)
        extents = box%cells + 2 * grid%ghost
    end function mpgpu_array_extents

    ! Returns the offset (-1, 0 or 1) to a neighbour in each dimension, for one of the `mpgpu_directions`.
    pure function steps_of(direction) result(steps)
        integer, intent(in) :: direction
        integer :: steps(3)
        steps = [mod(direction - 1, 3), mod((direction - 1) / 3, 3), (direction - 1) / 9] - 1
    end function steps_of

    ! Returns the neighbour of a rank in a direction, which is a number from 1 to `mpgpu_directions`. Returns -1 if there is no
    ! neighbour or no cells are exchanged with it.
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

    ! Returns the pieces that a rank sends to its neighbour in a direction: its outermost computed cells on that side, in memory
    ! order. Both ranks have the same extents in all other dimensions, so they compute the same number of pieces.
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
        ! Indices from 0: the lowest or the highest computed cells, and the ghost cells on the other side.
        from = grid%ghost
        to = grid%ghost
        where (steps > 0)
            from = own - 2 * grid%ghost
            to = 0
        elsewhere (steps < 0)
            to = theirs - grid%ghost
        end where
        ! Dimensions that the cells span completely are contiguous and form one piece.
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

    ! Returns a number as text without blanks.
    pure function digits_of(number) result(text)
        integer(c_int64_t), intent(in) :: number
        character(:), allocatable :: text
        character(20) :: room ! long enough for every 64-bit number with its sign
        write (room, '(i0)') number
        text = trim(room)
    end function digits_of

    ! Returns an error text if a grid is invalid, otherwise an empty text.
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

    ! Returns an error text if a variable of a rank does not match a valid grid, otherwise an empty text.
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
