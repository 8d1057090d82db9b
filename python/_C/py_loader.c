/* SPDX-License-Identifier: Apache-2.0 */
/* Sets, the loader, packing. */
#include "py.h"

#include <stdlib.h>
#include <string.h>

/* A loader with its device, which wrapping a stream needs. */
typedef struct loader_pair {
    lf_loader *loader;
    lf_device *device; /* borrowed: the handle's owner keeps it */
} loader_pair;

static void close_dataset(void *set) { lf_dataset_close(set); }

static void close_pair(void *user)
{
    loader_pair *pair = user;
    lf_loader_close(pair->loader);
    free(pair);
}

/* ---- sets ------------------------------------------------------------------------------------------------------------------ */

static PyObject *dataset_open(PyObject *self, PyObject *args)
{
    (void)self;
    const char *path;
    lf_dataset *set;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    LFPY_FREE_GIL(rc = lf_dataset_open(&set, path));
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(set, "lf_dataset", close_dataset, NULL);
}

static PyObject *dataset_info(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_dataset *set = lfpy_get(handle, "lf_dataset");
    if (!set) return NULL;
    lf_dataset_info i = {.size = sizeof i};
    lf_status rc = lf_dataset_get_info(set, &i);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:s,s:s}", "n_samples", (long long)i.n_samples, "n_bytes",
                         (long long)i.n_bytes, "n_other", (long long)i.n_other, "vocab_size", (int)i.vocab_size, "pad_id",
                         (int)i.pad_id, "bos_id", (int)i.bos_id, "eos_id", (int)i.eos_id, "image_id", (int)i.image_id, "human_id",
                         (int)i.human_id, "gpt_id", (int)i.gpt_id, "source", i.source, "tokenizer", i.tokenizer);
}

/* dataset_get(set, i) -> {"id": str, "image": bytes or None, "text": bytes or None} */
static PyObject *dataset_get(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long i;
    if (!PyArg_ParseTuple(args, "OL", &handle, &i)) return NULL;
    lf_dataset *set = lfpy_get(handle, "lf_dataset");
    if (!set) return NULL;
    lf_sample s = {.size = sizeof s};
    lf_status rc = lf_dataset_get(set, i, &s);
    if (rc < 0) return lfpy_raise(rc);
    PyObject *id = PyUnicode_DecodeUTF8(s.id, (Py_ssize_t)s.id_bytes, "backslashreplace");
    return Py_BuildValue("{s:N,s:y#,s:y#}", "id", id, "image", (const char *)s.image, (Py_ssize_t)s.image_bytes, "text",
                         (const char *)s.text, (Py_ssize_t)s.text_bytes);
}

/* dataset_verify(set, i, max_pixels): raises what a loader would find wrong with the sample. */
static PyObject *dataset_verify(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    long long i, max_pixels = 100000000;
    if (!PyArg_ParseTuple(args, "OL|L", &handle, &i, &max_pixels)) return NULL;
    lf_dataset *set = lfpy_get(handle, "lf_dataset");
    if (!set) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_dataset_verify(set, i, max_pixels));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* decode_image(bytes, size, max_pixels) -> bytes of (size, size, 3) u8 */
static PyObject *decode_image(PyObject *self, PyObject *args)
{
    (void)self;
    const char *bytes;
    Py_ssize_t n;
    int size;
    long long max_pixels = 100000000;
    if (!PyArg_ParseTuple(args, "y#i|L", &bytes, &n, &size, &max_pixels)) return NULL;
    if (size < 1 || size > 4096) return PyErr_Format(PyExc_ValueError, "size is %d, expected 1 to 4096", size);
    PyObject *rgb = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size * size * 3);
    if (!rgb) return NULL;
    lf_status rc;
    uint8_t *to = (uint8_t *)PyBytes_AsString(rgb);
    LFPY_FREE_GIL(rc = lf_decode_image(bytes, (size_t)n, size, max_pixels, to));
    if (rc == LF_OK) return rgb;
    Py_DECREF(rgb);
    return lfpy_raise(rc);
}

/* ---- loader ---------------------------------------------------------------------------------------------------------------- */

/* loader_open(set, device, options) -> handle; options: dict of section [loader] or None */
static PyObject *loader_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *set_handle, *device_handle, *dict = Py_None;
    if (!PyArg_ParseTuple(args, "OO|O", &set_handle, &device_handle, &dict)) return NULL;
    lf_dataset *set = lfpy_get(set_handle, "lf_dataset");
    lf_device *device = set ? lfpy_get(device_handle, "lf_device") : NULL;
    lf_loader_options opts;
    if (!device || lfpy_options("loader", &opts, sizeof opts, dict) < 0) return NULL;
    loader_pair *pair = malloc(sizeof *pair);
    if (!pair) return PyErr_NoMemory();
    lf_status rc;
    pair->device = device;
    LFPY_FREE_GIL(rc = lf_loader_open(&pair->loader, set, device, &opts));
    if (rc < 0) {
        free(pair);
        return lfpy_raise(rc);
    }
    PyObject *owner = PyTuple_Pack(2, set_handle, device_handle);
    PyObject *handle = owner ? lfpy_wrap(pair, "lf_loader", close_pair, owner) : NULL;
    if (!owner) close_pair(pair);
    Py_XDECREF(owner);
    return handle;
}

