/* SPDX-License-Identifier: Apache-2.0 */
/* The sparse form over the loopback: every rank, every step and every entry against a serial computation; what is kept back, saved,
 * loaded and flushed; order, blocking and failures. */
#include "nexus/nexus_int.h"
#include "nexus_fixture.h"

enum { MOST = 8, N_LAYERS = 3, N_EXPERTS = 4, STEPS_MOST = 100 };

/* n_experts 0: an ordinary model. Sizes are no multiples of anything. */
static lf_map *make_map(int32_t grad_f32, int32_t n_experts)
{
    const model_shape m = {.grad_f32 = grad_f32,
                           .high_load = 1,
                           .n_layers = N_LAYERS,
                           .n_experts = n_experts,
                           .embed = 1501,
                           .norm = 33,
                           .qkv = 701,
                           .expert = 601,
                           .expert_step = 1203};
    return make_model(&m);
}

/* What this rank's gradient is in a step; whole: small whole numbers, so that sums over ranks and steps are exact in f32. */
static void write_grad(const lf_map *map, int32_t rank, int32_t step, int32_t block, bool whole, bool garbage)
{
    lf_block_info b = block_at(map, block);
    void *g = lf_map_address(map, &b.range, LF_ROLE_GRAD);
    lf__rng rng;
    lf__rng_init(&rng, 5, (uint32_t)rank, (uint32_t)step, (uint32_t)block);
    for (int64_t i = 0; i < b.range.count; i++) {
        const float unit = (float)lf__rng_unit(&rng) - 0.5f;
        float v = whole ? (float)(lf__rng_below(&rng, 9) - 4) : unit * unit * unit * 0.01f;
        put(g, i, dtype_of(map, b.range.klass, LF_ROLE_GRAD), garbage ? 777 : v);
    }
}

/* ---- a serial computation of what must come out ------------------------------------------------------------------------ */

/* All ranks' gradients of a chunk's range as the transport would get them, and their residuals, over the steps. */
typedef struct serial {
    int32_t world;
    lf_map *map; /* where gradients are made */
    const nexus_schedule *plan;
    lf_topk **chunk[MOST]; /* (world, n_chunks), NULL for dense ones */
} serial;

static void open_serial(serial *s, int32_t world, int32_t grad_f32, int32_t n_experts, const lf_nexus *nexus)
{
    *s = (serial){.world = world, .map = make_map(grad_f32, n_experts), .plan = &nexus->plan};
    for (int32_t r = 0; r < world; r++) {
        s->chunk[r] = calloc((size_t)s->plan->n_chunks, sizeof(lf_topk *));
        for (int32_t i = 0; i < s->plan->n_chunks; i++) {
            const nexus_chunk *c = &s->plan->chunks[i];
            lf_topk *t = s->chunk[r][i] = calloc(1, sizeof *t);
            *t = (lf_topk){
                .size = sizeof *t, .count = c->range.count, .k = c->topk.k ? c->topk.k : 1, .dtype = c->dtype, .keep = 1};
            t->factor = c->factor;
            t->residual = calloc((size_t)t->count + 64, sizeof(float));
            t->mask = calloc((size_t)t->count / 64 + 1, 8);
            t->values = calloc((size_t)t->count + 64, 4);
            t->out = calloc((size_t)t->count + 64, 4);
            t->data = t->out;
            t->scratch = malloc((size_t)lf_topk_scratch_bytes(t->count));
        }
    }
}

static void close_serial(serial *s)
{
    for (int32_t r = 0; r < s->world; r++) {
        for (int32_t i = 0; i < s->plan->n_chunks; i++) {
            lf_topk *t = s->chunk[r][i];
            free(t->residual);
            free(t->mask);
            free(t->values);
            free(t->out);
            free(t->scratch);
            free(t);
        }
        free(s->chunk[r]);
    }
    lf_map_unref(s->map);
}

