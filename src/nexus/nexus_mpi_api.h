/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_mpi_api.h  The part of MPI that is used, found at run time; nothing is compiled against it.
 *
 *  MPI fixes functions, not what a handle is. Two families cover what clusters have: in Open MPI a handle is an address, and the
 *  predefined ones are addresses of objects in the library; in MPICH and its relatives (Intel MPI, MVAPICH, Cray) it is an int with
 *  known values. Numbers follow the headers that both publish. */
#ifndef LF_NEXUS_MPI_API_H
#define LF_NEXUS_MPI_API_H

#include "base/base.h"

enum { MPI_OK = 0, MPI_LEVEL_SERIALIZED = 2, MPI_TEXT_MOST = 8192 };

/** Which member holds is the library's choice (lf__mpi.numbers). */
typedef union mpi_handle {
    void *pointer;
    int number;
} mpi_handle;

/** What an MPI_Op_create'd sum is called with: in and inout: (*n) elements. The type is a handle and not looked at. */
typedef void (*mpi_sum_fn)(void *in, void *inout, int *n, void *type);

typedef void (*mpi_function)(void); /* cast to what it is where it is called */

typedef struct lf__mpi {
    void *library;
    bool was_loaded; /* by someone else in this process */
    bool numbers;    /* handles are ints */
    bool cuda;       /* the library says that it takes device memory */
    char text[96];   /* "Open MPI v4.1.4" */
    void *in_place, *status_ignore;
    mpi_handle world, f32, f64, i64, u16, sum, max, errors_return, no_request;
    int (*initialized)(int *);
    int (*finalized)(int *);
    int (*init_thread)(int *, char ***, int, int *);
    int (*query_thread)(int *);
    int (*finalize)(void);
    int (*error_string)(int, char *, int *);
    mpi_function comm_dup, comm_free, comm_rank, comm_size, comm_set_errhandler, allreduce, iallreduce, test, op_create, op_free;
} lf__mpi;

/** `path` "": an MPI that is loaded already, else the first of the usual names. It is made visible to all (its plug-ins need that) and
 *  stays loaded. LF_ERR_UNSUPPORTED: none, of a family that is not known, or a function is missing: says which. */
lf_status lf__mpi_load(lf__mpi *mpi, const char *path);

/* MPI's functions that take handles; their results. */
int lf__mpi_comm_dup(const lf__mpi *mpi, mpi_handle comm, mpi_handle *out);
int lf__mpi_comm_free(const lf__mpi *mpi, mpi_handle *comm);
int lf__mpi_comm_rank(const lf__mpi *mpi, mpi_handle comm, int *rank);
int lf__mpi_comm_size(const lf__mpi *mpi, mpi_handle comm, int *size);
int lf__mpi_return_errors(const lf__mpi *mpi, mpi_handle comm);
int lf__mpi_op_create(const lf__mpi *mpi, mpi_sum_fn fn, mpi_handle *out);
int lf__mpi_op_free(const lf__mpi *mpi, mpi_handle *op);
/** data: (n) summed in place; returns when that is done. */
int lf__mpi_allreduce(const lf__mpi *mpi, void *data, int n, mpi_handle type, mpi_handle op, mpi_handle comm);
/** The same, started. */
int lf__mpi_iallreduce(const lf__mpi *mpi, void *data, int n, mpi_handle type, mpi_handle op, mpi_handle comm,
                       mpi_handle *request);
int lf__mpi_test(const lf__mpi *mpi, mpi_handle *request, int *done);

#endif
