/* SPDX-License-Identifier: Apache-2.0 */
/* MemSculptor: the table, plans against the validator and known optima, CSV. */
#include "base/base.h"
#include "io/io.h"
#include "lf_test.h"
#include "loongforge/sculptor.h"

#include <dirent.h>

static lf_trace *open_trace(void)
{
    lf_trace *t;
    CHECK_OK(lf_trace_open(&t));
    return t;
}

static lf_lifetime row_of(const char *name, int32_t role, int64_t first, int64_t last, int64_t bytes)
{
    return (lf_lifetime){
        .size = sizeof(lf_lifetime), .name = name, .role = role, .first = first, .last = last, .bytes = bytes, .offset = -1};
}

static void add(lf_trace *t, const char *name, int32_t role, int64_t first, int64_t last, int64_t bytes)
{
    lf_lifetime row = row_of(name, role, first, last, bytes);
    CHECK_OK(lf_trace_add(t, &row));
}

static void add_at(lf_trace *t, const char *name, int64_t first, int64_t last, int64_t bytes, int64_t offset)
{
    lf_lifetime row = row_of(name, LF_TENSOR_ACTIVATION, first, last, bytes);
    row.offset = offset;
    CHECK_OK(lf_trace_add(t, &row));
}

static lf_lifetime get(const lf_trace *t, int64_t i)
{
    lf_lifetime row = {.size = sizeof row};
    CHECK_OK(lf_trace_get(t, i, &row));
    return row;
}

static lf_plan_options options(double time_limit_s, int64_t align)
{
    lf_plan_options o;
    CHECK_OK(lf_options_init("sculptor", &o, sizeof o));
    o.time_limit_s = time_limit_s;
    o.align_bytes = align;
    return o;
}

static lf_plan_summary plan(lf_trace *t, const lf_plan_options *o)
{
    lf_plan_summary s = {.size = sizeof s};
    CHECK_OK(lf_trace_plan(t, o, &s));
    return s;
}

/* The test's own check, the plainest there is: every pair. */
static void check_pairs(const lf_trace *t, int64_t peak, int64_t default_align)
{
    for (int64_t i = 0; i < lf_trace_n(t); i++) {
        lf_lifetime a = get(t, i);
        int64_t align = a.align_bytes ? a.align_bytes : default_align;
        if (a.bytes == 0) continue;
        CHECK(a.offset >= 0 && a.offset % align == 0 && a.offset + a.bytes <= peak);
        for (int64_t j = 0; j < i; j++) {
            lf_lifetime b = get(t, j);
            bool meet = a.first < b.last && b.first < a.last;
            bool overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
            if (b.bytes && meet && overlap) FAIL_("rows %lld and %lld overlap", (long long)i, (long long)j);
        }
    }
}

static void close_peaks(lf_trace *t, lf_plan_summary s)
{
    CHECK(s.peak_bytes >= s.bound_bytes);
    lf_trace_close(t);
}

/* ---- the table */

TEST(rows_are_kept_in_order)
{
    lf_trace *t = open_trace();
    char name[16] = "first";
    lf_lifetime row = row_of(name, LF_TENSOR_OPTIMIZER, -3, 9, 77);
    row.module = "layers.0";
    row.stream = -2;
    row.align_bytes = 48;
    CHECK_OK(lf_trace_add(t, &row));
    snprintf(name, sizeof name, "changed"); /* the trace has its own copy */
    for (int i = 0; i < 1000; i++) add(t, "more", LF_TENSOR_INPUT, i, i + 1, i);
    CHECK_EQ(lf_trace_n(t), 1001);
    row = get(t, 0);
    CHECK_STR(row.name, "first");
    CHECK_STR(row.module, "layers.0");
    CHECK(row.role == LF_TENSOR_OPTIMIZER && row.stream == -2 && row.first == -3 && row.last == 9);
    CHECK(row.bytes == 77 && row.align_bytes == 48 && row.offset == -1);
    CHECK_EQ(get(t, 1000).bytes, 999);
    CHECK_STATUS(lf_trace_get(t, 1001, &row), LF_ERR_INVALID);
    CHECK_STATUS(lf_trace_get(t, -1, &row), LF_ERR_INVALID);
    row.size = 8;
    CHECK_STATUS(lf_trace_get(t, 0, &row), LF_ERR_INVALID);
    lf_trace_close(t);
    lf_trace_close(NULL);
    CHECK_EQ(lf_trace_n(NULL), 0);
    CHECK_STR(lf_tensor_role_name(LF_TENSOR_WORKSPACE), "workspace");
    CHECK_STR(lf_tensor_role_name(6), "?");
    CHECK_STR(lf_class_name(LF_CLASS_TRANSIENT), "transient");
    CHECK_STR(lf_class_name(-1), "?");
}

