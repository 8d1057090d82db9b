/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: sorting choices.
 *
 * Two kernels. The first gives each block a run of tokens ("chunk") and counts their experts; the
 * second turns the chunks' counts into places and writes the permutation. Counts and places are integers, so neither the
 * number of chunks nor the order of blocks changes a bit. */
#include "loom_cuda_vec.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, MAX_CHUNKS = 512, MIN_CHUNKS = 64, CHUNK_CELLS = 16384 };
static_assert((size_t)MIN_CHUNKS * (LF_MAX_EXPERTS + 1) * sizeof(int32_t) <= LF_LOOM_CUDA_SCRATCH, "counts fit the scratch");
static_assert((size_t)CHUNK_CELLS * sizeof(int32_t) <= LF_LOOM_CUDA_SCRATCH, "counts fit the scratch");

static unsigned blocks_for(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

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
