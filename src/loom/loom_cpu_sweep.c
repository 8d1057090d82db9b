/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: AdamW, sums of squares, clipping, adding gradients. Pieces are cut into blocks of LF_LOOM_BLOCK elements; a block is one unit of
 * work, and of summation, so results do not depend on which thread took it. */
#include <math.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "loom_cpu.h"
#include "loom_math.h"

/* The piece that a block belongs to: the last one that starts at or before it and is not empty. */
static const lf__loom_piece *piece_of(const lf__loom_sweep_args *a, int64_t block)
{
    int32_t low = 0, high = a->n_pieces - 1;
    while (low < high) {
        int32_t mid = high - (high - low) / 2;
        if (a->pieces[mid].first_block <= block) low = mid;
        else high = mid - 1;
    }
    return &a->pieces[low];
}

/* x: (n), replaced by its square root. sqrtf may set errno, which keeps a loop around it from being vectorised; both ways are
 * rounded correctly, so they give the same bits. */
static void root_tile(float *x, int64_t n)
{
    int64_t i = 0;
#ifdef __SSE2__
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(x + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
#endif
    for (; i < n; i++) x[i] = sqrtf(x[i]);
}

/* p, m, v, g: (n), n at most a tile. PyTorch's order: decay, lerp, addcmul, sqrt / bias + eps, addcdiv. */
static void adamw_tile(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, int64_t n, lf_adamw h)
{
    float root[LF_LOOM_TILE];
    for (int64_t i = 0; i < n; i++) {
        const float grad = g[i] * h.grad_scale;
        m[i] = m[i] + h.beta1_rest * (grad - m[i]);
        v[i] = v[i] * h.beta2 + h.beta2_rest * grad * grad;
        root[i] = v[i];
    }
    root_tile(root, n);
    for (int64_t i = 0; i < n; i++) {
        const float denom = root[i] / h.bias2_sqrt + h.eps;
        const float move = h.step_size * m[i] / (denom != 0 ? denom : INFINITY);
        p[i] = p[i] * h.decay - move;
    }
}

/* Moments of elements [at, at + n) in bf16: as f32, updated, and back, with the weights on the way. */
static void adamw_bf16_tile(const lf__loom_piece *piece, int64_t at, float *p, const float *g, int64_t n, lf_adamw h)
{
    float m[LF_LOOM_TILE], v[LF_LOOM_TILE];
    uint16_t *to_m = (uint16_t *)piece->exp_avg + at, *to_v = (uint16_t *)piece->exp_avg_sq + at;
    const uint32_t key = lf__loom_round_key(h.step, piece->klass);
    lf__loom_load(LF_DTYPE_BF16, to_m, 0, n, m);
    lf__loom_load(LF_DTYPE_BF16, to_v, 0, n, v);
    adamw_tile(p, m, v, g, n, h);
    for (int64_t i = 0; i < n; i++) {
        const uint32_t word = lf__loom_round_word(key, piece->first + at + i);
        to_m[i] = lf__loom_round_randomly(m[i], word);
        to_v[i] = lf__loom_round_randomly(v[i], word >> 16);
    }
}

static void adamw_block(void *user, int64_t block)
{
    const lf__loom_sweep_args *a = user;
    const lf__loom_piece *piece = piece_of(a, block);
    const lf_adamw hyper = *a->hyper;
    if (isnan(hyper.grad_scale)) return; /* skip the step */
    float grad_tile[LF_LOOM_TILE];
    float *master = piece->master;
    int64_t at = (block - piece->first_block) * LF_LOOM_BLOCK, end = at + LF_LOOM_BLOCK;
    if (end > piece->count) end = piece->count;
    for (int64_t n; at < end; at += n) {
        n = end - at < LF_LOOM_TILE ? end - at : LF_LOOM_TILE;
        const float *g = lf__loom_load(piece->grad_dtype, piece->grad, at, n, grad_tile);
        if (piece->moments_dtype == LF_DTYPE_BF16) adamw_bf16_tile(piece, at, master + at, g, n, hyper);
        else adamw_tile(master + at, (float *)piece->exp_avg + at, (float *)piece->exp_avg_sq + at, g, n, hyper);
        if (piece->weight_dtype != LF_DTYPE_F32) lf__loom_store(piece->weight_dtype, piece->weight, at, n, master + at);
    }
}

/* A sweep of one block is not worth waking anyone for. */
static int32_t sweep_threads(int64_t n_blocks) { return n_blocks < 4 ? 1 : lf__loom_threads(); }

lf_status lf__loom_cpu_adamw(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_sweep_args a = args->sweep;
    lf__parallel(sweep_threads(a.n_blocks), a.n_blocks, adamw_block, &a);
    return LF_OK;
}

/* Lanes in the source fix the order and still vectorise. */
enum { LANES = 8 };
static void sumsq_block(void *user, int64_t block)
{
    const lf__loom_sweep_args *a = user;
    const lf__loom_piece *piece = piece_of(a, block);
    float tile[LF_LOOM_TILE];
    double acc[LANES] = {0};
    int64_t at = (block - piece->first_block) * LF_LOOM_BLOCK, end = at + LF_LOOM_BLOCK;
    if (end > piece->count) end = piece->count;
    for (int64_t n; at < end; at += n) {
        n = end - at < LF_LOOM_TILE ? end - at : LF_LOOM_TILE;
        const float *x = lf__loom_load(piece->grad_dtype, piece->grad, at, n, tile);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int32_t j = 0; j < LANES; j++) acc[j] += (double)x[i + j] * (double)x[i + j];
        for (int32_t j = 0; i + j < n; j++) acc[j] += (double)x[i + j] * (double)x[i + j];
    }
    for (int32_t half = LANES / 2; half > 0; half /= 2)
        for (int32_t j = 0; j < half; j++) acc[j] += acc[j + half];
    a->partial[block] = acc[0];
}

