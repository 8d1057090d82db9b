/* SPDX-License-Identifier: Apache-2.0 */
/* The map: order, offsets, pools, groups, ranges, pieces, digest, references. */
#include "base/base.h"
#include "lf_test.h"
#include "loongforge/map.h"

static int32_t add(lf_map *map, const char *name, int32_t dtype, int32_t layer, int32_t expert, int64_t rows, int64_t cols,
                   int32_t tied, uint32_t flags)
{
    int64_t shape[2] = {rows, cols};
    int32_t index = -1;
    lf_param p = {.size = sizeof p,
                  .name = name,
                  .shape = shape,
                  .ndim = cols ? 2 : 1,
                  .dtype = dtype,
                  .layer = layer,
                  .expert = expert,
                  .tied_to = tied,
                  .flags = flags};
    CHECK_OK(lf_map_add(map, &p, &index));
    return index;
}

/* Two layers, four experts of sizes 96, 32, 64, 96 (rows of 10), norms in f32, an embedding tied to the head. */
enum { N_LAYERS = 2, N_EXPERTS = 4 };
static const int64_t expert_rows[N_EXPERTS] = {96, 32, 64, 96};

static lf_map *model(int32_t dtype, int32_t high)
{
    lf_map_options o;
    lf_map *map;
    char name[64];
    CHECK_OK(lf_options_init("map", &o, sizeof o));
    o.high_load_experts = high;
    CHECK_OK(lf_map_open(&map, &o));
    int32_t embed = add(map, "embed", dtype, -1, -1, 50, 10, -1, 0);
    for (int32_t l = 0; l < N_LAYERS; l++) {
        snprintf(name, sizeof name, "layer%d.norm", l);
        add(map, name, LF_DTYPE_F32, l, -1, 10, 0, -1, LF_PARAM_NO_DECAY);
        snprintf(name, sizeof name, "layer%d.qkv", l);
        add(map, name, dtype, l, -1, 30, 10, -1, 0);
        for (int32_t e = 0; e < N_EXPERTS; e++) {
            snprintf(name, sizeof name, "layer%d.expert%d.gate", l, e);
            add(map, name, dtype, l, e, expert_rows[e], 10, -1, 0);
            snprintf(name, sizeof name, "layer%d.expert%d.up", l, e);
            add(map, name, dtype, l, e, expert_rows[e], 10, -1, 0);
        }
    }
    add(map, "head", dtype, INT32_MAX, -1, 50, 10, embed, 0);
    add(map, "final_norm", LF_DTYPE_F32, INT32_MAX, -1, 10, 0, -1, LF_PARAM_NO_DECAY);
    return map;
}

static lf_block_info block(const lf_map *map, const char *name)
{
    lf_block_info info = {.size = sizeof info};
    int32_t index;
    CHECK_OK(lf_map_find(map, name, &index));
    CHECK_OK(lf_map_get_block(map, index, &info));
    return info;
}

TEST(layers_run_backwards_experts_large_to_small)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_plan(map));
    static const char *const order[] = {"final_norm",
                                        "layer1.norm",
                                        "layer1.qkv",
                                        "layer1.expert0.gate",
                                        "layer1.expert0.up",
                                        "layer1.expert3.gate",
                                        "layer1.expert2.gate",
                                        "layer1.expert1.gate",
                                        "layer0.norm",
                                        "layer0.expert1.up",
                                        "embed"};
    for (size_t i = 1; i < LF_COUNT(order); i++)
        if (block(map, order[i - 1]).range.offset >= block(map, order[i]).range.offset)
            FAIL_("%s is not before %s", order[i - 1], order[i]);
    CHECK_STR(block(map, "layer1.expert2.up").pool, "static/layer01/expert02");
    CHECK_STR(block(map, "layer0.qkv").pool, "static/layer00/dense");
    CHECK_STR(block(map, "embed").pool, "static/embed/dense");
    CHECK_STR(block(map, "final_norm").pool, "static/tail/dense");
    lf_map_unref(map);
}

TEST(gate_and_up_lie_side_by_side)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_plan(map));
    lf_block_info gate = block(map, "layer1.expert1.gate"), up = block(map, "layer1.expert1.up");
    CHECK_EQ(up.range.offset, gate.range.offset + gate.range.count); /* 320 elements: a multiple of 64 */
    lf_map_unref(map);
}

