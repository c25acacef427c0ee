! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Arrays of OpenACC and OpenMP as ends of transfers, as the comment of module mpgpu describes. If the compiler has no device, both
! regions run on the host, and the addresses are host addresses.
program directives
    use mpgpu
    use checks
    implicit none

    integer, parameter :: n = 10000
    type(mpgpu_context) :: ctx
    type(mpgpu_stream) :: stream
    type(c_ptr) :: there
    integer(c_int), target :: u(n), v(n)
    integer :: i

    call ctx%create(backend=MP_BACKEND_HOST)
    call stream%create(ctx, 0)
    call ctx%alloc(0, 4_c_int64_t * n, there)
    u = 0
    v = 0

    !$acc data copy(u, v)
    !$acc parallel loop
    do i = 1, n
        u(i) = 3 * i
    end do
    !$acc host_data use_device(u, v)
    call copy(c_loc(u), c_loc(v))
    !$acc end host_data
    !$acc end data
    call check(all(v == [(3 * i, i = 1, n)]), "OpenACC's arrays are copied")

    !$omp target data map(tofrom: u, v)
    !$omp target teams distribute parallel do
    do i = 1, n
        u(i) = 5 * i
    end do
    !$omp target data use_device_addr(u, v)
    call copy(c_loc(u), c_loc(v))
    !$omp end target data
    !$omp end target data
    call check(all(v == [(5 * i, i = 1, n)]), "OpenMP's arrays are copied")

    call ctx%free(there)
    call stream%destroy()
    call ctx%destroy()
    call finish()

contains

    ! Copies from one array to the other through a GPU.
    subroutine copy(from, to)
        type(c_ptr), intent(in) :: from, to
        type(mpgpu_plan) :: plan
        call plan%create(ctx, [mpgpu_transfer(there, from, 4_c_int64_t * n, 0)])
        call plan%enqueue(stream)
        call plan%destroy()
        call plan%create(ctx, [mpgpu_transfer(to, there, 4_c_int64_t * n, src_device=0)])
        call plan%enqueue(stream)
        call stream%synchronize()
        call plan%destroy()
    end subroutine copy
end program directives
