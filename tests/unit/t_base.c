/* SPDX-License-Identifier: Apache-2.0 */
/* src/base and src/io: what every module stands on. */
#include "base/base.h"
#include "io/io.h"
#include "lf_test.h"

#include <errno.h>
#include <stdatomic.h>

/* ---- status and errors */

TEST(every_status_has_name_and_text)
{
    for (lf_status s = LF_STATUS_MIN; s <= 2; s++) {
        CHECK(strcmp(lf_status_name(s), "UNKNOWN") != 0);
        CHECK(lf_status_text(s)[0]);
    }
    CHECK_STR(lf_status_name(LF_ERR_NOMEM), "ERR_NOMEM");
    CHECK_STR(lf_status_name(-99), "UNKNOWN");
    CHECK_STR(lf_status_name(3), "UNKNOWN");
    CHECK(lf_version_string()[0]);
    CHECK(lf_abi_version() >= 1);
}

TEST(error_text_is_kept_and_cleared)
{
    CHECK_EQ(LF_FAIL(LF_ERR_IO, "disk %d", 7), LF_ERR_IO);
    CHECK_STR(lf_error_text(), "disk 7");
    CHECK_EQ(lf__fail_prefix(LF_ERR_CORRUPT, "checkpoint %d", 50), LF_ERR_CORRUPT);
    CHECK_STR(lf_error_text(), "checkpoint 50: disk 7");
    CHECK_EQ(LF_FAIL(LF_ERR_IO, "again: %s", lf_error_text()), LF_ERR_IO); /* an argument inside the text itself */
    CHECK_STR(lf_error_text(), "again: checkpoint 50: disk 7");
    lf_error_clear();
    CHECK_STR(lf_error_text(), "");
}

TEST(errno_chooses_the_status)
{
    CHECK_EQ(lf__fail_errno(ENOSPC, "a"), LF_ERR_NOSPACE);
    CHECK_EQ(lf__fail_errno(EDQUOT, "a"), LF_ERR_NOSPACE);
    CHECK_EQ(lf__fail_errno(ENOENT, "a"), LF_ERR_NOTFOUND);
    CHECK_EQ(lf__fail_errno(EEXIST, "a"), LF_ERR_EXISTS);
    CHECK_EQ(lf__fail_errno(ENOMEM, "a"), LF_ERR_NOMEM);
    CHECK_EQ(lf__fail_errno(EIO, "writing %s", "x"), LF_ERR_IO);
    CHECK_HAS(lf_error_text(), "writing x: ");
    CHECK_HAS(lf_error_text(), "errno 5");
}

static void fail_in_thread(void *user)
{
    lf__fault *fault = user;
    lf__fault_keep(fault, LF_FAIL(LF_ERR_CORRUPT, "first"));
    lf__fault_keep(fault, LF_FAIL(LF_ERR_IO, "second"));
}

TEST(error_text_belongs_to_its_thread)
{
    lf__thread *thread;
    lf__fault fault = {0};
    (void)LF_FAIL(LF_ERR_IO, "mine");
    CHECK_EQ(lf__fault_raise(&fault), LF_OK);
    CHECK_OK(lf__thread_start(&thread, "t", fail_in_thread, &fault));
    lf__thread_join(thread);
    CHECK_STR(lf_error_text(), "mine");
    CHECK_EQ(lf__fault_raise(&fault), LF_ERR_CORRUPT); /* the first one is kept */
    CHECK_STR(lf_error_text(), "first");
}

/* ---- log */

static char logged[4][64];
static int n_logged;

static void keep_line(void *user, int32_t level, const char *line)
{
    if (n_logged < 4) snprintf(logged[n_logged++], sizeof logged[0], "%s%d %s", (const char *)user, level, line);
}

