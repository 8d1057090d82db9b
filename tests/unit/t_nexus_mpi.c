/* SPDX-License-Identifier: Apache-2.0 */
/* The MPI transport with real ranks: this program starts itself under mpirun as `t_nexus_mpi rank CASE`. Exact sums, a step equal to the
 * loopback's, ranks that are late, stopped, dead or somewhere else. */
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>

#include "nexus_fixture.h"

enum { MOST = 8, FAILED_AS_EXPECTED = 3 };

/* ---- the driver ------------------------------------------------------------------------------------------------------- */

static char output[64 << 10];

/* Run CASE on `world` ranks. -> exit code of mpirun; everything it and the ranks printed is in `output`. 124: it hung. */
static int launch(int32_t world, const char *name)
{
    static const char *flags;
    char command[1024], self[512] = "";
    if (!flags) { /* mpirun as root and with more ranks than cores is Open MPI's to refuse */
        const bool open_mpi = system("mpirun --version 2>/dev/null | grep -q 'Open MPI'") == 0;
        flags = open_mpi ? "--allow-run-as-root --oversubscribe" : "";
    }
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) FAIL_("no /proc/self/exe");
    /* MPI leaves much unfreed, and unloads what could tell the leak checker whose it was. */
    snprintf(command, sizeof command,
             "ASAN_OPTIONS=\"$ASAN_OPTIONS:detect_leaks=0\" timeout -k 5 90 mpirun %s -n %d '%s' rank %s 2>&1", flags, world,
             self, name);
    FILE *pipe = popen(command, "r");
    CHECK(pipe);
    const size_t n = fread(output, 1, sizeof output - 1, pipe);
    output[n] = 0;
    while (fgetc(pipe) != EOF) {}
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int32_t count_of(const char *part)
{
    int32_t n = 0;
    for (const char *at = output; (at = strstr(at, part)) != NULL; at += strlen(part)) n++;
    return n;
}

static void need_mpirun(void)
{
#ifdef __SANITIZE_THREAD__
    SKIP("ThreadSanitizer reports races inside MPI's library, which is not built for it");
#endif
    if (system("command -v mpirun >/dev/null 2>&1") != 0) SKIP("no mpirun: Open MPI (openmpi-bin) or MPICH is not installed");
}

static void all_ranks_pass(const char *name, const int32_t *worlds, int32_t n)
{
    need_mpirun();
    for (int32_t i = 0; i < n; i++) {
        const int code = launch(worlds[i], name);
        if (code != 0 || count_of("rank passed") != worlds[i]) FAIL_("%d ranks, exit code %d:\n%s", worlds[i], code, output);
    }
}

/* ---- what ranks do ---------------------------------------------------------------------------------------------------- */

