/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k with error feedback on CUDA: the same bits as src/nexus/nexus_select.c.
 *
 * The k-th largest magnitude is found digit by digit from counts of integers; tiles are put in order by sums over them. No sort, and
 * nothing depends on the order in which blocks run. A tile is what one block works on: 256 words of the mask, 32 entries each. */
#include "nexus_cuda.h"

enum { THREADS = 256, WARPS = THREADS / 32, TILE = THREADS * 32, BINS = 2048, MOST_BLOCKS = 2048, SCAN = 1024 };

/* In the scratch: counts of a digit, what is known of the k-th magnitude, and a number a tile. */
typedef struct topk_state {
    uint32_t bins[BINS];
    uint32_t above; /* digits of the k-th magnitude that are known, in place */
    uint32_t left;  /* of entries that agree with them, how many are to be taken */
} topk_state;

/* ---- gradient and residual ------------------------------------------------------------------------------------------- */

static __device__ float one_nan(float x) { return x == x ? x : __uint_as_float(0x7fc00000u); }

static __device__ float from_bf16(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }

static __device__ uint16_t to_bf16(float x)
{
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static __device__ float load(const float *x, int64_t i) { return x[i]; }
static __device__ float load(const uint16_t *x, int64_t i) { return from_bf16(x[i]); }

/* Store v in the data's dtype; what of it is not sent. */
static __device__ float send(float *x, int64_t i, float v)
{
    x[i] = v;
    return 0;
}
static __device__ float send(uint16_t *x, int64_t i, float v)
{
    const uint16_t sent = to_bf16(v);
    const float s = from_bf16(sent);
    x[i] = sent;
    return (__float_as_uint(s) & 0x7fffffffu) < 0x7f800000u ? v - s : 0;
}

template <typename T> static __global__ void fold(const T *data, float *residual, int64_t count, int keep)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const float g = load(data, i);
        residual[i] = one_nan(keep ? g + residual[i] : g);
    }
}

template <typename T> static __global__ void flush(const T *data, T *out, float *residual, int64_t count)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step)
        residual[i] = send(out, i, one_nan(load(data, i) + residual[i]));
}

/* ---- selecting ------------------------------------------------------------------------------------------------------- */

