/* SPDX-License-Identifier: Apache-2.0 */
/* Routing against float64, over odd shapes; poisoned outputs; any number of threads; streams; its own exp and log. */
#include "loom/loom_math.h"
#include "loom_fixture.h"

/* ---- routing against float64 ------------------------------------------------------------------------------------------ */

/* The softmax of z (e) in doubles. */
static void softmax(const float *z, int32_t e, double *prob)
{
    double sum = 0;
    for (int32_t j = 0; j < e; j++) sum += prob[j] = exp((double)z[j]);
    for (int32_t j = 0; j < e; j++) prob[j] /= sum;
}

/* The scaled logits of a token with and without noise, as the kernel rounds them. */
static void scaled(const problem *p, int64_t t, float *z, float *clean)
{
    for (int32_t j = 0; j < p->e; j++) {
        const float logit = p->logits[t * p->e + j], noise = p->schedule.noise_scale * p->noise[t * p->e + j];
        clean[j] = logit / p->schedule.temperature;
        z[j] = (logit + noise) / p->schedule.temperature;
    }
}

/* Also the order of choice: by the scaled logit as a float, ties to the lower expert. */
static void check_token(const problem *p, int64_t t)
{
    double prob[LF_MAX_EXPERTS], chosen = 0;
    float z[LF_MAX_EXPERTS], clean[LF_MAX_EXPERTS];
    bool taken[LF_MAX_EXPERTS] = {false};
    scaled(p, t, z, clean);
    softmax(clean, p->e, prob);
    for (int32_t j = 0; j < p->e; j++) CHECK_NEAR(p->r.prob[t * p->e + j], prob[j], 1e-6);
    softmax(z, p->e, prob);
    const int32_t *expert = p->r.expert + t * p->k;
    const float *weight = p->r.weight + t * p->k;
    for (int32_t c = 0; c < p->k; c++) {
        if (!is_valid(p, t)) {
            CHECK_EQ(expert[c], -1);
            CHECK(weight[c] == 0);
            continue;
        }
        int32_t best = -1;
        for (int32_t j = p->e - 1; j >= 0; j--)
            if (!taken[j] && (best < 0 || z[j] >= z[best])) best = j;
        CHECK_EQ(expert[c], best);
        taken[best] = true;
        chosen += prob[best];
    }
    for (int32_t c = 0; is_valid(p, t) && c < p->k; c++) CHECK_NEAR(weight[c], prob[expert[c]] / chosen, 1e-6);
}

/* Units of 2^-32 a token, and what the probabilities themselves are off. */
static void check_prob_sum(const problem *p)
{
    double sum[LF_MAX_EXPERTS] = {0}, prob[LF_MAX_EXPERTS];
    float z[LF_MAX_EXPERTS], clean[LF_MAX_EXPERTS];
    for (int64_t t = 0; t < p->n; t++) {
        scaled(p, t, z, clean);
        softmax(clean, p->e, prob);
        for (int32_t j = 0; is_valid(p, t) && j < p->e; j++) sum[j] += prob[j];
    }
    for (int32_t j = 0; j < p->e; j++) CHECK_NEAR(p->prob_sum[j], sum[j], 4e-7 * sum[j] + 3e-10 * (double)p->n);
}

static void check_rows(const problem *p)
{
    const int64_t slots = p->n * p->k;
    int32_t at = 0;
    for (int32_t j = 0; j < p->e; j++) {
        int32_t count = 0;
        CHECK_EQ(p->r.offset[j], at);
        for (int64_t s = 0; s < slots; s++) {
            if (p->r.expert[s] != j) continue;
            CHECK_EQ(p->r.row[at + count], s); /* stable: slots of an expert in order */
            CHECK_EQ(p->r.slot[s], at + count);
            count++;
        }
        CHECK_EQ(p->r.count[j], count);
        at += count;
    }
    CHECK_EQ(p->r.offset[p->e], at);
    for (int64_t s = 0; s < slots; s++) {
        if (p->r.expert[s] >= 0) continue;
        CHECK_EQ(p->r.row[at], s);
        CHECK_EQ(p->r.slot[s], at);
        at++;
    }
    CHECK_EQ(at, slots);
}

TEST(loom_route_matches_float64)
{
    set_up();
    for (size_t i = 0; i < N_SMALL_SHAPES; i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        route(&p, i % 2 ? worker : NULL, &p.r);
        for (int64_t t = 0; t < p.n; t++) check_token(&p, t);
        check_prob_sum(&p);
        check_rows(&p);
        free_problem(&p);
    }
}