static void sum_arrays(void *const *data, int32_t world, int64_t n, int32_t dtype)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = (float)get(data[0], i, dtype);
        for (int32_t r = 1; r < world; r++) sum += (float)get(data[r], i, dtype);
        for (int32_t r = 0; r < world; r++) put(data[r], i, dtype, sum);
    }
}

/* One step of all ranks; afterwards every chunk's `out` is what lf_nexus_finish must leave. */
static lf_status serial_step(serial *s, int32_t step, bool sparse, bool whole)
{
    lf_status rc = LF_OK;
    for (int32_t r = 0; r < s->world; r++) {
        for (int32_t b = 0; b < lf_map_n_blocks(s->map); b++) {
            const lf_block_info info = block_at(s->map, b);
            write_grad(s->map, r, step, b, whole, false);
            if (is_late(r, step, &info))
                memset(lf_map_address(s->map, &info.range, LF_ROLE_GRAD), 0,
                       (size_t)info.range.count * lf_dtype_bytes(dtype_of(s->map, info.range.klass, LF_ROLE_GRAD)));
        }
        for (int32_t i = 0; i < s->plan->n_chunks; i++) {
            const nexus_chunk *c = &s->plan->chunks[i];
            memcpy(s->chunk[r][i]->out, lf_map_address(s->map, &c->range, LF_ROLE_GRAD), (size_t)c->bytes);
        }
    }
    for (int32_t i = 0; i < s->plan->n_chunks; i++) {
        const nexus_chunk *c = &s->plan->chunks[i];
        const bool now = sparse && c->form == NEXUS_SPARSE;
        const lf_topk *turn = s->chunk[(step + i) % s->world][i];
        void *data[MOST];
        for (int32_t r = 0; r < s->world && now && rc == LF_OK; r++) rc = lf_topk_fold(device, s->chunk[r][i], NULL);
        if (now && rc == LF_OK) rc = lf_topk_select(device, turn, NULL);
        for (int32_t r = 0; r < s->world && rc == LF_OK; r++) {
            lf_topk *t = s->chunk[r][i];
            if (now && t != turn) memcpy(t->mask, turn->mask, (size_t)(t->count + 63) / 64 * 8);
            if (now) rc = lf_topk_pack(device, t, NULL);
            data[r] = now ? t->values : t->out;
        }
        sum_arrays(data, s->world, now ? turn->k : c->range.count, c->dtype);
        for (int32_t r = 0; r < s->world && rc == LF_OK; r++) {
            lf_topk *t = s->chunk[r][i];
            if (now) rc = lf_topk_scatter(device, t, NULL);
            else if (c->factor != 1) rc = lf__nexus_cpu.scale(NULL, NULL, 1, t->out, t->count, t->dtype, c->factor);
        }
    }
    return rc;
}

/* ---- ranks as threads -------------------------------------------------------------------------------------------------- */

typedef struct rank {
    lf_transport t;
    lf_nexus_options opts;
    void (*run)(struct rank *rank);
    int32_t grad_f32, n_experts, first_step, steps, flush_at;
    bool streams, whole, check;
    char save[300], load[2][300], hash[33], load_hash[33];
    lf__hash128 steps_hash[STEPS_MOST]; /* of the gradients after each step */
    double total;                       /* of what finish left, over all steps, plus what is kept back at the end */
    lf_status status;
    char text[600], wrong[300];
    lf_nexus_stats stats;
    lf__thread *thread;
} rank;

static rank ranks[MOST];
#define WRONG(...) snprintf(r->wrong, sizeof r->wrong, __VA_ARGS__)

static void enter(void *user)
{
    rank *r = user;
    r->run(r);
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
}

static void train(rank *r);

static void prepare(int32_t world)
{
    lf_transport ends[MOST];
    set_up();
    CHECK_OK(lf_loopback_open(world, ends));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] =
            (rank){.t = ends[i], .run = train, .grad_f32 = 1, .n_experts = N_EXPERTS, .steps = 1, .flush_at = -1, .check = true};
        CHECK_OK(lf_options_init("nexus", &ranks[i].opts, sizeof ranks[i].opts));
        CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "comm_strategy", "sparse"));
        ranks[i].opts.chunk_bytes = 4096;
        ranks[i].opts.timeout_s = 20;
    }
}

