/* SPDX-License-Identifier: Apache-2.0 */
/* The layout: order of blocks, pools and their head-room, groups, planes. Order and terms: docs/internals/map.md. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "map_int.h"

/* What the order of one block depends on, so that sorting needs no context. */
typedef struct sort_key {
    int32_t klass, layer, expert, index;
    int64_t expert_bytes; /* of all this expert's blocks in this layer and class */
} sort_key;

static int compare_keys(const void *a_, const void *b_)
{
    const sort_key *a = a_, *b = b_;
    if (a->klass != b->klass) return a->klass < b->klass ? -1 : 1;
    if (a->layer != b->layer) return a->layer > b->layer ? -1 : 1;
    if ((a->expert < 0) != (b->expert < 0)) return a->expert < 0 ? -1 : 1;
    if (a->expert_bytes != b->expert_bytes) return a->expert_bytes > b->expert_bytes ? -1 : 1;
    if (a->expert != b->expert) return a->expert < b->expert ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static lf_status find_class(lf_map *map, map_param *p)
{
    int32_t frozen = (p->flags & LF_PARAM_FROZEN) != 0;
    for (p->klass = 0; p->klass < map->n_classes; p->klass++)
        if (map->classes[p->klass].dtype == p->dtype && map->classes[p->klass].frozen == frozen) return LF_OK;
    if (map->n_classes == LF_MAP_MAX_CLASSES) return LF_FAIL(LF_ERR_INTERNAL, "more than %d classes", LF_MAP_MAX_CLASSES);
    map_class *c = &map->classes[map->n_classes++];
    *c = (map_class){.dtype = p->dtype, .frozen = frozen};
    c->role_dtype[LF_ROLE_WEIGHT] = p->dtype;
    if (frozen) return LF_OK;
    c->role_dtype[LF_ROLE_GRAD] = map->opts.grad_f32 ? LF_DTYPE_F32 : p->dtype;
    if (!map->opts.optimizer_state) return LF_OK;
    c->role_dtype[LF_ROLE_MASTER] = p->dtype == LF_DTYPE_F32 ? 0 : LF_DTYPE_F32;
    c->role_dtype[LF_ROLE_EXP_AVG] = c->role_dtype[LF_ROLE_EXP_AVG_SQ] = map->opts.moments_bf16 ? LF_DTYPE_BF16 : LF_DTYPE_F32;
    return LF_OK;
}

/* One pass over the sorted keys gives each (layer, expert) run its bytes. Keys sorted by (klass, layer, expert) first. */
static void sum_expert_bytes(const lf_map *map, sort_key *keys, int32_t n)
{
    for (int32_t from = 0, to; from < n; from = to) {
        int64_t bytes = 0;
        for (to = from; to < n && keys[to].klass == keys[from].klass && keys[to].layer == keys[from].layer &&
                        keys[to].expert == keys[from].expert;
             to++)
            bytes += map->params[keys[to].index].count * (int64_t)lf_dtype_bytes(map->params[keys[to].index].dtype);
        for (int32_t i = from; i < to; i++) keys[i].expert_bytes = keys[i].expert < 0 ? 0 : bytes;
    }
}

static lf_status sort_blocks(lf_map *map)
{
    sort_key *keys = lf__alloc_array((size_t)map->n_params, sizeof *keys);
    map->order = lf__alloc_array((size_t)map->n_params, sizeof *map->order);
    if (!keys || !map->order) {
        lf__free(keys);
        return LF_FAIL(LF_ERR_NOMEM, "planning %d parameters", map->n_params);
    }
    int32_t n = 0;
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < map->n_params && rc == LF_OK; i++) {
        map_param *p = &map->params[i];
        if (p->tied_to >= 0) continue;
        rc = find_class(map, p);
        keys[n++] = (sort_key){p->klass, p->layer, p->expert, i, 0};
    }
    qsort(keys, (size_t)n, sizeof *keys, compare_keys); /* groups the runs; bytes still equal */
    sum_expert_bytes(map, keys, n);
    qsort(keys, (size_t)n, sizeof *keys, compare_keys);
    for (int32_t i = 0; i < n; i++) map->order[i] = keys[i].index;
    map->n_order = n;
    lf__free(keys);
    return rc;
}

