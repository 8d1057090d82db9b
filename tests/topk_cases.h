/* SPDX-License-Identifier: Apache-2.0 */
/** @file topk_cases.h  Arrays for top-k: sizes, shares and values, for the CPU's test and for devices compared with it. */
#ifndef LF_TOPK_CASES_H
#define LF_TOPK_CASES_H

#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "loongforge/nexus.h"

static const int64_t topk_sizes[] = {0, 1, 2, 63, 64, 65, 1000, 4097, 65535, 65536, 65537, 300001};
enum { TOPK_SHARES = 4, TOPK_KINDS = 4 };

static inline int64_t topk_k(int64_t count, int32_t share)
{
    const int64_t k = share == 0 ? 1 : share == 1 ? (count * 15 + 50) / 100 : share == 2 ? count / 2 : count;
    return count == 0 ? 0 : k < 1 ? 1 : k;
}

/* On the host, owning its memory. */
typedef struct array {
    lf_topk t;
    void *scratch;
} array;

static inline void open_array(array *a, int64_t count, int64_t k, int32_t dtype)
{
    const size_t n = (size_t)count + 64, width = lf_dtype_bytes(dtype);
    a->t = (lf_topk){.size = sizeof a->t, .count = count, .k = k, .dtype = dtype, .keep = 1, .factor = 1};
    a->t.data = calloc(n, width);
    a->t.out = calloc(n, width);
    a->t.values = calloc(n, width);
    a->t.residual = calloc(n, sizeof(float));
    a->t.mask = calloc(n / 64 + 1, sizeof(int64_t));
    a->t.scratch = a->scratch = malloc((size_t)lf_topk_scratch_bytes(count));
}

static inline void close_array(array *a)
{
    free((void *)a->t.data);
    free(a->t.out);
    free(a->t.values);
    free(a->t.residual);
    free(a->t.mask);
    free(a->scratch);
}

/* kind 0: like gradients, over many magnitudes; 1: a few values, so many ties; 2: all equal; 3: with NaN and infinities. */
static inline void fill_array(array *a, int32_t kind, uint32_t seed)
{
    lf__rng rng;
    lf__rng_init(&rng, seed, (uint32_t)kind, (uint32_t)a->t.count, 0);
    for (int64_t i = 0; i < a->t.count; i++) {
        const float sign = lf__rng_below(&rng, 2) ? 1 : -1, unit = (float)lf__rng_unit(&rng);
        float v = sign;
        if (kind == 0) v = sign * unit * unit * unit * (1 << lf__rng_below(&rng, 12));
        if (kind == 1) v = sign * (float)lf__rng_below(&rng, 5);
        if (kind == 3) v = lf__rng_below(&rng, 9) ? unit - 0.5f : lf__rng_below(&rng, 2) ? sign / 0.0f : 0.0f / 0.0f;
        if (a->t.dtype == LF_DTYPE_F32) ((float *)a->t.data)[i] = v;
        else ((uint16_t *)a->t.data)[i] = lf__bf16_from_f32(v);
    }
}

static inline lf__hash128 hash_array(const array *a)
{
    const size_t n = (size_t)a->t.count, width = lf_dtype_bytes(a->t.dtype);
    const lf__hash128 parts[4] = {lf__hash(a->t.residual, n * sizeof(float), 0), lf__hash(a->t.mask, (n + 63) / 64 * 8, 0),
                                  lf__hash(a->t.values, (size_t)a->t.k * width, 0), lf__hash(a->t.out, n * width, 0)};
    return lf__hash(parts, sizeof parts, 0);
}

#endif
