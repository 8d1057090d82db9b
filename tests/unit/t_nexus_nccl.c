/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL transport over a fake NCCL on a fake CUDA device (tests/fakes): sums, order, runs, captures, and every way to fail. */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

#include "base/base.h"
#include "fakes/fake_cuda.h"
#include "fakes/fake_nccl.h"
#include "lf_test.h"
#include "loongforge/nexus.h"

enum { MOST = 4, ROOM = 10000 };

/* ---- the fakes, found as the library finds them ---- */

static struct {
    int (*plant)(const char *, long);
    long (*count)(const char *);
    void (*capture)(uint64_t);
    int32_t (*last_priority)(void);
} fake;

#define FIND(field, library, name)                       \
    do {                                                 \
        void *found_ = dlsym(library, name);             \
        if (!found_) FAIL_("%s: %s", name, dlerror());   \
        memcpy(&fake.field, &found_, sizeof fake.field); \
    } while (0)

static void plant(const char *name, long value)
{
    if (fake.plant(name, value) != 0) fprintf(stderr, "no fault '%s' to plant\n", name);
}

static lf_device *device(void)
{
    static lf_device *cuda;
    if (cuda) return cuda;
    if (lf_device_open(&cuda, "cuda:0") < 0) fprintf(stderr, "%s\n", lf_error_text());
    return cuda;
}

static void set_up(void)
{
    if (!fake.plant) {
        void *nccl = dlopen("libnccl.so.2", RTLD_NOW), *cuda = dlopen("libloongforge_cuda.so", RTLD_NOW);
        if (!nccl || !cuda) FAIL_("%s", dlerror());
        FIND(plant, nccl, "fake_nccl_plant");
        FIND(count, nccl, "fake_nccl_count");
        FIND(capture, cuda, "fake_cuda_capture");
        FIND(last_priority, cuda, "fake_cuda_last_priority");
    }
    static const char *const faults[] = {"init", "async_error", "refuse", "call_hangs", "abort_hangs", "finalize", "registered"};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) plant(faults[i], 0);
    plant("rank", -1);
    plant("version", 22809);
    fake.capture(0);
    CHECK(device() != NULL);
}

/* ---- ranks as threads ---- */

typedef struct rank {
    lf_transport t;
    lf_nexus_options opts;
    lf_stream *stream;
    void (*run)(struct rank *rank);
    const uint8_t *id;
    int32_t rank, world;
    lf_status status;
    char text[600], wrong[300];
    lf__thread *thread;
} rank;

static rank ranks[MOST];
#define WRONG(...) snprintf(r->wrong, sizeof r->wrong, __VA_ARGS__)

static void options(lf_nexus_options *o)
{
    if (lf_options_init("nexus", o, sizeof *o) < 0) fprintf(stderr, "%s\n", lf_error_text());
    o->timeout_s = 20;
    snprintf(o->reduce, sizeof o->reduce, "sum");
    snprintf(o->fail, sizeof o->fail, "error");
}

static void enter(void *user)
{
    rank *r = user;
    r->status = lf_stream_open(device(), 0, &r->stream);
    if (r->status == LF_OK) r->status = lf_nccl_open(&r->opts, device(), r->rank, r->world, r->id, &r->t);
    if (r->status == LF_OK) {
        r->run(r);
        if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
        if (r->t.close) r->t.close(r->t.user);
    } else {
        snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    }
    lf_stream_close(r->stream);
}

static uint8_t id[LF_NCCL_ID_BYTES];

static void prepare(int32_t world, void (*run)(rank *))
{
    set_up();
    CHECK_OK(lf_nccl_id(NULL, id));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] = (rank){.run = run, .rank = i, .world = world, .id = id};
        options(&ranks[i].opts);
    }
}

static void run_ranks(int32_t world)
{
    for (int32_t i = 0; i < world; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", enter, &ranks[i]));
    for (int32_t i = 0; i < world; i++) lf__thread_join(ranks[i].thread);
    for (int32_t i = 0; i < world; i++) CHECK_STR(ranks[i].wrong, "");
}

static void all_are(int32_t world, lf_status status)
{
    for (int32_t i = 0; i < world; i++)
        if (ranks[i].status != status) FAIL_("rank %d: %s: %s", i, lf_status_name(ranks[i].status), ranks[i].text);
}

/* ---- values ---- */

static float value(int32_t from, int32_t op, int64_t i) { return (float)((from * 31 + op * 17 + i * 7) % 101 - 50) / 8; }

static void put(void *data, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)data)[i] = v;
    else if (dtype == LF_DTYPE_BF16) ((uint16_t *)data)[i] = lf__bf16_from_f32(v);
    else ((int64_t *)data)[i] = (int64_t)v;
}

static float get(const void *data, int64_t i, int32_t dtype)
{
    if (dtype == LF_DTYPE_F32) return ((const float *)data)[i];
    return dtype == LF_DTYPE_BF16 ? lf__f32_from_bf16(((const uint16_t *)data)[i]) : (float)((const int64_t *)data)[i];
}

static const int32_t dtypes[] = {LF_DTYPE_F32, LF_DTYPE_BF16, LF_DTYPE_I64}; /* f64: nccl_sums_beside_steps */
static const int64_t counts[] = {0, 1, 3, 4095, 4096, 9999};
enum { N_OPS = 18 };

static void fill(const rank *r, void **data)
{
    for (int32_t op = 0; op < N_OPS; op++) {
        data[op] = lf__alloc(ROOM * 8);
        for (int64_t i = 0; i < counts[op % 6]; i++) put(data[op], i, dtypes[op % 3], value(r->rank, op, i));
    }
}