TEST(a_tied_parameter_shares_its_owners_block)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_plan(map));
    CHECK_EQ(block(map, "head").range.offset, block(map, "embed").range.offset);
    CHECK_EQ(block(map, "head").tied_to, 0);
    lf_class_info k = {.size = sizeof k};
    CHECK_OK(lf_map_get_class(map, 0, &k));
    int64_t expected = 3 * 64 + 2 * 320 + 512; /* norms, qkv (300 -> 320), embedding (500 -> 512); the head adds nothing */
    for (int32_t e = 0; e < N_EXPERTS; e++) expected += 2 * 2 * lf__round_up(expert_rows[e] * 10, 64);
    CHECK_EQ(k.count, expected);
    lf_map_unref(map);
}

TEST(blocks_never_overlap_and_are_aligned)
{
    lf_map *map = model(LF_DTYPE_BF16, 2);
    CHECK_OK(lf_map_plan(map));
    for (int32_t i = 0; i < lf_map_n_blocks(map); i++)
        for (int32_t j = 0; j < i; j++) {
            lf_block_info a = {.size = sizeof a}, b = {.size = sizeof b};
            CHECK_OK(lf_map_get_block(map, i, &a));
            CHECK_OK(lf_map_get_block(map, j, &b));
            CHECK_EQ(a.range.offset % 64, 0);
            if (a.range.klass != b.range.klass || a.tied_to == j) continue;
            CHECK(a.range.offset + a.range.count <= b.range.offset || b.range.offset + b.range.count <= a.range.offset);
        }
    lf_map_unref(map);
}

TEST(roles_follow_dtype_and_trainability)
{
    lf_map *map = model(LF_DTYPE_BF16, 2);
    add(map, "frozen", LF_DTYPE_BF16, 0, -1, 7, 3, -1, LF_PARAM_FROZEN);
    CHECK_OK(lf_map_plan(map));
    CHECK_EQ(lf_map_n_classes(map), 3);
    int64_t end = 0;
    for (int32_t role = 0; role < LF_N_ROLES; role++)
        for (int32_t c = 0; c < 3; c++) {
            lf_class_info k = {.size = sizeof k};
            CHECK_OK(lf_map_get_class(map, c, &k));
            int32_t want = role == LF_ROLE_WEIGHT   ? k.dtype
                           : k.frozen               ? 0
                           : role == LF_ROLE_MASTER ? (k.dtype == LF_DTYPE_BF16 ? LF_DTYPE_F32 : 0)
                                                    : LF_DTYPE_F32;
            CHECK_EQ(k.role_dtype[role], want);
            if (!want) continue;
            CHECK(k.role_offset[role] >= end); /* role by role, so gradients are one stretch */
            CHECK_EQ(k.role_offset[role] % 4096, 0);
            end = k.role_offset[role] + k.count * (int64_t)lf_dtype_bytes(want);
        }
    CHECK_EQ(lf_map_bytes(map), end);
    lf_map_unref(map);
}

static int64_t group_elements(const lf_map *map, int32_t group)
{
    const char *name;
    const lf_range *r;
    int32_t n;
    int64_t sum = 0;
    CHECK_OK(lf_map_get_group(map, group, &name, &r, &n));
    for (int32_t i = 0; i < n; i++) sum += r[i].count;
    return sum;
}

TEST(groups_split_experts_by_size_and_leave_frozen_out)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    add(map, "frozen", LF_DTYPE_F32, 0, -1, 64, 1, -1, LF_PARAM_FROZEN);
    CHECK_OK(lf_map_plan(map));
    const char *name;
    const lf_range *r;
    int32_t n;
    CHECK_OK(lf_map_get_group(map, 1, &name, &r, &n));
    CHECK_STR(name, "high");
    CHECK_EQ(n, 2); /* experts 0 and 3 lie side by side: one range a layer */
    CHECK_EQ(r[0].count, 4 * 960);
    CHECK(r[0].offset < r[1].offset);
    CHECK_EQ(block(map, "layer0.expert3.up").group, 1);
    CHECK_EQ(block(map, "layer0.expert2.up").group, 2);
    CHECK_EQ(block(map, "frozen").group, -1);
    CHECK_EQ(group_elements(map, 2), 2 * (2 * 640 + 2 * 320));
    lf_map_unref(map);
}

