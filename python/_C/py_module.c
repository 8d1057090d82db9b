/* SPDX-License-Identifier: Apache-2.0 */
/* The module, its handle type, its exception, and options. */
#include "py.h"

#include <string.h>

/* CPython hands functions through void pointers, which ISO C does not know and POSIX does. */
#pragma GCC diagnostic ignored "-Wpedantic"

typedef struct handle {
    PyObject_HEAD void *handle;
    const char *kind;
    void (*close)(void *);
    PyObject *owner;
} handle;

static PyObject *handle_type, *error_type;

static void handle_shut(handle *h)
{
    void *inner = h->handle;
    PyObject *owner = h->owner;
    h->handle = NULL;
    h->owner = NULL;
    if (inner) LFPY_FREE_GIL(h->close(inner));
    Py_XDECREF(owner);
}

static void handle_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    handle_shut((handle *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *handle_close(PyObject *self, PyObject *none)
{
    (void)none;
    handle_shut((handle *)self);
    Py_RETURN_NONE;
}

static PyObject *handle_repr(PyObject *self)
{
    handle *h = (handle *)self;
    return PyUnicode_FromFormat("<%s %s>", h->kind, h->handle ? "open" : "closed");
}

static PyMethodDef handle_methods[] = {
    {"close", handle_close, METH_NOARGS, "Close the handle; closing twice is allowed."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_repr, handle_repr},
    {Py_tp_methods, handle_methods},
    {0, NULL},
};
static PyType_Spec handle_spec = {"loongforge._C.Handle", sizeof(handle), 0, Py_TPFLAGS_DEFAULT, handle_slots};

PyObject *lfpy_wrap(void *inner, const char *kind, void (*close)(void *), PyObject *owner)
{
    allocfunc make = (allocfunc)PyType_GetSlot((PyTypeObject *)handle_type, Py_tp_alloc);
    handle *h = (handle *)make((PyTypeObject *)handle_type, 0);
    if (!h) {
        close(inner);
        return NULL;
    }
    h->handle = inner;
    h->kind = kind;
    h->close = close;
    Py_XINCREF(owner);
    h->owner = owner;
    return (PyObject *)h;
}

void *lfpy_get(PyObject *object, const char *kind)
{
    handle *h = (handle *)object;
    if ((PyObject *)Py_TYPE(object) != handle_type || strcmp(h->kind, kind) != 0) {
        PyErr_Format(PyExc_TypeError, "expected a %s handle, got %R", kind, object);
        return NULL;
    }
    if (!h->handle) PyErr_Format(PyExc_ValueError, "the %s is closed", kind);
    return h->handle;
}

PyObject *lfpy_raise(lf_status status)
{
    const char *text = lf_error_text();
    PyObject *args = Py_BuildValue("(iss)", (int)status, lf_status_name(status), *text ? text : lf_status_text(status));
    if (args) PyErr_SetObject(error_type, args);
    Py_XDECREF(args);
    return NULL;
}

int lfpy_options(const char *section, void *options, size_t size, PyObject *dict)
{
    lf_status rc = lf_options_init(section, options, size);
    if (rc < 0) return lfpy_raise(rc), -1;
    if (!dict || dict == Py_None) return 0;
    if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "options of [%s]: expected a dict, got %R", section, dict), -1;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
        PyObject *text = PyObject_Str(value);
        Py_ssize_t n = 0;
        const char *k = PyUnicode_AsUTF8AndSize(key, NULL), *v = text ? PyUnicode_AsUTF8AndSize(text, &n) : NULL;
        if (v && strlen(v) != (size_t)n) {
            PyErr_Format(PyExc_ValueError, "[%s] %R has a 0 byte in its value", section, key);
            v = NULL;
        }
        rc = k && v ? lf_options_set(section, options, k, v) : LF_OK;
        Py_XDECREF(text);
        if (!k || !v) return -1;
        if (rc < 0) return lfpy_raise(rc), -1;
    }
    return 0;
}

static int add_methods(PyObject *module)
{
    PyMethodDef *const files[] = {lfpy_base_methods,  lfpy_device_methods,   lfpy_map_methods,        lfpy_loader_methods,
                                  lfpy_vault_methods, lfpy_loom_methods,     lfpy_loom_dense_methods, lfpy_nexus_methods,
                                  lfpy_mpi_methods,   lfpy_sculptor_methods, lfpy_scope_methods,      lfpy_experts_methods,
                                  lfpy_topk_methods};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (PyModule_AddFunctions(module, files[i]) < 0) return -1;
    return 0;
}

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "loongforge._C", "Thin layer over libloongforge.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void); /* found by name */

/* Another library than the one this was built with lays out structures in another way. */
static int check_library(void)
{
    if (lf_abi_version() == LF_ABI && strcmp(lf_version_string(), LF_VERSION) == 0) return 0;
    PyErr_Format(PyExc_ImportError,
                 "libloongforge.so is %s (ABI %d), expected the %s (ABI %d) that loongforge._C was built with; hint: look at "
                 "LD_LIBRARY_PATH, or build again",
                 lf_version_string(), (int)lf_abi_version(), LF_VERSION, LF_ABI);
    return -1;
}

PyMODINIT_FUNC PyInit__C(void)
{
    if (check_library() < 0) return NULL;
    PyObject *module = PyModule_Create(&module_def);
    handle_type = PyType_FromSpec(&handle_spec);
    error_type = PyErr_NewExceptionWithDoc("loongforge._C.Error", "An error of the C library: args are (status, name, text).",
                                           PyExc_RuntimeError, NULL);
    if (!module || !handle_type || !error_type) goto fail;
    Py_INCREF(handle_type);
    Py_INCREF(error_type);
    if (PyModule_AddObject(module, "Handle", handle_type) < 0 || PyModule_AddObject(module, "Error", error_type) < 0) goto fail;
    if (add_methods(module) < 0) goto fail;
    return module;
fail:
    Py_XDECREF(module);
    return NULL;
}
