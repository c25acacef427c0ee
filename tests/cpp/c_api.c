/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Tests the C API from a C program: its documented behaviour, and the errors of wrong uses. */
#include <mpgpu/mpgpu.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, mp_last_error());  \
            ++failures;                                                                                                \
        }                                                                                                              \
    } while (0)

#define EXPECT_OK(call) EXPECT((call) == MP_SUCCESS)

/* Checks that the call fails with this status, and that the last error names the argument and contains the text. */
#define EXPECT_ERROR(call, expected, blamed, mentioned)                                                                \
    do {                                                                                                               \
        const mp_status_t status_ = (call);                                                                            \
        mp_error_info_t last_ = MP_ERROR_INFO_INIT;                                                                    \
        EXPECT(status_ == (expected));                                                                                 \
        EXPECT(mp_last_error_info(&last_) == MP_SUCCESS);                                                              \
        EXPECT(last_.status == (expected));                                                                            \
        EXPECT(last_.argument != NULL && strcmp(last_.argument, (blamed)) == 0);                                       \
        EXPECT(strstr(last_.message, (mentioned)) != NULL);                                                            \
        EXPECT(strcmp(last_.message, mp_last_error()) == 0);                                                           \
    } while (0)

enum { SMALL = 1 << 16 };

/* Context with four virtual GPUs, and one buffer on each GPU and in host memory. */
struct world {
    mp_context_t context;
    void *gpu[4];
    void *host;
};

static struct world create(void) {
    struct world w;
    mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
    options.backend = MP_BACKEND_HOST;
    options.topology = "beluga";
    memset(&w, 0, sizeof w);
    if (mp_context_create(&options, &w.context) != MP_SUCCESS) {
        fprintf(stderr, "no context: %s\n", mp_last_error());
        exit(EXIT_FAILURE);
    }
    for (int32_t i = 0; i < 4; ++i) {
        EXPECT_OK(mp_alloc(w.context, i, SMALL, &w.gpu[i]));
    }
    EXPECT_OK(mp_alloc(w.context, MP_DEVICE_HOST, SMALL, &w.host));
    return w;
}

static void destroy(struct world *w) {
    for (int i = 0; i < 4; ++i) {
        EXPECT_OK(mp_free(w->context, w->gpu[i]));
    }
    EXPECT_OK(mp_free(w->context, w->host));
    EXPECT_OK(mp_context_destroy(w->context));
}

static mp_transfer_t transfer(void *dst, int32_t dst_device, const void *src, int32_t src_device, uint64_t bytes) {
    mp_transfer_t t;
    memset(&t, 0, sizeof t);
    t.dst = dst;
    t.dst_device = dst_device;
    t.src = src;
    t.src_device = src_device;
    t.bytes = bytes;
    return t;
}

static void fill(void *memory, unsigned seed) {
    for (unsigned i = 0; i < SMALL; ++i) {
        ((unsigned char *)memory)[i] = (unsigned char)((i + seed) * 2654435761u >> 13);
    }
}

static void versions_and_statuses_have_texts(void) {
    EXPECT(mp_version() == MP_VERSION);
    char expected[32];
    snprintf(expected, sizeof expected, "%d.%d.%d", MP_VERSION_MAJOR, MP_VERSION_MINOR, MP_VERSION_PATCH);
    EXPECT(strcmp(mp_version_string(), expected) == 0);
    for (int status = MP_SUCCESS; status <= MP_ERROR_INTERNAL; ++status) {
        const char *text = mp_status_string((mp_status_t)status);
        EXPECT(text != NULL && strlen(text) > 0);
        for (int other = MP_SUCCESS; other < status; ++other) {
            EXPECT(strcmp(text, mp_status_string((mp_status_t)other)) != 0);
        }
    }
    EXPECT(mp_status_string((mp_status_t)12345) != NULL);
}

static void a_header_of_another_version_is_refused(void) {
    mp_context_t context = NULL;
    EXPECT_ERROR(mp_context_create_versioned(NULL, MP_VERSION + 10000, &context), MP_ERROR_VERSION_MISMATCH,
                 "header_version", mp_version_string());
    EXPECT(context == NULL);
}

