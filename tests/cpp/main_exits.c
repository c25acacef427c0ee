/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Tests programs whose main thread calls pthread_exit while the library has threads. SIGTERM must end a process in
 * which only those threads remain. While threads of the program remain, the program determines which thread receives
 * it. */
#define _POSIX_C_SOURCE 200809L
#include <mpgpu/mpgpu.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FROM_HANDLER = 7, FROM_SIGWAIT = 8, FROM_BLOCKED = 9, FOR_SECONDS = 60 };

static void die(const char *what) {
    fprintf(stderr, "%s (last error: %s)\n", what, mp_last_error());
    _exit(EXIT_FAILURE);
}

static void rest(void) {
    const struct timespec moment = {0, 5000000};
    nanosleep(&moment, NULL);
}

static void handle(int number) {
    (void)number;
    _exit(FROM_HANDLER);
}

static sigset_t only_terminate(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    return set;
}

/* Receives the signal, like a thread of a server. */
static void *take(void *unused) {
    const sigset_t set = only_terminate();
    int number = 0;
    (void)unused;
    if (sigwait(&set, &number) == 0 && number == SIGTERM) {
        _exit(FROM_SIGWAIT);
    }
    return NULL;
}

/* Blocks the signal for some time after its arrival. */
static void *hold(void *unused) {
    sigset_t pending;
    (void)unused;
    do {
        rest();
        sigpending(&pending);
    } while (sigismember(&pending, SIGTERM) == 0);
    for (int i = 0; i < 20; ++i) {
        rest();
    }
    _exit(FROM_BLOCKED);
}

/* Program that receives the signal: uses the library, which starts threads, and then ends its main thread. */
static void run(const char *mode) {
    mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
    mp_context_t context = NULL;
    mp_stream_t stream = NULL;
    options.backend = MP_BACKEND_HOST;
    options.topology = "beluga";
    if (mp_context_create(&options, &context) != MP_SUCCESS || mp_stream_create(context, 0, &stream) != MP_SUCCESS ||
        mp_stream_synchronize(context, stream) != MP_SUCCESS) {
        die("the library cannot be used");
    }
    void *memory = NULL;
    mp_memory_handle_t handle_of_memory;
    if (mp_alloc_shared(context, MP_DEVICE_HOST, 4096, &memory) != MP_SUCCESS ||
        mp_memory_export(context, memory, 4096, &handle_of_memory) != MP_SUCCESS) {
        die("no memory is shared");
    }
    const sigset_t set = only_terminate();
    pthread_t thread;
    if (strcmp(mode, "handled") == 0) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = handle;
        sigaction(SIGTERM, &action, NULL);
    } else if (strcmp(mode, "default") != 0) {
        pthread_sigmask(SIG_BLOCK, &set, NULL);
        if (pthread_create(&thread, NULL, strcmp(mode, "taken") == 0 ? take : hold, NULL) != 0) {
            die("no thread");
        }
    }
    pthread_exit(NULL);
}

/* Returns 1 if the main thread of a process has ended and other threads have not. */
static int has_left_main(pid_t child) {
    char path[64];
    char state = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)child);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return 0;
    }
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) {
        state = 0;
    }
    fclose(file);
    return state == 'Z';
}

/* Sends SIGTERM to the program and returns its wait status. */
static int ended(const char *program, const char *mode) {
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        execl(program, program, mode, (char *)NULL);
        _exit(EXIT_FAILURE);
    }
    while (!has_left_main(child)) {
        rest();
    }
    kill(child, SIGTERM);
    for (int i = 0; i < FOR_SECONDS * 200; ++i) {
        if (waitpid(child, &status, WNOHANG) == child) {
            return status;
        }
        rest();
    }
    fprintf(stderr, "%s: still there %d s after SIGTERM\n", mode, FOR_SECONDS);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return status;
}

int main(int count, char **arguments) {
    if (count == 2) {
        run(arguments[1]);
    }
    const int by_default = ended(arguments[0], "default");
    const int handled = ended(arguments[0], "handled");
    const int taken = ended(arguments[0], "taken");
    const int blocked = ended(arguments[0], "blocked");
    printf("default %#x, handled %#x, taken %#x, blocked %#x\n", (unsigned)by_default, (unsigned)handled,
           (unsigned)taken, (unsigned)blocked);
    return WIFSIGNALED(by_default) && WTERMSIG(by_default) == SIGTERM && WIFEXITED(handled) &&
                   WEXITSTATUS(handled) == FROM_HANDLER && WIFEXITED(taken) && WEXITSTATUS(taken) == FROM_SIGWAIT &&
                   WIFEXITED(blocked) && WEXITSTATUS(blocked) == FROM_BLOCKED
               ? EXIT_SUCCESS
               : EXIT_FAILURE;
}
