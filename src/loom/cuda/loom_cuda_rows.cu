/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: rows to their experts and back. A warp has one token (or one row) and walks its features in packs of 16 bytes, several
 * loads in flight; sums are f32, over a token's choices in order. Rows that are not multiples of 16 bytes, or start elsewhere,
 * are walked element by element. */
#include "loom_cuda_vec.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* What every kernel here needs; `units` packs a row. */
struct rows {
    const int32_t *row, *slot, *offset;
    const float *weight, *dlogits, *router;
    float *dweight;
    const void *a, *b;
    void *out;
    int64_t n, d, units;
    int32_t e, k;
};

/* A token's choices: where their rows are, and which of them are routed somewhere. */
template <int K> struct choices {
    int64_t place[K];
    float weight[K];
    bool live[K];
    __device__ __forceinline__ choices(const rows &r, int64_t token)
    {
        const int32_t limit = r.offset[r.e];
#pragma unroll
        for (int c = 0; c < K; c++) {
            const bool is = c < r.k;
            place[c] = is ? r.slot[token * r.k + c] : 0;
            weight[c] = is && r.weight ? r.weight[token * r.k + c] : 1;
            live[c] = is && place[c] < limit;
        }
    }
};

__device__ __forceinline__ int64_t my_warp() { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }

/* ---- permute --------------------------------------------------------------------------------------------------------- */

/* x: (n, d), xs: (n k, d). A token is read once and written k times. */
template <typename T, int N, int K> __global__ void __launch_bounds__(THREADS) loom_permute(const rows r)
{
    enum { UNROLL = 4 };
    const int64_t t = my_warp();
    if (t >= r.n) return;
    const choices<K> to(r, t);
    const T *x = (const T *)r.a + t * r.d;
    for (int64_t i = threadIdx.x % 32; i < r.units; i += 32 * UNROLL) {
        pack<T, N> p[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + 32 * u < r.units) p[u] = load_pack<T, N>(x, i + 32 * u);
#pragma unroll
        for (int c = 0; c < K; c++) {
            if (c >= r.k) break;
            T *xs = (T *)r.out + to.place[c] * r.d;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                pack<T, N> q = p[u];
                if (!to.live[c]) q.clear();
                if (i + 32 * u < r.units) store_pack<T, N>(xs, i + 32 * u, q);
            }
        }
    }
}

/* The same by sorted row, for callers that give no `slot`. */
template <typename T, int N> __global__ void __launch_bounds__(THREADS) loom_permute_rows(const rows r)
{
    enum { UNROLL = 4 };
    const int64_t to = my_warp();
    if (to >= r.n * r.k) return;
    const bool live = to < r.offset[r.e];
    const T *x = (const T *)r.a + (r.row[to] / r.k) * r.d;
    T *xs = (T *)r.out + to * r.d;
    for (int64_t i = threadIdx.x % 32; i < r.units; i += 32 * UNROLL) {
        pack<T, N> p[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            p[u].clear();
            if (live && i + 32 * u < r.units) p[u] = load_pack<T, N>(x, i + 32 * u);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + 32 * u < r.units) store_pack<T, N>(xs, i + 32 * u, p[u]);
    }
}

/* ---- gather and sum -------------------------------------------------------------------------------------------------- */

/* sum (N) += dlogits[t] router for features from `at` on, as the CPU has it; loom_cuda_dx.cu is faster where it fits. */
template <int N> __device__ __forceinline__ void add_router(const rows &r, int64_t t, int64_t at, float (&sum)[N])
{
    float part[N] = {};
    for (int32_t x = 0; x < r.e; x++) {
        const float g = __ldg(r.dlogits + t * r.e + x);
#pragma unroll
        for (int j = 0; j < N; j++) part[j] = plus(part[j], times(g, __ldg(r.router + x * r.d + at + j)));
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = plus(sum[j], part[j]);
}

/* out[t] = sum over c of weight[t, c] a[slot], without weights where there are none; plus the router's part where there is one. */
template <typename T, int N, int K, bool ROUTER> __global__ void __launch_bounds__(THREADS) loom_gather_sum(const rows r)
{
    enum { UNROLL = K <= 2 && !ROUTER ? 4 : 1 };
    const int64_t t = my_warp();
    if (t >= r.n) return;
    const choices<K> from(r, t);
    T *out = (T *)r.out + t * r.d;
    for (int64_t i = threadIdx.x % 32; i < r.units; i += 32 * UNROLL) {
        pack<T, N> p[UNROLL][K];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int c = 0; c < K; c++)
                if (from.live[c] && i + 32 * u < r.units)
                    p[u][c] = load_pack<T, N>((const T *)r.a + from.place[c] * r.d, i + 32 * u);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (i + 32 * u >= r.units) break;
            float sum[N] = {};
#pragma unroll
            for (int c = 0; c < K; c++) {
                if (!from.live[c]) continue;
                float x[N];
                p[u][c].unpack(x);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] = plus(sum[j], times(from.weight[c], x[j]));
            }
            if (ROUTER) add_router<N>(r, t, (i + 32 * u) * N, sum);
            pack<T, N> q;
            q.set(sum);
            store_pack<T, N>(out, i + 32 * u, q);
        }
    }
}

/* ---- backward of combine --------------------------------------------------------------------------------------------- */

/* ys: (n k, d), dy: (n, d) -> dys[slot] = weight dy[t], dweight[t, c] = <ys[slot], dy[t]>. A lane adds its features in order,
 * then the lanes are added as a tree. */
