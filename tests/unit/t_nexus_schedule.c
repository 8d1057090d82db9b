/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule by itself: what it covers, how it is cut, in which order. */
#include "nexus_fixture.h"

static lf_nexus *plan_only(lf_map *map, int64_t chunk_bytes)
{
    lf_nexus *nexus = NULL;
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = chunk_bytes;
    opts.run_bytes = 3 * chunk_bytes;
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, &opts));
    return nexus;
}

/* A random model: layers of dense parameters and experts of unequal sizes, two dtypes, some frozen. */
static lf_map *random_map(lf__rng *rng)
{
    lf_map *map = new_map(lf__rng_below(rng, 2), 4);
    char name[48];
    int32_t layers = 1 + lf__rng_below(rng, 5), experts = lf__rng_below(rng, 7);
    add_param(map, "embed", 1 + lf__rng_below(rng, 40000), LF_DTYPE_BF16, -1, -1, 0);
    for (int32_t l = 0; l < layers; l++)
        for (int32_t e = -1; e < experts; e++)
            for (int32_t i = 0; i < 3; i++) {
                snprintf(name, sizeof name, "l%d.e%d.%d", l, e, i);
                add_param(map, name, 1 + lf__rng_below(rng, 200 * (e + 2)) * (1 + lf__rng_below(rng, 8)),
                          lf__rng_below(rng, 4) ? LF_DTYPE_BF16 : LF_DTYPE_F32, l, e,
                          lf__rng_below(rng, 8) ? 0 : LF_PARAM_FROZEN);
            }
    add_param(map, "head", 1 + lf__rng_below(rng, 40000), LF_DTYPE_F32, INT32_MAX, -1, 0);
    CHECK_OK(lf_map_plan(map));
    return map;
}

/* How often each element of a class is named. */
static uint8_t *count_elements(const lf_map *map, int32_t klass, int64_t *n)
{
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, klass, &info));
    *n = info.count;
    return lf__alloc((size_t)info.count);
}

/* Every trainable block lies in chunks of its own group, once; chunks hold nothing of another block. */
static void check_cover(const lf_map *map, const lf_nexus *nexus)
{
    for (int32_t k = 0; k < lf_map_n_classes(map); k++) {
        int64_t n;
        uint8_t *times = count_elements(map, k, &n), *group = lf__alloc((size_t)n);
        for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
            lf_chunk_info c = chunk_at(nexus, i);
            if (c.range.klass != k) continue;
            for (int64_t x = c.range.offset; x < c.range.offset + c.range.count; x++) {
                times[x]++;
                group[x] = (uint8_t)c.group;
            }
        }
        for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
            const lf_block_info block = block_at(map, b);
            if (block.range.klass != k) continue;
            const bool frozen = block.flags & LF_PARAM_FROZEN;
            for (int64_t x = block.range.offset; x < block.range.offset + block.range.count; x++) {
                CHECK_EQ(times[x], frozen ? 0 : 1);
                if (!frozen) CHECK_EQ(group[x], block.group);
            }
        }
        for (int64_t x = 0; x < n; x++) CHECK(times[x] <= 1);
        lf__free(times);
        lf__free(group);
    }
}

/* Blocks of at most a chunk are whole; larger ones are the only thing in the chunks they are cut into. */
static void check_cuts(const lf_map *map, const lf_nexus *nexus, int64_t chunk_bytes)
{
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        lf_chunk_info c = chunk_at(nexus, i);
        const int64_t end = c.range.offset + c.range.count;
        CHECK(c.range.count > 0 && c.bytes <= chunk_bytes);
        CHECK_EQ(c.bytes, c.range.count * (int64_t)lf_dtype_bytes(c.dtype));
        CHECK_STR(c.form, "dense");
        for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
            const lf_block_info block = block_at(map, b);
            const int64_t from = block.range.offset, to = from + block.range.count;
            if (block.range.klass != c.range.klass || to <= c.range.offset || from >= end) continue;
            const bool inside = from >= c.range.offset && to <= end;
            if (!inside) CHECK(lf__round_up(block.range.count, 64) * (int64_t)lf_dtype_bytes(c.dtype) > chunk_bytes - 64 * 4);
        }
    }
}