TEST(log_lines_up_to_the_level)
{
    static char mark[] = "L";
    n_logged = 0;
    lf__log(LF_LOG_ERROR, "dropped");
    lf_log_set(keep_line, mark, LF_LOG_WARN);
    lf__log(LF_LOG_WARN, "kept %d", 1);
    lf__log(LF_LOG_INFO, "too detailed");
    lf_log_set(NULL, NULL, LF_LOG_DEBUG);
    lf__log(LF_LOG_ERROR, "dropped");
    CHECK_EQ(n_logged, 1);
    CHECK_STR(logged[0], "L1 kept 1");
}

/* ---- memory */

TEST(allocation_fault_point)
{
    (void)lf__alloc_fail_at(0);
    void *a = lf__alloc(8), *b = lf__alloc(0);
    CHECK(a && b);
    CHECK_EQ(lf__alloc_fail_at(2), 2); /* made since the last call */
    void *c = lf__alloc(8), *d = lf__alloc(8), *e = lf__alloc(8);
    (void)lf__alloc_fail_at(0);
    CHECK(c && !d && e);
    CHECK(!lf__alloc_array(SIZE_MAX / 4, 8));
    CHECK(!lf__realloc(NULL, SIZE_MAX / 4, 8));
    for (int i = 0; i < 8; i++) CHECK_EQ(((char *)c)[i], 0);
    void *aligned = lf__alloc_aligned(100, 4096);
    CHECK(aligned && (uintptr_t)aligned % 4096 == 0);
    lf__free(a), lf__free(b), lf__free(c), lf__free(e), lf__free(aligned), lf__free(NULL);
}

TEST(buffer_grows_to_its_limit)
{
    lf__buf buf = {.max = 3000};
    for (int i = 0; i < 250; i++) CHECK_OK(lf__buf_printf(&buf, "%09d\n", i));
    CHECK_EQ(buf.used, 2500);
    CHECK_EQ(strlen(buf.data), 2500);
    CHECK_EQ(strtol(buf.data + 2490, NULL, 10), 249);
    char big[1500];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    CHECK_STATUS(lf__buf_printf(&buf, "%s", big), LF_ERR_INVALID);
    CHECK(!buf.data && buf.used == 0); /* frees itself */
    CHECK_OK(lf__buf_printf(&buf, "%s!", big));
    CHECK_EQ(buf.used, 1500);
    (void)lf__alloc_fail_at(1);
    CHECK_STATUS(lf__buf_add(&buf, big, 1000), LF_ERR_NOMEM);
    (void)lf__alloc_fail_at(0);
    lf__buf_free(&buf);
}

/* ---- threads */

enum { MANY = 5000 };
static _Atomic int visits[MANY];

static void visit(void *user, int64_t i)
{
    atomic_fetch_add((_Atomic int64_t *)user, i);
    atomic_fetch_add(&visits[i], 1);
}

TEST(parallel_for_visits_each_index_once)
{
    static const int32_t threads[] = {1, 2, 7, 0, 1000};
    for (size_t t = 0; t < LF_COUNT(threads); t++)
        for (int64_t n = 0; n <= MANY; n = n * 3 + 1) {
            _Atomic int64_t sum = 0;
            for (int i = 0; i < MANY; i++) atomic_store(&visits[i], 0);
            lf__parallel(threads[t], n, visit, &sum);
            for (int64_t i = 0; i < MANY; i++) CHECK_EQ(visits[i], i < n);
            CHECK_EQ(sum, n * (n - 1) / 2);
        }
}

static void wake_later(void *user)
{
    lf__mutex *m = user;
    lf__lock(m);
    lf__wake(m);
    lf__unlock(m);
}

TEST(waiting_ends_by_time_or_wake)
{
    lf__mutex *m = lf__mutex_open();
    lf__thread *thread;
    CHECK(m);
    lf__lock(m);
    while (lf__wait_ns(m, 1000000)) { /* nobody wakes: only early wakes come before the time is over */
    }
    CHECK_OK(lf__thread_start(&thread, "waker", wake_later, m));
    lf__wait(m); /* the waker cannot pass before this waits */
    lf__unlock(m);
    lf__thread_join(thread);
    lf__thread_join(NULL);
    lf__mutex_close(m);
    CHECK(lf__n_cores() >= 1);
    int64_t before = lf__now_ns();
    lf__sleep_ns(1000);
    CHECK(lf__now_ns() >= before + 1000);
}