static void an_exchange_brings_the_right_bytes(void) {
    struct world w = create();
    mp_stream_t stream;
    EXPECT_OK(mp_stream_create(w.context, 0, &stream));
    fill(w.gpu[0], 1);
    fill(w.gpu[1], 2);
    memset(w.gpu[2], 0, SMALL);
    memset(w.gpu[3], 0, SMALL);
    const mp_transfer_t exchange[] = {transfer(w.gpu[2], 2, w.gpu[0], 0, SMALL),
                                      transfer(w.gpu[3], 3, w.gpu[1], 1, SMALL),
                                      transfer(w.host, MP_DEVICE_HOST, w.gpu[0], 0, SMALL)};
    mp_plan_t plan = NULL;
    EXPECT_OK(mp_plan(w.context, exchange, 3, NULL, &plan));

    mp_request_t request = NULL;
    EXPECT_OK(mp_execute(plan, stream, &request));
    EXPECT(request != NULL);
    EXPECT_OK(mp_wait(&request, NULL));
    EXPECT(request == NULL);
    EXPECT(memcmp(w.gpu[2], w.gpu[0], SMALL) == 0);
    EXPECT(memcmp(w.gpu[3], w.gpu[1], SMALL) == 0);
    EXPECT(memcmp(w.host, w.gpu[0], SMALL) == 0);

    /* Executes the plan again in the default stream, after the sources have changed, and polls for its end. */
    fill(w.gpu[0], 3);
    EXPECT_OK(mp_execute(plan, NULL, &request));
    int32_t done = 0;
    while (done == 0) {
        EXPECT_OK(mp_test(&request, &done, NULL));
    }
    EXPECT(request == NULL);
    EXPECT(memcmp(w.gpu[2], w.gpu[0], SMALL) == 0);

    /* Executes the plan without a request. */
    fill(w.gpu[0], 4);
    EXPECT_OK(mp_execute(plan, stream, NULL));
    EXPECT_OK(mp_stream_synchronize(w.context, stream));
    EXPECT(memcmp(w.gpu[2], w.gpu[0], SMALL) == 0);

    EXPECT_OK(mp_plan_destroy(plan));
    EXPECT_OK(mp_stream_destroy(w.context, stream));
    destroy(&w);
}

static void nothing_to_wait_for_succeeds(void) {
    mp_request_t none = NULL;
    int32_t done = 0;
    EXPECT_OK(mp_wait(&none, NULL));
    EXPECT_OK(mp_test(&none, &done, NULL));
    EXPECT(done == 1);
    EXPECT_OK(mp_request_destroy(&none));
}

static void a_forgotten_request_still_moves_its_bytes(void) {
    struct world w = create();
    fill(w.gpu[0], 5);
    const mp_transfer_t t = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_t plan = NULL;
    mp_request_t request = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &plan));
    EXPECT_OK(mp_execute(plan, NULL, &request));
    EXPECT_OK(mp_request_destroy(&request));
    EXPECT(request == NULL);
    EXPECT_OK(mp_stream_synchronize(w.context, NULL));
    EXPECT(memcmp(w.gpu[1], w.gpu[0], SMALL) == 0);
    EXPECT_OK(mp_plan_destroy(plan));
    destroy(&w);
}

static void the_device_of_an_address_is_found_on_request(void) {
    struct world w = create();
    unsigned char *own = malloc(SMALL);
    EXPECT(own != NULL);
    fill(w.gpu[2], 5);
    memset(own, 0, SMALL);
    const mp_transfer_t t = transfer(own, MP_DEVICE_AUTO, w.gpu[2], MP_DEVICE_AUTO, SMALL);
    const mp_transfer_t named = transfer(own, MP_DEVICE_HOST, w.gpu[2], 2, SMALL);
    mp_plan_t plan = NULL;
    mp_plan_t same = NULL;
    mp_request_t request = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &plan));
    EXPECT_OK(mp_plan(w.context, &named, 1, NULL, &same));
    mp_statistics_t statistics = MP_STATISTICS_INIT;
    EXPECT_OK(mp_context_statistics(w.context, &statistics));
    EXPECT(statistics.plan_cache_hits == 1);
    EXPECT_OK(mp_execute(plan, NULL, &request));
    EXPECT_OK(mp_wait(&request, NULL));
    EXPECT(memcmp(own, w.gpu[2], SMALL) == 0);
    EXPECT_OK(mp_plan_destroy(plan));
    EXPECT_OK(mp_plan_destroy(same));
    free(own);
    destroy(&w);
}

