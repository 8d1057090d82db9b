/* SPDX-License-Identifier: Apache-2.0 */
/* Dense sums of f32 gradients that travel as bf16, over the loopback: every bit of every step, where the wire lies, and everything else
 * that a step can be: in runs, in shares, beside sparse chunks, with empty experts, with another chunk size. */
#include "nexus/nexus_int.h"
#include "nexus_recorder.h"
#include "nexus_wire.h"

/* ---- a transport that is looked at --------------------------------------------------------------------------------------- */

/* An end of the loopback, and what NexusSync asks of it. */
typedef struct spy {
    lf_transport inner;
    const char *piece[16], *end; /* announced; of the newest post */
    int64_t piece_bytes[16];
    int32_t n_pieces, posts[8]; /* by dtype */
    int32_t in_run, n_runs, joined, parted, outside;
} spy;

static spy spies[RANKS_MOST];

static void look_at(spy *s, const char *data, int64_t count, int32_t dtype)
{
    const int64_t bytes = count * (int64_t)lf_dtype_bytes(dtype);
    bool announced = false;
    s->posts[dtype]++;
    if (dtype != LF_DTYPE_F32 && dtype != LF_DTYPE_BF16) return;
    for (int32_t i = 0; i < s->n_pieces; i++) announced |= data >= s->piece[i] && data + bytes <= s->piece[i] + s->piece_bytes[i];
    s->outside += !announced;
    if (s->in_run > 1 && s->end == data) s->joined++;
    else if (s->in_run > 1) s->parted++;
    s->in_run += s->in_run > 0;
    s->end = data + bytes;
}

static lf_status spy_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    spy *s = user;
    look_at(s, data, count, dtype);
    return s->inner.post(s->inner.user, data, count, dtype, stream, ticket);
}

static lf_status spy_scatter(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    spy *s = user;
    look_at(s, data, count, dtype);
    return s->inner.scatter(s->inner.user, data, count, dtype, stream, ticket);
}

static lf_status spy_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    const spy *s = user;
    return s->inner.wait(s->inner.user, ticket, stream, timeout_s);
}

static lf_status spy_run(void *user, int32_t open, const char *label)
{
    spy *s = user;
    (void)label;
    s->in_run = open;
    s->n_runs += open;
    return LF_OK;
}

static lf_status spy_memory(void *user, void *base, int64_t bytes)
{
    spy *s = user;
    s->piece[s->n_pieces % 16] = base;
    s->piece_bytes[s->n_pieces++ % 16] = bytes;
    return LF_OK;
}

static void spy_close(void *user)
{
    const spy *s = user;
    s->inner.close(s->inner.user);
}

static void watch(int32_t world, bool runs, bool scatters)
{
    for (int32_t i = 0; i < world; i++) {
        spies[i] = (spy){.inner = ranks[i].t};
        ranks[i].t = (lf_transport){.size = sizeof(lf_transport),
                                    .name = "loopback",
                                    .user = &spies[i],
                                    .rank = i,
                                    .world = world,
                                    .post = spy_post,
                                    .wait = spy_wait,
                                    .close = spy_close,
                                    .run = runs ? spy_run : NULL,
                                    .memory = spy_memory,
                                    .scatter = scatters ? spy_scatter : NULL};
    }
}

/* ---- ranks ------------------------------------------------------------------------------------------------------------- */

static const model_shape shape = {
    .high_load = 1, .n_layers = 3, .n_experts = 4, .embed = 1501, .norm = 33, .qkv = 701, .expert = 601, .expert_step = 1203};

static lf_map *make_map(const rank *r)
{
    model_shape m = shape;
    m.grad_f32 = r->grad_f32;
    return make_model(&m);
}

/* Blocks without padding between them: chunks of odd sizes at odd places. */
static lf_map *make_ragged(const rank *r)
{
    lf_map *map = NULL;
    lf_map_options o;
    MUST(lf_options_init("map", &o, sizeof o));
    o.align_elements = 1;
    o.grad_f32 = r->grad_f32;
    o.high_load_experts = 1;
    MUST(lf_map_open(&map, &o));
    add_param(map, "embed", shape.embed, LF_DTYPE_BF16, -1, -1, 0);
    for (int32_t l = 0; l < shape.n_layers; l++) add_layer(map, &shape, l);
    return plan_and_allocate(map);
}

