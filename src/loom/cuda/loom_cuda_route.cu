/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: choosing experts, and the backward of routing. LANES neighbouring threads share a token; a lane has quads of experts, the four
 * that one counter of the noise serves, and all that is summed over experts is summed as the CPU does it: a quad in order, quads
 * as a tree. */
#include "loom_cuda_route.cuh"
#include "loom_cuda_vec.cuh"

enum { THREADS = 512, BACKWARD_THREADS = 256 };

static unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

/* The lanes of a token. Value 4 q + j of a lane belongs to expert 4 (lane + LANES q) + j. */
template <int LANES, int QUADS> struct token_lanes {
    static constexpr int VALS = 4 * QUADS;
    int32_t lane;
    uint32_t group; /* their bits in the warp */
    __device__ __forceinline__ token_lanes()
    {
        lane = (int32_t)threadIdx.x % LANES;
        group = (LANES == 32 ? ~0u : (1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
    }
    __device__ __forceinline__ int32_t expert(int v) const { return 4 * (lane + LANES * (v / 4)) + v % 4; }

    /* Row of e values; what lies behind e is `fill`. `whole`: quads start on 16 bytes and none is cut. */
    __device__ __forceinline__ void load(const float *row, int32_t e, bool whole, float fill, float (&x)[VALS]) const
    {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int32_t first = expert(4 * q);
            if (whole && first < e) {
                const float4 four = __ldg(reinterpret_cast<const float4 *>(row + first));
                x[4 * q] = four.x, x[4 * q + 1] = four.y, x[4 * q + 2] = four.z, x[4 * q + 3] = four.w;
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) x[4 * q + j] = !whole && first + j < e ? row[first + j] : fill;
        }
    }
    __device__ __forceinline__ void store(float *row, int32_t e, bool whole, const float (&x)[VALS]) const
    {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int32_t first = expert(4 * q);
            if (whole && first < e)
                *reinterpret_cast<float4 *>(row + first) = make_float4(x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (!whole && first + j < e) row[first + j] = x[4 * q + j];
        }
    }
    __device__ __forceinline__ float sum(const float (&x)[VALS]) const
    {
        float all = plus(plus(plus(x[0], x[1]), x[2]), x[3]);
        if (QUADS == 2) all = plus(all, plus(plus(plus(x[VALS - 4], x[VALS - 3]), x[VALS - 2]), x[VALS - 1]));
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) all = plus(all, __shfl_xor_sync(group, all, step, LANES));
        return all;
    }
    __device__ __forceinline__ uint64_t best(uint64_t key) const
    {
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            const uint64_t other = __shfl_xor_sync(group, (unsigned long long)key, step, LANES);
            if (other > key) key = other;
        }
        return key;
    }
    /* x becomes its softmax. Returns whether that is a number. */
    __device__ __forceinline__ bool softmax(int32_t e, float (&x)[VALS]) const
    {
        float most = x[0];
#pragma unroll
        for (int v = 1; v < VALS; v++) most = fmaxf(most, x[v]);
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(group, most, step, LANES));
#pragma unroll
        for (int v = 0; v < VALS; v++) x[v] = expert(v) < e ? lf__loom_exp(minus(x[v], most)) : 0;
        const float all = sum(x);
#pragma unroll
        for (int v = 0; v < VALS; v++) x[v] = over(x[v], all);
        return all == all;
    }
};

/* ---- noise ----------------------------------------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., SC'11): the four words of a counter, in place. */
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

/* z: logits, becomes (logits + scale * noise) / temperature. */
template <int LANES, int QUADS>
__device__ __forceinline__ void add_noise(const token_lanes<LANES, QUADS> &lanes, const lf__loom_route_args &a,
                                          const lf_route_schedule &s, int64_t t, float (&z)[4 * QUADS])
{
    const uint64_t token = (uint64_t)a.token[t], seed = (uint64_t)a.seed;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        uint32_t c[4] = {(uint32_t)token, (uint32_t)(token >> 32), (uint32_t)s.step,
                         (uint32_t)(a.layer * 64 + lanes.lane + LANES * q)};
        philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
#pragma unroll
        for (int j = 0; j < 4; j++)
            z[4 * q + j] = over(plus(z[4 * q + j], times(s.noise_scale, lf__loom_gumbel(c[j]))), s.temperature);
    }
}

