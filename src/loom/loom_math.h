/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_math.h  Exponential, logarithm and fixed-point sums of routing: the same bits on every device.
 *
 *  Libraries and devices differ in the last bit of exp and log, and a bit is enough to break a tie of two experts the other
 *  way. Here everything is made of additions, products and quotients that IEEE 754 rounds to one result. The CPU's sources are
 *  built without contraction; on CUDA each operation is named. The polynomials are minimax ones, found by Remez exchange.
 *  And stochastic rounding, by words that are the same on every device too. */
#ifndef LF_LOOM_MATH_H
#define LF_LOOM_MATH_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define LF_LOOM_FN static __device__ __forceinline__
#define LF_MUL(a, b) __fmul_rn(a, b)
#define LF_ADD(a, b) __fadd_rn(a, b)
#define LF_SUB(a, b) __fsub_rn(a, b)
#define LF_DIV(a, b) __fdiv_rn(a, b)
#define LF_MUL64(a, b) __dmul_rn(a, b)
#define LF_ADD64(a, b) __dadd_rn(a, b)
#define LF_SUB64(a, b) __dsub_rn(a, b)
#define LF_DIV64(a, b) __ddiv_rn(a, b)
#define LF_ROUND_TO_F32(a) __double2float_rn(a)
#else
#define LF_LOOM_FN static inline
#define LF_MUL(a, b) ((a) * (b))
#define LF_ADD(a, b) ((a) + (b))
#define LF_SUB(a, b) ((a) - (b))
#define LF_DIV(a, b) ((a) / (b))
#define LF_MUL64(a, b) ((a) * (b))
#define LF_ADD64(a, b) ((a) + (b))
#define LF_SUB64(a, b) ((a) - (b))
#define LF_DIV64(a, b) ((a) / (b))
#define LF_ROUND_TO_F32(a) ((float)(a))
#endif

/* 2^k for k from -126 to 127. */
LF_LOOM_FN float lf__loom_power2(int32_t k)
{
    const uint32_t bits = (uint32_t)(k + 127) << 23;
    float p;
    memcpy(&p, &bits, sizeof p);
    return p;
}

/** e^x for x <= 0, within 1.2 units in the last place; a NaN stays one. */
LF_LOOM_FN float lf__loom_exp(float x)
{
    if (!(x > -104.0f)) return x != x ? x : 0.0f; /* below half of the smallest number */
    const float shift = 12582912.0f;              /* 3 * 2^22: adding it rounds to an integer */
    const float k = LF_SUB(LF_ADD(LF_MUL(x, 1.44269504f), shift), shift);
    /* ln 2 in two parts, so that k times the first is exact */
    const float r = LF_SUB(LF_SUB(x, LF_MUL(k, 0.693359375f)), LF_MUL(k, -2.12194440e-4f));
    float q = 0.0013941204f;
    q = LF_ADD(LF_MUL(q, r), 0.008363235f);
    q = LF_ADD(LF_MUL(q, r), 0.041666374f);
    q = LF_ADD(LF_MUL(q, r), 0.16666577f);
    q = LF_ADD(LF_MUL(q, r), 0.5f);
    const float p = LF_ADD(LF_ADD(LF_MUL(LF_MUL(r, r), q), r), 1.0f);
    const int32_t n = (int32_t)k, half = n / 2; /* in two steps: the last one rounds what is subnormal */
    return LF_MUL(LF_MUL(p, lf__loom_power2(half)), lf__loom_power2(n - half));
}

/** ln x for a normal x > 0, within 2 units in the last place: x = 2^k m with m from sqrt(1/2) on, and
 *  ln m = 2 atanh(s), s = (m - 1) / (m + 1). */
LF_LOOM_FN double lf__loom_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint64_t root_half = 0x3fe6a09e667f3bcdu; /* its bits: what lies above them has the next exponent */
    const int64_t k = (int64_t)(bits - root_half) >> 52;
    double m;
    bits -= (uint64_t)k << 52;
    memcpy(&m, &bits, sizeof m);
    const double s = LF_DIV64(LF_SUB64(m, 1.0), LF_ADD64(m, 1.0)), z = LF_MUL64(s, s);
    double q = 0.14617871940549487;
    q = LF_ADD64(LF_MUL64(q, z), 0.15331597003764186);
    q = LF_ADD64(LF_MUL64(q, z), 0.18182893217809906);
    q = LF_ADD64(LF_MUL64(q, z), 0.2222221107285613);
    q = LF_ADD64(LF_MUL64(q, z), 0.28571428626398954);
    q = LF_ADD64(LF_MUL64(q, z), 0.39999999999898445);
    q = LF_ADD64(LF_MUL64(q, z), 0.666666666666667);
    const double log_m = LF_ADD64(LF_MUL64(LF_MUL64(s, z), q), LF_ADD64(s, s));
    return LF_ADD64(LF_MUL64((double)k, 0.6931471805599453), log_m);
}

/** The number that a random word stands for: u in (0, 1), -ln(-ln u). */
LF_LOOM_FN float lf__loom_gumbel(uint32_t word)
{
    const double u = LF_ADD64(LF_MUL64((double)(word >> 8), 0x1p-24), 0x1p-25);
    return LF_ROUND_TO_F32(-lf__loom_log(-lf__loom_log(u)));
}

/** A bijection of 32-bit words in which every bit of x reaches every bit: "lowbias32", found by C. Wellons's search (2018). */
LF_LOOM_FN uint32_t lf__loom_mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/** What the elements of a class draw by in a step. */
LF_LOOM_FN uint32_t lf__loom_round_key(uint32_t step, int32_t klass)
{
    return lf__loom_mix(lf__loom_mix(step) + 0x9e3779b9u * (uint32_t)(klass + 1));
}

/** An element's word: the low half is for exp_avg, the high half for exp_avg_sq. */
LF_LOOM_FN uint32_t lf__loom_round_word(uint32_t key, int64_t element)
{
    return lf__loom_mix((uint32_t)element ^ key ^ (uint32_t)((uint64_t)element >> 32) * 0x9e3779b9u);
}

/** x as bf16: the neighbour towards 0, or with a probability of the 16 bits cut off the one away from it. Of the word the low 16
 *  bits count. Infinities stay, a NaN stays one. */
LF_LOOM_FN uint16_t lf__loom_round_randomly(float x, uint32_t word)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7f800000u) == 0x7f800000u) return (uint16_t)(bits >> 16 | ((bits & 0x7fffffu) != 0 ? 0x40u : 0u));
    return (uint16_t)((bits + (word & 0xffffu)) >> 16);
}

/** A probability in units of 2^-32: integers add to the same sum in any order. */
LF_LOOM_FN uint64_t lf__loom_units(float p) { return (uint64_t)LF_MUL(p, 0x1p32f); }
LF_LOOM_FN float lf__loom_from_units(uint64_t units) { return LF_MUL((float)units, 0x1p-32f); }

#endif
