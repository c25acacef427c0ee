#include "../consumer/copy_check.h"

__attribute__((visibility("default"))) const char *plugin_run(void) {
    return copy_check();
}
