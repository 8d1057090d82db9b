/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule: groups cut into chunks, chunks in the order in which backward finishes them, and which blocks each holds. */
#include <stdio.h>
#include <stdlib.h>

#include "nexus_int.h"

enum { ALIGN = 64 }; /* elements: where a block is cut inside */

/* Where a trainable block lies. */
typedef struct place {
    int32_t block, klass, layer;
    int64_t from, to; /* elements, without padding */
} place;

static int compare_places(const void *a_, const void *b_)
{
    const place *a = a_, *b = b_;
    if (a->klass != b->klass) return a->klass < b->klass ? -1 : 1;
    return a->from < b->from ? -1 : a->from > b->from;
}

/* A tied block is final when the earliest of its layers is through: it takes the least layer of all that share it. */
static lf_status list_places(nexus_schedule *plan, const lf_map *map, place *places, int32_t *n_places)
{
    int32_t n = 0;
    for (int32_t b = 0; b < plan->n_blocks; b++) {
        lf_block_info block = {.size = sizeof block};
        lf_status rc = lf_map_get_block(map, b, &block);
        if (rc < 0) return rc;
        plan->owner[b] = block.group < 0 ? -1 : block.tied_to >= 0 ? block.tied_to : b;
        if (block.group < 0) continue;
        if (block.tied_to < 0) {
            places[n++] = (place){b, block.range.klass, block.layer, block.range.offset, block.range.offset + block.range.count};
            continue;
        }
        for (int32_t i = 0; i < n; i++)
            if (places[i].block == block.tied_to && block.layer < places[i].layer) places[i].layer = block.layer;
    }
    qsort(places, (size_t)n, sizeof *places, compare_places);
    *n_places = n;
    return LF_OK;
}

/* First place of the class that ends behind `offset`; n when there is none. */
static int32_t find_place(const place *places, int32_t n, int32_t klass, int64_t offset)
{
    int32_t low = 0, high = n;
    while (low < high) {
        int32_t mid = low + (high - low) / 2;
        bool before = places[mid].klass < klass || (places[mid].klass == klass && places[mid].to <= offset);
        if (before) low = mid + 1;
        else high = mid;
    }
    return low;
}

static bool lies_in(const place *p, const lf_range *range)
{
    return p->klass == range->klass && p->from < range->offset + range->count && p->to > range->offset;
}

/* ---- cutting --------------------------------------------------------------------------------------------------------- */

/* Elements [from, to) of a class as one chunk. */
static lf_status add_chunk(nexus_schedule *plan, const nexus_chunk *like, int64_t from, int64_t to)
{
    if (plan->n_chunks == plan->chunks_room) {
        int32_t room = plan->chunks_room ? plan->chunks_room * 2 : 64;
        nexus_chunk *bigger = lf__realloc(plan->chunks, (size_t)room, sizeof *bigger);
        if (!bigger) return LF_FAIL(LF_ERR_NOMEM, "a schedule of %d chunks", room);
        plan->chunks = bigger;
        plan->chunks_room = room;
    }
    nexus_chunk *c = &plan->chunks[plan->n_chunks++];
    *c = *like;
    c->range.offset = from;
    c->range.count = to - from;
    c->bytes = (to - from) * (int64_t)lf_dtype_bytes(c->dtype);
    return LF_OK;
}

/* A block larger than a chunk: equal parts. */
static lf_status cut_inside(nexus_schedule *plan, const nexus_chunk *like, int64_t from, int64_t to, int64_t limit)
{
    int64_t n = (to - from + limit - 1) / limit, part = lf__round_up((to - from + n - 1) / n, ALIGN);
    lf_status rc = LF_OK;
    for (; from < to && rc == LF_OK; from += part) rc = add_chunk(plan, like, from, from + part < to ? from + part : to);
    return rc;
}

