/* SPDX-License-Identifier: Apache-2.0 */
/* f32 gradients to bf16 and back on CUDA: the same bits as src/nexus/nexus_cpu.c. Each element is read once and written once, eight
 * of a thread at a time where both sides are aligned alike. */
#include "nexus_cuda.h"

enum { THREADS = 256, MOST_BLOCKS = 4096, PACK = 8 };

/* To nearest even; a NaN stays one. By hand: the hardware's conversion has one NaN only. */
static __device__ uint32_t narrow_one(float x)
{
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

static __device__ uint32_t narrow_two(float low, float high) { return narrow_one(low) | narrow_one(high) << 16; }

static __device__ float widen_one(uint16_t x, float factor) { return __uint_as_float((uint32_t)x << 16) * factor; }

static __device__ float2 widen_two(uint32_t x, float factor)
{
    return make_float2(__uint_as_float(x << 16) * factor, __uint_as_float(x & 0xffff0000u) * factor);
}

/* data, wire: (count); the first `head` and what is left behind whole packs one by one, the rest as (packs, PACK), 16 bytes aligned */
static __global__ void narrow(const float *data, uint16_t *wire, int64_t count, int64_t head, int64_t packs)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const float4 *from = (const float4 *)(data + head);
    uint4 *to = (uint4 *)(wire + head);
    for (int64_t i = first; i < packs; i += step) {
        const float4 a = from[2 * i], b = from[2 * i + 1];
        to[i] = make_uint4(narrow_two(a.x, a.y), narrow_two(a.z, a.w), narrow_two(b.x, b.y), narrow_two(b.z, b.w));
    }
    const int64_t single = count - packs * PACK;
    for (int64_t i = first; i < single; i += step) {
        const int64_t at = i < head ? i : i + packs * PACK;
        wire[at] = (uint16_t)narrow_one(data[at]);
    }
}

static __global__ void widen(const uint16_t *wire, float *data, int64_t count, int64_t head, int64_t packs, float factor)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint4 *from = (const uint4 *)(wire + head);
    float4 *to = (float4 *)(data + head);
    for (int64_t i = first; i < packs; i += step) {
        const uint4 p = from[i];
        const float2 a = widen_two(p.x, factor), b = widen_two(p.y, factor), c = widen_two(p.z, factor),
                     d = widen_two(p.w, factor);
        to[2 * i] = make_float4(a.x, a.y, b.x, b.y);
        to[2 * i + 1] = make_float4(c.x, c.y, d.x, d.y);
    }
    const int64_t single = count - packs * PACK;
    for (int64_t i = first; i < single; i += step) {
        const int64_t at = i < head ? i : i + packs * PACK;
        data[at] = widen_one(wire[at], factor);
    }
}

typedef struct cut {
    int64_t head, packs;
    unsigned grid;
} cut;

/* Where the wire has 16 bytes whole the gradient has too, or nothing is packed. */
static cut cut_of(const float *data, const uint16_t *wire, int64_t count)
{
    cut c = {(int64_t)((16 - (uintptr_t)wire % 16) % 16 / sizeof *wire), 0, 0};
    if (c.head > count) c.head = count;
    if ((uintptr_t)(data + c.head) % 16 == 0) c.packs = (count - c.head) / PACK;
    const int64_t single = count - c.packs * PACK, work = c.packs > single ? c.packs : single;
    const int64_t blocks = (work + THREADS - 1) / THREADS;
    c.grid = (unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
    return c;
}

cudaError_t lf__nexus_cuda_narrow(cudaStream_t stream, const float *data, uint16_t *wire, int64_t count)
{
    if (count <= 0) return cudaSuccess;
    const cut c = cut_of(data, wire, count);
    narrow<<<c.grid, THREADS, 0, stream>>>(data, wire, count, c.head, c.packs);
    return cudaGetLastError();
}

cudaError_t lf__nexus_cuda_widen(cudaStream_t stream, const uint16_t *wire, float *data, int64_t count, float factor)
{
    if (count <= 0) return cudaSuccess;
    const cut c = cut_of(data, wire, count);
    widen<<<c.grid, THREADS, 0, stream>>>(wire, data, count, c.head, c.packs, factor);
    return cudaGetLastError();
}
