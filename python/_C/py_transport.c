/* SPDX-License-Identifier: Apache-2.0 */
/* A Python object as NexusSync's transport. The library calls it from whichever thread marks, with the GIL dropped; every call back takes
 * the GIL, and an exception becomes the library's error. */
#include <string.h>

#include "py_nexus.h"

/* The exception that is set, as the library's error: "RuntimeError: text". The exception is cleared. */
static lf_status take_exception(const char *what)
{
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const lf_status status = type && PyErr_GivenExceptionMatches(type, PyExc_TimeoutError) ? LF_ERR_TIMEOUT : LF_ERR_PEER;
    PyObject *name = type ? PyObject_GetAttrString(type, "__name__") : NULL;
    PyObject *text = name && value ? PyUnicode_FromFormat("transport %s: %S: %S", what, name, value) : NULL;
    const char *utf8 = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    lf_status rc = lf_transport_fail(status, utf8 ? utf8 : what);
    PyErr_Clear();
    /* For the main thread, once it is back in Python: last, because making text looks at signals. */
    if (type && PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    Py_XDECREF(text);
    Py_XDECREF(name);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return rc;
}

static unsigned long long native_of(lf_stream *stream) { return (unsigned long long)(uintptr_t)lf_stream_native(stream); }

static lf_status call_start(PyObject *fn, const char *what, void *data, int64_t count, int32_t dtype, lf_stream *stream,
                            int64_t *ticket)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *got =
        PyObject_CallFunction(fn, "KLiK", (unsigned long long)(uintptr_t)data, (long long)count, (int)dtype, native_of(stream));
    *ticket = got ? PyLong_AsLongLong(got) : -1;
    const lf_status rc = PyErr_Occurred() ? take_exception(what) : LF_OK;
    Py_XDECREF(got);
    PyGILState_Release(gil);
    return rc;
}

static lf_status call_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return call_start(((const nexus_box *)user)->post, "post", data, count, dtype, stream, ticket);
}

static lf_status call_scatter(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return call_start(((const nexus_box *)user)->scatter, "scatter", data, count, dtype, stream, ticket);
}

static lf_status call_gather(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return call_start(((const nexus_box *)user)->gather, "gather", data, count, dtype, stream, ticket);
}

static lf_status call_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    const nexus_box *b = user;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *got = PyObject_CallFunction(b->wait, "LKd", (long long)ticket, native_of(stream), timeout_s);
    const lf_status rc = got ? LF_OK : take_exception("wait");
    Py_XDECREF(got);
    PyGILState_Release(gil);
    return rc;
}

static lf_status call_query(void *user, int64_t ticket)
{
    const nexus_box *b = user;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *got = PyObject_CallFunction(b->query, "L", (long long)ticket);
    const int done = got ? PyObject_IsTrue(got) : -1;
    const lf_status rc = done < 0 ? take_exception("query") : done ? LF_OK : LF_AGAIN;
    Py_XDECREF(got);
    PyGILState_Release(gil);
    return rc;
}

static int int_attribute(PyObject *object, const char *name, int32_t *out)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    const long number = value ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    *out = (int32_t)number;
    return PyErr_Occurred() ? -1 : 0;
}

/* A function that may be missing or None. */
static int optional_attribute(PyObject *object, const char *name, PyObject **out)
{
    *out = PyObject_GetAttrString(object, name);
    if (*out == Py_None) Py_CLEAR(*out);
    if (*out || !PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

int lfpy_adopt_transport(nexus_box *b, PyObject *object, lf_transport *t)
{
    *t = (lf_transport){.size = sizeof *t, .name = "python", .user = b, .post = call_post, .wait = call_wait};
    if (int_attribute(object, "rank", &t->rank) < 0 || int_attribute(object, "world", &t->world) < 0) return -1;
    if (!(b->post = PyObject_GetAttrString(object, "post")) || !(b->wait = PyObject_GetAttrString(object, "wait"))) return -1;
    if (optional_attribute(object, "query", &b->query) < 0 || optional_attribute(object, "scatter", &b->scatter) < 0 ||
        optional_attribute(object, "gather", &b->gather) < 0)
        return -1;
    if (b->query) t->query = call_query;
    if (b->scatter) t->scatter = call_scatter;
    if (b->gather) t->gather = call_gather;
    return 0;
}
