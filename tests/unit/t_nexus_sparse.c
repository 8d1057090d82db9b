/* SPDX-License-Identifier: Apache-2.0 */
/* The sparse form over the loopback: every rank, every step and every entry against a serial computation; order, blocking and failures. */
#include "nexus_sparse_ranks.h"

/* ---- a serial computation of what must come out ------------------------------------------------------------------------ */

/* All ranks' gradients of a chunk's range as the transport would get them, and their residuals, over the steps. */
typedef struct serial {
    int32_t world;
    lf_map *map; /* where gradients are made */
    const nexus_schedule *plan;
    lf_topk **chunk[RANKS_MOST]; /* (world, n_chunks) */
} serial;

static void open_serial(serial *s, const rank *like)
{
    *s = (serial){.world = like->t.world, .map = make_map(like), .plan = &like->nexus->plan};
    for (int32_t r = 0; r < s->world; r++) {
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
static lf_status serial_step(serial *s, int32_t step, bool sparse)
{
    lf_status rc = LF_OK;
    for (int32_t r = 0; r < s->world; r++) {
        for (int32_t b = 0; b < lf_map_n_blocks(s->map); b++) {
            const lf_block_info info = block_at(s->map, b);
            write_grad(s->map, r, step, b, false, false);
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
        void *data[RANKS_MOST];
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

/* Each rank has one of its own. */
static serial beside[RANKS_MOST];

static void compare(rank *r, int32_t step)
{
    serial *s = &beside[r->t.rank];
    r->status = serial_step(s, step, step >= r->opts.sparse_warmup_steps);
    for (int32_t i = 0; i < s->plan->n_chunks && r->status == LF_OK; i++) {
        const nexus_chunk *c = &s->plan->chunks[i];
        const lf_topk *want = s->chunk[r->t.rank][i];
        if (memcmp(c->data, want->out, (size_t)c->bytes) != 0)
            WRONG("rank %d step %d chunk %d (%s): another sum", r->t.rank, step, i, lf__nexus_form_name(c->form));
        if (c->form == NEXUS_SPARSE && memcmp(c->topk.residual, want->residual, (size_t)want->count * sizeof(float)) != 0)
            WRONG("rank %d step %d chunk %d: another residual", r->t.rank, step, i);
    }
}

static void train_and_compare(rank *r)
{
    trainings[r->t.rank].after = compare;
    open_serial(&beside[r->t.rank], r);
    train(r);
    close_serial(&beside[r->t.rank]);
}

static void prepare_compared(int32_t world, int32_t steps)
{
    prepare_training(world, steps);
    for (int32_t i = 0; i < world; i++) ranks[i].run = train_and_compare;
}

/* ---- sums -------------------------------------------------------------------------------------------------------------- */

/* Every bit of every step, with marks in other orders and experts without tokens on each rank: replicas stay the same. */
TEST(sparse_sums_like_a_serial_computation)
{
    static const int32_t worlds[] = {1, 2, 3, 4, 8};
    for (size_t w = 0; w < LF_COUNT(worlds); w++)
        for (int32_t how = 0; how < 4; how++) {
            const int32_t world = worlds[w];
            prepare_compared(world, 6);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].grad_f32 = how & 1;
                ranks[i].on_stream = how >> 1;
                if (how == 2) trainings[i].n_experts = 0;
                if (how == 1) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
                if (how == 3) ranks[i].opts.sparse_warmup_steps = 2;
            }
            run_ranks(world);
            all_are(world, LF_OK);
            for (int32_t i = 1; i < world; i++) {
                CHECK(memcmp(trainings[i].steps_hash, trainings[0].steps_hash, sizeof trainings[0].steps_hash) == 0);
                CHECK(ranks[i].stats.bytes == ranks[0].stats.bytes && ranks[i].stats.collectives == ranks[0].stats.collectives);
            }
        }
}

TEST(sparse_replicas_are_alike_after_a_hundred_steps)
{
    prepare_training(4, 100);
    for (int32_t i = 0; i < 4; i++) ranks[i].grad_f32 = 0;
    run_ranks(4);
    all_are(4, LF_OK);
    for (int32_t i = 1; i < 4; i++)
        CHECK(memcmp(trainings[i].steps_hash, trainings[0].steps_hash, sizeof trainings[0].steps_hash) == 0);
    const lf__hash128 last = trainings[0].steps_hash[99];
    prepare_training(4, 100);
    for (int32_t i = 0; i < 4; i++) {
        ranks[i].grad_f32 = 0;
        ranks[i].on_stream = i & 1;
    }
    run_ranks(4);
    all_are(4, LF_OK);
    CHECK(memcmp(&trainings[3].steps_hash[99], &last, sizeof last) == 0);
}

/* Forms by group; bytes are what goes out. */
TEST(sparse_is_for_experts_with_little_load)
{
    set_up();
    for (int32_t n_experts = 0; n_experts <= N_EXPERTS; n_experts += N_EXPERTS) {
        lf_map *map = make_sparse_map(1, n_experts);
        lf_nexus *nexus;
        lf_nexus_options opts;
        int32_t n_sparse = 0;
        CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
        CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
        opts.k_ratio = 0.1;
        CHECK_OK(lf_nexus_open(&nexus, map, NULL, &opts));
        for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
            const lf_chunk_info c = chunk_at(nexus, i);
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
    prepare_compared(2, 3);
    ranks[0].opts.sparse_warmup_steps = ranks[1].opts.sparse_warmup_steps = 1;
    run_ranks(2);
    all_are(2, LF_OK);
    lf_map *map = make_sparse_map(1, N_EXPERTS);
    lf_nexus *nexus;
    int64_t dense = 0, sparse = 0, sums = 0;
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, &ranks[0].opts));
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        const lf_chunk_info c = chunk_at(nexus, i);
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

/* ---- order, and who waits ----------------------------------------------------------------------------------------------- */

typedef struct recorder {
    lf__mutex *mutex;
    bool blocked; /* waits of masks do not come back */
    int32_t n_posts, n_waits, closed;
    int32_t count[400], dtype[400];
    void *data[400];
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
    lf_map *map = make_sparse_map(1, N_EXPERTS);
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
    lf_status rc = reduce_once(r, 0);
    if (rc == LF_OK) rc = lf_nexus_begin(r->nexus);
    for (int32_t b = lf_map_n_blocks(r->map) - 1; b > 5 && rc == LF_OK; b--) rc = lf_nexus_mark(r->nexus, b, NULL);
    if (rc < 0) WRONG("%s", lf_error_text());
}

TEST(sparse_a_lost_rank_is_an_error_on_the_others)
{
    prepare_training(3, 5);
    for (int32_t i = 0; i < 3; i++) ranks[i].run = leave_early;
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
        prepare_training(2, 1);
        if (what == 0) ranks[1].opts.k_ratio = 0.2;
        if (what == 1) ranks[1].opts.sparse_warmup_steps = 3;
        trainings[0].first_step = 7;
        trainings[1].first_step = what == 2 ? 8 : 7;
        run_ranks(2);
        for (int32_t i = 0; i < 2; i++) {
            CHECK_EQ(ranks[i].status, LF_ERR_PEER);
            CHECK_HAS(ranks[i].text, what == 2 ? "after " : "k_ratio");
        }
    }
}

/* Every allocation fails once; nothing leaks and nothing hangs. */
TEST(sparse_open_without_memory)
{
    set_up();
    recorder rec;
    lf_transport t = recorder_end(&rec);
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_map *map = make_sparse_map(1, N_EXPERTS);
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
