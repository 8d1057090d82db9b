/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault. */
#include <stdlib.h>

#include "py.h"

/* A vault with its map, whose device wrapping a stream needs; the vault holds a reference to it. */
typedef struct vault_pair {
    lf_vault *vault;
    lf_map *map;
} vault_pair;

/* Errors of a save in flight go to the log here: callers that care call vault_wait first. */
static void close_pair(void *p)
{
    vault_pair *pair = p;
    (void)lf_vault_close(pair->vault);
    free(pair);
}

/* vault_open(dir, map, dict or None) -> handle */
static PyObject *vault_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *map_handle, *options = Py_None, *dir;
    lf_vault_options o;
    if (!PyArg_ParseTuple(args, "O&O|O", PyUnicode_FSConverter, &dir, &map_handle, &options)) return NULL;
    lf_map *map = lfpy_get(map_handle, "lf_map");
    vault_pair *pair = map && lfpy_options("vault", &o, sizeof o, options) == 0 ? malloc(sizeof *pair) : NULL;
    if (!pair) {
        Py_DECREF(dir);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    lf_status rc;
    pair->map = map;
    LFPY_FREE_GIL(rc = lf_vault_open(&pair->vault, PyBytes_AsString(dir), map, &o));
    Py_DECREF(dir);
    if (rc == LF_OK) return lfpy_wrap(pair, "lf_vault", close_pair, map_handle);
    free(pair);
    return lfpy_raise(rc);
}

static void free_blobs(lf_blob *blobs, int32_t n)
{
    for (int32_t i = 0; i < n; i++) free((void *)blobs[i].name);
    free(blobs);
}

/* Names and values of {name: bytes}. The values are borrowed from *keep, a new list. */
static lf_blob *take_blobs(PyObject *dict, PyObject **keep, int32_t *n)
{
    PyObject *key, *value;
    *n = 0;
    *keep = NULL;
    if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "blobs: expected a dict of str to bytes, got %R", dict), NULL;
    lf_blob *blobs = calloc((size_t)PyDict_Size(dict) + 1, sizeof *blobs);
    *keep = PyList_New(0);
    if (!blobs || !*keep) goto fail;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
        PyObject *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8String(key) : NULL;
        char *text, *data, *copy;
        Py_ssize_t name_bytes, bytes;
        if (!PyErr_Occurred() && (!name || !PyBytes_Check(value)))
            PyErr_Format(PyExc_TypeError, "blob %R: expected bytes, got %R", key, (PyObject *)Py_TYPE(value));
        if (PyErr_Occurred() || PyBytes_AsStringAndSize(name, &text, &name_bytes) < 0 ||
            PyBytes_AsStringAndSize(value, &data, &bytes) < 0 || PyList_Append(*keep, value) < 0 ||
            (copy = calloc((size_t)name_bytes + 1, 1)) == NULL) {
            Py_XDECREF(name);
            goto fail;
        }
        for (Py_ssize_t i = 0; i < name_bytes; i++) copy[i] = text[i];
        blobs[(*n)++] = (lf_blob){copy, data, bytes};
        Py_DECREF(name);
    }
    return blobs;
fail:
    if (!PyErr_Occurred()) PyErr_NoMemory();
    if (blobs) free_blobs(blobs, *n);
    Py_CLEAR(*keep);
    return NULL;
}

/* vault_save(vault, step, {name: bytes}, stream=0) -> "saved" or "busy" */
static PyObject *vault_save(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *dict, *keep;
    long long step;
    unsigned long long native = 0;
    int32_t n;
    if (!PyArg_ParseTuple(args, "OLO|K", &handle, &step, &dict, &native)) return NULL;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    lf_blob *blobs = pair ? take_blobs(dict, &keep, &n) : NULL;
    if (!blobs) return NULL;
    lf_stream *stream = NULL;
    lf_device *device = lf_map_device(pair->map);
    lf_status rc = LF_OK;
    int bad = device ? lfpy_stream(device, native, &stream) : 0;
    if (!bad) LFPY_FREE_GIL(rc = lf_vault_save(pair->vault, step, blobs, n, stream));
    free_blobs(blobs, n);
    Py_DECREF(keep);
    if (bad) return NULL;
    return rc < 0 ? lfpy_raise(rc) : PyUnicode_FromString(rc == LF_AGAIN ? "busy" : "saved");
}

/* vault_wait(vault) */
static PyObject *vault_wait(PyObject *self, PyObject *handle)
{
    (void)self;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    if (!pair) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_vault_wait(pair->vault));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* vault_due(vault, step) -> bool */
static PyObject *vault_due(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long step;
    if (!PyArg_ParseTuple(args, "OL", &handle, &step)) return NULL;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    return pair ? PyBool_FromLong(lf_vault_due(pair->vault, step)) : NULL;
}

static PyObject *info_dict(const lf_checkpoint_info *i)
{
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:i,s:i,s:s}", "step", (long long)i->step, "base_step", (long long)i->base_step,
                         "time_unix", (long long)i->time_unix, "bytes", (long long)i->bytes, "raw_bytes", (long long)i->raw_bytes,
                         "n_slices", (int)i->n_slices, "n_changed", (int)i->n_changed, "path", i->path);
}

