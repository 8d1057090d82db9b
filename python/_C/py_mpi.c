/* SPDX-License-Identifier: Apache-2.0 */
/* MPI beside the gradients: one use of it for the process, and sums of small arrays over its ranks. */
#include "py.h"

/* What a handle of kind "lf_mpi" holds. */
typedef struct mpi_box {
    lf_device *device;
    lf_transport t;
    lf_mpi_info info;
    double timeout_s;
} mpi_box;

/* Called without the GIL. The use of our own goes last: it may be the one that ends MPI. */
static void close_box(void *handle)
{
    mpi_box *b = handle;
    if (b->t.close) b->t.close(b->t.user);
    if (b->info.world) lf_mpi_stop();
    lf_device_close(b->device);
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyMem_Free(b);
    PyGILState_Release(gil);
}

static lf_status open_box(mpi_box *b, const lf_nexus_options *o)
{
    b->timeout_s = o->timeout_s;
    lf_status rc = lf_mpi_start(o, &b->info);
    if (rc == LF_OK) rc = lf_device_open(&b->device, "cpu");
    if (rc == LF_OK) rc = lf_mpi_open(o, b->device, &b->t);
    return rc;
}

/* mpi_open(dict or None) -> handle: MPI is started, or taken as it is, until the handle is closed */
static PyObject *mpi_open(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *options = Py_None;
    lf_nexus_options o;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "|O", &options) || lfpy_options("nexus", &o, sizeof o, options) < 0) return NULL;
    mpi_box *b = PyMem_Malloc(sizeof *b);
    if (!b) return PyErr_NoMemory();
    *b = (mpi_box){.info = {.size = sizeof b->info}};
    LFPY_FREE_GIL(rc = open_box(b, &o));
    if (rc == LF_OK) return lfpy_wrap(b, "lf_mpi", close_box, NULL);
    lfpy_raise(rc);
    LFPY_FREE_GIL(close_box(b));
    return NULL;
}

/* mpi_info(mpi) -> (rank, world, "Open MPI v4.1.4") */
static PyObject *mpi_info(PyObject *self, PyObject *handle)
{
    (void)self;
    const mpi_box *b = lfpy_get(handle, "lf_mpi");
    return b ? Py_BuildValue("iis", (int)b->info.rank, (int)b->info.world, b->info.library) : NULL;
}

static lf_status sum_now(const mpi_box *b, void *data, int64_t count, int32_t dtype)
{
    int64_t ticket;
    const lf_status rc = b->t.post(b->t.user, data, count, dtype, NULL, &ticket);
    return rc == LF_OK ? b->t.wait(b->t.user, ticket, NULL, b->timeout_s) : rc;
}

/* mpi_sum(mpi, address, count, dtype): host memory, summed over ranks in place. Collective. */
static PyObject *mpi_sum(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *handle;
    unsigned long long address;
    long long count;
    int dtype;
    lf_status rc;
    if (!PyArg_ParseTuple(args, "OKLi", &handle, &address, &count, &dtype)) return NULL;
    const mpi_box *b = lfpy_get(handle, "lf_mpi");
    if (!b) return NULL;
    LFPY_FREE_GIL(rc = sum_now(b, lfpy_ptr(address), count, dtype));
    if (rc < 0) return lfpy_raise(rc);
    Py_RETURN_NONE;
}

PyMethodDef lfpy_mpi_methods[] = {
    {"mpi_open", mpi_open, METH_VARARGS, "One use of MPI for this process, until the handle is closed."},
    {"mpi_info", mpi_info, METH_O, "Rank, world and library."},
    {"mpi_sum", mpi_sum, METH_VARARGS, "Sum host memory over ranks: (mpi, address, count, dtype)."},
    {NULL, NULL, 0, NULL},
};
