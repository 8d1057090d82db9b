/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_ranks.h  Ranks as threads, for NexusSync's tests: each has its end of a transport, of the loopback unless it opens
 *  another, and with a map to make that map under NexusSync. What only one program's ranks have lies beside `ranks`, by rank. */
#ifndef LF_NEXUS_RANKS_H
#define LF_NEXUS_RANKS_H

#include "nexus_fixture.h"

enum { RANKS_MOST = 8 };

typedef struct rank {
    lf_transport t; /* rank and world are there before it is open */
    lf_nexus_options opts;
    lf_status (*open_end)(struct rank *r);     /* opens t on the rank's thread; NULL: it is open */
    lf_map *(*make_map)(const struct rank *r); /* NULL: the transport alone */
    void (*run)(struct rank *r);               /* with all below open, as far as it is wanted; leaves its status */
    int32_t grad_f32, steps;
    bool on_stream;
    lf_stream *stream;
    lf_map *map;
    lf_nexus *nexus;
    lf_status status;
    char text[600], wrong[300]; /* the error of status; what else the rank found */
    lf_nexus_stats stats;       /* at its end */
    lf_tuning_info tuning;
    lf__thread *thread;
} rank;

static rank ranks[RANKS_MOST];

/* What a rank finds first. CHECK belongs to the main thread. */
#define WRONG(...)                                                          \
    do {                                                                    \
        if (!r->wrong[0]) snprintf(r->wrong, sizeof r->wrong, __VA_ARGS__); \
    } while (0)

static inline lf_status open_rank(rank *r)
{
    lf_status rc = r->on_stream ? lf_stream_open(device, 0, &r->stream) : LF_OK;
    if (rc == LF_OK && r->open_end) rc = r->open_end(r);
    if (rc < 0 || !r->make_map) return rc;
    r->map = r->make_map(r);
    return lf_nexus_open(&r->nexus, r->map, &r->t, &r->opts);
}

static inline void close_rank(rank *r)
{
    r->stats = (lf_nexus_stats){.size = sizeof r->stats};
    r->tuning = (lf_tuning_info){.size = sizeof r->tuning};
    if (r->nexus && lf_nexus_get_stats(r->nexus, &r->stats) < 0) WRONG("%s", lf_error_text());
    if (r->nexus && lf_nexus_get_tuning(r->nexus, &r->tuning) < 0) WRONG("%s", lf_error_text());
    if (r->nexus) lf_nexus_close(r->nexus); /* with its transport */
    else if (r->t.close) r->t.close(r->t.user);
    lf_stream_close(r->stream);
    lf_map_unref(r->map);
}

static inline void enter(void *user)
{
    rank *r = user;
    r->status = open_rank(r);
    if (r->status == LF_OK) r->run(r);
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    close_rank(r);
}

/* On the loopback, with small chunks. */
static inline void prepare(int32_t world, lf_map *(*make_map)(const rank *), void (*run)(rank *))
{
    lf_transport ends[RANKS_MOST];
    set_up();
    CHECK_OK(lf_loopback_open(world, ends));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] = (rank){.t = ends[i], .make_map = make_map, .run = run, .grad_f32 = 1, .steps = 1};
        CHECK_OK(lf_options_init("nexus", &ranks[i].opts, sizeof ranks[i].opts));
        ranks[i].opts.chunk_bytes = 4096;
        ranks[i].opts.timeout_s = 20;
    }
}

static inline void run_ranks(int32_t world)
{
    for (int32_t i = 0; i < world; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", enter, &ranks[i]));
    for (int32_t i = 0; i < world; i++) lf__thread_join(ranks[i].thread);
    for (int32_t i = 0; i < world; i++) CHECK_STR(ranks[i].wrong, "");
}

static inline void all_are(int32_t world, lf_status status)
{
    for (int32_t i = 0; i < world; i++)
        if (ranks[i].status != status)
            FAIL_("rank %d of %d: %s: %s, expected %s", i, world, lf_status_name(ranks[i].status), ranks[i].text,
                  lf_status_name(status));
}

#endif
