/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_args.h  Arguments of calls that are made hundreds of times a step: a plain vector, read from left to right. */
#ifndef LF_PY_ARGS_H
#define LF_PY_ARGS_H

#include "py.h"

/* The arguments of a call, taken from left to right. `bad` once one had the wrong type: the exception is set. */
typedef struct reader {
    PyObject *const *args;
    Py_ssize_t at, n;
    int bad;
} reader;

static inline PyObject *next_object(reader *r) { return r->at < r->n ? r->args[r->at++] : NULL; }

static inline long long next_int(reader *r)
{
    PyObject *o = next_object(r);
    if (r->bad || !o) return 0;
    long long v = PyLong_AsLongLong(o);
    if (v == -1 && PyErr_Occurred()) r->bad = 1;
    return v;
}

static inline int32_t next_i32(reader *r)
{
    long long v = next_int(r);
    if (!r->bad && (v < INT32_MIN || v > INT32_MAX)) {
        PyErr_Format(PyExc_OverflowError, "argument %zd is %lld, expected a 32-bit number", r->at, v);
        r->bad = 1;
    }
    return (int32_t)v;
}

static inline void *next_ptr(reader *r)
{
    PyObject *o = next_object(r);
    if (r->bad || !o) return NULL;
    unsigned long long v = PyLong_AsUnsignedLongLong(o);
    if (v == (unsigned long long)-1 && PyErr_Occurred()) r->bad = 1;
    return r->bad ? NULL : lfpy_ptr(v);
}

static inline double next_double(reader *r)
{
    PyObject *o = next_object(r);
    if (r->bad || !o) return 0;
    double v = PyFloat_AsDouble(o);
    if (v == -1 && PyErr_Occurred()) r->bad = 1;
    return v;
}

static inline void *next_handle(reader *r, const char *kind)
{
    PyObject *o = next_object(r);
    void *handle = r->bad || !o ? NULL : lfpy_get(o, kind);
    if (!handle) r->bad = 1;
    return handle;
}

static inline lf_stream *next_stream(reader *r, lf_device *device)
{
    void *native = next_ptr(r);
    lf_stream *stream = NULL;
    if (!r->bad && lfpy_stream(device, (unsigned long long)(uintptr_t)native, &stream) < 0) r->bad = 1;
    return stream;
}

#define FAST(name, help)                                              \
    {                                                                 \
#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, help \
    }

#endif
