/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_fixture.h  Maps of small mixtures of experts for NexusSync's tests, and access to what lies in them. */
#ifndef LF_NEXUS_FIXTURE_H
#define LF_NEXUS_FIXTURE_H

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/nexus.h"

static lf_device *cpu;

static inline void set_up(void)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
}

static inline void add_param(lf_map *map, const char *name, int64_t count, int32_t dtype, int32_t layer, int32_t expert,
                             uint32_t flags)
{
    lf_param p = {.size = sizeof p,
                  .name = name,
                  .shape = &count,
                  .ndim = 1,
                  .dtype = dtype,
                  .layer = layer,
                  .expert = expert,
                  .tied_to = -1,
                  .flags = flags};
    if (lf_map_add(map, &p, NULL) < 0) fprintf(stderr, "%s\n", lf_error_text());
}

/* Elements of each parameter; one with 0 is left out. */
typedef struct model_shape {
    int32_t grad_f32, high_load, n_layers, n_experts;
    int64_t embed, norm, qkv, frozen, expert, expert_step /* expert e has expert + e * expert_step */, head;
} model_shape;

static inline void add_layer(lf_map *map, const model_shape *m, int32_t l)
{
    char name[64];
    snprintf(name, sizeof name, "l%d.norm", l);
    add_param(map, name, m->norm, LF_DTYPE_F32, l, -1, 0);
    snprintf(name, sizeof name, "l%d.qkv", l);
    add_param(map, name, m->qkv, LF_DTYPE_BF16, l, -1, 0);
    snprintf(name, sizeof name, "l%d.frozen", l);
    if (m->frozen) add_param(map, name, m->frozen, LF_DTYPE_BF16, l, -1, LF_PARAM_FROZEN);
    for (int32_t e = 0; e < m->n_experts; e++) {
        snprintf(name, sizeof name, "l%d.e%d", l, e);
        add_param(map, name, m->expert + m->expert_step * e, LF_DTYPE_BF16, l, e, 0);
    }
}

/* Allocated on the CPU. Norms are f32, all else bf16. */
static inline lf_map *make_model(const model_shape *m)
{
    lf_map *map = NULL;
    lf_map_options opts;
    if (lf_options_init("map", &opts, sizeof opts) < 0) return NULL;
    opts.grad_f32 = m->grad_f32;
    opts.high_load_experts = m->high_load;
    if (lf_map_open(&map, &opts) < 0) return NULL;
    add_param(map, "embed", m->embed, LF_DTYPE_BF16, -1, -1, 0);
    for (int32_t l = 0; l < m->n_layers; l++) add_layer(map, m, l);
    if (m->head) add_param(map, "head", m->head, LF_DTYPE_BF16, INT32_MAX, -1, 0);
    if (lf_map_plan(map) < 0 || lf_map_allocate(map, cpu) < 0) fprintf(stderr, "%s\n", lf_error_text());
    return map;
}

static inline lf_block_info block_at(const lf_map *map, int32_t i)
{
    lf_block_info b = {.size = sizeof b};
    lf_map_get_block(map, i, &b);
    return b;
}

static inline int32_t dtype_of(const lf_map *map, int32_t klass, int32_t role)
{
    lf_class_info info = {.size = sizeof info};
    lf_map_get_class(map, klass, &info);
    return info.role_dtype[role];
}

static inline float get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? ((const float *)base)[i] : lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static inline void put(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

/* This rank's expert got no token in this step. */
static inline bool is_late(int32_t rank, int32_t step, const lf_block_info *b)
{
    return b->expert >= 0 && (b->expert + b->layer + rank + step) % 3 == 0;
}

/* Of a struct whose field `wrong` is what its thread found first. */
#define WRONG(...) snprintf(r->wrong, sizeof r->wrong, __VA_ARGS__)

#endif