static void check(rank *r, void **data, float divisor)
{
    for (int32_t op = 0; op < N_OPS; op++) {
        const int32_t dtype = dtypes[op % 3];
        for (int64_t i = 0; i < counts[op % 6]; i++) {
            float want = 0;
            for (int32_t k = 0; k < r->world; k++)
                want += dtype == LF_DTYPE_I64 ? (float)(int64_t)value(k, op, i) : value(k, op, i) / divisor;
            if (dtype == LF_DTYPE_BF16) want = lf__f32_from_bf16(lf__bf16_from_f32(want));
            if (get(data[op], i, dtype) != want)
                WRONG("operation %d element %d: %g, expected %g", op, (int)i, (double)get(data[op], i, dtype), (double)want);
        }
        lf__free(data[op]);
    }
}

/* ---- sums ---- */

/* A third of the operations alone, the others in runs of five and seven. */
static void post_all_then_wait(rank *r)
{
    void *data[N_OPS];
    int64_t ticket[N_OPS];
    fill(r, data);
    for (int32_t op = 0; op < N_OPS && r->status == LF_OK; op++) {
        if (op == 6 || op == 11) r->status = r->t.run(r->t.user, 1, "a test's run");
        if (r->status == LF_OK)
            r->status = r->t.post(r->t.user, data[op], counts[op % 6], dtypes[op % 3], r->stream, &ticket[op]);
        if (r->status == LF_OK && (op == 10 || op == 17)) r->status = r->t.run(r->t.user, 0, "a test's run");
    }
    for (int32_t op = 0; op < N_OPS && r->status == LF_OK; op++) r->status = r->t.wait(r->t.user, ticket[op], r->stream, 30);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (r->status == LF_OK && ticket[6] != ticket[10]) WRONG("a run has several tickets");
    if (r->status == LF_OK && r->t.query(r->t.user, ticket[17]) != LF_OK) WRONG("the last run is not known to be done");
    check(r, data, r->t.mean ? (float)r->world : 1);
}

TEST(nccl_sums)
{
    for (int32_t how = 0; how < 3; how++)
        for (int32_t world = 1; world <= MOST; world++) {
            prepare(world, post_all_then_wait);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].opts.nccl_blocking = how != 1;
                if (how == 2 && world != 3) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean"); /* thirds are not exact */
            }
            run_ranks(world);
            all_are(world, LF_OK);
            CHECK_EQ(fake.count("blocking"), how != 1);
            for (int32_t i = 0; i < world; i++) CHECK_EQ(ranks[i].t.mean, how == 2 && world != 3 && world > 1);
        }
    CHECK_EQ(fake.count("aborts"), 0);
}

/* Versions before 2.14 have one way to open, and no limits. */
TEST(nccl_opens_old_versions)
{
    prepare(2, post_all_then_wait);
    plant("version", 21003);
    run_ranks(2);
    all_are(2, LF_OK);
    prepare(1, post_all_then_wait);
    plant("version", 21600);
    ranks[0].opts.max_ctas = 4;
    run_ranks(1);
    CHECK_EQ(ranks[0].status, LF_ERR_UNSUPPORTED);
    CHECK_HAS(ranks[0].text, "max_ctas is 4, which NCCL 2.16.0 cannot limit");
}

TEST(nccl_takes_its_options)
{
    prepare(2, post_all_then_wait);
    for (int32_t i = 0; i < 2; i++) {
        ranks[i].opts.max_ctas = 6;
        ranks[i].opts.priority = -3;
    }
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("max_ctas"), 6);
    CHECK_EQ(fake.last_priority(), -3);
    prepare(1, post_all_then_wait);
    ranks[0].opts.priority = 3;
    run_ranks(1);
    CHECK_EQ(ranks[0].status, LF_ERR_INVALID);
    CHECK_HAS(ranks[0].text, "stream priority 3");
}

/* ---- order between streams ---- */

static lf_status make_data(void *user)
{
    lf__sleep_ns(30000000);
    *(float *)user = 5;
    return LF_OK;
}

/* The sum comes behind the data and in front of what follows; the host waits for neither. */
static void in_stream_order(rank *r)
{
    float x = -100, after = 0;
    int64_t ticket = 0;
    r->status = lf_stream_run(r->stream, make_data, &x);
    if (r->status == LF_OK) r->status = r->t.post(r->t.user, &x, 1, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 30);
    if (r->t.query(r->t.user, ticket) != LF_AGAIN) WRONG("posting or waiting kept the host");
    if (r->status == LF_OK) r->status = lf_copy(device(), &after, &x, sizeof x, r->stream);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (after != 10) WRONG("behind the sum is %g", (double)after);
}
TEST(nccl_orders_streams)
{
    prepare(2, in_stream_order);
    run_ranks(2);
    all_are(2, LF_OK);
}

/* A host far ahead of the device: more runs than the ring has at first; waits come in order and late. */
static void far_ahead(rank *r)
{
    enum { RUNS = 700 };
    static float x[MOST][RUNS];
    int64_t ticket[RUNS];
    lf_nexus_stats stats = {.size = sizeof stats};
    for (int32_t i = 0; i < RUNS; i++) x[r->rank][i] = (float)(r->rank + i);
    for (int32_t i = 0; i < RUNS && r->status == LF_OK; i++)
        r->status = r->t.post(r->t.user, &x[r->rank][i], 1, LF_DTYPE_F32, NULL, &ticket[i]);
    for (int32_t i = 0; i < RUNS && r->status == LF_OK; i++) r->status = r->t.wait(r->t.user, ticket[i], r->stream, 30);
    if (r->status == LF_OK) r->status = r->t.settle(r->t.user, 30);
    for (int32_t i = 0; i < RUNS; i++)
        if (x[r->rank][i] != (float)(2 * i + 1)) WRONG("sum %d is %g", i, (double)x[r->rank][i]);
    if (r->status == LF_OK) r->status = r->t.stats(r->t.user, &stats);
    if (stats.collectives != RUNS || stats.bytes != 4 * RUNS || !(stats.busy_s > 0 && stats.p99_s >= stats.p50_s))
        WRONG("statistics: %d collectives, %d bytes, %g s", (int)stats.collectives, (int)stats.bytes, stats.busy_s);
}
TEST(nccl_lets_the_host_run_ahead)
{
    prepare(2, far_ahead);
    run_ranks(2);
    all_are(2, LF_OK);
}

