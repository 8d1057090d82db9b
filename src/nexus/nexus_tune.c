/* SPDX-License-Identifier: Apache-2.0 */
/* The chunk size, tuned: sizes are tried one after another, each for a few steps, and the quickest stays. All ranks count the same steps and
 * decide on the slowest one's figure, so they take the same size in the same step. docs/internals/nexus.md has the times of a try. */
#include <math.h>
#include <stdlib.h>

#include "nexus_int.h"

static const double WORTH = 0.98; /* of the first size's time: a change must win by so much */

/* ---- which size, and for how long -------------------------------------------------------------------------------------- */

static void add_size(nexus_tuner *t, int64_t bytes)
{
    if (bytes == t->bytes[0] && t->n) return;
    t->seconds[t->n] = INFINITY;
    t->bytes[t->n++] = bytes;
}

void lf__tuner_init(nexus_tuner *t, int64_t first, int64_t least, int64_t most)
{
    *t = (nexus_tuner){.skip = TUNE_START + TUNE_SKIP};
    add_size(t, first);
    for (int64_t bytes = least; bytes < most; bytes *= 4) add_size(t, bytes);
    add_size(t, most);
}

bool lf__tuner_step(nexus_tuner *t)
{
    if (t->settled || t->skip-- > 0) return false;
    t->skip = 0;
    t->times++;
    return true;
}

static int compare_times(const void *a_, const void *b_)
{
    const double a = *(const double *)a_, b = *(const double *)b_;
    return a < b ? -1 : a > b;
}

double lf__tuner_figure(double *times, int32_t n)
{
    int32_t good = 0;
    for (int32_t i = 0; i < n; i++)
        if (isfinite(times[i]) && times[i] > 0) times[good++] = times[i];
    if (!good) return INFINITY;
    qsort(times, (size_t)good, sizeof *times, compare_times);
    return good % 2 ? times[good / 2] : (times[good / 2 - 1] + times[good / 2]) / 2;
}

/* Of equal ones the one that was tried first. */
static int32_t quickest(const nexus_tuner *t)
{
    int32_t best = 0;
    for (int32_t i = 1; i < t->n; i++)
        if (t->seconds[i] < t->seconds[best]) best = i;
    return isfinite(t->seconds[0]) && t->seconds[best] <= WORTH * t->seconds[0] ? best : 0;
}

void lf__tuner_take(nexus_tuner *t, double seconds)
{
    if (!t->again || seconds < t->seconds[t->now]) t->seconds[t->now] = seconds;
    t->n_tried += !t->again;
    t->skip = TUNE_SKIP;
    t->times = 0;
    if (t->n_tried < t->n) {
        t->now++;
        return;
    }
    const int32_t best = quickest(t);
    const bool done = t->again || best == 0;
    t->now = done ? best : 0;
    t->settled = done;
    t->again = true;
}

/* ---- opening ----------------------------------------------------------------------------------------------------------- */

/* How a size cuts the map. */
static lf_status digest_cut(const lf_nexus *nexus, int64_t chunk_bytes, lf__hash128 *digest)
{
    nexus_schedule plan = {0};
    lf_status rc = lf__nexus_schedule(&plan, nexus->map, chunk_bytes, nexus->opts.run_bytes);
    *digest = (lf__hash128){0};
    for (int32_t i = 0; i < plan.n_chunks && rc == LF_OK; i++) {
        const lf_range *r = &plan.chunks[i].range;
        const int64_t terms[] = {(int64_t)digest->hi, (int64_t)digest->lo, r->klass, r->offset, r->count};
        *digest = lf__hash(terms, sizeof terms, 0);
    }
    lf__nexus_schedule_free(&plan);
    return rc;
}

/* Sizes that cut the same chunks as one before go. */
static lf_status drop_equal_cuts(const lf_nexus *nexus, nexus_tuner *t)
{
    lf__hash128 cuts[TUNE_SIZES];
    int32_t kept = 0;
    for (int32_t i = 0; i < t->n; i++) {
        lf_status rc = digest_cut(nexus, t->bytes[i], &cuts[kept]);
        if (rc < 0) return rc;
        int32_t k = 0;
        while (k < kept && (cuts[k].hi != cuts[kept].hi || cuts[k].lo != cuts[kept].lo)) k++;
        if (k == kept) t->bytes[kept++] = t->bytes[i];
    }
    t->n = kept;
    return LF_OK;
}

static lf_status choose_sizes(lf_nexus *nexus, nexus_tuner *t, const char **why)
{
    const lf_nexus_options *o = &nexus->opts;
    if (o->chunk_least > o->chunk_bytes || o->chunk_bytes > o->chunk_most)
        return LF_FAIL(LF_ERR_INVALID,
                       "chunk_bytes is %lld, expected chunk_least %lld to chunk_most %lld; hint: it is the first size "
                       "that chunk_tune tries",
                       (long long)o->chunk_bytes, (long long)o->chunk_least, (long long)o->chunk_most);
    *why = nexus->transport.world < 2 ? "one rank sends nothing" : lf__nexus_why_fixed(nexus);
    if (*why) return LF_OK;
    lf__tuner_init(t, o->chunk_bytes, o->chunk_least, o->chunk_most);
    lf_status rc = drop_equal_cuts(nexus, t);
    if (t->n == 1) *why = "all sizes from chunk_least to chunk_most cut the same chunks";
    return rc;
}

lf_status lf__tune_open(lf_nexus *nexus)
{
    nexus_tuner *t = &nexus->tuning.tuner;
    nexus->tuning.why = nexus->opts.chunk_tune ? NULL : "chunk_tune is off";
    lf_status rc = nexus->opts.chunk_tune ? choose_sizes(nexus, t, &nexus->tuning.why) : LF_OK;
    if (nexus->tuning.why) *t = (nexus_tuner){.settled = true};
    return rc;
}

