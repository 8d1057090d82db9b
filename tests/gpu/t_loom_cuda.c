/* SPDX-License-Identifier: Apache-2.0 */
/* Routing on CUDA against the CPU's table, bit for bit; odd shapes, poisoned outputs, reruns, streams. */
#include "loom_cuda_problem.h"

static void route(const problem *p, lf_stream *on, const lf_routing *r, float *prob_sum)
{
    CHECK_OK(lf_loom_route(gpu, on, &p->gpu_args, r, prob_sum));
}

/* The same bits, or NaN on both sides. */
static void check_floats(const char *what, const float *from_device, const float *want, int64_t n)
{
    CHECK_OK(lf_stream_sync(stream));
    const float *got = down(from_device, (size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], 4) != 0 && !(isnan(got[i]) && isnan(want[i])))
            FAIL_("%s: element %lld of %lld is %.9g, expected %.9g", what, (long long)i, (long long)n, (double)got[i],
                  (double)want[i]);
}

static void check_routing(const problem *p, const lf_routing *r, const float *prob_sum)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, e = (size_t)p->e * 4;
    check_bytes("expert", r->expert, p->want.expert, slots);
    check_bytes("count", r->count, p->want.count, e);
    check_bytes("offset", r->offset, p->want.offset, e + 4);
    check_bytes("row", r->row, p->want.row, slots);
    check_bytes("slot", r->slot, p->want.slot, slots);
    check_floats("weight", r->weight, p->want.weight, p->n * p->k);
    if (r->prob) check_floats("prob", r->prob, p->want.prob, p->n * p->e);
    if (prob_sum) check_floats("prob_sum", prob_sum, p->want_sum, p->e);
}

/* With and without the statistics. */
static void check_all_ways(const problem *p)
{
    for (int32_t way = 0; way < 4; way++) {
        lf_routing r = new_routing(p, true, 0xa5);
        float *prob_sum = way & 1 ? device((size_t)p->e * 4, 0xa5) : NULL;
        if (way & 2) r.prob = NULL;
        route(p, next_stream(), &r, prob_sum);
        check_routing(p, &r, prob_sum);
    }
}

TEST(cuda_route_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        check_all_ways(&p);
        release();
    }
}

/* Ids of all kinds, the same expert twice: the CPU's bits, and no other array is touched. */
TEST(cuda_sort_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        const size_t slots = (size_t)(p.n * p.k), e = (size_t)p.e * 4;
        int32_t *given = host(slots * 4);
        for (size_t s = 0; s < slots; s++) {
            static const int32_t nowhere[] = {-1, INT32_MIN, INT32_MAX};
            const size_t which = lf__rng_below(&rng, 12);
            given[s] = which < 3 ? nowhere[which] : (int32_t)lf__rng_below(&rng, (uint32_t)p.e + 1);
            if (shapes[i].how & FAVOUR_ONE && which > 5) given[s] = p.e / 2;
        }
        CHECK_OK(lf_loom_sort(cpu, NULL, given, p.n, p.e, p.k, &p.want));
        lf_routing r = new_routing(&p, true, 0xa5);
        r.expert = NULL, r.weight = NULL, r.prob = NULL;
        CHECK_OK(lf_loom_sort(gpu, next_stream(), up(given, slots * 4), p.n, p.e, p.k, &r));
        check_bytes("count", r.count, p.want.count, e);
        check_bytes("offset", r.offset, p.want.offset, e + 4);
        check_bytes("row", r.row, p.want.row, slots * 4);
        check_bytes("slot", r.slot, p.want.slot, slots * 4);
        release();
    }
}

static void check_same_routing(const problem *p, const lf_routing *a, const lf_routing *b)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, e = (size_t)p->e * 4, prob = (size_t)p->n * e;
    check_bytes("expert again", a->expert, down(b->expert, slots), slots);
    check_bytes("weight again", a->weight, down(b->weight, slots), slots);
    check_bytes("prob again", a->prob, down(b->prob, prob), prob);
    check_bytes("row again", a->row, down(b->row, slots), slots);
    check_bytes("slot again", a->slot, down(b->slot, slots), slots);
    check_bytes("count again", a->count, down(b->count, e), e);
    check_bytes("offset again", a->offset, down(b->offset, e + 4), e + 4);
}