static lf_loader *loader_of(PyObject *handle)
{
    loader_pair *pair = lfpy_get(handle, "lf_loader");
    return pair ? pair->loader : NULL;
}

static PyObject *address(const void *p) { return PyLong_FromVoidPtr((void *)(uintptr_t)p); }

static PyObject *batch_dict(const lf_batch *b)
{
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N,s:N,s:i,s:i,s:i,s:i,s:L,s:L,s:L,s:i}", "images", address(b->images), "tokens",
                         address(b->tokens), "labels", address(b->labels), "index", address(b->index), "mask", address(b->mask),
                         "weight", address(b->weight), "n", (int)b->n, "seq", (int)b->seq, "image_size", (int)b->image_size,
                         "slot", (int)b->slot, "epoch", (long long)b->epoch, "number", (long long)b->number, "label_tokens",
                         (long long)b->label_tokens, "last_of_epoch", (int)b->last_of_epoch);
}

/* loader_next(loader, stream) -> dict of addresses, shapes and counts */
static PyObject *loader_next(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    unsigned long long native = 0;
    if (!PyArg_ParseTuple(args, "O|K", &handle, &native)) return NULL;
    loader_pair *pair = lfpy_get(handle, "lf_loader");
    if (!pair) return NULL;
    lf_batch batch = {.size = sizeof batch};
    lf_stream *stream;
    lf_status rc;
    if (lfpy_stream(pair->device, native, &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_loader_next(pair->loader, &batch, stream));
    return rc < 0 ? lfpy_raise(rc) : batch_dict(&batch);
}

static int take_number(PyObject *dict, const char *key, long long *value)
{
    PyObject *item = PyDict_Check(dict) ? PyDict_GetItemString(dict, key) : NULL;
    if (!item) return PyErr_Format(PyExc_KeyError, "no '%s' in %R", key, dict), -1;
    *value = PyLong_AsLongLong(item);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* loader_release(loader, dict of loader_next, stream) */
static PyObject *loader_release(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *dict;
    unsigned long long native = 0;
    long long slot, epoch, number;
    if (!PyArg_ParseTuple(args, "OO|K", &handle, &dict, &native)) return NULL;
    loader_pair *pair = lfpy_get(handle, "lf_loader");
    if (!pair || take_number(dict, "slot", &slot) < 0 || take_number(dict, "epoch", &epoch) < 0 ||
        take_number(dict, "number", &number) < 0)
        return NULL;
    lf_batch batch = {.size = sizeof batch, .slot = (int32_t)slot, .epoch = epoch, .number = number};
    lf_stream *stream;
    lf_status rc;
    if (lfpy_stream(pair->device, native, &stream) < 0) return NULL;
    LFPY_FREE_GIL(rc = lf_batch_release(pair->loader, &batch, stream));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *loader_batches_per_epoch(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_loader *loader = loader_of(handle);
    return loader ? PyLong_FromLongLong(lf_loader_batches_per_epoch(loader)) : NULL;
}

static PyObject *loader_get_state(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_loader *loader = loader_of(handle);
    if (!loader) return NULL;
    lf_loader_state s = {.size = sizeof s};
    lf_status rc = lf_loader_get_state(loader, &s);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:L}", "epoch", (long long)s.epoch, "samples_done", (long long)s.samples_done, "seed",
                         (long long)s.seed, "n_samples", (long long)s.n_samples);
}

static PyObject *loader_set_state(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *dict;
    long long epoch, done, seed, n;
    if (!PyArg_ParseTuple(args, "OO", &handle, &dict)) return NULL;
    lf_loader *loader = loader_of(handle);
    if (!loader || take_number(dict, "epoch", &epoch) < 0 || take_number(dict, "samples_done", &done) < 0 ||
        take_number(dict, "seed", &seed) < 0 || take_number(dict, "n_samples", &n) < 0)
        return NULL;
    lf_loader_state s = {.size = sizeof s, .epoch = epoch, .samples_done = done, .seed = seed, .n_samples = n};
    lf_status rc = lf_loader_set_state(loader, &s);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *loader_stats(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_loader *loader = loader_of(handle);
    if (!loader) return NULL;
    lf_loader_stats s = {.size = sizeof s};
    lf_status rc = lf_loader_get_stats(loader, &s);
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d}", "batches", (long long)s.batches,
                         "samples", (long long)s.samples, "bad_samples", (long long)s.bad_samples, "cut_texts",
                         (long long)s.cut_texts, "tokens", (long long)s.tokens, "padding_tokens", (long long)s.padding_tokens,
                         "label_tokens", (long long)s.label_tokens, "read_s", s.read_s, "decode_s", s.decode_s, "assemble_s",
                         s.assemble_s, "stall_s", s.stall_s, "latency_mean_s", s.latency_mean_s, "latency_std_s", s.latency_std_s,
                         "latency_p50_s", s.latency_p50_s, "latency_p95_s", s.latency_p95_s, "latency_p99_s", s.latency_p99_s);
}

