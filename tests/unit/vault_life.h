/* SPDX-License-Identifier: Apache-2.0 */
/** @file vault_life.h  Ordinary life of a vault over the map of vault_fixture.h: opened, saved to, restored and looked at. */
#ifndef LF_VAULT_LIFE_H
#define LF_VAULT_LIFE_H

#include "crash/vault_fixture.h"
#include "vault/vault_int.h"

static inline lf_vault *open_vault(const char *dir, lf_map *map, const lf_vault_options *o)
{
    lf_vault *v;
    CHECK_OK(lf_vault_open(&v, dir, map, o));
    return v;
}

static inline void save(lf_vault *v, lf_map *map, int64_t step)
{
    fixture_fill(map, step);
    lf_blob blobs[] = {{"step", &step, sizeof step}, {"empty", NULL, 0}};
    CHECK_OK(lf_vault_save(v, step, blobs, 2, NULL));
    CHECK_OK(lf_vault_wait(v));
}

static inline int64_t restore(lf_vault *v, lf_map *map, int64_t step)
{
    lf_checkpoint_info info = {.size = sizeof info};
    fixture_clear(map);
    CHECK_OK(lf_vault_restore(v, step, &info));
    CHECK(fixture_is(map, info.step));
    return info.step;
}

static inline bool exists(const char *dir, const char *name)
{
    char path[1024];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return stat(path, &st) == 0;
}

/* A vault with a base at 10 and diffs at 20, 30, 40. */
static inline void make_vault(const char *dir, lf_map *map)
{
    lf_vault_options o = fixture_options(2);
    lf_vault *v = open_vault(dir, map, &o);
    for (int64_t step = 10; step <= 40; step += 10) save(v, map, step);
    CHECK_OK(lf_vault_close(v));
}

#endif