TEST(bad_rows_are_refused_by_name)
{
    lf_trace *t = open_trace();
    add(t, "good", LF_TENSOR_WEIGHT, 0, 1, 1);
    lf_lifetime bad[8];
    for (size_t i = 0; i < LF_COUNT(bad); i++) bad[i] = row_of("culprit", LF_TENSOR_WEIGHT, 0, 5, 10);
    bad[0].last = 0;
    bad[1].first = 6;
    bad[2].bytes = -1;
    bad[3].role = 6;
    bad[4].role = -1;
    bad[5].align_bytes = -8;
    bad[6].bytes = INT64_MAX;
    bad[7].offset = -2;
    for (size_t i = 0; i < LF_COUNT(bad); i++) {
        CHECK_STATUS(lf_trace_add(t, &bad[i]), LF_ERR_INVALID);
        CHECK_HAS(lf_error_text(), "'culprit'");
    }
    bad[0] = row_of("unsized", LF_TENSOR_WEIGHT, 0, 5, 10);
    bad[0].size = 0;
    CHECK_STATUS(lf_trace_add(t, &bad[0]), LF_ERR_INVALID);
    CHECK_STATUS(lf_trace_add(t, NULL), LF_ERR_INVALID);
    CHECK_EQ(lf_trace_n(t), 1);
    lf_trace_close(t);
}

/* ---- plans */

static lf_trace *random_trace(lf__rng *rng, int32_t n, int32_t times, int32_t kind)
{
    static const int64_t aligns[] = {0, 1, 64, 128, 256, 512, 4096, 48};
    lf_trace *t = open_trace();
    for (int32_t i = 0; i < n; i++) {
        int64_t first = lf__rng_below(rng, times), life = 1 + lf__rng_below(rng, kind % 2 ? times : 4);
        lf_lifetime row = row_of("r", lf__rng_below(rng, 6), first - times / 2, first - times / 2 + life,
                                 lf__rng_below(rng, 1 + 10000 * (1 + kind)));
        if (lf__rng_below(rng, 10) == 0) row.bytes = 0;
        if (lf__rng_below(rng, 10) == 0) row.first = -times, row.last = 3 * times;
        if (kind >= 2) row.align_bytes = aligns[lf__rng_below(rng, kind == 2 ? 7 : 8)];
        CHECK_OK(lf_trace_add(t, &row));
    }
    return t;
}

TEST(random_plans_are_valid_and_repeat)
{
    lf__rng rng;
    lf__rng_init(&rng, 11, 0, 0, 0);
    for (int32_t round = 0; round < 200; round++) {
        lf_trace *t = random_trace(&rng, 1 + lf__rng_below(&rng, 120), 1 + lf__rng_below(&rng, 60), round % 4);
        lf_plan_options o = options(0.0004, round % 3 ? 128 : 1);
        if (round % 7 == 0) snprintf(o.strategy, sizeof o.strategy, "greedy");
        lf_plan_summary s = plan(t, &o);
        CHECK_EQ(s.n, lf_trace_n(t));
        CHECK(s.peak_bytes >= s.bound_bytes && s.live_sum_bytes >= s.bound_bytes);
        CHECK_OK(lf_trace_validate(t, s.peak_bytes));
        check_pairs(t, s.peak_bytes, o.align_bytes);
        int64_t offsets[120];
        for (int64_t i = 0; i < s.n; i++) offsets[i] = get(t, i).offset;
        CHECK_EQ(plan(t, &o).peak_bytes, s.peak_bytes);
        for (int64_t i = 0; i < s.n; i++) CHECK_EQ(get(t, i).offset, offsets[i]);
        lf_trace_close(t);
    }
}