/* Neighbours of a run are one call; a gap, another dtype, another collective and the end of a run part them. */
static void joined(rank *r)
{
    enum { N = 4096 };
    static _Alignas(8) float x[MOST][2 * N];
    float *data = x[r->rank];
    int64_t ticket[2], whole[N / 32];
    for (int32_t i = 0; i < 2 * N; i++) data[i] = (float)(i % 7 + r->rank);
    for (int32_t i = 0; i < N / 32; i++) whole[i] = i + r->rank;
    for (int32_t run = 0; run < 2 && r->status == LF_OK; run++) {
        float *from = data + run * N;
        memcpy(from + 7 * N / 16, whole, sizeof whole);
        r->status = r->t.run(r->t.user, 1, "neighbours");
        for (int32_t at = 0; at < N && r->status == LF_OK; at += N / 8) /* 3 and 4 neighbours around a gap */
            if (at != 3 * N / 8) r->status = r->t.post(r->t.user, from + at, N / 8, LF_DTYPE_F32, r->stream, &ticket[run]);
        if (r->status == LF_OK)
            r->status = r->t.scatter(r->t.user, from + 3 * N / 8, N / 16, LF_DTYPE_F32, r->stream, &ticket[run]);
        if (r->status == LF_OK)
            r->status = r->t.post(r->t.user, from + 7 * N / 16, N / 32, LF_DTYPE_I64, r->stream, &ticket[run]);
        if (r->status == LF_OK) r->status = r->t.run(r->t.user, 0, NULL);
    }
    for (int32_t run = 0; run < 2 && r->status == LF_OK; run++) r->status = r->t.wait(r->t.user, ticket[run], r->stream, 30);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    for (int32_t i = 0; i < 2 * N; i++)
        if (i % N / (N / 8) != 3 && data[i] != (float)(2 * (i % 7) + 1)) WRONG("sum %d is %g", i, (double)data[i]);
    for (int32_t run = 0; run < 2; run++) {
        memcpy(whole, data + run * N + 7 * N / 16, sizeof whole);
        for (int32_t i = 0; i < N / 32; i++)
            if (whole[i] != 2 * i + 1) WRONG("whole sum %d is %lld", i, (long long)whole[i]);
    }
}
TEST(nccl_joins_neighbours)
{
    prepare(2, joined);
    const long calls = fake.count("calls");
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("calls") - calls, 2 * 2 * 4); /* ranks, runs, calls */
}

/* ---- under NexusSync ---- */

static lf_map *make_map_with(const lf_map_options *opts)
{
    lf_map *map = NULL;
    char name[32];
    if (lf_map_open(&map, opts) < 0) return NULL;
    for (int32_t l = 0; l < 3; l++)
        for (int32_t e = -1; e < 4; e++) {
            const int64_t count = 900 + 300 * e;
            snprintf(name, sizeof name, "l%d.e%d", l, e);
            lf_param p = {.size = sizeof p,
                          .name = name,
                          .shape = &count,
                          .ndim = 1,
                          .dtype = e < 0 ? LF_DTYPE_F32 : LF_DTYPE_BF16,
                          .layer = l,
                          .expert = e,
                          .tied_to = -1};
            if (lf_map_add(map, &p, NULL) < 0) fprintf(stderr, "%s\n", lf_error_text());
        }
    if (lf_map_plan(map) < 0 || lf_map_allocate(map, device()) < 0) fprintf(stderr, "%s\n", lf_error_text());
    return map;
}

static lf_map *make_map(void) { return make_map_with(NULL); }

static float *grad_of(const lf_map *map, int32_t block, int64_t *n)
{
    lf_block_info b = {.size = sizeof b};
    if (lf_map_get_block(map, block, &b) < 0) return NULL;
    *n = b.range.count;
    return lf_map_address(map, &b.range, LF_ROLE_GRAD); /* f32: the default of [map] */
}

static bool is_late(int32_t rank_, int32_t step, int32_t block) { return block % 5 != 0 && (rank_ + step + block) % 3 == 0; }

static lf_status one_step(rank *r, lf_nexus *nexus, lf_map *map, int32_t step)
{
    lf_status rc = lf_nexus_begin(nexus);
    for (int32_t k = lf_map_n_blocks(map) - 1; k >= 0 && rc == LF_OK; k--) {
        int64_t n = 0;
        const int32_t block = r->rank % 2 && (k ^ 1) < lf_map_n_blocks(map) ? k ^ 1 : k;
        float *g = grad_of(map, block, &n);
        for (int64_t i = 0; i < n; i++) g[i] = value(r->rank, step * 100 + block, i);
        if (!is_late(r->rank, step, block)) rc = lf_nexus_mark(nexus, block, r->stream);
    }
    if (rc == LF_OK && step % 2) rc = lf_nexus_flush(nexus, r->stream); /* taken run by run, or as one */
    for (int32_t first, n; rc == LF_OK && step % 2 && (rc = lf_nexus_take(nexus, r->stream, &first, &n)) == LF_OK;)
        ;
    if (rc == LF_END) rc = LF_OK;
    else if (rc == LF_OK) rc = lf_nexus_finish(nexus, r->stream);
    if (rc == LF_OK && r->opts.shard_optimizer) { /* every share to everyone: then all sums are there again */
        rc = lf_nexus_gather(nexus, LF_ROLE_GRAD, 0, lf_nexus_n_chunks(nexus), r->stream);
        if (rc == LF_OK) rc = lf_nexus_gathered(nexus, r->stream);
    }
    return rc == LF_OK ? lf_stream_sync(r->stream) : rc;
}

