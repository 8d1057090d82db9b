/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cuda_mma.cuh  Products in f32 on bf16 tensor cores.
 *
 *  An f32 number is the sum of three bf16 numbers, exactly unless the last ones underflow; products of bf16 numbers are exact in f32.
 *  So x w is the sum of a few products of parts; those below 2^-26 of it are left out. A tensor core rounds its sums towards zero:
 *  sums on it are kept short, and added up by ordinary additions. */
#ifndef LF_LOOM_CUDA_MMA_CUH
#define LF_LOOM_CUDA_MMA_CUH

#include "loom_cuda_vec.cuh"

/** c (16 x 8) += a (16 x 16) b (16 x 8), the calling warp's fragments. With g = lane / 4 and t = lane % 4 a lane holds
 *  a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8; a[2], a[3]: the same, columns + 8; b0: rows 2t and 2t + 1 of column g; b1:
 *  rows + 8; c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8. */
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/** Two floats as bf16 in a word, the first one low. */
__device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return (uint32_t)__bfloat16_as_ushort(two.x) | (uint32_t)__bfloat16_as_ushort(two.y) << 16;
}

/** Two floats as three pairs, largest part first. */
__device__ __forceinline__ void split(float low, float high, uint32_t (&part)[3])
{
#pragma unroll
    for (int p = 0; p < 3; p++) {
        part[p] = pair_of(low, high);
        low = minus(low, __uint_as_float(part[p] << 16));
        high = minus(high, __uint_as_float(part[p] & 0xffff0000u));
    }
}

/** How many parts an element of T has. */
template <typename T> struct parts_of {
    enum { N = 3 };
};
template <> struct parts_of<bf16> {
    enum { N = 1 };
};

/** Eight neighbours of a row, as loaded. */
template <typename T> struct eight {
    uint4 raw[sizeof(T) / 2];
    /** Elements [at, at + 8) of `row`, those behind d or of no row as zeros. `whole`: rows start and end on 16 bytes. */
    __device__ __forceinline__ void load(const T *row, int64_t at, int64_t d, bool is, bool whole)
    {
        constexpr int N = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; i++) {
            raw[i] = make_uint4(0, 0, 0, 0);
            const int64_t from = at + N * i;
            if (whole) {
                if (is && from < d) raw[i] = __ldg(reinterpret_cast<const uint4 *>(row + from));
                continue;
            }
            T x[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                x[j] = T{};
                if (is && from + j < d) x[j] = row[from + j];
            }
            memcpy(&raw[i], x, 16);
        }
    }
    /** Pair w (elements 2 w and 2 w + 1) in parts. */
    __device__ __forceinline__ void parts(int w, uint32_t (&part)[parts_of<T>::N]) const
    {
        const uint4 four = raw[w * (int)sizeof(T) / 8];
        const uint32_t word[4] = {four.x, four.y, four.z, four.w};
        if constexpr (sizeof(T) == 2) part[0] = word[w];
        else split(__uint_as_float(word[w % 2 * 2]), __uint_as_float(word[w % 2 * 2 + 1]), part);
    }
    __device__ __forceinline__ void unpack(float (&f)[8]) const
    {
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; i++) {
            pack<T, 16 / sizeof(T)> p;
            float part[16 / sizeof(T)];
            memcpy(&p, &raw[i], 16);
            p.unpack(part);
#pragma unroll
            for (int j = 0; j < 16 / (int)sizeof(T); j++) f[16 / sizeof(T) * i + j] = part[j];
        }
    }
};

#endif