TEST(small_cases_reach_the_known_optimum)
{
    lf_plan_options o = options(0.1, 1);
    lf_trace *t = open_trace(); /* one after another: all share */
    for (int i = 0; i < 50; i++) add(t, "x", LF_TENSOR_ACTIVATION, i, i + 1, 10 + i % 7);
    lf_plan_summary s = plan(t, &o);
    CHECK(s.peak_bytes == 16 && s.optimal == 1 && s.waste == 0 && s.bound_bytes == 16);
    lf_trace_close(t);

    t = open_trace(); /* all at once: none shares */
    for (int i = 0; i < 50; i++) add(t, "x", LF_TENSOR_WEIGHT, 0, 10, 10);
    s = plan(t, &o);
    CHECK(s.peak_bytes == 500 && s.optimal == 1 && s.live_sum_bytes == 500);
    lf_trace_close(t);

    t = open_trace(); /* MiniMalloc's example: capacity 12 */
    add(t, "b1", LF_TENSOR_ACTIVATION, 0, 3, 4);
    add(t, "b2", LF_TENSOR_ACTIVATION, 3, 9, 4);
    add(t, "b3", LF_TENSOR_ACTIVATION, 0, 9, 4);
    add(t, "b4", LF_TENSOR_ACTIVATION, 9, 21, 4);
    add(t, "b5", LF_TENSOR_ACTIVATION, 0, 21, 4);
    CHECK_EQ(plan(t, &o).peak_bytes, 12);
    lf_trace_close(t);

    t = open_trace(); /* nothing at all, and nothing but empty tensors */
    s = plan(t, NULL);
    CHECK(s.peak_bytes == 0 && s.waste == 0 && s.optimal == 1);
    add(t, "empty", LF_TENSOR_ACTIVATION, 0, 3, 0);
    CHECK_EQ(plan(t, NULL).peak_bytes, 0);
    CHECK_OK(lf_trace_validate(t, 1));
    lf_trace_close(t);
}

/* Cuts the rectangle times x bytes into blocks that fill it without a gap: its height is the optimum. */
static void cut(lf_trace *t, lf__rng *rng, int64_t first, int64_t last, int64_t bytes, int32_t depth)
{
    if (depth == 0 || (last - first < 2 && bytes < 64)) {
        add(t, "piece", LF_TENSOR_ACTIVATION, first, last, bytes);
    } else if ((depth % 2 && last - first >= 2) || bytes < 64) {
        int64_t middle = first + 1 + lf__rng_below(rng, (int32_t)(last - first - 1));
        cut(t, rng, first, middle, bytes, depth - 1);
        cut(t, rng, middle, last, bytes, depth - 1);
    } else {
        int64_t lower = 16 + lf__rng_below(rng, (int32_t)bytes - 32);
        cut(t, rng, first, last, lower, depth - 1);
        cut(t, rng, first, last, bytes - lower, depth - 1);
    }
}

TEST(packings_without_a_gap)
{
    lf__rng rng;
    lf__rng_init(&rng, 21, 0, 0, 0);
    lf_plan_options o = options(0.2, 1);
    for (int32_t depth = 1; depth <= 6; depth++)
        for (int32_t round = 0; round < 4; round++) {
            lf_trace *t = open_trace();
            cut(t, &rng, 0, 200, 20000, depth);
            lf_plan_summary s = plan(t, &o);
            CHECK_EQ(s.bound_bytes, 20000);
            CHECK_OK(lf_trace_validate(t, s.peak_bytes));
            if (depth <= 3) CHECK_EQ(s.peak_bytes, 20000);
            CHECK(s.peak_bytes <= 20000 * 1.12);
            CHECK_EQ(s.optimal, s.peak_bytes == 20000);
            lf_trace_close(t);
        }
}

