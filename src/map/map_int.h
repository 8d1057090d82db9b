/* SPDX-License-Identifier: Apache-2.0 */
/** @file map_int.h  The map's own structures; see docs/internals/map.md. */
#ifndef LF_MAP_INT_H
#define LF_MAP_INT_H

#include "base/base.h"
#include "loongforge/map.h"

enum { LF_MAP_MAX_PARAMS = 1 << 20, LF_MAP_MAX_CLASSES = 16, LF_MAP_N_GROUPS = 3 };

typedef struct map_param {
    char *name;
    int64_t shape[LF_MAX_DIMS];
    int32_t ndim, dtype, layer, expert, tied_to;
    uint32_t flags;
    int64_t count;              /* elements */
    int32_t klass, pool, group; /* from here on: after planning */
    int64_t offset;
    void *attached[LF_N_ROLES];
} map_param;

typedef struct map_pool {
    char *name;
    int32_t kind, klass;
    int64_t offset, used, capacity; /* elements; bytes for an arena */
    int64_t align_bytes;            /* arenas */
} map_pool;

typedef struct map_class {
    int32_t dtype, frozen;
    int64_t count;
    int32_t role_dtype[LF_N_ROLES];
    int64_t role_offset[LF_N_ROLES];
} map_class;

typedef struct map_group {
    const char *name;
    lf_range *ranges;
    int32_t n_ranges;
} map_group;

typedef struct map_request {
    char *pool;
    int64_t bytes;
    bool used;
} map_request;

struct lf_map {
    _Atomic int32_t refs;
    lf_map_options opts;
    map_param *params;
    map_pool *pools; /* arenas come last */
    map_request *requests;
    int32_t *order; /* parameters that own a block, in layout order */
    int32_t n_params, n_pools, n_requests, n_order, n_classes;
    int32_t params_room, pools_room, requests_room;
    map_class classes[LF_MAP_MAX_CLASSES];
    map_group groups[LF_MAP_N_GROUPS];
    int64_t bytes;
    bool planned, attached;
    lf_device *device;
    lf_slab *slab;
};

/** Everything lf_map_plan does apart from checking the state. */
lf_status lf__map_layout(lf_map *map);
/** A pool at the end of the list, zeroed apart from its name; NULL: out of memory. */
map_pool *lf__map_new_pool(lf_map *map, const char *name);
/** Ranges over blocks `index[0…n)` in the given order; blocks that follow one another in memory are joined. Returns how many. */
int32_t lf__map_merge(const lf_map *map, const int32_t *index, int32_t n, lf_range *ranges);
/** Owner of a parameter's block: itself, or what it is tied to. */
static inline const map_param *lf__map_owner(const lf_map *map, int32_t index)
{
    const map_param *p = &map->params[index];
    return p->tied_to < 0 ? p : &map->params[p->tied_to];
}

#endif