static void statistics_count_what_happened(void) {
    struct world w = create();
    mp_statistics_t before = MP_STATISTICS_INIT;
    mp_statistics_t after = MP_STATISTICS_INIT;
    EXPECT_OK(mp_context_statistics(w.context, &before));
    const mp_transfer_t t = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_t first = NULL;
    mp_plan_t second = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &first));
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &second));
    EXPECT_OK(mp_execute(first, NULL, NULL));
    EXPECT_OK(mp_execute(second, NULL, NULL));
    EXPECT_OK(mp_stream_synchronize(w.context, NULL));
    EXPECT_OK(mp_context_statistics(w.context, &after));
    EXPECT(after.plan_cache_misses == before.plan_cache_misses + 1);
    EXPECT(after.plan_cache_hits == before.plan_cache_hits + 1);
    EXPECT(after.executions == before.executions + 2);
    EXPECT(after.bytes == before.bytes + 2 * (uint64_t)SMALL);
    EXPECT(after.graph_launches == 0 && after.graph_entries == 0); /* the host backend has no graphs */

    mp_device_statistics_t held = MP_DEVICE_STATISTICS_INIT;
    EXPECT_OK(mp_context_device_statistics(w.context, 0, &held));
    EXPECT(held.allocated_bytes >= SMALL);
    EXPECT_OK(mp_plan_destroy(first));
    EXPECT_OK(mp_plan_destroy(second));
    destroy(&w);
}

static void a_description_is_measured_first_and_written_second(void) {
    struct world w = create();
    const mp_transfer_t t = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_t plan = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &plan));
    for (int format = MP_FORMAT_TEXT; format <= MP_FORMAT_JSON; ++format) {
        size_t length = 0;
        EXPECT_OK(mp_plan_describe(plan, (mp_format_t)format, NULL, 0, &length));
        EXPECT(length > 1);
        char *text = malloc(length);
        if (text == NULL) {
            exit(EXIT_FAILURE);
        }
        memset(text, 'x', length);
        size_t written = 0;
        EXPECT_OK(mp_plan_describe(plan, (mp_format_t)format, text, length, &written));
        EXPECT(written == length);
        EXPECT(strlen(text) + 1 == length);

        /* With too little space, the call returns the length and writes nothing. */
        char little[] = "####";
        written = 0;
        EXPECT_ERROR(mp_plan_describe(plan, (mp_format_t)format, little, 4, &written), MP_ERROR_INVALID_ARGUMENT,
                     "capacity", "4");
        EXPECT(written == length);
        EXPECT(strcmp(little, "####") == 0);
        free(text);
    }
    mp_plan_info_t info = MP_PLAN_INFO_INIT;
    EXPECT_OK(mp_plan_get_info(plan, &info));
    EXPECT(info.bytes == SMALL);
    EXPECT(info.paths >= 1);
    EXPECT(info.operations >= 1);
    EXPECT(info.predicted_seconds > 0.0 && info.predicted_seconds <= info.direct_seconds);
    EXPECT_OK(mp_plan_destroy(plan));
    destroy(&w);
}

static void append(void *user) {
    /* The calls do not race, because the stream orders them. */
    char *log = user;
    const size_t length = strlen(log);
    log[length] = (char)('a' + (int)length);
    log[length + 1] = '\0';
}

static void streams_and_events_order_work(void) {
    struct world w = create();
    mp_stream_t first = NULL;
    mp_stream_t second = NULL;
    mp_event_t event = NULL;
    char log[8] = "";
    EXPECT_OK(mp_stream_create(w.context, 0, &first));
    EXPECT_OK(mp_stream_create(w.context, 1, &second));
    EXPECT_OK(mp_event_create(w.context, &event));
    EXPECT_OK(mp_stream_launch_host(w.context, first, append, log, NULL));
    EXPECT_OK(mp_stream_launch_host(w.context, first, append, log, NULL));
    EXPECT_OK(mp_event_record(w.context, event, first));
    EXPECT_OK(mp_stream_wait_event(w.context, second, event));
    EXPECT_OK(mp_stream_launch_host(w.context, second, append, log, NULL));
    EXPECT_OK(mp_event_record(w.context, event, second));
    EXPECT_OK(mp_event_synchronize(w.context, event));
    EXPECT(strcmp(log, "abc") == 0);
    EXPECT_OK(mp_stream_launch_host(w.context, second, append, log, append));
    EXPECT_ERROR(mp_stream_launch_host(w.context, second, NULL, log, append), MP_ERROR_INVALID_ARGUMENT, "function",
                 "function");
    EXPECT_OK(mp_event_destroy(w.context, event));
    EXPECT_OK(mp_stream_destroy(w.context, first));
    EXPECT_OK(mp_stream_destroy(w.context, second));
    destroy(&w);
    /* The call with a release ran and was then released. The refused call was neither run nor released. */
    EXPECT(strcmp(log, "abcde") == 0);
}