/* The layer that backward reaches last among a chunk's blocks. */
static int32_t last_layer(const lf_map *map, const lf_chunk_info *c)
{
    int32_t layer = INT32_MAX;
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        const lf_block_info block = block_at(map, b);
        if (block.range.klass == c->range.klass && block.range.offset < c->range.offset + c->range.count &&
            block.range.offset + block.range.count > c->range.offset && block.layer < layer)
            layer = block.layer;
    }
    return layer;
}

/* Runs are neighbours of one layer and kind, within the limit or a single chunk, and none could have been longer. */
static void check_runs(const lf_map *map, const lf_nexus *nexus, int64_t run_bytes)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        lf_chunk_info c = chunk_at(nexus, i), before = i ? chunk_at(nexus, i - 1) : c;
        const bool alike = i && last_layer(map, &before) == last_layer(map, &c) && (before.group == 0) == (c.group == 0);
        const bool same = i && c.run == before.run;
        if (i == 0) CHECK_EQ(c.run, 0);
        else CHECK(same || c.run == before.run + 1);
        if (same) CHECK(alike && bytes + c.bytes <= run_bytes);
        else if (i) CHECK(!alike || bytes + c.bytes > run_bytes);
        bytes = (same ? bytes : 0) + c.bytes;
    }
}

TEST(schedule_covers_cuts_and_orders)
{
    lf__rng rng;
    lf__rng_init(&rng, 99, 0, 0, 0);
    for (int32_t round = 0; round < 40; round++) {
        const int64_t sizes[] = {4096, 8192, 65536, 1 << 20, 4096 + 132};
        lf_map *map = random_map(&rng);
        const int64_t chunk_bytes = sizes[round % 5];
        lf_nexus *nexus = plan_only(map, chunk_bytes);
        check_cover(map, nexus);
        check_cuts(map, nexus, chunk_bytes);
        check_runs(map, nexus, 3 * chunk_bytes);
        for (int32_t i = 1; i < lf_nexus_n_chunks(nexus); i++) {
            lf_chunk_info before = chunk_at(nexus, i - 1), c = chunk_at(nexus, i);
            const int32_t was = last_layer(map, &before), is = last_layer(map, &c);
            CHECK(was >= is);
            if (was == is) CHECK(!(before.group == 0 && c.group != 0)); /* experts before dense */
        }
        lf_nexus_close(nexus);
        lf_map_unref(map);
    }
}