static void check_step(rank *r, const lf_map *map, int32_t step)
{
    for (int32_t block = 0; block < lf_map_n_blocks(map); block++) {
        int64_t n = 0;
        const float *g = grad_of(map, block, &n);
        for (int64_t i = 0; i < n; i++) {
            float want = 0;
            for (int32_t s = 0; s < r->world; s++)
                want += is_late(s, step, block) ? 0 : value(s, step * 100 + block, i) / (float)r->world;
            if (g[i] != want)
                WRONG("rank %d step %d block %d [%d]: %g, expected %g", r->rank, step, block, (int)i, (double)g[i], (double)want);
        }
    }
}

/* The order of marks differs between ranks, and so does who is late: groups are the same all the same, or the fake complains. */
static void steps_of_nexus(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    lf_nexus_stats stats = {.size = sizeof stats};
    char text[400] = "";
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    for (int32_t step = 0; step < 6 && r->status == LF_OK; step++) {
        r->status = one_step(r, nexus, map, step);
        if (r->status == LF_OK) check_step(r, map, step);
    }
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    if (r->status == LF_OK) r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK) r->status = lf_nexus_get_stats(nexus, &stats);
    if (r->status == LF_OK && (stats.steps != 6 || stats.late_blocks == 0 || !(stats.busy_s > 0) || !(stats.exposed_s > 0)))
        WRONG("statistics: %d steps, busy %g s, exposed %g s", (int)stats.steps, stats.busy_s, stats.exposed_s);
    if (r->status == LF_OK && !strstr(text, "NCCL 2.28.9 (loaded already), rank")) WRONG("describes itself as %s", text);
    if (r->status == LF_OK &&
        !strstr(text, r->opts.register_buffers ? "2 gradient planes registered" : "register_buffers is false"))
        WRONG("describes itself as %s", text);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nccl_under_nexus)
{
    for (int32_t how = 0; how < 6; how++) {
        const int32_t world = how == 3 || how == 5 ? 4 : 2;
        prepare(world, steps_of_nexus);
        for (int32_t i = 0; i < MOST; i++) {
            ranks[i].opts.shard_optimizer = how >= 4;
            ranks[i].opts.chunk_bytes = 4096;
            ranks[i].opts.run_bytes = how == 1 ? 4096 : 1 << 20;
            ranks[i].opts.register_buffers = how != 2;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
        CHECK_EQ(fake.count("registered"), 0); /* all given back */
    }
    CHECK(fake.count("groups") > 0);
}

/* Times come from the device's events; sizes change until one stays, then once more by hand. */
static void tuned_steps(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    lf_tuning_info info = {.size = sizeof info};
    int32_t changes = 0, changed, step = 0;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    for (; step < 200 && r->status == LF_OK && !info.settled; step++, changes += changed) {
        changed = 0;
        r->status = lf_nexus_tune_begin(nexus, r->stream);
        if (r->status == LF_OK) r->status = one_step(r, nexus, map, step);
        if (r->status == LF_OK) check_step(r, map, step);
        if (r->status == LF_OK) r->status = lf_nexus_tune_end(nexus, r->stream, 1, &changed);
        if (r->status == LF_OK) r->status = lf_nexus_get_tuning(nexus, &info);
    }
    if (r->status == LF_OK && (!info.settled || info.n_sizes < 2 || !(info.first_s > 0) || !(info.chunk_s > 0)))
        WRONG("after %d steps: settled %d, %d sizes, %g and %g s", step, info.settled, info.n_sizes, info.first_s, info.chunk_s);
    if (changes < info.n_sizes - 1) WRONG("%d sizes, %d changes", info.n_sizes, changes);
    if (r->status == LF_OK) r->status = lf_nexus_retune(nexus, 8192, r->stream);
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 300);
    if (r->status == LF_OK) check_step(r, map, 300);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nccl_changes_the_chunk_size)
{
    for (int32_t how = 0; how < 3; how++) { /* plain, four ranks, in shares */
        const int32_t world = how == 1 ? 4 : 2;
        prepare(world, tuned_steps);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].opts.shard_optimizer = how == 2;
            ranks[i].opts.chunk_bytes = ranks[i].opts.chunk_least = 4096;
            ranks[i].opts.chunk_tune = 1;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
    }
}

/* One rank cannot register: none does, and it says why. */
static void one_cannot_register(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    char text[400] = "";
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    if (r->status == LF_OK) r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK &&
        !strstr(text, r->rank ? "1 of 2 ranks could (here: unhandled system error)" : "1 of 2 ranks could (here: no error)"))
        WRONG("describes itself as %s", text);
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 0);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}
TEST(nccl_registers_all_or_none)
{
    prepare(2, one_cannot_register);
    plant("rank", 1);
    plant("registered", 2);
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("registered"), 0);
}

/* ---- the sparse form ---- */