/* ---- histogram */

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

TEST(percentiles_match_a_sorted_list)
{
    enum { N = 20000 };
    static lf__hist h;
    static int64_t ns[N];
    lf__rng rng;
    lf__rng_init(&rng, 5, 0, 0, 0);
    h = (lf__hist){0};
    CHECK_EQ(lf__hist_percentile(&h, 50), 0);
    double sum = 0, square = 0;
    for (int i = 0; i < N; i++) {
        ns[i] = (int64_t)exp(lf__rng_unit(&rng) * 25); /* 1 ns to 72 s */
        sum += (double)ns[i] * 1e-9;
        square += (double)ns[i] * 1e-9 * (double)ns[i] * 1e-9;
        lf__hist_add(&h, ns[i]);
    }
    qsort(ns, N, sizeof ns[0], compare_i64);
    for (double p = 0.5; p <= 100; p += 0.5) {
        double want = (double)ns[(int)ceil(p / 100 * N) - 1] * 1e-9;
        CHECK_NEAR(lf__hist_percentile(&h, p), want, 0.032 * want);
    }
    CHECK_EQ(h.count, N);
    CHECK_NEAR(h.max_ns, ns[N - 1], 0);
    CHECK_NEAR(lf__hist_mean(&h), sum / N, 1e-9);
    CHECK_NEAR(lf__hist_std(&h), sqrt(square / N - sum / N * sum / N), 1e-9);
}

TEST(histogram_takes_any_duration)
{
    static lf__hist h;
    static const int64_t odd[] = {-5, 0, 1, 31, 32, 33, INT64_MAX};
    for (size_t i = 0; i < LF_COUNT(odd); i++) {
        h = (lf__hist){0};
        lf__hist_add(&h, odd[i]);
        double want = odd[i] < 0 ? 0 : (double)odd[i] * 1e-9;
        CHECK_NEAR(lf__hist_percentile(&h, 50), want, 0.032 * want);
        CHECK_EQ(lf__hist_std(&h), 0);
    }
}

/* ---- hash, random numbers, bits */

TEST(hash_text_reads_back)
{
    lf__rng rng;
    lf__rng_init(&rng, 9, 0, 0, 0);
    for (int i = 0; i < 1000; i++) {
        lf__hash128 back, h = {((uint64_t)lf__rng_u32(&rng) << 32) | lf__rng_u32(&rng), lf__rng_u32(&rng)};
        char text[33];
        lf__hash_hex(h, text);
        CHECK_EQ(strlen(text), 32);
        CHECK(lf__hash_parse(text, &back) && back.lo == h.lo && back.hi == h.hi);
        text[i % 32] = "xG /`:"[i % 6];
        CHECK(!lf__hash_parse(text, &back));
    }
    lf__hash128 h;
    CHECK(!lf__hash_parse("", &h));
    CHECK(!lf__hash_parse("0123456789abcdef0123456789abcdef0", &h));
    CHECK(lf__hash("a", 1, 0).lo != lf__hash("b", 1, 0).lo);
    CHECK(lf__hash("a", 1, 0).lo != lf__hash("a", 1, 1).lo);
    char empty[33];
    lf__hash_hex(lf__hash("", 0, 0), empty); /* XXH3-128 of nothing, from the algorithm's specification */
    CHECK_STR(empty, "99aa06d3014798d86001c324468d497f");
}

/* Known answers of the Random123 distribution. */
TEST(philox_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } rows[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        uint32_t out[4];
        lf__philox(rows[i].counter, rows[i].key, out);
        for (int j = 0; j < 4; j++) CHECK_EQ(out[j], rows[i].out[j]);
    }
}

