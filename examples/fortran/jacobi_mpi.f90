! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Jacobi relaxation as in jacobi.f90, with one process per rank: mpirun -n 4 jacobi_mpi [nx [ny [steps]]]
!
! All ranks make one plan for the exchange. The time loop calls no MPI function, and a rank may be several time steps ahead of its
! neighbours.
program jacobi_mpi
    use mpgpu_mpi
    use mpgpu
    use mesh_part
    use mpi
    implicit none

    type(mpgpu_context) :: ctx
    type(mpgpu_mpi_node) :: node
    type(mpgpu_stream) :: stream
    type(mpgpu_plan) :: halo(2)
    type(mpgpu_grid) :: grid
    type(mpgpu_box) :: box, all_cells
    type(mpgpu_array) :: arrays(2)
    real(real8), pointer :: u(:, :, :)
    real(real8), allocatable :: whole(:, :, :)
    type(c_ptr) :: memory
    integer(c_int64_t) :: extents(3), wrong, wrong_on_all
    integer :: gpu, step, steps, old, new, rank, ranks, code

    call MPI_Init(code)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, code)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, code)
    grid%cells = [argument(1, 1024), argument(2, 256), 1]
    steps = argument(3, 100)
    grid%ranks = [1, ranks, 1]
    grid%ghost = [1, 1, 0]
    grid%reach = mpgpu_faces
    box = mpgpu_box_of(grid, rank)
    extents = mpgpu_array_extents(grid, rank)

    call ctx%create(backend=MP_BACKEND_HOST) ! the CPU computes the sweeps
    call ctx%devices(gpu)
    gpu = mod(rank, gpu)
    call node%create_mpi(ctx, MPI_COMM_WORLD, [gpu])
    call stream%create(ctx, gpu)
    call ctx%alloc(gpu, 16 * product(extents), memory)
    call c_f_pointer(memory, u, [extents(1), extents(2), 2_c_int64_t])
    do old = 1, 2
        call start(grid, box, u(:, :, old))
        arrays(old) = mpgpu_array(c_loc(u(1, 1, old)), int(gpu, c_int32_t), 8)
        call halo(old)%create(node, grid, [arrays(old)]) ! collective
    end do

    new = 1
    do step = 1, steps
        old = new
        new = 3 - old
        call halo(old)%enqueue(stream)
        call stream%synchronize() ! wait, because the CPU computes the sweeps
        call sweep(box, u(:, :, old), u(:, :, new))
    end do

    all_cells = mpgpu_box([1, 1, 1], grid%cells)
    allocate(whole(0:grid%cells(1) + 1, 0:grid%cells(2) + 1, 2))
    call start(grid, all_cells, whole(:, :, 1))
    call start(grid, all_cells, whole(:, :, 2))
    new = 1
    do step = 1, steps
        old = new
        new = 3 - old
        call sweep(all_cells, whole(:, :, old), whole(:, :, new))
    end do
    wrong = differ(box, u(:, :, new), whole(:, :, new))
    call MPI_Allreduce(wrong, wrong_on_all, 1, MPI_INTEGER8, MPI_SUM, MPI_COMM_WORLD, code)

    call halo(1)%destroy()
    call halo(2)%destroy()
    call stream%destroy()
    call ctx%free(memory)
    call node%destroy()
    call ctx%destroy()
    call MPI_Finalize(code)
    if (wrong_on_all > 0) then
        if (rank == 0) print '(i0, a)', wrong_on_all, " cells differ from those of one rank"
        stop 1
    end if
    if (rank == 0) print '(i0, a)', ranks, " ranks: every cell equals that of one rank, bit by bit"
end program jacobi_mpi
