#include "copy_check.h"

#include <mpgpu/mpgpu.h>

#include <stdio.h>
#include <string.h>

static char wrong[1024];

static const char *failed(const char *call, mp_status_t status) {
    snprintf(wrong, sizeof wrong, "%s: %s: %s", call, mp_status_string(status), mp_last_error());
    return wrong;
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        mp_status_t status = (call);                                                                                   \
        if (status != MP_SUCCESS)                                                                                      \
            return failed(#call, status);                                                                              \
    } while (0)

enum { BYTES = 8 * 1024 * 1024 + 13 };

const char *copy_check(void) {
    mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
    mp_context_t context;
    mp_plan_t plan;
    mp_request_t done;
    void *src, *dst;

    if (mp_version() != MP_VERSION)
        return "the library's version is not the header's";
    options.backend = MP_BACKEND_HOST;
    options.topology = "beluga";
    options.backend = MP_BACKEND_HOST;
    CHECK(mp_context_create(&options, &context));
    CHECK(mp_alloc(context, 0, BYTES, &src));
    CHECK(mp_alloc(context, 1, BYTES, &dst));
    /* Memory of the host backend's virtual GPUs is host memory. */
    for (size_t i = 0; i < BYTES; ++i)
        ((unsigned char *)src)[i] = (unsigned char)(i * 31 + (i >> 9));
    memset(dst, 0xa5, BYTES);

    mp_transfer_t transfer = {dst, 1, src, 0, BYTES};
    CHECK(mp_plan(context, &transfer, 1, NULL, &plan));
    CHECK(mp_execute(plan, NULL, &done));
    CHECK(mp_wait(&done, NULL));
    if (memcmp(dst, src, BYTES) != 0)
        return "the copy arrived with wrong bytes";

    transfer.dst_device = 99;
    mp_plan_t refused = NULL;
    if (mp_plan(context, &transfer, 1, NULL, &refused) != MP_ERROR_INVALID_DEVICE)
        return "a transfer to device 99 was not refused as an invalid device";
    if (strstr(mp_last_error(), "99") == NULL)
        return "the message about device 99 does not name it";

    CHECK(mp_plan_destroy(plan));
    CHECK(mp_free(context, src));
    CHECK(mp_free(context, dst));
    CHECK(mp_context_destroy(context));
    return NULL;
}
