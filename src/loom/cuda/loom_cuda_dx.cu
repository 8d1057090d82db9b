/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: backward of permute with the router's part: dx[t] = sum over choices of dxs[slot] + dlogits[t] weight. The sum over choices is
 * the CPU's, bit for bit; the product is made by tensor cores in parts of bf16 and added once. What does not fit (rows that are not
 * whole packs, more than 64 experts) is loom_cuda_rows.cu's. */
#include "loom_cuda_mma.cuh"

/* A block has 128 features and a few tiles of 128 tokens, 16 a warp. Weights of the features lie in shared memory in parts, as the
 * lanes want them. */
enum { THREADS = 256, WARPS = THREADS / 32, FEATURES = 128, BLOCKS = FEATURES / 32, PASSES = 2 };

/* Column c of product j in a block of 32 features is feature 8 (c / 2) + 2 j + c % 2, so that a lane's columns are 8 neighbours. */
template <int STEPS> struct weights {
    uint2 part[BLOCKS][4][STEPS][3][32];
};

template <int STEPS> __device__ __forceinline__ void load_weights(const lf__loom_rows_args &a, int64_t first, weights<STEPS> *to)
{
    for (int32_t at = threadIdx.x; at < BLOCKS * 4 * STEPS * 32; at += THREADS) {
        const int32_t lane = at % 32, step = at / 32 % STEPS, j = at / 32 / STEPS % 4, block = at / 32 / STEPS / 4;
        const int32_t g = lane / 4, t = lane % 4;
        const int64_t feature = first + 32 * block + 8 * (g / 2) + 2 * j + g % 2;
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t expert = 16 * step + 2 * t + i % 2 + i / 2 * 8;
            w[i] = expert < a.e && feature < a.d ? __ldg(a.router + expert * a.d + feature) : 0;
        }
        uint32_t low[3], high[3];
        split(w[0], w[1], low);
        split(w[2], w[3], high);
#pragma unroll
        for (int p = 0; p < 3; p++) to->part[block][j][step][p][lane] = make_uint2(low[p], high[p]);
    }
}

/* dlogits of a lane's two tokens in parts: [step][part]. */
template <int STEPS>
__device__ __forceinline__ void load_dlogits(const lf__loom_rows_args &a, int64_t token, uint32_t (&part)[STEPS][3][4])
{
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) { /* i: token i % 2, experts + 8 (i / 2) */
            const int64_t t = token + i % 2 * 8;
            const int32_t expert = 16 * step + 2 * (threadIdx.x % 4) + i / 2 * 8;
            const bool is = t < a.n;
            uint32_t three[3];
            split(is && expert < a.e ? __ldg(a.dlogits + t * a.e + expert) : 0,
                  is && expert + 1 < a.e ? __ldg(a.dlogits + t * a.e + expert + 1) : 0, three);
#pragma unroll
            for (int p = 0; p < 3; p++) part[step][p][i] = three[p];
        }
}

/* product[row]: 8 features of each of the lane's two tokens in a block of 32. */
template <int STEPS>
__device__ __forceinline__ void multiply(const uint32_t (&dlogits)[STEPS][3][4], const weights<STEPS> *w, int block,
                                         float (&product)[2][8])
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float c[4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint2 b[3];
#pragma unroll
            for (int p = 0; p < 3; p++) b[p] = w->part[block][j][step][p][threadIdx.x % 32];
#pragma unroll
            for (int order = 2; order >= 0; order--) /* small parts first */
#pragma unroll
                for (int p = 0; p <= order; p++) mma(c, dlogits[step][p], b[order - p].x, b[order - p].y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) product[i / 2][2 * j + i % 2] = c[i];
    }
}

/* Rows of a token's choices; -1 when it is routed nowhere. */
template <int K> struct rows {
    int32_t row[K];
    __device__ __forceinline__ rows(const lf__loom_rows_args &a, int64_t token)
    {
        const int32_t limit = a.routing.offset[a.e];
#pragma unroll
        for (int c = 0; c < K; c++) {
            row[c] = token < a.n && c < a.k ? a.routing.slot[token * a.k + c] : limit;
            if (row[c] >= limit) row[c] = -1;
        }
    }
};

