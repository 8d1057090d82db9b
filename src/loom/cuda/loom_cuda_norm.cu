/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: residual + RMSNorm. A row is held in registers by the 32, 128 or 512 threads that share it (4 packs of 16 bytes each),
 * so memory is read once and written once. Rows that are longer, or do not lie on 16 bytes, are walked element by element by a
 * warp, twice. */
#include "loom_cuda_vec.cuh"

enum { THREADS = 256, UNITS = 4, SHORT_PARTS = 256 };

/* A block's threads, and its rows at a time, where `lanes` threads share a row. */
template <int lanes> constexpr int threads_for = lanes == 32 ? THREADS : lanes;
template <int lanes> constexpr int rows_for = threads_for<lanes> / lanes;

/* The sum of x over the threads of a row: the same bits in all of them. */
template <int LANES> __device__ __forceinline__ float row_sum(float x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if constexpr (LANES > 32) {
        static_assert(LANES == threads_for<LANES>, "a block has one row");
        __shared__ float warps[LANES / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int w = 0; w < LANES / 32; w++) x += warps[w];
        __syncthreads(); /* before the next row's */
    }
    return x;
}

__device__ __forceinline__ float rstd_of(float squares, float d, float eps)
{
    return over(1, __fsqrt_rn(plus(over(squares, d), eps)));
}

/* N weights of a pack. */
template <int N> __device__ __forceinline__ void load_weight(const float *weight, int64_t pack_index, float (&w)[N])
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4 *>(weight + pack_index * N + i));
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
    }
}

/* ---- forward --------------------------------------------------------------------------------------------------------- */

struct norms {
    const void *x, *y; /* y: (n, d), or (n k, d) of a combine */
    const int32_t *slot, *offset;
    const float *gate, *weight;
    void *sum, *normed;
    float *rstd, eps;
    int64_t n, d;
    int32_t e, k;
};

/* A token's rows of ys: 0 for those that are routed nowhere, which are not read. K at least k. */
template <int K> struct choices {
    int64_t place[K > 0 ? K : 1];
    float gate[K > 0 ? K : 1];
    __device__ __forceinline__ choices(const norms &a, int64_t t)
    {
        if constexpr (K > 0) {
            const int32_t limit = a.offset[a.e];
#pragma unroll
            for (int c = 0; c < K; c++) {
                place[c] = c < a.k ? a.slot[t * a.k + c] : limit;
                gate[c] = c < a.k ? a.gate[t * a.k + c] : 0;
                if (place[c] >= limit) place[c] = -1;
            }
        }
    }
};

enum { NO_Y = -1, PLAIN_Y = 0 }; /* K of the kernels: also 2 and LF_MAX_TOP_K, for a combine */