static void run_ranks(int32_t world)
{
    for (int32_t i = 0; i < world; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", enter, &ranks[i]));
    for (int32_t i = 0; i < world; i++) lf__thread_join(ranks[i].thread);
    for (int32_t i = 0; i < world; i++) CHECK_STR(ranks[i].wrong, "");
}

static void expect_ok(int32_t world)
{
    for (int32_t i = 0; i < world; i++)
        if (ranks[i].status < 0) FAIL_("rank %d: %s", i, ranks[i].text);
}

static lf_status reduce_once(const rank *r, lf_nexus *nexus, const lf_map *map, int32_t step, lf_stream *stream)
{
    int32_t order[100], n = lf_map_n_blocks(map);
    lf_status rc = lf_nexus_begin(nexus);
    order_of_marks(r->t.rank, step, order, n);
    for (int32_t i = 0; i < n && rc == LF_OK; i++) {
        const lf_block_info b = block_at(map, order[i]);
        const bool late = is_late(r->t.rank, step, &b);
        write_grad(map, r->t.rank, step, order[i], r->whole, late);
        if (!late) rc = lf_nexus_mark(nexus, order[i], stream);
    }
    if (rc == LF_OK) rc = lf_nexus_finish(nexus, stream);
    return rc == LF_OK ? lf_stream_sync(stream) : rc;
}

static void compare(rank *r, const lf_nexus *nexus, const serial *s, int32_t step)
{
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        const lf_topk *want = s->chunk[r->t.rank][i];
        if (memcmp(c->data, want->out, (size_t)c->bytes) != 0)
            WRONG("rank %d step %d chunk %d (%s): another sum", r->t.rank, step, i, lf__nexus_form_name(c->form));
        if (c->form == NEXUS_SPARSE && memcmp(c->topk.residual, want->residual, (size_t)want->count * sizeof(float)) != 0)
            WRONG("rank %d step %d chunk %d: another residual", r->t.rank, step, i);
    }
}

static void note_step(rank *r, const lf_nexus *nexus, int32_t at)
{
    lf__hash128 all[64] = {0};
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        const lf__hash128 one[2] = {all[0], lf__hash(c->data, (size_t)c->bytes, 0)};
        all[0] = lf__hash(one, sizeof one, 0);
        for (int64_t k = 0; k < c->range.count; k++) r->total += get(c->data, k, c->dtype);
    }
    if (at < STEPS_MOST) r->steps_hash[at] = all[0];
}

static double kept_back(const lf_nexus *nexus)
{
    double sum = 0;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++)
        for (int64_t k = 0; nexus->plan.chunks[i].topk.residual && k < nexus->plan.chunks[i].range.count; k++)
            sum += (double)nexus->plan.chunks[i].topk.residual[k];
    return sum;
}

static lf_status resume(rank *r, lf_nexus *nexus)
{
    lf_status rc = r->first_step ? lf_nexus_seek(nexus, r->first_step) : LF_OK;
    for (int32_t i = 0; i < 2 && rc == LF_OK; i++)
        if (r->load[i][0]) rc = lf_nexus_residual_load(nexus, r->load[i], r->load_hash[0] ? r->load_hash : NULL);
    return rc;
}

