/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: the router's product and the gradient of its weight. Both read x once, which is what they cost; the arithmetic is done by
 * tensor cores in parts of bf16. Which feature or token stands at which place of a tile is free, as long as both factors agree: it
 * is chosen so that every thread loads 16 bytes of a row. */
#include "loom_cuda_mma.cuh"

static unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

static bool on_16(const void *p) { return (uintptr_t)p % 16 == 0; }

/* ---- logits ---------------------------------------------------------------------------------------------------------- */

/* A block has 128 tokens, 16 a warp, and 8 TILES experts; it walks the features in chunks of 64 = 2 blocks of 32. Weights of a chunk
 * lie in shared memory in parts, as the lanes want them. */
enum { ROUTER_THREADS = 256, ROUTER_TOKENS = 128, CHUNK = 64 };

template <int TILES> struct weights {
    uint4 part[3][TILES][2][32];
};

/* Eight weights of a lane's expert and features, and their place. */
template <int TILES> struct weight_loader {
    enum { EACH = (TILES * 64 + ROUTER_THREADS - 1) / ROUTER_THREADS };
    eight<float> w[EACH];
    __device__ __forceinline__ void load(const lf__loom_router_args &a, int32_t first, int64_t chunk, bool whole)
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int32_t at = (int32_t)threadIdx.x + ROUTER_THREADS * i, lane = at % 32, block = at / 32 % 2, tile = at / 64;
            const int32_t expert = first + 8 * tile + lane / 4;
            const bool is = tile < TILES && expert < a.e;
            w[i].load(a.a + (is ? expert : 0) * a.d, chunk * CHUNK + 32 * block + 8 * (lane % 4), a.d, is, whole);
        }
    }
    __device__ __forceinline__ void store(weights<TILES> *to) const
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int32_t at = (int32_t)threadIdx.x + ROUTER_THREADS * i, lane = at % 32, block = at / 32 % 2, tile = at / 64;
            if (tile >= TILES) break;
            uint32_t word[4][3];
#pragma unroll
            for (int j = 0; j < 4; j++) w[i].parts(j, word[j]);
#pragma unroll
            for (int p = 0; p < 3; p++)
                to->part[p][tile][block][lane] = make_uint4(word[0][p], word[1][p], word[2][p], word[3][p]);
        }
    }
};

/* sum (TILES x 16 x 8) += the product of a warp's 16 tokens and the weights over one chunk. x: [block][row g, row g + 8]. */
template <typename T, int TILES>
__device__ __forceinline__ void add_chunk(const eight<T> (&x)[2][2], const weights<TILES> *w, float (&sum)[TILES][4])
{
    constexpr int PARTS = parts_of<T>::N;
    const int32_t lane = threadIdx.x % 32;
    float part_sum[TILES][4] = {};
#pragma unroll
    for (int block = 0; block < 2; block++) {
        uint32_t a[PARTS][2][4]; /* [part][step] */
#pragma unroll
        for (int word = 0; word < 4; word++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                uint32_t part[PARTS];
                x[block][row].parts(word, part);
#pragma unroll
                for (int p = 0; p < PARTS; p++) a[p][word / 2][word % 2 * 2 + row] = part[p];
            }
#pragma unroll 1
        for (int p = 2; p >= 0; p--) /* small parts first; unrolled, it would ask for all weights at once */
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const uint4 b = w->part[p][tile][block][lane];
#pragma unroll
                for (int q = PARTS - 1; q >= 0; q--) {
                    if (p + q > 2) continue;
                    mma(part_sum[tile], a[q][0], b.x, b.y);
                    mma(part_sum[tile], a[q][1], b.z, b.w);
                }
            }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[tile][i] = plus(sum[tile][i], part_sum[tile][i]);
}

template <typename T, int TILES>
__device__ __forceinline__ void load_chunk(const lf__loom_router_args &a, const T *const (&row)[2], const bool (&is)[2],
                                           int64_t chunk, bool whole, eight<T> (&x)[2][2])
{
    const int64_t at = chunk * CHUNK + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
        for (int r = 0; r < 2; r++) x[block][r].load(row[r], at + 32 * block, a.d, is[r], whole);
}