/* Blocks are taken together while they fit; `like` carries group, class and dtype. */
static lf_status cut_range(nexus_schedule *plan, const nexus_chunk *like, const lf_range *range, const place *places, int32_t n,
                           int64_t limit)
{
    int64_t start = range->offset, full = start; /* [start, full): blocks gathered so far */
    lf_status rc = LF_OK;
    for (int32_t i = find_place(places, n, range->klass, range->offset); i < n && lies_in(&places[i], range); i++) {
        const bool last = i + 1 == n || !lies_in(&places[i + 1], range);
        const int64_t to = last ? range->offset + range->count : places[i + 1].from; /* padding goes with the block before it */
        if (to - start > limit && full > start) {
            LF_TRY(add_chunk(plan, like, start, full));
            start = full;
        }
        if (to - start > limit) {
            LF_TRY(cut_inside(plan, like, start, to, limit));
            start = to;
        }
        full = to;
    }
    if (full > start) LF_TRY(add_chunk(plan, like, start, full));
out:
    return rc;
}

static lf_status cut_groups(nexus_schedule *plan, const lf_map *map, const place *places, int32_t n, int64_t chunk_bytes)
{
    for (int32_t g = 0; g < lf_map_n_groups(map); g++) {
        const char *name;
        const lf_range *ranges;
        int32_t n_ranges;
        lf_status rc = lf_map_get_group(map, g, &name, &ranges, &n_ranges);
        for (int32_t r = 0; r < n_ranges && rc == LF_OK; r++) {
            lf_class_info info = {.size = sizeof info};
            rc = lf_map_get_class(map, ranges[r].klass, &info);
            nexus_chunk like = {
                .group = g, .group_name = name, .dtype = info.role_dtype[LF_ROLE_GRAD], .range = {.klass = ranges[r].klass}};
            if (rc < 0 || info.frozen || !like.dtype) continue;
            int64_t limit = chunk_bytes / (int64_t)lf_dtype_bytes(like.dtype) / ALIGN * ALIGN;
            rc = cut_range(plan, &like, &ranges[r], places, n, limit > ALIGN ? limit : ALIGN);
        }
        if (rc < 0) return rc;
    }
    return LF_OK;
}

/* ---- order and membership -------------------------------------------------------------------------------------------- */

/* In a layer experts come before dense parameters: forward runs attention first, so backward reaches experts first. Groups are
 * dense 0, high 1, low 2; a group's number turns 0 into the last. */
static int compare_chunks(const void *a_, const void *b_)
{
    const nexus_chunk *a = a_, *b = b_;
    if (a->layer != b->layer) return a->layer > b->layer ? -1 : 1;
    if (a->group != b->group) return a->group == 0 ? 1 : b->group == 0 ? -1 : a->group < b->group ? -1 : 1;
    if (a->range.klass != b->range.klass) return a->range.klass < b->range.klass ? -1 : 1;
    return a->range.offset < b->range.offset ? -1 : a->range.offset > b->range.offset;
}

static void order_chunks(nexus_schedule *plan, const place *places, int32_t n)
{
    for (int32_t c = 0; c < plan->n_chunks; c++) {
        nexus_chunk *k = &plan->chunks[c];
        k->layer = INT32_MAX;
        for (int32_t i = find_place(places, n, k->range.klass, k->range.offset); i < n && lies_in(&places[i], &k->range); i++) {
            k->n_blocks++;
            if (places[i].layer < k->layer) k->layer = places[i].layer;
        }
    }
    if (plan->n_chunks) qsort(plan->chunks, (size_t)plan->n_chunks, sizeof *plan->chunks, compare_chunks);
}

/* Two passes over all (chunk, block) pairs: count, then fill. */
static lf_status list_members(nexus_schedule *plan, const place *places, int32_t n)
{
    int64_t pairs = 0;
    for (int32_t c = 0; c < plan->n_chunks; c++) pairs += plan->chunks[c].n_blocks;
    if (pairs > INT32_MAX) return LF_FAIL(LF_ERR_UNSUPPORTED, "a schedule with %lld entries", (long long)pairs);
    plan->chunk_of = lf__alloc_array((size_t)pairs, sizeof *plan->chunk_of);
    if (!plan->chunk_of) return LF_FAIL(LF_ERR_NOMEM, "a schedule of %d chunks", plan->n_chunks);
    int32_t *first = plan->first_of; /* (n_blocks + 2): shifted by one while filling */
    for (int32_t fill = 0; fill < 2; fill++) {
        for (int32_t c = 0; c < plan->n_chunks; c++) {
            const lf_range *range = &plan->chunks[c].range;
            for (int32_t i = find_place(places, n, range->klass, range->offset); i < n && lies_in(&places[i], range); i++) {
                if (fill) plan->chunk_of[first[places[i].block + 1]++] = c;
                else first[places[i].block + 2]++;
            }
        }
        for (int32_t b = 0; !fill && b < plan->n_blocks; b++) first[b + 2] += first[b + 1];
    }
    return LF_OK;
}

