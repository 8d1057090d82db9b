/* SPDX-License-Identifier: Apache-2.0 */
/* Registering gradient planes with NCCL, so that it moves data without copies of its own. All ranks must use registered memory or
 * none: so each says whether it could, and one that could not takes the others back. */
#include <stdio.h>

#include "nexus_nccl.h"

/* How many ranks say yes. */
static lf_status count_ranks(nccl_link *link, bool yes, int64_t *n)
{
    void *shared = NULL;
    int64_t mine = yes, ticket;
    lf_status rc = LF_OK;
    LF_TRY(lf_device_alloc(link->device, sizeof mine, &shared));
    LF_TRY(lf_copy(link->device, shared, &mine, sizeof mine, NULL));
    LF_TRY(lf__nccl_post(link, shared, 1, LF_DTYPE_I64, NULL, &ticket));
    LF_TRY(lf__nccl_wait(link, ticket, NULL, link->opts.timeout_s));
    LF_TRY(lf_copy(link->device, n, shared, sizeof *n, NULL));
out:
    lf_device_free(link->device, shared);
    return rc;
}

/* One call of NCCL with the device current. `*handle` in to give it back, out to get one. */
static lf_status call(nccl_link *link, void *base, int64_t bytes, void **handle, int *result)
{
    int32_t before = 0;
    lf_status rc = lf__device_enter(link->device, &before);
    if (rc < 0) return rc;
    rc = lf__nccl_call_begin(link, "ncclCommRegister");
    if (rc == LF_OK) {
        *result = base ? link->nccl.comm_register(link->caller_comm, base, (size_t)bytes, handle)
                       : link->nccl.comm_deregister(link->caller_comm, *handle);
        *result = lf__nccl_await(link, *result);
        lf__nccl_call_end(link);
    }
    lf__device_leave(link->device, before);
    return rc;
}

static lf_status use_registration(nccl_link *link, void *base, int64_t bytes)
{
    void *handle = NULL;
    int64_t n = 0;
    int result = NCCL_INVALID_USAGE, ignored;
    lf_status rc = LF_OK;
    const bool room = link->n_registered < REGISTERED_MOST;
    if (room) LF_TRY(call(link, base, bytes, &handle, &result));
    LF_TRY(count_ranks(link, result == NCCL_SUCCESS, &n));
    if (n == link->world) {
        link->registered[link->n_registered++] = handle;
        return LF_OK;
    }
    snprintf(link->registered_text, sizeof link->registered_text, "%lld of %d ranks could (here: %s)", (long long)n, link->world,
             link->nccl.get_error_string(result));
    if (result == NCCL_SUCCESS) LF_TRY(call(link, NULL, 0, &handle, &ignored));
out:
    return rc;
}

lf_status lf__nccl_memory(void *user, void *base, int64_t bytes)
{
    nccl_link *link = user;
    lf_status rc = lf__nccl_raise(link);
    if (rc < 0) return rc;
    if (link->opts.register_buffers && link->nccl.comm_register) return use_registration(link, base, bytes);
    snprintf(link->registered_text, sizeof link->registered_text, "%s",
             link->opts.register_buffers ? "NCCL before 2.19 cannot" : "register_buffers is false");
    return LF_OK;
}
