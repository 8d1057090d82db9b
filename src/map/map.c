/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a map: open, add, plan, allocate or attach, references. */
#include <stdatomic.h>
#include <string.h>

#include "device/device_int.h"
#include "map_int.h"

const char *lf_role_name(int32_t role)
{
    static const char *const names[] = {"weight", "grad", "master", "exp_avg", "exp_avg_sq"};
    return role >= 0 && role < LF_N_ROLES ? names[role] : "?";
}

lf_status lf_map_open(lf_map **out, const lf_map_options *opts)
{
    LF_CHECK_ARG(out, "out is NULL");
    *out = NULL;
    lf_map_options o;
    lf_status rc = lf__options_take("map", &o, sizeof o, opts);
    if (rc < 0) return rc;
    LF_CHECK_ARG(lf__is_pow2(o.align_elements), "[map] align_elements is %d, expected a power of two", o.align_elements);
    LF_CHECK_ARG(lf__is_pow2(o.plane_align_bytes), "[map] plane_align_bytes is %d, expected a power of two", o.plane_align_bytes);
    lf_map *map = lf__alloc(sizeof *map);
    if (!map) return LF_FAIL(LF_ERR_NOMEM, "map");
    map->opts = o;
    atomic_init(&map->refs, 1);
    *out = map;
    return LF_OK;
}

lf_map *lf_map_ref(lf_map *map)
{
    atomic_fetch_add(&map->refs, 1);
    return map;
}

void lf_map_unref(lf_map *map)
{
    if (!map || atomic_fetch_sub(&map->refs, 1) != 1) return;
    lf_slab_close(map->slab);
    lf_device_close(map->device);
    for (int32_t i = 0; i < map->n_params; i++) lf__free(map->params[i].name);
    for (int32_t i = 0; i < map->n_pools; i++) lf__free(map->pools[i].name);
    for (int32_t i = 0; i < map->n_requests; i++) lf__free(map->requests[i].pool);
    for (int32_t i = 0; i < LF_MAP_N_GROUPS; i++) lf__free(map->groups[i].ranges);
    lf__free(map->params);
    lf__free(map->pools);
    lf__free(map->requests);
    lf__free(map->order);
    lf__free(map);
}

/* Room for one more row in a growing array. */
static lf_status grow(void **array, int32_t n, int32_t *room, size_t row_bytes)
{
    if (n < *room) return LF_OK;
    int32_t bigger = *room ? *room * 2 : 64;
    void *grown = lf__realloc(*array, (size_t)bigger, row_bytes);
    if (!grown) return LF_FAIL(LF_ERR_NOMEM, "map: %d rows", bigger);
    *array = grown;
    *room = bigger;
    return LF_OK;
}

static lf_status check_param(const lf_map *map, const lf_param *p, int64_t *count)
{
    LF_CHECK_ARG(p->size == sizeof *p, "lf_param: size is %zu, expected %zu", p->size, sizeof *p);
    LF_CHECK_ARG(p->name && p->name[0] && strlen(p->name) < LF_NAME_MAX, "a parameter's name is empty or longer than %d bytes",
                 LF_NAME_MAX - 1);
    LF_CHECK_ARG(p->ndim >= 0 && p->ndim <= LF_MAX_DIMS, "%s has %d dimensions, expected 0 to %d", p->name, p->ndim, LF_MAX_DIMS);
    LF_CHECK_ARG(p->dtype == LF_DTYPE_F32 || p->dtype == LF_DTYPE_BF16 || p->dtype == LF_DTYPE_F16,
                 "%s has dtype %s, expected f32, bf16 or f16", p->name, lf_dtype_name(p->dtype));
    LF_CHECK_ARG(p->layer >= -1, "%s has layer %d, expected -1 or more", p->name, p->layer);
    LF_CHECK_ARG(p->expert >= -1 && p->expert < 65536, "%s has expert %d, expected -1 to 65535", p->name, p->expert);
    *count = 1;
    for (int32_t i = 0; i < p->ndim; i++) {
        LF_CHECK_ARG(p->shape[i] > 0 && *count <= ((int64_t)1 << 48) / p->shape[i],
                     "%s has extent %lld in dimension %d, expected 1 or more, 2^48 elements in all", p->name,
                     (long long)p->shape[i], i);
        *count *= p->shape[i];
    }
    if (p->tied_to < 0) return LF_OK;
    LF_CHECK_ARG(p->tied_to < map->n_params, "%s is tied to parameter %d, expected an earlier one", p->name, p->tied_to);
    const map_param *owner = &map->params[p->tied_to];
    LF_CHECK_ARG(owner->tied_to < 0, "%s is tied to %s, which is tied itself; hint: tie to its owner", p->name, owner->name);
    LF_CHECK_ARG(owner->count == *count && owner->dtype == p->dtype && !((owner->flags ^ p->flags) & LF_PARAM_FROZEN),
                 "%s is tied to %s but differs in size, dtype or trainability", p->name, owner->name);
    return LF_OK;
}

