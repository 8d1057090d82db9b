/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cpu.h  Tiles of f32 in front of arrays of either dtype, and sums in fixed order. */
#ifndef LF_LOOM_CPU_H
#define LF_LOOM_CPU_H

#include "loom_int.h"

/** Elements [at, at + n) of an array as f32: the array itself when it is f32, otherwise converted into `tile`. */
static inline const float *lf__loom_load(int32_t dtype, const void *base, int64_t at, int64_t n, float *tile)
{
    if (dtype == LF_DTYPE_F32) return (const float *)base + at;
    const uint16_t *from = (const uint16_t *)base + at;
    for (int64_t i = 0; i < n; i++) tile[i] = lf__f32_from_bf16(from[i]);
    return tile;
}

/** Write n values to elements [at, at + n), rounded to nearest even. */
static inline void lf__loom_store(int32_t dtype, void *base, int64_t at, int64_t n, const float *tile)
{
    if (dtype == LF_DTYPE_F32) {
        float *to = (float *)base + at;
        for (int64_t i = 0; i < n; i++) to[i] = tile[i];
        return;
    }
    uint16_t *to = (uint16_t *)base + at;
    for (int64_t i = 0; i < n; i++) to[i] = lf__bf16_from_f32(tile[i]);
}

/* acc[i % LANES] += x[i] y[i]: lanes in the source, so that the order of summation is fixed and the loop still vectorises. */
enum { LF_LOOM_LANES = 16 };
static inline void lf__loom_dot(const float *x, const float *y, int64_t n, float acc[LF_LOOM_LANES])
{
    int64_t i = 0;
    for (; i + LF_LOOM_LANES <= n; i += LF_LOOM_LANES)
        for (int32_t j = 0; j < LF_LOOM_LANES; j++) acc[j] += x[i + j] * y[i + j];
    for (int32_t j = 0; i + j < n; j++) acc[j] += x[i + j] * y[i + j];
}

static inline float lf__loom_sum_lanes(float acc[LF_LOOM_LANES])
{
    for (int32_t half = LF_LOOM_LANES / 2; half > 0; half /= 2)
        for (int32_t j = 0; j < half; j++) acc[j] += acc[j + half];
    return acc[0];
}

/** Elements [at, at + n), at most a tile, of the sum over a token's choices of scale[token, c] * a[slot]; scale NULL: 1. */
void lf__loom_gather(const lf__loom_rows_args *a, const float *scale, int64_t token, int64_t at, int64_t n, float *sum);

#endif
