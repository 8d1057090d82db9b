/* SPDX-License-Identifier: Apache-2.0 */
/* NexusSync. */
#include <string.h>

#include "py_nexus.h"

/* ---- the handle ------------------------------------------------------------------------------------------------------ */

/* Called without the GIL. */
static void close_box(void *handle)
{
    nexus_box *b = handle;
    lf_nexus_close(b->nexus);
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_XDECREF(b->monitor);
    Py_XDECREF(b->post);
    Py_XDECREF(b->wait);
    Py_XDECREF(b->query);
    Py_XDECREF(b->scatter);
    Py_XDECREF(b->gather);
    PyMem_Free(b);
    PyGILState_Release(gil);
}

static void close_unused(const lf_transport *t)
{
    if (t->close) t->close(t->user);
}

/* ("nccl", rank, world, id): meet the other ranks. */
static lf_status open_nccl(const nexus_box *b, PyObject *how, const lf_nexus_options *o, lf_transport *t)
{
    const char *word, *id;
    Py_ssize_t n;
    int rank, world;
    lf_status rc;
    if (!PyArg_ParseTuple(how, "siiy#", &word, &rank, &world, &id, &n)) return LF_AGAIN;
    if (strcmp(word, "nccl") != 0 || n != LF_NCCL_ID_BYTES) {
        PyErr_Format(PyExc_ValueError, "transport is '%s' with %zd bytes, expected 'nccl' with %d", word, n, LF_NCCL_ID_BYTES);
        return LF_AGAIN;
    }
    LFPY_FREE_GIL(rc = lf_nccl_open(o, b->device, rank, world, (const uint8_t *)id, t));
    return rc;
}

static int open_box(nexus_box *b, lf_map *map, PyObject *transport, const lf_nexus_options *o)
{
    lf_transport t = {.size = sizeof t};
    const char *word = PyUnicode_Check(transport) ? PyUnicode_AsUTF8AndSize(transport, NULL) : NULL;
    lf_status rc = LF_OK;
    if (PyUnicode_Check(transport)) {
        if (!word) return -1;
        if (strcmp(word, "loopback") != 0 && strcmp(word, "mpi") != 0) {
            PyErr_Format(
                PyExc_ValueError,
                "transport is '%s', expected 'loopback', 'mpi', ('nccl', rank, world, id) or an object with rank, world, post, wait",
                word);
            return -1;
        }
        if (word[0] == 'm') LFPY_FREE_GIL(rc = lf_mpi_open(o, b->device, &t));
        else rc = lf_loopback_open(1, &t);
    } else if (PyTuple_Check(transport)) {
        if ((rc = open_nccl(b, transport, o, &t)) == LF_AGAIN) return -1; /* an exception is set */
    } else if (transport != Py_None && lfpy_adopt_transport(b, transport, &t) < 0) {
        return -1;
    }
    if (rc == LF_OK) {
        LFPY_FREE_GIL(rc = lf_nexus_open(&b->nexus, map, transport == Py_None ? NULL : &t, o));
        if (rc < 0) close_unused(&t);
    }
    if (rc < 0) lfpy_raise(rc);
    return rc < 0 ? -1 : 0;
}

/* nexus_open(map, transport, dict or None) -> handle. transport: None (the schedule alone), "loopback" (one rank), "mpi",
 * ("nccl", rank, world, id), or an object: rank, world, post(address, count, dtype, stream) -> ticket, wait(ticket, stream, timeout_s), optional query(ticket) -> bool,
 * scatter and gather like post. */
