/* SPDX-License-Identifier: Apache-2.0 */
/* Maps, and their memory as DLPack capsules. */
#include <stdlib.h>

#include "dlpack_abi.h"
#include "py.h"

static void close_map(void *map) { lf_map_unref(map); }

/* map_open(dict or None) -> handle */
static PyObject *map_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *options = Py_None;
    lf_map_options o;
    if (!PyArg_ParseTuple(args, "|O", &options) || lfpy_options("map", &o, sizeof o, options) < 0) return NULL;
    lf_map *map;
    lf_status rc = lf_map_open(&map, &o);
    return rc < 0 ? lfpy_raise(rc) : lfpy_wrap(map, "lf_map", close_map, NULL);
}

/* A sequence of extents into shape; how many, or -1 with an exception. */
static int32_t take_shape(PyObject *sequence, const char *name, int64_t shape[LF_MAX_DIMS])
{
    Py_ssize_t ndim = PySequence_Size(sequence);
    if (ndim < 0) return -1;
    if (ndim > LF_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s has %zd dimensions, expected at most %d", name, ndim, LF_MAX_DIMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < ndim; i++) {
        PyObject *extent = PySequence_GetItem(sequence, i);
        shape[i] = extent ? PyLong_AsLongLong(extent) : -1;
        Py_XDECREF(extent);
        if (PyErr_Occurred()) return -1;
    }
    return (int32_t)ndim;
}

