/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: AdamW, sums of squares, clipping, adding gradients. The pieces of a sweep travel in the kernel's parameters, so a launch needs no
 * copy and a captured graph keeps them. */
#include "loom/loom_math.h"
#include "loom_cuda_vec.cuh"

enum {
    THREADS = 256,
    ADAMW_TILE = 8192,  /* elements of a block: four rounds of eight a thread */
    SUMSQ_TILE = 16384, /* elements that a block adds before it looks for its next piece */
    ADD_TILE = 8192,
    SUMSQ_BLOCKS = 528, /* at most: four on each of 132 units. Fixed, so that the order of sums is the same on all devices */
    SHORT_TABLE = 56,   /* pieces of one launch: in 4 KiB of parameters, */
    LONG_TABLE = 454,   /* and in 32 KiB */
    UNALIGNED = 8,
};
static_assert(SUMSQ_BLOCKS * sizeof(double) <= LF_LOOM_CUDA_SCRATCH, "partial sums fit the scratch");

/* Elements [head, head + 8 whole8) lie on 16 bytes in every plane; head is UNALIGNED where no such place exists. */
struct piece {
    void *weight, *grad;
    float *master;
    void *exp_avg, *exp_avg_sq;
    int64_t count, first; /* first: element of the class */
    int32_t klass;
    int32_t first_tile; /* tiles in the pieces before it */
    int8_t weight_bf16, grad_bf16, head, reserved;

    __host__ __device__ int64_t whole8() const { return head == UNALIGNED || count <= head ? 0 : (count - head) / 8; }
};

template <int ROOM> struct table {
    piece pieces[ROOM];
    const lf_adamw *hyper;
    double *partial;
    int32_t n, n_tiles, add; /* tiles up to and with the last piece; add: to `partial` rather than replace */
};
static_assert(sizeof(table<SHORT_TABLE>) <= 4096 && sizeof(table<LONG_TABLE>) <= 32764, "tables fit a launch's parameters");

/* The last piece that starts at or before the tile. None is empty. */
template <int ROOM> __device__ __forceinline__ const piece &piece_of(const table<ROOM> &t, int32_t tile)
{
    int32_t low = 0, high = t.n - 1;
    while (low < high) {
        const int32_t mid = (low + high + 1) / 2;
        if (t.pieces[mid].first_tile <= tile) low = mid;
        else high = mid - 1;
    }
    return t.pieces[low];
}

/* fn(i) for the elements of a tile of an unaligned piece. */
template <int TILE, typename F> __device__ __forceinline__ void each_element(int64_t count, int64_t tile, const F &fn)
{
    const int64_t end = min((tile + 1) * TILE, count);
#pragma unroll 4
    for (int64_t i = tile * TILE + threadIdx.x; i < end; i += THREADS) fn(i);
}

/* fn(i) for the elements before and behind the groups of eight, at most seven each. */
template <typename F> __device__ __forceinline__ void each_edge(int64_t count, int32_t head, int64_t whole8, const F &fn)
{
    const int64_t x = threadIdx.x;
    if (x < 8) {
        if (x < min((int64_t)head, count)) fn(x);
    } else if (x < 16 && head + 8 * whole8 + x - 8 < count) {
        fn(head + 8 * whole8 + x - 8);
    }
}

/* eight(i) for the groups of a tile, i their first element, and one(i) for all that is in no group: the first tile of a piece
 * takes its edges. */
template <int TILE, typename F8, typename F1>
__device__ __forceinline__ void walk(int64_t count, int32_t head, int64_t whole8, int64_t tile, const F8 &eight, const F1 &one)
{
    if (head == UNALIGNED) {
        each_element<TILE>(count, tile, one);
        return;
    }
    const int64_t end = min((tile + 1) * (TILE / 8), whole8);
#pragma unroll 1
    for (int64_t i = tile * (TILE / 8) + threadIdx.x; i < end; i += THREADS) eight(head + 8 * i);
    if (tile == 0) each_edge(count, head, whole8, one);
}

/* ---- AdamW ----------------------------------------------------------------------------------------------------------- */