/* vault_restore(vault, step=-1) -> dict about what was loaded */
static PyObject *vault_restore(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long step = -1;
    if (!PyArg_ParseTuple(args, "O|L", &handle, &step)) return NULL;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    if (!pair) return NULL;
    lf_checkpoint_info info = {.size = sizeof info};
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_vault_restore(pair->vault, step, &info));
    return rc < 0 ? lfpy_raise(rc) : info_dict(&info);
}

/* vault_blob(vault, name) -> bytes of the restored checkpoint */
static PyObject *vault_blob(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    const char *name;
    if (!PyArg_ParseTuple(args, "Os", &handle, &name)) return NULL;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    if (!pair) return NULL;
    const void *data;
    int64_t bytes;
    lf_status rc = lf_vault_blob(pair->vault, name, &data, &bytes);
    return rc < 0 ? lfpy_raise(rc) : PyBytes_FromStringAndSize(data, (Py_ssize_t)bytes);
}

/* vault_stats(vault) -> dict */
static PyObject *vault_stats(PyObject *self, PyObject *handle)
{
    (void)self;
    vault_pair *pair = lfpy_get(handle, "lf_vault");
    if (!pair) return NULL;
    lf_vault_stats s = {.size = sizeof s};
    lf_status rc = lf_vault_get_stats(pair->vault, &s);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d,s:L}", "saves", (long long)s.saves, "committed",
                         (long long)s.committed, "skipped_busy", (long long)s.skipped_busy, "rebases", (long long)s.rebases,
                         "bytes_written", (long long)s.bytes_written, "bytes_raw", (long long)s.bytes_raw, "slices_changed",
                         (long long)s.slices_changed, "slices_total", (long long)s.slices_total, "stall_last_s", s.stall_last_s,
                         "stall_max_s", s.stall_max_s, "stall_sum_s", s.stall_sum_s, "write_s", s.write_s, "direct_failures",
                         (long long)s.direct_failures);
}

/* vault_list(dir) -> [dict, ...] in order of step */
static PyObject *vault_list(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *dir, *list = NULL;
    int32_t n = 0;
    lf_checkpoint_info *infos = NULL;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &dir)) return NULL;
    lf_status rc = lf_vault_list(PyBytes_AsString(dir), NULL, &n);
    if (rc == LF_OK) infos = calloc((size_t)n + 8, sizeof *infos);
    if (infos) {
        n += 8; /* some may be committed meanwhile */
        LFPY_FREE_GIL(rc = lf_vault_list(PyBytes_AsString(dir), infos, &n));
    }
    Py_DECREF(dir);
    if (rc == LF_OK && infos) list = PyList_New(0);
    for (int32_t i = 0; list && i < n; i++) {
        PyObject *one = info_dict(&infos[i]);
        if (!one || PyList_Append(list, one) < 0) Py_CLEAR(list);
        Py_XDECREF(one);
    }
    free(infos);
    if (list) return list;
    return rc < 0 ? lfpy_raise(rc) : PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

/* vault_verify(dir): raises when a record of any checkpoint is damaged */
static PyObject *vault_verify(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *dir;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &dir)) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_vault_verify(PyBytes_AsString(dir)));
    Py_DECREF(dir);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* vault_merge(dir, step, target): base and diffs up to a step (-1: newest) into one file */
static PyObject *vault_merge(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *dir, *target;
    long long step;
    if (!PyArg_ParseTuple(args, "O&LO&", PyUnicode_FSConverter, &dir, &step, PyUnicode_FSConverter, &target)) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_vault_merge(PyBytes_AsString(dir), step, PyBytes_AsString(target)));
    Py_DECREF(dir);
    Py_DECREF(target);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* vault_gc(dir, keep_last, keep_every=0, after=-1) -> number of checkpoints deleted */
static PyObject *vault_gc(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *dir;
    int keep_last, keep_every = 0;
    long long after = -1;
    int32_t removed;
    if (!PyArg_ParseTuple(args, "O&i|iL", PyUnicode_FSConverter, &dir, &keep_last, &keep_every, &after)) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_vault_gc(PyBytes_AsString(dir), keep_last, keep_every, after, &removed));
    Py_DECREF(dir);
    return rc < 0 ? lfpy_raise(rc) : PyLong_FromLong(removed);
}

PyMethodDef lfpy_vault_methods[] = {
    {"vault_open", vault_open, METH_VARARGS, "Open or create a vault folder for a map."},
    {"vault_save", vault_save, METH_VARARGS, "Snapshot a step and queue it; 'saved', or 'busy' when the disk does not keep up."},
    {"vault_wait", vault_wait, METH_O, "Wait for the save in flight; raises its error."},
    {"vault_due", vault_due, METH_VARARGS, "Is a save due after this step?"},
    {"vault_restore", vault_restore, METH_VARARGS, "Load the newest good checkpoint of at most a step into the map."},
    {"vault_blob", vault_blob, METH_VARARGS, "Bytes that were saved under a name, of the restored checkpoint."},
    {"vault_stats", vault_stats, METH_O, "Counts, bytes and seconds of this vault."},
    {"vault_list", vault_list, METH_VARARGS, "The committed checkpoints of a folder."},
    {"vault_verify", vault_verify, METH_VARARGS, "Check every record of every checkpoint of a folder."},
    {"vault_merge", vault_merge, METH_VARARGS, "Merge base and diffs into one file that opens as a base."},
    {"vault_gc", vault_gc, METH_VARARGS, "Delete old checkpoints, or those after a step."},
    {NULL, NULL, 0, NULL},
};