/* x: (n, d), weight: (e, d) -> logits (n, e). */
template <typename T, int TILES, bool WHOLE>
__global__ void __launch_bounds__(ROUTER_THREADS, TILES <= 4 ? 2 : 1) loom_router(const lf__loom_router_args a)
{
    enum { AHEAD = sizeof(T) == 4 ? 1 : TILES <= 4 ? 3 : 2 }; /* chunks of x on their way */
    __shared__ weights<TILES> w[2];
    const int32_t g = threadIdx.x % 32 / 4, first = (int32_t)blockIdx.y * 8 * TILES;
    const int64_t token = (int64_t)blockIdx.x * ROUTER_TOKENS + threadIdx.x / 32 * 16 + g;
    const int32_t n_chunks = (int32_t)((a.d + CHUNK - 1) / CHUNK);
    const bool is[2] = {token < a.n, token + 8 < a.n};
    const T *row[2] = {(const T *)a.x + (is[0] ? token : 0) * a.d, (const T *)a.x + (is[1] ? token + 8 : 0) * a.d};
    eight<T> x[AHEAD][2][2];
    float sum[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_chunk<T, TILES>(a, row, is, i, WHOLE, x[i]);
    weight_loader<TILES> loader;
    loader.load(a, first, 0, WHOLE);
    loader.store(&w[0]);
    __syncthreads();
#pragma unroll 1
    for (int32_t base = 0; base < n_chunks; base += AHEAD)
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int32_t c = base + i;
            if (c >= n_chunks) break;
            if (c + 1 < n_chunks) loader.load(a, first, c + 1, WHOLE);
            add_chunk<T, TILES>(x[i], &w[c % 2], sum);
            load_chunk<T, TILES>(a, row, is, c + AHEAD, WHOLE, x[i]);
            if (c + 1 < n_chunks) loader.store(&w[(c + 1) % 2]);
            __syncthreads();
        }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t expert = first + 8 * tile + 2 * (threadIdx.x % 4) + i % 2;
            if (is[i / 2] && expert < a.e) a.out[(token + 8 * (i / 2)) * a.e + expert] = sum[tile][i];
        }
}

template <typename T, int TILES> static void launch_router(const lf__loom_router_args *a, cudaStream_t stream)
{
    const bool whole = on_16(a->x) && on_16(a->a) && a->d % (16 / sizeof(T)) == 0 && a->d % 4 == 0;
    const dim3 grid(blocks_for(a->n, ROUTER_TOKENS), blocks_for(a->e, 8 * TILES));
    if (whole) loom_router<T, TILES, true><<<grid, ROUTER_THREADS, 0, stream>>>(*a);
    else loom_router<T, TILES, false><<<grid, ROUTER_THREADS, 0, stream>>>(*a);
}

template <typename T> static void launch_router(const lf__loom_router_args *a, cudaStream_t stream)
{
    if (a->e <= 8) launch_router<T, 1>(a, stream);
    else if (a->e <= 16) launch_router<T, 2>(a, stream);
    else if (a->e <= 32) launch_router<T, 4>(a, stream);
    else launch_router<T, 8>(a, stream);
}

lf_status lf__loom_cuda_router(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_router_args *a = &args->router;
    if (a->n == 0) return LF_OK;
    const int before = lf__loom_cuda_enter(call);
    if (a->dtype == LF_DTYPE_F32) launch_router<float>(a, (cudaStream_t)call->stream);
    else launch_router<bf16>(a, (cudaStream_t)call->stream);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_router");
}

/* ---- gradient of the weight ------------------------------------------------------------------------------------------- */

/* A block has a chunk of tokens, 64 features and 16 TILES experts. Its warps take 16 tokens in turn and are added up at the end.
 * A lane loads 8 features (8 g on) of 4 tokens (4 t on): column g of product number j is feature 8 g + j. */
