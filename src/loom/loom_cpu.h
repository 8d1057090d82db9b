/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cpu.h  Tiles of f32 in front of arrays of either dtype. */
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

#endif