static void prepare_wire(int32_t world, lf_map *(*make)(const rank *), void (*run)(rank *))
{
    prepare(world, make, run);
    for (int32_t i = 0; i < world; i++) {
        snprintf(ranks[i].opts.wire_dtype, LF_TEXT_MAX, "bf16");
        ranks[i].opts.run_bytes = 16384;
        ranks[i].steps = 6;
    }
}

static void run_well(int32_t world)
{
    run_ranks(world);
    all_are(world, LF_OK);
    for (int32_t i = 0; i < world; i++) CHECK_EQ(spies[i].outside, 0);
}

static int32_t count_form(const lf_nexus *nexus, const char *form)
{
    int32_t n = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(nexus); k++) n += strcmp(chunk_at(nexus, k).form, form) == 0;
    return n;
}

static void steps_and_bytes(rank *r)
{
    const int32_t bf16 = count_form(r->nexus, "bf16"), dense = count_form(r->nexus, "dense");
    if (bf16 + dense != lf_nexus_n_chunks(r->nexus) || bf16 == 0 || (dense == 0) != r->grad_f32)
        WRONG("%d chunks in bf16, %d dense", bf16, dense);
    wire_steps(r);
    lf_nexus_stats stats = {.size = sizeof stats};
    MUST(lf_nexus_get_stats(r->nexus, &stats));
    if (r->status == LF_OK && stats.bytes != r->steps * wire_sent(r->nexus))
        WRONG("%lld bytes in %d steps of %lld", (long long)stats.bytes, r->steps, (long long)wire_sent(r->nexus));
}

/* Marks in other orders on each rank, experts without tokens, NaN and infinities; on streams and without, in runs and chunk by chunk. */
TEST(wire_sums_like_a_serial_computation)
{
    for (int32_t world = 1; world <= 8; world += world < 4 ? 1 : 4)
        for (int32_t how = 0; how < 6; how++) {
            if (world > 4 ? how : world > 2 && how % 2 == world % 2) continue; /* many threads on few cores: part of it */
            prepare_wire(world, how & 1 ? make_ragged : make_map, steps_and_bytes);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].on_stream = how >= 2;
                ranks[i].grad_f32 = how != 3;
                ranks[i].opts.debug = how == 4;
                if (how == 1 || how == 5) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
            }
            watch(world, how == 0 || how == 3 || how == 5, false);
            run_well(world);
            for (int32_t i = 1; i < world; i++) CHECK_EQ(ranks[i].stats.bytes, ranks[0].stats.bytes);
        }
}

static void sent_is_half(rank *r)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        const bool narrowed = c.dtype == LF_DTYPE_F32;
        if (strcmp(c.form, narrowed ? "bf16" : "dense") != 0) WRONG("chunk %d of %s is %s", k, lf_dtype_name(c.dtype), c.form);
        if (c.sent_bytes != 2 * c.range.count) WRONG("chunk %d sends %lld bytes", k, (long long)c.sent_bytes);
        if (narrowed && strcmp(c.why, "wire_dtype is bf16") != 0) WRONG("chunk %d: %s", k, c.why);
    }
    wire_steps(r);
}

/* A step's posts of a run lie one behind another, whatever the classes and groups of its chunks: a transport may join them. */
TEST(wire_lies_in_the_order_of_posts)
{
    for (int32_t ragged = 0; ragged < 2; ragged++) {
        prepare_wire(2, ragged ? make_ragged : make_map, sent_is_half);
        watch(2, true, false);
        run_well(2);
        for (int32_t i = 0; i < 2; i++) {
            CHECK(spies[i].joined > 0 && spies[i].n_runs > 0);
            CHECK_EQ(spies[i].parted, 0);
            CHECK_EQ(spies[i].posts[LF_DTYPE_F32], 0);
            CHECK(spies[i].posts[LF_DTYPE_BF16] > 0);
        }
    }
}

