/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: rows to their experts and back. Sums go through a tile of f32, so both dtypes share one loop; a token's choices are
 * added in order, and a dot product in fixed lanes, so no result depends on how tokens were shared out. */
#include <string.h>

#include "loom_cpu.h"

static const char *row_of(const void *base, int64_t row, const lf__loom_rows_args *a)
{
    return (const char *)base + row * a->d * (int64_t)lf_dtype_bytes(a->dtype);
}

/* Row of a token's choice, -1 when it is routed nowhere. */
static int64_t slot_of(const lf__loom_rows_args *a, int64_t token, int32_t choice)
{
    int64_t row = a->routing.slot[token * a->k + choice];
    return row < a->routing.offset[a->e] ? row : -1;
}

static void permute_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_rows_args *a = user;
    const size_t bytes = (size_t)a->d * lf_dtype_bytes(a->dtype);
    for (int64_t r = from; r < to; r++) {
        char *xs = (char *)a->out + (size_t)r * bytes;
        if (r < a->routing.offset[a->e]) memcpy(xs, row_of(a->a, a->routing.row[r] / a->k, a), bytes);
        else memset(xs, 0, bytes);
    }
}

lf_status lf__loom_cpu_permute(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_rows_args *a = &args->rows;
    if (a->d > 0) lf__loom_spans(a->n * a->k, a->d / 4 + 1, permute_span, a);
    return LF_OK;
}

void lf__loom_gather(const lf__loom_rows_args *a, const float *scale, int64_t token, int64_t at, int64_t n, float *sum)
{
    float row[LF_LOOM_TILE];
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int32_t c = 0; c < a->k; c++) {
        const int64_t r = slot_of(a, token, c);
        if (r < 0) continue;
        const float *x = lf__loom_load(a->dtype, row_of(a->a, r, a), at, n, row);
        const float w = scale ? scale[token * a->k + c] : 1;
        for (int64_t i = 0; i < n; i++) sum[i] += w * x[i];
    }
}

/* sum (n) += <dlogits[token], router[:, at:at + n]>, itself summed over experts in order. */
static void add_router(const lf__loom_rows_args *a, int64_t token, int64_t at, int64_t n, float *restrict sum)
{
    const float *dlogits = a->dlogits + token * a->e;
    float row[LF_LOOM_TILE];
    memset(row, 0, (size_t)n * sizeof *row);
    for (int32_t j = 0; j < a->e; j++) {
        const float *weight = a->router + j * a->d + at;
        for (int64_t i = 0; i < n; i++) row[i] += dlogits[j] * weight[i];
    }
    for (int64_t i = 0; i < n; i++) sum[i] += row[i];
}

/* out[t] = sum over c of scale[t, c] * a[slot], scale 1 when `scale` is NULL; plus the router's part where there is one. */
static void gather_sum(const lf__loom_rows_args *a, const float *scale, int64_t token)
{
    float sum[LF_LOOM_TILE];
    char *out = (char *)a->out + token * a->d * (int64_t)lf_dtype_bytes(a->dtype);
    for (int64_t at = 0; at < a->d; at += LF_LOOM_TILE) {
        const int64_t n = a->d - at < LF_LOOM_TILE ? a->d - at : LF_LOOM_TILE;
        lf__loom_gather(a, scale, token, at, n, sum);
        if (a->dlogits) add_router(a, token, at, n, sum);
        lf__loom_store(a->dtype, out, at, n, sum);
    }
}

static void permute_backward_span(const void *user, int64_t from, int64_t to)
{
    for (int64_t t = from; t < to; t++) gather_sum(user, NULL, t);
}

lf_status lf__loom_cpu_permute_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_rows_args *a = &args->rows;
    lf__loom_spans(a->n, (a->k + 1 + (a->dlogits ? a->e : 0)) * a->d / 2 + 1, permute_backward_span, a);
    return LF_OK;
}

static void combine_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_rows_args *a = user;
    for (int64_t t = from; t < to; t++) gather_sum(a, a->routing.weight, t);
}

lf_status lf__loom_cpu_combine(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_rows_args *a = &args->rows;
    lf__loom_spans(a->n, (a->k + 1) * a->d / 2 + 1, combine_span, a);
    return LF_OK;
}

/* One token and choice: dys[r] = w dy[t], returns <ys[r], dy[t]>. */
static float combine_backward_row(const lf__loom_rows_args *a, int64_t token, int64_t r, float w)
{
    float acc[LF_LOOM_LANES] = {0}, ys_tile[LF_LOOM_TILE], dy_tile[LF_LOOM_TILE], dys[LF_LOOM_TILE];
    char *out = (char *)a->out + r * a->d * (int64_t)lf_dtype_bytes(a->dtype);
    for (int64_t at = 0; at < a->d; at += LF_LOOM_TILE) {
        const int64_t n = a->d - at < LF_LOOM_TILE ? a->d - at : LF_LOOM_TILE;
        const float *ys = lf__loom_load(a->dtype, row_of(a->a, r, a), at, n, ys_tile);
        const float *dy = lf__loom_load(a->dtype, row_of(a->b, token, a), at, n, dy_tile);
        lf__loom_dot(ys, dy, n, acc);
        for (int64_t i = 0; i < n; i++) dys[i] = w * dy[i];
        lf__loom_store(a->dtype, out, at, n, dys);
    }
    return lf__loom_sum_lanes(acc);
}

static void combine_backward_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_rows_args *a = user;
    const size_t bytes = (size_t)a->d * lf_dtype_bytes(a->dtype);
    for (int64_t t = from; t < to; t++)
        for (int32_t c = 0; c < a->k; c++) {
            const int64_t s = t * a->k + c, r = slot_of(a, t, c);
            if (r >= 0) {
                a->dweight[s] = combine_backward_row(a, t, r, a->routing.weight[s]);
                continue;
            }
            a->dweight[s] = 0;
            if (bytes) memset((char *)a->out + (size_t)a->routing.slot[s] * bytes, 0, bytes);
        }
}

lf_status lf__loom_cpu_combine_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_rows_args *a = &args->rows;
    lf__loom_spans(a->n, a->k * a->d + 1, combine_backward_span, a);
    return LF_OK;
}
