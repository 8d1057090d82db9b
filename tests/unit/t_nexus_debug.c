/* SPDX-License-Identifier: Apache-2.0 */
/* The option debug: ranks that are about to do different things find out, each of them, before anything is summed. */
#include "nexus/nexus_int.h"
#include "nexus_ranks.h"

enum { WORLD = 3, N_BLOCKS = 5, COUNT = 4096, ODD = 1 };

static void (*plant)(rank *r); /* what the odd one does before the second step */
static float got[WORLD];       /* the first element at the end */
static int64_t newest[WORLD];  /* the last collective's number */

static lf_map *make_map(const rank *r) { return (void)r, make_layers(N_BLOCKS, COUNT); }

static lf_status step(rank *r)
{
    lf_status rc = lf_nexus_begin(r->nexus);
    for (int32_t b = N_BLOCKS - 1; b >= 0 && rc == LF_OK; b--) {
        const lf_block_info info = block_at(r->map, b);
        float *g = lf_map_address(r->map, &info.range, LF_ROLE_GRAD);
        for (int32_t i = 0; i < COUNT; i++) g[i] = (float)(r->t.rank + 1);
        rc = lf_nexus_mark(r->nexus, b, NULL);
    }
    return rc == LF_OK ? lf_nexus_finish(r->nexus, NULL) : rc;
}

static void two_steps(rank *r)
{
    lf_collective_info info = {.size = sizeof info};
    const lf_range first = {.klass = 0, .count = 1};
    double beside = 1;
    r->status = step(r);
    if (r->status == LF_OK) r->status = lf_nexus_reduce(r->nexus, &beside, 1, LF_DTYPE_F64, NULL);
    if (r->status == LF_OK && plant && r->t.rank == ODD) plant(r);
    if (r->status == LF_OK) r->status = step(r);
    got[r->t.rank] = *(float *)lf_map_address(r->map, &first, LF_ROLE_GRAD);
    MUST(lf_nexus_get_recent(r->nexus, 0, &info));
    newest[r->t.rank] = info.seq;
}

static void run_all(void (*planted)(rank *), const char *strategy)
{
    prepare(WORLD, make_map, two_steps);
    plant = planted;
    for (int32_t i = 0; i < WORLD; i++) {
        ranks[i].opts.debug = 1;
        ranks[i].opts.chunk_bytes = COUNT * 4;
        snprintf(ranks[i].opts.comm_strategy, sizeof ranks[i].opts.comm_strategy, "%s", strategy);
        snprintf(ranks[i].opts.reduce, sizeof ranks[i].opts.reduce, "sum");
    }
    run_ranks(WORLD);
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
        CHECK(got[i] == (float)(i + 1) || got[i] == 1 + 2 + 3); /* no sum of different things */
    }
}

TEST(debug_is_silent_when_ranks_agree)
{
    run_all(NULL, "dense");
    all_are(WORLD, LF_OK);
    for (int32_t i = 0; i < WORLD; i++) {
        CHECK(got[i] == 1 + 2 + 3);
        CHECK_EQ(newest[i], 2 * N_BLOCKS + 1); /* agreement, two steps, the sum between */
    }
    run_all(NULL, "sparse");
    all_are(WORLD, LF_OK);
}

static void count_less(rank *r) { r->nexus->plan.chunks[2].range.count -= 64; }

TEST(debug_finds_another_count)
{
    run_all(count_less, "dense");
    all_found("the sums of chunk 2 to 2 of 5", "the sums of chunk 2 to 2 of 5");
}

static void swap_chunks(rank *r)
{
    nexus_chunk *c = r->nexus->plan.chunks, was = c[0];
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
static void skip_a_chunk(rank *r)
{
    nexus_schedule *plan = &r->nexus->plan;
    for (int32_t i = 0; i + 1 < plan->n_chunks; i++) plan->chunks[i] = plan->chunks[i + 1];
    plan->n_chunks--;
}

TEST(debug_finds_a_chunk_left_out)
{
    run_all(skip_a_chunk, "dense");
    all_found("of 4", "of 5");
}

static void sum_beside(rank *r)
{
    double x[7] = {0};
    r->status = lf_nexus_reduce(r->nexus, x, 7, LF_DTYPE_F64, NULL);
}

TEST(debug_finds_another_call)
{
    run_all(sum_beside, "dense");
    all_found("a sum of 7 f64 beside the gradients", "the sums of chunk 0 to 0 of 5");
}

TEST(debug_closes_the_device) { lf_device_close(device); }

LF_TEST_MAIN