/* As it was: gradients themselves are summed, and nothing else is announced. */
TEST(wire_is_not_there_unless_asked_for)
{
    int32_t pieces[2];
    for (int32_t bf16 = 0; bf16 < 2; bf16++) {
        prepare_wire(2, make_map, wire_steps);
        for (int32_t i = 0; i < 2 && !bf16; i++) CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "wire_dtype", "grad"));
        watch(2, true, false);
        run_well(2);
        pieces[bf16] = spies[0].n_pieces;
        CHECK_EQ(spies[0].posts[LF_DTYPE_BF16] > 0, bf16);
        CHECK_EQ(spies[0].posts[LF_DTYPE_F32] > 0, !bf16);
    }
    CHECK_EQ(pieces[1], pieces[0] + 1);
}

/* ---- beside sparse chunks ------------------------------------------------------------------------------------------------ */

static lf__hash128 sparse_hash[2][RANKS_MOST][8]; /* of all sparse chunks after a step, without bf16 and with it */

static void beside_sparse(rank *r)
{
    const bool bf16 = strcmp(r->opts.wire_dtype, "bf16") == 0;
    if (count_form(r->nexus, "sparse") == 0 || (count_form(r->nexus, "bf16") > 0) != bf16) WRONG("not the forms that were meant");
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        lf__hash128 all[2] = {{0}};
        r->status = wire_step(r, step);
        if (r->status == LF_OK) wire_check(r, step);
        for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
            const lf_chunk_info c = chunk_at(r->nexus, k);
            if (strcmp(c.form, "sparse") != 0) continue;
            all[1] = lf__hash(lf_map_address(r->map, &c.range, LF_ROLE_GRAD), (size_t)c.bytes, 0);
            all[0] = lf__hash(all, sizeof all, 0);
        }
        sparse_hash[bf16][r->t.rank][step] = all[0];
    }
}

/* Sparse chunks have the bits that they have without it, in warm-up and flushing steps too; the others go as bf16 in the same chain. */
TEST(wire_beside_sparse_chunks)
{
    for (int32_t how = 0; how < 4; how++) {
        const int32_t world = how < 2 ? 2 : 4;
        for (int32_t bf16 = 0; bf16 < 2; bf16++) {
            prepare_wire(world, how == 1 ? make_ragged : make_map, beside_sparse);
            for (int32_t i = 0; i < world; i++) {
                CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "comm_strategy", "sparse"));
                if (!bf16) CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "wire_dtype", "grad"));
                ranks[i].opts.sparse_warmup_steps = how == 2 ? 2 : 0;
                ranks[i].on_stream = how & 1;
                ranks[i].opts.debug = how == 3;
            }
            watch(world, how >= 2, false);
            run_well(world);
        }
        for (int32_t i = 0; i < world; i++) {
            CHECK(memcmp(sparse_hash[0][i], sparse_hash[1][i], 6 * sizeof sparse_hash[0][0][0]) == 0);
            CHECK(memcmp(sparse_hash[1][i], sparse_hash[1][0], 6 * sizeof sparse_hash[0][0][0]) == 0);
        }
    }
}

/* ---- what was kept back of chunks that were sparse ------------------------------------------------------------------------- */

static const float kept = 0x1p-6f; /* less than a bf16 step of 5, more than an f32 one */

static void add_kept_back(rank *r)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        nexus_chunk *c = &r->nexus->plan.chunks[k];
        if (c->form != NEXUS_BF16) continue;
        r->status = lf_device_alloc(device, (size_t)c->range.count * sizeof(float), (void **)&c->topk.residual);
        if (r->status < 0) return;
        for (int64_t i = 0; i < c->range.count; i++) c->topk.residual[i] = kept;
        c->own_residual = true;
        r->nexus->sparse.dirty = true;
    }
}

