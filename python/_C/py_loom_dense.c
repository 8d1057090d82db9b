/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertLoom: the dense rest of a step, norms and the loss. Addresses are ints, 0 where an array is left out. */
#include "py_loom.h"

/* loom_add_norm(device, stream, x, y, weight, eps, n, d, dtype, sum, normed, rstd) */
static PyObject *loom_add_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_add_norm", args, nargs, 12, 0) < 0) return NULL;
    const void *x = next_ptr(&c.r), *y = next_ptr(&c.r);
    const float *weight = next_ptr(&c.r);
    const float eps = (float)next_double(&c.r);
    const int64_t n = next_int(&c.r), d = next_int(&c.r);
    const int32_t dtype = next_i32(&c.r);
    void *sum = next_ptr(&c.r), *normed = next_ptr(&c.r);
    float *rstd = next_ptr(&c.r);
    MAKE_CALL(lf_loom_add_norm(c.device, c.stream, x, y, weight, eps, n, d, dtype, sum, normed, rstd));
    return end_call(&c, rc);
}

/* loom_combine_add_norm(device, stream, routing, ys, n, e, k, d, dtype, x, norm_weight, eps, sum, normed, rstd) */
static PyObject *loom_combine_add_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_combine_add_norm", args, nargs, 15, 0) < 0) return NULL;
    const lf_routing routing = next_routing(&c.r);
    const void *ys = next_ptr(&c.r);
    const shape s = next_shape(&c.r);
    const void *x = next_ptr(&c.r);
    const float *weight = next_ptr(&c.r);
    const float eps = (float)next_double(&c.r);
    void *sum = next_ptr(&c.r), *normed = next_ptr(&c.r);
    float *rstd = next_ptr(&c.r);
    MAKE_CALL(lf_loom_combine_add_norm(c.device, c.stream, &routing, ys, s.n, s.e, s.k, s.d, s.dtype, x, weight, eps, sum, normed,
                                       rstd));
    return end_call(&c, rc);
}

/* loom_add_norm_backward(device, stream, sum, weight, rstd, dsum, dnormed, n, d, dtype, dx, dweight, accumulate, workspace) */
static PyObject *loom_add_norm_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_add_norm_backward", args, nargs, 14, 0) < 0) return NULL;
    const void *sum = next_ptr(&c.r);
    const float *weight = next_ptr(&c.r), *rstd = next_ptr(&c.r);
    const void *dsum = next_ptr(&c.r), *dnormed = next_ptr(&c.r);
    const int64_t n = next_int(&c.r), d = next_int(&c.r);
    const int32_t dtype = next_i32(&c.r);
    void *dx = next_ptr(&c.r);
    float *dweight = next_ptr(&c.r);
    const int32_t accumulate = next_i32(&c.r);
    void *workspace = next_ptr(&c.r);
    MAKE_CALL(lf_loom_add_norm_backward(c.device, c.stream, sum, weight, rstd, dsum, dnormed, n, d, dtype, dx, dweight,
                                        accumulate, workspace));
    return end_call(&c, rc);
}

/* loom_add_norm_workspace(n, d) -> bytes */
static PyObject *loom_add_norm_workspace(PyObject *self, PyObject *args)
{
    (void)self;
    long long n, d;
    if (!PyArg_ParseTuple(args, "LL", &n, &d)) return NULL;
    return PyLong_FromLongLong(lf_loom_add_norm_workspace(n, d));
}

/* loom_cross_entropy(device, stream, logits, target, n, v, ld, dtype, row_loss, loss_sum, accumulate, backward) */
static PyObject *loom_cross_entropy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    if (begin_call(&c, "loom_cross_entropy", args, nargs, 12, 0) < 0) return NULL;
    void *logits = next_ptr(&c.r);
    const int64_t *target = next_ptr(&c.r);
    const int64_t n = next_int(&c.r), v = next_int(&c.r), ld = next_int(&c.r);
    const int32_t dtype = next_i32(&c.r);
    float *row_loss = next_ptr(&c.r);
    double *loss_sum = next_ptr(&c.r);
    const int32_t accumulate = next_i32(&c.r), backward = next_i32(&c.r);
    MAKE_CALL(
        lf_loom_cross_entropy(c.device, c.stream, logits, target, n, v, ld, dtype, row_loss, loss_sum, accumulate, backward));
    return end_call(&c, rc);
}

PyMethodDef lfpy_loom_dense_methods[] = {
    FAST(loom_add_norm, "Residual and RMSNorm: (device, stream, x, y, weight, eps, n, d, dtype, sum, normed, rstd)."),
    FAST(loom_combine_add_norm, "Combine, residual and RMSNorm: (device, stream, routing, ys, n, e, k, d, dtype, x, norm_weight, "
                                "eps, sum, normed, rstd)."),
    FAST(loom_add_norm_backward, "(device, stream, sum, weight, rstd, dsum, dnormed, n, d, dtype, dx, dweight, accumulate, "
                                 "workspace)."),
    {"loom_add_norm_workspace", loom_add_norm_workspace, METH_VARARGS, "(n, d) -> bytes that the backward of a norm needs."},
    FAST(loom_cross_entropy, "Loss, and gradient in place of the logits: (device, stream, logits, target, n, v, ld, dtype, "
                             "row_loss, loss_sum, accumulate, backward)."),
    {NULL, NULL, 0, NULL},
};