/* Other poison, other streams, the one that PyTorch lends: the same bits, so every element is written. */
TEST(cuda_route_same_bits_again)
{
    set_up();
    lf_stream *lent = NULL;
    CHECK_OK(lf_stream_wrap(gpu, NULL, &lent));
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        lf_routing first = new_routing(&p, true, 0x11), second = new_routing(&p, true, 0xee), third = new_routing(&p, true, 0x77);
        float *sum[3];
        for (int32_t j = 0; j < 3; j++) sum[j] = device((size_t)p.e * 4, 0x11 * j);
        route(&p, NULL, &first, sum[0]);
        route(&p, stream, &second, sum[1]);
        CHECK_OK(lf_stream_sync(stream));
        route(&p, lent, &third, sum[2]);
        CHECK_OK(lf_stream_sync(lent));
        check_same_routing(&p, &first, &second);
        check_same_routing(&p, &first, &third);
        for (int32_t j = 1; j < 3; j++) check_bytes("prob_sum again", sum[j], down(sum[0], (size_t)p.e * 4), (size_t)p.e * 4);
        release();
    }
    lf_stream_close(lent);
}

/* Logits that are no numbers, and infinities: what the CPU does, NaN for NaN. */
TEST(cuda_route_survives_nan)
{
    set_up();
    static const shape odd[] = {{500, 16, 4, ALL_VALID}, {300, 5, 5, 0}, {200, 200, 8, NO_NOISE}, {64, 1, 1, 0}};
    for (size_t i = 0; i < LF_COUNT(odd); i++) {
        problem p;
        make_problem(&p, &odd[i]);
        float *logits = host((size_t)(p.n * p.e) * 4);
        memcpy(logits, p.args.logits, (size_t)(p.n * p.e) * 4);
        for (int64_t j = 0; j < p.n * p.e; j += 1 + lf__rng_below(&rng, 20)) {
            static const float what[] = {NAN, -INFINITY, INFINITY, -NAN};
            logits[j] = what[lf__rng_below(&rng, 4)];
        }
        for (int64_t j = 0; j < p.e; j++) logits[j] = (float)NAN;
        for (int64_t j = 0; j < p.e; j++) logits[(p.n - 1) * p.e + j] = -INFINITY;
        solve(&p, logits);
        check_all_ways(&p);
        release();
    }
}

/* Two streams at once: neither uses the other's scratch. */
TEST(cuda_route_on_two_streams_at_once)
{
    set_up();
    lf_stream *other = NULL;
    CHECK_OK(lf_stream_open(gpu, 0, &other));
    problem a, b;
    make_problem(&a, &(shape){9000, 16, 2, 0});
    make_problem(&b, &(shape){7000, 60, 3, 0});
    lf_routing ra = new_routing(&a, true, 0xa5), rb = new_routing(&b, true, 0xa5);
    float *sum_a = device(16 * 4, 1), *sum_b = device(60 * 4, 1);
    for (int32_t i = 0; i < 50; i++) {
        route(&a, stream, &ra, sum_a);
        route(&b, other, &rb, sum_b);
    }
    CHECK_OK(lf_stream_sync(other));
    check_routing(&a, &ra, sum_a);
    check_routing(&b, &rb, sum_b);
    lf_stream_close(other);
    release();
}

TEST(cuda_route_backward_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        lf_routing r = upload_routing(&p);
        const size_t slots = (size_t)(p.n * p.k), e = (size_t)p.e, bytes = (size_t)p.n * e * 4;
        float *dweight = host(slots * 4), *dprob_sum = host(e * 4), *want = host(bytes), *dlogits = device(bytes, 0xa5);
        for (size_t s = 0; s < slots; s++) dweight[s] = uniform(-1, 1);
        for (size_t j = 0; j < e; j++) dprob_sum[j] = uniform(-1, 1);
        const float *gpu_dweight = up(dweight, slots * 4), *gpu_dprob_sum = up(dprob_sum, e * 4);
        for (int32_t with = 0; with < 2; with++) {
            CHECK_OK(lf_loom_route_backward(cpu, NULL, &p.want, p.args.valid, dweight, with ? dprob_sum : NULL, p.n, p.e, p.k,
                                            p.args.schedule, want));
            if (!with) r.prob = NULL;
            CHECK_OK(lf_loom_route_backward(gpu, next_stream(), &r, p.gpu_args.valid, gpu_dweight, with ? gpu_dprob_sum : NULL,
                                            p.n, p.e, p.k, p.gpu_args.schedule, dlogits));
            check_bytes("dlogits", dlogits, want, bytes);
            CHECK_OK(lf_fill(gpu, dlogits, 0x5a, bytes, NULL));
            r = upload_routing(&p);
        }
        CHECK_OK(lf_loom_route_backward(cpu, NULL, &p.want, NULL, dweight, dprob_sum, p.n, p.e, p.k, NULL, want));
        CHECK_OK(lf_loom_route_backward(gpu, next_stream(), &r, NULL, gpu_dweight, gpu_dprob_sum, p.n, p.e, p.k, NULL, dlogits));
        check_bytes("dlogits without a schedule", dlogits, want, bytes);
        release();
    }
}

LF_TEST_MAIN