TEST(groups_follow_backward_across_classes)
{
    lf_map *map = model(LF_DTYPE_BF16, 2);
    CHECK_OK(lf_map_plan(map));
    const char *name;
    const lf_range *r;
    int32_t n, norm = block(map, "layer1.norm").range.klass;
    CHECK_OK(lf_map_get_group(map, 0, &name, &r, &n));
    static const int64_t counts[] = {10, 300, 10, 300, 10, 500}; /* tail, then qkv and norm of layers 1 and 0, embedding */
    CHECK_EQ(n, 6);
    for (int32_t i = 0; i < 6; i++) CHECK_EQ(r[i].count, counts[i]);
    CHECK(r[0].klass == norm && r[1].klass != norm && r[2].klass == norm);
    lf_map_unref(map);
}

TEST(head_room_is_planned_or_refused)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_set_pool_bytes(map, "expert_1", 100));
    CHECK_STATUS(lf_map_plan(map), LF_ERR_POOL);
    CHECK_HAS(lf_error_text(), "static/layer01/expert01");
    CHECK_HAS(lf_error_text(), "2560"); /* what it needs */
    CHECK_OK(lf_map_set_pool_bytes(map, "expert_1", 10240));
    CHECK_OK(lf_map_plan(map)); /* a failed plan leaves the map as it was */
    int32_t seen = 0;
    for (int32_t i = 0; i < lf_map_n_pools(map); i++) {
        lf_pool_info p = {.size = sizeof p};
        CHECK_OK(lf_map_get_pool(map, i, &p));
        if (!strstr(p.name, "expert01")) continue;
        CHECK_EQ(p.used, 640);
        CHECK_EQ(p.capacity, 2560);
        seen++;
    }
    CHECK_EQ(seen, N_LAYERS);
    lf_map_unref(map);

    map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_set_pool_bytes(map, "expert_9", 10240));
    CHECK_STATUS(lf_map_plan(map), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "expert_9");
    lf_map_unref(map);
}

TEST(cover_joins_neighbours_and_counts_tied_once)
{
    lf_map *map = model(LF_DTYPE_F32, 2);
    CHECK_OK(lf_map_plan(map));
    int32_t index[3], n = 3;
    lf_range r[3];
    CHECK_OK(lf_map_find(map, "layer0.expert1.up", &index[0]));
    CHECK_OK(lf_map_find(map, "layer0.expert1.gate", &index[1]));
    CHECK_OK(lf_map_find(map, "layer1.qkv", &index[2]));
    CHECK_OK(lf_map_cover(map, index, 3, r, &n));
    CHECK_EQ(n, 2);
    CHECK_EQ(r[1].count, 640);
    CHECK_OK(lf_map_find(map, "embed", &index[0]));
    CHECK_OK(lf_map_find(map, "head", &index[1]));
    n = 3;
    CHECK_OK(lf_map_cover(map, index, 2, r, &n));
    CHECK_EQ(n, 1);
    CHECK_EQ(r[0].count, 500);
    index[0] = 999;
    n = 3;
    CHECK_STATUS(lf_map_cover(map, index, 1, r, &n), LF_ERR_INVALID);
    lf_map_unref(map);
}

TEST(common_parts_of_ranges)
{
    const lf_range a[] = {{1, 0, 100, 50}, {0, 0, 0, 10}, {0, 0, 10, 10}}, b[] = {{0, 0, 5, 10}, {1, 0, 0, 101}, {1, 0, 149, 9}};
    const lf_range want[] = {{1, 0, 100, 1}, {1, 0, 149, 1}, {0, 0, 5, 5}, {0, 0, 10, 5}};
    lf_range got[5] = {{9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}, {9, 9, 9, 9}};
    int32_t n = 0;
    CHECK_STATUS(lf_ranges_common(a, 3, b, 3, NULL, &n), LF_ERR_NOMEM);
    CHECK_EQ(n, 4);
    n = 3;
    CHECK_STATUS(lf_ranges_common(a, 3, b, 3, got, &n), LF_ERR_NOMEM);
    CHECK(n == 4 && got[3].klass == 9);
    CHECK_OK(lf_ranges_common(a, 3, b, 3, got, &n));
    CHECK(n == 4 && got[4].klass == 9 && memcmp(got, want, sizeof want) == 0);
    n = 0;
    CHECK_OK(lf_ranges_common(a, 3, NULL, 0, NULL, &n));
    CHECK_EQ(n, 0);
    CHECK_STATUS(lf_ranges_common(NULL, 1, b, 3, got, &n), LF_ERR_INVALID);
    CHECK_STATUS(lf_ranges_common(a, 3, b, -1, got, &n), LF_ERR_INVALID);
    CHECK_STATUS(lf_ranges_common(a, 3, b, 3, got, NULL), LF_ERR_INVALID);
}