static void check_same(const lf_routing *a, const lf_routing *b, const problem *p)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, ne = (size_t)p->n * (size_t)p->e * 4, e = (size_t)p->e * 4;
    CHECK(memcmp(a->expert, b->expert, slots) == 0 && memcmp(a->weight, b->weight, slots) == 0);
    CHECK(memcmp(a->row, b->row, slots) == 0 && memcmp(a->slot, b->slot, slots) == 0);
    CHECK(memcmp(a->prob, b->prob, ne) == 0);
    CHECK(memcmp(a->count, b->count, e) == 0 && memcmp(a->offset, b->offset, e + 4) == 0);
}

/* Other poison, other numbers of threads, a stream: the same bits. So every element is written and none depends on threads. */
TEST(loom_route_same_bits_for_any_threads)
{
    set_up();
    for (size_t i = 0; i < N_SMALL_SHAPES; i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        lf_routing first = p.r;
        float *first_sum = p.prob_sum;
        route(&p, NULL, &first);
        for (int32_t threads = 1; threads <= 3; threads++) {
            make_routing(&p, 0x10 * threads);
            CHECK_OK(lf_loom_set_threads(threads));
            route(&p, threads == 2 ? worker : NULL, &p.r);
            check_same(&first, &p.r, &p);
            CHECK(memcmp(first_sum, p.prob_sum, (size_t)p.e * 4) == 0);
            free_routing(&p.r), lf__free(p.prob_sum);
        }
        p.r = first, p.prob_sum = first_sum;
        free_problem(&p);
    }
}

/* What is not wanted changes nothing else; no schedule is temperature 1 without noise. */
TEST(loom_route_without_statistics_or_schedule)
{
    set_up();
    problem p;
    make_problem(&p, 300, 20, 3, 0);
    route(&p, NULL, &p.r);
    problem q = p;
    make_routing(&q, 0x5a);
    lf_routing bare = q.r;
    bare.prob = NULL;
    lf_route_args args = args_of(&p);
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &bare, NULL));
    memcpy(q.r.prob, p.r.prob, (size_t)(p.n * p.e) * 4);
    check_same(&p.r, &q.r, &p);
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &bare, q.prob_sum));
    CHECK(memcmp(p.prob_sum, q.prob_sum, (size_t)p.e * 4) == 0);
    p.schedule = (lf_route_schedule){0, 0, 1};
    route(&p, NULL, &p.r);
    args.schedule = NULL;
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &q.r, q.prob_sum));
    check_same(&p.r, &q.r, &p);
    free_routing(&q.r), lf__free(q.prob_sum);
    free_problem(&p);
}

/* The schedule is read when the work runs, not when it is queued. */
static lf_status wait_here(void *gate)
{
    lf__lock(gate);
    lf__unlock(gate);
    return LF_OK;
}

TEST(loom_route_reads_its_schedule_late)
{
    set_up();
    problem p;
    lf__mutex *gate = lf__mutex_open();
    make_problem(&p, 100, 16, 2, 0);
    const lf_route_schedule later = p.schedule;
    const lf_route_args args = args_of(&p);
    p.schedule = (lf_route_schedule){-1, 0, 100};
    lf__lock(gate);
    CHECK_OK(lf_stream_run(worker, wait_here, gate));
    CHECK_OK(lf_loom_route(cpu, worker, &args, &p.r, p.prob_sum));
    p.schedule = later;
    lf__unlock(gate);
    CHECK_OK(lf_stream_sync(worker));
    for (int64_t t = 0; t < p.n; t++) check_token(&p, t);
    lf__mutex_close(gate);
    free_problem(&p);
}

/* Other choices than route makes: the same expert twice, ids out of range. Only the arrays named in the header are written. */
TEST(loom_sort_sorts_given_choices)
{
    set_up();
    for (size_t i = 0; i < N_SMALL_SHAPES; i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        const size_t slots = (size_t)(p.n * p.k);
        int32_t *given = poisoned(slots * 4, 0);
        for (size_t s = 0; s < slots; s++) {
            p.r.expert[s] = (int32_t)lf__rng_below(&rng, (uint32_t)p.e + 1) - 1; /* what check_rows expects */
            static const int32_t nowhere[] = {-1, INT32_MIN, INT32_MAX};
            const size_t which = lf__rng_below(&rng, 4);
            given[s] = p.r.expert[s] >= 0 ? p.r.expert[s] : which < 3 ? nowhere[which] : p.e;
        }
        lf_routing r = p.r;
        r.expert = NULL, r.weight = NULL, r.prob = NULL;
        CHECK_OK(lf_loom_sort(cpu, i % 2 ? worker : NULL, given, p.n, p.e, p.k, &r));
        CHECK_OK(lf_stream_sync(worker));
        check_rows(&p);
        lf__free(given);
        free_problem(&p);
    }
}