static void signals_are_raised_read_and_asked_for_by_the_host(void) {
    struct world w = create();
    mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
    EXPECT(options.signal_wait == MP_SIGNAL_WAIT_DEFAULT);
    void *memory = NULL;
    uint64_t *counters = NULL;
    uint64_t value = 7;
    int32_t reached = 7;
    EXPECT_OK(mp_alloc_shared(w.context, MP_DEVICE_HOST, 2 * sizeof(uint64_t), &memory));
    counters = memory;
    EXPECT_OK(mp_signal_read(w.context, counters + 1, &value));
    EXPECT(value == 0);
    EXPECT_OK(mp_signal_test(w.context, counters, 3, &reached));
    EXPECT(reached == 0);

    /* A stream continues when the host sets the counter for which the stream waits. */
    const mp_signal_t wanted = {counters, 3};
    const mp_signal_t answer = {counters + 1, 4};
    EXPECT_OK(mp_stream_wait_signals(w.context, NULL, &wanted, 1));
    EXPECT_OK(mp_stream_raise_signals(w.context, NULL, &answer, 1));
    EXPECT_OK(mp_signal_raise(w.context, counters, 3));
    EXPECT_OK(mp_signal_synchronize(w.context, counters + 1, 4, 60.0));
    EXPECT_OK(mp_signal_test(w.context, counters, 3, &reached));
    EXPECT(reached == 1);

    EXPECT_ERROR(mp_signal_raise(w.context, NULL, 3), MP_ERROR_INVALID_POINTER, "counter", "NULL");
    EXPECT_OK(mp_free(w.context, counters));
    destroy(&w);
}

static void a_prepared_plan_is_executed_as_any_other(void) {
    struct world w = create();
    const mp_transfer_t t = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_t plan = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &plan));
    fill(w.gpu[0], 9);
    memset(w.gpu[1], 0, SMALL);
    EXPECT_OK(mp_plan_prepare(plan, NULL));
    EXPECT(memcmp(w.gpu[1], w.gpu[0], SMALL) != 0);
    EXPECT_OK(mp_execute(plan, NULL, NULL));
    EXPECT_OK(mp_stream_synchronize(w.context, NULL));
    EXPECT(memcmp(w.gpu[1], w.gpu[0], SMALL) == 0);
    EXPECT_OK(mp_plan_destroy(plan));
    EXPECT_ERROR(mp_plan_prepare(plan, NULL), MP_ERROR_INVALID_HANDLE, "plan", "plan");
    destroy(&w);
}

