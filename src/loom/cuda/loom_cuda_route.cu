/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: gumbel noise, routing and its backward.
 *
 * Routing is two kernels. The first gives each block a run of tokens ("chunk"), chooses their experts and counts them; the
 * second turns the chunks' counts into places and writes the permutation. Counts and places are integers, so neither the
 * number of chunks nor the order of blocks changes a bit. */
#include "loom_cuda_vec.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, MAX_CHUNKS = 512, MIN_CHUNKS = 64, CHUNK_CELLS = 16384 };
static_assert((size_t)MIN_CHUNKS * (LF_MAX_EXPERTS + 1) * sizeof(int32_t) <= LF_LOOM_CUDA_SCRATCH, "counts fit the scratch");
static_assert((size_t)CHUNK_CELLS * sizeof(int32_t) <= LF_LOOM_CUDA_SCRATCH, "counts fit the scratch");

static unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

/* ---- noise ----------------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void philox(uint32_t (&c)[4], uint32_t k0, uint32_t k1)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t a = 0xD2511F53u * c[0], a_high = __umulhi(0xD2511F53u, c[0]);
        const uint32_t b = 0xCD9E8D57u * c[2], b_high = __umulhi(0xCD9E8D57u, c[2]);
        c[0] = b_high ^ c[1] ^ k0;
        c[2] = a_high ^ c[3] ^ k1;
        c[1] = b;
        c[3] = a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* token: (n) i64; noise: (n, e) f32. A thread draws the four numbers of one counter. */
__global__ void __launch_bounds__(THREADS) loom_gumbel(const lf__loom_gumbel_args a, int32_t quads)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, t = i / quads;
    if (t >= a.n) return;
    const int32_t q = (int32_t)(i - t * quads);
    const uint64_t token = (uint64_t)a.token[t], seed = (uint64_t)a.seed;
    uint32_t c[4] = {(uint32_t)token, (uint32_t)(token >> 32), (uint32_t)a.step, (uint32_t)(a.layer * 64 + q)};
    philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    float *noise = a.noise + t * a.e + 4 * q;
#pragma unroll
    for (int32_t j = 0; j < 4; j++) {
        const double u = (double)(c[j] >> 8) * 0x1p-24 + 0x1p-25;
        if (4 * q + j < a.e) noise[j] = (float)-log(-log(u));
    }
}

lf_status lf__loom_cuda_gumbel(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_gumbel_args *a = &args->gumbel;
    if (a->n == 0) return LF_OK;
    const int32_t quads = (a->e + 3) / 4;
    const int before = lf__loom_cuda_enter(call);
    loom_gumbel<<<blocks_for(a->n * quads, THREADS), THREADS, 0, (cudaStream_t)call->stream>>>(*a, quads);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_gumbel");
}

/* ---- choosing -------------------------------------------------------------------------------------------------------- */

/* Orders by z, then by the lower index: larger is better. NaN comes below -inf, and every key is above 0, which is "taken". */
__device__ __forceinline__ uint64_t key_of(float z, int32_t index)
{
    const uint32_t bits = __float_as_uint(plus(z, 0.0f)); /* -0 and 0 are a tie */
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)(z == z ? ordered : 0u) << 32 | ~(uint32_t)index;
}

template <int LANES> __device__ __forceinline__ uint64_t best_of(uint32_t group, uint64_t key)
{
#pragma unroll
    for (int32_t step = LANES / 2; step > 0; step /= 2) {
        const uint64_t other = __shfl_xor_sync(group, (unsigned long long)key, step, LANES);
        if (other > key) key = other;
    }
    return key;
}

