/* SPDX-License-Identifier: Apache-2.0 */
/* Questions to a planned map. */
#include <stdlib.h>
#include <string.h>

#include "map_int.h"

int32_t lf_map_n_classes(const lf_map *map) { return map->n_classes; }
int32_t lf_map_n_blocks(const lf_map *map) { return map->n_params; }
int32_t lf_map_n_pools(const lf_map *map) { return map->n_pools; }
int32_t lf_map_n_groups(const lf_map *map) { return map->planned ? LF_MAP_N_GROUPS : 0; }
int64_t lf_map_bytes(const lf_map *map) { return map->bytes; }
lf_device *lf_map_device(const lf_map *map) { return map->device; }

/* The checks every question makes: a planned map, an index within bounds, a struct of the right size. */
static lf_status check_ask(const lf_map *map, const char *what, int32_t i, int32_t n, size_t size, size_t expected)
{
    LF_CHECK_ARG(map, "map is NULL");
    if (!map->planned) return LF_FAIL(LF_ERR_STATE, "%s %d: the map is not planned", what, i);
    LF_CHECK_ARG(i >= 0 && i < n, "%s %d, expected 0 to %d", what, i, n - 1);
    LF_CHECK_ARG(size == expected, "%s info: size is %zu, expected %zu", what, size, expected);
    return LF_OK;
}

lf_status lf_map_get_class(const lf_map *map, int32_t klass, lf_class_info *info)
{
    LF_CHECK_ARG(info, "info is NULL");
    lf_status rc = check_ask(map, "class", klass, map ? map->n_classes : 0, info->size, sizeof *info);
    if (rc < 0) return rc;
    const map_class *c = &map->classes[klass];
    *info = (lf_class_info){.size = sizeof *info, .dtype = c->dtype, .frozen = c->frozen, .count = c->count};
    memcpy(info->role_dtype, c->role_dtype, sizeof c->role_dtype);
    memcpy(info->role_offset, c->role_offset, sizeof c->role_offset);
    return LF_OK;
}

lf_status lf_map_get_block(const lf_map *map, int32_t index, lf_block_info *info)
{
    LF_CHECK_ARG(info, "info is NULL");
    lf_status rc = check_ask(map, "block", index, map ? map->n_params : 0, info->size, sizeof *info);
    if (rc < 0) return rc;
    const map_param *p = &map->params[index];
    *info = (lf_block_info){.size = sizeof *info,
                            .name = p->name,
                            .pool = map->pools[p->pool].name,
                            .range = {p->klass, 0, p->offset, p->count},
                            .ndim = p->ndim,
                            .layer = p->layer,
                            .expert = p->expert,
                            .group = p->group,
                            .tied_to = p->tied_to,
                            .flags = p->flags};
    memcpy(info->shape, p->shape, sizeof p->shape);
    return LF_OK;
}

lf_status lf_map_get_pool(const lf_map *map, int32_t pool, lf_pool_info *info)
{
    LF_CHECK_ARG(info, "info is NULL");
    lf_status rc = check_ask(map, "pool", pool, map ? map->n_pools : 0, info->size, sizeof *info);
    if (rc < 0) return rc;
    const map_pool *p = &map->pools[pool];
    *info = (lf_pool_info){sizeof *info, p->name, p->kind, p->klass, p->offset, p->used, p->capacity};
    return LF_OK;
}

lf_status lf_map_get_group(const lf_map *map, int32_t group, const char **name, const lf_range **ranges, int32_t *n_ranges)
{
    LF_CHECK_ARG(name && ranges && n_ranges, "name, ranges or n_ranges is NULL");
    lf_status rc = check_ask(map, "group", group, LF_MAP_N_GROUPS, 0, 0);
    if (rc < 0) return rc;
    *name = map->groups[group].name;
    *ranges = map->groups[group].ranges;
    *n_ranges = map->groups[group].n_ranges;
    return LF_OK;
}

lf_status lf_map_find(const lf_map *map, const char *name, int32_t *index)
{
    LF_CHECK_ARG(map && name && index, "map, name or index is NULL");
    for (int32_t i = 0; i < map->n_params; i++)
        if (strcmp(map->params[i].name, name) == 0) {
            *index = i;
            return LF_OK;
        }
    return LF_FAIL(LF_ERR_NOTFOUND, "no parameter %s in the map", name);
}

/* ---- ranges ---------------------------------------------------------------------------------------------------------- */