/* s += y, or the weighted sum over a token's rows, in order of its choices. */
template <typename T, int N, int K, int FROM>
__device__ __forceinline__ void add_rows(float (&s)[N], const pack<T, N> (&q)[FROM], const choices<K> &from)
{
    float y[N] = {};
    if constexpr (K == PLAIN_Y) q[0].unpack(y);
    if constexpr (K > 0) { /* braces: without, nvcc drops the next loop too where this one is not compiled */
#pragma unroll
        for (int c = 0; c < K; c++) {
            if (from.place[c] < 0) continue;
            float x[N];
            q[c].unpack(x);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = plus(y[j], times(from.gate[c], x[j]));
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = plus(s[j], y[j]);
}

template <typename T, int LANES, int K>
__global__ void __launch_bounds__(threads_for<LANES>) loom_add_norm(const __grid_constant__ norms a)
{
    constexpr int N = 16 / sizeof(T), FROM = K == NO_Y ? 0 : K == PLAIN_Y ? 1 : K;
    const int64_t t = (int64_t)blockIdx.x * rows_for<LANES> + threadIdx.x / LANES;
    if (t >= a.n) return; /* whole warps; with more than a warp a row, no block */
    const int lane = threadIdx.x % LANES, units = (int)(a.d / N);
    const choices<K> from(a, t);
    pack<T, N> p[UNITS], q[UNITS][FROM ? FROM : 1];
    const auto load = [&](int u, int i) {
        p[u] = load_pack<T, N>((const T *)a.x + t * a.d, i);
        if constexpr (K == PLAIN_Y) q[u][0] = load_pack<T, N>((const T *)a.y + t * a.d, i);
        if constexpr (K > 0) {
#pragma unroll
            for (int c = 0; c < K; c++)
                if (from.place[c] >= 0) q[u][c] = load_pack<T, N>((const T *)a.y + from.place[c] * a.d, i);
        }
    };
    if constexpr (K <= 2) { /* all loads at once; with more choices there are enough in one unit */
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (lane + LANES * u < units) load(u, lane + LANES * u);
    }
    float squares = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = lane + LANES * u;
        if (i >= units) break;
        if constexpr (K > 2) load(u, i);
        float s[N];
        p[u].unpack(s);
        if constexpr (K != NO_Y) {
            add_rows<T, N, K>(s, q[u], from);
            p[u].set(s);
            store_pack<T, N>((T *)a.sum + t * a.d, i, p[u]);
            p[u].unpack(s); /* as it was rounded */
        }
#pragma unroll
        for (int j = 0; j < N; j++) squares = fmaf(s[j], s[j], squares);
    }
    const float rstd = rstd_of(row_sum<LANES>(squares), (float)a.d, a.eps);
    if (lane == 0) a.rstd[t] = rstd;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = lane + LANES * u;
        if (i >= units) break;
        float s[N], w[N];
        p[u].unpack(s);
        load_weight<N>(a.weight, i, w);
#pragma unroll
        for (int j = 0; j < N; j++) s[j] = times(times(s[j], rstd), w[j]);
        p[u].set(s);
        store_pack<T, N>((T *)a.normed + t * a.d, i, p[u]);
    }
}

/* Any d and any alignment. */
template <typename T, int K> __global__ void __launch_bounds__(THREADS) loom_add_norm_any(const __grid_constant__ norms a)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (t >= a.n) return;
    const choices<K> from(a, t);
    const T *const x = (const T *)a.x + t * a.d, *const ys = (const T *)a.y;
    T *const sum = K == NO_Y ? nullptr : (T *)a.sum + t * a.d;
    float squares = 0;
    for (int64_t i = threadIdx.x % 32; i < a.d; i += 32) {
        T s = x[i];
        if constexpr (K == PLAIN_Y) narrow(plus(widen(s), widen(ys[t * a.d + i])), s);
        if constexpr (K > 0) {
            float y = 0;
#pragma unroll
            for (int c = 0; c < K; c++)
                if (from.place[c] >= 0) y = plus(y, times(from.gate[c], widen(ys[from.place[c] * a.d + i])));
            narrow(plus(widen(s), y), s);
        }
        if constexpr (K != NO_Y) sum[i] = s;
        squares = fmaf(widen(s), widen(s), squares);
    }
    const float rstd = rstd_of(row_sum<32>(squares), a.d ? (float)a.d : 1, a.eps);
    if (threadIdx.x % 32 == 0) a.rstd[t] = rstd;
    for (int64_t i = threadIdx.x % 32; i < a.d; i += 32)
        narrow(times(times(widen(K == NO_Y ? x[i] : sum[i]), rstd), a.weight[i]), ((T *)a.normed + t * a.d)[i]);
}

/* ---- backward -------------------------------------------------------------------------------------------------------- */

struct norm_gradients {
    const void *sum, *dsum, *dnormed;
    const float *weight, *rstd;
    void *dx;
    float *partial;
    int64_t n, d;
};

/* An element of a row: xhat = sum rstd, g = dnormed weight. */
__device__ __forceinline__ float dx_of(float s, float dn, float w, float ds, float rstd, float mean)
{
    return ds + rstd * (dn * w - s * rstd * mean);
}

