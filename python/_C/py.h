/* SPDX-License-Identifier: Apache-2.0 */
/** @file py.h  What the files of the extension share. Limited API of CPython 3.10: one build serves all later versions.
 *
 *  The extension is a thin layer: a function here parses arguments, drops the GIL, makes one call of the C library and turns
 *  the result into Python objects. Memory comes in as integers (`tensor.data_ptr()`), streams as integers (0: none). */
#ifndef LF_PY_H
#define LF_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "loongforge/loongforge.h"

/** A C handle as a Python object. `owner` is kept alive until the handle is closed (a loader keeps its set).
 *  @return new reference; on failure NULL with an exception, and the handle is closed. */
PyObject *lfpy_wrap(void *handle, const char *kind, void (*close)(void *), PyObject *owner);
/** The handle inside; NULL with TypeError (another kind) or ValueError (closed). */
void *lfpy_get(PyObject *object, const char *kind);

/** Raise loongforge._C.Error(status, name, text) from the thread's error text; returns NULL. */
PyObject *lfpy_raise(lf_status status);

/** Fill an options struct of `section` from defaults and a dict (or None) of str -> value. 0, or -1 with an exception. */
int lfpy_options(const char *section, void *options, size_t size, PyObject *dict);

/** The library's stream for a native handle, kept and reused; the caller does not close it. On the CPU NULL, the calling thread;
 *  elsewhere 0 means the device's default stream, as PyTorch has it. 0, or -1 with an exception. Needs the GIL. */
int lfpy_stream(lf_device *device, unsigned long long native, lf_stream **stream);

/** A list [(klass, offset, count), …] as an array of *n, for PyMem_Free; NULL with an exception. */
lf_range *lfpy_ranges(PyObject *list, int32_t *n);

/** Run one expression without the GIL. */
#define LFPY_FREE_GIL(expr)          \
    do {                             \
        Py_BEGIN_ALLOW_THREADS expr; \
        Py_END_ALLOW_THREADS         \
    } while (0)

/** An address given as a Python int. */
static inline void *lfpy_ptr(unsigned long long address) { return (void *)(uintptr_t)address; }

/** Adds the functions of one file to the module. One array a file, listed in py_module.c. */
extern PyMethodDef lfpy_base_methods[], lfpy_device_methods[], lfpy_map_methods[], lfpy_loader_methods[], lfpy_vault_methods[],
    lfpy_loom_methods[], lfpy_loom_dense_methods[], lfpy_nexus_methods[], lfpy_mpi_methods[], lfpy_sculptor_methods[],
    lfpy_scope_methods[], lfpy_experts_methods[], lfpy_topk_methods[];

#endif
