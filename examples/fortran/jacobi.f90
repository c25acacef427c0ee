! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Jacobi relaxation on the virtual devices of one node, in one process: jacobi [ranks [nx [ny [steps]]]]
!
! The mesh is divided along y. For each of the two arrays, one plan exchanges the rows between ranks, once per time step. The result
! is compared, bit by bit, with that of the whole mesh on one device.
program jacobi
    use mpgpu
    use mesh_part
    implicit none

    type :: part
        type(mpgpu_box) :: box
        real(real8), pointer :: u(:, :, :) => null() ! two arrays that alternate, with ghost cells
    end type part

    type(mpgpu_context) :: ctx
    type(mpgpu_stream) :: stream
    type(mpgpu_plan) :: halo(2)
    type(mpgpu_grid) :: grid
    type(mpgpu_array), allocatable :: arrays(:, :, :)
    type(part), allocatable :: parts(:)
    real(real8), allocatable :: whole(:, :, :)
    type(c_ptr) :: memory
    integer(c_int64_t) :: wrong, bytes
    integer :: ranks, gpus, rank, step, steps, old, new

    ranks = argument(1, 4)
    grid%cells = [argument(2, 1024), argument(3, 256), 1]
    steps = argument(4, 100)
    grid%ranks = [1, ranks, 1]
    grid%ghost = [1, 1, 0]
    grid%reach = mpgpu_faces

    call ctx%create(backend=MP_BACKEND_HOST) ! the CPU computes the sweeps
    call ctx%devices(gpus)
    call stream%create(ctx, 0)
    allocate(parts(0:ranks - 1), arrays(1, 0:ranks - 1, 2))
    do rank = 0, ranks - 1
        parts(rank)%box = mpgpu_box_of(grid, rank)
        associate (extents => mpgpu_array_extents(grid, rank))
            bytes = 8 * product(extents)
            call ctx%alloc(mod(rank, gpus), 2 * bytes, memory)
            call c_f_pointer(memory, parts(rank)%u, [extents(1), extents(2), 2_c_int64_t])
        end associate
        do old = 1, 2
            call start(grid, parts(rank)%box, parts(rank)%u(:, :, old))
            arrays(1, rank, old) = mpgpu_array(c_loc(parts(rank)%u(1, 1, old)), int(mod(rank, gpus), c_int32_t), 8)
        end do
    end do
    do old = 1, 2
        call halo(old)%create(ctx, grid, arrays(:, :, old))
        call halo(old)%prepare(stream)
    end do

    new = 1
    do step = 1, steps
        old = new
        new = 3 - old
        call halo(old)%enqueue(stream)
        call stream%synchronize() ! the CPU computes the sweeps; a kernel in the same stream would need no wait
        do rank = 0, ranks - 1
            call sweep(parts(rank)%box, parts(rank)%u(:, :, old), parts(rank)%u(:, :, new))
        end do
    end do

    associate (all_cells => mpgpu_box([1, 1, 1], grid%cells))
        allocate(whole(0:grid%cells(1) + 1, 0:grid%cells(2) + 1, 2))
        call start(grid, all_cells, whole(:, :, 1))
        call start(grid, all_cells, whole(:, :, 2))
        new = 1
        do step = 1, steps
            old = new
            new = 3 - old
            call sweep(all_cells, whole(:, :, old), whole(:, :, new))
        end do
    end associate
    wrong = 0
    do rank = 0, ranks - 1
        wrong = wrong + differ(parts(rank)%box, parts(rank)%u(:, :, new), whole(:, :, new))
    end do

    print '(a)', halo(1)%describe()
    print '(i0, a, i0, a, i0, a, i0, a)', grid%cells(1), "x", grid%cells(2), " cells on ", ranks, " ranks, ", steps, " steps:"
    call halo(1)%destroy()
    call halo(2)%destroy()
    call stream%destroy()
    do rank = 0, ranks - 1
        memory = c_loc(parts(rank)%u)
        call ctx%free(memory)
    end do
    call ctx%destroy()
    if (wrong > 0) then
        print '(i0, a)', wrong, " cells differ from those of one rank"
        stop 1
    end if
    print '(a)', "every cell equals that of one rank, bit by bit"
end program jacobi