static lf_status step_of_fives(rank *r)
{
    lf_status rc = lf_nexus_begin(r->nexus);
    for (int32_t b = lf_map_n_blocks(r->map) - 1; b >= 0 && rc == LF_OK; b--) {
        const lf_block_info info = block_at(r->map, b);
        float *g = lf_map_address(r->map, &info.range, LF_ROLE_GRAD);
        for (int64_t i = 0; i < info.range.count; i++) g[i] = 5 + 0x1p-7f; /* half a bf16 step less `kept` */
        rc = lf_nexus_mark(r->nexus, b, r->stream);
    }
    return rc == LF_OK ? lf_nexus_finish(r->nexus, r->stream) : rc;
}

/* Added to the gradient in f32, before it is rounded. */
static void take_kept_back(rank *r)
{
    add_kept_back(r);
    for (int32_t step = 0; step < 2 && r->status == LF_OK; step++) {
        r->status = step_of_fives(r);
        const float want = step ? 5 : 5 + 0x1p-5f;
        for (int32_t b = 0; b < lf_map_n_blocks(r->map) && r->status == LF_OK; b++) {
            const lf_block_info info = block_at(r->map, b);
            const float *g = lf_map_address(r->map, &info.range, LF_ROLE_GRAD);
            for (int64_t i = 0; i < info.range.count; i++)
                if (g[i] != want)
                    WRONG("step %d %s[%d]: %.9g, expected %.9g", step, info.name, (int)i, (double)g[i], (double)want);
        }
    }
}

TEST(wire_takes_residuals_along)
{
    prepare_wire(2, make_map, take_kept_back);
    watch(2, false, false);
    run_well(2);
}

/* ---- another schedule ------------------------------------------------------------------------------------------------------ */

static void change_sizes(rank *r)
{
    static const int64_t sizes[] = {4096, 32768, 8192, 1ll << 40, 4096};
    const void *wire = r->nexus->wire;
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && r->status == LF_OK; i++) {
        if (i > 0) r->status = lf_nexus_retune(r->nexus, sizes[i], r->stream);
        for (int32_t step = 2 * i; step < 2 * i + 2 && r->status == LF_OK; step++) {
            r->status = wire_step(r, step);
            if (r->status == LF_OK) wire_check(r, step);
        }
    }
    if (r->nexus->wire != wire || spies[r->t.rank].n_pieces > 4) WRONG("the wire was made anew");
}

TEST(wire_survives_another_chunk_size)
{
    for (int32_t how = 0; how < 4; how++) {
        prepare_wire(4, how == 1 ? make_ragged : make_map, change_sizes);
        for (int32_t i = 0; i < 4; i++) {
            ranks[i].on_stream = how >= 2;
            ranks[i].grad_f32 = how != 2;
            ranks[i].opts.shard_optimizer = how == 3;
        }
        watch(4, how != 1, how == 3);
        run_well(4);
    }
}

static void tune(rank *r)
{
    lf_tuning_info info = {.size = sizeof info};
    int32_t changed, changes = 0;
    for (int32_t step = 0; step < 200 && r->status == LF_OK && !info.settled; step++, changes += changed) {
        changed = 0;
        r->status = lf_nexus_tune_begin(r->nexus, r->stream);
        if (r->status == LF_OK) r->status = wire_step(r, step);
        if (r->status == LF_OK) wire_check(r, step);
        if (r->status == LF_OK) r->status = lf_nexus_tune_end(r->nexus, r->stream, 1, &changed);
        if (r->status == LF_OK) r->status = lf_nexus_get_tuning(r->nexus, &info);
    }
    if (r->status == LF_OK && (!info.settled || changes < 2)) WRONG("settled %d after %d changes", info.settled, changes);
}

TEST(wire_is_tuned)
{
    prepare_wire(2, make_map, tune);
    for (int32_t i = 0; i < 2; i++) {
        ranks[i].opts.chunk_tune = 1;
        ranks[i].opts.chunk_least = 4096;
        ranks[i].opts.chunk_most = 65536;
    }
    watch(2, false, false);
    run_well(2);
}

/* ---- shares, empty experts -------------------------------------------------------------------------------------------------- */

