/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the NCCL transport, and the bytes by which ranks find each other. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nexus_nccl.h"

enum { CLOSE_MS = 15000, CLOSE_JOINING_MS = 1000, SETTLE_S = 5 };
#define ID_MAGIC "lfncclid"

/* ---- the id ---------------------------------------------------------------------------------------------------------- */

lf_status lf_nccl_id(const lf_nexus_options *opts, uint8_t id[LF_NCCL_ID_BYTES])
{
    LF_CHECK_ARG(id, "id is NULL");
    lf_nexus_options o;
    lf__nccl nccl;
    nccl_id made;
    lf_status rc = lf__options_take("nexus", &o, sizeof o, opts);
    if (rc == LF_OK) rc = lf__nccl_load(&nccl, o.nccl_library);
    if (rc < 0) return rc;
    const int result = nccl.get_unique_id(&made);
    if (result != NCCL_SUCCESS)
        return LF_FAIL(LF_ERR_PEER, "ncclGetUniqueId: %s (%d); hint: NCCL_SOCKET_IFNAME names the network to meet on",
                       nccl.get_error_string(result), result);
    memcpy(id, made.internal, LF_NCCL_ID_BYTES);
    return LF_OK;
}

static lf_status write_id(const char *path, const uint8_t *id)
{
    char part[4096];
    if (snprintf(part, sizeof part, "%s.%d", path, (int)getpid()) >= (int)sizeof part)
        return LF_FAIL(LF_ERR_INVALID, "the path %.40s… is too long", path);
    uint8_t bytes[8 + LF_NCCL_ID_BYTES];
    memcpy(bytes, ID_MAGIC, 8);
    memcpy(bytes + 8, id, LF_NCCL_ID_BYTES);
    const int file = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return lf__fail_errno(errno, "cannot create %s", part);
    const bool whole = write(file, bytes, sizeof bytes) == (ssize_t)sizeof bytes;
    const int wrong = whole ? 0 : errno;
    close(file);
    if (whole && rename(part, path) == 0) return LF_OK;
    lf_status rc = lf__fail_errno(whole ? errno : wrong, "cannot write %s", path);
    unlink(part);
    return rc;
}

/* A file is complete as soon as it is there: it comes by rename. */
static lf_status read_id(const char *path, uint8_t *id)
{
    uint8_t bytes[8 + LF_NCCL_ID_BYTES + 1];
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno == ENOENT ? LF_AGAIN : lf__fail_errno(errno, "cannot open %s", path);
    const ssize_t n = read(file, bytes, sizeof bytes);
    close(file);
    if (n != 8 + LF_NCCL_ID_BYTES || memcmp(bytes, ID_MAGIC, 8) != 0)
        return LF_FAIL(LF_ERR_FORMAT, "%s is no file by which ranks meet (%lld bytes)", path, (long long)n);
    memcpy(id, bytes + 8, LF_NCCL_ID_BYTES);
    return LF_OK;
}

lf_status lf_nccl_id_by_file(const lf_nexus_options *opts, const char *path, int32_t rank, uint8_t id[LF_NCCL_ID_BYTES])
{
    LF_CHECK_ARG(path && *path && id, "path or id is NULL");
    lf_nexus_options o;
    lf_status rc = lf__options_take("nexus", &o, sizeof o, opts);
    if (rc < 0) return rc;
    if (rank == 0) {
        rc = lf_nccl_id(&o, id);
        return rc < 0 ? rc : write_id(path, id);
    }
    const int64_t deadline = lf__now_ns() + (int64_t)(o.timeout_s * 1e9);
    while ((rc = read_id(path, id)) == LF_AGAIN) {
        if (lf__now_ns() > deadline)
            return LF_FAIL(LF_ERR_TIMEOUT, "rank %d: %s did not come within %g s; hint: does rank 0 run, and see this folder?",
                           rank, path, o.timeout_s);
        lf__sleep_ns(5000000);
    }
    return rc;
}

/* ---- closing --------------------------------------------------------------------------------------------------------- */

void lf__nccl_free(nccl_link *link)
{
    lf__mutex_close(link->mutex);
    lf_device_close(link->device);
    lf__free(link);
}

static void link_close(void *user)
{
    nccl_link *link = user;
    const double patience = link->opts.timeout_s < SETTLE_S ? link->opts.timeout_s : SETTLE_S;
    lf__nccl_settle(link, patience); /* a step that was given up becomes a failure here, and is aborted */
    lf__lock(link->mutex);
    link->leaving = true;
    lf__wake(link->mutex);
    int64_t limit = link->state == LINK_JOINING ? CLOSE_JOINING_MS : CLOSE_MS;
    if (limit > 1000 + (int64_t)(1000 * link->opts.timeout_s)) limit = 1000 + (int64_t)(1000 * link->opts.timeout_s);
    const int64_t deadline = lf__now_ns() + limit * 1000000;
    while (link->state != LINK_GONE && lf__now_ns() < deadline) lf__wait_ns(link->mutex, 10000000);
    const bool gone = link->state == LINK_GONE, guarded = !gone && link->guard && link->exits && link->fault.status < 0;
    link->worker_alone = !gone;
    link->guard_alone = guarded;
    lf__thread *worker = link->worker, *guard = link->guard;
    const int32_t rank = link->rank, world = link->world;
    lf__unlock(link->mutex); /* a thread that is not waited for may free the link from here on */
    if (guarded) lf__thread_forget(guard);
    else lf__thread_join(guard);
    if (gone) {
        lf__thread_join(worker);
        lf__nccl_free(link);
        return;
    }
    lf__thread_forget(worker);
    lf__log(LF_LOG_WARN, "NCCL: rank %d of %d: the communicator does not let go; its thread is left to itself", rank, world);
}

