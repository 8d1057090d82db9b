/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertLoom: thin calls with addresses. They are made hundreds of times a step, so arguments come as a plain vector and
 * the GIL is only dropped, nothing is built. */
#include "py_loom.h"

/* loom_route(device, stream, logits, token, valid, n, e, k, seed, layer, schedule, routing, prob_sum) */
static PyObject *loom_route(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_route", args, nargs, 13, 0) < 0) return NULL;
    lf_route_args a = {.size = sizeof a};
    a.logits = next_ptr(&c.r);
    a.token = next_ptr(&c.r);
    a.valid = next_ptr(&c.r);
    a.n = next_int(&c.r);
    a.e = next_i32(&c.r);
    a.k = next_i32(&c.r);
    a.seed = next_int(&c.r);
    a.layer = next_i32(&c.r);
    a.schedule = next_ptr(&c.r);
    const lf_routing routing = next_routing(&c.r);
    float *prob_sum = next_ptr(&c.r);
    MAKE_CALL(lf_loom_route(c.device, c.stream, &a, &routing, prob_sum));
    return end_call(&c, rc);
}

/* loom_sort(device, stream, expert, n, e, k, routing) */
static PyObject *loom_sort(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_sort", args, nargs, 7, 0) < 0) return NULL;
    const int32_t *expert = next_ptr(&c.r);
    const int64_t n = next_int(&c.r);
    const int32_t e = next_i32(&c.r), k = next_i32(&c.r);
    const lf_routing routing = next_routing(&c.r);
    MAKE_CALL(lf_loom_sort(c.device, c.stream, expert, n, e, k, &routing));
    return end_call(&c, rc);
}

/* loom_route_backward(device, stream, routing, valid, dweight, dprob_sum, n, e, k, schedule, dlogits) */
static PyObject *loom_route_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_route_backward", args, nargs, 11, 0) < 0) return NULL;
    const lf_routing routing = next_routing(&c.r);
    const uint8_t *valid = next_ptr(&c.r);
    const float *dweight = next_ptr(&c.r), *dprob_sum = next_ptr(&c.r);
    const int64_t n = next_int(&c.r);
    const int32_t e = next_i32(&c.r), k = next_i32(&c.r);
    const lf_route_schedule *schedule = next_ptr(&c.r);
    float *dlogits = next_ptr(&c.r);
    MAKE_CALL(lf_loom_route_backward(c.device, c.stream, &routing, valid, dweight, dprob_sum, n, e, k, schedule, dlogits));
    return end_call(&c, rc);
}

/* loom_router(device, stream, x, weight, n, e, d, dtype, logits) */
static PyObject *loom_router(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_router", args, nargs, 9, 0) < 0) return NULL;
    const void *x = next_ptr(&c.r);
    const float *weight = next_ptr(&c.r);
    const int64_t n = next_int(&c.r);
    const int32_t e = next_i32(&c.r);
    const int64_t d = next_int(&c.r);
    const int32_t dtype = next_i32(&c.r);
    float *logits = next_ptr(&c.r);
    MAKE_CALL(lf_loom_router(c.device, c.stream, x, weight, n, e, d, dtype, logits));
    return end_call(&c, rc);
}

/* loom_router_backward(device, stream, dlogits, x, n, e, d, dtype, dweight, accumulate, workspace) */
static PyObject *loom_router_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_router_backward", args, nargs, 11, 0) < 0) return NULL;
    const float *dlogits = next_ptr(&c.r);
    const void *x = next_ptr(&c.r);
    const int64_t n = next_int(&c.r);
    const int32_t e = next_i32(&c.r);
    const int64_t d = next_int(&c.r);
    const int32_t dtype = next_i32(&c.r);
    float *dweight = next_ptr(&c.r);
    const int32_t accumulate = next_i32(&c.r);
    void *workspace = next_ptr(&c.r);
    MAKE_CALL(lf_loom_router_backward(c.device, c.stream, dlogits, x, n, e, d, dtype, dweight, accumulate, workspace));
    return end_call(&c, rc);
}

/* loom_router_workspace(n, e, d) -> bytes */
static PyObject *loom_router_workspace(PyObject *self, PyObject *args)
{
    (void)self;
    long long n, d;
    int e;
    if (!PyArg_ParseTuple(args, "LiL", &n, &e, &d)) return NULL;
    const int64_t bytes = lf_loom_router_workspace(n, e, d);
    return bytes < 0 ? lfpy_raise((lf_status)bytes) : PyLong_FromLongLong(bytes);
}

