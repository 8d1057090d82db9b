/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock. A part is given as LF_PART_* or by name, a stream as PyTorch's handle. Calls that may wait release the GIL. */
#include "py.h"

#include <string.h>

static const char kind[] = "lf_clock";

static void close_clock(void *clock) { lf_clock_close(clock); }

static PyObject *none_or_raise(lf_status rc)
{
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

static int32_t part_of(PyObject *object)
{
    if (PyLong_Check(object)) {
        long value = PyLong_AsLong(object);
        if (value == -1 && PyErr_Occurred()) return -1;
        if (value >= 0 && value < LF_N_PARTS) return (int32_t)value;
    } else if (PyUnicode_Check(object)) {
        const char *name = PyUnicode_AsUTF8AndSize(object, NULL);
        if (!name) return -1;
        for (int32_t i = 0; i < LF_N_PARTS; i++)
            if (strcmp(name, lf_part_name(i)) == 0) return i;
    }
    PyErr_Format(PyExc_ValueError, "part is %R, expected compute, data, communication, io, optimizer or 0 to %d", object,
                 LF_N_PARTS - 1);
    return -1;
}

/* clock_open() -> handle */
static PyObject *clock_open(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    lf_clock *clock;
    lf_status rc = lf_clock_open(&clock);
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(clock, kind, close_clock, NULL);
}

/* clock_follow(clock, device, stream, depth=0): device None or the CPU: host time */
static PyObject *clock_follow(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *device_object;
    unsigned long long native;
    int depth = 0;
    if (!PyArg_ParseTuple(args, "OOK|i", &handle, &device_object, &native, &depth)) return NULL;
    lf_clock *clock = lfpy_get(handle, kind);
    lf_device *device = clock && device_object != Py_None ? lfpy_get(device_object, "lf_device") : NULL;
    lf_stream *stream = NULL;
    if (!clock || (device_object != Py_None && !device)) return NULL;
    if (device && lfpy_stream(device, native, &stream) < 0) return NULL;
    return none_or_raise(lf_clock_follow(clock, device, stream, depth));
}

static lf_status begin_step(lf_clock *clock)
{
    lf_status rc;
    while ((rc = lf_clock_step_begin(clock)) == LF_AGAIN) {
        rc = lf_clock_wait(clock);
        if (rc < 0) break;
    }
    return rc;
}

/* clock_step_begin(clock): waits for the oldest step while all of the device's are in flight */
static PyObject *clock_step_begin(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_clock *clock = lfpy_get(handle, kind);
    if (!clock) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = begin_step(clock));
    return none_or_raise(rc);
}

/* clock_pause(clock) */
static PyObject *clock_pause(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_clock *clock = lfpy_get(handle, kind);
    return clock ? none_or_raise(lf_clock_pause(clock)) : NULL;
}

/* clock_step_cancel(clock) */
static PyObject *clock_step_cancel(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_clock *clock = lfpy_get(handle, kind);
    if (!clock) return NULL;
    lf_clock_step_cancel(clock);
    Py_RETURN_NONE;
}

/* clock_add(clock, part, busy_s, exposed_s) */
static PyObject *clock_add(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *part_object;
    double busy, exposed;
    if (!PyArg_ParseTuple(args, "OOdd", &handle, &part_object, &busy, &exposed)) return NULL;
    lf_clock *clock = lfpy_get(handle, kind);
    int32_t part = clock ? part_of(part_object) : -1;
    return part < 0 ? NULL : none_or_raise(lf_clock_add(clock, part, busy, exposed));
}

static PyObject *on_part(PyObject *args, lf_status (*call)(lf_clock *, int32_t))
{
    PyObject *handle, *part_object;
    if (!PyArg_ParseTuple(args, "OO", &handle, &part_object)) return NULL;
    lf_clock *clock = lfpy_get(handle, kind);
    int32_t part = clock ? part_of(part_object) : -1;
    return part < 0 ? NULL : none_or_raise(call(clock, part));
}

/* clock_part_begin(clock, part) */
static PyObject *clock_part_begin(PyObject *self, PyObject *args)
{
    (void)self;
    return on_part(args, lf_clock_part_begin);
}

