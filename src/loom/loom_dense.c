/* SPDX-License-Identifier: Apache-2.0 */
/* Public calls of the dense rest of a step: norms and the loss. Check, fill the args, run or queue. */
#include <math.h>

#include "loom_int.h"

/* (n, d) arrays: neither a count of rows nor of bytes overflows. */
static lf_status check_matrix(int64_t n, int64_t d, const char *name)
{
    LF_CHECK_ARG(n >= 0 && n <= INT32_MAX, "n is %lld rows, expected 0 to %d", (long long)n, INT32_MAX);
    LF_CHECK_ARG(d >= 0 && (n == 0 || d <= INT64_MAX / 8 / n), "%s is %lld, expected 0 or more", name, (long long)d);
    return LF_OK;
}

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

static lf_status check_norm(const lf__loom_norm_args *a, int32_t writes_sum)
{
    const bool some = a->rows.n > 0 && a->rows.d > 0;
    LF_CHECK_ARG(a->eps >= 0 && isfinite(a->eps), "eps is %g, expected 0 or more", (double)a->eps);
    LF_CHECK_ARG(!some || (a->x && a->weight && a->normed), "x, weight or normed is NULL");
    LF_CHECK_ARG(!some || !writes_sum || a->rows.out, "sum is NULL");
    LF_CHECK_ARG(a->rows.n == 0 || a->rstd, "rstd is NULL");
    return LF_OK;
}

lf_status lf_loom_add_norm(lf_device *device, lf_stream *stream, const void *x, const void *y, const float *weight, float eps,
                           int64_t n, int64_t d, int32_t dtype, void *sum, void *normed, float *rstd)
{
    const lf__loom_norm_args a = {.rows = {.a = y, .n = n, .d = d, .dtype = dtype, .out = y ? sum : NULL},
                                  .x = x,
                                  .weight = weight,
                                  .eps = eps,
                                  .normed = normed,
                                  .rstd = rstd};
    lf_status rc = check_matrix(n, d, "d");
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", dtype);
    if (rc == LF_OK) rc = check_norm(&a, y != NULL);
    return rc < 0 ? rc : LF_LOOM_SUBMIT(device, stream, add_norm, .norm = a);
}

lf_status lf_loom_combine_add_norm(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys, int64_t n,
                                   int32_t e, int32_t k, int64_t d, int32_t dtype, const void *x, const float *norm_weight,
                                   float eps, void *sum, void *normed, float *rstd)
{
    LF_CHECK_ARG(routing, "routing is NULL");
    const lf__loom_norm_args a = {
        .rows = {.routing = *routing, .a = ys, .n = n, .d = d, .e = e, .k = k, .dtype = dtype, .out = sum},
        .x = x,
        .weight = norm_weight,
        .eps = eps,
        .normed = normed,
        .rstd = rstd};
    lf_status rc = lf__loom_check_rows(&a.rows, LF_LOOM_SLOT | LF_LOOM_WEIGHT);
    if (rc == LF_OK) rc = check_norm(&a, 1);
    return rc < 0 ? rc : LF_LOOM_SUBMIT(device, stream, combine_add_norm, .norm = a);
}

int64_t lf_loom_add_norm_workspace(int64_t n, int64_t d)
{
    if (n <= 0 || d <= 0) return 0;
    return (n < LF_LOOM_NORM_PARTS ? n : LF_LOOM_NORM_PARTS) * d * (int64_t)sizeof(float);
}

lf_status lf_loom_add_norm_backward(lf_device *device, lf_stream *stream, const void *sum, const float *weight, const float *rstd,
                                    const void *dsum, const void *dnormed, int64_t n, int64_t d, int32_t dtype, void *dx,
                                    float *dweight, int32_t accumulate, void *workspace)
{
    lf_status rc = check_matrix(n, d, "d");
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(n == 0 || d == 0 || (sum && weight && rstd && dnormed && dx), "sum, weight, rstd, dnormed or dx is NULL");
    LF_CHECK_ARG(d == 0 || dweight, "dweight is NULL");
    LF_CHECK_ARG(n == 0 || d == 0 || (workspace && (uintptr_t)workspace % 16 == 0),
                 "workspace is %p, expected an address on 16 bytes; hint: lf_loom_add_norm_workspace says how many", workspace);
    return LF_LOOM_SUBMIT(device, stream, add_norm_backward,
                          .norm_backward = {.sum = sum,
                                            .dsum = dsum,
                                            .dnormed = dnormed,
                                            .weight = weight,
                                            .rstd = rstd,
                                            .n = n,
                                            .d = d,
                                            .dx = dx,
                                            .dweight = dweight,
                                            .partial = workspace,
                                            .dtype = dtype,
                                            .accumulate = accumulate});
}

/* ---- loss ------------------------------------------------------------------------------------------------------------ */

lf_status lf_loom_cross_entropy(lf_device *device, lf_stream *stream, void *logits, const int64_t *target, int64_t n, int64_t v,
                                int64_t ld, int32_t dtype, float *row_loss, double *loss_sum, int32_t accumulate,
                                int32_t backward)
{
    LF_CHECK_ARG(v >= 1, "v is %lld classes, expected 1 or more", (long long)v);
    LF_CHECK_ARG(ld >= v, "ld is %lld, expected v = %lld or more", (long long)ld, (long long)v);
    lf_status rc = check_matrix(n, ld, "ld");
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(n == 0 || (logits && target && row_loss), "logits, target or row_loss is NULL");
    LF_CHECK_ARG(loss_sum, "loss_sum is NULL");
    return LF_LOOM_SUBMIT(device, stream, cross_entropy,
                          .loss = {.logits = logits,
                                   .target = target,
                                   .n = n,
                                   .v = v,
                                   .ld = ld,
                                   .row_loss = row_loss,
                                   .loss_sum = loss_sum,
                                   .dtype = dtype,
                                   .accumulate = accumulate,
                                   .backward = backward});
}