/* ---- choosing -------------------------------------------------------------------------------------------------------- */

/* Orders by z, then by the lower index: larger is better. NaN comes below -inf, and every key is above 0, which is "taken". */
__device__ __forceinline__ uint64_t key_of(float z, int32_t index)
{
    const uint32_t bits = __float_as_uint(plus(z, 0.0f)); /* -0 and 0 are a tie */
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)(z == z ? ordered : 0u) << 32 | ~(uint32_t)index;
}

__device__ __forceinline__ float z_of(uint64_t key)
{
    const uint32_t ordered = (uint32_t)(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered); /* of NaN: some NaN */
}

/* All lanes of a token leave with its k choices and their weights. K: at least k. */
template <int LANES, int QUADS, int K>
__device__ __forceinline__ void choose(const token_lanes<LANES, QUADS> &lanes, int32_t e, int32_t k, const float (&z)[4 * QUADS],
                                       int32_t (&expert)[K], float (&weight)[K])
{
    uint64_t key[4 * QUADS];
    bool spoiled = false;
#pragma unroll
    for (int v = 0; v < 4 * QUADS; v++) {
        const bool is = lanes.expert(v) < e;
        key[v] = is ? key_of(z[v], lanes.expert(v)) : 0;
        spoiled |= is && z[v] != z[v];
    }
    float first = 0, sum = 0;
#pragma unroll
    for (int c = 0; c < K; c++) {
        if (c >= k) break;
        uint64_t best = key[0];
#pragma unroll
        for (int v = 1; v < 4 * QUADS; v++)
            if (key[v] > best) best = key[v];
        best = lanes.best(best);
#pragma unroll
        for (int v = 0; v < 4 * QUADS; v++)
            if (key[v] == best) key[v] = 0; /* keys differ by their index */
        if (c == 0) first = z_of(best);
        expert[c] = (int32_t) ~(uint32_t)best;
        weight[c] = lf__loom_exp(minus(z_of(best), first));
        sum = plus(sum, weight[c]);
    }
    if (__any_sync(lanes.group, spoiled)) sum = __int_as_float(0x7fc00000);
#pragma unroll
    for (int c = 0; c < K; c++)
        if (c < k) weight[c] = over(weight[c], sum);
}

/* What a block adds up. */
struct tally {
    int32_t count[LF_MAX_EXPERTS + 2]; /* [e]: routed nowhere; [e + 1]: tokens whose probabilities are no numbers */
    unsigned long long units[LF_MAX_EXPERTS];
};

/* units: a thread's sums of probabilities, by expert. Integers: any order gives the same. */
template <int LANES, int QUADS>
__device__ __forceinline__ void add_units(const token_lanes<LANES, QUADS> &lanes, int32_t e,
                                          unsigned long long (&units)[4 * QUADS], tally *sums)
{
#pragma unroll
    for (int v = 0; v < 4 * QUADS; v++) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) units[v] += __shfl_xor_sync(~0u, units[v], step);
        if (threadIdx.x % 32 < LANES && lanes.expert(v) < e) atomicAdd(&sums->units[lanes.expert(v)], units[v]);
    }
}

