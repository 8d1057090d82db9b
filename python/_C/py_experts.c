/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertLoom: plans of a layer's expert products and their two calls. */
#include "py_args.h"

static void close_experts(void *experts) { lf_experts_close(experts); }

/* A list of *n ints as pointers or int32_t (`wide` 0); NULL with `bad` set on failure, NULL alone for None where `optional`.
 * *n is -1 before the first list, then its length, which the others must have. */
static void *next_list(reader *r, const char *name, int wide, int optional, Py_ssize_t *n)
{
    PyObject *list = next_object(r);
    if (r->bad || (optional && list == Py_None)) return NULL;
    const Py_ssize_t size = list && PyList_Check(list) ? PyList_Size(list) : -1;
    r->bad = 1;
    if (size < 0 || size > LF_MAX_EXPERTS)
        return PyErr_Format(PyExc_TypeError, "%s is %R, expected a list of at most %d numbers", name, list, LF_MAX_EXPERTS), NULL;
    if (*n >= 0 && size != *n)
        return PyErr_Format(PyExc_ValueError, "%s has %zd entries, expected %zd as hidden has", name, size, *n), NULL;
    *n = size;
    void *out = PyMem_Malloc(((size_t)size + 1) * (wide ? sizeof(void *) : sizeof(int32_t)));
    if (!out) return PyErr_NoMemory(), NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *item = PyList_GetItem(list, i);
        unsigned long long v = PyLong_AsUnsignedLongLong(item);
        if (!PyErr_Occurred() && !wide && v > INT32_MAX)
            PyErr_Format(PyExc_OverflowError, "%s[%zd] is %R, expected a 32-bit number", name, i, item);
        if (PyErr_Occurred()) {
            PyMem_Free(out);
            return NULL;
        }
        if (wide) ((void **)out)[i] = lfpy_ptr(v);
        else ((int32_t *)out)[i] = (int32_t)v;
    }
    r->bad = 0;
    return out;
}

/* loom_experts_open(device, d, max_rows, dtype, grad_dtype, hidden, w_gu, w_down, dw_gu | None, dw_down | None) -> handle */
static PyObject *loom_experts_open(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    reader r = {args, 0, nargs, 0};
    if (nargs != 10) return PyErr_Format(PyExc_TypeError, "loom_experts_open takes 10 arguments, got %zd", nargs), NULL;
    lf_experts_options o;
    lf_experts_options_init(&o);
    Py_ssize_t n = -1;
    lf_device *device = next_handle(&r, "lf_device");
    o.d = next_i32(&r);
    o.max_rows = next_int(&r);
    o.dtype = next_i32(&r);
    o.grad_dtype = next_i32(&r);
    int32_t *hidden = next_list(&r, "hidden", 0, 0, &n);
    void **w_gu = next_list(&r, "w_gu", 1, 0, &n), **w_down = next_list(&r, "w_down", 1, 0, &n);
    void **dw_gu = next_list(&r, "dw_gu", 1, 1, &n), **dw_down = next_list(&r, "dw_down", 1, 1, &n);
    o.n_experts = (int32_t)n;
    o.hidden = hidden;
    o.w_gu = (const void *const *)w_gu, o.w_down = (const void *const *)w_down;
    o.dw_gu = dw_gu, o.dw_down = dw_down;
    lf_experts *experts = NULL;
    lf_status rc = LF_OK;
    if (!r.bad) LFPY_FREE_GIL(rc = lf_experts_open(&experts, device, &o));
    PyMem_Free(hidden);
    PyMem_Free(w_gu);
    PyMem_Free(w_down);
    PyMem_Free(dw_gu);
    PyMem_Free(dw_down);
    if (r.bad) return NULL;
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(experts, "lf_experts", close_experts, NULL);
}

/* The plan and the stream that every call begins with; NULL with an exception. */
static lf_experts *begin(reader *r, const char *name, Py_ssize_t expected, lf_stream **stream)
{
    if (r->n != expected) return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, r->n), NULL;
    lf_experts *experts = next_handle(r, "lf_experts");
    if (experts) *stream = next_stream(r, lf_experts_device(experts));
    return r->bad ? NULL : experts;
}

/* loom_experts_forward(experts, stream, offset, xs, gu, h, ys) */
static PyObject *loom_experts_forward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    reader r = {args, 0, nargs, 0};
    lf_stream *stream;
    lf_experts *experts = begin(&r, "loom_experts_forward", 7, &stream);
    if (!experts) return NULL;
    const int32_t *offset = next_ptr(&r);
    const void *xs = next_ptr(&r);
    void *gu = next_ptr(&r), *h = next_ptr(&r), *ys = next_ptr(&r);
    if (r.bad) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_experts_forward(experts, stream, offset, xs, gu, h, ys));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* loom_experts_backward(experts, stream, offset, xs, gu, h or 0, dys, dgu, dh, dxs, accumulate) */
static PyObject *loom_experts_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    reader r = {args, 0, nargs, 0};
    lf_stream *stream;
    lf_experts *experts = begin(&r, "loom_experts_backward", 11, &stream);
    if (!experts) return NULL;
    const int32_t *offset = next_ptr(&r);
    const void *xs = next_ptr(&r), *gu = next_ptr(&r), *h = next_ptr(&r), *dys = next_ptr(&r);
    void *dgu = next_ptr(&r), *dh = next_ptr(&r), *dxs = next_ptr(&r);
    const int32_t accumulate = next_i32(&r);
    if (r.bad) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_experts_backward(experts, stream, offset, xs, gu, h, dys, dgu, dh, dxs, accumulate));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

PyMethodDef lfpy_experts_methods[] = {
    FAST(loom_experts_open,
         "A plan of one layer: (device, d, max_rows, dtype, grad_dtype, hidden, w_gu, w_down, dw_gu, dw_down)."),
    FAST(loom_experts_forward, "(experts, stream, offset, xs, gu, h, ys)."),
    FAST(loom_experts_backward, "(experts, stream, offset, xs, gu, h or 0, dys, dgu, dh, dxs, accumulate)."),
    {NULL, NULL, 0, NULL},
};