/* What is left after each step, and what would have been without it; the last step takes along what was kept back. */
static void sparse_steps(rank *r)
{
    lf_map_options map_opts;
    lf_nexus *nexus = NULL;
    double have = 0, want = 0, after_five = 0;
    char text[400] = "";
    r->status = lf_options_init("map", &map_opts, sizeof map_opts);
    map_opts.high_load_experts = 1;
    lf_map *map = make_map_with(&map_opts);
    if (r->status == LF_OK) r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    for (int32_t step = 0; step < 6 && r->status == LF_OK; step++) {
        if (step == 5) r->status = lf_nexus_residual_flush(nexus);
        if (r->status == LF_OK) r->status = one_step(r, nexus, map, step);
        for (int32_t block = 0; block < lf_map_n_blocks(map) && r->status == LF_OK; block++) {
            int64_t n = 0;
            const float *g = grad_of(map, block, &n);
            for (int64_t i = 0; i < n; i++) {
                have += (double)g[i];
                for (int32_t s = 0; s < r->world; s++)
                    want += is_late(s, step, block) ? 0 : (double)value(s, step * 100 + block, i) / r->world;
            }
        }
        if (step == 4) after_five = have - want;
    }
    if (r->status == LF_OK && have != want) WRONG("after a flush %g, expected %g", have, want);
    if (r->status == LF_OK && after_five == 0) WRONG("nothing was kept back");
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    if (r->status == LF_OK) r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK && !strstr(text, "3 gradient planes registered")) WRONG("describes itself as %s", text);
    fake.capture(7);
    if (r->status == LF_OK) r->status = lf_nexus_begin(nexus);
    lf_status rc = LF_OK;
    for (int32_t k = lf_map_n_blocks(map) - 1; k >= 0 && r->status == LF_OK && rc == LF_OK; k--)
        rc = lf_nexus_mark(nexus, k, r->stream);
    if (r->status == LF_OK && rc != LF_ERR_UNSUPPORTED) WRONG("a sparse step was captured: %s", lf_status_name(rc));
    if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nccl_sums_sparse_chunks)
{
    for (int32_t how = 0; how < 4; how++) {
        const int32_t world = how < 2 ? 2 : 4;
        prepare(world, sparse_steps);
        for (int32_t i = 0; i < world; i++) {
            snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
            ranks[i].opts.chunk_bytes = 4096;
            ranks[i].opts.run_bytes = how & 1 ? 4096 : 1 << 20;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
        fake.capture(0);
    }
}

/* ---- capture ---- */

static void captured_step(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    lf_nexus_stats before = {.size = sizeof before}, after = before;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 0);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    lf_nexus_get_stats(nexus, &before);
    if (lf_nexus_replayed(nexus, r->stream) != LF_ERR_STATE) WRONG("a replay before anything was captured");
    fake.capture(7); /* both ranks do, or the other's runs are captured too: no harm */
    for (int32_t again = 0; again < 2 && r->status == LF_OK; again++) {
        fake.capture(7 + (uint64_t)again);
        r->status = one_step(r, nexus, map, 1 + again);
        if (r->status == LF_OK) check_step(r, map, 1 + again);
    }
    lf__sleep_ns(60000000); /* the worker has looked a few times; a captured event would have failed it */
    if (r->status == LF_OK) r->status = lf_nexus_check(nexus);
    lf_nexus_get_stats(nexus, &after);
    if (after.steps != before.steps || after.collectives != before.collectives) WRONG("capturing counts as a step");
    fake.capture(0);
    const double exposed_s = after.exposed_s;
    for (int32_t i = 0; i < 100 && r->status == LF_OK; i++) r->status = lf_nexus_replayed(nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    lf_nexus_get_stats(nexus, &after);
    if (after.exposed_s != exposed_s) WRONG("waits of replays are told by a step clock");
    if (after.steps != before.steps + 100 || after.collectives != before.collectives * 101) WRONG("replays are not counted");
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 5); /* eager again */
    if (r->status == LF_OK) check_step(r, map, 5);
    if (r->status == LF_OK) r->status = lf_nexus_retune(nexus, 16384, r->stream);
    if (r->status == LF_OK && lf_nexus_replayed(nexus, r->stream) != LF_ERR_STATE)
        WRONG("a replay of the schedule before this one");
    fake.capture(11);
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 6);
    fake.capture(0);
    if (r->status == LF_OK) r->status = lf_nexus_replayed(nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}
TEST(nccl_captures)
{
    prepare(1, captured_step);
    ranks[0].opts.chunk_bytes = 4096;
    run_ranks(1);
    all_are(1, LF_OK);
}

/* A capture that breaks in the middle of a step ran nowhere: the step is forgotten and the handle goes on. */
static void broken_capture(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    if (r->status == LF_OK) r->status = one_step(r, nexus, map, 0);
    for (int32_t how = 0; how < 3 && r->status == LF_OK; how++) {
        fake.capture(9);
        r->status = lf_nexus_begin(nexus);
        for (int32_t k = lf_map_n_blocks(map) - 1; k >= 3 && r->status == LF_OK; k--)
            r->status = lf_nexus_mark(nexus, k, r->stream);
        fake.capture(how ? UINT64_MAX : 0); /* the caller's own code fails, or ours finds the capture broken */
        int32_t first, n;
        if (how == 1 && lf_nexus_finish(nexus, r->stream) != LF_ERR_STATE) WRONG("finishing a broken capture");
        if (how == 2) { /* flushed as part of the graph, taken when there is none any more */
            fake.capture(9);
            r->status = lf_nexus_flush(nexus, r->stream);
            fake.capture(0);
            if (lf_nexus_take(nexus, r->stream, &first, &n) != LF_ERR_STATE) WRONG("taking outside the capture");
            if (lf_nexus_finish(nexus, r->stream) != LF_ERR_STATE) WRONG("finishing outside the capture");
        }
        if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus);
        fake.capture(0);
        if (r->status == LF_OK)
            r->status = lf_stream_sync(r->stream); /* the fake ran what was captured: it may still be clearing */
        if (r->status == LF_OK) r->status = one_step(r, nexus, map, 1);
        if (r->status == LF_OK) check_step(r, map, 1);
    }
    if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus); /* nothing to forget */
    if (r->status == LF_OK) r->status = lf_nexus_begin(nexus);
    for (int32_t k = lf_map_n_blocks(map) - 1; k >= 3 && r->status == LF_OK; k--) r->status = lf_nexus_mark(nexus, k, r->stream);
    if (lf_nexus_cancel(nexus) != LF_ERR_STATE) WRONG("a step that ran was cancelled");
    double x = 1;
    if (lf_nexus_reduce(nexus, &x, 1, LF_DTYPE_F64, r->stream) != LF_ERR_STATE) WRONG("a sum in the middle of a step");
    if (r->status == LF_OK) r->status = lf_nexus_finish(nexus, r->stream);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}
TEST(nccl_forgets_a_broken_capture)
{
    prepare(1, broken_capture);
    ranks[0].opts.chunk_bytes = 4096;
    run_ranks(1);
    all_are(1, LF_OK);
}

