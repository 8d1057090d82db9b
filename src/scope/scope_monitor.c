/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that samples a GPU, a ring of samples, their means. */
#include "scope_nvml.h"

enum { N_FIELDS = (sizeof(lf_monitor_sample) - offsetof(lf_monitor_sample, sm_pct)) / sizeof(double) };

struct lf_monitor {
    lf__nvml nvml; /* the thread's */
    int64_t interval_ns;
    lf__thread *thread;
    lf__mutex *mutex; /* guards the rest */
    bool stop;
    int64_t n, missed, first_ns, last_ns;
    double sum[N_FIELDS], most[N_FIELDS];
    int64_t told[N_FIELDS];
    lf_monitor_sample ring[LF_MONITOR_KEPT];
};

static double *fields_of(lf_monitor_sample *s) { return &s->sm_pct; }

static void keep(lf_monitor *m, lf_monitor_sample *s)
{
    lf__lock(m->mutex);
    const double *value = fields_of(s);
    for (int32_t f = 0; f < N_FIELDS; f++) {
        if (value[f] < 0) continue;
        m->sum[f] += value[f];
        if (m->told[f]++ == 0 || value[f] > m->most[f]) m->most[f] = value[f];
    }
    if (m->n == 0) m->first_ns = s->t_ns;
    m->last_ns = s->t_ns;
    m->ring[m->n++ % LF_MONITOR_KEPT] = *s;
    lf__unlock(m->mutex);
}

/* Samples come at multiples of the interval; while the driver takes longer, multiples are missed. */
static void run(void *user)
{
    lf_monitor *m = user;
    int64_t next = lf__now_ns();
    bool stop = false;
    while (!stop) {
        lf_monitor_sample s;
        lf__nvml_sample(&m->nvml, &s);
        keep(m, &s);
        const int64_t late = (lf__now_ns() - next) / m->interval_ns;
        next += (late + 1) * m->interval_ns;
        lf__lock(m->mutex);
        m->missed += late;
        for (int64_t left; !m->stop && (left = next - lf__now_ns()) > 0;) lf__wait_ns(m->mutex, left);
        stop = m->stop;
        lf__unlock(m->mutex);
    }
}

lf_status lf_monitor_open(lf_monitor **out, const char *gpu, int32_t interval_ms, const char *library)
{
    LF_CHECK_ARG(out && gpu, "out or gpu is NULL");
    *out = NULL;
    LF_CHECK_ARG(interval_ms >= 0 && interval_ms <= 60000, "interval_ms is %d, expected 0 to 60000", interval_ms);
    lf_status rc = LF_OK;
    lf_monitor *m = lf__alloc(sizeof *m);
    if (!m) return LF_FAIL(LF_ERR_NOMEM, "a monitor");
    m->interval_ns = (int64_t)(interval_ms ? interval_ms : LF_MONITOR_MS) * 1000000;
    m->mutex = lf__mutex_open();
    if (!m->mutex) LF_THROW(LF_ERR_NOMEM, "a monitor");
    LF_TRY(lf__nvml_open(&m->nvml, gpu, library));
    LF_TRY(lf__thread_start(&m->thread, "monitor", run, m));
    *out = m;
    return LF_OK;
out:
    lf_monitor_close(m);
    return rc;
}

void lf_monitor_close(lf_monitor *m)
{
    if (!m) return;
    if (m->thread) {
        lf__lock(m->mutex);
        m->stop = true;
        lf__wake(m->mutex);
        lf__unlock(m->mutex);
        lf__thread_join(m->thread);
    }
    lf__nvml_close(&m->nvml);
    lf__mutex_close(m->mutex);
    lf__free(m);
}

lf_status lf_monitor_latest(const lf_monitor *m, int32_t back, lf_monitor_sample *sample)
{
    LF_CHECK_ARG(m && sample && back >= 0, "monitor or sample is NULL, or back is negative");
    LF_CHECK_ARG(sample->size == sizeof *sample, "lf_monitor_sample: size is %zu, expected %zu", sample->size, sizeof *sample);
    lf__lock(m->mutex);
    const bool kept = back < LF_MONITOR_KEPT && back < m->n;
    if (kept) *sample = m->ring[(m->n - 1 - back) % LF_MONITOR_KEPT];
    lf__unlock(m->mutex);
    return kept ? LF_OK : LF_END;
}

lf_status lf_monitor_get(const lf_monitor *m, lf_monitor_summary *summary)
{
    LF_CHECK_ARG(m && summary, "monitor or summary is NULL");
    LF_CHECK_ARG(summary->size == sizeof *summary, "lf_monitor_summary: size is %zu, expected %zu", summary->size,
                 sizeof *summary);
    lf__lock(m->mutex);
    *summary = (lf_monitor_summary){.size = sizeof *summary, .samples = m->n, .missed = m->missed};
    summary->mean.size = summary->most.size = sizeof summary->mean;
    summary->mean.t_ns = m->first_ns;
    summary->most.t_ns = m->last_ns;
    for (int32_t f = 0; f < N_FIELDS; f++) {
        fields_of(&summary->mean)[f] = m->told[f] ? m->sum[f] / (double)m->told[f] : -1;
        fields_of(&summary->most)[f] = m->told[f] ? m->most[f] : -1;
    }
    lf__unlock(m->mutex);
    return LF_OK;
}