void lf__tune_close(lf_nexus *nexus)
{
    for (int32_t i = 0; i < TUNE_TRIES; i++) {
        lf_event_close(nexus->tuning.laps[i].from);
        lf_event_close(nexus->tuning.laps[i].to);
    }
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

static lf_status begin_lap(lf_nexus *nexus, nexus_lap *lap, lf_stream *stream)
{
    lf_status rc = LF_OK;
    lap->by_events = stream != NULL;
    lap->began_ns = lf__now_ns();
    if (!stream) return LF_OK;
    if (!lap->from) LF_TRY(lf_event_open(nexus->device, &lap->from));
    if (!lap->to) LF_TRY(lf_event_open(nexus->device, &lap->to));
    rc = lf_event_record(lap->from, stream);
out:
    return rc;
}

static lf_status end_lap(nexus_lap *lap, lf_stream *stream)
{
    if (lap->by_events) return lf_event_record(lap->to, stream);
    lap->seconds = (double)(lf__now_ns() - lap->began_ns) * 1e-9;
    return LF_OK;
}

/* The host waits for the newest; a clock that fails makes the size unknown here, and so everywhere. */
static double read_laps(nexus_lap *laps)
{
    double times[TUNE_TRIES];
    if (laps[TUNE_TRIES - 1].by_events) lf_event_sync(laps[TUNE_TRIES - 1].to);
    for (int32_t i = 0; i < TUNE_TRIES; i++) {
        times[i] = laps[i].seconds;
        if (laps[i].by_events && lf_event_elapsed(laps[i].from, laps[i].to, &times[i]) != LF_OK) times[i] = 0;
    }
    return lf__tuner_figure(times, TUNE_TRIES);
}

/* A try is over. */
static lf_status decide(lf_nexus *nexus, lf_stream *stream, int32_t *changed)
{
    nexus_tuner *t = &nexus->tuning.tuner;
    double seconds = read_laps(nexus->tuning.laps);
    lf_status rc = lf__nexus_agree_on_largest(nexus, &seconds, 1);
    if (rc < 0) return lf__nexus_fail_step(nexus, lf__fail_prefix(rc, "comparing times of steps (chunk_tune)"));
    lf__tuner_take(t, seconds);
    if (t->bytes[t->now] == nexus->opts.chunk_bytes) return LF_OK;
    *changed = 1;
    return lf__nexus_retune(nexus, t->bytes[t->now], stream);
}

static lf_status check_between(lf_nexus *nexus)
{
    lf_status rc = lf__nexus_check_health(nexus);
    if (rc == LF_OK && nexus->running) return LF_FAIL(LF_ERR_STATE, "tuning goes by whole steps, and one is running");
    return rc;
}

lf_status lf_nexus_tune_begin(lf_nexus *nexus, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    nexus_tuning *tuning = &nexus->tuning;
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    if (tuning->tuner.settled || !nexus->transport.post) goto out;
    LF_TRY(check_between(nexus));
    LF_TRY(begin_lap(nexus, &tuning->laps[tuning->tuner.times], stream));
    tuning->begun = true;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_tune_end(lf_nexus *nexus, lf_stream *stream, int32_t counts, int32_t *changed)
{
    LF_CHECK_ARG(nexus && changed, "nexus or changed is NULL");
    nexus_tuning *tuning = &nexus->tuning;
    lf_status rc = LF_OK;
    *changed = 0;
    lf__lock(nexus->mutex);
    if (tuning->tuner.settled || !nexus->transport.post) goto out;
    LF_TRY(check_between(nexus));
    if (!tuning->begun) LF_THROW(LF_ERR_STATE, "the end of a step whose begin was not told; hint: lf_nexus_tune_begin");
    tuning->begun = false;
    nexus_lap *lap = &tuning->laps[tuning->tuner.times];
    if (lap->by_events != (stream != NULL))
        LF_THROW(LF_ERR_INVALID, "a step that begins on a stream and ends without one, or the other way round");
    LF_TRY(end_lap(lap, stream));
    if (!counts || !lf__tuner_step(&tuning->tuner) || tuning->tuner.times < TUNE_TRIES) goto out;
    LF_TRY(decide(nexus, stream, changed));
out:
    lf__unlock(nexus->mutex);
    return rc;
}

static double known(double seconds) { return isfinite(seconds) ? seconds : 0; }

lf_status lf_nexus_get_tuning(const lf_nexus *nexus, lf_tuning_info *info)
{
    LF_CHECK_ARG(nexus && info, "nexus or info is NULL");
    LF_CHECK_ARG(info->size == sizeof *info, "lf_tuning_info: size is %zu, expected %zu", info->size, sizeof *info);
    lf__lock(nexus->mutex);
    const nexus_tuner *t = &nexus->tuning.tuner;
    *info = (lf_tuning_info){.size = sizeof *info,
                             .chunk_bytes = nexus->opts.chunk_bytes,
                             .first_bytes = t->n ? t->bytes[0] : nexus->opts.chunk_bytes,
                             .n_sizes = t->n,
                             .n_tried = t->n_tried,
                             .settled = t->settled || !nexus->transport.post,
                             .first_s = t->n ? known(t->seconds[0]) : 0,
                             .chunk_s = t->n ? known(t->seconds[t->now]) : 0,
                             .why = nexus->transport.post ? "" : "no transport"};
    if (nexus->tuning.why) info->why = nexus->tuning.why;
    lf__unlock(nexus->mutex);
    return LF_OK;
}