/* ---- runs ------------------------------------------------------------------------------------------------------------ */

/* Whether chunk c goes on with the run before it. Transports launch a run as one, and every rank must launch the same ones: so
 * runs come from the map alone, never from the order in which gradients happen to come. */
static bool joins(const nexus_schedule *plan, int32_t c, const nexus_run *run, int64_t limit)
{
    const nexus_chunk *a = &plan->chunks[run->first], *b = &plan->chunks[c];
    return a->layer == b->layer && (a->group == 0) == (b->group == 0) && run->bytes + b->bytes <= limit;
}

static void name_run(const nexus_schedule *plan, nexus_run *run)
{
    const nexus_chunk *c = &plan->chunks[run->first];
    char where[32] = "the tail";
    if (c->layer < 0) snprintf(where, sizeof where, "the embedding");
    else if (c->layer < INT32_MAX) snprintf(where, sizeof where, "layer %d", c->layer);
    snprintf(run->label, sizeof run->label, "%s of %s (chunks %d to %d of %d)", c->group == 0 ? "dense" : "experts", where,
             run->first, run->end - 1, plan->n_chunks);
}

static lf_status gather_runs(nexus_schedule *plan, int64_t limit)
{
    if (!plan->n_chunks) return LF_OK;
    plan->runs = lf__alloc_array((size_t)plan->n_chunks, sizeof *plan->runs);
    if (!plan->runs) return LF_FAIL(LF_ERR_NOMEM, "a schedule of %d chunks", plan->n_chunks);
    nexus_run *run = NULL;
    for (int32_t c = 0; c < plan->n_chunks; c++) {
        if (!run || !joins(plan, c, run, limit)) {
            run = &plan->runs[plan->n_runs++];
            run->first = c;
        }
        plan->chunks[c].run = plan->n_runs - 1;
        run->bytes += plan->chunks[c].bytes;
        run->end = c + 1;
    }
    for (int32_t r = 0; r < plan->n_runs; r++) name_run(plan, &plan->runs[r]);
    return LF_OK;
}

lf_status lf__nexus_schedule(nexus_schedule *plan, const lf_map *map, int64_t chunk_bytes, int64_t run_bytes)
{
    lf_status rc = LF_OK;
    int32_t n = 0;
    *plan = (nexus_schedule){.n_blocks = lf_map_n_blocks(map)};
    const size_t n_blocks = (size_t)plan->n_blocks;
    place *places = lf__alloc_array(n_blocks, sizeof *places);
    plan->first_of = lf__alloc_array(n_blocks + 2, sizeof *plan->first_of);
    plan->owner = lf__alloc_array(n_blocks, sizeof *plan->owner);
    if (!places || !plan->first_of || !plan->owner) LF_THROW(LF_ERR_NOMEM, "a schedule of %d blocks", plan->n_blocks);
    LF_TRY(list_places(plan, map, places, &n));
    LF_TRY(cut_groups(plan, map, places, n, chunk_bytes));
    order_chunks(plan, places, n);
    LF_TRY(list_members(plan, places, n));
    LF_TRY(gather_runs(plan, run_bytes));
out:
    lf__free(places);
    if (rc < 0) lf__nexus_schedule_free(plan);
    return rc;
}

void lf__nexus_schedule_free(nexus_schedule *plan)
{
    lf__free(plan->chunks);
    lf__free(plan->runs);
    lf__free(plan->first_of);
    lf__free(plan->chunk_of);
    lf__free(plan->owner);
    *plan = (nexus_schedule){0};
}