static void whole_from_shares(rank *r)
{
    wire_steps(r);
    if (r->status == LF_OK) r->status = lf_nexus_gather(r->nexus, LF_ROLE_GRAD, 0, lf_nexus_n_chunks(r->nexus), r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_gathered(r->nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus) && r->status == LF_OK; k++) {
        lf_chunk_info c = chunk_at(r->nexus, k);
        c.share = c.range; /* everyone's */
        for (int32_t b = 0; b < lf_map_n_blocks(r->map); b++) wire_check_block(r, &c, r->steps - 1, b);
    }
}

/* A rank widens its own share and the rest; then all of them are everyone's. With a scatter and without one. */
TEST(wire_in_shares)
{
    for (int32_t how = 0; how < 4; how++) {
        const int32_t world = how & 1 ? 4 : 2;
        prepare_wire(world, make_map, whole_from_shares);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].opts.shard_optimizer = 1;
            ranks[i].on_stream = how & 1;
        }
        watch(world, how == 2, how >= 2);
        run_well(world);
        CHECK(spies[0].posts[LF_DTYPE_BF16] > 0 && spies[0].posts[LF_DTYPE_F32] == 0);
    }
}

static void with_empty_experts(rank *r)
{
    lf_nexus_stats stats = {.size = sizeof stats};
    wire_steps(r);
    MUST(lf_nexus_get_stats(r->nexus, &stats));
    if (r->status == LF_OK && (stats.skipped == 0 || stats.bytes + stats.skipped_bytes != r->steps * wire_sent(r->nexus)))
        WRONG("%lld chunks skipped, %lld and %lld bytes of %lld a step", (long long)stats.skipped, (long long)stats.bytes,
              (long long)stats.skipped_bytes, (long long)wire_sent(r->nexus));
}

TEST(wire_skips_empty_experts)
{
    for (int32_t how = 0; how < 2; how++) {
        prepare_wire(2, make_map, with_empty_experts);
        for (int32_t i = 0; i < 2; i++) {
            ranks[i].opts.skip_empty = 1;
            ranks[i].on_stream = how;
        }
        watch(2, how, false);
        run_well(2);
    }
}

/* ---- reports and refusals --------------------------------------------------------------------------------------------------- */

static void newest_collectives(rank *r)
{
    lf_collective_info info = {.size = sizeof info};
    wire_steps(r);
    const int32_t n = lf_nexus_n_chunks(r->nexus);
    for (int32_t back = 0; back < n && r->status == LF_OK; back++) {
        r->status = lf_nexus_get_recent(r->nexus, back, &info);
        const lf_chunk_info c = chunk_at(r->nexus, n - 1 - back);
        if (info.chunk != n - 1 - back || info.dtype != LF_DTYPE_BF16 || info.bytes != c.sent_bytes)
            WRONG("collective %d is of chunk %d, %s, %lld bytes", back, info.chunk, lf_dtype_name(info.dtype),
                  (long long)info.bytes);
    }
}

TEST(wire_is_traced)
{
    prepare_wire(2, make_map, newest_collectives);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.chunk_bytes = 16384;
    watch(2, false, false);
    run_well(2);
}

static void nothing(rank *r) { (void)r; }

TEST(wire_is_agreed_on)
{
    prepare_wire(2, make_map, nothing);
    CHECK_OK(lf_options_set("nexus", &ranks[1].opts, "wire_dtype", "grad"));
    run_ranks(2);
    all_are(2, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "different [nexus] options");
    CHECK_HAS(ranks[0].text, "wire_dtype bf16");
    CHECK_HAS(ranks[1].text, "wire_dtype grad");
    prepare_wire(2, make_map, nothing); /* the same options, another link: one in bf16, one in f32 */
    for (int32_t i = 0; i < 2; i++) {
        ranks[i].opts.link_mb_s = i ? 10000 : 80;
        ranks[i].opts.topk_mb_s = 1;
    }
    run_ranks(2);
    all_are(2, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "different [nexus] options");
}

TEST(wire_refuses_other_words)
{
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_STR(opts.wire_dtype, "grad");
    CHECK_STATUS(lf_options_set("nexus", &opts, "wire_dtype", "fp8"), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "wire_dtype");
    CHECK_HAS(lf_error_text(), "grad|bf16");
}

