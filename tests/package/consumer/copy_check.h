#ifndef COPY_CHECK_H
#define COPY_CHECK_H
#ifdef __cplusplus
extern "C" {
#endif

/* Plans and executes a copy between two virtual GPUs, compares every byte, then provokes an error and looks at its
   message. Returns NULL on success, and otherwise a description of the error. */
const char *copy_check(void);

#ifdef __cplusplus
}
#endif
#endif