/* logits: (n, e); writes expert and weight (n, k), prob (n, e) where it is wanted, and the chunk's part of `chunks`. */
template <int LANES, int QUADS, int K>
__global__ void __launch_bounds__(THREADS)
    loom_route_choose(const lf__loom_route_args a, const lf__loom_chunks chunks, bool whole)
{
    __shared__ tally sums;
    for (int32_t x = threadIdx.x; x < a.e + 2; x += THREADS) sums.count[x] = 0;
    for (int32_t x = threadIdx.x; x < a.e; x += THREADS) sums.units[x] = 0;
    __syncthreads();
    const token_lanes<LANES, QUADS> lanes;
    const lf_route_schedule s = a.schedule ? *a.schedule : lf_route_schedule{0, 0, 1};
    const bool noisy = a.token && s.noise_scale != 0;
    unsigned long long units[4 * QUADS] = {};
    const int64_t from = (int64_t)blockIdx.x * chunks.tokens, to = min(from + chunks.tokens, a.n);
    for (int64_t t = from + threadIdx.x / LANES; t < to; t += THREADS / LANES) {
        float logit[4 * QUADS], z[4 * QUADS], weight[K];
        int32_t expert[K];
        const bool valid = !a.valid || a.valid[t];
        lanes.load(a.logits + t * a.e, a.e, whole, -INFINITY, logit);
#pragma unroll
        for (int v = 0; v < 4 * QUADS; v++) z[v] = over(logit[v], s.temperature);
        if (a.routing.prob || a.prob_sum) {
            float prob[4 * QUADS];
#pragma unroll
            for (int v = 0; v < 4 * QUADS; v++) prob[v] = z[v];
            const bool number = lanes.softmax(a.e, prob);
            if (a.routing.prob) lanes.store(a.routing.prob + t * a.e, a.e, whole, prob);
            if (valid && !number && lanes.lane == 0) atomicAdd(&sums.count[a.e + 1], 1);
#pragma unroll
            for (int v = 0; v < 4 * QUADS; v++)
                if (valid && number) units[v] += lf__loom_units(prob[v]);
        }
#pragma unroll
        for (int c = 0; c < K; c++) expert[c] = -1, weight[c] = 0;
        if (valid) {
            if (noisy) {
#pragma unroll
                for (int v = 0; v < 4 * QUADS; v++) z[v] = logit[v];
                add_noise(lanes, a, s, t, z);
            }
            choose<LANES, QUADS, K>(lanes, a.e, a.k, z, expert, weight);
        }
#pragma unroll
        for (int c = 0; c < K; c++) {
            if (c >= a.k || c % LANES != lanes.lane) continue;
            a.routing.expert[t * a.k + c] = expert[c];
            a.routing.weight[t * a.k + c] = weight[c];
            atomicAdd(&sums.count[expert[c] < 0 ? a.e : expert[c]], 1);
        }
    }
    if (a.prob_sum) add_units(lanes, a.e, units, &sums);
    __syncthreads();
    for (int32_t x = threadIdx.x; x < a.e + 2; x += THREADS) chunks.counts[(int64_t)x * chunks.n + blockIdx.x] = sums.count[x];
    if (!a.prob_sum) return;
    for (int32_t x = threadIdx.x; x < a.e; x += THREADS) chunks.units[(int64_t)x * chunks.n + blockIdx.x] = sums.units[x];
}

/* ---- backward -------------------------------------------------------------------------------------------------------- */

/* The weights' part: they are a softmax over the chosen z alone, dz_c = w_c (dw_c - sum_j w_j dw_j). Returns whether the token is
 * routed somewhere. */
template <int LANES, int QUADS, int K>
__device__ __forceinline__ bool weights_backward(const token_lanes<LANES, QUADS> &lanes, const lf__loom_route_args &a, int64_t t,
                                                 float (&dz)[4 * QUADS])
{
    const int32_t *expert = a.routing.expert + t * a.k;
    const float *weight = a.routing.weight + t * a.k, *dweight = a.dweight + t * a.k;
    float w[K], dw[K], mean = 0;
#pragma unroll
    for (int c = 0; c < K; c++) {
        w[c] = c < a.k ? weight[c] : 0;
        dw[c] = c < a.k ? dweight[c] : 0;
        if (c < a.k) mean = plus(mean, times(w[c], dw[c]));
    }
#pragma unroll
    for (int v = 0; v < 4 * QUADS; v++) dz[v] = 0;
#pragma unroll
    for (int c = 0; c < K; c++) {
        if (c >= a.k) break;
        const int32_t x = expert[c];
#pragma unroll
        for (int v = 0; v < 4 * QUADS; v++)
            if (lanes.expert(v) == x) dz[v] = times(w[c], minus(dw[c], mean));
    }
    return expert[0] >= 0;
}