/* Digits of a magnitude's 31 bits: 11, 10, 10. */
static __device__ int shift_of(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
static __device__ uint32_t mask_of(int digit) { return digit == 0 ? 0x7ffu : 0x3ffu; }

static __device__ uint32_t key_of(float x)
{
    const uint32_t key = __float_as_uint(x) & 0x7fffffffu;
    return key > 0x7f800000u ? 0x7fffffffu : key;
}

static __global__ void begin_select(topk_state *state, uint32_t k)
{
    for (int i = threadIdx.x; i < BINS; i += THREADS) state->bins[i] = 0;
    if (threadIdx.x == 0) {
        state->above = 0;
        state->left = k;
    }
}

/* Of entries that agree with the digits known so far, how many have which next digit. */
static __global__ void count_digit(const float *residual, int64_t count, topk_state *state, int digit)
{
    __shared__ uint32_t bins[BINS];
    const int shift = shift_of(digit);
    const uint32_t mask = mask_of(digit), above = state->above, known = digit ? ~0u << shift_of(digit - 1) : 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const uint32_t key = key_of(residual[i]);
        if (((key ^ above) & known) == 0) atomicAdd(&bins[key >> shift & mask], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(&state->bins[i], bins[i]);
}

/* Sum of `x` over the block's threads up to and with this one; `total` is that of all. */
template <int N> static __device__ uint32_t sum_up_to(uint32_t x, uint32_t *total)
{
    __shared__ uint32_t warp_sum[N / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int d = 1; d < 32; d <<= 1) {
        const uint32_t other = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += other;
    }
    __syncthreads(); /* the last call's sums have been read */
    if (lane == 31) warp_sum[warp] = x;
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (int w = 0; w < N / 32; w++) {
        if (w < warp) before += warp_sum[w];
        all += warp_sum[w];
    }
    *total = all;
    return before + x;
}

/* The digit in which the `left`-th largest lies. One block; a thread has two bins, the largest first. */
static __global__ void take_digit(topk_state *state, int digit)
{
    const int high = BINS - 1 - 2 * (int)threadIdx.x;
    const uint32_t first = state->bins[high], second = state->bins[high - 1], left = state->left;
    uint32_t total;
    const uint32_t upto = sum_up_to<SCAN>(first + second, &total), before = upto - first - second;
    state->bins[high] = state->bins[high - 1] = 0;
    if (before < left && left <= upto) {
        const bool in_first = left <= before + first;
        state->above |= (uint32_t)(in_first ? high : high - 1) << shift_of(digit);
        state->left = left - before - (in_first ? 0 : first);
    }
}

/* Replace each tile's number by the sum of those before it. One block. */
static __global__ void add_tiles(uint32_t *at, int64_t tiles)
{
    uint32_t before = 0, total;
    for (int64_t from = 0; from < tiles; from += SCAN) {
        const int64_t i = from + threadIdx.x;
        const uint32_t x = i < tiles ? at[i] : 0;
        const uint32_t upto = sum_up_to<SCAN>(x, &total);
        if (i < tiles) at[i] = before + upto - x;
        before += total;
    }
}

/* Words of a tile, a bit an entry: those above the k-th magnitude, and those equal to it. */
static __device__ void compare_tile(const float *residual, int64_t count, uint32_t above, uint32_t *larger, uint32_t *equal)
{
    const int lane = threadIdx.x & 31;
    for (int w = threadIdx.x >> 5; w < THREADS; w += WARPS) {
        const int64_t i = (int64_t)blockIdx.x * TILE + w * 32 + lane;
        const bool there = i < count;
        const uint32_t key = there ? key_of(residual[i]) : 0;
        const uint32_t l = __ballot_sync(~0u, there && key > above), e = __ballot_sync(~0u, there && key == above);
        if (lane == 0) {
            larger[w] = l;
            equal[w] = e;
        }
    }
    __syncthreads();
}

static __global__ void count_ties(const float *residual, int64_t count, const topk_state *state, uint32_t *at)
{
    __shared__ uint32_t larger[THREADS], equal[THREADS];
    uint32_t total;
    compare_tile(residual, count, state->above, larger, equal);
    sum_up_to<THREADS>(__popc(equal[threadIdx.x]), &total);
    if (threadIdx.x == 0) at[blockIdx.x] = total;
}

static __global__ void mark(const float *residual, int64_t count, const topk_state *state, const uint32_t *at, uint32_t *mask,
                            int64_t words)
{
    __shared__ uint32_t larger[THREADS], equal[THREADS];
    uint32_t total;
    compare_tile(residual, count, state->above, larger, equal);
    uint32_t ties = equal[threadIdx.x];
    const uint32_t n = __popc(ties), before = at[blockIdx.x] + sum_up_to<THREADS>(n, &total) - n;
    const uint32_t take = before < state->left ? state->left - before : 0;
    for (uint32_t have = n; have > take; have--) ties &= ~(0x80000000u >> __clz(ties)); /* those behind are too many */
    const int64_t word = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (word < words) mask[word] = larger[threadIdx.x] | ties;
}

/* ---- packing and unpacking ------------------------------------------------------------------------------------------- */

/* A word of the mask, without bits behind the last entry. */
static __device__ uint32_t word_at(const uint32_t *mask, int64_t word, int64_t count)
{
    const int64_t left = count - word * 32;
    if (left <= 0) return 0;
    return left >= 32 ? mask[word] : mask[word] & ((1u << left) - 1);
}

static __global__ void weigh_tiles(const uint32_t *mask, int64_t count, uint32_t *at)
{
    uint32_t total;
    sum_up_to<THREADS>(__popc(word_at(mask, (int64_t)blockIdx.x * THREADS + threadIdx.x, count)), &total);
    if (threadIdx.x == 0) at[blockIdx.x] = total;
}

/* The tile's words, and how many entries are taken before each. */
static __device__ void place_tile(const uint32_t *mask, int64_t count, const uint32_t *at, uint32_t *word, uint32_t *place)
{
    uint32_t total;
    const uint32_t mine = word_at(mask, (int64_t)blockIdx.x * THREADS + threadIdx.x, count), n = __popc(mine);
    word[threadIdx.x] = mine;
    place[threadIdx.x] = at[blockIdx.x] + sum_up_to<THREADS>(n, &total) - n;
    __syncthreads();
}

/* A mask with another number of entries than k would write behind the values: those are left out. */
template <typename T>
static __global__ void pack(const uint32_t *mask, int64_t count, int64_t k, const uint32_t *at, float *residual, T *values)
{
    __shared__ uint32_t word[THREADS], place[THREADS];
    const int lane = threadIdx.x & 31;
    place_tile(mask, count, at, word, place);
    for (int w = threadIdx.x >> 5; w < THREADS; w += WARPS) {
        const int64_t i = (int64_t)blockIdx.x * TILE + w * 32 + lane;
        const int64_t to = (int64_t)place[w] + __popc(word[w] & ((1u << lane) - 1));
        if (word[w] >> lane & 1 && to < k) residual[i] = send(values, to, residual[i]);
    }
}

template <typename T>
static __global__ void scatter(const uint32_t *mask, int64_t count, int64_t k, const uint32_t *at, const T *values, T *out,
                               float factor)
{
    __shared__ uint32_t word[THREADS], place[THREADS];
    const int lane = threadIdx.x & 31;
    place_tile(mask, count, at, word, place);
    for (int w = threadIdx.x >> 5; w < THREADS; w += WARPS) {
        const int64_t i = (int64_t)blockIdx.x * TILE + w * 32 + lane;
        const int64_t from = (int64_t)place[w] + __popc(word[w] & ((1u << lane) - 1));
        const bool taken = word[w] >> lane & 1 && from < k;
        if (i >= count) continue;
        if (!taken) out[i] = (T)0;
        else if (factor == 1) out[i] = values[from];
        else send(out, i, one_nan(load(values, from) * factor)); /* a device's own NaN has other bits than a host's */
    }
}

/* ---- launchers --------------------------------------------------------------------------------------------------------- */

static int64_t tiles_of(const lf_topk *t) { return (t->count + TILE - 1) / TILE; }
static uint32_t *tile_numbers(const lf_topk *t) { return (uint32_t *)((topk_state *)t->scratch + 1); }

static unsigned blocks_of(int64_t count)
{
    const int64_t blocks = (count + THREADS - 1) / THREADS;
    return (unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
}

static void run_select(cudaStream_t stream, const lf_topk *t)
{
    topk_state *state = (topk_state *)t->scratch;
    uint32_t *at = tile_numbers(t);
    const unsigned tiles = (unsigned)tiles_of(t), blocks = blocks_of(t->count);
    begin_select<<<1, THREADS, 0, stream>>>(state, (uint32_t)t->k);
    for (int digit = 0; digit < 3; digit++) {
        count_digit<<<blocks, THREADS, 0, stream>>>(t->residual, t->count, state, digit);
        take_digit<<<1, SCAN, 0, stream>>>(state, digit);
    }
    count_ties<<<tiles, THREADS, 0, stream>>>(t->residual, t->count, state, at);
    add_tiles<<<1, SCAN, 0, stream>>>(at, tiles);
    mark<<<tiles, THREADS, 0, stream>>>(t->residual, t->count, state, at, (uint32_t *)t->mask, (t->count + 63) / 64 * 2);
}

template <typename T> static void run_part(cudaStream_t stream, const lf_topk *t, int part)
{
    const uint32_t *mask = (const uint32_t *)t->mask;
    uint32_t *at = tile_numbers(t);
    const unsigned tiles = (unsigned)tiles_of(t), blocks = blocks_of(t->count);
    if (part == LF__TOPK_PACK || part == LF__TOPK_SCATTER) {
        weigh_tiles<<<tiles, THREADS, 0, stream>>>(mask, t->count, at);
        add_tiles<<<1, SCAN, 0, stream>>>(at, tiles);
    }
    switch (part) {
    case LF__TOPK_FOLD: fold<<<blocks, THREADS, 0, stream>>>((const T *)t->data, t->residual, t->count, t->keep); break;
    case LF__TOPK_SELECT: run_select(stream, t); break;
    case LF__TOPK_PACK: pack<<<tiles, THREADS, 0, stream>>>(mask, t->count, t->k, at, t->residual, (T *)t->values); break;
    case LF__TOPK_SCATTER:
        scatter<<<tiles, THREADS, 0, stream>>>(mask, t->count, t->k, at, (const T *)t->values, (T *)t->out, t->factor);
        break;
    default: flush<<<blocks, THREADS, 0, stream>>>((const T *)t->data, (T *)t->out, t->residual, t->count); break;
    }
}

cudaError_t lf__nexus_cuda_topk(cudaStream_t stream, const lf_topk *t, int part)
{
    if (t->count == 0) return cudaSuccess;
    if (t->dtype == LF_DTYPE_BF16) run_part<uint16_t>(stream, t, part);
    else run_part<float>(stream, t, part);
    return cudaGetLastError();
}
