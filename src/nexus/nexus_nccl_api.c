/* SPDX-License-Identifier: Apache-2.0 */
/* Finding NCCL. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "loongforge/nexus.h"
#include "nexus_nccl_api.h"

#define SONAME "libnccl.so.2"

static void *_Atomic ours; /* the newest library that was not there before */

typedef struct symbol {
    const char *name;
    size_t offset;
    int since; /* 0: always needed */
} symbol;

#define ROW(field, name, since)                \
    {                                          \
        name, offsetof(lf__nccl, field), since \
    }
static const symbol symbols[] = {
    ROW(get_unique_id, "ncclGetUniqueId", 0),
    ROW(comm_init_rank, "ncclCommInitRank", 0),
    ROW(comm_init_rank_config, "ncclCommInitRankConfig", NCCL_HAS_CONFIG),
    ROW(comm_finalize, "ncclCommFinalize", NCCL_HAS_CONFIG),
    ROW(comm_destroy, "ncclCommDestroy", 0),
    ROW(comm_abort, "ncclCommAbort", 0),
    ROW(comm_get_async_error, "ncclCommGetAsyncError", 0),
    ROW(get_error_string, "ncclGetErrorString", 0),
    ROW(get_last_error, "ncclGetLastError", 21300),
    ROW(comm_register, "ncclCommRegister", NCCL_HAS_REGISTER),
    ROW(comm_deregister, "ncclCommDeregister", NCCL_HAS_REGISTER),
    ROW(all_reduce, "ncclAllReduce", 0),
    ROW(reduce_scatter, "ncclReduceScatter", 0),
    ROW(all_gather, "ncclAllGather", 0),
    ROW(group_start, "ncclGroupStart", 0),
    ROW(group_end, "ncclGroupEnd", 0),
};
#undef ROW

/* Up to 2.8 a version was 2804, from 2.9 on it is 20900. */
void lf__nccl_version_text(int version, char *text, size_t size)
{
    const int unit = version < 10000 ? 1000 : 10000;
    snprintf(text, size, "%d.%d.%d", version / unit, version % unit / 100, version % 100);
}

static lf_status find_symbols(lf__nccl *nccl, const char *where)
{
    for (size_t i = 0; i < LF_COUNT(symbols); i++) {
        const symbol *s = &symbols[i];
        void *found = s->since <= nccl->version ? dlsym(nccl->library, s->name) : NULL;
        if (!found && s->since <= nccl->version)
            return LF_FAIL(LF_ERR_UNSUPPORTED,
                           "%s has no function %s, expected it of version %d; hint: a damaged or foreign build", where, s->name,
                           nccl->version);
        memcpy((char *)nccl + s->offset, &found, sizeof found);
    }
    return LF_OK;
}

lf_status lf__nccl_load(lf__nccl *nccl, const char *path)
{
    const char *where = *path ? path : SONAME;
    char version[24], least[24];
    *nccl = (lf__nccl){0};
    nccl->library = dlopen(where, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    nccl->was_loaded = nccl->library != NULL && nccl->library != atomic_load(&ours);
    if (!nccl->library) {
        nccl->library = dlopen(where, RTLD_NOW | RTLD_LOCAL);
        atomic_store(&ours, nccl->library);
    }
    if (!nccl->library)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "no NCCL: %s; hint: PyTorch's CUDA builds bring it, or set nccl_library", dlerror());
    void *get_version = dlsym(nccl->library, "ncclGetVersion");
    if (!get_version) return LF_FAIL(LF_ERR_UNSUPPORTED, "%s has no function ncclGetVersion", where);
    memcpy(&nccl->get_version, &get_version, sizeof get_version);
    if (nccl->get_version(&nccl->version) != NCCL_SUCCESS)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "%s does not tell its version", where);
    lf__nccl_version_text(nccl->version, version, sizeof version);
    lf__nccl_version_text(NCCL_LEAST, least, sizeof least);
    if (nccl->version < NCCL_LEAST)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "%s is NCCL %s, expected %s or newer", where, version, least);
    return find_symbols(nccl, where);
}

lf_status lf__nccl_status(int result)
{
    switch (result) {
    case NCCL_SUCCESS: return LF_OK;
    case NCCL_UNHANDLED_CUDA:
    case NCCL_INTERNAL: return LF_ERR_DEVICE;
    case NCCL_SYSTEM:
    case NCCL_REMOTE: return LF_ERR_PEER;
    case NCCL_TIMEOUT: return LF_ERR_TIMEOUT;
    case NCCL_IN_PROGRESS: return LF_AGAIN;
    default: return LF_ERR_INTERNAL;
    }
}

lf_status lf_nccl_version(const lf_nexus_options *opts, int32_t *version, char *text, size_t size)
{
    LF_CHECK_ARG(version, "version is NULL");
    lf_nexus_options o;
    lf__nccl nccl;
    lf_status rc = lf__options_take("nexus", &o, sizeof o, opts);
    if (rc == LF_OK) rc = lf__nccl_load(&nccl, o.nccl_library);
    if (rc < 0) return rc;
    *version = nccl.version;
    if (text && size) lf__nccl_version_text(nccl.version, text, size);
    return LF_OK;
}
