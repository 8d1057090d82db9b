/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_loom.h  The frame of ExpertLoom's calls: (device or map, stream, …), addresses, shapes. */
#ifndef LF_PY_LOOM_H
#define LF_PY_LOOM_H

#include "py_args.h"

/* (expert, weight, prob, count, offset, row, slot): addresses, 0 where the call does not touch the array. */
static inline lf_routing next_routing(reader *r)
{
    lf_routing routing = {.size = sizeof routing};
    PyObject *tuple = next_object(r);
    void *address[7] = {NULL};
    if (r->bad || !tuple) return routing;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 7) {
        PyErr_Format(PyExc_TypeError, "routing is %R, expected 7 addresses: (expert, weight, prob, count, offset, row, slot)",
                     tuple);
        r->bad = 1;
        return routing;
    }
    for (int i = 0; i < 7 && !r->bad; i++) {
        unsigned long long v = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (v == (unsigned long long)-1 && PyErr_Occurred()) r->bad = 1;
        address[i] = lfpy_ptr(v);
    }
    routing.expert = address[0], routing.weight = address[1], routing.prob = address[2], routing.count = address[3];
    routing.offset = address[4], routing.row = address[5], routing.slot = address[6];
    return routing;
}

/* Every function: n arguments exactly, the first two are device (or map) and stream. */
typedef struct call {
    reader r;
    lf_device *device;
    lf_map *map;
    lf_stream *stream;
} call;

static inline int begin_call(call *c, const char *name, PyObject *const *args, Py_ssize_t n, Py_ssize_t expected, int of_map)
{
    *c = (call){.r = {args, 0, n, 0}};
    if (n != expected) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, n);
        return -1;
    }
    if (of_map) c->map = next_handle(&c->r, "lf_map");
    else c->device = next_handle(&c->r, "lf_device");
    if (c->map) c->device = lf_map_device(c->map);
    if (!c->r.bad && !c->device) {
        PyErr_SetString(PyExc_ValueError, "the map is not allocated");
        c->r.bad = 1;
    }
    c->stream = next_stream(&c->r, c->device);
    return c->r.bad ? -1 : 0;
}

/* `rc` counts only when no argument was bad. */
static inline PyObject *end_call(call *c, lf_status rc)
{
    if (c->r.bad) return NULL;
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* Make the call unless an argument was bad. */
#define MAKE_CALL(expr)   \
    lf_status rc = LF_OK; \
    if (!c.r.bad) LFPY_FREE_GIL(rc = (expr))

/* n, e, k, d, dtype */
typedef struct shape {
    int64_t n, d;
    int32_t e, k, dtype;
} shape;

static inline shape next_shape(reader *r)
{
    shape s = {0};
    s.n = next_int(r);
    s.e = next_i32(r);
    s.k = next_i32(r);
    s.d = next_int(r);
    s.dtype = next_i32(r);
    return s;
}

#endif