TEST(random_streams_differ_by_every_name)
{
    uint32_t first[4];
    for (uint32_t i = 0; i < 4; i++) {
        lf__rng r;
        lf__rng_init(&r, 1 + (i == 3), i == 0, i == 1, i == 2);
        first[i] = lf__rng_u32(&r);
        for (uint32_t j = 0; j < i; j++) CHECK(first[i] != first[j]);
    }
    lf__rng a, b;
    lf__rng_init(&a, 7, 1, 2, 3);
    lf__rng_init(&b, 7, 1, 2, 3);
    int32_t seen[10] = {0};
    for (int i = 0; i < 20000; i++) {
        int32_t x = lf__rng_below(&a, 10);
        CHECK_EQ(x, lf__rng_below(&b, 10));
        CHECK(x >= 0 && x < 10);
        seen[x]++;
        double u = lf__rng_unit(&a);
        CHECK(u >= 0 && u < 1 && u == lf__rng_unit(&b));
    }
    for (int i = 0; i < 10; i++) CHECK(seen[i] > 1700 && seen[i] < 2300); /* 7 deviations; the seed is fixed */
}

TEST(permutation_is_a_bijection)
{
    enum { MOST = 70000 };
    static uint8_t hit[MOST];
    static const int64_t more[] = {1000, 4095, 4096, 4097, 65536, 65537, 69997};
    for (size_t k = 0; k < 260 + LF_COUNT(more); k++) {
        int64_t n = k < 260 ? (int64_t)k + 1 : more[k - 260];
        memset(hit, 0, sizeof hit);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = lf__permute(42 + k, n, i);
            CHECK(at >= 0 && at < n);
            CHECK_EQ(hit[at]++, 0);
        }
    }
    int64_t same = 0, fixed = 0, n = (int64_t)1 << 40;
    for (int64_t i = 0; i < 1000; i++) {
        CHECK(lf__permute(1, n, i) < n);
        same += lf__permute(1, 1000, i) == lf__permute(2, 1000, i);
        fixed += lf__permute(1, 1000, i) == i;
    }
    CHECK(same < 10 && fixed < 10); /* about one each by chance */
}

/* Nearest bf16, ties to even, by trying the neighbours in double precision. */
static uint16_t bf16_reference(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {x};
    uint16_t down = (uint16_t)(v.u >> 16), up = (uint16_t)(down + 1);
    if (isinf(x)) return down;
    double low = fabs((double)lf__f32_from_bf16(down)), high = fabs((double)lf__f32_from_bf16(up)), at = fabs((double)x);
    if ((up & 0x7fff) == 0x7f80) high = 2.0 * ldexp(1, 127); /* infinity stands for the next power of two */
    if (at - low != high - at) return at - low < high - at ? down : up;
    return down & 1 ? up : down;
}

TEST(bf16_rounds_to_nearest_even)
{
    lf__rng rng;
    lf__rng_init(&rng, 3, 0, 0, 0);
    for (uint32_t i = 0; i < 65536; i++) {
        float x = lf__f32_from_bf16((uint16_t)i);
        if (isnan(x)) CHECK(isnan(lf__f32_from_bf16(lf__bf16_from_f32(x))));
        else CHECK_EQ(lf__bf16_from_f32(x), i);
    }
    for (int i = 0; i < 300000; i++) {
        union {
            uint32_t u;
            float f;
        } v = {lf__rng_u32(&rng)};
        if (i % 3 == 0) v.u = (v.u & 0xffff0000u) | 0x8000u; /* ties */
        if (i % 3 == 1) v.u = (v.u & 0xffff0000u) | (0x7fffu + (v.u & 2u));
        if (isnan(v.f)) CHECK(isnan(lf__f32_from_bf16(lf__bf16_from_f32(v.f))));
        else CHECK_EQ(lf__bf16_from_f32(v.f), bf16_reference(v.f));
    }
}

