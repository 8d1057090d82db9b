/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_recorder.h  A transport of one rank that moves nothing and writes down what it is asked to do, for NexusSync's tests; a
 *  small mixture of experts to ask it for; and how to make it fail. */
#ifndef LF_NEXUS_RECORDER_H
#define LF_NEXUS_RECORDER_H

#include "nexus_fixture.h"

enum { N_LAYERS = 4, N_EXPERTS = 5 };

static const model_shape small_model = {.high_load = 2,
                                        .n_layers = N_LAYERS,
                                        .n_experts = N_EXPERTS,
                                        .embed = 3000,
                                        .norm = 32,
                                        .qkv = 700,
                                        .frozen = 100,
                                        .expert = 500,
                                        .expert_step = 333,
                                        .head = 2500};

static inline lf_map *make_small(int32_t grad_f32)
{
    model_shape m = small_model;
    m.grad_f32 = grad_f32;
    return make_model(&m);
}

typedef struct recorder {
    int32_t n_posts, n_waits, fail_post, fail_wait, closed;
    bool done;
    const void *data[400];
    int64_t count[400];
    float seen[400]; /* the first element when it was posted */
    int32_t run_open, n_runs, fail_run, run_first[400], settled, n_memory;
    bool sick;
    const void *memory[8];
    int64_t memory_bytes[8];
} recorder;

static inline lf_status record_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    recorder *rec = user;
    lf_status rc = lf_stream_sync(stream);
    if (rc < 0) return rc;
    if (dtype != LF_DTYPE_I64) {
        if (rec->n_posts == rec->fail_post) return lf_transport_fail(LF_ERR_PEER, "the wire broke");
        rec->data[rec->n_posts] = data;
        rec->count[rec->n_posts] = count;
        rec->seen[rec->n_posts] = (float)get(data, 0, dtype);
        *ticket = 1000 + rec->n_posts++;
    }
    return LF_OK;
}

static inline lf_status record_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    recorder *rec = user;
    (void)stream, (void)timeout_s;
    if (ticket < 1000) return LF_OK; /* agreeing on the map: world 1 */
    if (ticket != 1000 + rec->n_waits) return lf_transport_fail(LF_ERR_INTERNAL, "waits out of order");
    if (rec->n_waits++ == rec->fail_wait) return LF_ERR_TIMEOUT; /* without a text */
    return LF_OK;
}

static inline lf_status record_query(void *user, int64_t ticket)
{
    const recorder *rec = user;
    return ticket < 1000 ? LF_ERR_INTERNAL : rec->done ? LF_OK : LF_AGAIN;
}

/* Runs are written down too: posts between open and close, and what they are called. */
static inline lf_status record_run(void *user, int32_t open, const char *label)
{
    recorder *rec = user;
    if (open == rec->run_open) return lf_transport_fail(LF_ERR_INTERNAL, "runs are not closed or not opened");
    rec->run_open = open;
    if (open) rec->run_first[rec->n_runs] = rec->n_posts;
    else rec->n_runs++;
    if (!strstr(label, "(chunks ")) return lf_transport_fail(LF_ERR_INTERNAL, "a run without a name");
    return rec->n_runs == rec->fail_run ? lf_transport_fail(LF_ERR_PEER, "the launch broke") : LF_OK;
}

static inline lf_status record_check(void *user)
{
    return ((const recorder *)user)->sick ? lf_transport_fail(LF_ERR_PEER, "a peer died meanwhile") : LF_OK;
}

static inline lf_status record_settle(void *user, double timeout_s)
{
    recorder *rec = user;
    rec->settled++;
    return timeout_s > 0 ? LF_OK : LF_ERR_INTERNAL;
}

static inline lf_status record_stats(void *user, lf_nexus_stats *stats)
{
    (void)user;
    stats->p50_s = 1;
    stats->p95_s = 2;
    stats->p99_s = 3;
    stats->busy_s = 4;
    return LF_OK;
}

static inline lf_status record_memory(void *user, void *base, int64_t bytes)
{
    recorder *rec = user;
    rec->memory[rec->n_memory] = base;
    rec->memory_bytes[rec->n_memory++] = bytes;
    return LF_OK;
}

static inline void record_close(void *user) { ((recorder *)user)->closed++; }

/* What a transport must have, and how to ask it whether something is done. */
static inline lf_transport recorder_end(recorder *rec)
{
    *rec = (recorder){.fail_post = -1, .fail_wait = -1, .fail_run = -1};
    return (lf_transport){.size = sizeof(lf_transport),
                          .name = "recorder",
                          .user = rec,
                          .rank = 0,
                          .world = 1,
                          .post = record_post,
                          .wait = record_wait,
                          .close = record_close,
                          .query = record_query};
}

static inline void open_recorder(recorder *rec, lf_map *map, int64_t chunk_bytes, lf_nexus **nexus)
{
    const lf_transport t = recorder_end(rec);
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = chunk_bytes;
    CHECK_OK(lf_nexus_open(nexus, map, &t, &opts));
}

/* With everything that a transport may have. */
static inline void open_full_recorder(recorder *rec, lf_map *map, int64_t run_bytes, lf_nexus **nexus)
{
    lf_transport t = recorder_end(rec);
    lf_nexus_options opts;
    t.run = record_run;
    t.check = record_check;
    t.memory = record_memory;
    t.settle = record_settle;
    t.stats = record_stats;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = 4096;
    opts.run_bytes = run_bytes;
    CHECK_OK(lf_nexus_open(nexus, map, &t, &opts));
}

static inline int32_t mark_layer(lf_nexus *nexus, const lf_map *map, int32_t layer, lf_stream *stream)
{
    int32_t n = 0;
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info info = block_at(map, b);
        if (info.layer != layer || info.flags & LF_PARAM_FROZEN) continue;
        CHECK_OK(lf_nexus_mark(nexus, b, stream));
        n++;
    }
    return n;
}

#endif