static void train(rank *r)
{
    lf_map *map = make_map(r->grad_f32, r->n_experts);
    lf_nexus *nexus = NULL;
    lf_stream *stream = NULL;
    serial s = {0};
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK && r->streams) r->status = lf_stream_open(device, 0, &stream);
    if (r->status == LF_OK) r->status = resume(r, nexus);
    if (r->status == LF_OK && r->check) open_serial(&s, r->t.world, r->grad_f32, r->n_experts, nexus);
    for (int32_t step = r->first_step; step < r->first_step + r->steps && r->status == LF_OK; step++) {
        const bool sparse = step >= r->opts.sparse_warmup_steps && step != r->flush_at;
        if (step == r->flush_at) r->status = lf_nexus_residual_flush(nexus);
        if (r->status == LF_OK) r->status = reduce_once(r, nexus, map, step, stream);
        if (r->status == LF_OK && r->check) r->status = serial_step(&s, step, sparse, r->whole);
        if (r->status == LF_OK && r->check) compare(r, nexus, &s, step);
        if (r->status == LF_OK) note_step(r, nexus, step - r->first_step);
    }
    if (r->status == LF_OK && r->save[0]) r->status = lf_nexus_residual_save(nexus, r->save, r->hash);
    if (r->status == LF_OK) r->total += kept_back(nexus);
    r->stats = (lf_nexus_stats){.size = sizeof r->stats};
    if (nexus && lf_nexus_get_stats(nexus, &r->stats) < 0) WRONG("%s", lf_error_text());
    if (s.world) close_serial(&s);
    lf_stream_close(stream);
    if (nexus) lf_nexus_close(nexus);
    else r->t.close(r->t.user);
    lf_map_unref(map);
}

/* Every bit of every step, with marks in other orders and experts without tokens on each rank: replicas stay the same. */
TEST(sparse_sums_like_a_serial_computation)
{
    static const int32_t worlds[] = {1, 2, 3, 4, 8};
    for (size_t w = 0; w < LF_COUNT(worlds); w++)
        for (int32_t how = 0; how < 4; how++) {
            const int32_t world = worlds[w];
            prepare(world);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].steps = 6;
                ranks[i].grad_f32 = how & 1;
                ranks[i].streams = how >> 1;
                if (how == 2) ranks[i].n_experts = 0;
                if (how == 1) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
                if (how == 3) ranks[i].opts.sparse_warmup_steps = 2;
            }
            run_ranks(world);
            expect_ok(world);
            for (int32_t i = 1; i < world; i++) {
                CHECK(memcmp(ranks[i].steps_hash, ranks[0].steps_hash, sizeof ranks[0].steps_hash) == 0);
                CHECK(ranks[i].stats.bytes == ranks[0].stats.bytes && ranks[i].stats.collectives == ranks[0].stats.collectives);
            }
        }
}

TEST(sparse_replicas_are_alike_after_a_hundred_steps)
{
    prepare(4);
    for (int32_t i = 0; i < 4; i++) {
        ranks[i].steps = 100;
        ranks[i].check = false;
        ranks[i].grad_f32 = 0;
    }
    run_ranks(4);
    expect_ok(4);
    for (int32_t i = 1; i < 4; i++) CHECK(memcmp(ranks[i].steps_hash, ranks[0].steps_hash, sizeof ranks[0].steps_hash) == 0);
    const lf__hash128 last = ranks[0].steps_hash[99];
    prepare(4);
    for (int32_t i = 0; i < 4; i++) {
        ranks[i].steps = 100;
        ranks[i].check = false;
        ranks[i].grad_f32 = 0;
        ranks[i].streams = i & 1;
    }
    run_ranks(4);
    expect_ok(4);
    CHECK(memcmp(&ranks[3].steps_hash[99], &last, sizeof last) == 0);
}

/* Forms by group; bytes are what goes out. */
TEST(sparse_is_for_experts_with_little_load)
{
    set_up();
    for (int32_t n_experts = 0; n_experts <= N_EXPERTS; n_experts += N_EXPERTS) {
        lf_map *map = make_map(1, n_experts);
        lf_nexus *nexus;
        lf_nexus_options opts;
        int32_t n_sparse = 0;
        CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
        CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
        opts.k_ratio = 0.1;
        CHECK_OK(lf_nexus_open(&nexus, map, NULL, &opts));
        for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
            lf_chunk_info c = {.size = sizeof c};
            CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
            const char *form = n_experts == 0 || c.group == 2 ? "sparse" : "dense";
            CHECK_STR(c.form, form);
            const int64_t k = (c.range.count + 5) / 10;
            CHECK_EQ(c.sent_bytes, *form == 's' ? (c.range.count + 63) / 64 * 8 + 4 * k : c.bytes);
            n_sparse += *form == 's';
        }
        CHECK(n_sparse > 0);
        lf_nexus_close(nexus);
        lf_map_unref(map);
    }
}

