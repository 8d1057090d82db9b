/* SPDX-License-Identifier: Apache-2.0 */
/** @file vault.h  CheckpointVault: a base, diffs, and always a good checkpoint on disk.
 *
 *  A save takes a snapshot of the map's ranges at a step edge (host copies; the only stall) and returns; a writer thread
 *  hashes, encodes and writes it and commits by rename: data, fdatasync, manifest, fsync, rename, directory fsync. What is
 *  acknowledged by lf_vault_wait survives a power cut; what is not yet committed never disturbs what is.
 *
 *  Layout on disk, docs/format/vault.md: `base_model.bin` once per re-base, then `checkpoint_<step>/{meta.json, diff_*.bin}`.
 *  Slices are overwritten or coded against the base, never against one another, so a restore reads the base and one index.
 *
 *  Caveats. One open vault a directory: a lock file says who holds it. Network file systems may delay what other hosts see. */
#ifndef LOONGFORGE_VAULT_H
#define LOONGFORGE_VAULT_H

#include "loongforge/map.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_vault lf_vault;

/** Options, section "vault". */
typedef struct lf_vault_options {
    size_t size;
    int32_t diff_interval;   /* steps between saves, for callers that ask lf_vault_due */
    int64_t slice_bytes;     /* of a slice's largest role; a multiple of 4096 */
    int32_t compress;        /* zstd level of changed slices, 0: raw */
    int32_t threads;         /* encoders; 0: one a core */
    int32_t keep_last;       /* committed checkpoints to keep, 0: all */
    int32_t keep_every;      /* also keep those whose step is a multiple, 0: none */
    int32_t rebase_every;    /* a new base after this many diffs, 0: never by count */
    double rebase_ratio;     /* a new base when a diff exceeds this share of a full snapshot */
    int64_t staging_bytes;   /* most host memory for snapshots in flight; 0: one full snapshot */
    int32_t verify;          /* read back and check every committed file */
} lf_vault_options;

/** Small named state that travels with a checkpoint (loader state, RNG, scheduler): bytes, opaque to the vault. */
typedef struct lf_blob {
    const char *name;
    const void *data;
    int64_t bytes;
} lf_blob;

typedef struct lf_checkpoint_info {
    size_t size;
    int64_t step;
    int64_t base_step;
    int64_t time_unix;
    int64_t bytes;           /* on disk, base excluded */
    int64_t raw_bytes;       /* of the state it describes */
    int32_t n_slices, n_changed;
    char path[1024];
} lf_checkpoint_info;

typedef struct lf_vault_stats {
    size_t size;
    int64_t saves, committed, skipped_busy, rebases;
    int64_t bytes_written, bytes_raw, slices_changed, slices_total;
    double stall_last_s, stall_max_s, stall_sum_s; /* time lf_vault_save kept the caller */
    double write_s;                                /* of the writer thread */
    int64_t direct_failures;                       /* direct transfers retried on the fallback path */
} lf_vault_stats;

/** Open or create a vault directory for an allocated or attached map.
 *  @return LF_OK; LF_ERR_IO; LF_ERR_STATE (another process holds it: says its pid); LF_ERR_INVALID; LF_ERR_FORMAT (the
 *  directory holds a vault of another model: says what differs). */
LF_API lf_status lf_vault_open(lf_vault **out, const char *dir, lf_map *map, const lf_vault_options *opts);
/** Wait for the writer, release the lock. An error of a save in flight is returned, never swallowed. NULL is allowed. */
LF_API lf_status lf_vault_close(lf_vault *vault);

/** 1 when a save is due after this step by diff_interval, else 0. */
LF_API int32_t lf_vault_due(const lf_vault *vault, int64_t step);

/** Snapshot the map's state of `step` and queue it for writing.  @param stream work on the map queued so far is waited for.
 *  @param blobs copied before return.
 *  @return LF_OK; LF_AGAIN (the disk does not keep up: nothing was taken, counted in skipped_busy, the next due step tries
 *  again); the error of an earlier save (once); LF_ERR_EXISTS (that step is committed). */
LF_API lf_status lf_vault_save(lf_vault *vault, int64_t step, const lf_blob *blobs, int32_t n_blobs, lf_stream *stream);
/** Wait until every queued save is committed or failed; returns the first error not yet reported. */
LF_API lf_status lf_vault_wait(lf_vault *vault);

/** Load the newest checkpoint that verifies, at most `step` (-1: any), into the map. Damaged ones are stepped over with a
 *  warning in the log.
 *  @return LF_OK; LF_ERR_NOTFOUND (none at all); LF_ERR_CORRUPT (none verifies: names file and record); LF_ERR_FORMAT (of
 *  another model: names the first parameter that differs). On error the map's contents are unspecified. */
LF_API lf_status lf_vault_restore(lf_vault *vault, int64_t step, lf_checkpoint_info *info);
/** A blob of the restored checkpoint; owned by the vault until the next restore. LF_ERR_NOTFOUND. */
LF_API lf_status lf_vault_blob(lf_vault *vault, const char *name, const void **data, int64_t *bytes);
LF_API lf_status lf_vault_get_stats(const lf_vault *vault, lf_vault_stats *stats);

/** Without a model, for tools. Number of committed checkpoints in a directory; the i-th in order of step. */
LF_API lf_status lf_vault_list(const char *dir, lf_checkpoint_info *infos, int32_t *n);
/** Read and check every record of every checkpoint. Findings go to the log at LF_LOG_ERROR, file and record named.
 *  @return LF_OK when all is sound; LF_ERR_CORRUPT. */
LF_API lf_status lf_vault_verify(const char *dir);
/** Merge base and diffs up to `step` (-1: newest) into one file that opens as a base; reads each live record once.
 *  @return LF_OK; LF_ERR_CORRUPT; LF_ERR_NOTFOUND; LF_ERR_NOSPACE. The target appears complete or not at all. */
LF_API lf_status lf_vault_merge(const char *dir, int64_t step, const char *target);

#ifdef __cplusplus
}
#endif
#endif