/* PyTorch's order: decay, lerp, addcmul, sqrt / bias + eps, addcdiv; every operation rounded by itself, as on the CPU. */
__device__ __forceinline__ void adamw_element(float &p, float &m, float &v, float g, const lf_adamw &h)
{
    const float grad = times(g, h.grad_scale);
    m = plus(m, times(h.beta1_rest, minus(grad, m)));
    v = plus(times(v, h.beta2), times(times(h.beta2_rest, grad), grad));
    const float denom = plus(over(__fsqrt_rn(v), h.bias2_sqrt), h.eps);
    const float move = over(times(h.step_size, m), denom != 0 ? denom : INFINITY);
    p = minus(times(p, h.decay), move);
}

/* Moments back to where they came from; those in bf16 by the words of elements [element, …). */
__device__ __forceinline__ void store_moments(float *to_m, float *to_v, const float (&m)[8], const float (&v)[8], uint32_t,
                                              int64_t)
{
    store8(to_m, m);
    store8(to_v, v);
}

__device__ __forceinline__ void store_moments(bf16 *to_m, bf16 *to_v, const float (&m)[8], const float (&v)[8], uint32_t key,
                                              int64_t element)
{
    uint32_t a[4], b[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t low = lf__loom_round_word(key, element + 2 * j), high = lf__loom_round_word(key, element + 2 * j + 1);
        a[j] = lf__loom_round_randomly(m[2 * j], low) | (uint32_t)lf__loom_round_randomly(m[2 * j + 1], high) << 16;
        b[j] = lf__loom_round_randomly(v[2 * j], low >> 16) | (uint32_t)lf__loom_round_randomly(v[2 * j + 1], high >> 16) << 16;
    }
    store16(to_m, make_uint4(a[0], a[1], a[2], a[3]));
    store16(to_v, make_uint4(b[0], b[1], b[2], b[3]));
}

__device__ __forceinline__ void store_moment(float &to_m, float &to_v, float m, float v, uint32_t, int64_t)
{
    to_m = m, to_v = v;
}
__device__ __forceinline__ void store_moment(bf16 &to_m, bf16 &to_v, float m, float v, uint32_t key, int64_t element)
{
    const uint32_t word = lf__loom_round_word(key, element);
    to_m.bits = lf__loom_round_randomly(m, word);
    to_v.bits = lf__loom_round_randomly(v, word >> 16);
}

/* G: gradients, M: moments. */
template <typename G, typename M> __device__ __forceinline__ void adamw_tile(const piece &p, int64_t tile, const lf_adamw *hyper)
{
    const lf_adamw h = *hyper;
    if (isnan(h.grad_scale)) return; /* skip the step */
    float *const master = p.master;
    M *const exp_avg = (M *)p.exp_avg, *const exp_avg_sq = (M *)p.exp_avg_sq;
    const int64_t first = p.first;
    const uint32_t key = sizeof(M) == 2 ? lf__loom_round_key(h.step, p.klass) : 0;
    const G *const grad = (const G *)p.grad;
    bf16 *const weight = p.weight_bf16 ? (bf16 *)p.weight : nullptr;
    const auto eight = [&](int64_t i) {
        float g[8], w[8], m[8], v[8];
        load8(grad + i, g);
        load8(exp_avg + i, m);
        load8(exp_avg_sq + i, v);
        load8(master + i, w);
#pragma unroll
        for (int j = 0; j < 8; j++) adamw_element(w[j], m[j], v[j], g[j], h);
        store_moments(exp_avg + i, exp_avg_sq + i, m, v, key, first + i);
        store8(master + i, w);
        if (weight) store8(weight + i, w);
    };
    const auto one = [&](int64_t i) {
        float m = widen(exp_avg[i]), v = widen(exp_avg_sq[i]);
        adamw_element(master[i], m, v, widen(grad[i]), h);
        store_moment(exp_avg[i], exp_avg_sq[i], m, v, key, first + i);
        if (weight) narrow(master[i], weight[i]);
    };
    walk<ADAMW_TILE>(p.count, p.head, p.whole8(), tile, eight, one);
}