TEST(sparse_counts_what_it_sends)
{
    prepare(2);
    for (int32_t i = 0; i < 2; i++) ranks[i].steps = 3;
    ranks[0].opts.sparse_warmup_steps = ranks[1].opts.sparse_warmup_steps = 1;
    run_ranks(2);
    expect_ok(2);
    lf_map *map = make_map(1, N_EXPERTS);
    lf_nexus *nexus;
    int64_t dense = 0, sparse = 0, sums = 0;
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, &ranks[0].opts));
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        lf_chunk_info c = {.size = sizeof c};
        CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
        dense += c.bytes;
        sparse += c.sent_bytes;
        sums += 3 + 2 * (*c.form == 's');
    }
    CHECK_EQ(ranks[0].stats.bytes, dense + 2 * sparse);
    CHECK_EQ(ranks[0].stats.collectives, sums);
    CHECK(sparse < dense && ranks[0].stats.p50_s > 0 && ranks[0].stats.busy_s > 0);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* Over all steps and ranks what came out and what is kept back is what went in: nothing is lost or counted twice. */
static double given(int32_t world, int32_t first_step, int32_t steps, int32_t n_experts)
{
    lf_map *map = make_map(1, n_experts);
    double sum = 0;
    for (int32_t r = 0; r < world; r++)
        for (int32_t step = first_step; step < first_step + steps; step++)
            for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
                const lf_block_info info = block_at(map, b);
                if (is_late(r, step, &info)) continue;
                write_grad(map, r, step, b, true, false);
                const float *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
                for (int64_t i = 0; i < info.range.count; i++) sum += (double)g[i];
            }
    lf_map_unref(map);
    return sum;
}

static void whole_numbers(int32_t world, int32_t steps)
{
    prepare(world);
    for (int32_t i = 0; i < world; i++) {
        ranks[i].steps = steps;
        ranks[i].whole = true;
        ranks[i].check = false;
        snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
    }
}

/* `total` has the sums once on every rank, and each rank's own residual. */
static double sum_of_residuals(int32_t world, double sums)
{
    double all = 0;
    for (int32_t i = 0; i < world; i++) all += ranks[i].total - sums;
    return all;
}

TEST(sparse_flush_gives_everything_back)
{
    const int32_t world = 3;
    whole_numbers(world, 8);
    for (int32_t i = 0; i < world; i++) ranks[i].flush_at = 7;
    run_ranks(world);
    expect_ok(world);
    const double want = given(world, 0, 8, N_EXPERTS);
    CHECK_EQ(ranks[0].total, want); /* the residuals are empty */
    CHECK_EQ(sum_of_residuals(world, ranks[0].total), 0);
    whole_numbers(world, 8);
    run_ranks(world);
    expect_ok(world);
    CHECK(sum_of_residuals(world, ranks[0].total) != 0); /* so the test can see */
    whole_numbers(world, 8);
    for (int32_t i = 0; i < world; i++) ranks[i].opts.error_feedback = 0;
    run_ranks(world);
    expect_ok(world);
    CHECK(fabs(ranks[0].total - want) > 1);
}

static void name_file(char *path, const char *kind, int32_t i) { snprintf(path, 300, "%s/%s.rank%d", lf_test_dir, kind, i); }