int32_t lf__map_merge(const lf_map *map, const int32_t *index, int32_t n, lf_range *ranges)
{
    int32_t used = 0;
    int64_t next = 0; /* where the padding of the last range ends */
    for (int32_t i = 0; i < n; i++) {
        const map_param *p = lf__map_owner(map, index[i]);
        lf_range *last = used ? &ranges[used - 1] : NULL;
        if (last && last->klass == p->klass && next == p->offset) last->count = p->offset + p->count - last->offset;
        else ranges[used++] = (lf_range){p->klass, 0, p->offset, p->count};
        next = p->offset + lf__round_up(p->count, map->opts.align_elements);
    }
    return used;
}

static int compare_ranges(const void *a_, const void *b_)
{
    const lf_range *a = a_, *b = b_;
    if (a->klass != b->klass) return a->klass < b->klass ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

lf_status lf_map_cover(const lf_map *map, const int32_t *index, int32_t n, lf_range *ranges, int32_t *n_ranges)
{
    LF_CHECK_ARG(map && n_ranges && (n == 0 || (index && ranges)), "map, index, ranges or n_ranges is NULL");
    if (!map->planned) return LF_FAIL(LF_ERR_STATE, "the map is not planned");
    LF_CHECK_ARG(n >= 0 && *n_ranges >= n, "room for %d ranges, expected %d", *n_ranges, n);
    for (int32_t i = 0; i < n; i++) {
        LF_CHECK_ARG(index[i] >= 0 && index[i] < map->n_params, "block %d, expected 0 to %d", index[i], map->n_params - 1);
        const map_param *p = lf__map_owner(map, index[i]);
        ranges[i] = (lf_range){p->klass, 0, p->offset, p->count};
    }
    qsort(ranges, (size_t)n, sizeof *ranges, compare_ranges);
    int32_t used = 0;
    for (int32_t i = 0; i < n; i++) {
        lf_range *last = used ? &ranges[used - 1] : NULL;
        bool twin = last && last->klass == ranges[i].klass && last->offset <= ranges[i].offset &&
                    ranges[i].offset < last->offset + last->count;
        if (twin) continue; /* a tied parameter beside its owner */
        if (last && last->klass == ranges[i].klass &&
            lf__round_up(last->offset + last->count, map->opts.align_elements) == ranges[i].offset)
            last->count = ranges[i].offset + ranges[i].count - last->offset;
        else ranges[used++] = ranges[i];
    }
    *n_ranges = used;
    return LF_OK;
}

lf_status lf_ranges_common(const lf_range *a, int32_t n_a, const lf_range *b, int32_t n_b, lf_range *out, int32_t *n_out)
{
    LF_CHECK_ARG(n_out && n_a >= 0 && n_b >= 0 && (a || n_a == 0) && (b || n_b == 0) && (out || *n_out == 0),
                 "a list of ranges or n_out is NULL, or a count is negative");
    const int32_t room = *n_out;
    int64_t used = 0;
    for (int32_t i = 0; i < n_a; i++)
        for (int32_t j = 0; j < n_b; j++) {
            const int64_t from = a[i].offset > b[j].offset ? a[i].offset : b[j].offset;
            const int64_t end_a = a[i].offset + a[i].count, end_b = b[j].offset + b[j].count, to = end_a < end_b ? end_a : end_b;
            if (a[i].klass != b[j].klass || from >= to) continue;
            if (used < room) out[used] = (lf_range){a[i].klass, 0, from, to - from};
            used++;
        }
    *n_out = used < INT32_MAX ? (int32_t)used : INT32_MAX;
    return used <= room ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "room for %d ranges, expected %lld", room, (long long)used);
}

static bool range_is_inside(const lf_map *map, const lf_range *r, int32_t role)
{
    return map->planned && r->klass >= 0 && r->klass < map->n_classes && r->offset >= 0 && r->count >= 0 &&
           r->offset <= map->classes[r->klass].count - r->count && role >= 0 && role < LF_N_ROLES &&
           map->classes[r->klass].role_dtype[role];
}

void *lf_map_address(const lf_map *map, const lf_range *range, int32_t role)
{
    if (!map || !range || !map->slab || !range_is_inside(map, range, role)) return NULL;
    const map_class *c = &map->classes[range->klass];
    return (char *)lf_slab_base(map->slab) + c->role_offset[role] + range->offset * (int64_t)lf_dtype_bytes(c->role_dtype[role]);
}

/* One piece more, or only counted when there is no room. */
static void add_piece(lf_piece *pieces, int32_t room, int32_t *n, void *data, int64_t count)
{
    if (count <= 0) return;
    if (*n < room) pieces[*n] = (lf_piece){data, count};
    (*n)++;
}