/* Rounded in order of the stream that marks: the recorder waits for it and sees what travels. */
TEST(wire_is_made_in_order_of_the_marking_stream)
{
    set_up();
    recorder rec;
    const lf_transport t = recorder_end(&rec);
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_stream *stream;
    lf_map *map = make_layers(3, 1000);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "wire_dtype", "bf16"));
    opts.chunk_bytes = 4096; /* one layer */
    CHECK_OK(lf_nexus_open(&nexus, map, &t, &opts));
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_nexus_begin(nexus));
    for (int32_t b = 2; b >= 0; b--) {
        const lf_block_info info = block_at(map, b);
        float *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
        g[0] = 1 + (float)b + 0x1p-12f;
        CHECK_OK(lf_nexus_mark(nexus, b, stream));
        CHECK(rec.seen[2 - b] == 1 + (float)b);
    }
    CHECK_OK(lf_nexus_finish(nexus, stream));
    CHECK_OK(lf_stream_sync(stream));
    for (int32_t b = 0; b < 3; b++) {
        const lf_block_info info = block_at(map, b);
        CHECK(*(float *)lf_map_address(map, &info.range, LF_ROLE_GRAD) == 1 + (float)b);
    }
    lf_nexus_close(nexus);
    lf_stream_close(stream);
    lf_map_unref(map);
}

static lf_status sleep_30_ms(void *user)
{
    (void)user;
    lf__sleep_ns(30000000);
    return LF_OK;
}

/* Another schedule comes when the last step is through, also what is queued of it: its chunks would be gone. */
TEST(wire_waits_for_a_step_before_the_next_schedule)
{
    set_up();
    recorder rec;
    const lf_transport t = recorder_end(&rec);
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_stream *stream;
    lf_map *map = make_layers(1, 1000);
    float *g = lf_map_address(map, &(lf_range){.klass = 0, .count = 1000}, LF_ROLE_GRAD);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "wire_dtype", "bf16"));
    CHECK_OK(lf_nexus_open(&nexus, map, &t, &opts));
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_nexus_begin(nexus));
    g[0] = 1 + 0x1p-12f;
    CHECK_OK(lf_nexus_mark(nexus, 0, stream));
    CHECK_OK(lf_stream_run(stream, sleep_30_ms, NULL));
    CHECK_OK(lf_nexus_finish(nexus, stream));
    CHECK_OK(lf_nexus_retune(nexus, 4096, stream));
    CHECK(g[0] == 1);
    lf_nexus_close(nexus);
    lf_stream_close(stream);
    lf_map_unref(map);
}

/* ---- memory ----------------------------------------------------------------------------------------------------------------- */

static int64_t failed_at; /* that open needs, or a step */

static void count_allocations(rank *r)
{
    wire_steps(r); /* whatever grows has grown */
    lf__alloc_fail_at(0);
    for (int32_t step = 0; step < 3 && r->status == LF_OK; step++) r->status = wire_step(r, step);
    failed_at = lf__alloc_fail_at(0);
}

TEST(wire_allocates_nothing_in_a_step)
{
    prepare_wire(1, make_map, count_allocations);
    watch(1, true, false);
    run_well(1);
    CHECK_EQ(failed_at, 0);
}

TEST(wire_opens_whole_or_not_at_all)
{
    set_up();
    recorder rec;
    lf_nexus_options opts;
    lf_nexus *nexus;
    lf_map *map = make_layers(3, 1000);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "wire_dtype", "bf16"));
    lf_status rc = LF_ERR_NOMEM;
    int32_t failures = 0;
    for (int64_t at = 1; rc != LF_OK; at++, failures++) {
        const lf_transport t = recorder_end(&rec);
        lf__alloc_fail_at(at);
        rc = lf_nexus_open(&nexus, map, &t, &opts);
        lf__alloc_fail_at(0);
        if (rc != LF_OK) CHECK_EQ(rc, LF_ERR_NOMEM);
    }
    CHECK(failures > 5);
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_device_close(device);
}

LF_TEST_MAIN