/* Saved after 5 steps and gone on with: the same bits as without a break. */
TEST(sparse_resumes_bit_for_bit)
{
    const int32_t world = 4;
    static lf__hash128 straight[MOST][STEPS_MOST];
    char hashes[MOST][33];
    for (int32_t grad_f32 = 0; grad_f32 < 2; grad_f32++) {
        prepare(world);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].steps = 10;
            ranks[i].grad_f32 = grad_f32;
            ranks[i].check = false;
        }
        run_ranks(world);
        expect_ok(world);
        for (int32_t i = 0; i < world; i++) memcpy(straight[i], ranks[i].steps_hash, sizeof straight[i]);
        prepare(world);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].steps = 5;
            ranks[i].grad_f32 = grad_f32;
            ranks[i].check = false;
            name_file(ranks[i].save, "resume", i);
        }
        run_ranks(world);
        expect_ok(world);
        for (int32_t i = 0; i < world; i++) memcpy(hashes[i], ranks[i].hash, sizeof hashes[i]);
        for (int32_t with = 1; with >= 0; with--) {
            prepare(world);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].first_step = ranks[i].steps = 5;
                ranks[i].grad_f32 = grad_f32;
                ranks[i].check = false;
                ranks[i].opts.chunk_bytes = with ? 4096 : 8192; /* other chunks: other bits, but it can be loaded */
                name_file(ranks[i].load[0], "resume", i);
                memcpy(ranks[i].load_hash, hashes[i], sizeof hashes[i]);
            }
            run_ranks(world);
            expect_ok(world);
            for (int32_t i = 0; i < world && with; i++)
                CHECK(memcmp(&straight[i][5], ranks[i].steps_hash, 5 * sizeof(lf__hash128)) == 0);
        }
    }
}

/* Four ranks' residuals on two and on eight, and into dense chunks: all of it arrives. */
TEST(sparse_residuals_go_to_other_worlds_and_forms)
{
    static const int32_t worlds[] = {2, 8};
    whole_numbers(4, 5);
    for (int32_t i = 0; i < 4; i++) name_file(ranks[i].save, "other", i);
    run_ranks(4);
    expect_ok(4);
    const double put_in = given(4, 0, 5, N_EXPERTS);
    double totals = 0; /* 4 times what came out, and all residuals; what came out and all residuals is what was put in */
    for (int32_t i = 0; i < 4; i++) totals += ranks[i].total;
    const double kept = put_in - (totals - put_in) / 3;
    CHECK(kept != 0);
    for (size_t w = 0; w < LF_COUNT(worlds); w++)
        for (int32_t dense = 0; dense < 2; dense++) {
            const int32_t world = worlds[w];
            whole_numbers(world, 2);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].first_step = 5;
                for (int32_t k = 0; k < 2 && i + k * world < 4; k++) name_file(ranks[i].load[k], "other", i + k * world);
                if (dense) CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "comm_strategy", "dense"));
                else ranks[i].flush_at = 6;
            }
            run_ranks(world);
            expect_ok(world);
            const double out = ranks[0].total, fresh = given(world, 5, 2, N_EXPERTS);
            CHECK_EQ(out - fresh, kept);
        }
}

/* ---- order, and who waits ----------------------------------------------------------------------------------------------- */

typedef struct recorder {
    lf__mutex *mutex;
    bool blocked; /* waits of masks do not come back */
    int32_t n_posts, n_waits, closed;
    int32_t count[400], dtype[400];
    void *data[400];
    int64_t mask_k; /* entries that the masks ask for */
} recorder;

static lf_status record_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    recorder *rec = user;
    (void)stream;
    lf__lock(rec->mutex);
    *ticket = rec->n_posts;
    rec->data[rec->n_posts] = data;
    rec->count[rec->n_posts] = (int32_t)count;
    rec->dtype[rec->n_posts++] = dtype;
    lf__unlock(rec->mutex);
    return LF_OK;
}

static lf_status record_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    recorder *rec = user;
    lf_status rc = LF_OK;
    (void)stream, (void)timeout_s;
    lf__lock(rec->mutex);
    while (rec->blocked) lf__wait(rec->mutex);
    if (ticket != rec->n_waits++) rc = lf_transport_fail(LF_ERR_INTERNAL, "waits out of order");
    lf__unlock(rec->mutex);
    return rc;
}

