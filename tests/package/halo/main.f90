! A program outside of mpgpu: one rank exchanges entries with itself, on the host backend.
program main
    use mpgpu
    use mpgpu_indexed
    use mpi
    implicit none
    type(mpgpu_context) :: ctx
    type(mpgpu_stream) :: stream
    type(mpgpu_index_exchange) :: ex
    type(mpgpu_index_neighbour) :: self
    type(c_ptr) :: memory
    real(c_double), pointer :: x(:)
    integer :: i, code

    call MPI_Init(code)
    call ctx%create(backend=MP_BACKEND_HOST)
    call stream%create(ctx, 0)
    call ctx%alloc(0, 80_c_int64_t, memory)
    call c_f_pointer(memory, x, [10])
    x = [(real(i, c_double), i = 1, 10)]
    self = mpgpu_index_neighbour(0, mpgpu_index_list([5, 4, 3, 2, 1]), mpgpu_index_range(6, 5))
    call ex%create(ctx, MPI_COMM_WORLD, 0, 10, [self])
    call ex%exchange(stream, mpgpu_index_field(memory, 10))
    call stream%synchronize()
    if (any(nint(x) /= [1, 2, 3, 4, 5, 5, 4, 3, 2, 1])) error stop "the exchange has copied wrong entries"
    call ex%destroy()
    call ctx%destroy()
    call MPI_Finalize(code)
    print "(a)", "copied"
end program main