static PyObject *nexus_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *map_handle, *transport, *options = Py_None;
    lf_nexus_options o;
    if (!PyArg_ParseTuple(args, "OO|O", &map_handle, &transport, &options)) return NULL;
    lf_map *map = lfpy_get(map_handle, "lf_map");
    if (!map || lfpy_options("nexus", &o, sizeof o, options) < 0) return NULL;
    PyObject *owner = Py_BuildValue("(OO)", map_handle, transport), *handle = NULL;
    nexus_box *b = owner ? PyMem_Malloc(sizeof *b) : NULL;
    if (!b) {
        Py_XDECREF(owner);
        return PyErr_NoMemory();
    }
    *b = (nexus_box){.map = map, .device = lf_map_device(map)};
    if (open_box(b, map, transport, &o) == 0) handle = lfpy_wrap(b, "lf_nexus", close_box, owner);
    else LFPY_FREE_GIL(close_box(b));
    Py_DECREF(owner);
    return handle;
}

/* ---- a step ---------------------------------------------------------------------------------------------------------- */

static PyObject *answer(lf_status rc)
{
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* nexus_begin(nexus) */
static PyObject *nexus_begin(PyObject *self, PyObject *handle)
{
    (void)self;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_status rc;
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_begin(b->nexus));
    return answer(rc);
}

/* nexus_present(nexus, [(block, tokens), …]): what is left out counts as one token */
static PyObject *nexus_present(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *list;
    if (!PyArg_ParseTuple(args, "OO", &handle, &list)) return NULL;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    const Py_ssize_t n = b ? PySequence_Size(list) : -1;
    const int32_t n_blocks = n >= 0 ? lf_map_n_blocks(b->map) : 0;
    int64_t *tokens = n >= 0 ? PyMem_Malloc(((size_t)n_blocks + 1) * sizeof *tokens) : NULL;
    if (n >= 0 && !tokens) PyErr_NoMemory();
    for (int32_t i = 0; tokens && i < n_blocks; i++) tokens[i] = 1;
    for (Py_ssize_t i = 0; tokens && i < n && !PyErr_Occurred(); i++) {
        PyObject *row = PySequence_GetItem(list, i);
        int block = -1;
        long long count = 0;
        if (row && PyArg_ParseTuple(row, "iL", &block, &count)) {
            if (block >= 0 && block < n_blocks) tokens[block] = count;
            else PyErr_Format(PyExc_ValueError, "block %d, expected 0 to %d", block, (int)n_blocks - 1);
        }
        Py_XDECREF(row);
    }
    lf_status rc = LF_OK;
    if (!PyErr_Occurred()) LFPY_FREE_GIL(rc = lf_nexus_present(b->nexus, tokens));
    PyMem_Free(tokens);
    return PyErr_Occurred() ? NULL : answer(rc);
}

/* The stream of a native handle; -1 with an exception. */
static int take_stream(const nexus_box *b, PyObject *object, lf_stream **stream)
{
    const unsigned long long native = PyLong_AsUnsignedLongLong(object);
    if (native == (unsigned long long)-1 && PyErr_Occurred()) return -1;
    return lfpy_stream(b->device, native, stream);
}