/* A block's sums by column, acc in the registers of each of its rows, added up into partial: (units N). */
template <int LANES, int N> __device__ __forceinline__ void leave_columns(const float (&acc)[UNITS][N], int units, float *partial)
{
    constexpr int ROWS = rows_for<LANES>, WIDTH = LANES * UNITS * N;
    __shared__ float columns[ROWS > 1 ? ROWS * WIDTH : 1];
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = lane + LANES * u;
        if (i >= units) break;
#pragma unroll
        for (int j = 0; j < N; j += 4)
            *reinterpret_cast<float4 *>((ROWS > 1 ? columns + row * WIDTH : partial) + i * N + j) =
                make_float4(acc[u][j], acc[u][j + 1], acc[u][j + 2], acc[u][j + 3]);
    }
    if constexpr (ROWS > 1) {
        __syncthreads();
        for (int i = threadIdx.x; i < units * N; i += threads_for<LANES>) {
            float sum = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum += columns[r * WIDTH + i];
            partial[i] = sum;
        }
    }
}

/* Block b has rows b, b + grid, … and leaves its sum of dnormed xhat in partial[b]. A thread reads what it writes, and reads
 * it first: dx may be dsum or dnormed. */
template <typename T, int LANES>
__global__ void __launch_bounds__(threads_for<LANES>, 512 / threads_for<LANES>)
    loom_add_norm_backward(const __grid_constant__ norm_gradients a)
{
    constexpr int N = 16 / sizeof(T), ROWS = rows_for<LANES>;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, units = (int)(a.d / N);
    float acc[UNITS][N] = {};
    for (int64_t t = (int64_t)blockIdx.x * ROWS + row; t < a.n; t += (int64_t)gridDim.x * ROWS) {
        pack<T, N> s[UNITS], dn[UNITS], ds[UNITS];
        const float rstd = a.rstd[t];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int i = lane + LANES * u;
            if (i >= units) break;
            s[u] = load_pack<T, N>((const T *)a.sum + t * a.d, i);
            dn[u] = load_own<T, N>((const T *)a.dnormed + t * a.d, i);
            ds[u].clear();
            if (a.dsum) ds[u] = load_own<T, N>((const T *)a.dsum + t * a.d, i);
        }
        float dot = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int i = lane + LANES * u;
            if (i >= units) break;
            float x[N], g[N], w[N];
            s[u].unpack(x);
            dn[u].unpack(g);
            load_weight<N>(a.weight, i, w);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float xhat = x[j] * rstd;
                acc[u][j] = fmaf(g[j], xhat, acc[u][j]);
                dot = fmaf(g[j] * w[j], xhat, dot);
            }
        }
        const float mean = row_sum<LANES>(dot) / (float)a.d;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int i = lane + LANES * u;
            if (i >= units) break;
            float x[N], g[N], w[N], d[N];
            s[u].unpack(x);
            dn[u].unpack(g);
            ds[u].unpack(d);
            load_weight<N>(a.weight, i, w);
#pragma unroll
            for (int j = 0; j < N; j++) d[j] = dx_of(x[j], g[j], w[j], d[j], rstd, mean);
            pack<T, N> out;
            out.set(d);
            store_pack<T, N>((T *)a.dx + t * a.d, i, out);
        }
    }
    leave_columns<LANES, N>(acc, units, a.partial + blockIdx.x * a.d);
}