enum { DWEIGHT_WARPS = 4, DWEIGHT_THREADS = 32 * DWEIGHT_WARPS, FEATURES = 64, FLUSH = 4, FINISH_THREADS = 256 };

/* What a lane has of 16 tokens. */
template <typename T, int TILES> struct step {
    eight<T> x[4];
    float g[TILES][2][4]; /* dlogits of experts g and g + 8 */
    __device__ __forceinline__ void load(const lf__loom_router_args &a, int64_t token, int64_t last, int64_t feature,
                                         int32_t expert, bool whole)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is = token + i < last;
            const int64_t row = is ? token + i : 0;
            x[i].load((const T *)a.x + row * a.d, feature, a.d, is, whole);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int32_t which = expert + 16 * tile + 8 * half;
                    g[tile][half][i] = is && which < a.e ? __ldg(a.a + row * a.e + which) : 0;
                }
        }
    }
};

/* The low, or the high, halves of two words. */
__device__ __forceinline__ uint32_t both(uint32_t a, uint32_t b, bool high) { return __byte_perm(a, b, high ? 0x7632 : 0x5410); }

/* sum[tile][j] += dlogits^T x for feature j of each lane's eight. */
template <typename T, int TILES> __device__ __forceinline__ void add_step(const step<T, TILES> &s, float (&sum)[TILES][8][4])
{
    constexpr int PARTS = parts_of<T>::N;
    uint32_t a[TILES][3][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) { /* a[i]: expert half i % 2, tokens 2 (i / 2) and the next */
            uint32_t part[3];
            split(s.g[tile][i % 2][i / 2 * 2], s.g[tile][i % 2][i / 2 * 2 + 1], part);
#pragma unroll
            for (int p = 0; p < 3; p++) a[tile][p][i] = part[p];
        }
#pragma unroll
    for (int word = 0; word < 4; word++) {
        uint32_t x[4][PARTS];
#pragma unroll
        for (int i = 0; i < 4; i++) s.x[i].parts(word, x[i]);
#pragma unroll
        for (int p = 2; p >= 0; p--) /* small parts first */
#pragma unroll
            for (int q = PARTS - 1; q >= 0; q--)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        if (p + q > 2) continue;
                        mma(sum[tile][2 * word + odd], a[tile][p], both(x[0][q], x[1][q], odd), both(x[2][q], x[3][q], odd));
                    }
    }
}

template <int TILES> __device__ __forceinline__ void flush(float (&from)[TILES][8][4], float (&to)[TILES][8][4])
{
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) to[tile][j][i] = plus(to[tile][j][i], from[tile][j][i]), from[tile][j][i] = 0;
}

/* The warps' sums, added in order, into the chunk's part of the workspace. A lane's c[i] of product j: expert g + 8 (i / 2), feature
 * 16 t + 8 (i % 2) + j. */
template <int TILES>
__device__ __forceinline__ void write_part(const lf__loom_router_args &a, const float (&sum)[TILES][8][4], int64_t chunk,
                                           int64_t feature, int32_t expert)
{
    __shared__ float all[DWEIGHT_WARPS][16][FEATURES + 4]; /* four more: experts start on other banks */
    const int32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile > 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) all[warp][g + i / 2 * 8][16 * t + i % 2 * 8 + j] = sum[tile][j][i];
        __syncthreads();
        for (int32_t at = threadIdx.x; at < 16 * FEATURES; at += DWEIGHT_THREADS) {
            const int32_t row = at / FEATURES, column = at % FEATURES, which = expert + 16 * tile + row;
            if (which >= a.e || feature + column >= a.d) continue;
            float total = all[0][row][column];
#pragma unroll
            for (int w = 1; w < DWEIGHT_WARPS; w++) total = plus(total, all[w][row][column]);
            a.workspace[(chunk * a.e + which) * a.d + feature + column] = total;
        }
    }
}

