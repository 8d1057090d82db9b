/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and streams. */
#include "py.h"

static void close_device(void *device) { lf_device_close(device); }
static void close_stream(void *stream) { lf_stream_close(stream); }

/* device_open(name) -> handle */
static PyObject *device_open(PyObject *self, PyObject *args)
{
    (void)self;
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    lf_device *device;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_device_open(&device, name));
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(device, "lf_device", close_device, NULL);
}

/* device_info(device) -> dict */
static PyObject *device_info(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_device *device = lfpy_get(handle, "lf_device");
    if (!device) return NULL;
    lf_device_info info = {.size = sizeof info};
    lf_status rc = lf_device_get_info(device, &info);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:s,s:L,s:L,s:i,s:i,s:i,s:i}", "name", info.name, "memory_bytes", (long long)info.memory_bytes,
                         "memory_free_bytes", (long long)info.memory_free_bytes, "kind", (int)info.kind, "index", (int)info.index,
                         "n_units", (int)info.n_units, "capability", (int)info.capability);
}

/* stream_open(device, priority) -> handle with work in order on a stream of its own */
static PyObject *stream_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int priority = 0;
    if (!PyArg_ParseTuple(args, "O|i", &handle, &priority)) return NULL;
    lf_device *device = lfpy_get(handle, "lf_device");
    if (!device) return NULL;
    lf_stream *stream;
    lf_status rc = lf_stream_open(device, priority, &stream);
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(stream, "lf_stream", close_stream, NULL);
}

/* stream_sync(stream) */
static PyObject *stream_sync(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_stream *stream = lfpy_get(handle, "lf_stream");
    if (!stream) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_stream_sync(stream));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* Streams seen so far. A wrapped stream holds its device, so an address here is never another device's. */
enum { STREAMS_MOST = 64 };
static struct {
    lf_device *device;
    void *native;
    lf_stream *stream;
} seen[STREAMS_MOST];
static int n_seen;

int lfpy_stream(lf_device *device, unsigned long long native, lf_stream **stream)
{
    int32_t kind, index;
    lf_device_where(device, &kind, &index);
    *stream = NULL;
    if (kind == 1 && native == 0) return 0;
    for (int i = 0; i < n_seen; i++)
        if (seen[i].device == device && seen[i].native == lfpy_ptr(native)) {
            *stream = seen[i].stream;
            return 0;
        }
    if (n_seen == STREAMS_MOST) return PyErr_Format(PyExc_RuntimeError, "more than %d streams in use", STREAMS_MOST), -1;
    lf_status rc = lf_stream_wrap(device, lfpy_ptr(native), &seen[n_seen].stream);
    if (rc < 0) return lfpy_raise(rc), -1;
    seen[n_seen].device = device;
    seen[n_seen].native = lfpy_ptr(native);
    *stream = seen[n_seen++].stream;
    return 0;
}

PyMethodDef lfpy_device_methods[] = {
    {"device_open", device_open, METH_VARARGS, "Open a device by name: cpu, cuda, cuda:N."},
    {"device_info", device_info, METH_O, "What the device is: name, memory, units."},
    {"stream_open", stream_open, METH_VARARGS, "A new stream of a device."},
    {"stream_sync", stream_sync, METH_O, "Wait for a stream's work; raises its error."},
    {NULL, NULL, 0, NULL},
};