/* clock_part_end(clock, part) */
static PyObject *clock_part_end(PyObject *self, PyObject *args)
{
    (void)self;
    return on_part(args, lf_clock_part_end);
}

static PyObject *on_mark(PyObject *args, lf_status (*call)(lf_clock *, int32_t, lf_stream *))
{
    PyObject *handle, *part_object;
    unsigned long long native;
    if (!PyArg_ParseTuple(args, "OOK", &handle, &part_object, &native)) return NULL;
    lf_clock *clock = lfpy_get(handle, kind);
    int32_t part = clock ? part_of(part_object) : -1;
    if (part < 0) return NULL;
    lf_device *device = lf_clock_device(clock);
    lf_stream *stream = NULL;
    if (device && lfpy_stream(device, native, &stream) < 0) return NULL;
    return none_or_raise(call(clock, part, stream));
}

/* clock_mark_begin(clock, part, stream) */
static PyObject *clock_mark_begin(PyObject *self, PyObject *args)
{
    (void)self;
    return on_mark(args, lf_clock_mark_begin);
}

/* clock_mark_end(clock, part, stream) */
static PyObject *clock_mark_end(PyObject *self, PyObject *args)
{
    (void)self;
    return on_mark(args, lf_clock_mark_end);
}

static PyObject *part_seconds(const double *seconds)
{
    PyObject *dict = PyDict_New();
    for (int32_t i = 0; dict && i < LF_N_PARTS; i++) {
        PyObject *value = PyFloat_FromDouble(seconds[i]);
        if (!value || PyDict_SetItemString(dict, lf_part_name(i), value) < 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *summary_dict(const lf_clock_summary *s)
{
    PyObject *busy = part_seconds(s->busy_s), *exposed = part_seconds(s->exposed_s);
    if (!busy || !exposed) {
        Py_XDECREF(busy);
        Py_XDECREF(exposed);
        return NULL;
    }
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:d,s:d,s:N,s:N,s:d,s:d,s:d,s:d,s:d,s:d,s:s}", "steps", (long long)s->steps, "tokens",
                         (long long)s->tokens, "step", (long long)s->step, "lost", (long long)s->lost, "wall_s", s->wall_s,
                         "gap_s", s->gap_s, "busy_s", busy, "exposed_s", exposed, "step_p50_s", s->step_p50_s, "step_p95_s",
                         s->step_p95_s, "step_p99_s", s->step_p99_s, "step_max_s", s->step_max_s, "overlap_efficiency",
                         s->overlap_efficiency, "tokens_per_s", s->tokens_per_s, "bottleneck", lf_part_name(s->bottleneck));
}

/* clock_step_end(clock, tokens) -> dict of this step; of a device: of the newest that became complete, or None */
static PyObject *clock_step_end(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long tokens;
    if (!PyArg_ParseTuple(args, "OL", &handle, &tokens)) return NULL;
    lf_clock *clock = lfpy_get(handle, kind);
    if (!clock) return NULL;
    lf_clock_summary s = {.size = sizeof s};
    lf_status rc = lf_clock_step_end(clock, tokens, &s);
    if (rc == LF_AGAIN) Py_RETURN_NONE;
    return rc < 0 ? lfpy_raise(rc) : summary_dict(&s);
}

/* clock_summary(clock) -> dict of all steps; waits for a device's */
static PyObject *clock_summary(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_clock *clock = lfpy_get(handle, kind);
    if (!clock) return NULL;
    lf_clock_summary s = {.size = sizeof s};
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_clock_get(clock, &s));
    return rc < 0 ? lfpy_raise(rc) : summary_dict(&s);
}

/* ---- the monitor ----------------------------------------------------------------------------------------------------- */

static void close_monitor(void *monitor) { lf_monitor_close(monitor); }

/* monitor_open(gpu, interval_ms=0, library=None) -> handle; gpu: "GPU-…" or NVML's index */
static PyObject *monitor_open(PyObject *self, PyObject *args)
{
    (void)self;
    const char *gpu, *library = NULL;
    int interval_ms = 0;
    lf_monitor *monitor;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "s|iz", &gpu, &interval_ms, &library)) return NULL;
    LFPY_FREE_GIL(rc = lf_monitor_open(&monitor, gpu, interval_ms, library));
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(monitor, "lf_monitor", close_monitor, NULL);
}

