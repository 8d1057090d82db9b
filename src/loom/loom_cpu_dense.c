/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: norms and the loss. Rows are independent; a row is walked in tiles of f32, its sums are made in fixed lanes, and what is
 * summed over rows is summed over chunks of rows that depend on their number alone. */
#include <math.h>
#include <string.h>

#include "loom_cpu.h"

static int64_t tile_of(int64_t at, int64_t d) { return d - at < LF_LOOM_TILE ? d - at : LF_LOOM_TILE; }

static char *row_at(const void *base, int64_t row, int64_t stride, int32_t dtype)
{
    return (char *)base + row * stride * (int64_t)lf_dtype_bytes(dtype);
}

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

/* s = x + y, rounded, into its row of `sum`. */
static void add_row(const lf__loom_norm_args *a, int64_t t)
{
    const lf__loom_rows_args *r = &a->rows;
    float x_tile[LF_LOOM_TILE], y_tile[LF_LOOM_TILE], s[LF_LOOM_TILE];
    for (int64_t at = 0; at < r->d; at += LF_LOOM_TILE) {
        const int64_t n = tile_of(at, r->d);
        const float *x = lf__loom_load(r->dtype, row_at(a->x, t, r->d, r->dtype), at, n, x_tile), *y = y_tile;
        if (r->k) lf__loom_gather(r, r->routing.weight, t, at, n, y_tile);
        else y = lf__loom_load(r->dtype, row_at(r->a, t, r->d, r->dtype), at, n, y_tile);
        for (int64_t i = 0; i < n; i++) s[i] = x[i] + y[i];
        lf__loom_store(r->dtype, row_at(r->out, t, r->d, r->dtype), at, n, s);
    }
}

static void norm_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_norm_args *a = user;
    const lf__loom_rows_args *r = &a->rows;
    float tile[LF_LOOM_TILE], out[LF_LOOM_TILE];
    for (int64_t t = from; t < to; t++) {
        float acc[LF_LOOM_LANES] = {0};
        if (r->a && r->d > 0) add_row(a, t);
        const char *row = row_at(r->a ? r->out : a->x, t, r->d, r->dtype);
        for (int64_t at = 0; at < r->d; at += LF_LOOM_TILE) {
            const int64_t n = tile_of(at, r->d);
            const float *s = lf__loom_load(r->dtype, row, at, n, tile);
            lf__loom_dot(s, s, n, acc);
        }
        const float rstd = 1 / sqrtf(lf__loom_sum_lanes(acc) / (float)(r->d ? r->d : 1) + a->eps);
        a->rstd[t] = rstd;
        for (int64_t at = 0; at < r->d; at += LF_LOOM_TILE) {
            const int64_t n = tile_of(at, r->d);
            const float *s = lf__loom_load(r->dtype, row, at, n, tile);
            for (int64_t i = 0; i < n; i++) out[i] = s[i] * rstd * a->weight[at + i];
            lf__loom_store(r->dtype, row_at(a->normed, t, r->d, r->dtype), at, n, out);
        }
    }
}

lf_status lf__loom_cpu_add_norm(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_spans(args->norm.rows.n, 4 * args->norm.rows.d + 1, norm_span, &args->norm);
    return LF_OK;
}

lf_status lf__loom_cpu_combine_add_norm(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_spans(args->norm.rows.n, (args->norm.rows.k + 4) * args->norm.rows.d + 1, norm_span, &args->norm);
    return LF_OK;
}

/* Chunks of rows of a backward, each with its own partial sum of dweight. */
enum { NORM_CHUNKS = 64 };
_Static_assert((int)NORM_CHUNKS <= (int)LF_LOOM_NORM_PARTS, "a workspace has room for every chunk");
static int64_t norm_chunks(int64_t n) { return n < NORM_CHUNKS ? n : NORM_CHUNKS; }

/* xhat = sum rstd, g = dnormed weight: dx = dsum + rstd (g - xhat mean(g xhat)), partial += dnormed xhat. */
static void norm_backward_row(const lf__loom_norm_backward_args *a, int64_t t, float *partial)
{
    float s_tile[LF_LOOM_TILE], dn_tile[LF_LOOM_TILE], ds_tile[LF_LOOM_TILE], g[LF_LOOM_TILE], xhat[LF_LOOM_TILE];
    float acc[LF_LOOM_LANES] = {0}, mean = 0;
    const float rstd = a->rstd[t];
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int64_t at = 0; at < a->d; at += LF_LOOM_TILE) {
            const int64_t n = tile_of(at, a->d);
            const float *s = lf__loom_load(a->dtype, row_at(a->sum, t, a->d, a->dtype), at, n, s_tile);
            const float *dn = lf__loom_load(a->dtype, row_at(a->dnormed, t, a->d, a->dtype), at, n, dn_tile);
            for (int64_t i = 0; i < n; i++) {
                xhat[i] = s[i] * rstd;
                g[i] = dn[i] * a->weight[at + i];
            }
            if (pass == 0) {
                lf__loom_dot(g, xhat, n, acc);
                continue;
            }
            for (int64_t i = 0; i < n; i++) {
                partial[at + i] += dn[i] * xhat[i];
                g[i] = rstd * (g[i] - xhat[i] * mean);
            }
            if (a->dsum) {
                const float *ds = lf__loom_load(a->dtype, row_at(a->dsum, t, a->d, a->dtype), at, n, ds_tile);
                for (int64_t i = 0; i < n; i++) g[i] = ds[i] + g[i];
            }
            lf__loom_store(a->dtype, row_at(a->dx, t, a->d, a->dtype), at, n, g);
        }
        if (pass == 0) mean = lf__loom_sum_lanes(acc) / (float)a->d;
    }
}

