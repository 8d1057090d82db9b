/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: the products of SwiGLU experts. Every product is D (m, n) = [D +] A (m, k) B (k, n) with one expert's sizes and strides; a
 * tile of D is one unit of work, and its sums over k are made in one fixed order, so results do not depend on the threads. */
#include <math.h>
#include <string.h>

#include "loom_cpu.h"

enum {
    TILE_M = 32,
    TILE_N = 64,
    TILE_K = 128, /* of A and B a tile as f32 is packed: 48 KiB of stack */
    MICRO_M = 4,
    MICRO_N = 8,          /* sums that are in registers at once */
    MATRIX_WORTH = 100000 /* multiplications that are worth waking a thread for */
};

/* Element (i, l) of A is a[i * a_m + l * a_k], (l, j) of B is b[l * b_k + j * b_n], (i, j) of D is d[i * n + j]. */
typedef struct product {
    const void *a, *b;
    void *d;
    int64_t m, n, k, a_m, a_k, b_k, b_n;
} product;

enum { GU, Y, DH, DX, DW_GU, DW_DOWN };

/* One operation on all experts. a, b, d: as the product's, whole matrices (b of the gradients of weights only). */
typedef struct work {
    const lf__loom_layer *layer;
    const int32_t *offset;
    const void *a, *b;
    void *d;
    int32_t op, accumulate;
    int64_t base[LF_MAX_EXPERTS];     /* elements of h in front of an expert's region */
    int64_t tile[LF_MAX_EXPERTS + 1]; /* tiles of the experts before it */
} work;

static int32_t out_dtype(const work *w) { return w->op >= DW_GU ? w->layer->grad_dtype : w->layer->dtype; }

static const void *read_at(const work *w, const void *base, int64_t element)
{
    return base ? (const char *)base + element * (int64_t)lf_dtype_bytes(w->layer->dtype) : NULL;
}
static void *write_at(const work *w, int64_t element)
{
    return w->d ? (char *)w->d + element * (int64_t)lf_dtype_bytes(w->layer->dtype) : NULL;
}

static product product_of(const work *w, int32_t i)
{
    const lf__loom_expert *e = &w->layer->expert[i];
    const int64_t f = e->hidden, d = w->layer->d, base = w->base[i];
    const int64_t row = (int64_t)w->offset[i] * d, r = w->offset[i + 1] - w->offset[i];
    switch (w->op) {
    case GU: return (product){read_at(w, w->a, row), e->w_gu, write_at(w, 2 * base), r, 2 * f, d, d, 1, 1, d};
    case Y: return (product){read_at(w, w->a, base), e->w_down, write_at(w, row), r, d, f, f, 1, 1, f};
    case DH: return (product){read_at(w, w->a, row), e->w_down, write_at(w, base), r, f, d, d, 1, f, 1};
    case DX: return (product){read_at(w, w->a, 2 * base), e->w_gu, write_at(w, row), r, d, 2 * f, 2 * f, 1, d, 1};
    case DW_GU: return (product){read_at(w, w->a, 2 * base), read_at(w, w->b, row), e->dw_gu, 2 * f, d, r, 1, 2 * f, d, 1};
    default: return (product){read_at(w, w->a, row), read_at(w, w->b, base), e->dw_down, d, f, r, 1, d, f, 1};
    }
}

/* ---- one tile -------------------------------------------------------------------------------------------------------- */