TEST(an_allocated_map_is_zero_and_addressed_by_role)
{
    lf_map *map = model(LF_DTYPE_BF16, 2);
    lf_device *device;
    CHECK_OK(lf_device_open(&device, "cpu"));
    CHECK_STATUS(lf_map_allocate(map, device), LF_ERR_STATE);
    CHECK_OK(lf_map_add_arena(map, "slots/batch0", LF_POOL_DYNAMIC, 1000, 4096));
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, device));
    lf_device_close(device); /* the map keeps its own reference */
    lf_range r = block(map, "layer0.qkv").range;
    uint16_t *weight = lf_map_address(map, &r, LF_ROLE_WEIGHT);
    float *master = lf_map_address(map, &r, LF_ROLE_MASTER);
    CHECK(weight && master);
    CHECK_EQ((uintptr_t)weight % 128, 0);
    for (int64_t i = 0; i < r.count; i++) CHECK(weight[i] == 0 && master[i] == 0);
    r.count += 1000000;
    CHECK(!lf_map_address(map, &r, LF_ROLE_WEIGHT));
    r = block(map, "final_norm").range;
    CHECK(!lf_map_address(map, &r, LF_ROLE_MASTER)); /* f32 has none */
    void *arena;
    int64_t bytes;
    CHECK_OK(lf_map_arena(map, "slots/batch0", &arena, &bytes));
    CHECK_EQ(bytes, 1000);
    CHECK_EQ((uintptr_t)arena % 4096, 0);
    ((char *)arena)[999] = 1;
    CHECK_STATUS(lf_map_arena(map, "slots/batch1", &arena, &bytes), LF_ERR_NOTFOUND);
    lf_map_unref(map);
}

TEST(attached_blocks_are_cut_into_pieces)
{
    lf_map *map;
    CHECK_OK(lf_map_open(&map, NULL));
    static float a[100], b[64];
    int32_t ia = add(map, "a", LF_DTYPE_F32, 1, -1, 100, 0, -1, 0), ib = add(map, "b", LF_DTYPE_F32, 0, -1, 64, 0, -1, 0);
    CHECK_OK(lf_map_plan(map));
    lf_class_info k = {.size = sizeof k};
    CHECK_OK(lf_map_get_class(map, 0, &k));
    CHECK_EQ(k.count, 192);
    lf_range all = {0, 0, 0, 192};
    lf_piece p[8];
    int32_t n = 8;
    CHECK_OK(lf_map_attach(map, ia, LF_ROLE_WEIGHT, a));
    CHECK_STATUS(lf_map_pieces(map, &all, LF_ROLE_WEIGHT, p, &n), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "of b");
    CHECK_OK(lf_map_attach(map, ib, LF_ROLE_WEIGHT, b));
    n = 8;
    CHECK_OK(lf_map_pieces(map, &all, LF_ROLE_WEIGHT, p, &n));
    CHECK_EQ(n, 3);
    CHECK(p[0].data == a && p[0].count == 100);
    CHECK(p[1].data == NULL && p[1].count == 28);
    CHECK(p[2].data == b && p[2].count == 64);
    lf_range part = {0, 0, 50, 100}; /* 50 of a, 28 of padding, 22 of b */
    n = 8;
    CHECK_OK(lf_map_pieces(map, &part, LF_ROLE_WEIGHT, p, &n));
    CHECK(p[0].data == a + 50 && p[0].count == 50 && p[2].data == b && p[2].count == 22);
    n = 1;
    CHECK_STATUS(lf_map_pieces(map, &part, LF_ROLE_WEIGHT, p, &n), LF_ERR_NOMEM);
    CHECK_EQ(n, 3);
    lf_map_unref(map);
}