/* dweight: (n, k), dprob_sum: (e) or NULL -> dlogits (n, e). */
template <int LANES, int QUADS, int K>
__global__ void __launch_bounds__(BACKWARD_THREADS) loom_route_backward(const lf__loom_route_args a, bool whole)
{
    const token_lanes<LANES, QUADS> lanes;
    const int64_t t = ((int64_t)blockIdx.x * BACKWARD_THREADS + threadIdx.x) / LANES;
    if (t >= a.n) return;
    const float temperature = a.schedule ? a.schedule->temperature : 1;
    float dz[4 * QUADS];
    const bool routed = weights_backward<LANES, QUADS, K>(lanes, a, t, dz) && (!a.valid || a.valid[t]);
    if (a.dprob_sum && routed) {
        float g[4 * QUADS], p[4 * QUADS], product[4 * QUADS];
        lanes.load(a.dprob_sum, a.e, false, 0, g);
        lanes.load(a.routing.prob + t * a.e, a.e, whole, 0, p);
#pragma unroll
        for (int v = 0; v < 4 * QUADS; v++) product[v] = times(p[v], g[v]);
        const float mean = lanes.sum(product);
#pragma unroll
        for (int v = 0; v < 4 * QUADS; v++) dz[v] = plus(dz[v], times(p[v], minus(g[v], mean)));
    }
#pragma unroll
    for (int v = 0; v < 4 * QUADS; v++) dz[v] = routed ? over(dz[v], temperature) : 0;
    lanes.store(a.dlogits + t * a.e, a.e, whole, dz);
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

enum operation { FORWARD, BACKWARD };

template <int LANES, int QUADS, int K>
static lf_status launch(operation what, const lf__loom_call *call, const lf__loom_route_args *a)
{
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const uintptr_t rows = (uintptr_t)a->logits | (uintptr_t)a->routing.prob | (uintptr_t)a->dlogits;
    const bool whole = a->e % 4 == 0 && rows % 16 == 0;
    if (what == BACKWARD) {
        loom_route_backward<LANES, QUADS, K>
            <<<blocks_for(a->n, BACKWARD_THREADS / LANES), BACKWARD_THREADS, 0, stream>>>(*a, whole);
        return lf__cuda_launched("loom_route_backward", stream, 0);
    }
    lf__loom_chunks chunks;
    lf_status rc = lf__loom_cuda_chunks(call, a->n, a->e, THREADS / LANES, &chunks);
    if (rc < 0) return rc;
    loom_route_choose<LANES, QUADS, K><<<(unsigned)chunks.n, THREADS, 0, stream>>>(*a, chunks, whole);
    rc = lf__cuda_launched("loom_route_choose", stream, 0);
    return rc < 0 ? rc : lf__loom_cuda_sort_chunks(call, a, a->routing.expert, &chunks);
}

template <int LANES, int QUADS> static lf_status launch(operation what, const lf__loom_call *call, const lf__loom_route_args *a)
{
    return a->k <= 2 ? launch<LANES, QUADS, 2>(what, call, a) : launch<LANES, QUADS, LF_MAX_TOP_K>(what, call, a);
}

static lf_status run(operation what, const lf__loom_call *call, const lf__loom_route_args *a)
{
    const int before = lf__loom_cuda_enter(call);
    lf_status rc;
    if (a->e <= 4) rc = launch<1, 1>(what, call, a);
    else if (a->e <= 8) rc = launch<2, 1>(what, call, a);
    else if (a->e <= 16) rc = launch<4, 1>(what, call, a);
    else if (a->e <= 32) rc = launch<8, 1>(what, call, a);
    else if (a->e <= 64) rc = launch<16, 1>(what, call, a);
    else if (a->e <= 128) rc = launch<32, 1>(what, call, a);
    else rc = launch<32, 2>(what, call, a);
    return lf__loom_cuda_leave(call, before, rc, what == BACKWARD ? "loom_route_backward" : "loom_route_sort");
}

lf_status lf__loom_cuda_route(const lf__loom_call *call, const lf__loom_args *args) { return run(FORWARD, call, &args->route); }

lf_status lf__loom_cuda_route_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    return args->route.n == 0 ? LF_OK : run(BACKWARD, call, &args->route);
}