#define NEED(call)                                                                                     \
    do {                                                                                               \
        lf_status s_ = (call);                                                                         \
        if (s_ != LF_OK) return printf("%s: %s: %s\n", #call, lf_status_name(s_), lf_error_text()), 1; \
    } while (0)
#define WRONG(...) return printf(__VA_ARGS__), printf("\n"), 1

static lf_status open_link(lf_transport *t, double timeout_s, int64_t chunk_bytes)
{
    lf_nexus_options o;
    lf_status rc = lf_options_init("nexus", &o, sizeof o);
    o.timeout_s = timeout_s;
    o.chunk_bytes = chunk_bytes;
    if (rc == LF_OK && !device) rc = lf_device_open(&device, "cpu");
    return rc == LF_OK ? lf_mpi_open(&o, device, t) : rc;
}

static lf_status sum(lf_transport *t, void *data, int64_t count, int32_t dtype, double timeout_s)
{
    int64_t ticket;
    lf_status rc = t->post(t->user, data, count, dtype, NULL, &ticket);
    return rc == LF_OK ? t->wait(t->user, ticket, NULL, timeout_s) : rc;
}

/* Say it and leave with a code that mpirun passes on, unless another rank's end comes first. */
static int expect_failure(lf_status rc, lf_status want, const char *part)
{
    if (rc != want || !strstr(lf_error_text(), part))
        WRONG("%s: %s, expected %s with '%s'", lf_status_name(rc), lf_error_text(), lf_status_name(want), part);
    printf("as expected: %s\n", lf_error_text());
    fflush(stdout);
    return FAILED_AS_EXPECTED;
}

/* ---- sums */

static const int32_t dtypes[] = {LF_DTYPE_F32, LF_DTYPE_BF16, LF_DTYPE_F64, LF_DTYPE_I64};
static const int64_t counts[] = {0, 1, 3, 1023, 4096, 5001, 300007};

/* Whole numbers: sums of eight stay below 256, exact in every dtype and order. */
static double start_value(int32_t rank, int32_t op, int64_t i) { return (double)((rank * 31 + op * 17 + i * 7) % 61 - 30); }

/* The same bits on every rank, of values whose sum depends on the order? W * sum(x^2) is (sum x)^2 only then. */
static int compare_bits(lf_transport *t, const void *data, size_t bytes)
{
    const int64_t x = (int64_t)(lf__hash(data, bytes, 0).lo & 0xffff);
    int64_t both[2] = {x, x * x};
    NEED(sum(t, both, 2, LF_DTYPE_I64, 60));
    if (t->world * both[1] != both[0] * both[0]) WRONG("ranks have different bits");
    return 0;
}

static int rank_sums(void)
{
    enum { N_OPS = 4 * 7 };
    lf_transport t;
    void *data[N_OPS];
    int64_t ticket[N_OPS];
    NEED(open_link(&t, 60, 64 << 10)); /* the larger ones go in parts */
    for (int32_t op = 0; op < N_OPS; op++) {
        const int64_t n = counts[op % 7];
        data[op] = lf__alloc((size_t)n * 8 + 8);
        for (int64_t i = 0; i < n; i++) put(data[op], i, dtypes[op % 4], start_value(t.rank, op, i));
        NEED(t.post(t.user, data[op], n, dtypes[op % 4], NULL, &ticket[op]));
    }
    for (int32_t op = 0; op < N_OPS; op++) NEED(t.wait(t.user, ticket[op], NULL, 60));
    for (int32_t op = 0; op < N_OPS; op++) {
        for (int64_t i = 0; i < counts[op % 7]; i++) {
            double want = 0;
            for (int32_t r = 0; r < t.world; r++) want += start_value(r, op, i);
            if (get(data[op], i, dtypes[op % 4]) != want)
                WRONG("operation %d element %lld: %g, expected %g", op, (long long)i, get(data[op], i, dtypes[op % 4]), want);
        }
        lf__free(data[op]);
    }
    for (int32_t d = 0; d < 4; d++) {
        static double values[5001];
        for (int32_t i = 0; i < 5001; i++) put(values, i, dtypes[d], 1 / (1 + (double)((t.rank * 7919 + i * 104729) % 1000)));
        NEED(sum(&t, values, 5001, dtypes[d], 60));
        if (compare_bits(&t, values, 5001 * lf_dtype_bytes(dtypes[d])) != 0) return 1;
    }
    t.close(t.user);
    return 0;
}

TEST(mpi_sums_exactly) { all_ranks_pass("sums", (const int32_t[]){1, 2, 3, 4, 8}, 5); }

/* ---- data that a stream makes later, and several handles in one process */

static lf_status fill_late(void *user)
{
    lf__sleep_ns(20000000);
    for (int32_t i = 0; i < 100; i++) ((float *)user)[i] = 2;
    return LF_OK;
}

static int rank_streams(void)
{
    lf_transport t, u;
    lf_stream *stream;
    int64_t first, second;
    float late[100] = {0};
    int64_t now = 1;
    NEED(open_link(&t, 60, 64 << 10));
    NEED(open_link(&u, 60, 64 << 10));
    NEED(lf_stream_open(device, 0, &stream));
    NEED(lf_stream_run(stream, fill_late, late));
    NEED(t.post(t.user, late, 100, LF_DTYPE_F32, stream, &first));
    NEED(u.post(u.user, &now, 1, LF_DTYPE_I64, NULL, &second));
    NEED(u.wait(u.user, second, NULL, 60));
    if (now != u.world) WRONG("the second handle's sum is %lld", (long long)now);
    if (t.world > 1 && t.query(t.user, first) != LF_OK) WRONG("a sum posted before is not done: %s", lf_error_text());
    NEED(t.wait(t.user, first, NULL, 60));
    for (int32_t i = 0; i < 100; i++)
        if (late[i] != 2 * (float)t.world) WRONG("late[%d] is %g", i, (double)late[i]);
    NEED(lf_stream_sync(stream));
    lf_stream_close(stream);
    t.close(t.user);
    NEED(sum(&u, &now, 1, LF_DTYPE_I64, 60));
    if (now != u.world * u.world) WRONG("after the other handle's close the sum is %lld", (long long)now);
    u.close(u.user);
    return 0;
}
TEST(mpi_streams_and_handles) { all_ranks_pass("streams", (const int32_t[]){1, 3}, 2); }

/* ---- a step over a map, against the loopback */

static lf_map *make_map(void)
{
    static const int64_t sizes[] = {3000, 700, 32, 500, 833, 1166, 2500};
    static const int32_t layers[] = {-1, 0, 0, 0, 0, 1, INT32_MAX};
    lf_map *map = new_map(1, 4);
    for (int32_t i = 0; i < 7; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        add_param(map, name, sizes[i], i % 2 ? LF_DTYPE_BF16 : LF_DTYPE_F32, layers[i], i >= 3 && i <= 5 ? i - 3 : -1, 0);
    }
    return plan_and_allocate(map);
}

typedef struct stepper {
    lf_transport t;
    lf_map *map;
    lf_status status;
    char text[400];
    lf__thread *thread;
} stepper;

static lf_status take_step(stepper *s)
{
    lf_status rc = LF_OK;
    lf_nexus *nexus = NULL;
    lf_nexus_options o;
    LF_TRY(lf_options_init("nexus", &o, sizeof o));
    o.chunk_bytes = 4096;
    s->map = make_map();
    LF_TRY(lf_nexus_open(&nexus, s->map, &s->t, &o));
    LF_TRY(lf_nexus_begin(nexus));
    for (int32_t b = 6; b >= 0; b--) {
        const lf_block_info info = block_at(s->map, b);
        const int32_t dtype = dtype_of(s->map, info.range.klass, LF_ROLE_GRAD);
        for (int64_t i = 0; i < info.range.count; i++)
            put(lf_map_address(s->map, &info.range, LF_ROLE_GRAD), i, dtype, 8 * start_value(s->t.rank, b, i));
        if ((b + s->t.rank) % 4 != 3) LF_TRY(lf_nexus_mark(nexus, b, NULL)); /* some have no gradient on some ranks */
    }
    LF_TRY(lf_nexus_finish(nexus, NULL));
out:
    snprintf(s->text, sizeof s->text, "%s", rc < 0 ? lf_error_text() : "");
    lf_nexus_close(nexus);
    return rc;
}

static void step_thread(void *user)
{
    stepper *s = user;
    s->status = take_step(s);
}

static int compare_planes(const lf_map *a, const lf_map *b)
{
    for (int32_t k = 0; k < lf_map_n_classes(a); k++) {
        lf_class_info info = {.size = sizeof info};
        NEED(lf_map_get_class(a, k, &info));
        const lf_range all = {.klass = k, .count = info.count};
        const size_t bytes = (size_t)info.count * lf_dtype_bytes(info.role_dtype[LF_ROLE_GRAD]);
        if (memcmp(lf_map_address(a, &all, LF_ROLE_GRAD), lf_map_address(b, &all, LF_ROLE_GRAD), bytes) != 0)
            WRONG("class %d: not what the loopback gives", k);
    }
    return 0;
}

static int rank_step(void)
{
    static stepper ends[MOST];
    lf_transport tables[MOST];
    stepper mine = {0};
    NEED(open_link(&mine.t, 60, 4096));
    NEED(take_step(&mine));
    NEED(lf_loopback_open(mine.t.world, tables));
    for (int32_t r = 0; r < mine.t.world; r++) {
        ends[r].t = tables[r];
        NEED(lf__thread_start(&ends[r].thread, "rank", step_thread, &ends[r]));
    }
    for (int32_t r = 0; r < mine.t.world; r++) lf__thread_join(ends[r].thread);
    for (int32_t r = 0; r < mine.t.world; r++) {
        if (ends[r].status < 0) WRONG("loopback rank %d: %s", r, ends[r].text);
        if (compare_planes(mine.map, ends[r].map) != 0) return 1;
        lf_map_unref(ends[r].map);
    }
    lf_map_unref(mine.map);
    return 0;
}
TEST(mpi_step_is_the_loopbacks) { all_ranks_pass("step", (const int32_t[]){1, 2, 4}, 3); }

/* ---- ranks that do not come */

static void fails_within(const char *name, const char *part, int32_t at_least)
{
    need_mpirun();
    const int64_t began = lf__now_ns();
    const int code = launch(4, name);
    const double seconds = (double)(lf__now_ns() - began) * 1e-9;
    if (code == 0 || code == 124 || seconds > 80) FAIL_("exit code %d after %.1f s:\n%s", code, seconds, output);
    if (count_of(part) < at_least) FAIL_("'%s' came %d times, expected %d:\n%s", part, count_of(part), at_least, output);
}

static int rank_late(void)
{
    lf_transport t;
    float x[10] = {1};
    NEED(open_link(&t, 60, 4096));
    NEED(sum(&t, x, 10, LF_DTYPE_F32, 60));
    if (t.rank == 2) {
        lf__sleep_ns(4000000000); /* longer than the others wait */
        return expect_failure(LF_ERR_TIMEOUT, LF_ERR_TIMEOUT, "");
    }
    const lf_status rc = sum(&t, x, 10, LF_DTYPE_F32, 1);
    const int code =
        expect_failure(rc, LF_ERR_TIMEOUT, "operation 1, a sum of 10 f32, is not done after 1 s: not all ranks have come");
    if (t.check(t.user) != LF_ERR_TIMEOUT) WRONG("check does not know of it");
    t.close(t.user);
    lf_mpi_info info = {.size = sizeof info};
    if (lf_mpi_start(NULL, &info) != LF_ERR_TIMEOUT) WRONG("MPI can be started after a failure");
    lf__sleep_ns(500000000); /* the first to leave makes mpirun end the others: let them say their part */
    return code;
}
TEST(mpi_rank_is_late) { fails_within("late", "not all ranks have come", 3); }

static int rank_stopped(void)
{
    lf_transport t;
    float x[1000] = {1};
    NEED(open_link(&t, 60, 4096));
    for (int32_t i = 0;; i++) {
        if (t.rank == 1 && i == 20) raise(SIGSTOP);
        const lf_status rc = sum(&t, x, 1000, LF_DTYPE_F32, 2);
        if (rc == LF_OK) continue;
        const int code = expect_failure(rc, LF_ERR_TIMEOUT, "is not done after 2 s");
        lf__sleep_ns(500000000);
        return code;
    }
}
TEST(mpi_rank_is_stopped) { fails_within("stopped", "is not done after 2 s", 3); }

static int rank_dies(void)
{
    lf_transport t;
    float x[1000] = {1};
    NEED(open_link(&t, 60, 4096));
    for (int32_t i = 0;; i++) {
        if (t.rank == 1 && i == 20) raise(SIGKILL);
        const lf_status rc = sum(&t, x, 1000, LF_DTYPE_F32, 2);
        if (rc < 0) return expect_failure(rc, rc, "rank ");
    }
}
/* mpirun ends the others, or they find out: either way nothing hangs and the code is not 0. */
TEST(mpi_rank_dies) { fails_within("dies", "signal 9", 0); }

static int rank_closes(void)
{
    lf_transport t;
    float x[10] = {1};
    int64_t ticket;
    NEED(open_link(&t, 60, 4096));
    if (t.rank == 3) {
        t.close(t.user); /* the last user: so it is the end of MPI here, and MPI_Finalize would wait for the others */
        lf__sleep_ns(500000000);
        return FAILED_AS_EXPECTED;
    }
    NEED(t.post(t.user, x, 10, LF_DTYPE_F32, NULL, &ticket));
    const int code = expect_failure(t.wait(t.user, ticket, NULL, 20), LF_ERR_PEER, "some ranks are at the end of MPI");
    t.close(t.user);
    lf__sleep_ns(500000000);
    return code;
}
TEST(mpi_rank_closes_early)
{
    fails_within("closes", "some ranks are at the end of MPI, others are not; here it is operation 0", 3);
}

/* ---- ranks that are somewhere else */

static int rank_other_count(void)
{
    lf_transport t;
    float x[20] = {1};
    NEED(open_link(&t, 60, 4096));
    const lf_status rc = sum(&t, x, t.rank == 1 ? 12 : 10, LF_DTYPE_F32, 20);
    const int code = expect_failure(rc, LF_ERR_PEER, "(elements: 10 to 12)");
    for (int32_t i = 0; i < 20; i++)
        if (x[i] != (i == 0)) WRONG("data moved all the same");
    lf__sleep_ns(500000000);
    return code;
}
TEST(mpi_ranks_disagree_on_count) { fails_within("other_count", "(elements: 10 to 12)", 4); }

static int rank_other_order(void)
{
    lf_transport t;
    double x[2] = {1, 1};
    NEED(open_link(&t, 60, 4096));
    if (t.rank == 0) NEED(t.post(t.user, x, 0, LF_DTYPE_F64, NULL, &(int64_t){0}));
    const lf_status rc = sum(&t, x, 2, t.rank == 0 ? LF_DTYPE_I64 : LF_DTYPE_F64, 20);
    const int code = t.rank == 0 ? FAILED_AS_EXPECTED : expect_failure(rc, LF_ERR_PEER, "the ranks are at different operations");
    lf__sleep_ns(500000000);
    return code;
}
TEST(mpi_ranks_disagree_on_order) { fails_within("other_order", "the ranks are at different operations", 3); }

/* ---- starting and ending */

static int rank_users(void)
{
    lf_mpi_info a = {.size = sizeof a}, b = a;
    lf_transport t;
    float x = 1;
    NEED(lf_mpi_start(NULL, &a));
    if (!a.ours || a.world < 1 || a.rank >= a.world || !*a.library) WRONG("%d %d of %d '%s'", a.ours, a.rank, a.world, a.library);
    NEED(lf_mpi_start(NULL, &b));
    lf_mpi_stop();
    for (int32_t i = 0; i < 3; i++) { /* a transport may come and go as long as someone else uses MPI */
        NEED(open_link(&t, 60, 4096));
        NEED(sum(&t, &x, 1, LF_DTYPE_F32, 60));
        t.close(t.user);
    }
    if (x != (float)(a.world * a.world * a.world)) WRONG("sum is %g", (double)x);
    lf_mpi_stop();
    if (lf_mpi_start(NULL, &a) != LF_ERR_STATE || !strstr(lf_error_text(), "cannot be started again"))
        WRONG("a second start: %s", lf_error_text());
    return 0;
}
TEST(mpi_counts_its_users) { all_ranks_pass("users", (const int32_t[]){1, 2}, 2); }

/* The program starts MPI itself, as mpi4py would. */
static int (*own_init(void))(int *, char ***, int, int *)
{
    int (*init)(int *, char ***, int, int *) = NULL;
    void *library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    if (!library) library = dlopen("libmpich.so.12", RTLD_NOW | RTLD_GLOBAL);
    void *found = library ? dlsym(library, "MPI_Init_thread") : NULL;
    memcpy(&init, &found, sizeof init);
    return init;
}

static int rank_guest(void)
{
    lf_mpi_info info = {.size = sizeof info};
    int level = 0, (*finalize)(void) = NULL;
    if (!own_init() || own_init()(NULL, NULL, 3, &level) != 0) WRONG("cannot start MPI");
    for (int32_t i = 0; i < 2; i++) { /* not ours to end: so it may be taken up again */
        NEED(lf_mpi_start(NULL, &info));
        if (info.ours) WRONG("we started it");
        lf_mpi_stop();
    }
    void *found = dlsym(RTLD_DEFAULT, "MPI_Finalize");
    memcpy(&finalize, &found, sizeof finalize);
    if (finalize() != 0) WRONG("MPI_Finalize");
    if (lf_mpi_start(NULL, &info) != LF_ERR_UNSUPPORTED || !strstr(lf_error_text(), "MPI_Finalize was called"))
        WRONG("after MPI_Finalize: %s", lf_error_text());
    return 0;
}
TEST(mpi_of_the_program) { all_ranks_pass("guest", (const int32_t[]){2}, 1); }

static int rank_funneled(void)
{
    lf_mpi_info info = {.size = sizeof info};
    int level = 0, (*finalize)(void) = NULL;
    if (!own_init() || own_init()(NULL, NULL, 1, &level) != 0) WRONG("cannot start MPI");
    if (level >= 2) printf("this MPI gives level %d when 1 is asked for\n", level);
    else if (lf_mpi_start(NULL, &info) != LF_ERR_UNSUPPORTED || !strstr(lf_error_text(), "MPI_THREAD_SERIALIZED"))
        WRONG("threads: %s", lf_error_text());
    void *found = dlsym(RTLD_DEFAULT, "MPI_Finalize");
    memcpy(&finalize, &found, sizeof finalize);
    return finalize();
}
TEST(mpi_of_a_program_without_threads) { all_ranks_pass("funneled", (const int32_t[]){2}, 1); }

/* ---- libraries that are none; no mpirun is needed */

static void refuses(const char *library, const char *part)
{
    lf_nexus_options o;
    lf_mpi_info info = {.size = sizeof info};
    CHECK_OK(lf_options_init("nexus", &o, sizeof o));
    snprintf(o.mpi_library, sizeof o.mpi_library, "%s", library);
    CHECK_STATUS(lf_mpi_start(&o, &info), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), part);
}
TEST(mpi_library_is_not_there) { refuses("/nowhere/libmpi.so", "no MPI: /nowhere/libmpi.so"); }
TEST(mpi_library_is_no_mpi) { refuses("libm.so.6", "libm.so.6 has no function MPI_Get_library_version"); }
TEST(mpi_library_is_of_no_family)
{
    const char *fakes = getenv("LF_CLI_FAKES");
    char path[600];
    if (!fakes) SKIP("LF_CLI_FAKES is not set: run by ctest");
    snprintf(path, sizeof path, "%s/libmpi.so.40", fakes);
    refuses(path, "Open MPI v4.1.4 is neither Open MPI nor of MPICH's family");
}
TEST(mpi_arguments)
{
    lf_transport t;
    CHECK_STATUS(lf_mpi_start(NULL, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_mpi_open(NULL, NULL, &t), LF_ERR_INVALID);
}

/* ---- */

static int run_rank(const char *name)
{
    static const struct {
        const char *name;
        int (*run)(void);
    } cases[] = {{"sums", rank_sums},
                 {"streams", rank_streams},
                 {"step", rank_step},
                 {"late", rank_late},
                 {"stopped", rank_stopped},
                 {"dies", rank_dies},
                 {"closes", rank_closes},
                 {"other_count", rank_other_count},
                 {"other_order", rank_other_order},
                 {"users", rank_users},
                 {"guest", rank_guest},
                 {"funneled", rank_funneled}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(name, cases[i].name) != 0) continue;
        const int code = cases[i].run();
        if (code == 0) printf("rank passed\n");
        fflush(stdout);
        if (code == FAILED_AS_EXPECTED) _exit(code); /* MPI is not ended: its destructors are not to be trusted */
        return code;
    }
    return 2;
}

int main(int argc, char **argv)
{
    return argc == 3 && strcmp(argv[1], "rank") == 0 ? run_rank(argv[2]) : lf_test_main(argc, argv);
}