/* z: the lane's scaled logits, index lane + LANES v; becomes their softmax. Places behind e hold -inf. */
template <int LANES, int VALS> __device__ __forceinline__ void softmax(uint32_t group, int32_t lane, int32_t e, float (&z)[VALS])
{
    float most = z[0], sum = 0;
#pragma unroll
    for (int32_t v = 1; v < VALS; v++) most = fmaxf(most, z[v]);
#pragma unroll
    for (int32_t step = LANES / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(group, most, step, LANES));
#pragma unroll
    for (int32_t v = 0; v < VALS; v++) {
        z[v] = lane + LANES * v < e ? expf(z[v] - most) : 0;
        sum += z[v];
    }
#pragma unroll
    for (int32_t step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(group, sum, step, LANES);
#pragma unroll
    for (int32_t v = 0; v < VALS; v++) z[v] = over(z[v], sum);
}

/* The lanes of a token choose together; lane c leaves with choice c and the probability it had. Returns the sum of the k
 * probabilities, added in order of choice. */
template <int LANES, int VALS>
__device__ __forceinline__ float choose(uint32_t group, int32_t lane, int32_t k, uint64_t (&key)[VALS], const float (&prob)[VALS],
                                        int32_t *mine, float *mine_prob)
{
    float sum = 0;
    for (int32_t c = 0; c < k; c++) {
        uint64_t best = key[0];
#pragma unroll
        for (int32_t v = 1; v < VALS; v++)
            if (key[v] > best) best = key[v];
        best = best_of<LANES>(group, best);
        float p = 0;
#pragma unroll
        for (int32_t v = 0; v < VALS; v++) {
            if (key[v] != best) continue; /* keys differ by their index */
            key[v] = 0;
            p = prob[v];
        }
        const int32_t index = (int32_t) ~(uint32_t)best;
        p = __shfl_sync(group, p, index % LANES, LANES);
        sum = plus(sum, p);
        if (lane == c) *mine = index, *mine_prob = p;
    }
    return sum;
}

/* logits, noise: (n, e); writes prob (n, e), expert and weight (n, k), and counts (e + 1, n_chunks): a chunk's slots by expert,
 * the last row being those that are routed nowhere. LANES threads share a token. */
template <int LANES, int VALS>
__global__ void __launch_bounds__(THREADS) loom_route_choose(const lf__loom_route_args a, int32_t chunk, int32_t *counts)
{
    __shared__ int32_t count[LF_MAX_EXPERTS + 1];
    for (int32_t x = threadIdx.x; x <= a.e; x += THREADS) count[x] = 0;
    __syncthreads();
    const int32_t lane = threadIdx.x % LANES;
    const uint32_t group = (LANES == 32 ? ~0u : (1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
    const int64_t from = (int64_t)blockIdx.x * chunk, to = min(from + chunk, a.n);
    for (int64_t t = from + threadIdx.x / LANES; t < to; t += THREADS / LANES) {
        float z[VALS];
        uint64_t key[VALS];
#pragma unroll
        for (int32_t v = 0; v < VALS; v++) {
            const int32_t x = lane + LANES * v;
            z[v] = x < a.e ? a.logits[t * a.e + x] : -INFINITY;
            if (x < a.e && a.noise) z[v] = plus(z[v], a.noise[t * a.e + x]);
            z[v] = over(z[v], a.temperature);
            key[v] = x < a.e ? key_of(z[v], x) : 0;
        }
        softmax<LANES, VALS>(group, lane, a.e, z);
#pragma unroll
        for (int32_t v = 0; v < VALS; v++)
            if (lane + LANES * v < a.e) a.routing.prob[t * a.e + lane + LANES * v] = z[v];
        int32_t mine = -1;
        float weight = 0;
        if (!a.valid || a.valid[t]) {
            const float sum = choose<LANES, VALS>(group, lane, a.k, key, z, &mine, &weight);
            weight = over(weight, sum);
        }
        if (lane >= a.k) continue;
        a.routing.expert[t * a.k + lane] = mine;
        a.routing.weight[t * a.k + lane] = weight;
        atomicAdd(&count[mine < 0 ? a.e : mine], 1); /* integers: any order gives the same */
    }
    __syncthreads();
    for (int32_t x = threadIdx.x; x <= a.e; x += THREADS) counts[(int64_t)x * gridDim.x + blockIdx.x] = count[x];
}

/* ---- sorting --------------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ int32_t or_nowhere(int32_t expert, int32_t e) { return expert >= 0 && expert < e ? expert : e; }

/* expert: (n, k) chosen elsewhere; counts as loom_route_choose leaves them. */
__global__ void __launch_bounds__(THREADS)
    loom_sort_count(const int32_t *expert, int64_t n, int32_t e, int32_t k, int32_t chunk, int32_t *counts)
{
    __shared__ int32_t count[LF_MAX_EXPERTS + 1];
    for (int32_t x = threadIdx.x; x <= e; x += THREADS) count[x] = 0;
    __syncthreads();
    const int64_t from = (int64_t)blockIdx.x * chunk * k, to = min(from + (int64_t)chunk * k, n * k);
    for (int64_t s = from + threadIdx.x; s < to; s += THREADS) atomicAdd(&count[or_nowhere(expert[s], e)], 1);
    __syncthreads();
    for (int32_t x = threadIdx.x; x <= e; x += THREADS) counts[(int64_t)x * gridDim.x + blockIdx.x] = count[x];
}

/* counts: (e + 1, n_chunks). next[x]: slots of x in chunks before this block's; total[x]: in all. A warp takes a row. */
__device__ __forceinline__ void sum_chunks(const int32_t *counts, int32_t e, int32_t *next, int32_t *total)
{
    const int32_t lane = threadIdx.x % 32, n_chunks = (int32_t)gridDim.x, mine = (int32_t)blockIdx.x;
    for (int32_t x = threadIdx.x / 32; x <= e; x += WARPS) {
        int32_t all = 0, before = 0;
#pragma unroll 4
        for (int32_t i = lane; i < n_chunks; i += 32) {
            const int32_t c = counts[(int64_t)x * n_chunks + i];
            all += c;
            if (i < mine) before += c;
        }
        all = __reduce_add_sync(~0u, all);
        before = __reduce_add_sync(~0u, before);
        if (lane == 0) next[x] = before, total[x] = all;
    }
}

/* One warp: next[x] += slots of all experts before x. The first block also writes count (e) and offset (e + 1). */
__device__ __forceinline__ void add_offsets(const lf_routing &r, int32_t e, int32_t *next, const int32_t *total)
{
    int32_t done = 0;
    for (int32_t base = 0; base <= e; base += 32) {
        const int32_t x = base + (int32_t)threadIdx.x, mine = x <= e ? total[x] : 0;
        int32_t sum = mine;
#pragma unroll
        for (int32_t step = 1; step < 32; step *= 2) {
            const int32_t below = __shfl_up_sync(~0u, sum, step);
            if ((int32_t)threadIdx.x >= step) sum += below;
        }
        const int32_t offset = done + sum - mine;
        if (x <= e) next[x] += offset;
        if (blockIdx.x == 0 && x <= e) r.offset[x] = offset;
        if (blockIdx.x == 0 && x < e) r.count[x] = mine;
        done += __shfl_sync(~0u, sum, 31);
    }
}

/* Slots in order, THREADS at a time: the place of one is next[expert] plus its equals in earlier warps and lanes. */
__global__ void __launch_bounds__(THREADS)
    loom_route_sort(const lf_routing r, int64_t n, int32_t e, int32_t k, int32_t chunk, const int32_t *counts)
{
    __shared__ int32_t next[LF_MAX_EXPERTS + 1], total[LF_MAX_EXPERTS + 1], equals[WARPS][LF_MAX_EXPERTS + 1];
    const int32_t warp = threadIdx.x / 32;
    for (int32_t i = threadIdx.x; i < WARPS * (LF_MAX_EXPERTS + 1); i += THREADS) (&equals[0][0])[i] = 0;
    sum_chunks(counts, e, next, total);
    __syncthreads();
    if (warp == 0) add_offsets(r, e, next, total);
    __syncthreads();
    const int64_t from = (int64_t)blockIdx.x * chunk * k, to = min(from + (int64_t)chunk * k, n * k);
    for (int64_t base = from; base < to; base += THREADS) {
        const int64_t s = base + threadIdx.x;
        int32_t x = -1;
        if (s < to) x = or_nowhere(r.expert[s], e);
        const uint32_t peers = __match_any_sync(~0u, x);
        const int32_t rank = __popc(peers & ((1u << threadIdx.x % 32) - 1));
        if (x >= 0 && rank == 0) equals[warp][x] = __popc(peers);
        __syncthreads();
        if (x >= 0) {
            int32_t place = next[x] + rank;
            for (int32_t w = 0; w < warp; w++) place += equals[w][x];
            r.row[place] = (int32_t)s;
            r.slot[s] = place;
        }
        __syncthreads();
        if (x >= 0 && rank == 0) {
            atomicAdd(&next[x], equals[warp][x]);
            equals[warp][x] = 0;
        }
        __syncthreads();
    }
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

/* Tokens of a chunk: enough blocks to fill the device, few enough that each can read all counts. */
static int32_t chunk_of(int64_t n, int32_t e, int32_t lanes)
{
    int64_t most = CHUNK_CELLS / (e + 1), at_once = THREADS / lanes;
    if (most > MAX_CHUNKS) most = MAX_CHUNKS;
    if (most < MIN_CHUNKS) most = MIN_CHUNKS;
    const int64_t chunk = (n + most - 1) / most;
    return (int32_t)((chunk + at_once - 1) / at_once * at_once);
}

template <int LANES, int VALS> static lf_status route(const lf__loom_call *call, const lf__loom_route_args *a)
{
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int32_t chunk = a->n ? chunk_of(a->n, a->e, LANES) : 1;
    const unsigned n_chunks = a->n ? blocks_for(a->n, chunk) : 1;
    void *counts = NULL;
    lf_status rc = lf__loom_cuda_scratch(call, &counts);
    if (rc < 0) return rc;
    loom_route_choose<LANES, VALS><<<n_chunks, THREADS, 0, stream>>>(*a, chunk, (int32_t *)counts);
    rc = lf__cuda_launched("loom_route_choose", stream, 0);
    if (rc < 0) return rc;
    loom_route_sort<<<n_chunks, THREADS, 0, stream>>>(a->routing, a->n, a->e, a->k, chunk, (const int32_t *)counts);
    return LF_OK;
}

lf_status lf__loom_cuda_route(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_route_args *a = &args->route;
    const int before = lf__loom_cuda_enter(call);
    lf_status rc;
    if (a->e <= 8) rc = route<8, 1>(call, a);
    else if (a->e <= 16) rc = route<16, 1>(call, a);
    else if (a->e <= 32) rc = route<32, 1>(call, a);
    else if (a->e <= 64) rc = route<32, 2>(call, a);
    else if (a->e <= 128) rc = route<32, 4>(call, a);
    else rc = route<32, 8>(call, a);
    return lf__loom_cuda_leave(call, before, rc, "loom_route_sort");
}

lf_status lf__loom_cuda_sort(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_route_args *a = &args->route;
    const int before = lf__loom_cuda_enter(call);
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int32_t chunk = a->n ? chunk_of(a->n, a->e, 8) : 1;
    const unsigned n_chunks = a->n ? blocks_for(a->n, chunk) : 1;
    lf_routing r = a->routing;
    r.expert = const_cast<int32_t *>(a->given); /* the kernel reads it */
    void *counts = NULL;
    lf_status rc = lf__loom_cuda_scratch(call, &counts);
    if (rc == LF_OK) {
        loom_sort_count<<<n_chunks, THREADS, 0, stream>>>(a->given, a->n, a->e, a->k, chunk, (int32_t *)counts);
        rc = lf__cuda_launched("loom_sort_count", stream, 0);
    }
    if (rc == LF_OK) loom_route_sort<<<n_chunks, THREADS, 0, stream>>>(r, a->n, a->e, a->k, chunk, (const int32_t *)counts);
    return lf__loom_cuda_leave(call, before, rc, "loom_route_sort");
}

/* ---- backward -------------------------------------------------------------------------------------------------------- */

/* dweight: (n, k); dlogits: (n, e), a thread an element. The weights are a softmax over the chosen logits alone:
 * dz_c = w_c (dw_c - sum_j w_j dw_j). */
__global__ void __launch_bounds__(THREADS) loom_route_backward(const lf__loom_route_args a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, t = i / a.e;
    if (t >= a.n) return;
    const int32_t x = (int32_t)(i - t * a.e), *expert = a.routing.expert + t * a.k;
    const float *weight = a.routing.weight + t * a.k, *dweight = a.dweight + t * a.k;
    float mean = 0, w = 0, dw = 0;
    bool chosen = false;
    for (int32_t c = 0; c < a.k; c++) {
        mean = plus(mean, times(weight[c], dweight[c]));
        if (expert[c] != x) continue;
        chosen = true;
        w = weight[c], dw = dweight[c];
    }
    a.dlogits[i] = chosen && expert[0] >= 0 ? over(times(w, minus(dw, mean)), a.temperature) : 0;
}

lf_status lf__loom_cuda_route_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_route_args *a = &args->route;
    if (a->n == 0) return LF_OK;
    const int before = lf__loom_cuda_enter(call);
    loom_route_backward<<<blocks_for(a->n * a->e, THREADS), THREADS, 0, (cudaStream_t)call->stream>>>(*a);
    return lf__loom_cuda_leave(call, before, LF_OK, "loom_route_backward");
}
