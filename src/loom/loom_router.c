/* SPDX-License-Identifier: Apache-2.0 */
/* Public calls of the router: check, fill the args, run or queue. */
#include "loom_int.h"

static lf_status check_router(int64_t n, int32_t e, int64_t d)
{
    LF_CHECK_ARG(e >= 1 && e <= LF_MAX_EXPERTS, "e is %d experts, expected 1 to %d", e, LF_MAX_EXPERTS);
    LF_CHECK_ARG(n >= 0 && n <= INT32_MAX, "n is %lld tokens, expected 0 to %d", (long long)n, INT32_MAX);
    LF_CHECK_ARG(d >= 0 && d <= INT32_MAX / LF_MAX_EXPERTS, "d is %lld features, expected 0 to %d", (long long)d,
                 INT32_MAX / LF_MAX_EXPERTS);
    return LF_OK;
}

/* Tokens of a chunk: enough chunks to fill a large device, of 128 to 2048 tokens, so that a sum in f32 stays short. */
static int32_t router_chunk(int64_t n, int64_t d)
{
    enum { UNITS = 256, FEATURES = 128, LEAST = 128, MOST = 2048 };
    const int64_t groups = (d + FEATURES - 1) / FEATURES, wanted = groups && groups < UNITS ? UNITS / groups : 1;
    const int64_t chunk = ((n + wanted - 1) / wanted + LEAST - 1) / LEAST * LEAST;
    return (int32_t)(chunk < LEAST ? LEAST : chunk > MOST ? MOST : chunk);
}

static int32_t router_chunks(int64_t n, int64_t d) { return (int32_t)((n + router_chunk(n, d) - 1) / router_chunk(n, d)); }

lf_status lf_loom_router(lf_device *device, lf_stream *stream, const void *x, const float *weight, int64_t n, int32_t e,
                         int64_t d, int32_t dtype, float *logits)
{
    lf_status rc = check_router(n, e, d);
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(n == 0 || (logits && (d == 0 || (x && weight))), "x, weight or logits is NULL");
    return LF_LOOM_SUBMIT(device, stream, router,
                          .router = {.x = x, .a = weight, .n = n, .d = d, .e = e, .dtype = dtype, .out = logits});
}

lf_status lf_loom_router_backward(lf_device *device, lf_stream *stream, const float *dlogits, const void *x, int64_t n, int32_t e,
                                  int64_t d, int32_t dtype, float *dweight, int32_t accumulate, void *workspace)
{
    lf_status rc = check_router(n, e, d);
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(d == 0 || dweight, "dweight is NULL");
    LF_CHECK_ARG(n == 0 || d == 0 || (dlogits && x && workspace), "dlogits, x or workspace is NULL");
    LF_CHECK_ARG((uintptr_t)workspace % 16 == 0, "workspace is %p, expected a multiple of 16", workspace);
    return LF_LOOM_SUBMIT(device, stream, router_backward,
                          .router = {.x = x,
                                     .a = dlogits,
                                     .n = n,
                                     .d = d,
                                     .e = e,
                                     .dtype = dtype,
                                     .accumulate = accumulate,
                                     .chunk = router_chunk(n, d),
                                     .n_chunks = router_chunks(n, d),
                                     .out = dweight,
                                     .workspace = workspace});
}

int64_t lf_loom_router_workspace(int64_t n, int32_t e, int64_t d)
{
    lf_status rc = check_router(n, e, d);
    return rc < 0 ? rc : router_chunks(n, d) * (int64_t)e * d * (int64_t)sizeof(float);
}