TEST(digest_tells_layouts_apart)
{
    uint8_t digest[3][16];
    for (int32_t i = 0; i < 3; i++) {
        lf_map *map = model(LF_DTYPE_F32, i == 2 ? 1 : 2);
        CHECK_OK(lf_map_plan(map));
        CHECK_OK(lf_map_digest(map, digest[i]));
        lf_map_unref(map);
    }
    CHECK(memcmp(digest[0], digest[1], 16) == 0);
    CHECK(memcmp(digest[0], digest[2], 16) != 0); /* another group membership */
}

TEST(bad_parameters_are_refused_by_name)
{
    lf_map *map;
    CHECK_OK(lf_map_open(&map, NULL));
    int32_t first = add(map, "a", LF_DTYPE_F32, 0, -1, 4, 4, -1, 0);
    int64_t shape[2] = {4, 0};
    lf_param p = {
        .size = sizeof p, .name = "b", .shape = shape, .ndim = 2, .dtype = LF_DTYPE_F32, .layer = 0, .expert = -1, .tied_to = -1};
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "extent 0");
    shape[1] = INT64_MAX / 2;
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    shape[1] = 4;
    p.name = "a";
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_EXISTS);
    p.name = "b";
    p.dtype = LF_DTYPE_I64;
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "i64");
    p.dtype = LF_DTYPE_F32;
    p.tied_to = 5;
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    p.tied_to = first;
    shape[1] = 3;
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "differs");
    p.size = 8;
    CHECK_STATUS(lf_map_add(map, &p, NULL), LF_ERR_INVALID);
    lf_map_options o;
    lf_map *bad = NULL;
    CHECK_OK(lf_options_init("map", &o, sizeof o));
    o.align_elements = 48;
    CHECK_STATUS(lf_map_open(&bad, &o), LF_ERR_INVALID);
    CHECK(!bad);
    lf_map_unref(map);
}

TEST(planning_survives_every_failed_allocation)
{
    lf_map *map = model(LF_DTYPE_BF16, 2);
    CHECK_OK(lf_map_add_arena(map, "scratch", LF_POOL_DYNAMIC, 100, 64));
    for (int64_t n = 1;; n++) {
        lf__alloc_fail_at(n);
        lf_status rc = lf_map_plan(map);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) break;
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(n < 1000);
    }
    CHECK_OK(lf_map_plan(map) == LF_ERR_STATE ? LF_OK : LF_ERR_INTERNAL);
    lf_pool_info p = {.size = sizeof p};
    CHECK_OK(lf_map_get_pool(map, lf_map_n_pools(map) - 1, &p));
    CHECK_STR(p.name, "scratch");
    CHECK_EQ(p.klass, -1);
    lf_map_unref(map);
}

TEST(random_models_keep_the_rules)
{
    for (uint32_t round = 0; round < 50; round++) {
        lf__rng r;
        lf__rng_init(&r, 1234, round, 0, 0);
        lf_map *map;
        CHECK_OK(lf_map_open(&map, NULL));
        int32_t n = 1 + lf__rng_below(&r, 60);
        int64_t elements = 0, grouped = 0;
        for (int32_t i = 0; i < n; i++) {
            char name[16];
            snprintf(name, sizeof name, "p%d", i);
            int64_t rows = 1 + lf__rng_below(&r, 200);
            elements += rows * 3;
            add(map, name, lf__rng_below(&r, 2) ? LF_DTYPE_F32 : LF_DTYPE_BF16, lf__rng_below(&r, 5) - 1,
                lf__rng_below(&r, 4) - 1, rows, 3, -1, 0);
        }
        CHECK_OK(lf_map_plan(map));
        for (int32_t g = 0; g < 3; g++) {
            const char *name;
            const lf_range *range;
            int32_t n_ranges;
            CHECK_OK(lf_map_get_group(map, g, &name, &range, &n_ranges));
            for (int32_t i = 0; i < n; i++) { /* each block lies in exactly one range of its own group */
                lf_block_info b = {.size = sizeof b};
                CHECK_OK(lf_map_get_block(map, i, &b));
                int32_t hits = 0;
                for (int32_t j = 0; j < n_ranges; j++)
                    hits += range[j].klass == b.range.klass && range[j].offset <= b.range.offset &&
                            b.range.offset + b.range.count <= range[j].offset + range[j].count;
                CHECK_EQ(hits, b.group == g);
                grouped += hits ? b.range.count : 0;
            }
        }
        CHECK_EQ(grouped, elements);
        lf_map_unref(map);
    }
}

LF_TEST_MAIN
