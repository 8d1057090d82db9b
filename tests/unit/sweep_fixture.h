/* SPDX-License-Identifier: Apache-2.0 */
/** @file sweep_fixture.h  Maps of mixed classes with values in them, for tests of sweeps. */
#ifndef LF_SWEEP_FIXTURE_H
#define LF_SWEEP_FIXTURE_H

#include "loom_fixture.h"
#include "mixed_map.h"

static inline lf_map *make_map_with(const spec *specs, int32_t n, int32_t grad_f32, int32_t moments_bf16)
{
    return make_map_on(cpu, specs, n, grad_f32, moments_bf16);
}

static inline lf_map *make_map(const spec *specs, int32_t n, int32_t grad_f32) { return make_map_with(specs, n, grad_f32, 0); }

static inline lf_range whole_class(const lf_map *map, int32_t klass)
{
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, klass, &info));
    return (lf_range){klass, 0, 0, info.count};
}

static inline void *plane(const lf_map *map, const lf_range *range, int32_t role)
{
    void *p = lf_map_address(map, range, role);
    CHECK(p != NULL);
    return p;
}

static inline int32_t role_dtype(const lf_map *map, int32_t klass, int32_t role)
{
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, klass, &info));
    return info.role_dtype[role];
}

static inline double get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? (double)((const float *)base)[i] : (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static inline void put(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

static const spec mixed[] = {{3, LF_DTYPE_BF16, 0},
                             {70000, LF_DTYPE_BF16, 0},
                             {1, LF_DTYPE_F32, 0},
                             {50001, LF_DTYPE_F32, 0},
                             {1000, LF_DTYPE_BF16, 0},
                             {16384, LF_DTYPE_F32, 0},
                             {77, LF_DTYPE_F32, LF_PARAM_FROZEN}};

/* Values for every block (not the padding) from a fixed seed. */
static inline void fill_map(const lf_map *map)
{
    lf__rng_init(&rng, 5, 5, 5, 5);
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info block = {.size = sizeof block};
        CHECK_OK(lf_map_get_block(map, b, &block));
        void *w = plane(map, &block.range, LF_ROLE_WEIGHT), *g = lf_map_address(map, &block.range, LF_ROLE_GRAD);
        float *master = lf_map_address(map, &block.range, LF_ROLE_MASTER);
        for (int64_t i = 0; i < block.range.count; i++) {
            float v = uniform(-2, 2);
            put(w, i, role_dtype(map, block.range.klass, LF_ROLE_WEIGHT), v);
            if (master) master[i] = v;
            if (g) put(g, i, role_dtype(map, block.range.klass, LF_ROLE_GRAD), uniform(-1, 1));
        }
    }
}
static inline int32_t trainable_ranges(const lf_map *map, lf_range *ranges)
{
    int32_t n = 0;
    for (int32_t c = 0; c < lf_map_n_classes(map); c++)
        if (role_dtype(map, c, LF_ROLE_GRAD)) ranges[n++] = whole_class(map, c);
    return n;
}

#endif
