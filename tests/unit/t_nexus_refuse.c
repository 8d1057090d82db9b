/* SPDX-License-Identifier: Apache-2.0 */
/* What NexusSync refuses, and what it says when its transport or memory fails. */
#include "nexus_recorder.h"

TEST(nexus_refuses_misuse)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_STATUS(lf_nexus_mark(nexus, 2, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "l0.qkv is marked before a step was begun");
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_STATE);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_STATE);
    CHECK_OK(lf_nexus_mark(nexus, 2, NULL));
    CHECK_STATUS(lf_nexus_mark(nexus, 2, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "l0.qkv is marked twice");
    CHECK_STATUS(lf_nexus_mark(nexus, 3, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "l0.frozen is frozen");
    CHECK_STATUS(lf_nexus_mark(nexus, -1, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_nexus_mark(nexus, 10000, NULL), LF_ERR_INVALID);
    CHECK_OK(lf_nexus_finish(nexus, NULL)); /* misuse does not end a step */
    CHECK_OK(lf_nexus_begin(nexus));
    lf_nexus_close(nexus); /* in the middle of a step */
    lf_map_unref(map);
}

TEST(nexus_refuses_to_open)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1), *bare = new_map(1, 4), *half = new_map(0, 4);
    lf_transport good = recorder_end(&rec), t = good;
    t.post = NULL;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.rank = 1;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.size = 20;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.world = 2; /* the recorder sums nothing: one rank answered */
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "summed over 1 ranks, expected 2");
    add_param(bare, "a", 10, LF_DTYPE_F32, 0, -1, 0);
    CHECK_OK(lf_map_plan(bare));
    CHECK_STATUS(lf_nexus_open(&nexus, bare, &good, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "not allocated");
    add_param(half, "a", 10, LF_DTYPE_F16, 0, -1, 0);
    CHECK_OK(lf_map_plan(half));
    CHECK_OK(lf_map_allocate(half, device));
    CHECK_STATUS(lf_nexus_open(&nexus, half, &good, NULL), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "f16");
    CHECK(nexus == NULL);
    CHECK_EQ(rec.closed, 0);                   /* a transport that was not taken stays the caller's */
    good.size = offsetof(lf_transport, query); /* a caller built before `query` */
    CHECK_OK(lf_nexus_open(&nexus, map, &good, NULL));
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_map_unref(bare);
    lf_map_unref(half);
}

TEST(nexus_names_the_chunk_that_fails)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    open_recorder(&rec, map, 4096, &nexus);
    rec.fail_post = 1;
    CHECK_OK(lf_nexus_begin(nexus));
    lf_status rc = LF_OK;
    for (int32_t b = lf_map_n_blocks(map) - 1; b >= 0 && rc == LF_OK; b--)
        if (!(block_at(map, b).flags & LF_PARAM_FROZEN)) rc = lf_nexus_mark(nexus, b, NULL);
    CHECK_EQ(rc, LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "chunk 1 of ");
    CHECK_HAS(lf_error_text(), "(group dense, ");
    CHECK_HAS(lf_error_text(), "the wire broke");
    lf_error_clear();
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_PEER); /* never silent */
    CHECK_HAS(lf_error_text(), "the wire broke");
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_PEER);
    CHECK_EQ(rec.n_posts, 1);
    lf_nexus_close(nexus);
    open_recorder(&rec, map, 4096, &nexus);
    rec.fail_wait = 2;
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_TIMEOUT);
    CHECK_HAS(lf_error_text(), "chunk 2 of ");
    CHECK_HAS(lf_error_text(), "deadline passed"); /* words for a transport that gave none */
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nexus_open_without_memory)
{
    set_up();
    lf_map *map = make_small(1);
    for (int64_t at = 1;; at++) {
        lf_transport end;
        lf_nexus *nexus = NULL;
        CHECK_OK(lf_loopback_open(1, &end));
        lf__alloc_fail_at(at);
        lf_status rc = lf_nexus_open(&nexus, map, &end, NULL);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) {
            lf_nexus_close(nexus);
            break;
        }
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(nexus == NULL && at < 200);
        end.close(end.user);
    }
    lf_map_unref(map);
}

LF_TEST_MAIN