static void link_describe(void *user, char *text, size_t size)
{
    const nccl_link *link = user;
    char version[24], ctas[24] = "NCCL's choice of", registered[200];
    lf__nccl_version_text(link->nccl.version, version, sizeof version);
    if (link->opts.max_ctas) snprintf(ctas, sizeof ctas, "at most %d", link->opts.max_ctas);
    if (link->n_registered) snprintf(registered, sizeof registered, "%d gradient planes registered", link->n_registered);
    else snprintf(registered, sizeof registered, "nothing registered: %s", link->registered_text);
    snprintf(text, size, "NCCL %s (%s), rank %d of %d, stream priority %d, %s CTAs, %s, %s", version,
             link->nccl.was_loaded ? "loaded already" : "loaded by us", link->rank, link->world, link->opts.priority, ctas,
             registered, link->mean ? "mean in NCCL" : "sums");
}

/* ---- opening --------------------------------------------------------------------------------------------------------- */

static lf_status await_joined(nccl_link *link)
{
    const int64_t deadline = lf__now_ns() + (int64_t)(link->opts.timeout_s * 1e9);
    lf__lock(link->mutex);
    while (link->state == LINK_JOINING && link->fault.status == LF_OK && lf__now_ns() < deadline)
        lf__wait_ns(link->mutex, 10000000);
    const bool late = link->state == LINK_JOINING && link->fault.status == LF_OK;
    lf__unlock(link->mutex);
    if (late)
        lf__nccl_fault(
            link, LF_ERR_TIMEOUT,
            "not all ranks met within %g s; hint: is each at this point, on a GPU of its own? NCCL_DEBUG=INFO tells more",
            link->opts.timeout_s);
    return lf__nccl_raise(link);
}

static lf_status check_options(const nccl_link *link)
{
    char version[24];
    lf__nccl_version_text(link->nccl.version, version, sizeof version);
    if (link->opts.max_ctas && link->nccl.version < NCCL_HAS_CTAS)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "max_ctas is %d, which NCCL %s cannot limit, expected 2.17 or newer",
                       link->opts.max_ctas, version);
    return LF_OK;
}

static lf_status start(nccl_link *link)
{
    lf_status rc = LF_OK;
    LF_TRY(lf__nccl_load(&link->nccl, link->opts.nccl_library));
    LF_TRY(check_options(link));
    link->mutex = lf__mutex_open();
    if (!link->mutex) LF_THROW(LF_ERR_NOMEM, "nccl transport");
    LF_TRY(lf_stream_open(link->device, link->opts.priority, &link->stream));
    LF_TRY(lf__nccl_grow(link));
    LF_TRY(lf__thread_start(&link->worker, "lf-nccl", lf__nccl_work, link));
out:
    return rc;
}

/* What there is before the worker runs. */
static void undo_start(nccl_link *link)
{
    lf__nccl_free_runs(link);
    lf_stream_close(link->stream);
    lf__nccl_free(link);
}

lf_status lf_nccl_open(const lf_nexus_options *opts, lf_device *device, int32_t rank, int32_t world,
                       const uint8_t id[LF_NCCL_ID_BYTES], lf_transport *out)
{
    LF_CHECK_ARG(device && id && out, "device, id or out is NULL");
    LF_CHECK_ARG(world >= 1 && rank >= 0 && rank < world, "rank %d of %d, expected a rank below the world", rank, world);
    LF_CHECK_ARG(!lf__device_is_cpu(device), "NCCL works on GPUs, the device is cpu; hint: transport torch, mpi or loopback");
    nccl_link *link = lf__alloc(sizeof *link);
    if (!link) return LF_FAIL(LF_ERR_NOMEM, "nccl transport");
    link->device = lf__device_ref(device);
    link->rank = rank;
    link->world = world;
    memcpy(link->id.internal, id, LF_NCCL_ID_BYTES);
    lf_status rc = lf__options_take("nexus", &link->opts, sizeof link->opts, opts);
    if (rc == LF_OK) rc = start(link);
    if (rc < 0) {
        undo_start(link);
        return rc;
    }
    link->exits = strcmp(link->opts.fail, "exit") == 0;
    link->mean = strcmp(link->opts.reduce, "mean") == 0 && world > 1 && world <= LF_NCCL_MEAN_MOST;
    rc = await_joined(link);
    if (rc == LF_OK) rc = lf__thread_start(&link->guard, "lf-nccl-guard", lf__nccl_guard, link);
    if (rc < 0) {
        char text[512];
        snprintf(text, sizeof text, "%s", lf_error_text());
        link_close(link);
        return LF_FAIL(rc, "%s", text);
    }
    *out = (lf_transport){.size = sizeof *out,
                          .name = "nccl",
                          .user = link,
                          .rank = rank,
                          .world = world,
                          .post = lf__nccl_post,
                          .wait = lf__nccl_wait,
                          .close = link_close,
                          .query = lf__nccl_query,
                          .run = lf__nccl_run,
                          .check = lf__nccl_check,
                          .memory = lf__nccl_memory,
                          .replayed = lf__nccl_replayed,
                          .settle = lf__nccl_settle,
                          .stats = lf__nccl_stats,
                          .describe = link_describe,
                          .mean = link->mean,
                          .scatter = lf__nccl_scatter,
                          .gather = lf__nccl_gather};
    return LF_OK;
}
