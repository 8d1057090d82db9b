/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k of one array, part by part. */
#include "py_args.h"

static lf_status (*const parts[])(lf_device *, const lf_topk *, lf_stream *) = {lf_topk_fold, lf_topk_select, lf_topk_pack,
                                                                                lf_topk_scatter};

/* topk(device, part, (data, out, residual, mask, values, scratch), (count, k, dtype), stream)
 * part: 0 fold, 1 select, 2 pack, 3 scatter */
static PyObject *topk(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int part, dtype;
    unsigned long long a[6], native;
    long long count, k;
    lf_stream *stream;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "Oi(KKKKKK)(LLi)K", &handle, &part, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &count, &k, &dtype,
                          &native))
        return NULL;
    lf_device *device = lfpy_get(handle, "lf_device");
    if (!device || lfpy_stream(device, native, &stream) < 0) return NULL;
    if (part < 0 || part > 3) return PyErr_Format(PyExc_ValueError, "part is %d, expected 0 to 3", part);
    const lf_topk t = {.size = sizeof t,
                       .count = count,
                       .k = k,
                       .data = lfpy_ptr(a[0]),
                       .out = lfpy_ptr(a[1]),
                       .residual = lfpy_ptr(a[2]),
                       .mask = lfpy_ptr(a[3]),
                       .values = lfpy_ptr(a[4]),
                       .scratch = lfpy_ptr(a[5]),
                       .dtype = dtype,
                       .keep = 1,
                       .factor = 1};
    LFPY_FREE_GIL(rc = parts[part](device, &t, stream));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* topk_scratch_bytes(count) */
static PyObject *topk_scratch_bytes(PyObject *self, PyObject *count)
{
    (void)self;
    const long long n = PyLong_AsLongLong(count);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(lf_topk_scratch_bytes(n));
}

PyMethodDef lfpy_topk_methods[] = {
    {"topk", topk, METH_VARARGS, "One part of top-k: (device, part, addresses, (count, k, dtype), stream)."},
    {"topk_scratch_bytes", topk_scratch_bytes, METH_O, "Bytes of scratch for so many entries."},
    {NULL, NULL, 0, NULL},
};
