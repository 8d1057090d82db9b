/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_nccl_api.h  The part of NCCL's C API that is used, found at run time. Names, numbers and layouts follow NVIDIA's
 *  public documentation; nothing is compiled against NCCL. */
#ifndef LF_NEXUS_NCCL_API_H
#define LF_NEXUS_NCCL_API_H

#include "base/base.h"

/* Results. */
enum {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA = 1,
    NCCL_SYSTEM = 2,
    NCCL_INTERNAL = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE = 6,
    NCCL_IN_PROGRESS = 7,
    NCCL_TIMEOUT = 8
};
/* Reductions and types. */
enum { NCCL_SUM = 0, NCCL_AVG = 4 };
enum { NCCL_INT64 = 4, NCCL_FLOAT32 = 7, NCCL_FLOAT64 = 8, NCCL_BFLOAT16 = 9 };

typedef struct nccl_id {
    char internal[128];
} nccl_id;

/** The first fields of ncclConfig_t, those of 2.17. NCCL copies as many bytes as `size` says and keeps defaults for the rest. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
} nccl_config;

enum { NCCL_UNDEFINED = INT32_MIN };
#define NCCL_MAGIC 0xcafebeefu

/** A library and its functions; those of later versions may be NULL. */
typedef struct lf__nccl {
    void *library;
    bool was_loaded; /* by someone else in this process, such as PyTorch */
    int version;     /* 22809: 2.28.9 */
    int (*get_version)(int *);
    int (*get_unique_id)(nccl_id *);
    int (*comm_init_rank)(void **, int, nccl_id, int);
    int (*comm_init_rank_config)(void **, int, nccl_id, int, nccl_config *); /* 2.14 */
    int (*comm_finalize)(void *);                                            /* 2.14 */
    int (*comm_destroy)(void *);
    int (*comm_abort)(void *);
    int (*comm_get_async_error)(void *, int *);
    const char *(*get_error_string)(int);
    const char *(*get_last_error)(void *);                 /* 2.13 */
    int (*comm_register)(void *, void *, size_t, void **); /* 2.19 */
    int (*comm_deregister)(void *, void *);                /* 2.19 */
    int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
    int (*reduce_scatter)(const void *, void *, size_t, int, int, void *, void *); /* counts are of one rank's part */
    int (*all_gather)(const void *, void *, size_t, int, void *, void *);
    int (*group_start)(void);
    int (*group_end)(void);
} lf__nccl;

enum {
    NCCL_LEAST = 21000,       /* ncclAvg and bf16 */
    NCCL_HAS_CONFIG = 21400,  /* ncclCommInitRankConfig */
    NCCL_HAS_CTAS = 21700,    /* ncclConfig_t.maxCTAs */
    NCCL_HAS_REGISTER = 21900 /* ncclCommRegister */
};

/** `path` "": the libnccl.so.2 that is loaded already, else the loader's. LF_ERR_UNSUPPORTED: none, too old, or a function is
 *  missing: says which and where it looked. The library stays loaded. */
lf_status lf__nccl_load(lf__nccl *nccl, const char *path);
/** "2.28.9" */
void lf__nccl_version_text(int version, char *text, size_t size);
/** A result as a status of ours. */
lf_status lf__nccl_status(int result);

#endif
