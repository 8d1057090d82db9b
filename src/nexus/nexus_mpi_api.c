/* SPDX-License-Identifier: Apache-2.0 */
/* Finding MPI, and calling it whichever of the two kinds of handles it has. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "nexus_mpi_api.h"

static const char *const usual_names[] = {"libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so"};

typedef struct symbol {
    const char *name;
    size_t offset;
} symbol;

#define ROW(field, name)               \
    {                                  \
        name, offsetof(lf__mpi, field) \
    }
static const symbol functions[] = {
    ROW(initialized, "MPI_Initialized"),
    ROW(finalized, "MPI_Finalized"),
    ROW(init_thread, "MPI_Init_thread"),
    ROW(query_thread, "MPI_Query_thread"),
    ROW(finalize, "MPI_Finalize"),
    ROW(error_string, "MPI_Error_string"),
    ROW(comm_dup, "MPI_Comm_dup"),
    ROW(comm_free, "MPI_Comm_free"),
    ROW(comm_rank, "MPI_Comm_rank"),
    ROW(comm_size, "MPI_Comm_size"),
    ROW(comm_set_errhandler, "MPI_Comm_set_errhandler"),
    ROW(allreduce, "MPI_Allreduce"),
    ROW(iallreduce, "MPI_Iallreduce"),
    ROW(test, "MPI_Test"),
    ROW(op_create, "MPI_Op_create"),
    ROW(op_free, "MPI_Op_free"),
};
/* Open MPI's predefined handles are the addresses of these. */
static const symbol objects[] = {
    ROW(world, "ompi_mpi_comm_world"),    ROW(f32, "ompi_mpi_float"),
    ROW(f64, "ompi_mpi_double"),          ROW(i64, "ompi_mpi_int64_t"),
    ROW(u16, "ompi_mpi_uint16_t"),        ROW(sum, "ompi_mpi_op_sum"),
    ROW(max, "ompi_mpi_op_max"),          ROW(errors_return, "ompi_mpi_errors_return"),
    ROW(no_request, "ompi_request_null"),
};
#undef ROW

static lf_status find_all(lf__mpi *mpi, const symbol *symbols, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        void *found = dlsym(mpi->library, symbols[i].name);
        if (!found)
            return LF_FAIL(LF_ERR_UNSUPPORTED, "%s has no symbol %s; hint: MPI 3.0 or newer, or another library by mpi_library",
                           mpi->text, symbols[i].name);
        memcpy((char *)mpi + symbols[i].offset, &found, sizeof found);
    }
    return LF_OK;
}

/* One that is in the process already, such as mpi4py's, goes first: two cannot both be started by one launcher. */
static void *open_library(const char *path, bool *was_loaded)
{
    const char *const *names = *path ? &path : usual_names;
    const size_t n = *path ? 1 : LF_COUNT(usual_names);
    for (int32_t loaded = 1; loaded >= 0; loaded--)
        for (size_t i = 0; i < n; i++) {
            void *library = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL | (loaded ? RTLD_NOLOAD : 0));
            *was_loaded = loaded;
            if (library) return library;
        }
    return NULL;
}

/* The library's own name, up to the first comma or line: "Open MPI v4.1.4", "MPICH Version:\t4.0.2". */
static lf_status read_name(lf__mpi *mpi, const char *where)
{
    int (*get)(char *, int *), length = 0;
    void *found = dlsym(mpi->library, "MPI_Get_library_version");
    char *whole = found ? lf__alloc(MPI_TEXT_MOST + 1) : NULL;
    if (!found)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "%s has no function MPI_Get_library_version: no MPI of version 3 or newer", where);
    if (!whole) return LF_FAIL(LF_ERR_NOMEM, "MPI's version text");
    memcpy(&get, &found, sizeof get);
    const bool known = get(whole, &length) == MPI_OK;
    snprintf(mpi->text, sizeof mpi->text, "%.*s", (int)strcspn(whole, ",\n"), whole);
    for (char *c = mpi->text; *c; c++)
        if (*c == '\t') *c = ' ';
    /* Intel's and MVAPICH's texts name no relative; all others of the family say MPICH. */
    mpi->numbers = strstr(whole, "MPICH") || strstr(whole, "Intel(R) MPI") || strstr(whole, "MVAPICH");
    lf__free(whole);
    return known && *mpi->text ? LF_OK : LF_FAIL(LF_ERR_UNSUPPORTED, "%s does not tell its version", where);
}

static void set_numbers(lf__mpi *mpi)
{
    mpi->world.number = 0x44000000;
    mpi->f32.number = 0x4c00040a;
    mpi->f64.number = 0x4c00080b;
    mpi->i64.number = 0x4c00083a;
    mpi->u16.number = 0x4c00023c;
    mpi->sum.number = 0x58000003;
    mpi->max.number = 0x58000001;
    mpi->errors_return.number = 0x54000001;
    mpi->no_request.number = 0x2c000000;
    mpi->in_place = (void *)(intptr_t)-1;
    mpi->status_ignore = (void *)(intptr_t)1;
}

