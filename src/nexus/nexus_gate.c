/* SPDX-License-Identifier: Apache-2.0 */
/* Runs that are held back for a moment while the device is busy, as far as somebody tells. It changes when, never what or in which
 * order; ranks need not agree. */
#include "nexus_int.h"

enum { ASK_NS = 500000 };

lf_status lf_nexus_gate(lf_nexus *nexus, lf_busy_fn busy, void *user)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    if (busy && nexus->opts.launch_busy_pct <= 0)
        LF_THROW(LF_ERR_STATE, "launch_busy_pct is 0, so nothing is held back; hint: open the handle with a bound");
    nexus->busy = busy;
    nexus->busy_user = user;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf__gate_hold(lf_nexus *nexus, lf_stream *stream)
{
    uint64_t capture = 0;
    if (!nexus->busy) return LF_OK;
    lf_status rc = lf__stream_capture(stream, &capture);
    if (rc < 0 || capture) return rc;
    const int64_t began = lf__now_ns(), until = began + (int64_t)(nexus->opts.launch_wait_ms * 1e6);
    int64_t now = began;
    while (nexus->busy(nexus->busy_user) > nexus->opts.launch_busy_pct && now < until) {
        lf__sleep_ns(until - now < ASK_NS ? until - now : ASK_NS);
        now = lf__now_ns();
    }
    nexus->held_s += (double)(now - began) * 1e-9;
    return LF_OK;
}