static void record_close(void *user) { ((recorder *)user)->closed++; }

static lf_transport recorder_end(recorder *rec)
{
    *rec = (recorder){.mutex = lf__mutex_open()};
    return (lf_transport){.size = sizeof(lf_transport),
                          .name = "recorder",
                          .user = rec,
                          .world = 1,
                          .post = record_post,
                          .wait = record_wait,
                          .close = record_close};
}

/* Marks come back although no mask has come; the order of posts is the schedule's: masks and dense sums, and the values of a chunk
 * behind the next one's. */
TEST(sparse_marks_do_not_wait)
{
    set_up();
    recorder rec;
    lf_transport t = recorder_end(&rec);
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_map *map = make_map(1, N_EXPERTS);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
    opts.chunk_bytes = 4096;
    CHECK_OK(lf_nexus_open(&nexus, map, &t, &opts));
    rec.n_posts = rec.n_waits = 0;
    rec.blocked = true;
    CHECK_OK(lf_nexus_begin(nexus));
    for (int32_t b = lf_map_n_blocks(map) - 1; b >= 0; b--) CHECK_OK(lf_nexus_mark(nexus, b, NULL));
    CHECK_OK(lf_nexus_flush(nexus, NULL));
    lf__lock(rec.mutex);
    rec.blocked = false;
    lf__wake(rec.mutex);
    lf__unlock(rec.mutex);
    int32_t first, n, chunks = 0;
    lf_status rc;
    while ((rc = lf_nexus_take(nexus, NULL, &first, &n)) == LF_OK) {
        CHECK_EQ(first, chunks);
        chunks += n;
    }
    CHECK_STATUS(rc, LF_END);
    CHECK_EQ(chunks, lf_nexus_n_chunks(nexus));
    int32_t at = 0;
    for (int32_t i = 0; i <= chunks; i++) {
        const nexus_chunk *before = i ? &nexus->plan.chunks[i - 1] : NULL, *c = i < chunks ? &nexus->plan.chunks[i] : NULL;
        if (c && c->form == NEXUS_SPARSE) CHECK(rec.data[at] == c->topk.mask && rec.dtype[at] == LF_DTYPE_I64);
        else if (c) CHECK(rec.data[at] == c->data && rec.count[at] == c->range.count);
        at += c != NULL;
        if (!before || before->form != NEXUS_SPARSE) continue;
        CHECK(rec.data[at] == before->topk.values && rec.count[at] == before->topk.k && rec.dtype[at] == before->dtype);
        at++;
    }
    CHECK_EQ(at, rec.n_posts);
    CHECK_EQ(at, rec.n_waits);
    lf_nexus_close(nexus);
    CHECK_EQ(rec.closed, 1);
    lf__mutex_close(rec.mutex);
    lf_map_unref(map);
}

/* ---- what goes wrong ---------------------------------------------------------------------------------------------------- */

/* One rank leaves in the middle of a step. */
static void leave_early(rank *r)
{
    if (r->t.rank != 1) {
        train(r);
        return;
    }
    lf_map *map = make_map(1, N_EXPERTS);
    lf_nexus *nexus = NULL;
    lf_status rc = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (rc == LF_OK) rc = reduce_once(r, nexus, map, 0, NULL);
    if (rc == LF_OK) rc = lf_nexus_begin(nexus);
    for (int32_t b = lf_map_n_blocks(map) - 1; b > 5 && rc == LF_OK; b--) rc = lf_nexus_mark(nexus, b, NULL);
    if (rc < 0) WRONG("%s", lf_error_text());
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(sparse_a_lost_rank_is_an_error_on_the_others)
{
    prepare(3);
    for (int32_t i = 0; i < 3; i++) {
        ranks[i].run = leave_early;
        ranks[i].steps = 5;
        ranks[i].check = false;
    }
    run_ranks(3);
    for (int32_t i = 0; i < 3; i += 2) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "chunk ");
        CHECK_HAS(ranks[i].text, "rank 1 closed its end");
    }
}