/* Weights and moments for the whole step; activations from forward to backward; short workspaces; gradients to the end. */
static lf_trace *training_trace(int32_t layers, int32_t ops)
{
    static const int64_t sizes[] = {16384, 32768, 65536, 81920, 163840, 327680, 16896};
    lf_trace *t = open_trace();
    lf__rng rng;
    lf__rng_init(&rng, (uint64_t)layers, 0, 0, 0);
    int64_t half = (int64_t)layers * ops, end = 2 * half + layers + 8;
    for (int32_t l = 0; l < layers; l++)
        for (int32_t e = 0; e < 4; e++) {
            add(t, "weight", LF_TENSOR_WEIGHT, 0, end, 65536 * (2 + e));
            add(t, "moment", LF_TENSOR_OPTIMIZER, 0, end, 131072 * (2 + e));
        }
    for (int64_t op = 0; op < half; op++) {
        add(t, "act", LF_TENSOR_ACTIVATION, op, 2 * half - op + lf__rng_below(&rng, 3), sizes[lf__rng_below(&rng, 7)]);
        add(t, "tmp", LF_TENSOR_WORKSPACE, op, op + 1 + lf__rng_below(&rng, 4), sizes[lf__rng_below(&rng, 7)]);
        add(t, "grad", LF_TENSOR_GRADIENT, half + op, half + op + 1 + lf__rng_below(&rng, 3), sizes[lf__rng_below(&rng, 7)]);
        if (op % ops == ops - 1) add(t, "dW", LF_TENSOR_GRADIENT, half + op, end - 2, 65536 * 4);
    }
    return t;
}

TEST(training_steps_waste_next_to_nothing)
{
    static const int32_t layers[] = {2, 6, 24};
    for (size_t i = 0; i < LF_COUNT(layers); i++) {
        lf_trace *t = training_trace(layers[i], 12);
        lf_plan_options o = options(0.1, 128);
        lf_plan_summary s = plan(t, &o);
        CHECK_OK(lf_trace_validate(t, s.peak_bytes));
        if (s.waste > 0.01) FAIL_("%d layers: waste is %.3f %%", layers[i], 100 * s.waste);
        int64_t n = 0, walls = 0;
        for (int32_t k = 0; k < LF_N_CLASSES; k++) n += s.class_n[k], walls += s.class_peak_bytes[k];
        CHECK_EQ(n, s.n);
        CHECK_EQ(s.class_n[LF_CLASS_STATIC], 4 * layers[i]);
        CHECK_EQ(s.class_peak_bytes[LF_CLASS_STATIC], 65536LL * 14 * layers[i]);
        CHECK_EQ(s.class_peak_bytes[LF_CLASS_TRANSIENT], 131072LL * 14 * layers[i]);
        CHECK(walls >= s.bound_bytes);
        close_peaks(t, s);
    }
}

TEST(ten_thousand_rows)
{
    lf_trace *t = training_trace(240, 13); /* about 11 500 rows */
    CHECK(lf_trace_n(t) > 10000);
    lf_plan_options o = options(0.01, 256);
    lf_plan_summary s = plan(t, &o);
    CHECK_OK(lf_trace_validate(t, s.peak_bytes));
    CHECK(s.waste < 0.01);
    close_peaks(t, s);
}

TEST(classes_are_cut_at_the_borders)
{
    lf_trace *t = open_trace();
    static const int64_t lives[] = {1, 4, 5, 20, 21, 1000};
    for (size_t i = 0; i < LF_COUNT(lives); i++) add(t, "a", LF_TENSOR_ACTIVATION, 0, lives[i], 100);
    add(t, "w", LF_TENSOR_WEIGHT, 0, 1, 100);
    add(t, "forever", LF_TENSOR_INPUT, INT64_MIN, INT64_MAX, 100);
    lf_plan_summary s = plan(t, NULL);
    CHECK_EQ(s.class_n[LF_CLASS_SHORT], 2);
    CHECK_EQ(s.class_n[LF_CLASS_MEDIUM], 2);
    CHECK_EQ(s.class_n[LF_CLASS_LONG], 3);
    CHECK_EQ(s.class_n[LF_CLASS_STATIC], 1);
    CHECK_EQ(s.class_peak_bytes[LF_CLASS_SHORT], 200);
    lf_trace_close(t);
}

