/* SPDX-License-Identifier: Apache-2.0 */
/** @file vault.h  CheckpointVault: a base, diffs, and always a good checkpoint on disk.
 *
 *  A save takes a snapshot of the map's ranges at a step edge (host copies; the only stall) and returns; a writer thread
 *  hashes, encodes and writes it and commits by rename: data, fsync, manifest, fsync, rename, directory fsync. What is
 *  acknowledged by lf_vault_wait survives a power cut; what is not yet committed never disturbs what is.
 *
 *  Saved are weights, masters and moments, never gradients; where a class has masters its weights are not stored but rounded
 *  from them (to nearest even) by a restore.
 *
 *  Layout on disk, docs/format/vault.md: `base_model.bin`, later bases `base_<step>.bin`, and for each checkpoint
 *  `checkpoint_<step>/{meta.json, diff_001.bin}`. Slices are overwritten or coded against the base, never against one another,
 *  so a restore reads the base and one index.
 *
 *  Threads. Calls on one vault come from one thread at a time; lf_vault_due and lf_vault_get_stats from any. Snapshots in
 *  flight belong to the vault's writer thread.
 *
 *  Caveats. One open vault a directory: a lock file says who holds it (flock: a child made by fork() holds it too). Network
 *  file systems may delay what other hosts see. Memory attached to a map must be the host's. Steps grow: a run that goes back
 *  to an older checkpoint gives up the newer ones first (lf_vault_gc) or saves elsewhere. */
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
    int32_t diff_interval; /* steps between saves, for callers that ask lf_vault_due */
    int64_t slice_bytes;   /* of a slice's largest role; a multiple of 4096 */
    int32_t compress;      /* zstd level of changed slices, 0: raw */
    int32_t threads;       /* encoders; 0: one a core */
    int32_t keep_last;     /* committed checkpoints to keep, 0: all */
    int32_t keep_every;    /* also keep those whose step is a multiple, 0: none */
    int32_t rebase_every;  /* a new base after this many diffs, 0: never by count */
    double rebase_ratio;   /* a new base when a diff exceeds this share of a full snapshot */
    int64_t staging_bytes; /* most host memory for the snapshot in flight; 0: what one takes. Less is refused by lf_vault_open */
    int32_t verify;        /* read back and check every file before it is committed */
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
    int64_t bytes;     /* on disk, base excluded */
    int64_t raw_bytes; /* of the state it describes */
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

/** Open or create a vault directory for an allocated or attached map, of which the vault keeps a reference. Files that an
 *  interrupted save left are removed. The parent directory must exist.
 *  @param[out] out new vault, NULL on error.
 *  @return LF_OK; LF_ERR_IO; LF_ERR_NOTFOUND (no parent directory); LF_ERR_STATE (another process holds it: says its pid; or
 *  the map is not planned); LF_ERR_INVALID; LF_ERR_NOMEM; LF_ERR_UNSUPPORTED (a newer format); LF_ERR_FORMAT (the directory
 *  holds a vault of another model: names the first parameter that differs). */
LF_API lf_status lf_vault_open(lf_vault **out, const char *dir, lf_map *map, const lf_vault_options *opts);
/** Wait for the writer, release the lock. An error of a save in flight is returned, never swallowed. NULL is allowed. */
LF_API lf_status lf_vault_close(lf_vault *vault);

/** 1 when a save is due after this step by diff_interval, else 0. */
LF_API int32_t lf_vault_due(const lf_vault *vault, int64_t step);

/** Snapshot the map's state of `step` and queue it for writing.  @param stream work on the map queued so far is waited for;
 *  NULL: there is none.  @param blobs copied before return; names are unique, at most 1 GiB each.
 *  The first save after lf_vault_open writes a base unless lf_vault_restore has just read and checked what is there.
 *  @return LF_OK; LF_AGAIN (the disk does not keep up: nothing was taken, counted in skipped_busy, the next due step tries
 *  again); the error of an earlier save (once; nothing was taken now); LF_ERR_EXISTS (a checkpoint of that step or a later one
 *  is committed); LF_ERR_INVALID (the step does not grow, a blob without name); LF_ERR_NOMEM; LF_ERR_STATE (a parameter of an
 *  attached map was never attached); LF_ERR_DEVICE. */
LF_API lf_status lf_vault_save(lf_vault *vault, int64_t step, const lf_blob *blobs, int32_t n_blobs, lf_stream *stream);
/** Wait until every queued save is committed or failed; returns the first error not yet reported. */
LF_API lf_status lf_vault_wait(lf_vault *vault);