/* loader_bad_samples(loader) -> str, a line a sample */
static PyObject *loader_bad_samples(PyObject *self, PyObject *handle)
{
    (void)self;
    enum { ROOM = (64 << 10) + 1 };
    lf_loader *loader = loader_of(handle);
    char *text = loader ? PyMem_Malloc(ROOM) : NULL;
    if (!text) return loader ? PyErr_NoMemory() : NULL;
    lf_status rc = lf_loader_bad_samples(loader, text, ROOM);
    PyObject *result = rc < 0 ? lfpy_raise(rc) : PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
    PyMem_Free(text);
    return result;
}

/* ---- packing ---------------------------------------------------------------------------------------------------------------- */

/* The caller's callable(done, total); a true result or an exception cancels. None: only look for Ctrl-C. */
static int32_t forward_progress(void *user, int64_t done, int64_t total)
{
    PyObject *target = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    int stop = PyErr_CheckSignals() < 0;
    if (!stop && target != Py_None) {
        PyObject *result = PyObject_CallFunction(target, "LL", (long long)done, (long long)total);
        stop = !result || PyObject_IsTrue(result) != 0;
        Py_XDECREF(result);
    }
    PyGILState_Release(gil);
    return stop;
}

static PyObject *pack_result(lf_status rc, const lf_pack_summary *s)
{
    if (PyErr_Occurred()) return NULL; /* of the progress call */
    if (rc < 0) return lfpy_raise(rc);
    return Py_BuildValue("{s:L,s:L,s:L,s:L}", "samples", (long long)s->samples, "skipped", (long long)s->skipped, "images",
                         (long long)s->images, "bytes", (long long)s->bytes);
}

/* pack_scenes(path, options, progress) -> summary; options: dict of section [pack] or None */
static PyObject *pack_scenes(PyObject *self, PyObject *args)
{
    (void)self;
    const char *path;
    PyObject *dict = Py_None, *progress = Py_None;
    lf_pack_options opts;
    lf_pack_summary sum = {.size = sizeof sum};
    lf_status rc;
    if (!PyArg_ParseTuple(args, "s|OO", &path, &dict, &progress) || lfpy_options("pack", &opts, sizeof opts, dict) < 0)
        return NULL;
    LFPY_FREE_GIL(rc = lf_pack_scenes(path, &opts, forward_progress, progress, &sum));
    return pack_result(rc, &sum);
}

/* pack_folder(path, folder, list, tokenizer, vocab_size, options, progress) -> summary; list and tokenizer may be None */
static PyObject *pack_folder(PyObject *self, PyObject *args)
{
    (void)self;
    const char *path, *folder, *list, *tokenizer;
    int vocab_size;
    PyObject *dict = Py_None, *progress = Py_None;
    lf_pack_options opts;
    lf_pack_summary sum = {.size = sizeof sum};
    lf_status rc;
    if (!PyArg_ParseTuple(args, "sszzi|OO", &path, &folder, &list, &tokenizer, &vocab_size, &dict, &progress) ||
        lfpy_options("pack", &opts, sizeof opts, dict) < 0)
        return NULL;
    LFPY_FREE_GIL(rc = lf_pack_folders(path, &folder, 1, list, tokenizer, vocab_size, &opts, forward_progress, progress, &sum));
    return pack_result(rc, &sum);
}

PyMethodDef lfpy_loader_methods[] = {
    {"dataset_open", dataset_open, METH_VARARGS, "Open an LMDB set read-only."},
    {"dataset_info", dataset_info, METH_O, "What a set says about itself: samples, bytes, ids of its tokens."},
    {"dataset_get", dataset_get, METH_VARARGS, "The i-th sample's raw records, in the order of ids."},
    {"dataset_verify", dataset_verify, METH_VARARGS, "Decode and parse the i-th sample; raises what is wrong with it."},
    {"decode_image", decode_image, METH_VARARGS, "Decode one JPEG to (size, size, 3) bytes."},
    {"loader_open", loader_open, METH_VARARGS, "Start a loader over a set, delivering on a device."},
    {"loader_next", loader_next, METH_VARARGS, "The next batch: addresses, shapes, counts."},
    {"loader_release", loader_release, METH_VARARGS, "Give a batch's slot back."},
    {"loader_batches_per_epoch", loader_batches_per_epoch, METH_O, "Batches that this rank gets in an epoch."},
    {"loader_get_state", loader_get_state, METH_O, "Where the stream of batches stands."},
    {"loader_set_state", loader_set_state, METH_VARARGS, "Go on from a state; before the first batch."},
    {"loader_stats", loader_stats, METH_O, "Counts, busy time of the stages, latencies."},
    {"loader_bad_samples", loader_bad_samples, METH_O, "Bad samples so far, a line each."},
    {"pack_scenes", pack_scenes, METH_VARARGS, "Draw scenes and pack them."},
    {"pack_folder", pack_folder, METH_VARARGS, "Pack a folder of images and texts."},
    {NULL, NULL, 0, NULL},
};