/* ---- pools ----------------------------------------------------------------------------------------------------------- */

static void name_pool(char name[128], const map_param *p)
{
    char layer[24], part[24], frozen[32] = "";
    if (p->layer < 0) snprintf(layer, sizeof layer, "embed");
    else if (p->layer == INT32_MAX) snprintf(layer, sizeof layer, "tail");
    else snprintf(layer, sizeof layer, "layer%02d", p->layer);
    if (p->expert < 0) snprintf(part, sizeof part, "dense");
    else snprintf(part, sizeof part, "expert%02d", p->expert);
    /* The first class keeps the plain name; others (another dtype, frozen) say what they are. */
    if (p->klass > 0)
        snprintf(frozen, sizeof frozen, ".%s%s", lf_dtype_name(p->dtype), p->flags & LF_PARAM_FROZEN ? ".frozen" : "");
    snprintf(name, 128, "static/%s/%s%s", layer, part, frozen);
}

/* Elements that a caller wants the pool to have; 0: nothing asked. "expert_3" means expert 3 of every layer. */
static int64_t requested_elements(lf_map *map, const char *name, const map_param *p)
{
    char alias[32];
    int64_t bytes = 0;
    snprintf(alias, sizeof alias, "expert_%d", p->expert);
    for (int32_t i = 0; i < map->n_requests; i++) {
        map_request *r = &map->requests[i];
        if (strcmp(r->pool, name) != 0 && (p->expert < 0 || strcmp(r->pool, alias) != 0)) continue;
        r->used = true;
        bytes = r->bytes; /* the last request wins */
    }
    return bytes / (int64_t)lf_dtype_bytes(p->dtype);
}

static lf_status close_pool(lf_map *map, map_pool *pool, const map_param *p, int64_t *end)
{
    int64_t bytes = (int64_t)lf_dtype_bytes(p->dtype), wanted = requested_elements(map, pool->name, p);
    pool->used = *end - pool->offset;
    pool->capacity = pool->used;
    if (wanted > 0 && wanted < pool->used)
        return LF_FAIL(LF_ERR_POOL,
                       "pool %s is set to %lld bytes, its parameters need %lld (%lld more); hint: set_pool_size('%s', %lld)",
                       pool->name, (long long)(wanted * bytes), (long long)(pool->used * bytes),
                       (long long)((pool->used - wanted) * bytes), pool->name, (long long)(pool->used * bytes));
    if (wanted > pool->used) pool->capacity = lf__round_up(wanted, map->opts.align_elements);
    *end = pool->offset + pool->capacity;
    return LF_OK;
}

static bool same_pool(const map_param *a, const map_param *b)
{
    return a->klass == b->klass && a->layer == b->layer && a->expert == b->expert;
}

