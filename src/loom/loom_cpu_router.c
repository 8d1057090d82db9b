/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: the router's product and the gradient of its weight. Lanes and chunks are fixed by the sizes, so no result depends on how
 * the work was shared out. */
#include <string.h>

#include "loom_cpu.h"

static const char *token_of(const lf__loom_router_args *a, int64_t t)
{
    return (const char *)a->x + t * a->d * (int64_t)lf_dtype_bytes(a->dtype);
}

static void router_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_router_args *a = user;
    float acc[LF_MAX_EXPERTS][LF_LOOM_LANES], tile[LF_LOOM_TILE];
    for (int64_t t = from; t < to; t++) {
        memset(acc, 0, (size_t)a->e * sizeof acc[0]);
        for (int64_t at = 0; at < a->d; at += LF_LOOM_TILE) {
            const int64_t n = a->d - at < LF_LOOM_TILE ? a->d - at : LF_LOOM_TILE;
            const float *x = lf__loom_load(a->dtype, token_of(a, t), at, n, tile);
            for (int32_t j = 0; j < a->e; j++) lf__loom_dot(x, a->a + j * a->d + at, n, acc[j]);
        }
        for (int32_t j = 0; j < a->e; j++) a->out[t * a->e + j] = lf__loom_sum_lanes(acc[j]);
    }
}

lf_status lf__loom_cpu_router(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_router_args *a = &args->router;
    lf__loom_spans(a->n, a->e * (a->d / 4 + 4), router_span, a);
    return LF_OK;
}

/* part: (e, d), the sum over tokens [first, last) of dlogits[t, j] x[t], a tile of features at a time. */
static void sum_chunk(const lf__loom_router_args *a, int64_t first, int64_t last, float *part)
{
    enum { TILE = 128 }; /* of all experts: it stays in the first cache */
    float x_tile[TILE];
    for (int64_t at = 0; at < a->d; at += TILE) {
        const int64_t n = a->d - at < TILE ? a->d - at : TILE;
        for (int32_t j = 0; j < a->e; j++) memset(part + j * a->d + at, 0, (size_t)n * sizeof *part);
        for (int64_t t = first; t < last; t++) {
            const float *restrict x = lf__loom_load(a->dtype, token_of(a, t), at, n, x_tile);
            for (int32_t j = 0; j < a->e; j++) {
                float *restrict sum = part + j * a->d + at;
                const float g = a->a[t * a->e + j];
                for (int64_t i = 0; i < n; i++) sum[i] += g * x[i];
            }
        }
    }
}

static void chunks_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_router_args *a = user;
    for (int64_t c = from; c < to; c++) {
        const int64_t first = c * a->chunk, last = first + a->chunk < a->n ? first + a->chunk : a->n;
        sum_chunk(a, first, last, a->workspace + c * a->e * a->d);
    }
}

/* Elements of dweight: the chunks' sums in order. */
static void finish_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_router_args *a = user;
    for (int64_t i = from; i < to; i++) {
        float sum = 0;
        for (int32_t c = 0; c < a->n_chunks; c++) sum += a->workspace[c * a->e * a->d + i];
        a->out[i] = a->accumulate ? a->out[i] + sum : sum;
    }
}

lf_status lf__loom_cpu_router_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_router_args *a = &args->router;
    const int64_t size = a->e * a->d;
    if (size == 0) return LF_OK;
    lf__loom_spans(a->n_chunks, a->chunk * size / 4 + 1, chunks_span, a);
    lf__loom_spans(size, a->n_chunks + 1, finish_span, a);
    return LF_OK;
}