/* 10 blocks of 1000 f32 padded to 1024: 4 KiB each. Chunks of 8 KiB + a bit take two each. */
TEST(schedule_gathers_small_blocks)
{
    lf_map *map = new_map(1, 4);
    char name[16];
    for (int32_t i = 0; i < 10; i++) {
        snprintf(name, sizeof name, "p%d", i);
        add_param(map, name, 1000, LF_DTYPE_F32, 0, -1, 0);
    }
    CHECK_OK(lf_map_plan(map));
    lf_nexus *nexus = plan_only(map, 9000);
    CHECK_EQ(lf_nexus_n_chunks(nexus), 5);
    for (int32_t i = 0; i < 5; i++) {
        lf_chunk_info c = chunk_at(nexus, i);
        CHECK_EQ(c.range.offset, 2048 * i);
        CHECK_EQ(c.range.count, i < 4 ? 2048 : 1024 + 1000); /* no padding behind the last */
    }
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* A block of 10 chunks' size becomes equal parts; its neighbours stay whole. */
TEST(schedule_cuts_large_blocks_inside)
{
    lf_map *map = new_map(1, 4);
    add_param(map, "a", 100, LF_DTYPE_F32, 0, -1, 0);
    add_param(map, "b", 10000, LF_DTYPE_F32, 0, -1, 0);
    add_param(map, "c", 100, LF_DTYPE_F32, 0, -1, 0);
    CHECK_OK(lf_map_plan(map));
    lf_nexus *nexus = plan_only(map, 4096);
    CHECK_EQ(lf_nexus_n_chunks(nexus), 12);
    CHECK_EQ(chunk_at(nexus, 0).range.count, 128);
    for (int32_t i = 1; i <= 9; i++) CHECK_EQ(chunk_at(nexus, i).range.count, 1024);
    CHECK_EQ(chunk_at(nexus, 10).range.count, 10048 - 9 * 1024);
    CHECK_EQ(chunk_at(nexus, 11).range.count, 100);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* An embedding tied to the head is final only when backward is through. */
TEST(schedule_tied_block_waits_for_its_first_layer)
{
    lf_map *map = new_map(1, 4);
    int64_t count = 5000;
    add_param(map, "head", count, LF_DTYPE_F32, INT32_MAX, -1, 0);
    add_param(map, "layer", count, LF_DTYPE_F32, 3, -1, 0);
    lf_param tied = {.size = sizeof tied,
                     .name = "embed",
                     .shape = &count,
                     .ndim = 1,
                     .dtype = LF_DTYPE_F32,
                     .layer = -1,
                     .expert = -1,
                     .tied_to = 0};
    CHECK_OK(lf_map_add(map, &tied, NULL));
    CHECK_OK(lf_map_plan(map));
    lf_nexus *nexus = plan_only(map, 32768);
    const lf_block_info layer = block_at(map, 1);
    CHECK_EQ(lf_nexus_n_chunks(nexus), 2);
    CHECK_EQ(chunk_at(nexus, 0).range.offset, layer.range.offset);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(schedule_alone_does_not_reduce)
{
    lf_map *map = new_map(1, 4);
    add_param(map, "a", 10, LF_DTYPE_F32, 0, -1, 0);
    lf_nexus *nexus = NULL;
    CHECK_STATUS(lf_nexus_open(&nexus, map, NULL, NULL), LF_ERR_STATE); /* not planned */
    CHECK(nexus == NULL);
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, NULL));
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "without a transport");
    lf_chunk_info c = {.size = sizeof c};
    CHECK_STATUS(lf_nexus_get_chunk(nexus, 1, &c), LF_ERR_INVALID);
    CHECK_STATUS(lf_nexus_get_chunk(nexus, -1, &c), LF_ERR_INVALID);
    c.size = 4;
    CHECK_STATUS(lf_nexus_get_chunk(nexus, 0, &c), LF_ERR_INVALID);
    lf_nexus_close(nexus);
    lf_nexus_close(NULL);
    lf_map_unref(map);
}

TEST(schedule_refuses_options)
{
    lf_map *map = new_map(1, 4);
    add_param(map, "a", 10, LF_DTYPE_F32, 0, -1, 0);
    CHECK_OK(lf_map_plan(map));
    lf_nexus *nexus;
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_EQ(opts.chunk_bytes, 16 << 20);
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
    opts.k_ratio = 0;
    CHECK_STATUS(lf_nexus_open(&nexus, map, NULL, &opts), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "k_ratio is 0");
    opts.k_ratio = 1;
    CHECK_STATUS(lf_options_set("nexus", &opts, "comm_strategy", "wild"), LF_ERR_INVALID);
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "dense"));
    opts.chunk_bytes = 100;
    CHECK_STATUS(lf_nexus_open(&nexus, map, NULL, &opts), LF_ERR_INVALID);
    opts.chunk_bytes = 4096;
    for (int64_t at = 1;; at++) { /* every allocation fails once; nothing leaks */
        lf__alloc_fail_at(at);
        lf_status rc = lf_nexus_open(&nexus, map, NULL, &opts);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) break;
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(at < 100);
    }
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

LF_TEST_MAIN
