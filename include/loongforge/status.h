/* SPDX-License-Identifier: Apache-2.0 */
/** @file status.h  Status codes and the text of the last error.
 *
 *  Every call that can fail returns an lf_status: 0 is success, a negative value an error, a positive value a state that is
 *  not an error (end of data, not ready yet). Numbers are frozen once released. */
#ifndef LOONGFORGE_STATUS_H
#define LOONGFORGE_STATUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(LF_BUILDING) && defined(__GNUC__)
#define LF_API __attribute__((visibility("default")))
#else
#define LF_API
#endif

typedef int32_t lf_status;

/* name, value, meaning */
#define LF_STATUS_MAP(X)                                   \
    X(OK, 0, "success")                                    \
    X(END, 1, "no more data")                              \
    X(AGAIN, 2, "not ready yet")                           \
    X(ERR_INVALID, -1, "invalid argument or option")       \
    X(ERR_NOMEM, -2, "out of host memory")                 \
    X(ERR_IO, -3, "input/output error")                    \
    X(ERR_NOSPACE, -4, "no space left on the target")      \
    X(ERR_NOTFOUND, -5, "not found")                       \
    X(ERR_EXISTS, -6, "already exists")                    \
    X(ERR_FORMAT, -7, "not in the expected format")        \
    X(ERR_CORRUPT, -8, "data damaged")                     \
    X(ERR_UNSUPPORTED, -9, "not supported here")           \
    X(ERR_STATE, -10, "call not allowed in this state")    \
    X(ERR_DEVICE, -11, "device error")                     \
    X(ERR_POOL, -12, "a memory pool is too small")         \
    X(ERR_TIMEOUT, -13, "deadline passed")                 \
    X(ERR_PEER, -14, "a peer process failed or disagrees") \
    X(ERR_BUDGET, -15, "too many bad samples")             \
    X(ERR_INTERNAL, -16, "internal error, please report it")

#define LF_STATUS_ENUM(name, value, text) LF_##name = value,
enum { LF_STATUS_MAP(LF_STATUS_ENUM) LF_STATUS_MIN = -16 };
#undef LF_STATUS_ENUM

/** The code's name without prefix, e.g. "ERR_NOMEM"; "UNKNOWN" for a number that is no status. Never NULL, static. */
LF_API const char *lf_status_name(lf_status status);

/** One line on what the code means. Never NULL, static. */
LF_API const char *lf_status_text(lf_status status);

/** What went wrong in the last failed call of this thread: what, which value, what was expected, a hint.
 *  @return text owned by the library, valid until the thread's next failing call; "" when none failed. */
LF_API const char *lf_error_text(void);

/** Forget this thread's error text. */
LF_API void lf_error_clear(void);

/** Version of the library, e.g. "0.1.0"; and of the ABI, which changes when a caller must be rebuilt. */
LF_API const char *lf_version_string(void);
LF_API int32_t lf_abi_version(void);

/** Severity of a log line. */
enum { LF_LOG_ERROR = 0, LF_LOG_WARN = 1, LF_LOG_INFO = 2, LF_LOG_DEBUG = 3 };

/** Receives log lines. The library never prints by itself; without a callback lines are dropped.
 *  @param user the cookie given to lf_log_set.   @param line one line, no newline, borrowed for the call.
 *  Threads: may be called from any thread of the library, one call at a time. Must not call the library. */
typedef void (*lf_log_fn)(void *user, int32_t level, const char *line);

/** Set the process-wide log callback (NULL: none) and the most detailed level it wants. */
LF_API void lf_log_set(lf_log_fn fn, void *user, int32_t level);

#ifdef __cplusplus
}
#endif
#endif
