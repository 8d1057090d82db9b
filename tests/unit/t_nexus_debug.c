/* SPDX-License-Identifier: Apache-2.0 */
/* The option debug: ranks that are about to do different things find out, each of them, before anything is summed. */
#include "lf_test.h"
#include "nexus/nexus_int.h"

enum { WORLD = 3, N_BLOCKS = 5, COUNT = 4096, ODD = 1 };

typedef struct rank {
    lf_transport t;
    lf_nexus_options opts;
    void (*plant)(lf_nexus *nexus, int32_t rank); /* what the odd one does before the second step */
    lf_status status;
    float got;
    int64_t seq;
    char text[500];
    lf__thread *thread;
} rank;

static lf_device *cpu;

static lf_map *make_map(void)
{
    static const int64_t count = COUNT;
    char name[16];
    lf_map *map = NULL;
    if (lf_map_open(&map, NULL) < 0) return NULL;
    for (int32_t l = 0; l < N_BLOCKS; l++) {
        snprintf(name, sizeof name, "l%d", l);
        lf_param p = {
            .size = sizeof p, .name = name, .shape = &count, .ndim = 1, .dtype = LF_DTYPE_F32, .layer = l, .expert = -1};
        p.tied_to = -1;
        if (lf_map_add(map, &p, NULL) < 0) return NULL;
    }
    return lf_map_plan(map) < 0 || lf_map_allocate(map, cpu) < 0 ? NULL : map;
}

static lf_status step(lf_nexus *nexus, lf_map *map, float value)
{
    lf_status rc = lf_nexus_begin(nexus);
    for (int32_t b = N_BLOCKS - 1; b >= 0 && rc == LF_OK; b--) {
        lf_block_info info = {.size = sizeof info};
        rc = lf_map_get_block(map, b, &info);
        float *g = rc == LF_OK ? lf_map_address(map, &info.range, LF_ROLE_GRAD) : NULL;
        for (int32_t i = 0; g && i < COUNT; i++) g[i] = value;
        if (rc == LF_OK) rc = lf_nexus_mark(nexus, b, NULL);
    }
    return rc == LF_OK ? lf_nexus_finish(nexus, NULL) : rc;
}

static void run_rank(void *user)
{
    rank *r = user;
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    lf_collective_info newest = {.size = sizeof newest};
    double beside = 1;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->status = step(nexus, map, (float)(r->t.rank + 1));
    if (r->status == LF_OK) r->status = lf_nexus_reduce(nexus, &beside, 1, LF_DTYPE_F64, NULL);
    if (r->status == LF_OK && r->plant && r->t.rank == ODD) r->plant(nexus, r->t.rank);
    if (r->status == LF_OK) r->status = step(nexus, map, (float)(r->t.rank + 1));
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    const lf_range first = {.klass = 0, .count = 1};
    if (nexus) r->got = *(float *)lf_map_address(map, &first, LF_ROLE_GRAD);
    if (nexus && lf_nexus_get_recent(nexus, 0, &newest) == LF_OK) r->seq = newest.seq;
    if (nexus) lf_nexus_close(nexus);
    else r->t.close(r->t.user);
    lf_map_unref(map);
}

static rank ranks[WORLD];

static void run_all(void (*plant)(lf_nexus *, int32_t), const char *strategy)
{
    lf_transport ends[WORLD];
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_OK(lf_loopback_open(WORLD, ends));
    for (int32_t i = 0; i < WORLD; i++) {
        ranks[i] = (rank){.t = ends[i], .plant = plant};
        CHECK_OK(lf_options_init("nexus", &ranks[i].opts, sizeof ranks[i].opts));
        ranks[i].opts.debug = 1;
        ranks[i].opts.chunk_bytes = COUNT * 4;
        ranks[i].opts.timeout_s = 20;
        snprintf(ranks[i].opts.comm_strategy, sizeof ranks[i].opts.comm_strategy, "%s", strategy);
        snprintf(ranks[i].opts.reduce, sizeof ranks[i].opts.reduce, "sum");
        CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", run_rank, &ranks[i]));
    }
    for (int32_t i = 0; i < WORLD; i++) lf__thread_join(ranks[i].thread);
}

/* Every rank names what it was about to do, and the others that do something else. */
static void all_found(const char *odd_does, const char *others_do)
{
    for (int32_t i = 0; i < WORLD; i++) {
        char others[40];
        CHECK_STATUS(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "the ranks are not about to do the same");
        CHECK_HAS(ranks[i].text, i == ODD ? odd_does : others_do);
        snprintf(others, sizeof others, "something else: rank %s;", i == ODD ? "0, 2" : "1");
        CHECK_HAS(ranks[i].text, others);
        CHECK(ranks[i].got == (float)(i + 1) || ranks[i].got == 1 + 2 + 3); /* no sum of different things */
    }
}

TEST(debug_is_silent_when_ranks_agree)
{
    run_all(NULL, "dense");
    for (int32_t i = 0; i < WORLD; i++) {
        CHECK_STATUS(ranks[i].status, LF_OK);
        CHECK(ranks[i].got == 1 + 2 + 3);
        CHECK_EQ(ranks[i].seq, 2 * N_BLOCKS + 1); /* agreement, two steps, the sum between */
    }
    run_all(NULL, "sparse");
    for (int32_t i = 0; i < WORLD; i++) CHECK_STATUS(ranks[i].status, LF_OK);
}

static void count_less(lf_nexus *nexus, int32_t r)
{
    (void)r;
    nexus->plan.chunks[2].range.count -= 64;
}

TEST(debug_finds_another_count)
{
    run_all(count_less, "dense");
    all_found("the sums of chunk 2 to 2 of 5", "the sums of chunk 2 to 2 of 5");
}

static void swap_chunks(lf_nexus *nexus, int32_t r)
{
    (void)r;
    nexus_chunk *c = nexus->plan.chunks, was = c[0];
    c[0] = c[1];
    c[1] = was;
}

TEST(debug_finds_another_order)
{
    run_all(swap_chunks, "dense");
    all_found("the sums of chunk 0 to 0 of 5", "the sums of chunk 0 to 0 of 5");
    run_all(swap_chunks, "sparse");
    all_found("the sums of chunk 0 to 0 of 5", "the sums of chunk 0 to 0 of 5");
}

/* One chunk is never posted: the others wait for it, this one goes on with the next. */
static void skip_a_chunk(lf_nexus *nexus, int32_t r)
{
    (void)r;
    for (int32_t i = 0; i + 1 < nexus->plan.n_chunks; i++) nexus->plan.chunks[i] = nexus->plan.chunks[i + 1];
    nexus->plan.n_chunks--;
}

TEST(debug_finds_a_chunk_left_out)
{
    run_all(skip_a_chunk, "dense");
    all_found("of 4", "of 5");
}

static void sum_beside(lf_nexus *nexus, int32_t r)
{
    double x[7] = {0};
    ranks[r].status = lf_nexus_reduce(nexus, x, 7, LF_DTYPE_F64, NULL);
}

TEST(debug_finds_another_call)
{
    run_all(sum_beside, "dense");
    all_found("a sum of 7 f64 beside the gradients", "the sums of chunk 0 to 0 of 5");
}

TEST(debug_closes_the_device) { lf_device_close(cpu); }

LF_TEST_MAIN
