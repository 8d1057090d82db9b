/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cuda_vec.cuh  Up to 16 bytes of f32 or bf16 at once, and arithmetic that the compiler must not fuse: the CPU's
 *  kernels are built without contraction, and what is computed alike on both gives the same bits. */
#ifndef LF_LOOM_CUDA_VEC_CUH
#define LF_LOOM_CUDA_VEC_CUH

#include <cuda_bf16.h>

#include "loom_cuda.h"

struct bf16 {
    uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

/* To nearest even; a NaN stays one. */
__device__ __forceinline__ void narrow(float x, float &to) { to = x; }
__device__ __forceinline__ void narrow(float x, bf16 &to) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

/* By name: left to itself, the compiler splits some stores of 16 bytes into four. */
__device__ __forceinline__ void store16(void *to, uint4 v)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/* N neighbours, read and written at once. */
template <typename T, int N> struct alignas(sizeof(T) * N) pack {
    T x[N];
    __device__ __forceinline__ void unpack(float (&f)[N]) const
    {
#pragma unroll
        for (int i = 0; i < N; i++) f[i] = widen(x[i]);
    }
    __device__ __forceinline__ void set(const float (&f)[N])
    {
#pragma unroll
        for (int i = 0; i < N; i++) narrow(f[i], x[i]);
    }
    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < N; i++) narrow(0.0f, x[i]);
    }
};

/* Two in a word: one instruction converts both. */
template <> struct alignas(16) pack<bf16, 8> {
    uint32_t x[4];
    __device__ __forceinline__ void unpack(float (&f)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = __uint_as_float(x[i] << 16);
            f[2 * i + 1] = __uint_as_float(x[i] & 0xffff0000u);
        }
    }
    __device__ __forceinline__ void set(const float (&f)[8])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __nv_bfloat162 two = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
            x[i] = (uint32_t)__bfloat16_as_ushort(two.x) | (uint32_t)__bfloat16_as_ushort(two.y) << 16;
        }
    }
    __device__ __forceinline__ void clear() { x[0] = x[1] = x[2] = x[3] = 0; }
};

/* Pack number i of an array that no one writes meanwhile. */
template <typename T, int N> __device__ __forceinline__ pack<T, N> load_pack(const T *base, int64_t i)
{
    pack<T, N> p;
    const pack<T, N> *from = reinterpret_cast<const pack<T, N> *>(base) + i;
    if constexpr (sizeof p == 16) *reinterpret_cast<uint4 *>(&p) = __ldg(reinterpret_cast<const uint4 *>(from));
    else p = *from;
    return p;
}

/* The same where the thread itself may write the pack later. */
template <typename T, int N> __device__ __forceinline__ pack<T, N> load_own(const T *base, int64_t i)
{
    pack<T, N> p;
    const pack<T, N> *from = reinterpret_cast<const pack<T, N> *>(base) + i;
    if constexpr (sizeof p == 16) *reinterpret_cast<uint4 *>(&p) = *reinterpret_cast<const uint4 *>(from);
    else p = *from;
    return p;
}

template <typename T, int N> __device__ __forceinline__ void store_pack(T *base, int64_t i, const pack<T, N> &p)
{
    pack<T, N> *to = reinterpret_cast<pack<T, N> *>(base) + i;
    if constexpr (sizeof p == 16) store16(to, *reinterpret_cast<const uint4 *>(&p));
    else *to = p;
}

/* Eight neighbours from `base` on as f32: one or two accesses of 16 bytes, read once and not kept in the caches. */
__device__ __forceinline__ void load8(const float *base, float (&f)[8])
{
    const float4 a = __ldcs(reinterpret_cast<const float4 *>(base)), b = __ldcs(reinterpret_cast<const float4 *>(base) + 1);
    f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w;
    f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
}

__device__ __forceinline__ void load8(const bf16 *base, float (&f)[8])
{
    const uint4 four = __ldcs(reinterpret_cast<const uint4 *>(base));
    const pack<bf16, 8> p = {{four.x, four.y, four.z, four.w}};
    p.unpack(f);
}

__device__ __forceinline__ void store8(float *base, const float (&f)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        store16(base + i, make_uint4(__float_as_uint(f[i]), __float_as_uint(f[i + 1]), __float_as_uint(f[i + 2]),
                                     __float_as_uint(f[i + 3])));
}

__device__ __forceinline__ void store8(bf16 *base, const float (&f)[8])
{
    pack<bf16, 8> p;
    p.set(f);
    store16(base, make_uint4(p.x[0], p.x[1], p.x[2], p.x[3]));
}

/* Each operation rounded by itself, to nearest even. */
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }

#endif