/* nexus_mark(nexus, index, stream) */
static PyObject *nexus_mark(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "nexus_mark takes 3 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    const long index = b ? PyLong_AsLong(args[1]) : -1;
    lf_stream *stream;
    lf_status rc;
    if (!b || (index == -1 && PyErr_Occurred()) || take_stream(b, args[2], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_mark(b->nexus, index < INT32_MIN || index > INT32_MAX ? -1 : (int32_t)index, stream));
    return answer(rc);
}

static PyObject *call_on_stream(const char *name, PyObject *const *args, Py_ssize_t nargs,
                                lf_status (*fn)(lf_nexus *, lf_stream *))
{
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "%s takes 2 arguments, got %zd", name, nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    lf_stream *stream;
    lf_status rc;
    if (!b || take_stream(b, args[1], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = fn(b->nexus, stream));
    return answer(rc);
}

/* nexus_finish(nexus, stream) */
static PyObject *nexus_finish(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return call_on_stream("nexus_finish", args, nargs, lf_nexus_finish);
}

/* nexus_flush(nexus, stream) */
static PyObject *nexus_flush(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return call_on_stream("nexus_flush", args, nargs, lf_nexus_flush);
}

/* nexus_take(nexus, stream) -> (first chunk, number of chunks), None when all are taken */
static PyObject *nexus_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "nexus_take takes 2 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    int32_t first, n;
    lf_stream *stream;
    lf_status rc;
    if (!b || take_stream(b, args[1], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_take(b->nexus, stream, &first, &n));
    return rc == LF_OK ? Py_BuildValue("(ii)", first, n) : answer(rc);
}

/* nexus_gather(nexus, role, first, n, stream): shares of those chunks to every rank, posted */
static PyObject *nexus_gather(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "nexus_gather takes 5 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    long number[3] = {0};
    for (int i = 0; b && i < 3 && !PyErr_Occurred(); i++) {
        number[i] = PyLong_AsLong(args[i + 1]);
        if (number[i] < INT32_MIN || number[i] > INT32_MAX) number[i] = -1;
    }
    lf_stream *stream;
    lf_status rc;
    if (!b || PyErr_Occurred() || take_stream(b, args[4], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_gather(b->nexus, (int32_t)number[0], (int32_t)number[1], (int32_t)number[2], stream));
    return answer(rc);
}

/* nexus_gathered(nexus, stream) */
static PyObject *nexus_gathered(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return call_on_stream("nexus_gathered", args, nargs, lf_nexus_gathered);
}

/* nexus_reduce(nexus, address, count, dtype, stream): a sum beside the steps */
static PyObject *nexus_reduce(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "nexus_reduce takes 5 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    const unsigned long long address = b ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    const long long count = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    const long dtype = PyErr_Occurred() ? 0 : PyLong_AsLong(args[3]);
    lf_stream *stream;
    lf_status rc;
    if (!b || PyErr_Occurred() || take_stream(b, args[4], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_reduce(b->nexus, lfpy_ptr(address), count, (int32_t)dtype, stream));
    return answer(rc);
}

/* nexus_check(nexus), nexus_settle(nexus), nexus_cancel(nexus) */
static PyObject *call_plain(PyObject *handle, lf_status (*fn)(lf_nexus *))
{
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_status rc;
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = fn(b->nexus));
    return answer(rc);
}
static PyObject *nexus_check(PyObject *self, PyObject *handle)
{
    (void)self;
    return call_plain(handle, lf_nexus_check);
}
static PyObject *nexus_settle(PyObject *self, PyObject *handle)
{
    (void)self;
    return call_plain(handle, lf_nexus_settle);
}
static PyObject *nexus_cancel(PyObject *self, PyObject *handle)
{
    (void)self;
    return call_plain(handle, lf_nexus_cancel);
}

/* nexus_replayed(nexus, stream) */
static PyObject *nexus_replayed(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "nexus_replayed takes 2 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    lf_stream *stream;
    lf_status rc;
    if (!b || take_stream(b, args[1], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_replayed(b->nexus, stream));
    return answer(rc);
}

/* ---- the chunk size -------------------------------------------------------------------------------------------------- */

/* nexus_retune(nexus, chunk_bytes, stream): the schedule is another one then */
static PyObject *nexus_retune(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "nexus_retune takes 3 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    const long long bytes = b ? PyLong_AsLongLong(args[1]) : 0;
    lf_stream *stream;
    lf_status rc;
    if (!b || PyErr_Occurred() || take_stream(b, args[2], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_retune(b->nexus, bytes, stream));
    return answer(rc);
}

/* nexus_tune_begin(nexus, stream) */
static PyObject *nexus_tune_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return call_on_stream("nexus_tune_begin", args, nargs, lf_nexus_tune_begin);
}

/* nexus_tune_end(nexus, stream, counts) -> whether the schedule is another one */
static PyObject *nexus_tune_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "nexus_tune_end takes 3 arguments, got %zd", nargs);
    nexus_box *b = lfpy_get(args[0], "lf_nexus");
    const int counts = b ? PyObject_IsTrue(args[2]) : 0;
    int32_t changed = 0;
    lf_stream *stream;
    lf_status rc;
    if (!b || counts < 0 || take_stream(b, args[1], &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_tune_end(b->nexus, stream, counts, &changed));
    return rc < 0 ? lfpy_raise(rc) : PyBool_FromLong(changed);
}

/* nexus_tuning(nexus) -> dict */
static PyObject *nexus_tuning(PyObject *self, PyObject *handle)
{
    (void)self;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_tuning_info t = {.size = sizeof t};
    lf_status rc;
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_get_tuning(b->nexus, &t));
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:i,s:i,s:O,s:d,s:d,s:s}", "chunk_bytes", (long long)t.chunk_bytes, "first_bytes",
                         (long long)t.first_bytes, "n_sizes", (int)t.n_sizes, "n_tried", (int)t.n_tried, "settled",
                         t.settled ? Py_True : Py_False, "first_s", t.first_s, "chunk_s", t.chunk_s, "why", t.why);
}