template <int ROOM, typename M> __global__ void __launch_bounds__(THREADS) loom_adamw(const __grid_constant__ table<ROOM> t)
{
    const int32_t tile = t.pieces[0].first_tile + (int32_t)blockIdx.x;
    const piece &p = piece_of(t, tile);
    if (p.grad_bf16) adamw_tile<bf16, M>(p, tile - p.first_tile, t.hyper);
    else adamw_tile<float, M>(p, tile - p.first_tile, t.hyper);
}

/* ---- sum of squares -------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ double block_sum(double x)
{
    __shared__ double warps[THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) sum += warps[w];
    return sum;
}

/* Two sums: neighbours do not wait for one another. */
template <typename T> __device__ __forceinline__ void sumsq_tile(const piece &p, int64_t tile, double (&sum)[2])
{
    const T *const x = (const T *)p.grad;
    const int64_t whole = p.whole8();
    const auto one = [&](int64_t i) { sum[0] = fma((double)widen(x[i]), (double)widen(x[i]), sum[0]); };
    if (p.head == UNALIGNED) {
        each_element<SUMSQ_TILE>(p.count, tile, one);
        return;
    }
    constexpr int N = 16 / sizeof(T), AT_ONCE = 4; /* packs of 16 bytes; all loads of a round are made before the first sum */
    const pack<T, N> *const packs = (const pack<T, N> *)(x + p.head);
    const int64_t end = min((tile + 1) * (SUMSQ_TILE / N), whole * (8 / N));
#pragma unroll 1
    for (int64_t i = tile * (SUMSQ_TILE / N) + threadIdx.x; i < end; i += AT_ONCE * THREADS) {
        uint4 raw[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            raw[u] = make_uint4(0, 0, 0, 0);
            if (i + u * THREADS < end) raw[u] = __ldcs((const uint4 *)(packs + i + u * THREADS));
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float f[N];
            reinterpret_cast<const pack<T, N> *>(&raw[u])->unpack(f);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j % 2] = fma((double)f[j], (double)f[j], sum[j % 2]);
        }
    }
    if (tile == 0) each_edge(p.count, p.head, whole, one);
}

/* partial: (gridDim.x) f64. Block b adds the tiles whose number modulo the grid is b, in order. */
template <int ROOM> __global__ void __launch_bounds__(THREADS, 4) loom_sumsq(const __grid_constant__ table<ROOM> t)
{
    const int32_t start = t.pieces[0].first_tile, grid = (int32_t)gridDim.x, b = (int32_t)blockIdx.x;
    double sum[2] = {0, 0};
    for (int64_t tile = start + (b - start % grid + grid) % grid; tile < t.n_tiles; tile += grid) {
        const piece &p = piece_of(t, (int32_t)tile);
        if (p.grad_bf16) sumsq_tile<bf16>(p, tile - p.first_tile, sum);
        else sumsq_tile<float>(p, tile - p.first_tile, sum);
    }
    const double all = block_sum(sum[0] + sum[1]);
    if (threadIdx.x == 0) t.partial[b] = t.add ? t.partial[b] + all : all;
}