typedef lf_status (*rows_fn)(lf_device *, lf_stream *, const lf_routing *, const void *, int64_t, int32_t, int32_t, int64_t,
                             int32_t, void *);

/* name(device, stream, routing, from, n, e, k, d, dtype, to) */
static PyObject *move_rows(const char *name, rows_fn fn, PyObject *const *args, Py_ssize_t nargs)
{
    call c;
    if (begin_call(&c, name, args, nargs, 10, 0) < 0) return NULL;
    const lf_routing routing = next_routing(&c.r);
    const void *from = next_ptr(&c.r);
    const shape s = next_shape(&c.r);
    void *to = next_ptr(&c.r);
    MAKE_CALL(fn(c.device, c.stream, &routing, from, s.n, s.e, s.k, s.d, s.dtype, to));
    return end_call(&c, rc);
}

static PyObject *loom_permute(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return move_rows("loom_permute", lf_loom_permute, args, nargs);
}

/* loom_permute_backward(device, stream, routing, dxs, n, e, k, d, dtype, dlogits, weight, dx) */
static PyObject *loom_permute_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_permute_backward", args, nargs, 12, 0) < 0) return NULL;
    const lf_routing routing = next_routing(&c.r);
    const void *dxs = next_ptr(&c.r);
    const shape s = next_shape(&c.r);
    const float *dlogits = next_ptr(&c.r), *weight = next_ptr(&c.r);
    void *dx = next_ptr(&c.r);
    MAKE_CALL(lf_loom_permute_backward(c.device, c.stream, &routing, dxs, s.n, s.e, s.k, s.d, s.dtype, dlogits, weight, dx));
    return end_call(&c, rc);
}

static PyObject *loom_combine(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return move_rows("loom_combine", lf_loom_combine, args, nargs);
}

/* loom_combine_backward(device, stream, routing, ys, dy, n, e, k, d, dtype, dys, dweight) */
static PyObject *loom_combine_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_combine_backward", args, nargs, 12, 0) < 0) return NULL;
    const lf_routing routing = next_routing(&c.r);
    const void *ys = next_ptr(&c.r), *dy = next_ptr(&c.r);
    const shape s = next_shape(&c.r);
    void *dys = next_ptr(&c.r);
    float *dweight = next_ptr(&c.r);
    MAKE_CALL(lf_loom_combine_backward(c.device, c.stream, &routing, ys, dy, s.n, s.e, s.k, s.d, s.dtype, dys, dweight));
    return end_call(&c, rc);
}

/* [(klass, offset, count), …] into an array of *n; NULL with `bad` set on failure. */
static lf_range *next_ranges(reader *r, int32_t *n)
{
    PyObject *list = next_object(r);
    *n = 0;
    if (r->bad || !list) return NULL;
    lf_range *ranges = lfpy_ranges(list, n);
    r->bad = !ranges;
    return ranges;
}

/* loom_adamw(map, stream, ranges, hyper) */
static PyObject *loom_adamw(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    int32_t n;
    if (begin_call(&c, "loom_adamw", args, nargs, 4, 1) < 0) return NULL;
    lf_range *ranges = next_ranges(&c.r, &n);
    const lf_adamw *hyper = next_ptr(&c.r);
    MAKE_CALL(lf_loom_adamw(c.map, c.stream, ranges, n, hyper));
    PyMem_Free(ranges);
    return end_call(&c, rc);
}

/* loom_sumsq(map, stream, ranges, role, out) */
static PyObject *loom_sumsq(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    int32_t n;
    if (begin_call(&c, "loom_sumsq", args, nargs, 5, 1) < 0) return NULL;
    lf_range *ranges = next_ranges(&c.r, &n);
    const int32_t role = next_i32(&c.r);
    double *out = next_ptr(&c.r);
    MAKE_CALL(lf_loom_sumsq(c.map, c.stream, ranges, n, role, out));
    PyMem_Free(ranges);
    return end_call(&c, rc);
}

/* loom_add(device, stream, dst, dst_dtype, src, src_dtype, count, scale, accumulate) */
static PyObject *loom_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_add", args, nargs, 9, 0) < 0) return NULL;
    void *dst = next_ptr(&c.r);
    const int32_t dst_dtype = next_i32(&c.r);
    const void *src = next_ptr(&c.r);
    const int32_t src_dtype = next_i32(&c.r);
    const int64_t count = next_int(&c.r);
    const float *scale = next_ptr(&c.r);
    const int32_t accumulate = next_i32(&c.r);
    MAKE_CALL(lf_loom_add(c.device, c.stream, dst, dst_dtype, src, src_dtype, count, scale, accumulate));
    return end_call(&c, rc);
}