/* Offsets and pools in one walk. Arenas were added first and move behind the parameters' pools. */
static lf_status place_blocks(lf_map *map)
{
    int32_t n_arenas = map->n_pools;
    int64_t at = 0;
    for (int32_t i = 0; i < map->n_order; i++) {
        map_param *p = &map->params[map->order[i]], *before = i ? &map->params[map->order[i - 1]] : NULL;
        if (!before || before->klass != p->klass) at = 0;
        if (!before || !same_pool(before, p)) {
            char name[128];
            name_pool(name, p);
            map_pool *pool = lf__map_new_pool(map, name);
            if (!pool) return LF_FAIL(LF_ERR_NOMEM, "pool %s", name);
            *pool = (map_pool){.name = pool->name, .kind = LF_POOL_STATIC, .klass = p->klass, .offset = at};
        }
        p->pool = map->n_pools - 1;
        p->offset = at;
        at += lf__round_up(p->count, map->opts.align_elements);
        const map_param *next = i + 1 < map->n_order ? &map->params[map->order[i + 1]] : NULL;
        if (next && same_pool(p, next)) continue;
        lf_status rc = close_pool(map, &map->pools[p->pool], p, &at);
        if (rc < 0) return rc;
        map->classes[p->klass].count = at;
    }
    if (n_arenas == 0) return LF_OK;
    map_pool *arenas = lf__alloc_array((size_t)n_arenas, sizeof *arenas);
    if (!arenas) return LF_FAIL(LF_ERR_NOMEM, "pools");
    memcpy(arenas, map->pools, (size_t)n_arenas * sizeof *arenas);
    memmove(map->pools, map->pools + n_arenas, (size_t)(map->n_pools - n_arenas) * sizeof *arenas);
    memcpy(map->pools + map->n_pools - n_arenas, arenas, (size_t)n_arenas * sizeof *arenas);
    lf__free(arenas);
    for (int32_t i = 0; i < map->n_order; i++) map->params[map->order[i]].pool -= n_arenas;
    return LF_OK;
}

static lf_status check_requests(const lf_map *map)
{
    for (int32_t i = 0; i < map->n_requests; i++)
        if (!map->requests[i].used)
            return LF_FAIL(LF_ERR_NOTFOUND,
                           "a size was set for pool %s, which no parameter belongs to; hint: expert_<n>, or a name such as %s",
                           map->requests[i].pool, map->pools[0].name);
    return LF_OK;
}

/* ---- groups ---------------------------------------------------------------------------------------------------------- */

typedef struct expert_size {
    int32_t expert;
    int64_t bytes;
} expert_size;