TEST(waste_counts_alignment_and_placement)
{
    lf_trace *t = open_trace();
    for (int i = 0; i < 4; i++) add(t, "odd", LF_TENSOR_ACTIVATION, 0, 1, 100);
    lf_plan_options o = options(0, 128);
    lf_plan_summary s = plan(t, &o);
    CHECK_EQ(s.bound_bytes, 400);
    CHECK_EQ(s.peak_bytes, 512);
    CHECK_EQ(s.optimal, 1);
    CHECK_NEAR(s.waste, 1 - 400.0 / 512, 1e-12);
    lf_trace_close(t);
}

TEST(capacity_is_an_error_that_helps)
{
    lf_trace *t = open_trace();
    add(t, "small", LF_TENSOR_ACTIVATION, 0, 10, 1024);
    add(t, "expert_3", LF_TENSOR_WEIGHT, 0, 10, 8192);
    add(t, "later", LF_TENSOR_GRADIENT, 10, 11, 2048);
    lf_plan_options o = options(0.01, 128);
    plan(t, &o);
    int64_t before = get(t, 1).offset;
    lf_plan_summary s = {.size = sizeof s};
    o.capacity_bytes = 9000;
    CHECK_STATUS(lf_trace_plan(t, &o, &s), LF_ERR_POOL);
    CHECK_EQ(s.peak_bytes, 9216); /* filled all the same */
    CHECK_HAS(lf_error_text(), "needs 9216 bytes");
    CHECK_HAS(lf_error_text(), "capacity_bytes is 9000: 216 too few");
    CHECK_HAS(lf_error_text(), "'expert_3' 8192 bytes (weight), 'small' 1024");
    CHECK_HAS(lf_error_text(), "8192 of them static");
    CHECK_HAS(lf_error_text(), "hint: no plan can be smaller");
    CHECK_EQ(get(t, 1).offset, before);
    o.capacity_bytes = 9216;
    CHECK_OK(lf_trace_plan(t, &o, NULL));
    o.short_ops = 30;
    CHECK_STATUS(lf_trace_plan(t, &o, NULL), LF_ERR_INVALID);
    s.size = 4;
    CHECK_STATUS(lf_trace_plan(t, NULL, &s), LF_ERR_INVALID);
    CHECK_STATUS(lf_trace_plan(NULL, NULL, NULL), LF_ERR_INVALID);
    lf_trace_close(t);
}

TEST(huge_sums_do_not_overflow)
{
    lf_trace *t = open_trace();
    int64_t quarter = (int64_t)1 << 59;
    for (int i = 0; i < 3; i++) add(t, "huge", LF_TENSOR_WEIGHT, 0, 1 + i, quarter);
    lf_lifetime row = row_of("too much", LF_TENSOR_WEIGHT, 0, 1, quarter + 1);
    CHECK_STATUS(lf_trace_add(t, &row), LF_ERR_INVALID);
    lf_plan_summary s = plan(t, NULL);
    CHECK_EQ(s.bound_bytes, 3 * quarter);
    CHECK_OK(lf_trace_validate(t, s.peak_bytes));
    lf_trace_close(t);
}

/* ---- the validator finds what is planted */

