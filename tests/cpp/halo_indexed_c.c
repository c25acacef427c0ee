/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Tests mpgpu/halo_indexed.h with one process per rank, in C. Random lists and exchanges are compared, byte by byte,
 * with a reference that every rank computes. Errors on one rank must be errors on all ranks, with texts that name the
 * value and the remedy in the words of C.
 *
 * Run by mpirun with up to eight ranks, on the host backend, or on GPUs if nvcc has compiled the C functions.
 */
#include <mpgpu/halo_indexed.h>

#include <mpi.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MOST_ENTRIES = 40, MOST_RANKS = 8, MOST_BYTES = 64, MOST_FIELDS = 3, CASES = 24, ROUNDS = 4 };

static int world_rank, world_size, own_device;

/* Ends all ranks with the message `what` and the last error if `holds` is 0. */
static void require(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "rank %d: %s; the last error is '%s'\n", world_rank, what, mp_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void ok(mp_status_t status, const char *call) {
    require(status == MP_SUCCESS, call);
}

/* --- random cases, equal on all ranks --- */

static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = a ^ (b + 0x9E3779B97F4A7C15U + (a << 6) + (a >> 2));
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

static uint64_t random_state;
static int any(int least, int most) {
    random_state = mix(random_state, 1);
    return least + (int)(random_state % (uint64_t)(most - least + 1));
}

/* Entries, counted from 0, that rank `from` sends to rank `to`. */
typedef struct {
    int count;
    int send[MOST_ENTRIES];
    int receive[MOST_ENTRIES];
} pair;

static int entries_of[MOST_RANKS];
static pair pairs[MOST_RANKS][MOST_RANKS]; /* [from][to] */

static void make_lists(void) {
    for (int rank = 0; rank < world_size; ++rank) {
        entries_of[rank] = any(0, 5) == 0 ? any(0, 2) : any(1, MOST_ENTRIES);
    }
    for (int to = 0; to < world_size; ++to) {
        int order[MOST_ENTRIES]; /* entries of rank `to` in random order; each is received at most once */
        int used = 0;
        for (int i = 0; i < entries_of[to]; ++i) {
            const int other = any(0, i);
            order[i] = order[other];
            order[other] = i;
        }
        for (int from = 0; from < world_size; ++from) {
            pair *p = &pairs[from][to];
            p->count = entries_of[from] == 0 || any(0, 3) == 0 ? 0 : any(0, (entries_of[to] - used + 1) / 2);
            for (int i = 0; i < p->count; ++i) {
                p->send[i] = any(0, entries_of[from] - 1);
                p->receive[i] = order[used++];
            }
        }
    }
}

typedef struct {
    size_t bytes; /* size of an entry */
    size_t stride;
    mp_number_t values;
} field;

typedef struct {
    uint64_t seed;
    field fields[MOST_FIELDS];
    int count;
    mp_index_operation_t operation;
    int is_split;
} exchange;

static exchange make_exchange(void) {
    exchange e;
    memset(&e, 0, sizeof e);
    e.seed = (uint64_t)any(1, 1 << 30);
    e.operation = (mp_index_operation_t)any(0, 2);
    e.count = any(1, MOST_FIELDS);
    e.is_split = any(0, 1);
    for (int f = 0; f < e.count; ++f) {
        field *to = &e.fields[f];
        to->values = (mp_number_t)any(e.operation == MP_INDEX_COPY ? MP_NUMBER_NONE : MP_NUMBER_F32, MP_NUMBER_F64);
        const size_t unit = to->values == MP_NUMBER_F64 ? 8 : to->values == MP_NUMBER_F32 ? 4 : 1;
        to->bytes = unit * (size_t)any(1, unit == 1 ? 19 : 2);
        to->stride = to->bytes + unit * (size_t)any(0, 2);
    }
    return e;
}

/* Writes entry `entry` of a field of rank `rank`. Numbers are fractions, so that sums depend on their order. */
static void write_entry(uint8_t *to, const exchange *e, int version, int rank, int f, int entry) {
    const field *of = &e->fields[f];
    uint64_t word = mix(mix(e->seed + (uint64_t)version, (uint64_t)(rank * 64 + f)), (uint64_t)entry);
    const size_t step = of->values == MP_NUMBER_F32 ? 4 : 8;
    for (size_t at = 0; at < of->bytes; at += step) {
        word = mix(word, at);
        const double number = (double)(int64_t)word * 1e-17;
        const float small = (float)number;
        const void *from = of->values == MP_NUMBER_F64   ? (const void *)&number
                           : of->values == MP_NUMBER_F32 ? (const void *)&small
                                                         : (const void *)&word;
        memcpy(to + at, from, of->bytes - at < step ? of->bytes - at : step);
    }
}

static void add_entry(uint8_t *to, const uint8_t *terms, const field *of) {
    const size_t step = of->values == MP_NUMBER_F64 ? 8 : 4;
    double large[2] = {0, 0};
    float small[2] = {0, 0};
    for (size_t at = 0; at < of->bytes; at += step) {
        memcpy(step == 8 ? (void *)&large[0] : (void *)&small[0], to + at, step);
        memcpy(step == 8 ? (void *)&large[1] : (void *)&small[1], terms + at, step);
        if (step == 8) {
            large[0] += large[1];
        } else {
            small[0] += small[1];
        }
        memcpy(to + at, step == 8 ? (void *)&large[0] : (void *)&small[0], step);
    }
}

/* Applies what this rank receives in an exchange to the expected contents of a field. */
static void apply(uint8_t *expected, const exchange *e, int f) {
    const field *of = &e->fields[f];
    const int is_reverse = e->operation == MP_INDEX_REVERSE_ADD;
    for (int other = 0; other < world_size; ++other) {
        const pair *p = is_reverse ? &pairs[world_rank][other] : &pairs[other][world_rank];
        for (int i = 0; i < p->count; ++i) {
            uint8_t value[MOST_BYTES];
            write_entry(value, e, 0, other, f, is_reverse ? p->receive[i] : p->send[i]);
            uint8_t *to = expected + (size_t)(is_reverse ? p->send[i] : p->receive[i]) * of->stride;
            if (e->operation == MP_INDEX_COPY) {
                memcpy(to, value, of->bytes);
            } else {
                add_entry(to, value, of);
            }
        }
    }
}

/* --- exchanges --- */

/* Lists of this rank, as arrays of 32 or 64 bits, or as ranges. */
typedef struct {
    int32_t narrow[2 * MOST_RANKS][MOST_ENTRIES];
    int64_t wide[2 * MOST_RANKS][MOST_ENTRIES];
    mp_index_neighbour_t neighbours[MOST_RANKS];
    int count;
} own_lists;

static mp_index_list_t list_of(own_lists *own, int place, const int *entries, int count, int first) {
    int is_range = 1;
    for (int i = 0; i < count; ++i) {
        is_range = is_range && entries[i] == entries[0] + i;
        own->narrow[place][i] = entries[i] + first;
        own->wide[place][i] = entries[i] + first;
    }
    if (is_range && place % 4 != 0) {
        return mp_index_range(count == 0 ? first : entries[0] + first, (uint64_t)count);
    }
    return place % 2 == 0 ? mp_index_list32(own->narrow[place], (uint64_t)count)
                          : mp_index_list64(own->wide[place], (uint64_t)count);
}

static void make_own_lists(own_lists *own, int first) {
    own->count = 0;
    for (int other = world_size - 1; other >= 0; --other) {
        const pair *out = &pairs[world_rank][other];
        const pair *in = &pairs[other][world_rank];
        if (out->count + in->count > 0) {
            mp_index_neighbour_t *n = &own->neighbours[own->count++];
            n->rank = other;
            n->send = list_of(own, 2 * other, out->send, out->count, first);
            n->receive = list_of(own, 2 * other + 1, in->receive, in->count, first);
        }
    }
}

typedef struct {
    uint8_t bytes[MOST_FIELDS][MOST_ENTRIES * MOST_BYTES];
} contents;

static void fill(contents *to, const exchange *e, int version) {
    memset(to, 0x5A + version, sizeof *to); /* bytes between entries */
    for (int f = 0; f < e->count; ++f) {
        for (int i = 0; i < entries_of[world_rank]; ++i) {
            write_entry(to->bytes[f] + (size_t)i * e->fields[f].stride, e, version, world_rank, f, i);
        }
    }
}

/* Copies the contents of all fields to or from the memory of this rank's device. */
static void copy(mp_context_t context, mp_stream_t stream, void *dst, const void *src) {
    const mp_transfer_t transfer = {dst, MP_DEVICE_AUTO, src, MP_DEVICE_AUTO, sizeof(contents)};
    mp_plan_t plan;
    ok(mp_plan(context, &transfer, 1, NULL, &plan), "mp_plan");
    ok(mp_execute(plan, stream, NULL), "mp_execute");
    ok(mp_stream_synchronize(context, stream), "mp_stream_synchronize");
    ok(mp_plan_destroy(plan), "mp_plan_destroy");
}

/* Executes a random exchange of vectors in the memory `vectors` of this rank's device. */
static void run_exchange(mp_halo_indexed_t ex, mp_context_t context, mp_stream_t stream, uint8_t *vectors) {
    static contents before, expected, after;
    const exchange e = make_exchange();
    mp_index_field_t fields[MOST_FIELDS];
    for (int f = 0; f < e.count; ++f) {
        const field *of = &e.fields[f];
        const mp_index_field_t made = {vectors + (size_t)f * sizeof before.bytes[0], (uint64_t)entries_of[world_rank],
                                       of->bytes, of->stride == of->bytes ? 0 : of->stride, of->values};
        fields[f] = made;
    }
    fill(&before, &e, 0);
    copy(context, stream, vectors, &before);
    if (e.is_split) {
        ok(mp_halo_indexed_start(ex, stream, fields, (size_t)e.count, e.operation), "mp_halo_indexed_start");
        fill(&before, &e, 1);
        copy(context, stream, vectors, &before);
        ok(mp_halo_indexed_finish(ex, stream), "mp_halo_indexed_finish");
    } else {
        ok(mp_halo_indexed_exchange(ex, stream, fields, (size_t)e.count, e.operation), "mp_halo_indexed_exchange");
    }
    copy(context, stream, &after, vectors);
    fill(&expected, &e, e.is_split);
    for (int f = 0; f < e.count; ++f) {
        apply(expected.bytes[f], &e, f);
    }
    require(memcmp(&expected, &after, sizeof expected) == 0, "an entry is wrong, or bytes beside entries have changed");
}

/* Executes random exchanges with random lists. Returns their number. */
static int run_case(mp_context_t context, MPI_Comm local, int number) {
    static own_lists own;
    void *vectors = NULL;
    mp_stream_t stream;
    mp_halo_indexed_t ex;
    mp_halo_indexed_options_t options = MP_HALO_INDEXED_OPTIONS_INIT;
    random_state = (uint64_t)number;
    make_lists();
    options.entry_bytes = MOST_FIELDS * MOST_BYTES;
    options.first_index = (number + world_rank) % 2;
    options.time_limit = 60;
    options.local = local;
    make_own_lists(&own, options.first_index);
    ok(mp_halo_indexed_create(context, MPI_COMM_WORLD, own_device, (uint64_t)entries_of[world_rank], own.neighbours,
                              (size_t)own.count, &options, &ex),
       "mp_halo_indexed_create");
    memset(&own, 0xFF, sizeof own); /* the lists are copied */
    uint64_t entries = 0, sent = 0, received = 0, sums[2] = {0, 0};
    for (int other = 0; other < world_size; ++other) {
        sums[0] += (uint64_t)pairs[world_rank][other].count;
        sums[1] += (uint64_t)pairs[other][world_rank].count;
    }
    ok(mp_halo_indexed_get_info(ex, &entries, &sent, &received), "mp_halo_indexed_get_info");
    ok(mp_halo_indexed_get_info(ex, NULL, NULL, NULL), "mp_halo_indexed_get_info");
    require(entries == (uint64_t)entries_of[world_rank] && sent == sums[0] && received == sums[1], "wrong numbers");
    ok(mp_stream_create(context, own_device, &stream), "mp_stream_create");
    ok(mp_alloc(context, own_device, sizeof(contents), &vectors), "mp_alloc");
    for (int round = 0; round < ROUNDS; ++round) {
        run_exchange(ex, context, stream, vectors);
    }
    ok(mp_halo_indexed_destroy(ex), "mp_halo_indexed_destroy");
    require(mp_halo_indexed_destroy(ex) == MP_ERROR_INVALID_HANDLE, "a destroyed handle was not refused");
    ok(mp_free(context, vectors), "mp_free");
    ok(mp_stream_destroy(context, stream), "mp_stream_destroy");
    return ROUNDS;
}

/* --- errors --- */

/* Requires that a call has failed with this status, and that the last error has this argument and contains `text`. */
static void refused(mp_status_t status, mp_status_t expected, const char *argument, const char *text) {
    mp_error_info_t info = MP_ERROR_INFO_INIT;
    ok(mp_last_error_info(&info), "mp_last_error_info");
    if (status != expected || info.status != expected || info.argument == NULL ||
        strcmp(info.argument, argument) != 0 || strstr(info.message, text) == NULL) {
        fprintf(stderr, "rank %d: expected status %d, argument '%s' and text '%s'; got %d and '%s'\n", world_rank,
                (int)expected, argument, text, (int)status, info.argument == NULL ? "" : info.argument);
        require(0, "wrong error");
    }
}

/* Arguments of a creation that fails on the last rank. */
typedef struct {
    mp_context_t context;
    int32_t device;
    uint64_t entries;
    const mp_index_neighbour_t *neighbours;
    size_t count;
    mp_halo_indexed_options_t options;
    int has_output;
} creation;

/* Requires that a creation is refused on all ranks. `wrong` are the arguments of the last rank, and `right` those of
 * the others. */
static void refused_on_all(const creation *right, const creation *wrong, mp_status_t status, const char *argument,
                           const char *text) {
    const int is_last = world_rank == world_size - 1;
    const creation *with = is_last ? wrong : right;
    mp_halo_indexed_t ex = (mp_halo_indexed_t)(uintptr_t)77;
    const mp_status_t got =
        mp_halo_indexed_create(with->context, MPI_COMM_WORLD, with->device, with->entries, with->neighbours,
                               with->count, &with->options, with->has_output ? &ex : NULL);
    require(ex == (mp_halo_indexed_t)(uintptr_t)77, "a creation that failed has written its output");
    if (is_last) {
        refused(got, status, argument, text);
    } else {
        char failed[32]; /* errors that the library finds name the rank */
        snprintf(failed, sizeof failed, "rank %d: ", world_size - 1);
        require(got != MP_SUCCESS &&
                    (strstr(mp_last_error(), "another rank") != NULL || strstr(mp_last_error(), failed) != NULL),
                "the other ranks have no error");
    }
}

static void check_creations(mp_context_t context) {
    const int last = world_size - 1;
    const mp_halo_indexed_options_t defaults = MP_HALO_INDEXED_OPTIONS_INIT;
    const creation right = {context, 0, 100, NULL, 0, defaults, 1};
    creation wrong = right;
#define REFUSED(change, status, argument, text)                                                                        \
    wrong = right;                                                                                                     \
    change;                                                                                                            \
    refused_on_all(&right, &wrong, status, argument, text)
    REFUSED(wrong.context = NULL, MP_ERROR_INVALID_HANDLE, "context", "context");
    REFUSED(wrong.device = -1, MP_ERROR_INVALID_ARGUMENT, "device", "device -1 is host memory");
    REFUSED(wrong.device = 77, MP_ERROR_INVALID_DEVICE, "device", "77");
    REFUSED(wrong.has_output = 0, MP_ERROR_INVALID_ARGUMENT, "indexed", "indexed is NULL");
    REFUSED(wrong.count = 1, MP_ERROR_INVALID_ARGUMENT, "neighbours", "neighbours is NULL");
    REFUSED(wrong.count = 99, MP_ERROR_INVALID_ARGUMENT, "neighbours", "99 neighbours: the communicator has");
    REFUSED(wrong.options.size = 3, MP_ERROR_INVALID_ARGUMENT, "options", "MP_HALO_INDEXED_OPTIONS_INIT");
    REFUSED(wrong.options.time_limit = -1, MP_ERROR_INVALID_ARGUMENT, "options", "time_limit is -1");
    REFUSED(wrong.options.first_index = 2, MP_ERROR_INVALID_ARGUMENT, "options", "options->first_index: 2: must be 0");
    REFUSED(wrong.options.entry_bytes = 1 << 21, MP_ERROR_INVALID_ARGUMENT, "options", "options->entry_bytes: 2097152");

    static const int32_t high[2] = {5, 100}, twice[3] = {7, 3, 7};
    static const int64_t low[1] = {0};
    mp_index_neighbour_t n = {last, mp_index_range(0, 2), mp_index_range(0, 2)};
#define LISTS_REFUSED(change, text)                                                                                    \
    n.rank = last;                                                                                                     \
    n.send = n.receive = mp_index_range(1, 2);                                                                         \
    REFUSED((wrong.neighbours = &n, wrong.count = 1, change), MP_ERROR_INVALID_ARGUMENT, "neighbours", text)
    LISTS_REFUSED(n.send = mp_index_list32(high, 2), "index 100 at position 1: must be 0 to 99");
    LISTS_REFUSED(n.send = mp_index_range(90, 20), "index 100 at position 10");
    LISTS_REFUSED((wrong.options.first_index = 1, n.receive = mp_index_list64(low, 1)),
                  "index 0 at position 1: must be 1 to 100");
    LISTS_REFUSED((wrong.options.first_index = 1, n.send = mp_index_range(100, 2)), "index 101 at position 2");
    LISTS_REFUSED(n.receive = mp_index_list32(twice, 3), "index 7 is twice in the receive list");
    LISTS_REFUSED(n.rank = -3, "neighbour -3: the communicator has");
    LISTS_REFUSED(n.send.count = 3, "sends 3 entries to rank");
    LISTS_REFUSED((n.send = mp_index_list32(high, 2), n.send.index_bytes = 5), "index_bytes is 5: must be 4 or 8");
    LISTS_REFUSED((n.send = mp_index_list32(high, 2), n.send.count = (uint64_t)1 << 40), "the maximum is 2^32 - 1");
    LISTS_REFUSED(n.send.reserved = 1, "reserved is 1");
#undef LISTS_REFUSED
#undef REFUSED
    mp_halo_indexed_t ex = NULL;
    refused(mp_halo_indexed_create(context, MPI_COMM_NULL, 0, 1, NULL, 0, NULL, &ex), MP_ERROR_INVALID_ARGUMENT,
            "communicator", "MPI_COMM_NULL");
}

static void check_exchanges(mp_context_t context) {
    void *x = NULL;
    mp_stream_t stream;
    mp_halo_indexed_t ex;
    const mp_index_neighbour_t self = {world_rank, mp_index_range(0, 5), mp_index_range(5, 5)};
    ok(mp_halo_indexed_create(context, MPI_COMM_WORLD, own_device, 10, &self, 1, NULL, &ex), "mp_halo_indexed_create");
    ok(mp_stream_create(context, own_device, &stream), "mp_stream_create");
    ok(mp_alloc(context, own_device, 20 * sizeof(double), &x), "mp_alloc");
    const mp_index_field_t good = {x, 10, 8, 0, MP_NUMBER_F64};
    mp_index_field_t bad = good;
#define REFUSED(change, operation, argument, text)                                                                     \
    bad = good;                                                                                                        \
    change;                                                                                                            \
    refused(mp_halo_indexed_exchange(ex, stream, &bad, 1, operation), MP_ERROR_INVALID_ARGUMENT, argument, text)
    REFUSED(bad.entries = 9, MP_INDEX_COPY, "fields", "a field of 9 entries: the exchange object was created for");
    REFUSED(bad.data = NULL, MP_INDEX_COPY, "fields", "a field of 0 entries");
    REFUSED(bad.entry_bytes = 0, MP_INDEX_COPY, "fields", "entries of 0 bytes");
    REFUSED(bad.stride_bytes = 4, MP_INDEX_COPY, "fields", "must not overlap");
    REFUSED(bad.entry_bytes = 16, MP_INDEX_COPY, "fields", "create it with a larger options->entry_bytes");
    REFUSED(bad.values = (mp_number_t)3, MP_INDEX_COPY, "fields", "field 0: values is 3: must be MP_NUMBER_NONE");
    REFUSED(bad.values = MP_NUMBER_NONE, MP_INDEX_ADD, "fields", "set mp_index_field_t::values to MP_NUMBER_F32");
    REFUSED(bad.data = (char *)x + 4, MP_INDEX_REVERSE_ADD, "fields", "are multiples of 8 bytes");
    REFUSED((void)0, (mp_index_operation_t)3, "operation", "operation 3: must be MP_INDEX_COPY, MP_INDEX_ADD or");
#undef REFUSED
    refused(mp_halo_indexed_exchange(ex, stream, NULL, 1, MP_INDEX_COPY), MP_ERROR_INVALID_ARGUMENT, "fields", "NULL");
    refused(mp_halo_indexed_exchange(ex, stream, NULL, 0, MP_INDEX_COPY), MP_ERROR_INVALID_ARGUMENT, "fields",
            "0 fields: must be 1 to 8");
    refused(mp_halo_indexed_start(ex, stream, &good, 9, MP_INDEX_COPY), MP_ERROR_INVALID_ARGUMENT, "fields",
            "9 fields: must be 1 to 8");
    refused(mp_halo_indexed_finish(ex, stream), MP_ERROR_INVALID_ARGUMENT, "stream", "call start before finish");
    ok(mp_halo_indexed_start(ex, stream, &good, 1, MP_INDEX_COPY), "mp_halo_indexed_start");
    refused(mp_halo_indexed_start(ex, stream, &good, 1, MP_INDEX_COPY), MP_ERROR_INVALID_ARGUMENT, "stream",
            "call finish first");
    ok(mp_halo_indexed_finish(ex, stream), "mp_halo_indexed_finish");
    ok(mp_stream_synchronize(context, stream), "mp_stream_synchronize");
    ok(mp_halo_indexed_destroy(ex), "mp_halo_indexed_destroy");
    const mp_halo_indexed_t gone[2] = {ex, NULL};
    for (int i = 0; i < 2; ++i) {
        const char *text = i == 0 ? "destroyed already" : "indexed is NULL";
        refused(mp_halo_indexed_exchange(gone[i], stream, &good, 1, MP_INDEX_COPY), MP_ERROR_INVALID_HANDLE, "indexed",
                text);
        refused(mp_halo_indexed_start(gone[i], stream, &good, 1, MP_INDEX_COPY), MP_ERROR_INVALID_HANDLE, "indexed",
                text);
        refused(mp_halo_indexed_finish(gone[i], stream), MP_ERROR_INVALID_HANDLE, "indexed", text);
        refused(mp_halo_indexed_get_info(gone[i], NULL, NULL, NULL), MP_ERROR_INVALID_HANDLE, "indexed", text);
        refused(mp_halo_indexed_destroy(gone[i]), MP_ERROR_INVALID_HANDLE, "indexed", text);
        refused(mp_halo_indexed_leave(gone[i]), MP_ERROR_INVALID_HANDLE, "indexed", text);
    }
    ok(mp_free(context, x), "mp_free");
    ok(mp_stream_destroy(context, stream), "mp_stream_destroy");
}

/* Tests that an exchange ends with an error if a rank on another node does not take part in it. Each rank is a node. */
static void check_time_limit(mp_context_t context) {
    void *x = NULL;
    mp_stream_t stream;
    mp_halo_indexed_t ex;
    mp_halo_indexed_options_t options = MP_HALO_INDEXED_OPTIONS_INIT;
    const mp_index_neighbour_t other = {1 - world_rank, mp_index_range(0, 5), mp_index_range(5, 5)};
    options.time_limit = 0.2;
    options.local = MPI_COMM_SELF;
    ok(mp_halo_indexed_create(context, MPI_COMM_WORLD, own_device, 10, &other, world_rank < 2 ? 1 : 0, &options, &ex),
       "mp_halo_indexed_create");
    ok(mp_stream_create(context, own_device, &stream), "mp_stream_create");
    ok(mp_alloc(context, own_device, 10 * sizeof(double), &x), "mp_alloc");
    const mp_index_field_t vector = {x, 10, 8, 0, MP_NUMBER_F64};
    if (world_rank == 0) {
        require(mp_halo_indexed_exchange(ex, stream, &vector, 1, MP_INDEX_COPY) == MP_ERROR_TIMEOUT, "no timeout");
        require(strstr(mp_last_error(), "within options->time_limit") != NULL &&
                    strstr(mp_last_error(), "messages have not arrived from rank 1") != NULL &&
                    strstr(mp_last_error(), "call mp_halo_indexed_leave") != NULL,
                "the text of the timeout is wrong");
        require(mp_halo_indexed_exchange(ex, stream, &vector, 1, MP_INDEX_COPY) == MP_ERROR_RANK_FAILED,
                "an exchange after one that has failed was not refused");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ok(mp_halo_indexed_leave(ex), "mp_halo_indexed_leave");
    ok(mp_free(context, x), "mp_free");
    ok(mp_stream_destroy(context, stream), "mp_stream_destroy");
}

int main(int argc, char *argv[]) {
    mp_context_t context;
    int exchanges = 0, gpus = 0;
    mp_halo_indexed_t none = NULL;
    refused(mp_halo_indexed_create(NULL, MPI_COMM_WORLD, 0, 1, NULL, 0, NULL, &none), MP_ERROR_INVALID_ARGUMENT,
            "communicator", "call MPI_Init first");
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    require(world_size <= MOST_RANKS, "too many ranks for this test");
    ok(mp_context_create(NULL, &context), "mp_context_create");
    ok(mp_context_get_info(context, NULL, &gpus, NULL), "mp_context_get_info");
    own_device = world_rank % gpus;
    check_creations(context);
    check_exchanges(context);
    if (world_size > 1) {
        check_time_limit(context);
    }
    for (int size = 0; size <= 2; ++size) { /* ranks of a node; 0: all */
        MPI_Comm local = MPI_COMM_NULL;
        if (size > 0) {
            MPI_Comm_split(MPI_COMM_WORLD, world_rank / size, world_rank, &local);
        }
        for (int i = 0; i < CASES; ++i) {
            exchanges += run_case(context, local, size * CASES + i + 1);
        }
        if (size > 0) {
            MPI_Comm_free(&local);
        }
    }
    ok(mp_context_destroy(context), "mp_context_destroy");
    MPI_Finalize();
    if (world_rank == 0) {
        printf("all entries of %d exchanges are right\n", exchanges);
    }
    return 0;
}
