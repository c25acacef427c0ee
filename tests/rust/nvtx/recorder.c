/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Minimal profiler: writes the NVTX ranges that it receives to the file RANGES_FILE. It is written from the definition
 * of NVTX 3 (nvtxDetail/nvtxTypes.h, nvToolsExt.h), independently of the library's implementation. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    union {
        uint64_t u64;
        double f64;
    } payload;
    int32_t message_type;
    union {
        const char *ascii;
        const void *registered;
    } message;
};

typedef void (*function)(void);
typedef int (*get_table)(int module, function ***table, unsigned *size);

struct callbacks {
    size_t size;
    get_table get;
};

struct version {
    size_t size;
    uint32_t version, reserved;
    void (*set)(uint32_t version);
};

static FILE *out;

static void *domain_create(const char *name) {
    fprintf(out, "domain %s\n", name);
    return strdup(name);
}

static void *register_string(void *domain, const char *text) {
    (void)domain;
    return strdup(text);
}

static int push(void *domain, const struct attributes *a) {
    if (a->version != 3 || a->size != sizeof *a || a->payload_type != 1 || a->reserved != 0) {
        fprintf(out, "bad attributes\n");
        return -1;
    }
    const char *message = a->message_type == 1 ? a->message.ascii : a->message_type == 3 ? a->message.registered : "?";
    fprintf(out, "push %s %s %llu\n", (const char *)domain, message, (unsigned long long)a->payload.u64);
    return 0;
}

static int pop(void *domain) {
    fprintf(out, "pop %s\n", (const char *)domain);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    out = fopen(getenv("RANGES_FILE"), "w");
    if (out == NULL) {
        return 0;
    }
    setvbuf(out, NULL, _IOLBF, 0);
    const char *mode = getenv("RANGES_MODE");
    if (strcmp(mode, "refuse") == 0) {
        fclose(out);
        return 0;
    }
    const struct callbacks *callbacks = get_export_table(1);
    const struct version *version = get_export_table(3);
    if (get_export_table(2) != NULL || callbacks->size < sizeof *callbacks || version->size < sizeof *version ||
        version->version != 3) {
        fprintf(out, "bad export tables\n");
        return 0;
    }
    version->set(3);
    /* Real profilers expect that all slots of all modules can be written, and that NULL follows the last slot. */
    static const unsigned sizes[] = {0, 16, 9, 15, 7, 16, 7};
    function **table = NULL;
    unsigned size = 0;
    for (int module = 1; module <= 6; ++module) {
        if (!callbacks->get(module, &table, &size) || size < sizes[module] || table[0] != NULL || table[size] != NULL) {
            fprintf(out, "bad module %d\n", module);
            return 0;
        }
        for (unsigned i = 1; i < size; ++i) {
            *table[i] = NULL;
        }
    }
    if (callbacks->get(0, &table, &size) || callbacks->get(7, &table, &size) || !callbacks->get(5, NULL, NULL)) {
        fprintf(out, "bad modules\n");
        return 0;
    }
    callbacks->get(5, &table, &size);
    *table[4] = (function)push;
    *table[5] = (function)pop;
    if (strcmp(mode, "plain") != 0) {
        *table[10] = (function)register_string;
    }
    if (strcmp(mode, "none") != 0) {
        *table[12] = (function)domain_create;
    }
    return 1;
}