/* map_add(map, name, shape, dtype, layer, expert, tied_to, flags) -> index */
static PyObject *map_add(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *shape_object;
    int64_t shape[LF_MAX_DIMS];
    lf_param p = {.size = sizeof p, .shape = shape};
    int dtype, layer, expert, tied;
    unsigned flags;
    if (!PyArg_ParseTuple(args, "OsOiiiiI", &handle, &p.name, &shape_object, &dtype, &layer, &expert, &tied, &flags)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    p.ndim = take_shape(shape_object, p.name, shape);
    if (p.ndim < 0) return NULL;
    p.dtype = dtype;
    p.layer = layer;
    p.expert = expert;
    p.tied_to = tied;
    p.flags = flags;
    int32_t index;
    lf_status rc = lf_map_add(map, &p, &index);
    return rc < 0 ? lfpy_raise(rc) : PyLong_FromLong(index);
}

/* map_set_pool_bytes(map, pool, bytes) */
static PyObject *map_set_pool_bytes(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    const char *pool;
    long long bytes;
    if (!PyArg_ParseTuple(args, "OsL", &handle, &pool, &bytes)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_status rc = lf_map_set_pool_bytes(map, pool, bytes);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* map_plan(map) */
static PyObject *map_plan(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_status rc = lf_map_plan(map);
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* map_allocate(map, device) */
static PyObject *map_allocate(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *map_handle, *device_handle;
    if (!PyArg_ParseTuple(args, "OO", &map_handle, &device_handle)) return NULL;
    lf_map *map = lfpy_get(map_handle, "lf_map");
    lf_device *device = map ? lfpy_get(device_handle, "lf_device") : NULL;
    if (!device) return NULL;
    lf_status rc;
    LFPY_FREE_GIL(rc = lf_map_allocate(map, device));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

/* map_bytes(map) -> int */
static PyObject *map_bytes(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    return map ? PyLong_FromLongLong(lf_map_bytes(map)) : NULL;
}

static PyObject *shape_tuple(const int64_t *shape, int32_t ndim)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int32_t i = 0; tuple && i < ndim; i++) {
        PyObject *extent = PyLong_FromLongLong(shape[i]);
        if (!extent || PyTuple_SetItem(tuple, i, extent) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* map_block(map, index) -> dict */
static PyObject *map_block(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int index;
    if (!PyArg_ParseTuple(args, "Oi", &handle, &index)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_block_info b = {.size = sizeof b};
    lf_status rc = lf_map_get_block(map, index, &b);
    if (rc < 0) return lfpy_raise(rc);
    PyObject *shape = shape_tuple(b.shape, b.ndim);
    if (!shape) return NULL;
    return Py_BuildValue("{s:s,s:s,s:i,s:L,s:L,s:N,s:i,s:i,s:i,s:i,s:I}", "name", b.name, "pool", b.pool, "klass",
                         (int)b.range.klass, "offset", (long long)b.range.offset, "count", (long long)b.range.count, "shape",
                         shape, "layer", (int)b.layer, "expert", (int)b.expert, "group", (int)b.group, "tied_to", (int)b.tied_to,
                         "flags", (unsigned)b.flags);
}

/* map_pools(map) -> [(name, kind, klass, offset, used, capacity), …] */
static PyObject *map_pools(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    PyObject *list = map ? PyList_New(0) : NULL;
    for (int32_t i = 0; list && i < lf_map_n_pools(map); i++) {
        lf_pool_info p = {.size = sizeof p};
        lf_status rc = lf_map_get_pool(map, i, &p);
        PyObject *row = rc < 0 ? lfpy_raise(rc)
                               : Py_BuildValue("(siiLLL)", p.name, (int)p.kind, (int)p.klass, (long long)p.offset,
                                               (long long)p.used, (long long)p.capacity);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* map_classes(map) -> [{dtype, frozen, count, role_dtype: (5 ints), role_offset: (5 ints)}, …] */
static PyObject *map_classes(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    PyObject *list = map ? PyList_New(0) : NULL;
    for (int32_t i = 0; list && i < lf_map_n_classes(map); i++) {
        lf_class_info k = {.size = sizeof k};
        lf_status rc = lf_map_get_class(map, i, &k);
        const int32_t *d = k.role_dtype;
        const int64_t *o = k.role_offset;
        PyObject *row = rc < 0 ? lfpy_raise(rc)
                               : Py_BuildValue("{s:i,s:i,s:L,s:(iiiii),s:(LLLLL)}", "dtype", (int)k.dtype, "frozen",
                                               (int)k.frozen, "count", (long long)k.count, "role_dtype", (int)d[0], (int)d[1],
                                               (int)d[2], (int)d[3], (int)d[4], "role_offset", (long long)o[0], (long long)o[1],
                                               (long long)o[2], (long long)o[3], (long long)o[4]);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *ranges_list(const lf_range *ranges, int32_t n)
{
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list && i < n; i++) {
        PyObject *row = Py_BuildValue("(iLL)", (int)ranges[i].klass, (long long)ranges[i].offset, (long long)ranges[i].count);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

lf_range *lfpy_ranges(PyObject *list, int32_t *n)
{
    const Py_ssize_t size = PyList_Check(list) ? PyList_Size(list) : -1;
    if (size < 0 || size >= INT32_MAX)
        return PyErr_Format(PyExc_TypeError, "ranges is %R, expected a list of (klass, offset, count)", list), NULL;
    lf_range *ranges = PyMem_Malloc(((size_t)size + 1) * sizeof *ranges);
    if (!ranges) return PyErr_NoMemory(), NULL;
    for (*n = 0; *n < size; ++*n) {
        PyObject *item = PyList_GetItem(list, *n);
        int klass;
        long long offset, count;
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "iLL", &klass, &offset, &count)) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_TypeError, "range %d is %R, expected (klass, offset, count)", (int)*n, item);
            PyMem_Free(ranges);
            return NULL;
        }
        ranges[*n] = (lf_range){klass, 0, offset, count};
    }
    return ranges;
}

/* map_groups(map) -> {name: [(klass, offset, count), …]} in the order of backward */
static PyObject *map_groups(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    PyObject *groups = map ? PyDict_New() : NULL;
    for (int32_t g = 0; groups && g < lf_map_n_groups(map); g++) {
        const char *name;
        const lf_range *ranges;
        int32_t n;
        lf_status rc = lf_map_get_group(map, g, &name, &ranges, &n);
        PyObject *list = rc < 0 ? lfpy_raise(rc) : ranges_list(ranges, n);
        if (!list || PyDict_SetItemString(groups, name, list) < 0) Py_CLEAR(groups);
        Py_XDECREF(list);
    }
    return groups;
}

/* map_cover(map, [index, …]) -> [(klass, offset, count), …] */
static PyObject *map_cover(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *indices, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &handle, &indices)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    Py_ssize_t n = map ? PySequence_Size(indices) : -1;
    if (n < 0) return NULL;
    int32_t *index = PyMem_Malloc(((size_t)n + 1) * sizeof *index), n_ranges = (int32_t)n;
    lf_range *ranges = PyMem_Malloc(((size_t)n + 1) * sizeof *ranges);
    if (!index || !ranges) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(indices, i);
        index[i] = item ? (int32_t)PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) goto out;
    }
    lf_status rc = lf_map_cover(map, index, (int32_t)n, ranges, &n_ranges);
    result = rc < 0 ? lfpy_raise(rc) : ranges_list(ranges, n_ranges);
out:
    PyMem_Free(index);
    PyMem_Free(ranges);
    return result;
}

/* ranges_common([(klass, offset, count), …], […]) -> [(klass, offset, count), …] */
static PyObject *ranges_common(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *list_a, *list_b, *result = NULL;
    int32_t n_a = 0, n_b = 0, n = 0;
    if (!PyArg_ParseTuple(args, "OO", &list_a, &list_b)) return NULL;
    lf_range *a = lfpy_ranges(list_a, &n_a), *b = a ? lfpy_ranges(list_b, &n_b) : NULL, *out = NULL;
    if (!b) goto out;
    lf_status rc = lf_ranges_common(a, n_a, b, n_b, NULL, &n);
    if (rc == LF_ERR_NOMEM && !(out = PyMem_Malloc((size_t)n * sizeof *out))) {
        PyErr_NoMemory();
        goto out;
    }
    if (out) rc = lf_ranges_common(a, n_a, b, n_b, out, &n);
    result = rc < 0 ? lfpy_raise(rc) : ranges_list(out, n);
out:
    PyMem_Free(a);
    PyMem_Free(b);
    PyMem_Free(out);
    return result;
}

/* map_address(map, klass, offset, count, role) -> int, 0 when there is none */
static PyObject *map_address(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int klass, role;
    long long offset, count;
    if (!PyArg_ParseTuple(args, "OiLLi", &handle, &klass, &offset, &count, &role)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_range range = {klass, 0, offset, count};
    return PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)lf_map_address(map, &range, role));
}

/* map_digest(map) -> 16 bytes */
static PyObject *map_digest(PyObject *self, PyObject *handle)
{
    (void)self;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    uint8_t digest[16];
    lf_status rc = lf_map_digest(map, digest);
    return rc < 0 ? lfpy_raise(rc) : PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

/* ---- DLPack ---------------------------------------------------------------------------------------------------------- */

typedef struct exported {
    dlpack_managed managed; /* first: the capsule points here */
    lf_map *map;            /* a reference of the tensor's own; NULL: not a map's memory */
    PyObject *owner;        /* kept alive by the tensor; NULL: borrowed */
    int64_t shape[LF_MAX_DIMS];
} exported;

/* Called by whoever took the tensor, on any thread, with or without the GIL. A map's memory needs no Python object. */
static void delete_exported(dlpack_managed *managed)
{
    exported *e = (exported *)managed;
    lf_map_unref(e->map);
    if (e->owner && Py_IsInitialized()) { /* at exit the process frees it */
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(e->owner);
        PyGILState_Release(gil);
    }
    free(e);
}

static void drop_capsule(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* taken: renamed by its consumer */
    dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

static int set_dtype(dlpack_tensor *t, int32_t dtype)
{
    static const uint8_t codes[] = {0, 2, 4, 2, 2, 0, 0, 1, 6};
    if (!lf_dtype_bytes(dtype)) return -1;
    t->code = codes[dtype];
    t->bits = (uint8_t)(8 * lf_dtype_bytes(dtype));
    t->lanes = 1;
    return 0;
}

/* map: kept alive by the tensor; NULL: the memory is borrowed, and `device` says where it is. */
static PyObject *export_memory(lf_map *map, lf_device *device, void *data, const int64_t *shape, int32_t ndim, int32_t dtype)
{
    int32_t kind, index;
    lf_device_where(device, &kind, &index);
    exported *e = calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    if (set_dtype(&e->managed.tensor, dtype) < 0) {
        free(e);
        return PyErr_Format(PyExc_ValueError, "dtype %d is unknown", (int)dtype);
    }
    for (int32_t i = 0; i < ndim; i++) e->shape[i] = shape[i];
    e->map = map ? lf_map_ref(map) : NULL;
    e->managed.tensor.data = data;
    e->managed.tensor.device_type = kind;
    e->managed.tensor.device_id = index;
    e->managed.tensor.ndim = ndim;
    e->managed.tensor.shape = e->shape;
    e->managed.deleter = delete_exported;
    PyObject *capsule = PyCapsule_New(&e->managed, "dltensor", drop_capsule);
    if (!capsule) delete_exported(&e->managed);
    return capsule;
}

/* map_tensor(map, index, role) -> capsule with the block's shape; ValueError when the class has no such role */
static PyObject *map_tensor(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int index, role;
    if (!PyArg_ParseTuple(args, "Oii", &handle, &index, &role)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_block_info b = {.size = sizeof b};
    lf_class_info k = {.size = sizeof k};
    lf_status rc = lf_map_get_block(map, index, &b);
    if (rc == LF_OK) rc = lf_map_get_class(map, b.range.klass, &k);
    if (rc < 0) return lfpy_raise(rc);
    void *data = lf_map_address(map, &b.range, role);
    if (!data) return PyErr_Format(PyExc_ValueError, "%s has no %s in the map", b.name, lf_role_name(role));
    return export_memory(map, lf_map_device(map), data, b.shape, b.ndim, k.role_dtype[role]);
}

/* map_flat(map, klass, offset, count, role) -> one-dimensional capsule over a range */
static PyObject *map_flat(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    int klass, role;
    long long offset, count;
    if (!PyArg_ParseTuple(args, "OiLLi", &handle, &klass, &offset, &count, &role)) return NULL;
    lf_map *map = lfpy_get(handle, "lf_map");
    if (!map) return NULL;
    lf_range range = {klass, 0, offset, count};
    lf_class_info k = {.size = sizeof k};
    lf_status rc = lf_map_get_class(map, klass, &k);
    if (rc < 0) return lfpy_raise(rc);
    void *data = lf_map_address(map, &range, role);
    if (!data)
        return PyErr_Format(PyExc_ValueError, "range (%d, %lld, %lld) has no %s in the map", klass, offset, count,
                            lf_role_name(role));
    return export_memory(map, lf_map_device(map), data, &range.count, 1, k.role_dtype[role]);
}

/* device_tensor(device, address, shape, dtype, owner=None) -> capsule; the tensor keeps `owner` alive, None: the caller does */
static PyObject *device_tensor(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle, *shape_object, *owner = Py_None;
    unsigned long long address;
    int64_t shape[LF_MAX_DIMS];
    int dtype;
    if (!PyArg_ParseTuple(args, "OKOi|O", &handle, &address, &shape_object, &dtype, &owner)) return NULL;
    lf_device *device = lfpy_get(handle, "lf_device");
    int32_t ndim = device ? take_shape(shape_object, "tensor", shape) : -1;
    PyObject *capsule = ndim < 0 ? NULL : export_memory(NULL, device, lfpy_ptr(address), shape, ndim, dtype);
    if (capsule && owner != Py_None) {
        Py_INCREF(owner);
        ((exported *)PyCapsule_GetPointer(capsule, "dltensor"))->owner = owner;
    }
    return capsule;
}

PyMethodDef lfpy_map_methods[] = {
    {"map_open", map_open, METH_VARARGS, "Start a map with options of section [map]."},
    {"map_add", map_add, METH_VARARGS, "Add a parameter: name, shape, dtype, layer, expert, tied_to, flags."},
    {"map_set_pool_bytes", map_set_pool_bytes, METH_VARARGS, "Give a pool head-room before planning."},
    {"map_plan", map_plan, METH_O, "Fix the layout."},
    {"map_allocate", map_allocate, METH_VARARGS, "Back the layout with a slab of a device."},
    {"map_bytes", map_bytes, METH_O, "Bytes of the whole layout."},
    {"map_block", map_block, METH_VARARGS, "One parameter's place."},
    {"map_pools", map_pools, METH_O, "Pools: (name, kind, class, offset, used, capacity)."},
    {"map_classes", map_classes, METH_O, "Classes with their roles."},
    {"map_groups", map_groups, METH_O, "Groups as lists of ranges."},
    {"map_cover", map_cover, METH_VARARGS, "The fewest ranges over some parameters."},
    {"ranges_common", ranges_common, METH_VARARGS, "What two lists of ranges have in common, in order of the first."},
    {"map_address", map_address, METH_VARARGS, "Address of a range in a role's plane."},
    {"map_digest", map_digest, METH_O, "128-bit digest of the layout."},
    {"map_tensor", map_tensor, METH_VARARGS, "A block's role as a DLPack capsule."},
    {"map_flat", map_flat, METH_VARARGS, "A range's role as a flat DLPack capsule."},
    {"device_tensor", device_tensor, METH_VARARGS, "Borrowed memory of a device as a DLPack capsule."},
    {NULL, NULL, 0, NULL},
};
