/* SPDX-License-Identifier: Apache-2.0 */
/* Slots, streams, other devices; closing early; a lack of memory. */
#include <stdatomic.h>

#include "loader_fixture.h"

TEST(held_slots_are_never_reused)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.depth = 3;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b[4];
    row_print before[3];
    for (int32_t i = 0; i < 4; i++) b[i] = (lf_batch){.size = sizeof b[i]};
    for (int32_t i = 0; i < 3; i++) {
        CHECK_OK(lf_loader_next(loader, &b[i], NULL));
        before[i] = print_row(&b[i], 0);
    }
    CHECK_STATUS(lf_loader_next(loader, &b[3], NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "all 3 batch slots");
    CHECK_OK(lf_batch_release(loader, &b[1], NULL)); /* the middle one: slots are not a queue */
    CHECK_STATUS(lf_batch_release(loader, &b[1], NULL), LF_ERR_STATE);
    CHECK_OK(lf_loader_next(loader, &b[3], NULL));
    CHECK_EQ(b[3].number, 3);
    CHECK_EQ(b[3].slot, b[1].slot);
    CHECK_STATUS(lf_batch_release(loader, &b[1], NULL), LF_ERR_STATE); /* the slot is another batch's now */
    for (int32_t i = 0; i < 3; i += 2) {
        row_print now = print_row(&b[i], 0);
        CHECK(memcmp(&now.digest, &before[i].digest, 16) == 0);
    }
    b[0].slot = 99;
    CHECK_STATUS(lf_batch_release(loader, &b[0], NULL), LF_ERR_INVALID);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

typedef struct slow_reader {
    const float *images;
    lf__hash128 digest;
    _Atomic int32_t done;
} slow_reader;

static lf_status read_slowly(void *user)
{
    slow_reader *r = user;
    lf__sleep_ns(50000000);
    r->digest = lf__hash(r->images, 4 * 3 * S * S * sizeof(float), 0);
    atomic_store(&r->done, 1);
    return LF_OK;
}

/* Work queued before the release still reads the slot: it must not change until that work is done. */
TEST(released_slot_waits_for_work_on_the_stream)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.depth = 1;
    lf_stream *stream;
    CHECK_OK(lf_stream_open(cpu(), 0, &stream));
    lf_loader *loader = open_loader(set, &o);
    for (int32_t k = 0; k < 3; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, stream));
        slow_reader r = {.images = b.images};
        lf__hash128 want = lf__hash(b.images, 4 * 3 * S * S * sizeof(float), 0);
        CHECK_OK(lf_stream_run(stream, read_slowly, &r));
        CHECK_OK(lf_batch_release(loader, &b, stream));
        lf_batch next = {.size = sizeof next};
        CHECK_OK(lf_loader_next(loader, &next, NULL));
        CHECK(atomic_load(&r.done));
        CHECK(memcmp(&want, &r.digest, sizeof want) == 0);
        CHECK_OK(lf_batch_release(loader, &next, NULL));
    }
    lf_loader_close(loader);
    lf_stream_close(stream);
    lf_dataset_close(set);
}

/* The way to another device, with the CPU's table under another kind: staged in host memory, copied on a stream. */
TEST(batches_for_another_device_are_copied_there)
{
    static lf__device_ops ops;
    ops = lf__device_cpu;
    ops.kind = 2;
    static lf_device other;
    other = (lf_device){.ops = &ops, .context = cpu()->context};
    atomic_init(&other.refs, 1000);
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    trace *want = trace_of(set, &o, 20), *got = calloc(1, sizeof *got);
    lf_loader *loader;
    lf_stream *stream;
    CHECK_OK(lf_loader_open(&loader, set, &other, &o));
    CHECK_OK(lf_stream_open(&other, 0, &stream));
    for (int32_t k = 0; k < 20; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, k % 2 ? stream : NULL));
        if (k % 2) CHECK_OK(lf_stream_sync(stream));
        for (int32_t i = 0; i < 4; i++) got->row[got->n++] = print_row(&b, i);
        CHECK_OK(lf_batch_release(loader, &b, k % 2 ? stream : NULL));
    }
    check_same(want->row, got->row, got->n, "other device");
    lf_loader_close(loader);
    lf_stream_close(stream);
    CHECK_EQ(atomic_load(&other.refs), 1000);
    free(want), free(got);
    lf_dataset_close(set);
}

TEST(closing_early_and_often_is_clean)
{
    lf_dataset *set = scenes(40);
    for (int32_t k = 0; k < 60; k++) {
        lf_loader_options o = options(4);
        o.depth = 1 + k % 5;
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        for (int32_t i = 0; i < k % 4 && i < o.depth; i++) CHECK_OK(lf_loader_next(loader, &b, NULL));
        lf_loader_close(loader);
    }
    lf_loader_options o = options(4);
    lf_loader *loader = open_loader(set, &o);
    lf_dataset_close(set); /* the loader keeps it open */
    lf_batch b = {.size = sizeof b};
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    lf_loader_close(loader);
    lf_loader_close(NULL);
}

TEST(open_survives_every_failing_allocation)
{
    lf_dataset *set = scenes(8);
    lf_loader_options o = options(2);
    lf_loader *loader;
    cpu();
    lf__alloc_fail_at(0);
    CHECK_OK(lf_loader_open(&loader, set, cpu(), &o));
    int64_t n = lf__alloc_fail_at(0);
    lf_loader_close(loader);
    CHECK(n > 40);
    for (int64_t i = 1; i <= n; i++) {
        lf__alloc_fail_at(i);
        lf_status rc = lf_loader_open(&loader, set, cpu(), &o);
        lf__alloc_fail_at(0);
        if (rc != LF_ERR_NOMEM || loader)
            FAIL_("allocation %lld of %lld failed: %s %s", (long long)i, (long long)n, lf_status_name(rc), lf_error_text());
        CHECK(strlen(lf_error_text()) > 0);
    }
    lf_dataset_close(set);
}

/* A lack of memory while it runs is an error of the run under every policy, not a bad sample. */
TEST(no_memory_in_a_stage_is_delivered)
{
    lf_dataset *set = scenes(8);
    int32_t met = 0;
    for (int64_t at = 1; at <= 6; at++) {
        lf_loader_options o = options(2);
        o.threads = 1;
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        lf__alloc_fail_at(at); /* decoders grow their scratch memory on the first images */
        lf_status rc = LF_OK;
        for (int32_t i = 0; i < 4 && rc == LF_OK; i++) {
            rc = lf_loader_next(loader, &b, NULL);
            if (rc == LF_OK) CHECK_OK(lf_batch_release(loader, &b, NULL));
        }
        lf__alloc_fail_at(0);
        if (rc < 0) {
            CHECK_EQ(rc, LF_ERR_NOMEM);
            met++;
        }
        lf_loader_close(loader);
    }
    CHECK(met >= 2);
    lf_dataset_close(set);
}

LF_TEST_MAIN
