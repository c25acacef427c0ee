#include "../consumer/copy_check.h"

#include <stdint.h>
#include <stdio.h>

/* Links a second Rust archive: as built by rustc, and with hidden symbols, as mpgpu is packaged. */
int32_t second_check(int32_t value);
int32_t mp_check(int32_t value);

int main(void) {
    const char *wrong = NULL;
    for (int round = 0; round < 2 && wrong == NULL; ++round) {
        if (second_check(41 + round) != 41 + round)
            wrong = "the second Rust archive does not catch its own panic";
        else if (mp_check(141 + round) != 141 + round)
            wrong = "a panic is not caught inside an archive with hidden symbols";
        else
            wrong = copy_check();
    }
    puts(wrong ? wrong : "copied");
    return wrong != NULL;
}