lf_status lf_map_add(lf_map *map, const lf_param *p, int32_t *index)
{
    LF_CHECK_ARG(map && p, "map or param is NULL");
    if (map->planned) return LF_FAIL(LF_ERR_STATE, "cannot add a parameter: the map is planned");
    int64_t count = 0;
    lf_status rc = check_param(map, p, &count);
    if (rc < 0) return rc;
    int32_t known;
    if (lf_map_find(map, p->name, &known) == LF_OK) return LF_FAIL(LF_ERR_EXISTS, "parameter %s was added before", p->name);
    LF_CHECK_ARG(map->n_params < LF_MAP_MAX_PARAMS, "more than %d parameters", LF_MAP_MAX_PARAMS);
    rc = grow((void **)&map->params, map->n_params, &map->params_room, sizeof *map->params);
    if (rc < 0) return rc;
    map_param *row = &map->params[map->n_params];
    *row = (map_param){.name = lf__strdup(p->name),
                       .ndim = p->ndim,
                       .dtype = p->dtype,
                       .layer = p->layer,
                       .expert = p->expert,
                       .tied_to = p->tied_to < 0 ? -1 : p->tied_to,
                       .flags = p->flags,
                       .count = count};
    if (!row->name) return LF_FAIL(LF_ERR_NOMEM, "parameter %s", p->name);
    for (int32_t i = 0; i < p->ndim; i++) row->shape[i] = p->shape[i];
    if (index) *index = map->n_params;
    map->n_params++;
    return LF_OK;
}

map_pool *lf__map_new_pool(lf_map *map, const char *name)
{
    if (grow((void **)&map->pools, map->n_pools, &map->pools_room, sizeof *map->pools) < 0) return NULL;
    map_pool *pool = &map->pools[map->n_pools];
    *pool = (map_pool){.name = lf__strdup(name), .klass = -1};
    if (!pool->name) return NULL;
    map->n_pools++;
    return pool;
}

lf_status lf_map_add_arena(lf_map *map, const char *name, int32_t kind, int64_t bytes, int64_t align_bytes)
{
    LF_CHECK_ARG(map && name && name[0], "map or name is NULL or empty");
    if (map->planned) return LF_FAIL(LF_ERR_STATE, "cannot add arena %s: the map is planned", name);
    LF_CHECK_ARG(bytes > 0 && lf__is_pow2(align_bytes),
                 "arena %s: %lld bytes aligned to %lld, expected more than 0 and a power of two", name, (long long)bytes,
                 (long long)align_bytes);
    LF_CHECK_ARG(kind >= LF_POOL_STATIC && kind <= LF_POOL_TRANSIENT, "arena %s: kind %d", name, kind);
    for (int32_t i = 0; i < map->n_pools; i++)
        if (strcmp(map->pools[i].name, name) == 0) return LF_FAIL(LF_ERR_EXISTS, "arena %s was added before", name);
    map_pool *pool = lf__map_new_pool(map, name);
    if (!pool) return LF_FAIL(LF_ERR_NOMEM, "arena %s", name);
    pool->kind = kind;
    pool->used = pool->capacity = bytes;
    pool->align_bytes = align_bytes;
    return LF_OK;
}

lf_status lf_map_set_pool_bytes(lf_map *map, const char *pool, int64_t bytes)
{
    LF_CHECK_ARG(map && pool, "map or pool is NULL");
    LF_CHECK_ARG(bytes > 0, "pool %s: %lld bytes, expected more than 0", pool, (long long)bytes);
    if (map->planned)
        return LF_FAIL(LF_ERR_STATE, "cannot size pool %s: the map is planned; hint: set sizes before the first step", pool);
    lf_status rc = grow((void **)&map->requests, map->n_requests, &map->requests_room, sizeof *map->requests);
    if (rc < 0) return rc;
    char *name = lf__strdup(pool);
    if (!name) return LF_FAIL(LF_ERR_NOMEM, "pool %s", pool);
    map->requests[map->n_requests++] = (map_request){name, bytes, false};
    return LF_OK;
}

lf_status lf_map_plan(lf_map *map)
{
    LF_CHECK_ARG(map, "map is NULL");
    if (map->planned) return LF_FAIL(LF_ERR_STATE, "the map is planned already");
    if (map->n_params == 0) return LF_FAIL(LF_ERR_STATE, "the map has no parameter to plan");
    lf_status rc = lf__map_layout(map);
    map->planned = rc == LF_OK;
    return rc;
}

lf_status lf_map_allocate(lf_map *map, lf_device *device)
{
    LF_CHECK_ARG(map && device, "map or device is NULL");
    if (!map->planned) return LF_FAIL(LF_ERR_STATE, "the map is not planned");
    if (map->slab || map->attached) return LF_FAIL(LF_ERR_STATE, "the map is %s already", map->slab ? "allocated" : "attached");
    lf_slab *slab;
    lf_status rc = lf_slab_open(device, (size_t)map->bytes, &slab);
    if (rc < 0) return rc;
    rc = lf_slab_commit(slab, (size_t)map->bytes);
    if (rc < 0) {
        lf_slab_close(slab);
        return lf__fail_prefix(rc, "the map needs %lld bytes", (long long)map->bytes);
    }
    map->slab = slab;
    map->device = lf__device_ref(device);
    return LF_OK;
}

lf_status lf_map_attach(lf_map *map, int32_t index, int32_t role, void *data)
{
    LF_CHECK_ARG(map && data, "map or data is NULL");
    if (!map->planned || map->slab) return LF_FAIL(LF_ERR_STATE, "attaching needs a map that is planned and not allocated");
    LF_CHECK_ARG(index >= 0 && index < map->n_params, "parameter %d, expected 0 to %d", index, map->n_params - 1);
    map_param *owner = &map->params[map->params[index].tied_to < 0 ? index : map->params[index].tied_to];
    LF_CHECK_ARG(role >= 0 && role < LF_N_ROLES && map->classes[owner->klass].role_dtype[role], "%s has no role %s", owner->name,
                 lf_role_name(role));
    owner->attached[role] = data;
    map->attached = true;
    return LF_OK;
}
