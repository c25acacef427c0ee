#include "copy_check.h"

#include <stdio.h>

int main(void) {
    const char *wrong = copy_check();
    puts(wrong ? wrong : "copied");
    return wrong != NULL;
}