/* d/dlogits of <dweight, weight> + <dprob_sum, prob_sum> through two full softmaxes in doubles: another way than the kernel's. */
static void check_backward(const problem *p, const float *dweight, const float *dprob_sum, const float *dlogits)
{
    for (int64_t t = 0; t < p->n; t++) {
        double chosen = 0, inner = 0, outer = 0, mean = 0, prob[LF_MAX_EXPERTS], clean_prob[LF_MAX_EXPERTS];
        double dprob[LF_MAX_EXPERTS] = {0};
        float z[LF_MAX_EXPERTS], clean[LF_MAX_EXPERTS];
        const int32_t *expert = p->r.expert + t * p->k;
        const bool valid = is_valid(p, t);
        scaled(p, t, z, clean);
        softmax(z, p->e, prob);
        softmax(clean, p->e, clean_prob);
        for (int32_t c = 0; valid && c < p->k; c++) {
            chosen += prob[expert[c]];
            inner += (double)dweight[t * p->k + c] * prob[expert[c]];
        }
        for (int32_t c = 0; valid && c < p->k; c++)
            dprob[expert[c]] = (double)dweight[t * p->k + c] / chosen - inner / (chosen * chosen);
        for (int32_t j = 0; j < p->e; j++) outer += prob[j] * dprob[j];
        for (int32_t j = 0; dprob_sum && j < p->e; j++) mean += clean_prob[j] * (double)dprob_sum[j];
        for (int32_t j = 0; j < p->e; j++) {
            double want = prob[j] * (dprob[j] - outer);
            if (dprob_sum) want += clean_prob[j] * ((double)dprob_sum[j] - mean);
            CHECK_NEAR(dlogits[t * p->e + j], valid ? want / (double)p->schedule.temperature : 0, valid ? 1e-5 : 0);
        }
    }
}

TEST(loom_route_backward_matches_float64)
{
    set_up();
    for (size_t i = 0; i < N_SMALL_SHAPES; i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        route(&p, NULL, &p.r);
        const size_t bytes = (size_t)p.n * (size_t)p.e * 4;
        float *dweight = poisoned((size_t)(p.n * p.k) * 4, 0), *dprob_sum = poisoned((size_t)p.e * 4, 0);
        float *dlogits = poisoned(bytes, 0xa5), *again = poisoned(bytes, 0x11);
        for (int64_t s = 0; s < p.n * p.k; s++) dweight[s] = uniform(-1, 1);
        for (int32_t j = 0; j < p.e; j++) dprob_sum[j] = uniform(-1, 1);
        for (int32_t with = 0; with < 2; with++) {
            const float *g = with ? dprob_sum : NULL;
            lf_routing r = p.r;
            if (!with) r.prob = NULL;
            CHECK_OK(
                lf_loom_route_backward(cpu, i % 2 ? NULL : worker, &r, p.valid, dweight, g, p.n, p.e, p.k, &p.schedule, dlogits));
            CHECK_OK(lf_stream_sync(worker));
            check_backward(&p, dweight, g, dlogits);
            CHECK_OK(lf_loom_set_threads(2));
            CHECK_OK(lf_loom_route_backward(cpu, NULL, &r, p.valid, dweight, g, p.n, p.e, p.k, &p.schedule, again));
            CHECK_OK(lf_loom_set_threads(0));
            CHECK(memcmp(dlogits, again, bytes) == 0);
        }
        lf__free(dweight), lf__free(dprob_sum), lf__free(dlogits), lf__free(again);
        free_problem(&p);
    }
}

