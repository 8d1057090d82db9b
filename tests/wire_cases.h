/* SPDX-License-Identifier: Apache-2.0 */
/** @file wire_cases.h  Arrays for rounding f32 to bf16 and widening it, and what must come out, for the CPU's test and for devices. */
#ifndef LF_WIRE_CASES_H
#define LF_WIRE_CASES_H

#include <math.h>
#include <string.h>

#include "base/base.h"

static const int64_t wire_sizes[] = {0, 1, 2, 7, 8, 9, 63, 1000, 4097, 65535, 65536, 65537, 300001};
/* Elements by which the gradient and the wire start behind an aligned address. */
static const int32_t wire_starts[][2] = {{0, 0}, {4, 4}, {8, 0}, {1, 1}, {1, 0}, {0, 3}, {3, 7}, {2, 6}};
static const float wire_factors[] = {1, 0.25f, 1.0f / 3};

static inline float wire_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t wire_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* What rounding gets wrong first: ties to both sides, the largest numbers, subnormals of both kinds, zeros, infinities, NaN. */
static const uint32_t wire_specials[] = {
    0x00000000, 0x80000000, 0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0xbf808000, 0x7f7fffff, 0xff7fffff,
    0x7f7f8000, 0x7f7f7fff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0x7fffffff, 0xff80ffff,
    0x00000001, 0x80008000, 0x00007fff, 0x00008000, 0x00018000, 0x007fffff, 0x807f8000, 0x00800000, 0x00ffffff,
};

/* Any bits of f32, with all of the above among them. */
static inline void wire_fill(float *data, int64_t count, uint32_t seed)
{
    lf__rng source;
    lf__rng_init(&source, seed, (uint32_t)count, 17, 0);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t any = lf__rng_u32(&source);
        data[i] = wire_float(any % 5 ? any : wire_specials[(any >> 8) % LF_COUNT(wire_specials)]);
    }
}

/* To nearest even by distances, which f64 holds exactly; the one beyond the largest number is infinity. NaN: any NaN. */
static inline uint16_t wire_narrow(float x)
{
    const uint32_t sign = wire_bits(x) >> 31 << 15;
    const uint32_t below = (wire_bits(x) & 0x7fffffffu) >> 16;
    if (isnan(x)) return (uint16_t)(sign | 0x7fc0u);
    if (isinf(x)) return (uint16_t)(sign | 0x7f80u);
    const double low = (double)wire_float(below << 16), high = below == 0x7f7f ? 0x1p128 : (double)wire_float((below + 1) << 16);
    const double down = fabs((double)x) - low, up = high - fabs((double)x);
    return (uint16_t)(sign | (below + (up < down || (up == down && below % 2))));
}

static inline float wire_widen(uint16_t x, float factor) { return wire_float((uint32_t)x << 16) * factor; }

/* NaN are not compared bit by bit. */
static inline bool wire_same(float a, float b) { return wire_bits(a) == wire_bits(b) || (isnan(a) && isnan(b)); }

#endif