/** Load the newest checkpoint that verifies, at most `step` (-1: any), into the map; gradients are left alone. Damaged ones
 *  are stepped over with a warning in the log, and set aside under another name when a later save needs theirs. Waits for a
 *  save in flight. Nothing else may use the map's memory meanwhile.  @param[out] info (may be NULL) what was loaded.
 *  @return LF_OK; LF_ERR_NOTFOUND (none at all); LF_ERR_CORRUPT (none verifies: names file and record); LF_ERR_FORMAT (of
 *  another model: names the first parameter that differs); LF_ERR_NOMEM. On error the map's contents are unspecified. */
LF_API lf_status lf_vault_restore(lf_vault *vault, int64_t step, lf_checkpoint_info *info);
/** A blob of the restored checkpoint; owned by the vault until the next restore. LF_ERR_NOTFOUND. */
LF_API lf_status lf_vault_blob(lf_vault *vault, const char *name, const void **data, int64_t *bytes);
LF_API lf_status lf_vault_get_stats(const lf_vault *vault, lf_vault_stats *stats);

/** Without a model, for tools; none of these takes the lock but lf_vault_gc. The committed checkpoints in a directory, in order
 *  of step; those whose manifest cannot be read are left out with a warning in the log.
 *  @param infos room for `*n` entries, NULL: only count.  @param[in,out] n on return how many there are.
 *  @return LF_OK; LF_ERR_NOMEM (more than `*n`: nothing is lost, ask again); LF_ERR_IO; LF_ERR_NOTFOUND (no directory). */
LF_API lf_status lf_vault_list(const char *dir, lf_checkpoint_info *infos, int32_t *n);
/** Read and check every record of every checkpoint. Findings go to the log at LF_LOG_ERROR, file and record named.
 *  @return LF_OK when all is sound; LF_ERR_CORRUPT (the text is the first finding and how many there are); LF_ERR_NOTFOUND (no
 *  checkpoint); LF_ERR_NOMEM. */
LF_API lf_status lf_vault_verify(const char *dir);
/** Can the newest checkpoint of at most `step` (-1: any) be restored? Reads all of it as a restore does, without a map and
 *  without stepping back.  @param[out] info (may be NULL).  @return LF_OK; LF_ERR_NOTFOUND; LF_ERR_CORRUPT; LF_ERR_NOMEM. */
LF_API lf_status lf_vault_check(const char *dir, int64_t step, lf_checkpoint_info *info);
/** Merge base and diffs up to `step` (-1: newest) into one file that opens as a base; reads each live record once. As
 *  `base_model.bin` in a directory of its own it is a vault.
 *  @return LF_OK; LF_ERR_CORRUPT; LF_ERR_NOTFOUND; LF_ERR_NOSPACE; LF_ERR_EXISTS (the target is there). The target appears
 *  complete or not at all. */
LF_API lf_status lf_vault_merge(const char *dir, int64_t step, const char *target);

/** How one role of one class differs between two checkpoints. */
typedef struct lf_plane_change {
    size_t size;
    int32_t klass, role; /* LF_ROLE_* */
    int32_t n_slices, n_changed;
    int64_t bytes, changed_bytes; /* raw */
} lf_plane_change;
/** Compare two checkpoints by the hashes in their manifests; `from` and `to` are steps that exist.
 *  @param changes room for `*n` entries, NULL: only count.  @param[in,out] n on return how many there are.
 *  @return LF_OK; LF_ERR_NOTFOUND; LF_ERR_NOMEM (more than `*n`); LF_ERR_FORMAT (cut into other slices, or of other models). */
LF_API lf_status lf_vault_diff(const char *dir, int64_t from, int64_t to, lf_plane_change *changes, int32_t *n);
/** Delete checkpoints: all but the newest `keep_last` and those whose step is a multiple of `keep_every` (both 0: none by
 *  count), and those of a step later than `after` (-1: none by step). What a kept one needs stays, so do damaged ones and
 *  base_model.bin.  @param[out] removed (may be NULL) how many went.
 *  @return LF_OK; LF_ERR_STATE (in use: says the pid); LF_ERR_NOTFOUND; LF_ERR_INVALID; LF_ERR_IO. */
LF_API lf_status lf_vault_gc(const char *dir, int32_t keep_last, int32_t keep_every, int64_t after, int32_t *removed);

#ifdef __cplusplus
}
#endif
#endif