/* ---- residuals ------------------------------------------------------------------------------------------------------- */

/* nexus_residual_save(nexus, path) -> digest; None: no chunk is sparse */
static PyObject *nexus_residual_save(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    const char *path;
    char hash[33];
    lf_status rc;
    if (!PyArg_ParseTuple(args, "Os", &handle, &path)) return NULL;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_residual_save(b->nexus, path, hash));
    return rc == LF_OK ? PyUnicode_FromString(hash) : answer(rc);
}

/* nexus_residual_load(nexus, path, digest) */
static PyObject *nexus_residual_load(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    const char *path, *hash;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "Oss", &handle, &path, &hash)) return NULL;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_residual_load(b->nexus, path, hash));
    return answer(rc);
}

/* nexus_residual_flush(nexus) */
static PyObject *nexus_residual_flush(PyObject *self, PyObject *handle)
{
    (void)self;
    return call_plain(handle, lf_nexus_residual_flush);
}

/* nexus_residual_drop(nexus) */
static PyObject *nexus_residual_drop(PyObject *self, PyObject *handle)
{
    (void)self;
    return call_plain(handle, lf_nexus_residual_drop);
}

/* nexus_residual_bytes(nexus) */
static PyObject *nexus_residual_bytes(PyObject *self, PyObject *handle)
{
    (void)self;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    int64_t bytes;
    if (!b) return NULL;
    LFPY_FREE_GIL(bytes = lf_nexus_residual_bytes(b->nexus));
    return PyLong_FromLongLong(bytes);
}

/* nexus_seek(nexus, steps) */
static PyObject *nexus_seek(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long steps;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "OL", &handle, &steps)) return NULL;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_seek(b->nexus, steps));
    return answer(rc);
}

/* ---- questions ------------------------------------------------------------------------------------------------------- */

/* nexus_chunks(nexus) -> [{group, dtype, klass, offset, count, bytes, form, run, why, sent_bytes}, …] in the order of posting */
static PyObject *nexus_chunks(PyObject *self, PyObject *handle)
{
    (void)self;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    PyObject *list = b ? PyList_New(0) : NULL;
    for (int32_t i = 0; list && i < lf_nexus_n_chunks(b->nexus); i++) {
        lf_chunk_info c = {.size = sizeof c};
        const lf_status rc = lf_nexus_get_chunk(b->nexus, i, &c);
        PyObject *row =
            rc < 0 ? lfpy_raise(rc)
                   : Py_BuildValue("{s:i,s:i,s:i,s:L,s:L,s:L,s:s,s:i,s:s,s:L,s:(iLL),s:(iLL)}", "group", (int)c.group, "dtype",
                                   (int)c.dtype, "klass", (int)c.range.klass, "offset", (long long)c.range.offset, "count",
                                   (long long)c.range.count, "bytes", (long long)c.bytes, "form", c.form, "run", (int)c.run,
                                   "why", c.why, "sent_bytes", (long long)c.sent_bytes, "share", (int)c.share.klass,
                                   (long long)c.share.offset, (long long)c.share.count, "rest", (int)c.rest.klass,
                                   (long long)c.rest.offset, (long long)c.rest.count);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* nexus_stats(nexus) -> dict */
static PyObject *nexus_stats(PyObject *self, PyObject *handle)
{
    (void)self;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_nexus_stats s = {.size = sizeof s};
    lf_status rc;
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_get_stats(b->nexus, &s)); /* it waits for a step that is finishing */
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:L,s:L,s:d}", "steps", (long long)s.steps, "collectives",
                         (long long)s.collectives, "bytes", (long long)s.bytes, "late_blocks", (long long)s.late_blocks,
                         "exposed_s", s.exposed_s, "p50_s", s.p50_s, "p95_s", s.p95_s, "p99_s", s.p99_s, "busy_s", s.busy_s,
                         "bus_bytes_s", s.bus_bytes_s, "exposed_share", s.exposed_share, "skipped", (long long)s.skipped,
                         "skipped_bytes", (long long)s.skipped_bytes, "held_s", s.held_s);
}