TEST(a_planted_overlap_is_found)
{
    lf__rng rng;
    lf__rng_init(&rng, 31, 0, 0, 0);
    for (int32_t round = 0; round < 100; round++) {
        lf_trace *good = random_trace(&rng, 60, 20, 1), *bad = open_trace();
        lf_plan_options o = options(0, 128);
        int64_t peak = plan(good, &o).peak_bytes;
        int64_t victim, other;
        lf_lifetime a, b;
        do { /* two rows that are live together */
            victim = lf__rng_below(&rng, 60), other = lf__rng_below(&rng, 60);
            a = get(good, victim), b = get(good, other);
        } while (victim == other || !a.bytes || !b.bytes || a.first >= b.last || b.first >= a.last);
        for (int64_t i = 0; i < 60; i++) {
            lf_lifetime row = get(good, i);
            if (i == victim) row.offset = b.offset + (lf__rng_below(&rng, 2) && b.bytes > 1 ? b.bytes - 1 : 0);
            row.align_bytes = 1;
            CHECK_OK(lf_trace_add(bad, &row));
        }
        CHECK_OK(lf_trace_validate(good, peak));
        CHECK_STATUS(lf_trace_validate(bad, 0), LF_ERR_CORRUPT);
        CHECK_HAS(lf_error_text(), "overlap");
        char name[32];
        snprintf(name, sizeof name, "%lld 'r'", (long long)victim);
        CHECK_HAS(lf_error_text(), name);
        lf_trace_close(good);
        lf_trace_close(bad);
    }
}

TEST(touching_is_not_overlapping)
{
    lf_trace *t = open_trace();
    add_at(t, "a", 0, 5, 100, 0);
    add_at(t, "above", 0, 5, 100, 100);
    add_at(t, "after", 5, 9, 200, 0);
    add_at(t, "empty", 0, 9, 0, 50);
    CHECK_OK(lf_trace_validate(t, 200));
    CHECK_STATUS(lf_trace_validate(t, 199), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "row 1 'above'");
    add_at(t, "late", 4, 6, 1, 199);
    CHECK_STATUS(lf_trace_validate(t, 0), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "'late'");
    CHECK_STATUS(lf_trace_validate(t, -1), LF_ERR_INVALID);
    lf_trace_close(t);
}

TEST(misaligned_or_unplanned_rows_are_found)
{
    lf_trace *t = open_trace();
    add(t, "aligned by the plan", LF_TENSOR_ACTIVATION, 0, 1, 64);
    lf_lifetime row = row_of("own", LF_TENSOR_ACTIVATION, 5, 6, 64);
    row.align_bytes = 512;
    row.offset = 256;
    CHECK_OK(lf_trace_add(t, &row));
    CHECK_STATUS(lf_trace_validate(t, 0), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "plan first");
    lf_trace_close(t);
    t = open_trace();
    CHECK_OK(lf_trace_add(t, &row));
    CHECK_STATUS(lf_trace_validate(t, 0), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "multiple of 512");
    plan(t, NULL); /* from now on rows without an alignment have that of the plan, 128 */
    CHECK_OK(lf_trace_validate(t, 0));
    add_at(t, "odd", 9, 10, 8, 64);
    CHECK_STATUS(lf_trace_validate(t, 0), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "multiple of 128");
    lf_trace_close(t);
}

/* ---- CSV */

static void write_text(const char *path, const char *text) { CHECK_OK(lf__io_replace(lf__io_posix(), path, text, strlen(text))); }

