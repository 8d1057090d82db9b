/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: the second half of routing. A first kernel (choosing, or counting given choices) leaves what each run of tokens ("chunk")
 * gives to each expert; the kernel here turns that into places, writes the permutation, and adds up the probabilities. All of it
 * is integers, so neither the number of chunks nor the order of blocks changes a bit. */
#include "loom_cuda_route.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, MAX_CHUNKS = 512 };

/* ---- chunks ---------------------------------------------------------------------------------------------------------- */

lf_status lf__loom_cuda_chunks(const lf__loom_call *call, int64_t n, int32_t e, int32_t at_once, lf__loom_chunks *out)
{
    const int64_t room = LF_LOOM_CUDA_SCRATCH / (12 * (int64_t)e + 8), most = room < MAX_CHUNKS ? room : MAX_CHUNKS;
    const int64_t tokens = ((n + most - 1) / most + at_once - 1) / at_once * at_once;
    out->tokens = (int32_t)(n ? tokens : 1);
    out->n = (int32_t)(n ? (n + tokens - 1) / tokens : 1);
    void *scratch = NULL;
    lf_status rc = lf__loom_cuda_scratch(call, &scratch);
    out->units = (unsigned long long *)scratch;
    out->counts = (int32_t *)(out->units + (int64_t)e * out->n);
    return rc;
}

/* ---- counting given choices ------------------------------------------------------------------------------------------ */

__device__ __forceinline__ int32_t or_nowhere(int32_t expert, int32_t e) { return expert >= 0 && expert < e ? expert : e; }

/* expert: (n, k) chosen elsewhere. */
__global__ void __launch_bounds__(THREADS)
    loom_sort_count(const int32_t *expert, int64_t n, int32_t e, int32_t k, const lf__loom_chunks chunks)
{
    __shared__ int32_t count[LF_MAX_EXPERTS + 1];
    for (int32_t x = threadIdx.x; x <= e; x += THREADS) count[x] = 0;
    __syncthreads();
    const int64_t from = (int64_t)blockIdx.x * chunks.tokens * k, to = min(from + (int64_t)chunks.tokens * k, n * k);
    for (int64_t s = from + threadIdx.x; s < to; s += THREADS) atomicAdd(&count[or_nowhere(expert[s], e)], 1);
    __syncthreads();
    for (int32_t x = threadIdx.x; x <= e; x += THREADS) chunks.counts[(int64_t)x * chunks.n + blockIdx.x] = count[x];
}

/* ---- sorting --------------------------------------------------------------------------------------------------------- */

/* next[x]: slots of x in chunks before this block's; total[x]: in all. A warp takes a row of counts. */
__device__ __forceinline__ void sum_chunks(const lf__loom_chunks &chunks, int32_t e, int32_t *next, int32_t *total)
{
    const int32_t lane = threadIdx.x % 32, mine = (int32_t)blockIdx.x;
    for (int32_t x = threadIdx.x / 32; x <= e; x += WARPS) {
        const int32_t *counts = chunks.counts + (int64_t)x * chunks.n;
        int32_t all = 0, before = 0;
#pragma unroll 4
        for (int32_t i = lane; i < chunks.n; i += 32) {
            const int32_t c = counts[i];
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

/* One warp of each block: experts are shared out over the blocks. prob_sum: (e). */
__device__ __forceinline__ void add_probabilities(const lf__loom_chunks &chunks, int32_t e, float *prob_sum)
{
    const int32_t lane = threadIdx.x % 32;
    for (int32_t x = (int32_t)blockIdx.x; x < e; x += chunks.n) {
        unsigned long long sum = 0;
        int32_t spoiled = 0;
        for (int32_t i = lane; i < chunks.n; i += 32) {
            sum += chunks.units[(int64_t)x * chunks.n + i];
            spoiled |= chunks.counts[((int64_t)e + 1) * chunks.n + i];
        }
#pragma unroll
        for (int32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        spoiled = __any_sync(~0u, spoiled);
        if (lane == 0) prob_sum[x] = spoiled ? __int_as_float(0x7fc00000) : lf__loom_from_units(sum);
    }
}

/* Slots in order, THREADS at a time: the place of one is next[expert] plus its equals in earlier warps and lanes. */
__global__ void __launch_bounds__(THREADS) loom_route_sort(const lf_routing r, const int32_t *expert, int64_t n, int32_t e,
                                                           int32_t k, const lf__loom_chunks chunks, float *prob_sum)
{
    __shared__ int32_t next[LF_MAX_EXPERTS + 1], total[LF_MAX_EXPERTS + 1], equals[WARPS * (LF_MAX_EXPERTS + 1)];
    const int32_t warp = threadIdx.x / 32, row = e + 1; /* of equals */
    for (int32_t i = threadIdx.x; i < WARPS * row; i += THREADS) equals[i] = 0;
    sum_chunks(chunks, e, next, total);
    __syncthreads();
    if (warp == 0) add_offsets(r, e, next, total);
    if (warp == 1 && prob_sum) add_probabilities(chunks, e, prob_sum);
    __syncthreads();
    const int64_t from = (int64_t)blockIdx.x * chunks.tokens * k, to = min(from + (int64_t)chunks.tokens * k, n * k);
    for (int64_t base = from; base < to; base += THREADS) {
        const int64_t s = base + threadIdx.x;
        int32_t x = -1;
        if (s < to) x = or_nowhere(expert[s], e);
        const uint32_t peers = __match_any_sync(~0u, x);
        const int32_t rank = __popc(peers & ((1u << threadIdx.x % 32) - 1));
        if (x >= 0 && rank == 0) equals[warp * row + x] = __popc(peers);
        __syncthreads();
        if (x >= 0) {
            int32_t place = next[x] + rank;
            for (int32_t w = 0; w < warp; w++) place += equals[w * row + x];
            r.row[place] = (int32_t)s;
            r.slot[s] = place;
        }
        __syncthreads();
        if (x >= 0 && rank == 0) {
            atomicAdd(&next[x], equals[warp * row + x]);
            equals[warp * row + x] = 0;
        }
        __syncthreads();
    }
}

lf_status lf__loom_cuda_sort_chunks(const lf__loom_call *call, const lf__loom_route_args *a, const int32_t *expert,
                                    const lf__loom_chunks *chunks)
{
    loom_route_sort<<<(unsigned)chunks->n, THREADS, 0, (cudaStream_t)call->stream>>>(a->routing, expert, a->n, a->e, a->k,
                                                                                     *chunks, a->prob_sum);
    return lf__cuda_launched("loom_route_sort", (cudaStream_t)call->stream, 0);
}

lf_status lf__loom_cuda_sort(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_route_args *a = &args->route;
    const int before = lf__loom_cuda_enter(call);
    const cudaStream_t stream = (cudaStream_t)call->stream;
    lf__loom_chunks chunks;
    lf_status rc = lf__loom_cuda_chunks(call, a->n, a->e, THREADS / 8, &chunks);
    if (rc == LF_OK) {
        loom_sort_count<<<(unsigned)chunks.n, THREADS, 0, stream>>>(a->given, a->n, a->e, a->k, chunks);
        rc = lf__cuda_launched("loom_sort_count", stream, 0);
    }
    if (rc == LF_OK) rc = lf__loom_cuda_sort_chunks(call, a, a->given, &chunks);
    return lf__loom_cuda_leave(call, before, rc, "loom_route_sort");
}
