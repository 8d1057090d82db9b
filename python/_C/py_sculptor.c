/* SPDX-License-Identifier: Apache-2.0 */
/* Lifetime tables and their plans. One thread at a time on a trace. */
#include "py.h"

#include <string.h>

static const char kind[] = "lf_trace";

static void close_trace(void *trace) { lf_trace_close(trace); }

/* trace_open() -> handle */
static PyObject *trace_open(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    lf_trace *trace;
    lf_status rc = lf_trace_open(&trace);
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(trace, kind, close_trace, NULL);
}

/* A role as LF_TENSOR_* or by name; -1 with an exception. */
static int32_t role_of(PyObject *object)
{
    if (PyLong_Check(object)) {
        long value = PyLong_AsLong(object);
        if (value == -1 && PyErr_Occurred()) return -1;
        if (value >= 0 && value <= LF_TENSOR_INPUT) return (int32_t)value;
    } else if (PyUnicode_Check(object)) {
        const char *name = PyUnicode_AsUTF8AndSize(object, NULL);
        if (!name) return -1;
        for (int32_t i = 0; i <= LF_TENSOR_INPUT; i++)
            if (strcmp(name, lf_tensor_role_name(i)) == 0) return i;
    }
    PyErr_Format(PyExc_ValueError, "role is %R, expected weight, activation, gradient, optimizer, workspace, input or 0 to %d",
                 object, LF_TENSOR_INPUT);
    return -1;
}

/* trace_add(trace, name, module, role, stream, first, last, bytes, align=0) */
static PyObject *trace_add(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *role;
    const char *name, *module;
    int stream;
    long long first, last, bytes, align = 0;
    if (!PyArg_ParseTuple(args, "OssOiLLL|L", &handle, &name, &module, &role, &stream, &first, &last, &bytes, &align))
        return NULL;
    lf_trace *trace = lfpy_get(handle, kind);
    if (!trace) return NULL;
    lf_lifetime row = {.size = sizeof row,
                       .name = name,
                       .module = module,
                       .role = role_of(role),
                       .stream = stream,
                       .first = first,
                       .last = last,
                       .bytes = bytes,
                       .align_bytes = align,
                       .offset = -1};
    if (row.role < 0) return NULL;
    lf_status rc = lf_trace_add(trace, &row);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *class_figures(const int64_t *figures)
{
    PyObject *dict = PyDict_New();
    for (int32_t k = 0; dict && k < LF_N_CLASSES; k++) {
        PyObject *value = PyLong_FromLongLong(figures[k]);
        if (!value || PyDict_SetItemString(dict, lf_class_name(k), value) < 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

/* trace_plan(trace, options=None) -> dict of lf_plan_summary; classes as {"static": …} */
static PyObject *trace_plan(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *options = Py_None;
    lf_plan_options o;
    lf_plan_summary s = {.size = sizeof s};
    if (!PyArg_ParseTuple(args, "O|O", &handle, &options)) return NULL;
    lf_trace *trace = lfpy_get(handle, kind);
    if (!trace || lfpy_options("sculptor", &o, sizeof o, options) < 0) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_trace_plan(trace, &o, &s));
    if (rc < 0) return lfpy_raise(rc);
    PyObject *counts = class_figures(s.class_n), *peaks = class_figures(s.class_peak_bytes);
    if (!counts || !peaks) {
        Py_XDECREF(counts);
        Py_XDECREF(peaks);
        return NULL;
    }
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:d,s:N,s:d,s:N,s:N}", "n", (long long)s.n, "bound_bytes", (long long)s.bound_bytes,
                         "peak_bytes", (long long)s.peak_bytes, "live_sum_bytes", (long long)s.live_sum_bytes, "waste", s.waste,
                         "optimal", PyBool_FromLong(s.optimal), "seconds", s.seconds, "class_n", counts, "class_peak_bytes",
                         peaks);
}

/* trace_rows(trace) -> [(name, module, role name, stream, first, last, bytes, align, offset), …] */
static PyObject *trace_rows(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_trace *trace = lfpy_get(handle, kind);
    PyObject *list = trace ? PyList_New(0) : NULL;
    for (int64_t i = 0; list && i < lf_trace_n(trace); i++) {
        lf_lifetime r = {.size = sizeof r};
        lf_status rc = lf_trace_get(trace, i, &r);
        PyObject *row = rc < 0 ? lfpy_raise(rc)
                               : Py_BuildValue("(sssiLLLLL)", r.name, r.module, lf_tensor_role_name(r.role), (int)r.stream,
                                               (long long)r.first, (long long)r.last, (long long)r.bytes,
                                               (long long)r.align_bytes, (long long)r.offset);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* trace_validate(trace, capacity_bytes=0) */
static PyObject *trace_validate(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long capacity = 0;
    if (!PyArg_ParseTuple(args, "O|L", &handle, &capacity)) return NULL;
    lf_trace *trace = lfpy_get(handle, kind);
    if (!trace) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_trace_validate(trace, capacity));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* (trace, path) -> None: what reading and writing share */
static PyObject *with_path(PyObject *args, lf_status (*call)(lf_trace *, const char *))
{
    PyObject *handle;
    const char *path;
    if (!PyArg_ParseTuple(args, "Os", &handle, &path)) return NULL;
    lf_trace *trace = lfpy_get(handle, kind);
    if (!trace) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = call(trace, path));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* trace_read_csv(trace, path): appends its rows */
static PyObject *trace_read_csv(PyObject *self, PyObject *args)
{
    (void)self;
    return with_path(args, lf_trace_read_csv);
}

static lf_status write_csv(lf_trace *trace, const char *path) { return lf_trace_write_csv(trace, path); }

/* trace_write_csv(trace, path) */
static PyObject *trace_write_csv(PyObject *self, PyObject *args)
{
    (void)self;
    return with_path(args, write_csv);
}

PyMethodDef lfpy_sculptor_methods[] = {
    {"trace_open", trace_open, METH_NOARGS, "An empty lifetime table."},
    {"trace_add", trace_add, METH_VARARGS, "trace_add(trace, name, module, role, stream, first, last, bytes, align=0)."},
    {"trace_plan", trace_plan, METH_VARARGS, "trace_plan(trace, options=None) -> dict: peak, bound, waste, classes."},
    {"trace_rows", trace_rows, METH_O, "[(name, module, role, stream, first, last, bytes, align, offset), ...]."},
    {"trace_validate", trace_validate, METH_VARARGS, "trace_validate(trace, capacity_bytes=0): raises when rows overlap."},
    {"trace_read_csv", trace_read_csv, METH_VARARGS, "trace_read_csv(trace, path): append the rows of a file."},
    {"trace_write_csv", trace_write_csv, METH_VARARGS, "trace_write_csv(trace, path)."},
    {NULL, NULL, 0, NULL},
};