/* What the header says of logits that are no numbers: experts in range and different, NaN last, weights and sums of NaN. */
TEST(loom_route_survives_nan_and_infinity)
{
    set_up();
    problem p;
    make_problem(&p, 6, 6, 3, ALL_VALID | NO_NOISE);
    const float nan = NAN, inf = INFINITY;
    const float logits[6][6] = {
        {1, 2, 3, 4, 5, 6},                /* chosen: */
        {nan, 2, nan, -inf, nan, nan},     /* 1, 3, 0 */
        {nan, nan, nan, nan, nan, nan},    /* 0, 1, 2 */
        {-inf, -inf, -inf, 0, -inf, -inf}, /* 3, 0, 1 */
        {-inf, -inf, -inf, -inf, -inf, -inf},
        {0, inf, -0.0f, inf, nan, 1}, /* 1, 3, 5 */
    };
    static const int32_t want[6][3] = {{5, 4, 3}, {1, 3, 0}, {0, 1, 2}, {3, 0, 1}, {0, 1, 2}, {1, 3, 5}};
    memcpy(p.logits, logits, sizeof logits);
    route(&p, NULL, &p.r);
    for (int32_t t = 0; t < 6; t++) {
        const bool number = t == 0 || t == 3;
        for (int32_t c = 0; c < 3; c++) CHECK_EQ(p.r.expert[3 * t + c], want[t][c]);
        for (int32_t c = 0; c < 3; c++) CHECK(isnan(p.r.weight[3 * t + c]) == !number);
        for (int32_t j = 0; j < 6; j++) CHECK(isnan(p.r.prob[6 * t + j]) == !number);
    }
    CHECK(p.r.weight[9] == 1 && p.r.weight[10] == 0 && p.r.prob[6 * 3 + 3] == 1 && p.r.prob[6 * 3] == 0);
    for (int32_t j = 0; j < 6; j++) CHECK(isnan(p.prob_sum[j]));
    check_rows(&p);
    uint8_t valid[6] = {1, 0, 0, 1, 0, 0}; /* what is not valid spoils nothing */
    lf_route_args args = args_of(&p);
    args.valid = valid;
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &p.r, p.prob_sum));
    for (int32_t j = 0; j < 6; j++) CHECK_NEAR(p.prob_sum[j], p.r.prob[j] + (j == 3), 1e-6);
    free_problem(&p);
}

/* ---- noise ----------------------------------------------------------------------------------------------------------- */

TEST(loom_philox_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < LF_COUNT(known); i++) {
        uint32_t out[4];
        lf__philox(known[i].counter, known[i].key, out);
        for (int32_t j = 0; j < 4; j++) CHECK_EQ(out[j], known[i].out[j]);
    }
}

/* Its 2^24 values by the library's logarithm: the same floats, but for one that lies next to a tie. */
TEST(loom_gumbel_follows_its_formula)
{
    int64_t other = 0;
    double worst = 0;
    for (uint32_t word = 0; word < 1u << 24; word += 3) {
        const double u = (double)word / 16777216.0 + 1.0 / 33554432.0, want = -log(-log(u));
        const float got = lf__loom_gumbel(word << 8 | (word & 255));
        other += got != (float)want;
        worst = fmax(worst, fabs((double)got - want) / fabs(want));
    }
    CHECK(other <= 1 && worst < 6e-8);
}

/* e^x over all that a softmax can ask for, within 1.2 units in the last place of a float. */
TEST(loom_exp_is_accurate)
{
    double worst = 0;
    for (double x = 0; x > -104; x -= 1.7e-4 + x * x * 1e-6) {
        int power;
        const double want = exp((double)(float)x);
        frexp(want, &power);
        worst = fmax(worst, fabs((double)lf__loom_exp((float)x) - want) / ldexp(1, (power < -125 ? -125 : power) - 24));
    }
    CHECK(worst < 1.2);
    CHECK(lf__loom_exp(0) == 1 && lf__loom_exp(-INFINITY) == 0 && lf__loom_exp(-104) == 0 && isnan(lf__loom_exp(NAN)));
}

TEST(loom_noise_does_not_depend_on_the_batch)
{
    set_up();
    problem p;
    make_problem(&p, 3000, 16, 2, ALL_VALID);
    double sum = 0, scale = (double)p.schedule.noise_scale;
    for (int64_t i = 0; i < p.n * p.e; i++) sum += (double)p.noise[i];
    /* mean of the Gumbel distribution, 4 standard errors */
    CHECK_NEAR(sum / (double)(p.n * p.e), 0.5772, 4 * 1.2825 / sqrt((double)(p.n * p.e)));
    CHECK(scale > 0);
    route(&p, NULL, &p.r);
    problem q = p;
    make_routing(&q, 0x11);
    lf_route_args args = args_of(&p);
    args.logits += 1000 * p.e, args.token += 1000, args.n -= 1000;
    CHECK_OK(lf_loom_route(cpu, worker, &args, &q.r, NULL));
    CHECK_OK(lf_stream_sync(worker));
    CHECK(memcmp(p.r.expert + 2000, q.r.expert, (size_t)args.n * 8) == 0);
    CHECK(memcmp(p.r.weight + 2000, q.r.weight, (size_t)args.n * 8) == 0);
    p.schedule.step++;
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &q.r, NULL));
    CHECK(memcmp(p.r.expert + 2000, q.r.expert, (size_t)args.n * 8) != 0);
    free_routing(&q.r), lf__free(q.prob_sum);
    free_problem(&p);
}

