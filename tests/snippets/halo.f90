! Names that docs/guide/halo.md omits.
type(mpgpu_context) :: ctx
type(mpgpu_stream) :: stream
type(c_ptr) :: x
integer, allocatable :: boundary_2(:)
integer :: gpu, owned, ghosts_2, local_entries