/* What a GPU does not tell is left out. */
static PyObject *sample_dict(const lf_monitor_sample *s)
{
    const struct {
        const char *name;
        double value;
    } rows[] = {{"sm_pct", s->sm_pct},
                {"memory_pct", s->memory_pct},
                {"memory_used_bytes", s->memory_used_bytes},
                {"sm_mhz", s->sm_mhz},
                {"memory_mhz", s->memory_mhz},
                {"power_w", s->power_w},
                {"pcie_tx_bytes_s", s->pcie_tx_bytes_s},
                {"pcie_rx_bytes_s", s->pcie_rx_bytes_s},
                {"nvlink_tx_bytes_s", s->nvlink_tx_bytes_s},
                {"nvlink_rx_bytes_s", s->nvlink_rx_bytes_s}};
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].value < 0) continue;
        PyObject *value = PyFloat_FromDouble(rows[i].value);
        if (!value || PyDict_SetItemString(dict, rows[i].name, value) < 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

/* monitor_latest(monitor, back=0) -> {sm_pct, …}, or None when so many are not kept */
static PyObject *monitor_latest(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int back = 0;
    lf_monitor_sample s = {.size = sizeof s};
    if (!PyArg_ParseTuple(args, "O|i", &handle, &back)) return NULL;
    lf_monitor *monitor = lfpy_get(handle, "lf_monitor");
    if (!monitor) return NULL;
    const lf_status rc = lf_monitor_latest(monitor, back, &s);
    if (rc < 0) return lfpy_raise(rc);
    if (rc == LF_END) Py_RETURN_NONE;
    return sample_dict(&s);
}

/* monitor_summary(monitor) -> {samples, missed, mean: {sm_pct, …}, most: {…}} */
static PyObject *monitor_summary(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_monitor *monitor = lfpy_get(handle, "lf_monitor");
    lf_monitor_summary s = {.size = sizeof s};
    if (!monitor) return NULL;
    const lf_status rc = lf_monitor_get(monitor, &s);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:N,s:N}", "samples", (long long)s.samples, "missed", (long long)s.missed, "mean",
                         sample_dict(&s.mean), "most", sample_dict(&s.most));
}

PyMethodDef lfpy_scope_methods[] = {
    {"clock_open", clock_open, METH_NOARGS, "A step clock."},
    {"clock_follow", clock_follow, METH_VARARGS, "clock_follow(clock, device, stream, depth=0): measure a device."},
    {"clock_step_begin", clock_step_begin, METH_O, "clock_step_begin(clock)."},
    {"clock_step_cancel", clock_step_cancel, METH_O, "clock_step_cancel(clock): drop the open step."},
    {"clock_pause", clock_pause, METH_O, "clock_pause(clock): the next step does not follow on the last one."},
    {"clock_add", clock_add, METH_VARARGS, "clock_add(clock, part, busy_s, exposed_s): from any thread."},
    {"clock_part_begin", clock_part_begin, METH_VARARGS, "clock_part_begin(clock, part)."},
    {"clock_part_end", clock_part_end, METH_VARARGS, "clock_part_end(clock, part)."},
    {"clock_mark_begin", clock_mark_begin, METH_VARARGS, "clock_mark_begin(clock, part, stream): of what is queued next."},
    {"clock_mark_end", clock_mark_end, METH_VARARGS, "clock_mark_end(clock, part, stream)."},
    {"clock_step_end", clock_step_end, METH_VARARGS,
     "clock_step_end(clock, tokens) -> dict of the newest complete step or None."},
    {"clock_summary", clock_summary, METH_O, "clock_summary(clock) -> dict of all steps."},
    {"monitor_open", monitor_open, METH_VARARGS, "Sample a GPU on a thread: (gpu, interval_ms=0, library=None)."},
    {"monitor_latest", monitor_latest, METH_VARARGS, "The newest sample but `back`, or None."},
    {"monitor_summary", monitor_summary, METH_O, "Means and maxima of all samples so far."},
    {NULL, NULL, 0, NULL},
};
