/* SPDX-License-Identifier: Apache-2.0 */
/** @file base.h  What every module stands on: errors, memory, log, options, threads, clock, histogram, hash, random numbers.
 *  Depends on nothing else in the project. */
#ifndef LF_BASE_H
#define LF_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "loongforge/options.h"
#include "loongforge/status.h"

#if defined(__GNUC__)
#define LF_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define LF_COLD __attribute__((cold, noinline))
#define LF_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define LF_PRINTF(f, a)
#define LF_COLD
#define LF_UNLIKELY(x) (x)
#endif
#define LF_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- errors -------------------------------------------------------------------------------------------------------- */

/** Store the thread's error text and return `status`: `return LF_FAIL(LF_ERR_INVALID, "depth is %d, expected …", d);` */
lf_status lf__fail(lf_status status, const char *format, ...) LF_PRINTF(2, 3) LF_COLD;
#define LF_FAIL(...) lf__fail(__VA_ARGS__)
/** As lf__fail, with ": strerror(err) (errno err)" behind it; ENOSPC, ENOENT and EEXIST choose their own status. */
lf_status lf__fail_errno(int err, const char *format, ...) LF_PRINTF(2, 3) LF_COLD;
/** Put words in front of the text of an error that happened below: "checkpoint 50: …". */
lf_status lf__fail_prefix(lf_status status, const char *format, ...) LF_PRINTF(2, 3) LF_COLD;

/** Jump to the function's only label `out:` with `rc` set. */
#define LF_TRY(expr)                       \
    do {                                   \
        rc = (expr);                       \
        if (LF_UNLIKELY(rc < 0)) goto out; \
    } while (0)
/** Leave with an error through `out:`. */
#define LF_THROW(...)              \
    do {                           \
        rc = LF_FAIL(__VA_ARGS__); \
        goto out;                  \
    } while (0)
#define LF_CHECK_ARG(cond, ...)                                                \
    do {                                                                       \
        if (LF_UNLIKELY(!(cond))) return LF_FAIL(LF_ERR_INVALID, __VA_ARGS__); \
    } while (0)

/** An error that happened on a worker thread, kept until a caller asks. Zero-initialised: none. */
typedef struct lf__fault {
    lf_status status;
    char text[512];
} lf__fault;
/** Keep this thread's last error if none is kept yet. The caller holds the lock that guards the fault. */
void lf__fault_keep(lf__fault *fault, lf_status status);
/** Make it the calling thread's error and return its status (LF_OK when none). */
lf_status lf__fault_raise(const lf__fault *fault);

/* ---- log ----------------------------------------------------------------------------------------------------------- */

void lf__log(int32_t level, const char *format, ...) LF_PRINTF(2, 3);

/* ---- memory (fault points: tests make the n-th allocation fail) ------------------------------------------------------ */

void *lf__alloc(size_t bytes);                 /* zeroed; NULL when out of memory; bytes 0 is allowed */
void *lf__alloc_array(size_t n, size_t bytes); /* checks the product */
void *lf__realloc(void *p, size_t n, size_t bytes);
void *lf__alloc_aligned(size_t bytes, size_t align); /* not zeroed */
char *lf__strdup(const char *text);
void lf__free(void *p);
/** The n-th allocation from now on fails (0: never). Returns how many were made since the last call. For tests. */
int64_t lf__alloc_fail_at(int64_t n);

/** Growing text or bytes with a stated maximum; frees itself on failure. Zero-initialised apart from `max`. */
typedef struct lf__buf {
    char *data; /* 0-terminated */
    size_t used, room, max;
} lf__buf;
lf_status lf__buf_add(lf__buf *buf, const void *data, size_t bytes);
lf_status lf__buf_printf(lf__buf *buf, const char *format, ...) LF_PRINTF(2, 3);
void lf__buf_free(lf__buf *buf);

/* ---- options ------------------------------------------------------------------------------------------------------- */

/** Every section of the library, listed in src/sections.c. */
extern const lf_options_section *const lf__sections[];
extern const uint32_t lf__n_sections;

/** Copy a caller's options over the defaults of `section` into `to` (struct_bytes long): a NULL or shorter struct keeps
 *  defaults for the rest; every field is checked against its bounds. */
lf_status lf__options_take(const char *section, void *to, size_t bytes, const void *from);

#define LF_ROW_I32(S, f, def, lo, hi, help_)                     \
    {                                                            \
#f, def, help_, NULL, LF_OPT_I32, offsetof(S, f), lo, hi \
    }
#define LF_ROW_I64(S, f, def, lo, hi, help_)                     \
    {                                                            \
#f, def, help_, NULL, LF_OPT_I64, offsetof(S, f), lo, hi \
    }
