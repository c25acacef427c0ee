! A program outside of mpgpu: copies between two virtual GPUs and compares every byte.
program main
    use mpgpu
    implicit none
    integer, parameter :: elements = 1000003
    type(mpgpu_context) :: ctx
    type(mpgpu_stream) :: stream
    type(mpgpu_plan) :: copy
    type(c_ptr) :: from, to
    integer(c_int), pointer :: src(:), dst(:)
    integer :: i

    call ctx%create(backend=MP_BACKEND_HOST)
    call stream%create(ctx, 0)
    call ctx%alloc(0, 4_c_int64_t * elements, from)
    call ctx%alloc(1, 4_c_int64_t * elements, to)
    ! On the host backend, memory of virtual GPUs is accessible to the CPU.
    call c_f_pointer(from, src, [elements])
    call c_f_pointer(to, dst, [elements])
    src = [(i, i = 1, elements)]
    dst = 0
    call copy%create(ctx, [mpgpu_transfer(to, from, 4_c_int64_t * elements, 1, 0)])
    call copy%enqueue(stream)
    call stream%synchronize()
    if (any(dst /= src)) error stop "the copy arrived with wrong bytes"
    call ctx%free(from)
    call ctx%free(to)
    call ctx%destroy()
    print "(a)", "copied"
end program main
