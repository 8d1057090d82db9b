/* SPDX-License-Identifier: Apache-2.0 */
/* A small map with three classes (bf16 with masters, f32, frozen bf16) whose whole content is a function of the step, so that
 * a test can tell which snapshot it sees. Parameter i changes every PERIOD[i] steps. */
#ifndef LF_VAULT_FIXTURE_H
#define LF_VAULT_FIXTURE_H

#include <string.h>

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/map.h"
#include "loongforge/vault.h"

static const struct fixture_param {
    const char *name;
    int64_t shape[2];
    int32_t dtype, layer, expert;
    uint32_t flags;
    int64_t period; /* in steps */
} fixture_params[] = {
    {"embed", {40, 60}, LF_DTYPE_BF16, -1, -1, LF_PARAM_FROZEN, 0},
    {"l0.norm", {1, 64}, LF_DTYPE_F32, 0, -1, LF_PARAM_NO_DECAY, 10},
    {"l0.dense", {30, 40}, LF_DTYPE_BF16, 0, -1, 0, 10},
    {"l0.e0", {50, 40}, LF_DTYPE_BF16, 0, 0, 0, 10},
    {"l0.e1", {40, 40}, LF_DTYPE_BF16, 0, 1, 0, 30},
    {"l1.norm", {1, 64}, LF_DTYPE_F32, 1, -1, LF_PARAM_NO_DECAY, 10},
    {"l1.dense", {30, 40}, LF_DTYPE_BF16, 1, -1, 0, 20},
    {"head", {20, 60}, LF_DTYPE_F32, INT32_MAX, -1, 0, 1000000},
};
enum { FIXTURE_PARAMS = sizeof fixture_params / sizeof fixture_params[0] };

/* Sizes can be scaled for a test that needs more bytes. */
static inline lf_map *fixture_map_scaled(int64_t scale, const char *rename_from, const char *rename_to)
{
    lf_map *map;
    CHECK_OK(lf_map_open(&map, NULL));
    for (int i = 0; i < FIXTURE_PARAMS; i++) {
        const struct fixture_param *f = &fixture_params[i];
        int64_t shape[2] = {f->shape[0] * scale, f->shape[1]};
        const char *name = rename_from && strcmp(f->name, rename_from) == 0 ? rename_to : f->name;
        lf_param p = {.size = sizeof p,
                      .name = name,
                      .shape = shape,
                      .ndim = 2,
                      .dtype = f->dtype,
                      .layer = f->layer,
                      .expert = f->expert,
                      .tied_to = -1,
                      .flags = f->flags};
        CHECK_OK(lf_map_add(map, &p, NULL));
    }
    CHECK_OK(lf_map_plan(map));
    return map;
}

static inline lf_map *fixture_map(void)
{
    lf_map *map = fixture_map_scaled(1, NULL, NULL);
    lf_device *cpu;
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_OK(lf_map_allocate(map, cpu));
    lf_device_close(cpu);
    return map;
}

/* A value as training leaves it: close to its earlier ones, all bits in use. */
static inline float fixture_value(int i, int role, int64_t element, int64_t version)
{
    lf__rng r;
    lf__rng_init(&r, (uint64_t)(i * 8 + role), (uint32_t)element, 0, 0);
    double base = (lf__rng_unit(&r) - 0.5) * 0.2;
    lf__rng_init(&r, (uint64_t)(i * 8 + role), (uint32_t)element, (uint32_t)version, 1);
    return (float)(base * (1 + 1e-3 * lf__rng_unit(&r)) + (role == LF_ROLE_EXP_AVG_SQ ? 0.2 : 0));
}

/* Computed once for each (parameter, role, version, count) and kept: sweeps compare thousands of times. */
static inline const float *fixture_values(int i, int role, int64_t version, int64_t count)
{
    static struct {
        int i, role;
        int64_t version, count;
        float *values;
    } kept[1024];
    size_t at = (size_t)((i * 31 + role) * 31 + version) % 1024;
    if (!kept[at].values || kept[at].i != i || kept[at].role != role || kept[at].version != version || kept[at].count != count) {
        free(kept[at].values);
        kept[at].i = i;
        kept[at].role = role;
        kept[at].version = version;
        kept[at].count = count;
        kept[at].values = malloc((size_t)count * sizeof(float));
        for (int64_t e = 0; e < count; e++) kept[at].values[e] = fixture_value(i, role, e, version);
    }
    return kept[at].values;
}

static inline void fixture_expected(int i, int role, int32_t dtype, int64_t step, int64_t count, uint8_t *out)
{
    int64_t period = fixture_params[i].period, version = period ? step / period : 0;
    const float *x = fixture_values(i, role == LF_ROLE_WEIGHT ? LF_ROLE_MASTER : role, version, count);
    if (dtype == LF_DTYPE_F32) memcpy(out, x, (size_t)count * 4);
    for (int64_t e = 0; dtype != LF_DTYPE_F32 && e < count; e++) memcpy(out + 2 * e, &(uint16_t){lf__bf16_from_f32(x[e])}, 2);
}

/* For each parameter and saved role: expected bytes and where they lie. `fn` returns false to stop. */
static inline bool fixture_each(lf_map *map, int64_t step, bool (*fn)(void *data, const uint8_t *expected, size_t bytes))
{
    static const int roles[] = {LF_ROLE_WEIGHT, LF_ROLE_MASTER, LF_ROLE_EXP_AVG, LF_ROLE_EXP_AVG_SQ};
    bool good = true;
    for (int i = 0; good && i < FIXTURE_PARAMS; i++) {
        lf_block_info b = {.size = sizeof b};
        lf_class_info k = {.size = sizeof k};
        CHECK_OK(lf_map_get_block(map, i, &b));
        CHECK_OK(lf_map_get_class(map, b.range.klass, &k));
        for (size_t r = 0; good && r < LF_COUNT(roles); r++) {
            int32_t dtype = k.role_dtype[roles[r]];
            if (!dtype) continue;
            size_t bytes = (size_t)b.range.count * lf_dtype_bytes(dtype);
            uint8_t *expected = malloc(bytes);
            lf_piece piece;
            int32_t n = 1;
            fixture_expected(i, roles[r], dtype, step, b.range.count, expected);
            CHECK_OK(lf_map_pieces(map, &b.range, roles[r], &piece, &n));
            good = fn(piece.data, expected, bytes);
            free(expected);
        }
    }
    return good;
}

static inline bool fixture_put(void *data, const uint8_t *expected, size_t bytes)
{
    return memcpy(data, expected, bytes) != NULL;
}
static inline bool fixture_equal(void *data, const uint8_t *expected, size_t bytes) { return memcmp(data, expected, bytes) == 0; }
static inline bool fixture_wipe(void *data, const uint8_t *expected, size_t bytes)
{
    return expected && memset(data, 0xa5, bytes) != NULL;
}

static inline void fixture_fill(lf_map *map, int64_t step) { fixture_each(map, step, fixture_put); }
static inline bool fixture_is(lf_map *map, int64_t step) { return fixture_each(map, step, fixture_equal); }
static inline void fixture_clear(lf_map *map) { fixture_each(map, 0, fixture_wipe); }

/* Small slices; new bases by count only. */
static inline lf_vault_options fixture_options(int32_t threads)
{
    lf_vault_options o;
    CHECK_OK(lf_options_init("vault", &o, sizeof o));
    o.slice_bytes = 4096;
    o.threads = threads;
    o.rebase_ratio = 1e6;
    return o;
}

#endif