/* A library of the MPI-5 standard ABI has neither family's handles. */
static bool is_standard_abi(const lf__mpi *mpi)
{
    int (*get)(int *, int *), major = -1, minor = -1;
    void *found = dlsym(mpi->library, "MPI_Abi_get_version");
    if (!found) return false;
    memcpy(&get, &found, sizeof get);
    return get(&major, &minor) == MPI_OK && major >= 1;
}

static bool says_cuda(const lf__mpi *mpi)
{
    int (*ask)(void);
    void *found = dlsym(mpi->library, "MPIX_Query_cuda_support");
    if (!found || mpi->numbers) return false; /* MPICH's may be asked only once it is started */
    memcpy(&ask, &found, sizeof ask);
    return ask() == 1;
}

lf_status lf__mpi_load(lf__mpi *mpi, const char *path)
{
    *mpi = (lf__mpi){0};
    mpi->library = open_library(path, &mpi->was_loaded);
    if (!mpi->library)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "no MPI: %s; hint: install Open MPI or MPICH, or set mpi_library", dlerror());
    lf_status rc = read_name(mpi, *path ? path : "the MPI library that was found");
    if (rc < 0) return rc;
    if (dlsym(mpi->library, "ompi_mpi_comm_world")) {
        mpi->numbers = false;
        mpi->in_place = (void *)(intptr_t)1;
        rc = find_all(mpi, objects, LF_COUNT(objects));
    } else if (mpi->numbers && !is_standard_abi(mpi)) {
        set_numbers(mpi);
    } else {
        rc = LF_FAIL(LF_ERR_UNSUPPORTED, "%s is neither Open MPI nor of MPICH's family (Intel MPI, MVAPICH, Cray MPICH)",
                     mpi->text);
    }
    if (rc == LF_OK) rc = find_all(mpi, functions, LF_COUNT(functions));
    mpi->cuda = rc == LF_OK && says_cuda(mpi);
    return rc;
}

/* ---- calls ----------------------------------------------------------------------------------------------------------- */

/* The function `f` with the arguments it really has: ints or pointers for handles. */
#define AS(f, ...) ((int (*)(__VA_ARGS__))mpi->f)

int lf__mpi_comm_dup(const lf__mpi *mpi, mpi_handle comm, mpi_handle *out)
{
    return mpi->numbers ? AS(comm_dup, int, int *)(comm.number, &out->number)
                        : AS(comm_dup, void *, void **)(comm.pointer, &out->pointer);
}

int lf__mpi_comm_free(const lf__mpi *mpi, mpi_handle *comm)
{
    return mpi->numbers ? AS(comm_free, int *)(&comm->number) : AS(comm_free, void **)(&comm->pointer);
}

int lf__mpi_comm_rank(const lf__mpi *mpi, mpi_handle comm, int *rank)
{
    return mpi->numbers ? AS(comm_rank, int, int *)(comm.number, rank) : AS(comm_rank, void *, int *)(comm.pointer, rank);
}

int lf__mpi_comm_size(const lf__mpi *mpi, mpi_handle comm, int *size)
{
    return mpi->numbers ? AS(comm_size, int, int *)(comm.number, size) : AS(comm_size, void *, int *)(comm.pointer, size);
}

int lf__mpi_return_errors(const lf__mpi *mpi, mpi_handle comm)
{
    return mpi->numbers ? AS(comm_set_errhandler, int, int)(comm.number, mpi->errors_return.number)
                        : AS(comm_set_errhandler, void *, void *)(comm.pointer, mpi->errors_return.pointer);
}

int lf__mpi_op_create(const lf__mpi *mpi, mpi_sum_fn fn, mpi_handle *out)
{
    return mpi->numbers ? AS(op_create, mpi_sum_fn, int, int *)(fn, 1, &out->number)
                        : AS(op_create, mpi_sum_fn, int, void **)(fn, 1, &out->pointer);
}

int lf__mpi_op_free(const lf__mpi *mpi, mpi_handle *op)
{
    return mpi->numbers ? AS(op_free, int *)(&op->number) : AS(op_free, void **)(&op->pointer);
}

int lf__mpi_allreduce(const lf__mpi *mpi, void *data, int n, mpi_handle type, mpi_handle op, mpi_handle comm)
{
    return mpi->numbers ? AS(allreduce, const void *, void *, int, int, int, int)(mpi->in_place, data, n, type.number, op.number,
                                                                                  comm.number)
                        : AS(allreduce, const void *, void *, int, void *, void *, void *)(mpi->in_place, data, n, type.pointer,
                                                                                           op.pointer, comm.pointer);
}

int lf__mpi_iallreduce(const lf__mpi *mpi, void *data, int n, mpi_handle type, mpi_handle op, mpi_handle comm,
                       mpi_handle *request)
{
    return mpi->numbers ? AS(iallreduce, const void *, void *, int, int, int, int,
                             int *)(mpi->in_place, data, n, type.number, op.number, comm.number, &request->number)
                        : AS(iallreduce, const void *, void *, int, void *, void *, void *,
                             void **)(mpi->in_place, data, n, type.pointer, op.pointer, comm.pointer, &request->pointer);
}

int lf__mpi_test(const lf__mpi *mpi, mpi_handle *request, int *done)
{
    return mpi->numbers ? AS(test, int *, int *, void *)(&request->number, done, mpi->status_ignore)
                        : AS(test, void **, int *, void *)(&request->pointer, done, mpi->status_ignore);
}
