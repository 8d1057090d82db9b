/* SPDX-License-Identifier: Apache-2.0 */
/* Queueing stamps. The CPU's are host functions in stream order; other devices launch them. */
#include "scope_int.h"

static lf_status stamp_now(void *user)
{
    lf__meter_stamp(user, lf__now_ns());
    return LF_OK;
}

lf_status lf__stamp_queue(lf__follow *follow, const lf__stamp *stamp, lf_stream *stream)
{
    if (!follow->kernels) return lf_stream_run(stream, stamp_now, (void *)stamp);
    uint64_t capture;
    lf_status rc = lf__stream_capture(stream, &capture);
    if (rc < 0) return rc;
    if (capture && (stamp->what == LF_STAMP_OPEN || stamp->what == LF_STAMP_CLOSE))
        return LF_FAIL(LF_ERR_STATE, "a step begins or ends while its stream is captured; hint: capture inside a step or between "
                                     "two, and begin and end a step around replays");
    if (capture) __atomic_store_n(&follow->captured, 1, __ATOMIC_RELAXED);
    return follow->kernels->stamp(follow->device->context, lf_stream_native(stream), stamp);
}