lf_status lf__loom_cpu_sumsq(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_sweep_args a = args->sweep;
    double sum = 0;
    lf__parallel(sweep_threads(a.n_blocks), a.n_blocks, sumsq_block, &a);
    for (int64_t b = 0; b < a.n_blocks; b++) sum += a.partial[b];
    *a.out = sum;
    return LF_OK;
}

static void add_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_add_args *a = user;
    float src_tile[LF_LOOM_TILE], dst_tile[LF_LOOM_TILE], scaled[LF_LOOM_TILE], sum[LF_LOOM_TILE];
    for (int64_t n; from < to; from += n) {
        n = to - from < LF_LOOM_TILE ? to - from : LF_LOOM_TILE;
        const float *src = lf__loom_load(a->src_dtype, a->src, from, n, src_tile);
        if (a->scale) {
            for (int64_t i = 0; i < n; i++) scaled[i] = *a->scale * src[i];
            src = scaled;
        }
        if (a->accumulate) {
            const float *dst = lf__loom_load(a->dst_dtype, a->dst, from, n, dst_tile);
            for (int64_t i = 0; i < n; i++) sum[i] = dst[i] + src[i];
            src = sum;
        }
        lf__loom_store(a->dst_dtype, a->dst, from, n, src);
    }
}

lf_status lf__loom_cpu_add(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_spans(args->add.count, 1, add_span, &args->add);
    return LF_OK;
}

lf_status lf__loom_cpu_clip(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_clip_args *a = &args->clip;
    const double norm = fabs((double)a->hyper[0].grad_scale) * sqrt(*a->sumsq);
    double factor = a->max_norm > 0 ? a->max_norm / (norm + 1e-6) : 1;
    if (factor > 1) factor = 1;
    *a->norm = (float)norm;
    for (int32_t i = 0; i < a->n_hyper; i++)
        a->hyper[i].grad_scale = isfinite(*a->norm) ? (float)((double)a->hyper[i].grad_scale * factor) : (float)NAN;
    return LF_OK;
}

/* ---- shared by the CPU's kernels ------------------------------------------------------------------------------------- */

typedef struct span_job {
    lf__loom_span_fn fn;
    const void *user;
    int64_t n, grain;
} span_job;

static void run_span(void *user, int64_t i)
{
    const span_job *job = user;
    int64_t from = i * job->grain, to = from + job->grain;
    job->fn(job->user, from, to < job->n ? to : job->n);
}

void lf__loom_spans(int64_t n, int64_t cost, lf__loom_span_fn fn, const void *user)
{
    enum { WORTH = 32768 }; /* element operations: some 10 µs */
    span_job job = {fn, user, n, cost < WORTH ? WORTH / cost : 1};
    int64_t n_spans = (n + job.grain - 1) / job.grain;
    if (n_spans <= 2) fn(user, 0, n);
    else lf__parallel(lf__loom_threads(), n_spans, run_span, &job);
}

const lf__loom_kernels lf__loom_cpu = {
    .size = sizeof(lf__loom_kernels),
    .layout = LF_LOOM_LAYOUT,
    .name = "cpu",
    .router = lf__loom_cpu_router,
    .router_backward = lf__loom_cpu_router_backward,
    .route = lf__loom_cpu_route,
    .sort = lf__loom_cpu_sort,
    .route_backward = lf__loom_cpu_route_backward,
    .permute = lf__loom_cpu_permute,
    .permute_backward = lf__loom_cpu_permute_backward,
    .combine = lf__loom_cpu_combine,
    .combine_backward = lf__loom_cpu_combine_backward,
    .adamw = lf__loom_cpu_adamw,
    .sumsq = lf__loom_cpu_sumsq,
    .add = lf__loom_cpu_add,
    .clip = lf__loom_cpu_clip,
    .add_norm = lf__loom_cpu_add_norm,
    .combine_add_norm = lf__loom_cpu_combine_add_norm,
    .add_norm_backward = lf__loom_cpu_add_norm_backward,
    .cross_entropy = lf__loom_cpu_cross_entropy,
    .experts_open = lf__loom_cpu_experts_open,
    .experts_close = lf__loom_cpu_experts_close,
    .experts_forward = lf__loom_cpu_experts_forward,
    .experts_backward = lf__loom_cpu_experts_backward,
};