static void sums_beside_steps(rank *r)
{
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    double x[3] = {1, 0.5 + r->rank, -r->rank};
    int64_t n = INT64_C(1) << 40;
    float f = 1;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->t.close = NULL;
    if (r->status == LF_OK) r->status = lf_nexus_reduce(nexus, x, 3, LF_DTYPE_F64, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_reduce(nexus, &n, 1, LF_DTYPE_I64, NULL);
    if (r->status == LF_OK && n != INT64_C(1) << 41) WRONG("not done on return, or wrong");
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (r->status == LF_OK && (x[0] != 2 || x[1] != 2 || x[2] != -1)) WRONG("sums %g %g %g", x[0], x[1], x[2]);
    if (lf_nexus_reduce(nexus, &f, 1, LF_DTYPE_F32, NULL) != LF_ERR_INVALID) WRONG("f32 might be divided");
    lf_nexus_close(nexus);
    lf_map_unref(map);
}
TEST(nccl_sums_beside_steps)
{
    prepare(2, sums_beside_steps);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean"); /* divides gradients, not these */
    run_ranks(2);
    all_are(2, LF_OK);
}

static lf_status sleep_500_ms(void *user)
{
    (void)user;
    lf__sleep_ns(500000000);
    return LF_OK;
}

/* A replay that hangs is found like any collective. */
static void replay_hangs(rank *r)
{
    r->status = lf_stream_run(r->stream, sleep_500_ms, NULL);
    if (r->status == LF_OK) r->status = r->t.replayed(r->t.user, r->stream, "a captured step");
    for (int32_t i = 0; i < 400 && r->status == LF_OK; i++) {
        lf__sleep_ns(1000000);
        r->status = r->t.check(r->t.user);
    }
}
TEST(nccl_watches_replays)
{
    prepare(1, replay_hangs);
    ranks[0].opts.timeout_s = 0.1;
    run_ranks(1);
    all_are(1, LF_ERR_TIMEOUT);
    CHECK_HAS(ranks[0].text, "rank 0 of 1: a captured step is not done after 0.1 s");
}

/* ---- libraries ---- */

TEST(nccl_finds_a_library_or_says_why)
{
    set_up();
    lf_nexus_options o;
    int32_t version = 0;
    char text[32];
    options(&o);
    CHECK_OK(lf_nccl_version(&o, &version, text, sizeof text));
    CHECK_EQ(version, 22809);
    CHECK_STR(text, "2.28.9");
    plant("version", 2804);
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "libnccl.so.2 is NCCL 2.8.4, expected 2.10.0 or newer");
    CHECK_STATUS(lf_nccl_id(&o, id), LF_ERR_UNSUPPORTED);
    plant("version", 22809);
    snprintf(o.nccl_library, LF_TEXT_MAX, "libnccl_part.so");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "libnccl_part.so has no function ncclCommAbort");
    snprintf(o.nccl_library, LF_TEXT_MAX, "/nowhere/libnccl.so.2");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "no NCCL: /nowhere/libnccl.so.2: cannot open");
    snprintf(o.nccl_library, LF_TEXT_MAX, "libloongforge_cuda.so");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "has no function ncclGetVersion");
}