TEST(sparse_ranks_agree_on_what_matters)
{
    for (int32_t what = 0; what < 3; what++) {
        prepare(2);
        for (int32_t i = 0; i < 2; i++) ranks[i].check = false;
        if (what == 0) ranks[1].opts.k_ratio = 0.2;
        if (what == 1) ranks[1].opts.sparse_warmup_steps = 3;
        ranks[0].first_step = 7;
        ranks[1].first_step = what == 2 ? 8 : 7;
        run_ranks(2);
        for (int32_t i = 0; i < 2; i++) {
            CHECK_EQ(ranks[i].status, LF_ERR_PEER);
            CHECK_HAS(ranks[i].text, what == 2 ? "after " : "k_ratio");
        }
    }
}

static void damage(const char *path, int64_t at)
{
    FILE *f = fopen(path, "r+b");
    fseek(f, (long)at, SEEK_SET);
    const int was = fgetc(f);
    fseek(f, (long)at, SEEK_SET);
    fputc(was ^ 1, f);
    fclose(f);
}

TEST(sparse_residual_files_are_checked)
{
    set_up();
    char path[300], hash[33], again[33];
    lf_map *map = make_map(1, N_EXPERTS), *other = make_map(1, 2);
    lf_nexus_options opts;
    lf_nexus *nexus, *wrong;
    lf_transport end;
    name_file(path, "deep/er/file", 0);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&nexus, map, &end, &opts));
    CHECK_STATUS(lf_nexus_residual_save(nexus, path, hash), LF_END); /* dense */
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, NULL), LF_ERR_NOTFOUND);
    lf_nexus_close(nexus);
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&nexus, map, &end, &opts));
    CHECK_OK(lf_nexus_residual_save(nexus, path, hash));
    CHECK_OK(lf_nexus_residual_load(nexus, path, hash));
    hash[0] = hash[0] == 'a' ? 'b' : 'a';
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, hash), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "another save");
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&wrong, other, &end, &opts));
    CHECK_STATUS(lf_nexus_residual_load(wrong, path, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "another map");
    lf_nexus_close(wrong);
    static const int64_t places[] = {3, 24, 36, 45, 60, 3000};
    for (size_t i = 0; i < LF_COUNT(places); i++) {
        damage(path, places[i]);
        const lf_status rc = lf_nexus_residual_load(nexus, path, NULL);
        if (rc != LF_ERR_CORRUPT && rc != LF_ERR_FORMAT) FAIL_("byte %d: %s", (int)places[i], lf_status_name(rc));
        CHECK_HAS(lf_error_text(), path);
        damage(path, places[i]);
    }
    CHECK(truncate(path, 5000) == 0);
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, NULL), LF_ERR_CORRUPT);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_residual_save(nexus, path, again), LF_ERR_STATE);
    CHECK_STATUS(lf_nexus_residual_flush(nexus), LF_ERR_STATE);
    CHECK_STATUS(lf_nexus_seek(nexus, 1), LF_ERR_STATE);
    CHECK_OK(lf_nexus_finish(nexus, NULL));
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_map_unref(other);
}

/* Every allocation fails once; nothing leaks and nothing hangs. */
TEST(sparse_open_without_memory)
{
    set_up();
    recorder rec;
    lf_transport t = recorder_end(&rec);
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_map *map = make_map(1, N_EXPERTS);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
    for (int64_t at = 1;; at++) {
        rec.n_posts = rec.n_waits = 0;
        lf__alloc_fail_at(at);
        lf_status rc = lf_nexus_open(&nexus, map, &t, &opts);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) break;
        CHECK(rc == LF_ERR_NOMEM || rc == LF_ERR_IO);
        CHECK(at < 300);
    }
    lf_nexus_close(nexus);
    lf__mutex_close(rec.mutex);
    lf_map_unref(map);
}

LF_TEST_MAIN
