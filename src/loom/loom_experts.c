/* SPDX-License-Identifier: Apache-2.0 */
/* Public calls of the experts' products: check, keep the layer, run or queue. */
#include "loom_int.h"

struct lf_experts {
    lf_device *device;
    const lf__loom_kernels *table;
    void *plan; /* the table's */
    lf__loom_layer layer;
    lf__loom_expert *expert; /* what layer.expert shows */
};

lf_status lf_experts_options_init(lf_experts_options *options)
{
    LF_CHECK_ARG(options, "options is NULL");
    *options = (lf_experts_options){.size = sizeof *options, .dtype = LF_DTYPE_BF16, .grad_dtype = LF_DTYPE_BF16};
    return LF_OK;
}

static lf_status check_expert(const lf_experts_options *o, int32_t i)
{
    const int32_t f = o->hidden[i];
    LF_CHECK_ARG(f >= 1 && f <= INT32_MAX / 2, "hidden size of expert %d is %d, expected 1 to %d", i, f, INT32_MAX / 2);
    LF_CHECK_ARG(o->max_rows <= INT64_MAX / 16 / f, "max_rows is %lld and the hidden size of expert %d %d: too large together",
                 (long long)o->max_rows, i, f);
    LF_CHECK_ARG(o->w_gu[i] && o->w_down[i], "w_gu or w_down of expert %d is NULL", i);
    LF_CHECK_ARG(!o->dw_gu || (o->dw_gu[i] && o->dw_down[i]), "dw_gu or dw_down of expert %d is NULL", i);
    return LF_OK;
}

static lf_status check_options(const lf_experts_options *o)
{
    LF_CHECK_ARG(o, "options is NULL");
    LF_CHECK_ARG(o->size == sizeof *o, "lf_experts_options: size is %zu, expected %zu; hint: lf_experts_options_init", o->size,
                 sizeof *o);
    LF_CHECK_ARG(o->n_experts >= 1 && o->n_experts <= LF_MAX_EXPERTS, "n_experts is %d, expected 1 to %d", o->n_experts,
                 LF_MAX_EXPERTS);
    LF_CHECK_ARG(o->d >= 1, "d is %d features, expected 1 or more", o->d);
    LF_CHECK_ARG(o->max_rows >= 0 && o->max_rows <= INT32_MAX, "max_rows is %lld, expected 0 to %d", (long long)o->max_rows,
                 INT32_MAX);
    lf_status rc = lf__loom_check_dtype("dtype", o->dtype);
    if (rc == LF_OK) rc = lf__loom_check_dtype("grad_dtype", o->grad_dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(o->hidden && o->w_gu && o->w_down, "hidden, w_gu or w_down is NULL");
    LF_CHECK_ARG(!o->dw_gu == !o->dw_down, "dw_gu is %s and dw_down %s, expected both or neither", o->dw_gu ? "given" : "NULL",
                 o->dw_down ? "given" : "NULL");
    for (int32_t i = 0; i < o->n_experts && rc == LF_OK; i++) rc = check_expert(o, i);
    return rc;
}

static lf_status keep_layer(lf_experts *e, const lf_experts_options *o)
{
    e->expert = lf__alloc_array((size_t)o->n_experts, sizeof *e->expert);
    if (!e->expert) return LF_FAIL(LF_ERR_NOMEM, "a plan of %d experts", o->n_experts);
    for (int32_t i = 0; i < o->n_experts; i++)
        e->expert[i] = (lf__loom_expert){.w_gu = o->w_gu[i],
                                         .w_down = o->w_down[i],
                                         .dw_gu = o->dw_gu ? o->dw_gu[i] : NULL,
                                         .dw_down = o->dw_down ? o->dw_down[i] : NULL,
                                         .hidden = o->hidden[i]};
    e->layer = (lf__loom_layer){.n_experts = o->n_experts,
                                .d = o->d,
                                .max_rows = o->max_rows,
                                .dtype = o->dtype,
                                .grad_dtype = o->grad_dtype,
                                .expert = e->expert};
    return LF_OK;
}

lf_status lf_experts_open(lf_experts **out, lf_device *device, const lf_experts_options *options)
{
    LF_CHECK_ARG(out, "out is NULL");
    *out = NULL;
    const lf__loom_kernels *table = NULL;
    lf_status rc = lf__loom_table(device, &table);
    if (rc == LF_OK) rc = check_options(options);
    if (rc < 0) return rc;
    if (!table->experts_open) return LF_FAIL(LF_ERR_UNSUPPORTED, "kernels %s lack the experts' products", table->name);
    lf_experts *e = lf__alloc(sizeof *e);
    if (!e) return LF_FAIL(LF_ERR_NOMEM, "a plan of %d experts", options->n_experts);
    e->device = lf__device_ref(device);
    e->table = table;
    LF_TRY(keep_layer(e, options));
    LF_TRY(table->experts_open(device->context, &e->layer, &e->plan));
    *out = e;
    return LF_OK;
out:
    lf_experts_close(e);
    return rc;
}

void lf_experts_close(lf_experts *e)
{
    if (!e) return;
    if (e->plan) e->table->experts_close(e->device->context, e->plan);
    lf_device_close(e->device);
    lf__free(e->expert);
    lf__free(e);
}

lf_device *lf_experts_device(const lf_experts *e) { return e ? e->device : NULL; }

/* Addresses of one call with their names; they may be NULL when there is room for no row. */
typedef struct named {
    const char *name;
    const void *address;
} named;

static lf_status check_call(const lf_experts *e, const int32_t *offset, const named *arrays, size_t n)
{
    LF_CHECK_ARG(e, "experts is NULL");
    LF_CHECK_ARG(offset, "offset is NULL");
    for (size_t i = 0; i < n; i++) LF_CHECK_ARG(arrays[i].address || e->layer.max_rows == 0, "%s is NULL", arrays[i].name);
    return LF_OK;
}

lf_status lf_experts_forward(lf_experts *e, lf_stream *stream, const int32_t *offset, const void *xs, void *gu, void *h, void *ys)
{
    const named arrays[] = {{"xs", xs}, {"gu", gu}, {"h", h}, {"ys", ys}};
    lf_status rc = check_call(e, offset, arrays, LF_COUNT(arrays));
    if (rc < 0) return rc;
    return LF_LOOM_SUBMIT(e->device, stream, experts_forward,
                          .experts = {.plan = e->plan, .offset = offset, .xs = xs, .gu = gu, .h = h, .ys = ys});
}

lf_status lf_experts_backward(lf_experts *e, lf_stream *stream, const int32_t *offset, const void *xs, const void *gu,
                              const void *h, const void *dys, void *dgu, void *dh, void *dxs, int32_t accumulate)
{
    const named arrays[] = {{"xs", xs}, {"gu", gu}, {"dys", dys}, {"dgu", dgu}, {"dh", dh}, {"dxs", dxs}};
    lf_status rc = check_call(e, offset, arrays, LF_COUNT(arrays));
    if (rc < 0) return rc;
    LF_CHECK_ARG(!h || h != dh, "h and dh are the same, expected two regions; hint: h is NULL where it was not kept");
    LF_CHECK_ARG(accumulate == 0 || accumulate == 1, "accumulate is %d, expected 0 or 1", accumulate);
    return LF_LOOM_SUBMIT(e->device, stream, experts_backward,
                          .experts = {.plan = e->plan,
                                      .offset = offset,
                                      .xs = xs,
                                      .gu_in = gu,
                                      .h_in = h,
                                      .dys = dys,
                                      .dgu = dgu,
                                      .dh = dh,
                                      .dxs = dxs,
                                      .accumulate = accumulate});
}