TEST(rounding_up)
{
    CHECK_EQ(lf__round_up(0, 128), 0);
    CHECK_EQ(lf__round_up(1, 128), 128);
    CHECK_EQ(lf__round_up(128, 128), 128);
    CHECK_EQ(lf__round_up(7, 3), 9);
    CHECK(lf__is_pow2(1) && lf__is_pow2(4096) && !lf__is_pow2(0) && !lf__is_pow2(-4) && !lf__is_pow2(6));
}

/* ---- files */

TEST(files_are_replaced_whole_and_read_back)
{
    lf__io *io = lf__io_posix();
    const char *path = lf_test_path("file.txt");
    char *data;
    size_t bytes;
    bool there;
    CHECK_STATUS(lf__io_read_all(io, path, 100, &data, &bytes), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "file.txt");
    CHECK_OK(lf__io_replace(io, path, "one", 3));
    CHECK_OK(lf__io_replace(io, path, "second", 6));
    CHECK_OK(lf__io_read_all(io, path, 100, &data, &bytes));
    CHECK_EQ(bytes, 6);
    CHECK_STR(data, "second"); /* a 0 is behind the last byte */
    lf__free(data);
    CHECK_STATUS(lf__io_read_all(io, path, 5, &data, &bytes), LF_ERR_FORMAT);
    CHECK_OK(lf__io_replace(io, path, "", 0));
    CHECK_OK(lf__io_read_all(io, path, 5, &data, &bytes));
    CHECK_EQ(bytes, 0);
    lf__free(data);
    CHECK_STATUS(lf__io_replace(io, lf_test_path("no/such/folder"), "x", 1), LF_ERR_NOTFOUND);
    CHECK_OK(io->ops->exists(io, path, &there));
    CHECK(there);
}

static lf_status count_names(void *user, const char *name)
{
    CHECK(strcmp(name, ".") != 0 && strcmp(name, "..") != 0);
    ++*(int *)user;
    return LF_OK;
}

TEST(folders_are_listed_and_removed)
{
    lf__io *io = lf__io_posix();
    char dir[512], inner[600], path[700];
    int n = 0;
    bool there;
    snprintf(dir, sizeof dir, "%s", lf_test_path("tree"));
    CHECK_OK(lf__io_join(inner, sizeof inner, dir, "inner"));
    CHECK_OK(io->ops->make_dir(io, dir));
    CHECK_OK(io->ops->make_dir(io, inner));
    for (int i = 0; i < 5; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%d", i);
        CHECK_OK(lf__io_join(path, sizeof path, i < 3 ? dir : inner, name));
        CHECK_OK(lf__io_replace(io, path, name, 2));
    }
    CHECK_OK(io->ops->list(io, dir, count_names, &n));
    CHECK_EQ(n, 4); /* three files, one folder, no temporary left over */
    CHECK_OK(lf__io_remove_tree(io, dir));
    CHECK_OK(io->ops->exists(io, dir, &there));
    CHECK(!there);
    CHECK_OK(lf__io_remove_tree(io, dir)); /* nothing there is no error */
}

TEST(paths_are_joined_and_taken_apart)
{
    char path[16];
    CHECK_OK(lf__io_join(path, sizeof path, "a", "b"));
    CHECK_STR(path, "a/b");
    CHECK_STATUS(lf__io_join(path, sizeof path, "0123456789", "012345"), LF_ERR_INVALID);
    CHECK_OK(lf__io_dir_of(path, sizeof path, "x/y/z"));
    CHECK_STR(path, "x/y");
    CHECK_OK(lf__io_dir_of(path, sizeof path, "z"));
    CHECK_STR(path, ".");
    CHECK_OK(lf__io_dir_of(path, sizeof path, "/z"));
    CHECK_STR(path, "/");
}

LF_TEST_MAIN