template <typename T, int N, int K> __global__ void __launch_bounds__(THREADS) loom_combine_backward(const rows r)
{
    enum { UNROLL = K <= 2 ? 2 : 1 };
    const int64_t t = my_warp();
    if (t >= r.n) return;
    const choices<K> at(r, t);
    const T *dy = (const T *)r.b + t * r.d;
    float dot[K] = {};
    for (int64_t i = threadIdx.x % 32; i < r.units; i += 32 * UNROLL) {
        pack<T, N> p[UNROLL], y[UNROLL][K];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (i + 32 * u >= r.units) break;
            p[u] = load_pack<T, N>(dy, i + 32 * u);
#pragma unroll
            for (int c = 0; c < K; c++)
                if (at.live[c]) y[u][c] = load_pack<T, N>((const T *)r.a + at.place[c] * r.d, i + 32 * u);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (i + 32 * u >= r.units) break;
            float g[N];
            p[u].unpack(g);
#pragma unroll
            for (int c = 0; c < K; c++) {
                if (c >= r.k) break;
                pack<T, N> q;
                q.clear();
                if (at.live[c]) {
                    float x[N], scaled[N];
                    y[u][c].unpack(x);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        dot[c] = fmaf(x[j], g[j], dot[c]);
                        scaled[j] = times(at.weight[c], g[j]);
                    }
                    q.set(scaled);
                }
                store_pack<T, N>((T *)r.out + at.place[c] * r.d, i + 32 * u, q);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < K; c++) {
        if (c >= r.k) break;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) dot[c] += __shfl_xor_sync(~0u, dot[c], step);
        if (threadIdx.x % 32 == 0) r.dweight[t * r.k + c] = dot[c];
    }
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

static rows rows_of(const lf__loom_rows_args *a, bool weighted)
{
    return rows{a->routing.row,
                a->routing.slot,
                a->routing.offset,
                weighted ? a->routing.weight : nullptr,
                a->dlogits,
                a->router,
                a->dweight,
                a->a,
                a->b,
                a->out,
                a->n,
                a->d,
                a->d,
                a->e,
                a->k};
}

/* Whether all rows start and end on 16 bytes. */
static bool whole_packs(const lf__loom_rows_args *a)
{
    const size_t row = (size_t)a->d * (a->dtype == LF_DTYPE_F32 ? 4 : 2);
    return (((uintptr_t)a->a | (uintptr_t)a->b | (uintptr_t)a->out | row) & 15) == 0;
}

enum operation { PERMUTE, PERMUTE_ROWS, GATHER_SUM, GATHER_SUM_ROUTER, COMBINE_BACKWARD };

template <typename T, int N, int K> static void launch(operation what, const rows &r, cudaStream_t stream)
{
    const int64_t warps = what == PERMUTE_ROWS ? r.n * r.k : r.n;
    const unsigned blocks = (unsigned)((warps + WARPS - 1) / WARPS);
    if (what == PERMUTE) loom_permute<T, N, K><<<blocks, THREADS, 0, stream>>>(r);
    else if (what == PERMUTE_ROWS) loom_permute_rows<T, N><<<blocks, THREADS, 0, stream>>>(r);
    else if (what == GATHER_SUM) loom_gather_sum<T, N, K, false><<<blocks, THREADS, 0, stream>>>(r);
    else if (what == GATHER_SUM_ROUTER) loom_gather_sum<T, N, K, true><<<blocks, THREADS, 0, stream>>>(r);
    else loom_combine_backward<T, N, K><<<blocks, THREADS, 0, stream>>>(r);
}

template <typename T> static void launch(operation what, const lf__loom_rows_args *a, bool weighted, cudaStream_t stream)
{
    constexpr int N = 16 / sizeof(T);
    rows r = rows_of(a, weighted);
    const bool packs = whole_packs(a);
    if (packs) r.units = a->d / N;
    if (packs && a->k <= 2) launch<T, N, 2>(what, r, stream);
    else if (packs) launch<T, N, LF_MAX_TOP_K>(what, r, stream);
    else if (a->k <= 2) launch<T, 1, 2>(what, r, stream);
    else launch<T, 1, LF_MAX_TOP_K>(what, r, stream);
}

static lf_status run(const lf__loom_call *call, operation what, const lf__loom_rows_args *a, bool weighted, const char *kernel)
{
    if (a->n == 0 || (a->d == 0 && what != COMBINE_BACKWARD)) return LF_OK;
    const int before = lf__loom_cuda_enter(call);
    const cudaStream_t stream = (cudaStream_t)call->stream;
    if (a->dtype == LF_DTYPE_F32) launch<float>(what, a, weighted, stream);
    else launch<bf16>(what, a, weighted, stream);
    return lf__loom_cuda_leave(call, before, LF_OK, kernel);
}

lf_status lf__loom_cuda_permute(const lf__loom_call *call, const lf__loom_args *args)
{
    return run(call, args->rows.routing.slot ? PERMUTE : PERMUTE_ROWS, &args->rows, false, "loom_permute");
}

lf_status lf__loom_cuda_permute_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_rows_args *a = &args->rows;
    if (!a->dlogits) return run(call, GATHER_SUM, a, false, "loom_gather_sum (backward of permute)");
    if (!lf__loom_cuda_dx_fits(a))
        return run(call, GATHER_SUM_ROUTER, a, false, "loom_gather_sum (backward of permute and router)");
    if (a->n == 0 || a->d == 0) return LF_OK;
    const int before = lf__loom_cuda_enter(call);
    lf__loom_cuda_dx(a, (cudaStream_t)call->stream);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_permute_backward_router");
}

lf_status lf__loom_cuda_combine(const lf__loom_call *call, const lf__loom_args *args)
{
    return run(call, GATHER_SUM, &args->rows, true, "loom_gather_sum (combine)");
}

lf_status lf__loom_cuda_combine_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    return run(call, COMBINE_BACKWARD, &args->rows, true, "loom_combine_backward");
}