static void bad_arguments_are_named(void) {
    struct world w = create();
    mp_plan_t plan = NULL;
    mp_transfer_t t[2];

    EXPECT_ERROR(mp_context_create(NULL, NULL), MP_ERROR_INVALID_ARGUMENT, "context", "context");
    EXPECT_ERROR(mp_plan(w.context, NULL, 1, NULL, &plan), MP_ERROR_INVALID_ARGUMENT, "transfers", "transfers");
    t[0] = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    EXPECT_ERROR(mp_plan(w.context, t, 1, NULL, NULL), MP_ERROR_INVALID_ARGUMENT, "plan", "plan");
    EXPECT_ERROR(mp_plan(NULL, t, 1, NULL, &plan), MP_ERROR_INVALID_HANDLE, "context", "context");

    t[0] = transfer(w.gpu[1], 17, w.gpu[0], 0, SMALL);
    EXPECT_ERROR(mp_plan(w.context, t, 1, NULL, &plan), MP_ERROR_INVALID_DEVICE, "transfers", "17");
    t[0] = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    t[1] = transfer((char *)w.gpu[1] + 8, 1, w.gpu[2], 2, 16);
    EXPECT_ERROR(mp_plan(w.context, t, 2, NULL, &plan), MP_ERROR_OVERLAP, "transfers", "1");
    t[0] = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL + 1);
    EXPECT_ERROR(mp_plan(w.context, t, 1, NULL, &plan), MP_ERROR_INVALID_POINTER, "transfers", "0");
    t[0] = transfer(w.gpu[1], 1, w.gpu[0], 0, UINT64_MAX);
    EXPECT(mp_plan(w.context, t, 1, NULL, &plan) != MP_SUCCESS);

    t[0] = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_options_t options = MP_PLAN_OPTIONS_INIT;
    options.engine = 99;
    EXPECT_ERROR(mp_plan(w.context, t, 1, &options, &plan), MP_ERROR_INVALID_ARGUMENT, "engine", "99");
    options.engine = MP_ENGINE_AUTO;
    options.size = 3;
    EXPECT(mp_plan(w.context, t, 1, &options, &plan) == MP_ERROR_INVALID_ARGUMENT);
    EXPECT(plan == NULL); /* none of these calls has written a plan */

    mp_context_options_t machine = MP_CONTEXT_OPTIONS_INIT;
    mp_context_t none = NULL;
    machine.topology = "atlantis";
    EXPECT_ERROR(mp_context_create(&machine, &none), MP_ERROR_TOPOLOGY, "topology", "atlantis");
    EXPECT(none == NULL);

    void *memory = NULL;
    EXPECT_ERROR(mp_alloc(w.context, 17, 1, &memory), MP_ERROR_INVALID_DEVICE, "device", "17");
    EXPECT(mp_alloc(w.context, 0, UINT64_MAX, &memory) == MP_ERROR_OUT_OF_MEMORY);
    EXPECT(memory == NULL);
    int local = 0;
    EXPECT_ERROR(mp_free(w.context, &local), MP_ERROR_INVALID_POINTER, "memory", "");
    EXPECT_OK(mp_free(w.context, NULL));
    EXPECT_ERROR(mp_stream_launch_host(w.context, NULL, NULL, NULL, NULL), MP_ERROR_INVALID_ARGUMENT, "function",
                 "function");

    /* The context is still usable after the errors. */
    EXPECT_OK(mp_plan(w.context, t, 1, NULL, &plan));
    EXPECT_OK(mp_execute(plan, NULL, NULL));
    EXPECT_OK(mp_plan_destroy(plan));
    destroy(&w);
}

static void destroyed_handles_are_refused(void) {
    struct world w = create();
    const mp_transfer_t t = transfer(w.gpu[1], 1, w.gpu[0], 0, SMALL);
    mp_plan_t plan = NULL;
    mp_stream_t stream = NULL;
    mp_event_t event = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &plan));
    EXPECT_OK(mp_plan_destroy(plan));
    EXPECT_ERROR(mp_plan_destroy(plan), MP_ERROR_INVALID_HANDLE, "plan", "plan");
    EXPECT_ERROR(mp_execute(plan, NULL, NULL), MP_ERROR_INVALID_HANDLE, "plan", "plan");
    EXPECT_OK(mp_stream_create(w.context, 0, &stream));
    EXPECT_OK(mp_stream_destroy(w.context, stream));
    EXPECT(mp_stream_synchronize(w.context, stream) == MP_ERROR_INVALID_HANDLE);
    EXPECT_OK(mp_event_create(w.context, &event));
    EXPECT_OK(mp_event_destroy(w.context, event));
    EXPECT(mp_event_synchronize(w.context, event) == MP_ERROR_INVALID_HANDLE);

    mp_plan_t outlives = NULL;
    EXPECT_OK(mp_plan(w.context, &t, 1, NULL, &outlives));
    const mp_context_t context = w.context;
    destroy(&w);
    EXPECT(mp_execute(outlives, NULL, NULL) == MP_ERROR_INVALID_HANDLE);
    EXPECT(mp_context_destroy(context) == MP_ERROR_INVALID_HANDLE);
    (void)mp_plan_destroy(outlives);
}

static void memory_left_behind_goes_with_the_context(void) {
    struct world w = create(); /* the leak check is the test */
    EXPECT_OK(mp_context_destroy(w.context));
}

int main(void) {
    versions_and_statuses_have_texts();
    a_header_of_another_version_is_refused();
    an_exchange_brings_the_right_bytes();
    nothing_to_wait_for_succeeds();
    a_forgotten_request_still_moves_its_bytes();
    the_device_of_an_address_is_found_on_request();
    statistics_count_what_happened();
    a_description_is_measured_first_and_written_second();
    streams_and_events_order_work();
    signals_are_raised_read_and_asked_for_by_the_host();
    a_prepared_plan_is_executed_as_any_other();
    bad_arguments_are_named();
    destroyed_handles_are_refused();
    memory_left_behind_goes_with_the_context();
    if (failures > 0) {
        fprintf(stderr, "%d expectations failed\n", failures);
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