/* loom_clip(device, stream, sumsq, max_norm, hyper, n_hyper, norm) */
static PyObject *loom_clip(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_clip", args, nargs, 7, 0) < 0) return NULL;
    const double *sumsq = next_ptr(&c.r), max_norm = next_double(&c.r);
    lf_adamw *hyper = next_ptr(&c.r);
    const int32_t n_hyper = next_i32(&c.r);
    float *norm = next_ptr(&c.r);
    MAKE_CALL(lf_loom_clip(c.device, c.stream, sumsq, max_norm, hyper, n_hyper, norm));
    return end_call(&c, rc);
}

/* loom_adamw_init(address, lr, beta1, beta2, eps, weight_decay, step, grad_scale): fills LOOM_ADAMW_BYTES of host memory */
static PyObject *loom_adamw_init(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long address;
    double lr, beta1, beta2, eps, decay, scale;
    long long step;
    if (!PyArg_ParseTuple(args, "KdddddLd", &address, &lr, &beta1, &beta2, &eps, &decay, &step, &scale)) return NULL;
    lf_status rc = lf_adamw_init(lfpy_ptr(address), lr, beta1, beta2, eps, decay, step, scale);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* loom_adamw_bytes() -> int */
static PyObject *loom_adamw_bytes(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyLong_FromSize_t(sizeof(lf_adamw));
}

/* loom_set_threads(n) */
static PyObject *loom_set_threads(PyObject *self, PyObject *args)
{
    (void)self;
    int threads;
    if (!PyArg_ParseTuple(args, "i", &threads)) return NULL;
    lf_status rc = lf_loom_set_threads(threads);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

PyMethodDef lfpy_loom_methods[] = {
    FAST(loom_router, "logits = x weight^T: (device, stream, x, weight, n, e, d, dtype, logits)."),
    FAST(loom_router_backward, "(device, stream, dlogits, x, n, e, d, dtype, dweight, accumulate, workspace)."),
    {"loom_router_workspace", loom_router_workspace, METH_VARARGS, "Bytes that loom_router_backward needs: (n, e, d)."},
    FAST(loom_route, "Choose experts and sort: (device, stream, logits, token, valid, n, e, k, seed, layer, schedule, routing, "
                     "prob_sum)."),
    FAST(loom_sort, "Sort given choices: (device, stream, expert, n, e, k, routing)."),
    FAST(loom_route_backward, "(device, stream, routing, valid, dweight, dprob_sum, n, e, k, schedule, dlogits)."),
    FAST(loom_permute, "Rows to their experts: (device, stream, routing, x, n, e, k, d, dtype, xs)."),
    FAST(loom_permute_backward, "(device, stream, routing, dxs, n, e, k, d, dtype, dlogits, weight, dx)."),
    FAST(loom_combine, "Rows back, weighted: (device, stream, routing, ys, n, e, k, d, dtype, y)."),
    FAST(loom_combine_backward, "(device, stream, routing, ys, dy, n, e, k, d, dtype, dys, dweight)."),
    FAST(loom_adamw, "AdamW over ranges of a map: (map, stream, [(klass, offset, count), ...], hyper)."),
    FAST(loom_sumsq, "Sum of squares of a role: (map, stream, [(klass, offset, count), ...], role, out)."),
    FAST(loom_clip, "Clip by global norm on the device: (device, stream, sumsq, max_norm, hyper, n_hyper, norm)."),
    FAST(loom_add, "Copy or add with conversion: (device, stream, dst, dst_dtype, src, src_dtype, count, scale, accumulate)."),
    {"loom_adamw_init", loom_adamw_init, METH_VARARGS,
     "Fill host memory with one step's values: (address, lr, beta1, beta2, eps, weight_decay, step, grad_scale)."},
    {"loom_adamw_bytes", loom_adamw_bytes, METH_NOARGS, "Bytes that loom_adamw_init fills."},
    {"loom_set_threads", loom_set_threads, METH_VARARGS, "Threads a kernel on the CPU may use; 0: one a core."},
    {NULL, NULL, 0, NULL},
};