static float read_one(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? ((const float *)base)[i] : lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

/* to[l * width + i] = from[i * across + l * along] for i < n, l < k; zeros for n <= i < width. Reads along the unit stride. */
static void pack(float *restrict to, int64_t width, const void *from, int32_t dtype, int64_t across, int64_t along, int64_t n,
                 int64_t k)
{
    if (n < width) memset(to, 0, (size_t)(k * width) * sizeof *to);
    if (across == 1)
        for (int64_t l = 0; l < k; l++)
            for (int64_t i = 0; i < n; i++) to[l * width + i] = read_one(from, l * along + i, dtype);
    else
        for (int64_t i = 0; i < n; i++)
            for (int64_t l = 0; l < k; l++) to[l * width + i] = read_one(from, i * across + l * along, dtype);
}

/* sum (TILE_M, TILE_N) += a (k, TILE_M)^T b (k, TILE_N), the part at (i, j). */
static void micro(float *restrict sum, const float *restrict a, const float *restrict b, int64_t k)
{
    float acc[MICRO_M][MICRO_N] = {{0}};
    for (int64_t l = 0; l < k; l++)
        for (int32_t i = 0; i < MICRO_M; i++)
            for (int32_t j = 0; j < MICRO_N; j++) acc[i][j] += a[l * TILE_M + i] * b[l * TILE_N + j];
    for (int32_t i = 0; i < MICRO_M; i++)
        for (int32_t j = 0; j < MICRO_N; j++) sum[i * TILE_N + j] += acc[i][j];
}

static const void *skip(const void *base, int64_t element, int32_t dtype)
{
    return (const char *)base + element * (int64_t)lf_dtype_bytes(dtype);
}

/* Rows [i0, i0 + m) and columns [j0, j0 + n) of D. */
static void run_tile(const work *w, const product *p, int64_t i0, int64_t j0, int64_t m, int64_t n)
{
    float a[TILE_K * TILE_M], b[TILE_K * TILE_N], sum[TILE_M * TILE_N] = {0}, before[TILE_N];
    const int32_t dtype = w->layer->dtype, out = out_dtype(w);
    for (int64_t l = 0, k; l < p->k; l += k) {
        k = p->k - l < TILE_K ? p->k - l : TILE_K;
        pack(a, TILE_M, skip(p->a, i0 * p->a_m + l * p->a_k, dtype), dtype, p->a_m, p->a_k, m, k);
        pack(b, TILE_N, skip(p->b, j0 * p->b_n + l * p->b_k, dtype), dtype, p->b_n, p->b_k, n, k);
        for (int64_t i = 0; i < m; i += MICRO_M)
            for (int64_t j = 0; j < n; j += MICRO_N) micro(sum + i * TILE_N + j, a + i, b + j, k);
    }
    for (int64_t i = 0; i < m; i++) {
        const int64_t first = (i0 + i) * p->n + j0;
        float *row = sum + i * TILE_N;
        if (w->accumulate) {
            const float *d = lf__loom_load(out, p->d, first, n, before);
            for (int64_t j = 0; j < n; j++) row[j] += d[j];
        }
        lf__loom_store(out, p->d, first, n, row);
    }
}

static int64_t tiles_across(const product *p) { return (p->n + TILE_N - 1) / TILE_N; }

static void run_nth_tile(void *user, int64_t n)
{
    const work *w = user;
    int32_t i = 0;
    while (w->tile[i + 1] <= n) i++;
    const product p = product_of(w, i);
    const int64_t mine = n - w->tile[i], i0 = mine / tiles_across(&p) * TILE_M, j0 = mine % tiles_across(&p) * TILE_N;
    run_tile(w, &p, i0, j0, p.m - i0 < TILE_M ? p.m - i0 : TILE_M, p.n - j0 < TILE_N ? p.n - j0 : TILE_N);
}

/* ---- one operation ---------------------------------------------------------------------------------------------------- */

static void multiply(const lf__loom_layer *layer, const int32_t *offset, int32_t op, const void *a, const void *b, void *d,
                     int32_t accumulate)
{
    work w = {.layer = layer, .offset = offset, .a = a, .b = b, .d = d, .op = op, .accumulate = accumulate};
    int64_t base = 0;
    double cost = 0;
    for (int32_t i = 0; i < layer->n_experts; i++) {
        w.base[i] = base;
        base += (int64_t)(offset[i + 1] - offset[i]) * layer->expert[i].hidden;
        const product p = product_of(&w, i);
        const int64_t n = (p.m + TILE_M - 1) / TILE_M * tiles_across(&p);
        /* An expert without rows has a gradient of zeros, which is not worth adding. */
        w.tile[i + 1] = w.tile[i] + (p.k == 0 && accumulate ? 0 : n);
        cost += (double)p.m * (double)p.n * (double)p.k;
    }
    lf__parallel(cost < 2 * MATRIX_WORTH ? 1 : lf__loom_threads(), w.tile[layer->n_experts], run_nth_tile, &w);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------------------------------- */

/* Forward: dh and dgu are NULL. Backward: h may be dh, or NULL where it is not wanted. */
typedef struct swiglu {
    const lf__loom_layer *layer;
    const int32_t *offset;
    const void *gu, *dh;
    void *h, *dgu;
} swiglu;

/* g, u: (n). h = silu(g) u; with dh, du = dh silu(g) and dg = dh u silu'(g) too. */
static void swiglu_tile(const float *g, const float *u, const float *dh, int64_t n, float *h, float *dg, float *du)
{
    for (int64_t j = 0; j < n; j++) {
        const float gate = g[j], up = u[j], s = 1 / (1 + expf(-gate)), silu = gate * s;
        if (dh) {
            dg[j] = dh[j] * up * s * (1 + gate * (1 - s));
            du[j] = dh[j] * silu;
        }
        h[j] = silu * up;
    }
}

/* h_at: elements of h in front of the row. */
static void swiglu_row(const swiglu *s, int64_t h_at, int64_t f)
{
    float g_tile[LF_LOOM_TILE], u_tile[LF_LOOM_TILE], dh_tile[LF_LOOM_TILE];
    float h[LF_LOOM_TILE], dg[LF_LOOM_TILE], du[LF_LOOM_TILE];
    const int32_t dtype = s->layer->dtype;
    for (int64_t j = 0, n; j < f; j += n) {
        n = f - j < LF_LOOM_TILE ? f - j : LF_LOOM_TILE;
        const float *g = lf__loom_load(dtype, s->gu, 2 * h_at + j, n, g_tile);
        const float *u = lf__loom_load(dtype, s->gu, 2 * h_at + f + j, n, u_tile);
        const float *dh = s->dh ? lf__loom_load(dtype, s->dh, h_at + j, n, dh_tile) : NULL;
        swiglu_tile(g, u, dh, n, h, dg, du);
        if (s->h) lf__loom_store(dtype, s->h, h_at + j, n, h);
        if (!dh) continue;
        lf__loom_store(dtype, s->dgu, 2 * h_at + j, n, dg);
        lf__loom_store(dtype, s->dgu, 2 * h_at + f + j, n, du);
    }
}

static void swiglu_span(const void *user, int64_t from, int64_t to)
{
    const swiglu *s = user;
    int64_t base = 0;
    for (int32_t i = 0; i < s->layer->n_experts; i++) {
        const int64_t first = s->offset[i], end = s->offset[i + 1], f = s->layer->expert[i].hidden;
        for (int64_t r = from > first ? from : first; r < end && r < to; r++) swiglu_row(s, base + (r - first) * f, f);
        base += (end - first) * f;
    }
}

static void run_swiglu(const swiglu *s)
{
    int64_t most = 1;
    for (int32_t i = 0; i < s->layer->n_experts; i++)
        if (s->layer->expert[i].hidden > most) most = s->layer->expert[i].hidden;
    lf__loom_spans(s->offset[s->layer->n_experts], 8 * most, swiglu_span, s);
}

/* ---- the table's entries ---------------------------------------------------------------------------------------------- */

lf_status lf__loom_cpu_experts_open(void *context, const lf__loom_layer *layer, void **plan)
{
    (void)context;
    *plan = (void *)layer; /* which is all it takes */
    return LF_OK;
}

void lf__loom_cpu_experts_close(void *context, void *plan) { (void)context, (void)plan; }

static lf_status check_offset(const lf__loom_layer *layer, const int32_t *offset)
{
    LF_CHECK_ARG(offset[0] == 0, "offset[0] is %d, expected 0", offset[0]);
    for (int32_t i = 0; i < layer->n_experts; i++)
        LF_CHECK_ARG(offset[i + 1] >= offset[i], "offset[%d] is %d behind %d, expected no decrease", i + 1, offset[i + 1],
                     offset[i]);
    LF_CHECK_ARG(offset[layer->n_experts] <= layer->max_rows, "offset[%d] is %d, expected at most max_rows, %lld",
                 layer->n_experts, offset[layer->n_experts], (long long)layer->max_rows);
    return LF_OK;
}

lf_status lf__loom_cpu_experts_forward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_experts_args *a = &args->experts;
    const lf__loom_layer *layer = a->plan;
    lf_status rc = check_offset(layer, a->offset);
    if (rc < 0) return rc;
    multiply(layer, a->offset, GU, a->xs, NULL, a->gu, 0);
    run_swiglu(&(swiglu){.layer = layer, .offset = a->offset, .gu = a->gu, .h = a->h});
    multiply(layer, a->offset, Y, a->h, NULL, a->ys, 0);
    return LF_OK;
}

lf_status lf__loom_cpu_experts_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_experts_args *a = &args->experts;
    const lf__loom_layer *layer = a->plan;
    lf_status rc = check_offset(layer, a->offset);
    if (rc < 0) return rc;
    multiply(layer, a->offset, DH, a->dys, NULL, a->dh, 0);
    void *again = a->h_in ? NULL : a->dh;
    run_swiglu(&(swiglu){.layer = layer, .offset = a->offset, .gu = a->gu_in, .dh = a->dh, .h = again, .dgu = a->dgu});
    multiply(layer, a->offset, DX, a->dgu, NULL, a->dxs, 0);
    if (!layer->expert[0].dw_gu) return LF_OK;
    multiply(layer, a->offset, DW_GU, a->dgu, a->xs, NULL, a->accumulate);
    multiply(layer, a->offset, DW_DOWN, a->dys, again ? again : a->h_in, NULL, a->accumulate);
    return LF_OK;
}