/* dlogits: (n, e), x: (n, d) -> workspace (n_chunks, e, d). Blocks of one run of tokens and features lie side by side. */
template <typename T, int TILES, bool WHOLE>
__global__ void __launch_bounds__(DWEIGHT_THREADS)
    loom_router_dweight(const lf__loom_router_args a, int32_t groups, int32_t slices)
{
    enum { AHEAD = sizeof(T) == 2 && TILES == 1 ? 2 : 1 }; /* steps of a warp on their way */
    const int32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int32_t expert = (int32_t)(blockIdx.x % groups) * 16 * TILES;
    const int64_t feature = (int64_t)(blockIdx.x / groups % slices) * FEATURES, chunk = blockIdx.x / groups / slices;
    const int64_t from = chunk * a.chunk, last = min(from + a.chunk, a.n);
    float sum[TILES][8][4] = {}, now[TILES][8][4] = {};
    step<T, TILES> s[AHEAD];
    int64_t token = from + 16 * warp;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        s[i].load(a, token + 16 * DWEIGHT_WARPS * i + 4 * t, last, feature + 8 * g, expert + g, WHOLE);
    for (int32_t done = 0; token < last; token += AHEAD * 16 * DWEIGHT_WARPS) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            add_step(s[i], now);
            s[i].load(a, token + 16 * DWEIGHT_WARPS * (i + AHEAD) + 4 * t, last, feature + 8 * g, expert + g, WHOLE);
        }
        done += AHEAD;
        if (done % FLUSH == 0) flush<TILES>(now, sum);
    }
    flush<TILES>(now, sum);
    write_part<TILES>(a, sum, chunk, feature, expert);
}

/* workspace: (n_chunks, size) -> out (size) = or += the sum over chunks in order. */
__global__ void __launch_bounds__(FINISH_THREADS) loom_router_finish(const lf__loom_router_args a, int64_t size)
{
    const int64_t i = (int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x;
    if (i >= size) return;
    float sum = 0;
#pragma unroll 8
    for (int32_t c = 0; c < a.n_chunks; c++) sum = plus(sum, __ldcg(a.workspace + c * size + i));
    a.out[i] = a.accumulate ? plus(a.out[i], sum) : sum;
}

template <typename T, int TILES> static void launch_dweight(const lf__loom_router_args *a, cudaStream_t stream)
{
    const bool whole = on_16(a->x) && a->d % (16 / sizeof(T)) == 0;
    const unsigned groups = blocks_for(a->e, 16 * TILES), slices = blocks_for(a->d, FEATURES);
    const unsigned blocks = groups * slices * (unsigned)a->n_chunks;
    if (whole) loom_router_dweight<T, TILES, true><<<blocks, DWEIGHT_THREADS, 0, stream>>>(*a, (int32_t)groups, (int32_t)slices);
    else loom_router_dweight<T, TILES, false><<<blocks, DWEIGHT_THREADS, 0, stream>>>(*a, (int32_t)groups, (int32_t)slices);
}

template <typename T> static void launch_dweight(const lf__loom_router_args *a, cudaStream_t stream)
{
    if (a->e <= 16) launch_dweight<T, 1>(a, stream);
    else launch_dweight<T, 2>(a, stream);
}

lf_status lf__loom_cuda_router_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_router_args *a = &args->router;
    const int64_t size = a->e * a->d;
    if (size == 0) return LF_OK;
    const int before = lf__loom_cuda_enter(call);
    const cudaStream_t stream = (cudaStream_t)call->stream;
    lf_status rc = LF_OK;
    if (a->n_chunks > 0) {
        if (a->dtype == LF_DTYPE_F32) launch_dweight<float>(a, stream);
        else launch_dweight<bf16>(a, stream);
        rc = lf__cuda_launched("loom_router_dweight", stream, 0);
    }
    if (rc == LF_OK) loom_router_finish<<<blocks_for(size, FINISH_THREADS), FINISH_THREADS, 0, stream>>>(*a, size);
    return lf__loom_cuda_leave(call, before, rc, "loom_router_finish");
}
