/* SPDX-License-Identifier: Apache-2.0 */
/* Maps of parameters of several dtypes, for tests of sweeps on the CPU and on GPUs. */
#ifndef LF_MIXED_MAP_H
#define LF_MIXED_MAP_H

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/map.h"

typedef struct spec {
    int64_t count;
    int32_t dtype;
    uint32_t flags;
} spec;

static inline lf_map *make_map_on(lf_device *device, const spec *specs, int32_t n, int32_t grad_f32, int32_t moments_bf16)
{
    lf_map *map = NULL;
    lf_map_options opts;
    CHECK_OK(lf_options_init("map", &opts, sizeof opts));
    opts.grad_f32 = grad_f32;
    opts.moments_bf16 = moments_bf16;
    CHECK_OK(lf_map_open(&map, &opts));
    for (int32_t i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        lf_param p = {.size = sizeof p,
                      .name = name,
                      .shape = &specs[i].count,
                      .ndim = 1,
                      .dtype = specs[i].dtype,
                      .layer = i,
                      .expert = -1,
                      .tied_to = -1,
                      .flags = specs[i].flags};
        CHECK_OK(lf_map_add(map, &p, NULL));
    }
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, device));
    return map;
}

#endif