/* dweight: (d) = or += the sum over parts of partial: (parts, d). A block has 16 columns, half a warp has every 64th part. */
enum { COLUMNS = 16, COLUMN_WARPS = 32 };
__global__ void __launch_bounds__(32 * COLUMN_WARPS)
    loom_norm_columns(const float *partial, int32_t parts, int64_t d, float *dweight, int32_t accumulate)
{
    __shared__ float sums[COLUMN_WARPS][COLUMNS + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = (int64_t)blockIdx.x * COLUMNS, i = first + lane % COLUMNS;
    float sum = 0;
    if (i < d) {
#pragma unroll 8
        for (int32_t p = threadIdx.x / COLUMNS; p < parts; p += 2 * COLUMN_WARPS) sum += partial[p * d + i];
    }
    sum += __shfl_xor_sync(~0u, sum, COLUMNS);
    if (lane < COLUMNS) sums[warp][lane] = sum;
    __syncthreads();
    if (warp >= COLUMNS || first + warp >= d) return;
    sum = row_sum<32>(sums[lane][warp]);
    if (lane == 0) dweight[first + warp] = accumulate ? dweight[first + warp] + sum : sum;
}

/* Any d and any alignment: first the columns, from what dx may then replace. A block has a part of the rows. */
template <typename T> __global__ void __launch_bounds__(THREADS) loom_norm_parts_any(const __grid_constant__ norm_gradients a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, part = blockIdx.y, parts = gridDim.y;
    if (i >= a.d) return;
    float sum = 0;
#pragma unroll 4
    for (int64_t t = part * a.n / parts; t < (part + 1) * a.n / parts; t++)
        sum = fmaf(widen(((const T *)a.dnormed)[t * a.d + i]), widen(((const T *)a.sum)[t * a.d + i]) * a.rstd[t], sum);
    a.partial[part * a.d + i] = sum;
}

template <typename T> __global__ void __launch_bounds__(THREADS) loom_norm_dx_any(const __grid_constant__ norm_gradients a)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (t >= a.n) return;
    const T *const s = (const T *)a.sum + t * a.d, *const dn = (const T *)a.dnormed + t * a.d, *const ds = (const T *)a.dsum;
    T *const dx = (T *)a.dx + t * a.d;
    const float rstd = a.rstd[t];
    float dot = 0;
    for (int64_t i = threadIdx.x % 32; i < a.d; i += 32) dot = fmaf(widen(dn[i]) * a.weight[i], widen(s[i]) * rstd, dot);
    const float mean = row_sum<32>(dot) / (float)a.d;
    for (int64_t i = threadIdx.x % 32; i < a.d; i += 32)
        narrow(dx_of(widen(s[i]), widen(dn[i]), a.weight[i], ds ? widen(ds[t * a.d + i]) : 0, rstd, mean), dx[i]);
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

/* Threads that share a row, 0 where rows are walked element by element. */
template <typename T> static int lanes_for(int64_t d, uintptr_t addresses)
{
    constexpr int64_t held = UNITS * 16 / sizeof(T);
    if (((addresses | (uintptr_t)(d * sizeof(T))) & 15) != 0 || d == 0) return 0;
    return d <= 32 * held ? 32 : d <= 128 * held ? 128 : d <= 512 * held ? 512 : 0;
}

template <typename T, int K> static void launch_norm(const norms &a, int lanes, cudaStream_t stream)
{
    const unsigned n = (unsigned)a.n;
    if (lanes == 32) loom_add_norm<T, 32, K><<<(n + rows_for<32> - 1) / rows_for<32>, THREADS, 0, stream>>>(a);
    else if (lanes == 128) loom_add_norm<T, 128, K><<<n, 128, 0, stream>>>(a);
    else if (lanes == 512) loom_add_norm<T, 512, K><<<n, 512, 0, stream>>>(a);
    else loom_add_norm_any<T, K><<<(n + THREADS / 32 - 1) / (THREADS / 32), THREADS, 0, stream>>>(a);
}

template <typename T> static void launch_norm(const norms &a, cudaStream_t stream)
{
    const int lanes =
        lanes_for<T>(a.d, (uintptr_t)a.x | (uintptr_t)a.y | (uintptr_t)a.sum | (uintptr_t)a.normed | (uintptr_t)a.weight);
    if (!a.y) launch_norm<T, NO_Y>(a, lanes, stream);
    else if (a.k == 0) launch_norm<T, PLAIN_Y>(a, lanes, stream);
    else if (a.k <= 2) launch_norm<T, 2>(a, lanes, stream);
    else launch_norm<T, LF_MAX_TOP_K>(a, lanes, stream);
}

static lf_status run_norm(const lf__loom_call *call, const lf__loom_norm_args *a, const char *kernel)
{
    const lf__loom_rows_args *r = &a->rows;
    if (r->n == 0) return LF_OK;
    const norms from = {a->x,
                        r->a,
                        r->routing.slot,
                        r->routing.offset,
                        r->routing.weight,
                        a->weight,
                        r->out,
                        a->normed,
                        a->rstd,
                        a->eps,
                        r->n,
                        r->d,
                        r->e,
                        r->k};
    const int before = lf__loom_cuda_enter(call);
    if (r->dtype == LF_DTYPE_F32) launch_norm<float>(from, (cudaStream_t)call->stream);
    else launch_norm<bf16>(from, (cudaStream_t)call->stream);
    return lf__loom_cuda_leave(call, before, LF_OK, kernel);
}

lf_status lf__loom_cuda_add_norm(const lf__loom_call *call, const lf__loom_args *args)
{
    return run_norm(call, &args->norm, "loom_add_norm");
}

lf_status lf__loom_cuda_combine_add_norm(const lf__loom_call *call, const lf__loom_args *args)
{
    return run_norm(call, &args->norm, "loom_add_norm (combine)");
}

/* As many blocks as run at once. Returns their number, which is that of the partial sums. */
template <typename T, int LANES> static int32_t launch_rows(const norm_gradients &a, int32_t n_units, cudaStream_t stream)
{
    constexpr int THREADS_HERE = threads_for<LANES>;
    int64_t blocks = (int64_t)n_units * (512 / THREADS_HERE);
    if (blocks > LF_LOOM_NORM_PARTS) blocks = LF_LOOM_NORM_PARTS;
    const int64_t most = (a.n + rows_for<LANES> - 1) / rows_for<LANES>;
    if (blocks > most) blocks = most;
    loom_add_norm_backward<T, LANES><<<(unsigned)blocks, THREADS_HERE, 0, stream>>>(a);
    return (int32_t)blocks;
}

template <typename T> static int32_t launch_rows(const norm_gradients &a, int32_t n_units, cudaStream_t stream)
{
    const int lanes = lanes_for<T>(a.d, (uintptr_t)a.sum | (uintptr_t)a.dsum | (uintptr_t)a.dnormed | (uintptr_t)a.dx |
                                            (uintptr_t)a.weight | (uintptr_t)a.partial);
    if (lanes == 32) return launch_rows<T, 32>(a, n_units, stream);
    if (lanes == 128) return launch_rows<T, 128>(a, n_units, stream);
    if (lanes == 512) return launch_rows<T, 512>(a, n_units, stream);
    const unsigned parts = (unsigned)(a.n < SHORT_PARTS ? a.n : SHORT_PARTS), columns = (unsigned)((a.d + THREADS - 1) / THREADS);
    loom_norm_parts_any<T><<<dim3(columns, parts), THREADS, 0, stream>>>(a);
    loom_norm_dx_any<T><<<(unsigned)((a.n + THREADS / 32 - 1) / (THREADS / 32)), THREADS, 0, stream>>>(a);
    return (int32_t)parts;
}

lf_status lf__loom_cuda_add_norm_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_norm_backward_args *b = &args->norm_backward;
    if (b->d == 0) return LF_OK;
    const norm_gradients a = {b->sum, b->dsum, b->dnormed, b->weight, b->rstd, b->dx, b->partial, b->n, b->d};
    const int32_t n_units = ((const cuda_context *)call->context)->n_units;
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int before = lf__loom_cuda_enter(call);
    int32_t parts = 0;
    if (b->n > 0)
        parts = b->dtype == LF_DTYPE_F32 ? launch_rows<float>(a, n_units, stream) : launch_rows<bf16>(a, n_units, stream);
    loom_norm_columns<<<(unsigned)((b->d + COLUMNS - 1) / COLUMNS), 32 * COLUMN_WARPS, 0, stream>>>(b->partial, parts, b->d,
                                                                                                    b->dweight, b->accumulate);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_add_norm_backward");
}