/* First block in `order` that ends behind the range's start: order is sorted by class and offset. */
static int32_t first_block(const lf_map *map, const lf_range *range)
{
    int32_t low = 0, high = map->n_order;
    while (low < high) {
        int32_t mid = (low + high) / 2;
        const map_param *p = &map->params[map->order[mid]];
        bool before = p->klass < range->klass || (p->klass == range->klass && p->offset + p->count <= range->offset);
        if (before) low = mid + 1;
        else high = mid;
    }
    return low;
}

static lf_status attached_pieces(const lf_map *map, const lf_range *range, int32_t role, lf_piece *pieces, int32_t room,
                                 int32_t *n)
{
    int64_t at = range->offset, end = range->offset + range->count;
    size_t bytes = lf_dtype_bytes(map->classes[range->klass].role_dtype[role]);
    for (int32_t i = first_block(map, range); i < map->n_order && at < end; i++) {
        const map_param *p = &map->params[map->order[i]];
        if (p->klass != range->klass || p->offset >= end) break;
        if (!p->attached[role]) return LF_FAIL(LF_ERR_STATE, "%s of %s was never attached", lf_role_name(role), p->name);
        if (p->offset > at) {
            add_piece(pieces, room, n, NULL, p->offset - at);
            at = p->offset;
        }
        int64_t stop = p->offset + p->count < end ? p->offset + p->count : end;
        add_piece(pieces, room, n, (char *)p->attached[role] + (size_t)(at - p->offset) * bytes, stop - at);
        at = stop;
    }
    add_piece(pieces, room, n, NULL, end - at);
    return LF_OK;
}

lf_status lf_map_pieces(const lf_map *map, const lf_range *range, int32_t role, lf_piece *pieces, int32_t *n)
{
    LF_CHECK_ARG(map && range && n && (pieces || *n == 0), "map, range, pieces or n is NULL");
    LF_CHECK_ARG(range_is_inside(map, range, role), "range (%d, %lld, %lld) of role %s is outside the map", range->klass,
                 (long long)range->offset, (long long)range->count, lf_role_name(role));
    int32_t room = *n;
    *n = 0;
    if (map->slab) {
        add_piece(pieces, room, n, lf_map_address(map, range, role), range->count);
    } else {
        lf_status rc = attached_pieces(map, range, role, pieces, room, n);
        if (rc < 0) return rc;
    }
    return *n <= room ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "room for %d pieces, expected %d", room, *n);
}

/* ---- the whole ------------------------------------------------------------------------------------------------------- */

/* Numbers are written out in decimal, so that the digest does not depend on the machine's byte order or padding. */
lf_status lf_map_digest(const lf_map *map, uint8_t digest[16])
{
    LF_CHECK_ARG(map && digest, "map or digest is NULL");
    if (!map->planned) return LF_FAIL(LF_ERR_STATE, "the map is not planned");
    lf__buf text = {.max = 1u << 30};
    lf_status rc = lf__buf_printf(&text, "loongforge map 1\n");
    for (int32_t c = 0; c < map->n_classes && rc == LF_OK; c++)
        rc = lf__buf_printf(&text, "class %d %d %d %lld\n", c, map->classes[c].dtype, map->classes[c].frozen,
                            (long long)map->classes[c].count);
    for (int32_t i = 0; i < map->n_params && rc == LF_OK; i++) {
        const map_param *p = &map->params[i];
        rc = lf__buf_printf(&text, "%s %d %lld %d %d", p->name, p->klass, (long long)p->offset, p->group, p->tied_to);
        for (int32_t d = 0; d < p->ndim && rc == LF_OK; d++) rc = lf__buf_printf(&text, " %lld", (long long)p->shape[d]);
        if (rc == LF_OK) rc = lf__buf_add(&text, "\n", 1);
    }
    if (rc == LF_OK) {
        lf__hash128 h = lf__hash(text.data, text.used, 0);
        for (int32_t i = 0; i < 8; i++) {
            digest[i] = (uint8_t)(h.hi >> (56 - 8 * i));
            digest[8 + i] = (uint8_t)(h.lo >> (56 - 8 * i));
        }
    }
    lf__buf_free(&text);
    return rc;
}

lf_status lf_map_arena(const lf_map *map, const char *name, void **data, int64_t *bytes)
{
    LF_CHECK_ARG(map && name && data && bytes, "map, name, data or bytes is NULL");
    if (!map->slab) return LF_FAIL(LF_ERR_STATE, "arena %s: the map is not allocated", name);
    for (int32_t i = 0; i < map->n_pools; i++) {
        const map_pool *pool = &map->pools[i];
        if (pool->klass >= 0 || strcmp(pool->name, name) != 0) continue;
        *data = (char *)lf_slab_base(map->slab) + pool->offset;
        *bytes = pool->capacity;
        return LF_OK;
    }
    return LF_FAIL(LF_ERR_NOTFOUND, "no arena %s in the map", name);
}
