#include "../consumer/copy_check.h"

#include <mpgpu/mpgpu.h>

#include <stdio.h>
#include <string.h>

int main(void) {
    mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
    mp_context_t context;

    options.backend = MP_BACKEND_CUDA;
    if (mp_context_create(&options, &context) != MP_ERROR_NO_DRIVER || !strstr(mp_last_error(), "statically linked")) {
        printf("CUDA was not refused with the reason: %s\n", mp_last_error());
        return 1;
    }
    const char *wrong = copy_check();
    puts(wrong ? wrong : "copied");
    return wrong != NULL;
}