#define LF_ROW_F64(S, f, def, lo, hi, help_)                     \
    {                                                            \
#f, def, help_, NULL, LF_OPT_F64, offsetof(S, f), lo, hi \
    }
#define LF_ROW_BOOL(S, f, def, help_)                           \
    {                                                           \
#f, def, help_, NULL, LF_OPT_BOOL, offsetof(S, f), 0, 1 \
    }
#define LF_ROW_TEXT(S, f, def, choices_, help_)                     \
    {                                                               \
#f, def, help_, choices_, LF_OPT_TEXT, offsetof(S, f), 0, 0 \
    }

/* ---- time ---------------------------------------------------------------------------------------------------------- */

int64_t lf__now_ns(void); /* monotonic */
int64_t lf__unix_ns(void);
void lf__sleep_ns(int64_t ns);

/* ---- threads ------------------------------------------------------------------------------------------------------- */

typedef struct lf__mutex lf__mutex; /* with a condition variable of its own */
lf__mutex *lf__mutex_open(void);    /* NULL: out of memory */
void lf__mutex_close(lf__mutex *m);
void lf__lock(lf__mutex *m);
void lf__unlock(lf__mutex *m);
void lf__wait(lf__mutex *m);                        /* like pthread_cond_wait: may wake early */
bool lf__wait_ns(lf__mutex *m, int64_t timeout_ns); /* false: the time passed */
void lf__wake(lf__mutex *m);                        /* all waiters */

typedef struct lf__thread lf__thread;
typedef void (*lf__thread_fn)(void *user);
lf_status lf__thread_start(lf__thread **out, const char *name, lf__thread_fn fn, void *user);
void lf__thread_join(lf__thread *thread); /* also frees; NULL is allowed */
/** Instead of a join, for a thread that is stuck in somebody else's code: it ends when it ends. */
void lf__thread_forget(lf__thread *thread);
int32_t lf__n_cores(void); /* usable by this process */

/** Run fn(user, i) for i in [0, n) on up to `threads` threads (0: one a core), the caller among them. Returns when all are
 *  done. The threads stay for the next call. Inside fn, and while another thread is in a loop, a call runs its loop on the
 *  calling thread alone. Which thread runs which i is not fixed: results must not depend on it. */
typedef void (*lf__for_fn)(void *user, int64_t i);
void lf__parallel(int32_t threads, int64_t n, lf__for_fn fn, void *user);

/* ---- histogram ----------------------------------------------------------------------------------------------------- */

/** Durations in 12 significant bits (HDR form: 64 powers of two, 32 linear steps each): a percentile is within 3.2 %.
 *  Zero-initialised: empty. Not locked. */
typedef struct lf__hist {
    int64_t count, max_ns;
    double sum_s, sum_sq;
    uint32_t bin[64 * 32];
} lf__hist;
void lf__hist_add(lf__hist *h, int64_t ns);
double lf__hist_percentile(const lf__hist *h, double percent); /* seconds; 0 when empty */
double lf__hist_mean(const lf__hist *h);
double lf__hist_std(const lf__hist *h);

/* ---- hash, random numbers ------------------------------------------------------------------------------------------ */

typedef struct lf__hash128 {
    uint64_t lo, hi;
} lf__hash128;
lf__hash128 lf__hash(const void *data, size_t bytes, uint64_t seed); /* XXH3-128 */
void lf__hash_hex(lf__hash128 h, char text[33]);
bool lf__hash_parse(const char *hex, lf__hash128 *h); /* 32 hex digits */

/** Philox4x32-10 (Salmon et al., SC'11): 4 random words of a counter and a key. */
void lf__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/** One stream of numbers named by (seed, a, b, c): reproducible, independent of any other stream. */
typedef struct lf__rng {
    uint32_t key[2], counter[4], word[4];
    int32_t left;
} lf__rng;
void lf__rng_init(lf__rng *r, uint64_t seed, uint32_t a, uint32_t b, uint32_t c);
uint32_t lf__rng_u32(lf__rng *r);
double lf__rng_unit(lf__rng *r);              /* [0, 1) */
int32_t lf__rng_below(lf__rng *r, int32_t n); /* [0, n), unbiased enough: n < 2^24 */
/** Position of `i` in the permutation of [0, n) that `key` names; a bijection with no state (Feistel with cycle walking). */
int64_t lf__permute(uint64_t key, int64_t n, int64_t i);

/* ---- bits ---------------------------------------------------------------------------------------------------------- */

static inline int64_t lf__round_up(int64_t x, int64_t align) { return (x + align - 1) / align * align; }
static inline bool lf__is_pow2(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }
static inline uint16_t lf__bf16_from_f32(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {x};
    if ((v.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((v.u >> 16) | 0x40u); /* NaN stays NaN */
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}
static inline float lf__f32_from_bf16(uint16_t x)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)x << 16};
    return v.f;
}

#endif