/* ---- errors, steady state -------------------------------------------------------------------------------------------- */

static lf_status try_route(const problem *p, int64_t n, int32_t e, int32_t k, int32_t layer)
{
    lf_route_args args = args_of(p);
    args.n = n, args.e = e, args.k = k, args.layer = layer;
    return lf_loom_route(cpu, NULL, &args, &p->r, NULL);
}

TEST(loom_refuses_what_it_cannot_do)
{
    set_up();
    problem p;
    make_problem(&p, 4, 8, 2, ALL_VALID | NO_NOISE);
    const float *l = p.logits;
    CHECK_STATUS(try_route(&p, 4, 8, 0, 0), LF_ERR_INVALID);
    CHECK_STATUS(try_route(&p, 4, 8, 9, 0), LF_ERR_INVALID);
    CHECK_STATUS(try_route(&p, 4, 2, 3, 0), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "k is 3 choices of 2 experts");
    CHECK_STATUS(try_route(&p, 4, 257, 2, 0), LF_ERR_INVALID);
    CHECK_STATUS(try_route(&p, -1, 8, 2, 0), LF_ERR_INVALID);
    CHECK_STATUS(try_route(&p, INT32_MAX, 8, 2, 0), LF_ERR_INVALID);
    CHECK_STATUS(try_route(&p, 4, 8, 2, -1), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "layer is -1");
    lf_route_args args = args_of(&p);
    CHECK_STATUS(lf_loom_route(NULL, NULL, &args, &p.r, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, NULL, &p.r, NULL), LF_ERR_INVALID);
    args.logits = NULL;
    CHECK_STATUS(lf_loom_route(cpu, NULL, &args, &p.r, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "logits");
    args = args_of(&p);
    args.size = 8;
    CHECK_STATUS(lf_loom_route(cpu, NULL, &args, &p.r, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "lf_route_args");
    CHECK_STATUS(lf_loom_permute(cpu, NULL, &p.r, l, 4, 8, 2, 8, LF_DTYPE_F16, p.logits), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "f16");
    CHECK_STATUS(lf_loom_permute(cpu, NULL, NULL, l, 4, 8, 2, 8, LF_DTYPE_F32, p.logits), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_permute_backward(cpu, NULL, &p.r, l, 4, 8, 2, 8, LF_DTYPE_F32, l, NULL, p.logits), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "both or neither");
    int32_t *row = p.r.row;
    p.r.row = NULL;
    CHECK_STATUS(try_route(&p, 4, 8, 2, 0), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "row");
    p.r.row = row;
    lf_routing no_prob = p.r;
    no_prob.prob = NULL;
    CHECK_STATUS(lf_loom_route_backward(cpu, NULL, &no_prob, NULL, l, l, 4, 8, 2, NULL, p.logits), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "prob");
    p.r.size = 8;
    CHECK_STATUS(try_route(&p, 4, 8, 2, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_set_threads(-1), LF_ERR_INVALID);
    free_problem(&p);
}

/* 50 jobs queued behind one that waits, so all of them exist at once. */
static void queue_fifty(const problem *p, lf__mutex *gate)
{
    lf__lock(gate);
    CHECK_OK(lf_stream_run(worker, wait_here, gate));
    const lf_route_args args = args_of(p);
    for (int32_t i = 0; i < 50; i++) CHECK_OK(lf_loom_route(cpu, worker, &args, &p->r, p->prob_sum));
    lf__unlock(gate);
    CHECK_OK(lf_stream_sync(worker));
}

TEST(loom_allocates_nothing_in_steady_state)
{
    set_up();
    problem p;
    lf__mutex *gate = lf__mutex_open();
    make_problem(&p, 40, 8, 2, 0);
    queue_fifty(&p, gate);
    lf__alloc_fail_at(0);
    queue_fifty(&p, gate);
    CHECK_EQ(lf__alloc_fail_at(0), 0);
    lf__mutex_close(gate);
    free_problem(&p);
}

TEST(loom_closes)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