template <typename T, int K>
__device__ __forceinline__ void load_rows(const lf__loom_rows_args &a, const rows<K> &from, int64_t feature, eight<T> (&x)[K])
{
#pragma unroll
    for (int c = 0; c < K; c++)
        x[c].load((const T *)a.a + (from.row[c] < 0 ? 0 : from.row[c]) * a.d, feature, a.d, from.row[c] >= 0, true);
}

template <typename T, int K>
__device__ __forceinline__ void write_sum(const lf__loom_rows_args &a, const rows<K> &from, const eight<T> (&x)[K], int64_t token,
                                          int64_t feature, const float (&product)[8])
{
    float sum[8] = {};
#pragma unroll
    for (int c = 0; c < K; c++) {
        float f[8];
        x[c].unpack(f);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (from.row[c] >= 0) sum[i] = plus(sum[i], f[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = plus(sum[i], product[i]);
    if (token < a.n && feature < a.d) store8((T *)a.out + token * a.d + feature, sum);
}

/* dxs: (n k, d), dlogits: (n, e), weight: (e, d) -> dx (n, d). */
template <typename T, int K, int STEPS>
__global__ void __launch_bounds__(THREADS, K <= 2 && STEPS <= 2 ? 2 : 1)
    loom_permute_backward_router(const lf__loom_rows_args a, int32_t slices)
{
    enum { UNROLL = K > 2 || sizeof(T) == 4 ? 1 : 2 };
    __shared__ weights<STEPS> w;
    const int32_t lane = threadIdx.x % 32;
    const int64_t first = (int64_t)(blockIdx.x % slices) * FEATURES;
    load_weights<STEPS>(a, first, &w);
    __syncthreads();
    for (int pass = 0; pass < PASSES; pass++) {
        const int64_t token = (((int64_t)blockIdx.x / slices * PASSES + pass) * WARPS + threadIdx.x / 32) * 16 + lane / 4;
        if (token - lane / 4 >= a.n) break;
        const rows<K> from[2] = {rows<K>(a, token), rows<K>(a, token + 8)};
        uint32_t dlogits[STEPS][3][4];
        load_dlogits<STEPS>(a, token, dlogits);
#pragma unroll
        for (int base = 0; base < BLOCKS; base += UNROLL) {
            eight<T> x[UNROLL][2][K];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int r = 0; r < 2; r++) load_rows<T, K>(a, from[r], first + 32 * (base + u) + 8 * (lane % 4), x[u][r]);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float product[2][8];
                multiply<STEPS>(dlogits, &w, base + u, product);
#pragma unroll
                for (int r = 0; r < 2; r++)
                    write_sum<T, K>(a, from[r], x[u][r], token + 8 * r, first + 32 * (base + u) + 8 * (lane % 4), product[r]);
            }
        }
    }
}

template <typename T, int K> static void launch(const lf__loom_rows_args *a, cudaStream_t stream)
{
    const int64_t slices = (a->d + FEATURES - 1) / FEATURES, each = 16 * WARPS * PASSES;
    const unsigned blocks = (unsigned)((a->n + each - 1) / each * slices);
    if (a->e <= 16) loom_permute_backward_router<T, K, 1><<<blocks, THREADS, 0, stream>>>(*a, (int32_t)slices);
    else if (a->e <= 32) loom_permute_backward_router<T, K, 2><<<blocks, THREADS, 0, stream>>>(*a, (int32_t)slices);
    else loom_permute_backward_router<T, K, 4><<<blocks, THREADS, 0, stream>>>(*a, (int32_t)slices);
}

bool lf__loom_cuda_dx_fits(const lf__loom_rows_args *a)
{
    return a->e <= 64 && a->d % 8 == 0 && (((uintptr_t)a->a | (uintptr_t)a->out) & 15) == 0;
}

void lf__loom_cuda_dx(const lf__loom_rows_args *a, cudaStream_t stream)
{
    if (a->dtype == LF_DTYPE_F32 && a->k <= 2) launch<float, 2>(a, stream);
    else if (a->dtype == LF_DTYPE_F32) launch<float, LF_MAX_TOP_K>(a, stream);
    else if (a->k <= 2) launch<bf16, 2>(a, stream);
    else launch<bf16, LF_MAX_TOP_K>(a, stream);
}