static int compare_sizes(const void *a_, const void *b_)
{
    const expert_size *a = a_, *b = b_;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

/* high[e]: expert e is one of the largest, by bytes over all layers. */
static lf_status choose_high(const lf_map *map, uint8_t **high, int32_t *n_experts)
{
    int32_t n = 0;
    for (int32_t i = 0; i < map->n_order; i++)
        if (map->params[map->order[i]].expert >= n) n = map->params[map->order[i]].expert + 1;
    expert_size *sizes = lf__alloc_array((size_t)n + 1, sizeof *sizes);
    *high = lf__alloc((size_t)n + 1);
    *n_experts = n;
    if (!sizes || !*high) {
        lf__free(sizes);
        return LF_FAIL(LF_ERR_NOMEM, "groups of %d experts", n);
    }
    for (int32_t e = 0; e < n; e++) sizes[e].expert = e;
    for (int32_t i = 0; i < map->n_order; i++) {
        const map_param *p = &map->params[map->order[i]];
        if (p->expert >= 0) sizes[p->expert].bytes += p->count * (int64_t)lf_dtype_bytes(p->dtype);
    }
    qsort(sizes, (size_t)n, sizeof *sizes, compare_sizes);
    for (int32_t i = 0; i < n && i < map->opts.high_load_experts; i++) (*high)[sizes[i].expert] = 1;
    lf__free(sizes);
    return LF_OK;
}

/* A group's ranges follow backward over all classes: by layer first, so that f32 norms and bf16 matrices of a layer stand
 * together. `order` is by class first, so each layer's blocks are picked out of it one layer after another. */
static lf_status fill_group(lf_map *map, int32_t group, int32_t *picked)
{
    static const char *const names[LF_MAP_N_GROUPS] = {"dense", "high", "low"};
    int32_t n = 0;
    map->groups[group].name = names[group];
    for (int32_t i = 0; i < map->n_order; i++)
        if (map->params[map->order[i]].group == group) picked[n++] = map->order[i];
    if (n == 0) return LF_OK;
    map->groups[group].ranges = lf__alloc_array((size_t)n, sizeof(lf_range));
    sort_key *keys = lf__alloc_array((size_t)n, sizeof *keys);
    if (!map->groups[group].ranges || !keys) {
        lf__free(keys);
        return LF_FAIL(LF_ERR_NOMEM, "group %s", names[group]);
    }
    for (int32_t i = 0; i < n; i++) keys[i] = (sort_key){.layer = map->params[picked[i]].layer, .index = i};
    qsort(keys, (size_t)n, sizeof *keys, compare_keys); /* stable by index */
    for (int32_t i = 0; i < n; i++) keys[i].expert = picked[keys[i].index];
    for (int32_t i = 0; i < n; i++) picked[i] = keys[i].expert;
    lf__free(keys);
    map->groups[group].n_ranges = lf__map_merge(map, picked, n, map->groups[group].ranges);
    return LF_OK;
}

static lf_status make_groups(lf_map *map)
{
    uint8_t *high = NULL;
    int32_t n_experts;
    int32_t *picked = lf__alloc_array((size_t)map->n_order, sizeof *picked);
    lf_status rc = picked ? choose_high(map, &high, &n_experts) : LF_FAIL(LF_ERR_NOMEM, "groups");
    for (int32_t i = 0; i < map->n_params && rc == LF_OK; i++) {
        map_param *p = &map->params[i];
        p->group = p->flags & LF_PARAM_FROZEN ? -1 : p->expert < 0 ? 0 : high[p->expert] ? 1 : 2;
    }
    for (int32_t g = 0; g < LF_MAP_N_GROUPS && rc == LF_OK; g++) rc = fill_group(map, g, picked);
    lf__free(high);
    lf__free(picked);
    return rc;
}

/* ---- planes ---------------------------------------------------------------------------------------------------------- */

static void place_planes(lf_map *map)
{
    int64_t at = 0;
    for (int32_t role = 0; role < LF_N_ROLES; role++)
        for (int32_t c = 0; c < map->n_classes; c++) {
            map_class *k = &map->classes[c];
            k->role_offset[role] = -1;
            if (!k->role_dtype[role]) continue;
            at = lf__round_up(at, map->opts.plane_align_bytes);
            k->role_offset[role] = at;
            at += k->count * (int64_t)lf_dtype_bytes(k->role_dtype[role]);
        }
    for (int32_t i = 0; i < map->n_pools; i++) {
        map_pool *arena = &map->pools[i];
        if (arena->klass >= 0) continue;
        at = lf__round_up(at, arena->align_bytes);
        arena->offset = at;
        at += arena->capacity;
    }
    map->bytes = at;
}

/* Tied parameters read like their owner. */
static void copy_to_tied(lf_map *map)
{
    for (int32_t i = 0; i < map->n_params; i++) {
        map_param *p = &map->params[i];
        if (p->tied_to < 0) continue;
        const map_param *owner = &map->params[p->tied_to];
        p->klass = owner->klass;
        p->pool = owner->pool;
        p->group = owner->group;
        p->offset = owner->offset;
    }
}

/* After a failure the map is as before planning, so that the caller can correct a pool's size and plan again. */
static void forget_layout(lf_map *map)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < map->n_pools; i++) {
        if (map->pools[i].klass < 0) map->pools[kept++] = map->pools[i];
        else lf__free(map->pools[i].name);
    }
    map->n_pools = kept;
    for (int32_t g = 0; g < LF_MAP_N_GROUPS; g++) {
        lf__free(map->groups[g].ranges);
        map->groups[g] = (map_group){0};
    }
    for (int32_t i = 0; i < map->n_requests; i++) map->requests[i].used = false;
    lf__free(map->order);
    map->order = NULL;
    map->n_order = map->n_classes = 0;
}

lf_status lf__map_layout(lf_map *map)
{
    lf_status rc = LF_OK;
    LF_TRY(sort_blocks(map));
    LF_TRY(place_blocks(map));
    LF_TRY(check_requests(map));
    LF_TRY(make_groups(map));
    copy_to_tied(map);
    place_planes(map);
out:
    if (rc < 0) forget_layout(map);
    return rc;
}