TEST(csv_reads_back_what_was_written)
{
    lf__rng rng;
    lf__rng_init(&rng, 41, 0, 0, 0);
    static const char *const names[] = {"plain", "with,comma", "with \"quotes\"", "two\nlines", "", " blank ", "\"", "ümlaut"};
    lf_trace *t = open_trace(), *back = open_trace();
    for (int32_t i = 0; i < 300; i++) {
        lf_lifetime row = row_of(names[i % 8], i % 6, -i, i * 1000 + 1, lf__rng_below(&rng, 1000000));
        row.module = names[(i + 3) % 8];
        row.stream = i - 5;
        row.align_bytes = i % 3 ? 0 : 64;
        CHECK_OK(lf_trace_add(t, &row));
    }
    for (int planned = 0; planned < 2; planned++) {
        const char *path = lf_test_path("trace.csv");
        lf_plan_options o = options(0.01, 128);
        if (planned) plan(t, &o);
        CHECK_OK(lf_trace_write_csv(t, path));
        CHECK_OK(lf_trace_read_csv(back, path));
        for (int64_t i = 0; i < 300; i++) {
            lf_lifetime a = get(t, i), b = get(back, planned * 300 + i);
            CHECK_STR(a.name, b.name);
            CHECK_STR(a.module, b.module);
            CHECK(a.role == b.role && a.stream == b.stream && a.first == b.first && a.last == b.last);
            CHECK(a.bytes == b.bytes && a.align_bytes == b.align_bytes && a.offset == b.offset);
            CHECK_EQ(a.offset >= 0, planned);
        }
    }
    CHECK_EQ(lf_trace_n(back), 600); /* reading appends */
    CHECK_STATUS(lf_trace_write_csv(t, lf_test_path("no/folder.csv")), LF_ERR_NOTFOUND);
    lf_trace_close(t);
    lf_trace_close(back);
}

TEST(csv_forms_of_minimalloc)
{
    static const char *const forms[] = {
        "id,lower,upper,size\na,0,3,4\nb,3,9,8\n",
        "size,id,upper,lower\n4,a,3,0\n8,b,9,3",
        "buffer,start,end,size\na,0,2,4\nb,3,8,8\n", /* old: the end is inclusive */
        "buffer_id,begin,end,size\r\na,0,2,4\r\nb,3,8,8\r\n",
        "\xef\xbb\xbfid,lower,upper,size,hint,gaps\na,0,3,4,,1-2\n\n\nb,3,9,8,7,\n",
        "id,\"lower\",upper,size,alignment,offset\na,0,3,4,,\nb,3,9, 8 ,0,\n",
    };
    for (size_t f = 0; f < LF_COUNT(forms); f++) {
        lf_trace *t = open_trace();
        const char *path = lf_test_path("form.csv");
        write_text(path, forms[f]);
        CHECK_OK(lf_trace_read_csv(t, path));
        CHECK_EQ(lf_trace_n(t), 2);
        lf_lifetime a = get(t, 0), b = get(t, 1);
        CHECK_STR(a.name, "a");
        CHECK(a.first == 0 && a.last == 3 && a.bytes == 4 && a.role == LF_TENSOR_ACTIVATION && a.offset == -1);
        CHECK_STR(b.name, "b");
        CHECK(b.first == 3 && b.last == 9 && b.bytes == 8 && b.align_bytes == 0);
        lf_trace_close(t);
    }
}

