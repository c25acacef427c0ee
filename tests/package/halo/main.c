/* A program outside mpgpu: one rank exchanges entries with itself, on the host backend. */
#include <mpgpu/halo_indexed.h>

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void ok(mp_status_t status) {
    if (status != MP_SUCCESS) {
        fprintf(stderr, "%s: %s\n", mp_status_string(status), mp_last_error());
        exit(1);
    }
}

int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    mp_context_options_t on_host = MP_CONTEXT_OPTIONS_INIT;
    on_host.backend = MP_BACKEND_HOST;
    mp_context_t context;
    mp_stream_t stream;
    void *memory;
    ok(mp_context_create(&on_host, &context));
    ok(mp_stream_create(context, 0, &stream));
    ok(mp_alloc(context, 0, 10 * sizeof(double), &memory));
    double *x = memory;
    for (int i = 0; i < 10; ++i) {
        x[i] = i;
    }
    const int32_t sent[5] = {4, 3, 2, 1, 0};
    const mp_index_neighbour_t self = {0, mp_index_list32(sent, 5), mp_index_range(5, 5)};
    mp_halo_indexed_t ex;
    ok(mp_halo_indexed_create(context, MPI_COMM_WORLD, 0, 10, &self, 1, NULL, &ex));
    const mp_index_field_t field = {x, 10, sizeof(double), 0, MP_NUMBER_F64};
    ok(mp_halo_indexed_exchange(ex, stream, &field, 1, MP_INDEX_COPY));
    ok(mp_stream_synchronize(context, stream));
    for (int i = 0; i < 10; ++i) {
        if (x[i] != (i < 5 ? i : 9 - i)) {
            fprintf(stderr, "entry %d is %g\n", i, x[i]);
            return 1;
        }
    }
    ok(mp_halo_indexed_destroy(ex));
    ok(mp_context_destroy(context));
    MPI_Finalize();
    puts("copied");
    return 0;
}