static double busy_pct(void *monitor)
{
    lf_monitor_sample s = {.size = sizeof s};
    return lf_monitor_latest(monitor, 0, &s) == LF_OK ? s.sm_pct : -1;
}

/* nexus_gate(nexus, monitor or None): hold runs back while the monitor's GPU is busier than launch_busy_pct */
static PyObject *nexus_gate(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *object;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "OO", &handle, &object)) return NULL;
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_monitor *monitor = b && object != Py_None ? lfpy_get(object, "lf_monitor") : NULL;
    if (!b || (object != Py_None && !monitor)) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_gate(b->nexus, monitor ? busy_pct : NULL, monitor));
    if (rc < 0) return lfpy_raise(rc);
    PyObject *before = b->monitor;
    b->monitor = monitor ? Py_NewRef(object) : NULL;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* nexus_recent(nexus) -> [{seq, state, chunk, dtype, count, bytes, seconds}, …], oldest first; chunk -1: none of the schedule */
static PyObject *nexus_recent(PyObject *self, PyObject *handle)
{
    (void)self;
    static const char *const states[] = {"posted", "done", "failed"};
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    PyObject *list = b ? PyList_New(0) : NULL;
    lf_collective_info c = {.size = sizeof c};
    for (int32_t i = 0; list && lf_nexus_get_recent(b->nexus, i, &c) == LF_OK; i++) {
        PyObject *row = Py_BuildValue("{s:L,s:s,s:i,s:i,s:L,s:L,s:d}", "seq", (long long)c.seq, "state", states[c.state], "chunk",
                                      (int)c.chunk, "dtype", (int)c.dtype, "count", (long long)c.count, "bytes",
                                      (long long)c.bytes, "seconds", c.seconds);
        if (!row || PyList_Insert(list, 0, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* nexus_describe(nexus) -> one line on the transport */
static PyObject *nexus_describe(PyObject *self, PyObject *handle)
{
    (void)self;
    char text[512];
    nexus_box *b = lfpy_get(handle, "lf_nexus");
    lf_status rc;
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = lf_nexus_describe(b->nexus, text, sizeof text));
    return rc < 0 ? lfpy_raise(rc) : PyUnicode_FromString(text);
}

/* nccl_version(dict or None) -> (22809, "2.28.9"); raises Error when there is no NCCL that can be used */
static PyObject *nccl_version(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *options = Py_None;
    lf_nexus_options o;
    int32_t version;
    char text[32];
    lf_status rc;
    if (!PyArg_ParseTuple(args, "|O", &options) || lfpy_options("nexus", &o, sizeof o, options) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nccl_version(&o, &version, text, sizeof text));
    return rc < 0 ? lfpy_raise(rc) : Py_BuildValue("is", (int)version, text);
}

/* nccl_id(dict or None) -> the bytes by which ranks meet, made on one of them */
static PyObject *nccl_id(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *options = Py_None;
    lf_nexus_options o;
    uint8_t id[LF_NCCL_ID_BYTES];
    lf_status rc;
    if (!PyArg_ParseTuple(args, "|O", &options) || lfpy_options("nexus", &o, sizeof o, options) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_nccl_id(&o, id));
    return rc < 0 ? lfpy_raise(rc) : PyBytes_FromStringAndSize((const char *)id, sizeof id);
}

#define FAST(name, help)                                              \
    {                                                                 \
#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, help \
    }
PyMethodDef lfpy_nexus_methods[] = {
    {"nexus_open", nexus_open, METH_VARARGS, "The schedule of a map over a transport: None, 'loopback' or an object."},
    {"nexus_begin", nexus_begin, METH_O, "Start a step's reductions."},
    {"nexus_present", nexus_present, METH_VARARGS, "Tokens of experts' blocks: (nexus, [(block, tokens), …])."},
    FAST(nexus_mark, "A block's gradient is final: (nexus, index, stream)."),
    FAST(nexus_finish, "Post what is left and wait: (nexus, stream)."),
    FAST(nexus_flush, "Post what is left: (nexus, stream)."),
    FAST(nexus_take, "Wait for the next run: (nexus, stream) -> (first chunk, number of chunks) or None."),
    FAST(nexus_gather, "Shares of chunks to every rank: (nexus, role, first, n, stream)."),
    FAST(nexus_gathered, "Wait for all gathers: (nexus, stream)."),
    FAST(nexus_reduce, "Sum f64 or i64 over ranks, between steps: (nexus, address, count, dtype, stream)."),
    FAST(nexus_replayed, "A captured step was launched: (nexus, stream)."),
    FAST(nexus_retune, "The schedule with another chunk size: (nexus, chunk_bytes, stream)."),
    FAST(nexus_tune_begin, "A whole step begins: (nexus, stream)."),
    FAST(nexus_tune_end, "It is queued: (nexus, stream, counts) -> whether the schedule is another one."),
    {"nexus_tuning", nexus_tuning, METH_O, "What tuning of the chunk size is at."},
    {"nexus_check", nexus_check, METH_O, "Raises what ended the handle, also what nobody has asked for yet."},
    {"nexus_settle", nexus_settle, METH_O, "Wait until everything posted is done."},
    {"nexus_cancel", nexus_cancel, METH_O, "Forget a step whose capture failed."},
    {"nexus_residual_save", nexus_residual_save, METH_VARARGS, "What is kept back, to a file: (nexus, path) -> digest or None."},
    {"nexus_residual_load", nexus_residual_load, METH_VARARGS, "Add a file's: (nexus, path, digest)."},
    {"nexus_residual_drop", nexus_residual_drop, METH_O, "Forget what is kept back."},
    {"nexus_residual_flush", nexus_residual_flush, METH_O, "The next step is dense and takes it along."},
    {"nexus_residual_bytes", nexus_residual_bytes, METH_O, "Bytes that may have something kept back."},
    {"nexus_seek", nexus_seek, METH_VARARGS, "Steps of the training before now: (nexus, steps)."},
    {"nexus_describe", nexus_describe, METH_O, "One line on the transport."},
    {"nccl_version", nccl_version, METH_VARARGS, "Version of the NCCL that would be used, as number and text."},
    {"nccl_id", nccl_id, METH_VARARGS, "Bytes by which ranks meet, made on one of them."},
    {"nexus_chunks", nexus_chunks, METH_O, "The schedule, a dict a chunk, in the order of posting."},
    {"nexus_gate", nexus_gate, METH_VARARGS, "Hold runs back while a monitor's GPU is busy: (nexus, monitor or None)."},
    {"nexus_recent", nexus_recent, METH_O, "The last collectives, oldest first."},
    {"nexus_stats", nexus_stats, METH_O, "Counts and times so far."},
    {NULL, NULL, 0, NULL},
};
