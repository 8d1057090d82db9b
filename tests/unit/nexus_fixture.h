/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_fixture.h  What NexusSync's tests share: maps of small models, access to what lies in them, and values whose sums are
 *  exact. Ranks as threads: nexus_ranks.h. */
#ifndef LF_NEXUS_FIXTURE_H
#define LF_NEXUS_FIXTURE_H

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/nexus.h"

static lf_device *device; /* that maps are allocated on */

static inline void set_up(void)
{
    if (!device) CHECK_OK(lf_device_open(&device, "cpu"));
}

/* What a test cannot do without, on any thread; CHECK belongs to the main one. */
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        const lf_status must_ = (call);                                                                                \
        if (must_ < 0) {                                                                                               \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, lf_status_name(must_), lf_error_text()); \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- maps -------------------------------------------------------------------------------------------------------------- */

static inline lf_map *new_map(int32_t grad_f32, int32_t high_load)
{
    lf_map *map = NULL;
    lf_map_options opts;
    MUST(lf_options_init("map", &opts, sizeof opts));
    opts.grad_f32 = grad_f32;
    opts.high_load_experts = high_load;
    MUST(lf_map_open(&map, &opts));
    return map;
}

static inline void add_param(lf_map *map, const char *name, int64_t count, int32_t dtype, int32_t layer, int32_t expert,
                             uint32_t flags)
{
    const lf_param p = {.size = sizeof p,
                        .name = name,
                        .shape = &count,
                        .ndim = 1,
                        .dtype = dtype,
                        .layer = layer,
                        .expert = expert,
                        .tied_to = -1,
                        .flags = flags};
    MUST(lf_map_add(map, &p, NULL));
}

static inline lf_map *plan_and_allocate(lf_map *map)
{
    MUST(lf_map_plan(map));
    MUST(lf_map_allocate(map, device));
    return map;
}

/* Layers of one parameter each, f32. */
static inline lf_map *make_layers(int32_t n, int64_t count)
{
    lf_map *map = new_map(1, 0);
    char name[16];
    for (int32_t l = 0; l < n; l++) {
        snprintf(name, sizeof name, "l%d", l);
        add_param(map, name, count, LF_DTYPE_F32, l, -1, 0);
    }
    return plan_and_allocate(map);
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
    if (m->norm) add_param(map, name, m->norm, LF_DTYPE_F32, l, -1, 0);
    snprintf(name, sizeof name, "l%d.qkv", l);
    if (m->qkv) add_param(map, name, m->qkv, LF_DTYPE_BF16, l, -1, 0);
    snprintf(name, sizeof name, "l%d.frozen", l);
    if (m->frozen) add_param(map, name, m->frozen, LF_DTYPE_BF16, l, -1, LF_PARAM_FROZEN);
    for (int32_t e = 0; e < m->n_experts; e++) {
        snprintf(name, sizeof name, "l%d.e%d", l, e);
        add_param(map, name, m->expert + m->expert_step * e, LF_DTYPE_BF16, l, e, 0);
    }
}

/* A mixture of experts. Norms are f32, all else bf16. */
static inline lf_map *make_model(const model_shape *m)
{
    lf_map *map = new_map(m->grad_f32, m->high_load);
    if (m->embed) add_param(map, "embed", m->embed, LF_DTYPE_BF16, -1, -1, 0);
    for (int32_t l = 0; l < m->n_layers; l++) add_layer(map, m, l);
    if (m->head) add_param(map, "head", m->head, LF_DTYPE_BF16, INT32_MAX, -1, 0);
    return plan_and_allocate(map);
}

static inline lf_block_info block_at(const lf_map *map, int32_t i)
{
    lf_block_info b = {.size = sizeof b};
    MUST(lf_map_get_block(map, i, &b));
    return b;
}

static inline int32_t dtype_of(const lf_map *map, int32_t klass, int32_t role)
{
    lf_class_info info = {.size = sizeof info};
    MUST(lf_map_get_class(map, klass, &info));
    return info.role_dtype[role];
}

static inline lf_chunk_info chunk_at(const lf_nexus *nexus, int32_t i)
{
    lf_chunk_info c = {.size = sizeof c};
    MUST(lf_nexus_get_chunk(nexus, i, &c));
    return c;
}

/* ---- values ------------------------------------------------------------------------------------------------------------ */

static inline double get(const void *base, int64_t i, int32_t dtype)
{
    if (dtype == LF_DTYPE_F32) return (double)((const float *)base)[i];
    if (dtype == LF_DTYPE_BF16) return (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
    return dtype == LF_DTYPE_F64 ? ((const double *)base)[i] : (double)((const int64_t *)base)[i];
}

static inline void put(void *base, int64_t i, int32_t dtype, double v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = (float)v;
    else if (dtype == LF_DTYPE_BF16) ((uint16_t *)base)[i] = lf__bf16_from_f32((float)v);
    else if (dtype == LF_DTYPE_F64) ((double *)base)[i] = v;
    else ((int64_t *)base)[i] = (int64_t)v;
}

/* Multiples of 4 up to 60: sums of four ranks, and their quarters, are exact in bf16 too. */
static inline float fours(int32_t from, int32_t step, int32_t block, int64_t i)
{
    return (float)(4 * ((from * 13 + step * 7 + block * 5 + i * 3) % 31 - 15));
}

/* Eighths up to 6.25: exact in bf16, and their sums in f32. */
static inline float eighths(int32_t from, int32_t op, int64_t i) { return (float)((from * 31 + op * 17 + i * 7) % 101 - 50) / 8; }

/* The gradient of a block, or what must not come out: an earlier step's. */
static inline void write_fours(const lf_map *map, int32_t from, int32_t step, int32_t block, bool garbage)
{
    const lf_block_info b = block_at(map, block);
    const int32_t dtype = dtype_of(map, b.range.klass, LF_ROLE_GRAD);
    void *g = lf_map_address(map, &b.range, LF_ROLE_GRAD);
    for (int64_t i = 0; i < b.range.count; i++) put(g, i, dtype, garbage ? 777 : fours(from, step, block, i));
}

/* ---- who is when ready ------------------------------------------------------------------------------------------------- */

/* This rank's expert got no token in this step. */
static inline bool is_late(int32_t from, int32_t step, const lf_block_info *b)
{
    return b->expert >= 0 && (b->expert + b->layer + from + step) % 3 == 0;
}

/* Order of marks: backward's, but shuffled a little, another way with each seed. */
static inline void order_of_marks(int32_t seed, int32_t step, int32_t *order, int32_t n)
{
    lf__rng rng;
    lf__rng_init(&rng, 3, (uint32_t)seed, (uint32_t)step, 0);
    for (int32_t i = 0; i < n; i++) order[i] = n - 1 - i;
    for (int32_t i = 0; i + 1 < n; i++) {
        const int32_t j = i + lf__rng_below(&rng, n - i < 6 ? n - i : 6), was = order[i];
        order[i] = order[j];
        order[j] = was;
    }
}

#endif
