/* Loads and runs the plugin that is given as argument. This program itself does not use mpgpu. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void *plugin = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (plugin == NULL) {
        printf("dlopen: %s\n", argc == 2 ? dlerror() : "usage: host PLUGIN");
        return 1;
    }
    const char *(*run)(void);
    *(void **)&run = dlsym(plugin, "plugin_run");
    const char *wrong = run != NULL ? run() : dlerror();
    puts(wrong ? wrong : "copied");
    return wrong != NULL;
}