__global__ void __launch_bounds__(THREADS) loom_sumsq_finish(const double *partial, int32_t n, double *out)
{
    double sum = 0;
    for (int32_t i = threadIdx.x; i < n; i += THREADS) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

/* ---- launching sweeps ------------------------------------------------------------------------------------------------ */

/* The first element that lies on 16 bytes in all planes, UNALIGNED where there is none. */
static int8_t head_of(const piece &p, bool all_planes, uint32_t moment_bytes)
{
    for (int8_t head = 0; head < 8; head++) {
        uintptr_t low = (uintptr_t)p.grad + (uintptr_t)head * (p.grad_bf16 ? 2 : 4);
        if (all_planes) {
            low |= (uintptr_t)p.master + 4u * head;
            low |= ((uintptr_t)p.exp_avg + moment_bytes * head) | ((uintptr_t)p.exp_avg_sq + moment_bytes * head);
            if (p.weight_bf16) low |= (uintptr_t)p.weight + 2u * head;
        }
        if ((low & 15) == 0) return head;
    }
    return UNALIGNED;
}

static piece piece_from(const lf__loom_piece &from, int32_t first_tile, bool all_planes)
{
    piece p = {from.weight,
               from.grad,
               (float *)from.master,
               from.exp_avg,
               from.exp_avg_sq,
               from.count,
               from.first,
               from.klass,
               first_tile,
               (int8_t)(from.weight_dtype == LF_DTYPE_BF16),
               (int8_t)(from.grad_dtype == LF_DTYPE_BF16),
               0,
               0};
    p.head = head_of(p, all_planes, from.moments_dtype == LF_DTYPE_BF16 ? 2 : 4);
    return p;
}

/* As many pieces from `from` on as fit, empty ones left out. Returns the first that is left; t->n_tiles goes on counting. */
template <int ROOM> static int32_t fill(table<ROOM> *t, const lf__loom_sweep_args *a, int32_t from, int32_t tile_elements)
{
    int32_t i = from;
    for (t->n = 0; i < a->n_pieces && t->n < ROOM; i++) {
        if (a->pieces[i].count == 0) continue;
        t->pieces[t->n++] = piece_from(a->pieces[i], t->n_tiles, a->hyper != nullptr);
        t->n_tiles += (int32_t)((a->pieces[i].count + tile_elements - 1) / tile_elements);
    }
    return i;
}

template <int ROOM, typename M> static lf_status launch_adamw(cudaStream_t stream, const lf__loom_sweep_args *a)
{
    table<ROOM> t;
    t.hyper = a->hyper;
    t.partial = nullptr;
    t.n_tiles = t.add = 0;
    for (int32_t i = 0; i < a->n_pieces;) {
        i = fill(&t, a, i, ADAMW_TILE);
        if (t.n == 0) break;
        loom_adamw<ROOM, M><<<(unsigned)(t.n_tiles - t.pieces[0].first_tile), THREADS, 0, stream>>>(t);
        lf_status rc = lf__cuda_launched("loom_adamw", stream, 0);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

lf_status lf__loom_cuda_adamw(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_sweep_args *a = &args->sweep;
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int before = lf__loom_cuda_enter(call);
    const bool few = a->n_pieces <= SHORT_TABLE, narrow = a->n_pieces > 0 && a->pieces[0].moments_dtype == LF_DTYPE_BF16;
    lf_status rc;
    if (narrow) rc = few ? launch_adamw<SHORT_TABLE, bf16>(stream, a) : launch_adamw<LONG_TABLE, bf16>(stream, a);
    else rc = few ? launch_adamw<SHORT_TABLE, float>(stream, a) : launch_adamw<LONG_TABLE, float>(stream, a);
    return lf__loom_cuda_leave(call, before, rc, "loom_adamw");
}

template <int ROOM>
static lf_status launch_sumsq(cudaStream_t stream, const lf__loom_sweep_args *a, double *partial, int32_t n_partial)
{
    table<ROOM> t;
    t.hyper = nullptr;
    t.partial = partial;
    t.n_tiles = t.add = 0;
    for (int32_t i = 0; i < a->n_pieces; t.add = 1) {
        i = fill(&t, a, i, SUMSQ_TILE);
        if (t.n == 0) break;
        loom_sumsq<ROOM><<<(unsigned)n_partial, THREADS, 0, stream>>>(t);
        lf_status rc = lf__cuda_launched("loom_sumsq", stream, 0);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

/* Blocks of the first stage: one a tile, up to their limit. 0 for nothing to sum. */
static int32_t sumsq_blocks(const lf__loom_sweep_args *a)
{
    int64_t tiles = 0;
    for (int32_t i = 0; i < a->n_pieces; i++) tiles += (a->pieces[i].count + SUMSQ_TILE - 1) / SUMSQ_TILE;
    return tiles < SUMSQ_BLOCKS ? (int32_t)tiles : SUMSQ_BLOCKS;
}

lf_status lf__loom_cuda_sumsq(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_sweep_args *a = &args->sweep;
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int32_t n_partial = sumsq_blocks(a);
    const int before = lf__loom_cuda_enter(call);
    void *scratch = nullptr;
    lf_status rc = lf__loom_cuda_scratch(call, &scratch);
    double *partial = (double *)scratch;
    if (rc == LF_OK)
        rc = a->n_pieces <= SHORT_TABLE ? launch_sumsq<SHORT_TABLE>(stream, a, partial, n_partial)
                                        : launch_sumsq<LONG_TABLE>(stream, a, partial, n_partial);
    if (rc == LF_OK) loom_sumsq_finish<<<1, THREADS, 0, stream>>>(partial, n_partial, a->out);
    return lf__loom_cuda_leave(call, before, rc, "loom_sumsq_finish");
}

/* ---- clipping --------------------------------------------------------------------------------------------------------- */

/* One warp. The CPU's arithmetic: each operation rounded by itself. */
__global__ void __launch_bounds__(32) loom_clip(const __grid_constant__ lf__loom_clip_args a)
{
    const double norm = __dmul_rn(fabs((double)a.hyper[0].grad_scale), __dsqrt_rn(*a.sumsq));
    double factor = a.max_norm > 0 ? __ddiv_rn(a.max_norm, __dadd_rn(norm, 1e-6)) : 1;
    if (factor > 1) factor = 1;
    __syncwarp(); /* all have read the first before any is replaced */
    if (threadIdx.x == 0) *a.norm = (float)norm;
    for (int32_t i = threadIdx.x; i < a.n_hyper; i += 32)
        a.hyper[i].grad_scale = isfinite((float)norm) ? (float)__dmul_rn((double)a.hyper[i].grad_scale, factor) : NAN;
}

lf_status lf__loom_cuda_clip(const lf__loom_call *call, const lf__loom_args *args)
{
    const int before = lf__loom_cuda_enter(call);
    loom_clip<<<1, 32, 0, (cudaStream_t)call->stream>>>(args->clip);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_clip");
}

/* ---- add ------------------------------------------------------------------------------------------------------------- */

template <typename D, typename S>
__global__ void __launch_bounds__(THREADS)
    loom_add(D *dst, const S *src, int64_t count, const float *scale, int32_t head, int32_t accumulate)
{
    const float factor = scale ? *scale : 1; /* times 1 changes no bits, but of a NaN */
    const int64_t whole8 = head == UNALIGNED || count <= head ? 0 : (count - head) / 8;
    const auto eight = [&](int64_t i) {
        float x[8], y[8];
        load8(src + i, x);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = times(factor, x[j]);
        if (accumulate) {
            load8(dst + i, y);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = plus(y[j], x[j]);
        }
        store8(dst + i, x);
    };
    const auto one = [&](int64_t i) {
        const float x = times(factor, widen(src[i]));
        narrow(accumulate ? plus(widen(dst[i]), x) : x, dst[i]);
    };
    walk<ADD_TILE>(count, head, whole8, blockIdx.x, eight, one);
}

template <typename D, typename S> static void launch_add(cudaStream_t stream, const lf__loom_add_args *a)
{
    int32_t head = 0;
    while (head < UNALIGNED && (((uintptr_t)a->dst + head * sizeof(D)) | ((uintptr_t)a->src + head * sizeof(S))) & 15) head++;
    loom_add<D, S><<<(unsigned)((a->count + ADD_TILE - 1) / ADD_TILE), THREADS, 0, stream>>>(
        (D *)a->dst, (const S *)a->src, a->count, a->scale, head, a->accumulate);
}

lf_status lf__loom_cuda_add(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_add_args *a = &args->add;
    if (a->count == 0) return LF_OK;
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const bool to_f32 = a->dst_dtype == LF_DTYPE_F32, from_f32 = a->src_dtype == LF_DTYPE_F32;
    const int before = lf__loom_cuda_enter(call);
    if (to_f32 && from_f32) launch_add<float, float>(stream, a);
    else if (to_f32) launch_add<float, bf16>(stream, a);
    else if (from_f32) launch_add<bf16, float>(stream, a);
    else launch_add<bf16, bf16>(stream, a);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_add");
}