TEST(nccl_refuses)
{
    set_up();
    lf_transport t;
    lf_device *cpu;
    lf_nexus_options o;
    options(&o);
    CHECK_OK(lf_nccl_id(&o, id));
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_STATUS(lf_nccl_open(&o, cpu, 0, 1, id, &t), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "the device is cpu");
    lf_device_close(cpu);
    CHECK_STATUS(lf_nccl_open(&o, device(), 2, 2, id, &t), LF_ERR_INVALID);
    CHECK_OK(lf_nccl_open(&o, device(), 0, 1, id, &t));
    float x = 1;
    int64_t ticket = 0;
    CHECK_STATUS(t.post(t.user, &x, 1, LF_DTYPE_F16, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(t.post(t.user, NULL, 1, LF_DTYPE_F32, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(t.wait(t.user, 0, NULL, 1), LF_ERR_INVALID);
    CHECK_STATUS(t.query(t.user, 0), LF_ERR_INVALID);
    CHECK_OK(t.post(t.user, &x, 1, LF_DTYPE_F32, NULL, &ticket)); /* misuse ends nothing */
    CHECK_OK(t.wait(t.user, ticket, NULL, 10));
    t.close(t.user);
    for (int64_t at = 1; at < 300; at++) {
        CHECK_OK(lf_nccl_id(&o, id));
        lf__alloc_fail_at(at);
        const lf_status rc = lf_nccl_open(&o, device(), 0, 1, id, &t);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) {
            t.close(t.user);
            CHECK(at > 5);
            break;
        }
        CHECK_EQ(rc, LF_ERR_NOMEM);
    }
}

/* ---- failures ---- */

/* Until the error comes, at most ten seconds. */
static void await_error(rank *r)
{
    for (int32_t i = 0; i < 10000 && r->status == LF_OK; i++) {
        lf__sleep_ns(1000000);
        r->status = r->t.check(r->t.user);
    }
}

static float shared_x[MOST][4];

static void post_and_await_error(rank *r)
{
    int64_t ticket;
    r->status = r->t.run(r->t.user, 1, "experts of layer 3 (chunks 4 to 5 of 9)");
    for (int32_t i = 0; i < 2 && r->status == LF_OK; i++)
        r->status = r->t.post(r->t.user, shared_x[r->rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.run(r->t.user, 0, "experts of layer 3 (chunks 4 to 5 of 9)");
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 10);
    if (r->status == LF_OK) await_error(r);
    if (lf_stream_sync(r->stream) < 0) WRONG("the stream was not let go"); /* the abort ends what was on the device */
    const lf_status later = r->t.post(r->t.user, shared_x[r->rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (later != r->status) WRONG("a later call answers %s", lf_status_name(later)); /* for good */
}

static void rank_1_stays_away(rank *r)
{
    if (r->rank == 1) lf__sleep_ns(1200000000);
    else post_and_await_error(r);
}

TEST(nccl_peer_that_does_not_come_is_an_error_in_time)
{
    prepare(2, rank_1_stays_away);
    ranks[0].opts.timeout_s = 0.5;
    const int64_t began = lf__now_ns();
    const long aborts = fake.count("aborts");
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT);
    CHECK_HAS(ranks[0].text, "rank 0 of 2: experts of layer 3 (chunks 4 to 5 of 9) is not done after");
    CHECK_HAS(ranks[0].text, "2 operations, 16 bytes, run 1 of 1 posted");
    CHECK_EQ(fake.count("aborts"), aborts + 1);
    CHECK(lf__now_ns() - began < 20000000000); /* it ended; how fast depends on the machine */
}

static void rank_1_does_something_else(rank *r)
{
    int64_t ticket;
    r->status = r->t.post(r->t.user, shared_x[r->rank], r->rank == 1 ? 3 : 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 10);
    if (r->status == LF_OK) await_error(r);
}

TEST(nccl_async_errors_are_told_by_the_next_call)
{
    prepare(2, rank_1_does_something_else);
    run_ranks(2);
    all_are(2, LF_ERR_INTERNAL);
    CHECK_HAS(ranks[0].text, "rank 0 of 2: the communicator: invalid usage (5); fake: planted");
    prepare(2, post_and_await_error);
    plant("async_error", 6);
    run_ranks(2);
    all_are(2, LF_ERR_PEER);
    CHECK_HAS(ranks[1].text, "rank 1 of 2: the communicator: remote process exited (6)");
}

TEST(nccl_a_refused_call_ends_it)
{
    prepare(2, post_and_await_error);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.timeout_s = 0.5;
    plant("rank", 1);
    plant("refuse", 2);
    run_ranks(2);
    CHECK_EQ(ranks[1].status, LF_ERR_INTERNAL);
    CHECK_HAS(ranks[1].text, "rank 1 of 2: ncclAllReduce: invalid usage (5)");
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT); /* its peer never launched */
}

/* The host is inside NCCL: nobody can be told before the abort lets it out. */
TEST(nccl_a_call_that_hangs_is_aborted)
{
    for (int32_t blocking = 0; blocking < 2; blocking++) {
        prepare(2, post_and_await_error);
        for (int32_t i = 0; i < 2; i++) {
            ranks[i].opts.timeout_s = 0.5;
            ranks[i].opts.nccl_blocking = blocking;
        }
        plant("rank", 1);
        plant("call_hangs", 1);
        run_ranks(2);
        all_are(2, LF_ERR_TIMEOUT);
        CHECK_HAS(ranks[1].text, "the call ncclAllReduce has not returned for");
    }
}

TEST(nccl_init_that_never_ends_is_an_error_in_time)
{
    for (int32_t how = 0; how < 2; how++) { /* not ready for ever; a call that never returns */
        prepare(2, post_and_await_error);
        for (int32_t i = 0; i < 2; i++) {
            ranks[i].opts.timeout_s = 0.5;
            ranks[i].opts.nccl_blocking = 0;
        }
        plant("init", 1 + how);
        run_ranks(2);
        all_are(2, LF_ERR_TIMEOUT);
        CHECK_HAS(ranks[1].text, "rank 1 of 2: not all ranks met within 0.5 s");
        plant("init", 0);
    }
}

/* Closing has an end whatever NCCL does. */
static void post_and_leave(rank *r)
{
    int64_t ticket;
    r->status = r->t.post(r->t.user, shared_x[r->rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 10);
}
TEST(nccl_close_comes_back)
{
    for (int32_t how = 0; how < 2; how++) {
        prepare(2, how ? rank_1_stays_away : post_and_leave);
        for (int32_t i = 0; i < 2; i++) ranks[i].opts.timeout_s = 0.5;
        plant(how ? "abort_hangs" : "finalize", 1);
        if (how) ranks[0].run = post_and_leave;
        run_ranks(2);
        CHECK_EQ(ranks[0].status, how ? LF_ERR_TIMEOUT : LF_OK);
        plant(how ? "abort_hangs" : "finalize", 0);
    }
}

/* ---- meeting by file ---- */

static void write_later(void *path)
{
    uint8_t mine[LF_NCCL_ID_BYTES];
    lf__sleep_ns(50000000);
    if (lf_nccl_id_by_file(NULL, path, 0, mine) < 0) fprintf(stderr, "%s\n", lf_error_text());
}

TEST(nccl_ids_go_through_a_file)
{
    set_up();
    uint8_t other[LF_NCCL_ID_BYTES] = {0};
    lf_nexus_options o;
    lf__thread *writer;
    char path[512];
    options(&o);
    snprintf(path, sizeof path, "%s", lf_test_path("meet"));
    CHECK_OK(lf__thread_start(&writer, "writer", write_later, path));
    CHECK_OK(lf_nccl_id_by_file(&o, path, 1, other));
    lf__thread_join(writer);
    CHECK(other[0] != 0);
    o.timeout_s = 0.05;
    CHECK_STATUS(lf_nccl_id_by_file(&o, lf_test_path("nobody"), 3, other), LF_ERR_TIMEOUT);
    CHECK_HAS(lf_error_text(), "rank 3:");
    FILE *file = fopen(lf_test_path("else"), "w");
    fputs("something else", file);
    fclose(file);
    CHECK_STATUS(lf_nccl_id_by_file(&o, lf_test_path("else"), 1, other), LF_ERR_FORMAT);
    CHECK_STATUS(lf_nccl_id_by_file(&o, "/nowhere/at/all", 0, other), LF_ERR_NOTFOUND);
}

/* ---- processes ---- */

/* This program again, as rank `rank` of `world` with role `role`; its output goes to `log`. */
static pid_t spawn(const char *role, int32_t rank_, int32_t world, const char *meet, const char *log, const char *fault)
{
    const pid_t pid = fork();
    if (pid != 0) return pid;
    char number[2][16], self[4096] = "";
    snprintf(number[0], sizeof number[0], "%d", rank_);
    snprintf(number[1], sizeof number[1], "%d", world);
    setenv("NCCL_TEST_ROLE", role, 1);
    setenv("NCCL_TEST_RANK", number[0], 1);
    setenv("NCCL_TEST_WORLD", number[1], 1);
    setenv("NCCL_TEST_MEET", meet, 1);
    if (*fault) setenv(fault, "1", 1);
    if (!freopen(log, "w", stderr)) _exit(99);
    if (readlink("/proc/self/exe", self, sizeof self - 1) > 0) execl(self, self, (char *)NULL);
    _exit(98);
}

static int32_t env_number(const char *name) { return (int32_t)strtol(getenv(name), NULL, 10); }

static void stop(lf_status rc)
{
    fprintf(stderr, "%s: %s\n", lf_status_name(rc), lf_error_text());
    fflush(stderr);
    _exit(rc == LF_OK ? 0 : 10 - rc); /* LF_ERR_TIMEOUT 23, LF_ERR_PEER 24 */
}

/* What a child process does; never returns. */
static void play(const char *role)
{
    rank me = {.rank = env_number("NCCL_TEST_RANK"), .world = env_number("NCCL_TEST_WORLD")};
    rank *r = &me;
    options(&r->opts);
    r->opts.timeout_s = 1;
    r->opts.grace_s = 0.3;
    if (strncmp(role, "exit", 4) == 0) snprintf(r->opts.fail, LF_TEXT_MAX, "exit");
    lf_status rc = lf_nccl_id_by_file(&r->opts, getenv("NCCL_TEST_MEET"), r->rank, id);
    if (rc == LF_OK) rc = lf_stream_open(device(), 0, &r->stream);
    if (rc == LF_OK) rc = lf_nccl_open(&r->opts, device(), r->rank, r->world, id, &r->t);
    for (int32_t step = 0; rc == LF_OK && step < 100000; step++) { /* until somebody is killed */
        int64_t ticket;
        rc = r->t.post(r->t.user, shared_x[0], 4, LF_DTYPE_F32, r->stream, &ticket);
        if (rc == LF_OK) rc = r->t.wait(r->t.user, ticket, r->stream, 10);
        if (step == 3) fprintf(stderr, "running\n"), fflush(stderr);
        const bool sits = strcmp(role, "exit-stuck") != 0; /* where a host is when a peer has died */
        if (rc == LF_OK && step > 3) rc = sits ? lf_stream_sync(r->stream) : r->t.settle(r->t.user, 10);
    }
    if (strcmp(role, "exit-deaf") == 0) lf__sleep_ns(60000000000); /* a caller that does nothing about the error */
    if (r->t.close) r->t.close(r->t.user);
    if (strcmp(role, "exit-stuck") == 0) lf__sleep_ns(60000000000); /* the end of the process hangs in the driver */
    stop(rc);
}

static bool log_has(const char *path, const char *words, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    const size_t n = file ? fread(text, 1, size - 1, file) : 0;
    text[n] = 0;
    if (file) fclose(file);
    return strstr(text, words) != NULL;
}

/* Two processes, rank 1 is killed once both run. -> exit code of rank 0 */
static int32_t kill_drill(const char *role, const char *fault, char *text, size_t size)
{
    static int32_t n;
    char meet[64], logs[2][300];
    int status = 0;
    pid_t pids[2];
    set_up();
    snprintf(meet, sizeof meet, "meet%d", ++n);
    for (int32_t i = 0; i < 2; i++) {
        char name[64], path[300];
        snprintf(name, sizeof name, "log%d.%d", n, i);
        snprintf(logs[i], sizeof logs[i], "%s", lf_test_path(name));
        snprintf(path, sizeof path, "%s", lf_test_path(meet));
        pids[i] = spawn(i ? "error" : role, i, 2, path, logs[i], i ? "" : fault);
        CHECK(pids[i] > 0);
    }
    for (int32_t i = 0; i < 2; i++)
        for (int32_t ms = 0; !log_has(logs[i], "running", text, size) && ms < 20000; ms += 5) lf__sleep_ns(5000000);
    CHECK_EQ(kill(pids[1], SIGKILL), 0);
    CHECK_EQ(waitpid(pids[1], &status, 0), pids[1]);
    for (int32_t ms = 0; waitpid(pids[0], &status, WNOHANG) == 0; ms += 5) { /* never a hang */
        if (ms > 30000) {
            kill(pids[0], SIGKILL);
            waitpid(pids[0], &status, 0);
            FAIL_("the survivor hangs");
        }
        lf__sleep_ns(5000000);
    }
    log_has(logs[0], "", text, size);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(nccl_survives_a_killed_peer)
{
    char text[2000];
    for (int32_t i = 0; i < 3; i++) {
        const int32_t code = kill_drill("error", "", text, sizeof text);
        if (code != 10 - LF_ERR_TIMEOUT) FAIL_("exit code %d: %s", code, text);
        CHECK_HAS(text, "rank 0 of 2: a collective by itself is not done after");
    }
}

/* The abort hangs, so the host stays in its wait for the device: the guard ends the process. */
TEST(nccl_ends_a_process_that_is_stuck)
{
    char text[2000];
    CHECK_EQ(kill_drill("exit", "FAKE_NCCL_ABORT_HANGS", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_HAS(text, "loongforge: NCCL: rank 0 of 2: a collective by itself is not done after");
    CHECK_HAS(text, "exit with code 75 after 0.3 s of grace (fail = exit)");
    CHECK_EQ(kill_drill("exit-deaf", "", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_EQ(kill_drill("exit-stuck", "FAKE_NCCL_ABORT_HANGS", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_EQ(kill_drill("exit", "", text, sizeof text), 10 - LF_ERR_TIMEOUT); /* it was told and closed in time */
}

int main(int argc, char **argv)
{
    const char *role = getenv("NCCL_TEST_ROLE");
    if (role) play(role);
    return lf_test_main(argc, argv);
}