static void norm_backward_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_norm_backward_args *a = user;
    const int64_t chunks = norm_chunks(a->n);
    for (int64_t c = from; c < to; c++) {
        float *partial = a->partial + c * a->d;
        memset(partial, 0, (size_t)a->d * sizeof *partial);
        for (int64_t t = c * a->n / chunks; t < (c + 1) * a->n / chunks; t++) norm_backward_row(a, t, partial);
    }
}

static void dweight_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_norm_backward_args *a = user;
    const int64_t chunks = norm_chunks(a->n);
    for (int64_t i = from; i < to; i++) {
        float sum = 0;
        for (int64_t c = 0; c < chunks; c++) sum += a->partial[c * a->d + i];
        a->dweight[i] = a->accumulate ? a->dweight[i] + sum : sum;
    }
}

lf_status lf__loom_cpu_add_norm_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_norm_backward_args *a = &args->norm_backward;
    const int64_t chunks = norm_chunks(a->n);
    if (a->d == 0) return LF_OK;
    if (chunks) lf__loom_spans(chunks, (a->n / chunks + 1) * a->d * 8, norm_backward_span, a);
    lf__loom_spans(a->d, chunks + 1, dweight_span, a);
    return LF_OK;
}

/* ---- loss ------------------------------------------------------------------------------------------------------------ */

static void set_row(const lf__loom_loss_args *a, char *row, float value)
{
    float tile[LF_LOOM_TILE];
    for (int64_t i = 0; i < LF_LOOM_TILE; i++) tile[i] = value;
    for (int64_t at = 0; at < a->v; at += LF_LOOM_TILE) lf__loom_store(a->dtype, row, at, tile_of(at, a->v), tile);
}

/* The largest logit and sum(exp(logit - largest)); NaN logits leave a NaN in the sum. */
static void row_sums(const lf__loom_loss_args *a, const char *row, float *largest, float *sum)
{
    float tile[LF_LOOM_TILE], top = -INFINITY;
    double total = 0;
    for (int64_t at = 0; at < a->v; at += LF_LOOM_TILE) {
        const int64_t n = tile_of(at, a->v);
        const float *x = lf__loom_load(a->dtype, row, at, n, tile);
        for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    }
    for (int64_t at = 0; at < a->v; at += LF_LOOM_TILE) {
        const int64_t n = tile_of(at, a->v);
        const float *x = lf__loom_load(a->dtype, row, at, n, tile);
        for (int64_t i = 0; i < n; i++) total += (double)expf(x[i] - top);
    }
    *largest = top;
    *sum = (float)total;
}

static void row_gradient(const lf__loom_loss_args *a, char *row, int64_t target, float largest, float sum)
{
    float tile[LF_LOOM_TILE], g[LF_LOOM_TILE];
    const float inverse = 1 / sum;
    for (int64_t at = 0; at < a->v; at += LF_LOOM_TILE) {
        const int64_t n = tile_of(at, a->v);
        const float *x = lf__loom_load(a->dtype, row, at, n, tile);
        for (int64_t i = 0; i < n; i++) g[i] = expf(x[i] - largest) * inverse;
        if (target >= at && target < at + n) g[target - at] -= 1;
        lf__loom_store(a->dtype, row, at, n, g);
    }
}

static void loss_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_loss_args *a = user;
    for (int64_t t = from; t < to; t++) {
        char *row = row_at(a->logits, t, a->ld, a->dtype);
        const int64_t target = a->target[t];
        if (target < 0 || target >= a->v) {
            a->row_loss[t] = target < 0 ? 0 : (float)NAN;
            if (a->backward) set_row(a, row, a->row_loss[t]);
            continue;
        }
        float x, largest, sum;
        x = *lf__loom_load(a->dtype, row, target, 1, &x);
        row_sums(a, row, &largest, &sum);
        a->row_loss[t] = logf(sum) - (x - largest);
        if (a->backward) row_gradient(a, row, target, largest, sum);
    }
}

lf_status lf__loom_cpu_cross_entropy(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_loss_args *a = &args->loss;
    double sum = 0;
    lf__loom_spans(a->n, 16 * a->v, loss_span, a);
    for (int64_t t = 0; t < a->n; t++) sum += (double)a->row_loss[t];
    *a->loss_sum = a->accumulate ? *a->loss_sum + sum : sum;
    return LF_OK;
}