TEST(bad_csv_says_where)
{
    static const struct {
        const char *text, *where, *what;
    } rows[] = {
        {"", "bad.csv", "is empty"},
        {"id,lower,upper\na,0,3\n", "bad.csv:1", "no column 'size'"},
        {"id,upper,size\na,3,4\n", "bad.csv:1", "no column 'lower'"},
        {"id,lower,size\na,3,4\n", "bad.csv:1", "no column 'upper'"},
        {"id,lower,upper,size,begin\n", "bad.csv:1", "two columns say 'lower'"},
        {"id,lower,upper,size\na,0,3,4\nb,0,x,4\n", "bad.csv:3", "upper is 'x', expected a whole number"},
        {"id,lower,upper,size\na,0,3,4\n\nb,0,3,4.5\n", "bad.csv:4", "size is '4.5'"},
        {"id,lower,upper,size\na,0,3,\n", "bad.csv:2", "size is ''"},
        {"id,lower,upper,size\na,0,3,99999999999999999999\n", "bad.csv:2", "size is '99999999999999999999'"},
        {"id,lower,upper,size\na,0,3\n", "bad.csv:2", "3 cells, expected 4"},
        {"id,lower,upper,size\na,0,3,4,5\n", "bad.csv:2", "5 cells, expected 4"},
        {"id,lower,upper,size\n\"two\nlines\",0,3,4\nb,3,3,4\n", "bad.csv:4", "'b' lives from 3 to 3"},
        {"id,lower,upper,size\na,0,3,-4\n", "bad.csv:2", "-4 bytes"},
        {"id,lower,upper,size\n\"a,0,3,4\n", "bad.csv:2", "quote without an end"},
        {"id,lower,upper,size,role\na,0,3,4,wheight\n", "bad.csv:2", "role is 'wheight', expected weight"},
        {"id,lower,upper,size,stream\na,0,3,4,9999999999\n", "bad.csv:2", "stream is 9999999999"},
        {"id,lower,upper,size,offset\na,0,3,4,-7\n", "bad.csv:2", "offset -7"},
    };
    lf_trace *t = open_trace();
    add(t, "kept", LF_TENSOR_WEIGHT, 0, 1, 5);
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        const char *path = lf_test_path("bad.csv");
        write_text(path, rows[i].text);
        CHECK_STATUS(lf_trace_read_csv(t, path), LF_ERR_FORMAT);
        CHECK_HAS(lf_error_text(), rows[i].where);
        CHECK_HAS(lf_error_text(), rows[i].what);
        CHECK_EQ(lf_trace_n(t), 1); /* nothing of a bad file stays */
    }
    CHECK_OK(lf__io_replace(lf__io_posix(), lf_test_path("zero.csv"), "id\0x", 4));
    CHECK_STATUS(lf_trace_read_csv(t, lf_test_path("zero.csv")), LF_ERR_FORMAT);
    CHECK_STATUS(lf_trace_read_csv(t, lf_test_path("absent.csv")), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_trace_read_csv(t, NULL), LF_ERR_INVALID);
    lf_trace_close(t);
}

/* Every allocation of a whole round fails once: an error each time, nothing lost, nothing leaked (ASan). */
TEST(out_of_memory_anywhere_is_an_error)
{
    const char *path = lf_test_path("oom.csv");
    lf_trace *t = training_trace(1, 6);
    CHECK_OK(lf_trace_write_csv(t, path));
    lf_trace_close(t);
    bool done = false;
    for (int64_t n = 1; !done && n < 100000; n++) {
        lf_status rc = LF_OK;
        t = NULL;
        (void)lf__alloc_fail_at(n);
        rc = lf_trace_open(&t);
        if (rc == LF_OK) rc = lf_trace_read_csv(t, path);
        if (rc == LF_OK) rc = lf_trace_plan(t, NULL, NULL);
        if (rc == LF_OK) rc = lf_trace_validate(t, 0);
        if (rc == LF_OK) rc = lf_trace_write_csv(t, path);
        done = lf__alloc_fail_at(0) < n;
        CHECK_EQ(rc, done ? LF_OK : LF_ERR_NOMEM);
        lf_trace_close(t);
    }
    CHECK(done);
}

/* MiniMalloc's benchmark set, where it is at hand: valid plans, far better than one greedy pass (1.31 to 1.41 times the bound). */
TEST(minimalloc_benchmark_is_planned)
{
    const char *data = lf_test_data();
    char dir[512], path[1024];
    int n = 0;
    snprintf(dir, sizeof dir, "%s/minimalloc/challenging", data ? data : "");
    DIR *folder = opendir(dir);
    if (!folder) SKIP("no minimalloc data set (LOONGFORGE_TEST_DATA)");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (!strstr(entry->d_name, ".csv")) continue;
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        lf_trace *t = open_trace();
        CHECK_OK(lf_trace_read_csv(t, path));
        lf_plan_options o = options(0.1, 1);
        lf_plan_summary s = plan(t, &o);
        CHECK_OK(lf_trace_validate(t, s.peak_bytes));
        CHECK(s.bound_bytes > 900000 && s.bound_bytes <= 1048576);
        if ((double)s.peak_bytes > 1.25 * (double)s.bound_bytes) FAIL_("%s: %lld bytes", entry->d_name, (long long)s.peak_bytes);
        lf_trace_close(t);
        n++;
    }
    closedir(folder);
    CHECK_EQ(n, 11);
}

LF_TEST_MAIN
