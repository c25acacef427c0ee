/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Copies data between two GPUs in plain C: makes a plan, executes it and waits. The data is first copied from host
 * memory and finally back, so that it can be compared. On the host backend the GPUs are virtual.
 */
#include <mpgpu/mpgpu.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES ((uint64_t)64 << 20)

/* Checks the status of a call. The text of the last error contains the wrong value and the remedy. */
static void check(mp_status_t status, const char *call) {
    if (status != MP_SUCCESS) {
        fprintf(stderr, "copy: %s: %s: %s\n", call, mp_status_string(status), mp_last_error());
        exit(EXIT_FAILURE);
    }
}
#define CHECK(call) check((call), #call)

/* Plans one or several transfers together, executes the plan in stream order, and waits. */
static void copy(mp_context_t context, const mp_transfer_t *transfers, size_t count) {
    const mp_stream_t default_stream = NULL;
    mp_plan_t plan;
    mp_request_t request;
    CHECK(mp_plan(context, transfers, count, NULL, &plan));
    CHECK(mp_execute(plan, default_stream, &request));
    CHECK(mp_wait(&request, NULL));
    CHECK(mp_plan_destroy(plan));
}

/* Prints the plan as text, and its predicted time. */
static void print_plan(mp_context_t context, const mp_transfer_t *transfers, size_t count) {
    mp_plan_t plan;
    CHECK(mp_plan(context, transfers, count, NULL, &plan));

    size_t length; /* set by the first call; includes the final NUL */
    CHECK(mp_plan_describe(plan, MP_FORMAT_TEXT, NULL, 0, &length));
    char *text = malloc(length);
    if (text == NULL) {
        fprintf(stderr, "copy: no memory for a text of %zu bytes\n", length);
        exit(EXIT_FAILURE);
    }
    CHECK(mp_plan_describe(plan, MP_FORMAT_TEXT, text, length, &length));
    printf("%s\n", text);
    free(text);

    mp_plan_info_t info = MP_PLAN_INFO_INIT;
    CHECK(mp_plan_get_info(plan, &info));
    printf("modelled time: %.1f us; with the direct path alone: %.1f us\n", info.predicted_seconds * 1e6,
           info.direct_seconds * 1e6);
    CHECK(mp_plan_destroy(plan));
}

int main(void) {
    mp_context_t context;
    CHECK(mp_context_create(NULL, &context)); /* reads the environment and discovers the machine */
    int32_t gpus;
    int32_t host_domains;
    CHECK(mp_context_get_info(context, NULL, &gpus, &host_domains));
    const int32_t from = gpus > 0 ? 0 : MP_DEVICE_HOST;
    const int32_t to = gpus > 1 ? 1 : from;

    void *sent;
    void *received;
    void *a;
    void *b;
    CHECK(mp_alloc(context, MP_DEVICE_HOST, BYTES, &sent));
    CHECK(mp_alloc(context, MP_DEVICE_HOST, BYTES, &received));
    CHECK(mp_alloc(context, from, BYTES, &a));
    CHECK(mp_alloc(context, to, BYTES, &b));
    for (uint64_t i = 0; i < BYTES; ++i) {
        ((unsigned char *)sent)[i] = (unsigned char)(i * 2654435761u >> 16);
    }
    memset(received, 0, BYTES);

    const mp_transfer_t load = {
        .dst = a, .dst_device = from, .src = sent, .src_device = MP_DEVICE_HOST, .bytes = BYTES};
    const mp_transfer_t transfer = {.dst = b, .dst_device = to, .src = a, .src_device = from, .bytes = BYTES};
    const mp_transfer_t store = {
        .dst = received, .dst_device = MP_DEVICE_HOST, .src = b, .src_device = to, .bytes = BYTES};
    copy(context, &load, 1);
    copy(context, &transfer, 1);
    copy(context, &store, 1);
    print_plan(context, &transfer, 1);
    const int same = memcmp(sent, received, BYTES) == 0;

    CHECK(mp_free(context, b));
    CHECK(mp_free(context, a));
    CHECK(mp_free(context, received));
    CHECK(mp_free(context, sent));
    CHECK(mp_context_destroy(context));

    printf("copied %" PRIu64 " bytes from device %" PRId32 " to device %" PRId32 ": %s\n", BYTES, from, to,
           same ? "every byte right" : "BYTES DIFFER");
    return same ? EXIT_SUCCESS : EXIT_FAILURE;
}
