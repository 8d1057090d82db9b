/* SPDX-License-Identifier: Apache-2.0 */
/** @file loader.h  DataFusion Loader: LMDB records to model-ready batches in three overlapping stages.
 *
 *  Records: key `{sample_id}_{modality}`, split at the last '_'; modality `image` (JPEG bytes) and `text` (JSON bytes, see
 *  docs/format/records.md). Stage 1 reads mapped bytes and parses keys, stage 2 decodes, resizes and normalises, stage 3
 *  pads, builds masks and labels. `depth` batches are in flight.
 *
 *  Order is a pure function of (seed, epoch, sample), so it does not depend on threads, depth or rank; each epoch is a
 *  permutation. Global batch b of an epoch is its positions [b·B·W, (b+1)·B·W); rank r of W takes the r-th stripe of B of
 *  them, so the union over ranks depends on B·W only. All ranks deliver the same number of batches.
 *
 *  Caveats. The set must not shrink while it is open (records are read in place). Handles do not survive fork(). A batch's
 *  memory is valid until lf_batch_release. */
#ifndef LOONGFORGE_LOADER_H
#define LOONGFORGE_LOADER_H

#include "loongforge/device.h"
#include "loongforge/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_dataset lf_dataset;
typedef struct lf_loader lf_loader;

/** What a set says about itself (its reserved record; defaults where it has none). */
typedef struct lf_dataset_info {
    size_t size;
    int64_t n_samples;
    int64_t n_bytes;    /* of all values */
    int32_t vocab_size; /* token ids are below it */
    int32_t pad_id, bos_id, eos_id;
    char source[128];                   /* "scenes seed=1", a folder's name, … */
    char tokenizer[128];                /* "bytes" or the vocabulary's name and digest */
    int32_t image_id, human_id, gpt_id; /* markers of an image, of a human turn, of an answer */
    int64_t n_other;                    /* records of no known modality, left alone */
} lf_dataset_info;

/** One sample's raw records, borrowed from the map until the set is closed. */
typedef struct lf_sample {
    size_t size;
    const char *id;    /* not 0-terminated; id_bytes long */
    const void *image; /* NULL: the sample has no image */
    const void *text;  /* NULL: none */
    int64_t id_bytes, image_bytes, text_bytes;
} lf_sample;

/** Open an LMDB folder or file read-only. Nothing is written, not even a lock file.
 *  @param[out] out new set, NULL on error. A loader keeps a reference, so closing the set first is allowed.
 *  @return LF_OK; LF_ERR_NOTFOUND (no such path, no data.mdb in it); LF_ERR_FORMAT (no LMDB, an empty one, or no key of the
 *  expected form: one is shown); LF_ERR_UNSUPPORTED (its records are of a newer format); LF_ERR_CORRUPT (file shorter than
 *  its own header says, fewer samples than were packed); LF_ERR_NOMEM; LF_ERR_IO. Release with lf_dataset_close. */
LF_API lf_status lf_dataset_open(lf_dataset **out, const char *path);
LF_API void lf_dataset_close(lf_dataset *set);
LF_API lf_status lf_dataset_get_info(const lf_dataset *set, lf_dataset_info *info);
/** The i-th sample in the order of ids, 0 ≤ i < n_samples. Threads: any. */
LF_API lf_status lf_dataset_get(const lf_dataset *set, int64_t i, lf_sample *sample);
/** Decode and parse the i-th sample as a loader would and throw the result away. Threads: any.
 *  @return LF_OK; LF_ERR_CORRUPT, LF_ERR_FORMAT, LF_ERR_UNSUPPORTED: the loader would count it as bad, the error says why. */
LF_API lf_status lf_dataset_verify(const lf_dataset *set, int64_t i, int64_t max_pixels);

/** Options, section "loader". */
typedef struct lf_loader_options {
    size_t size;
    int32_t batch_size;   /* samples a batch on this rank */
    int32_t depth;        /* batches in flight */
    int32_t threads;      /* decode threads; 0: one a core */
    int32_t image_size;   /* height and width delivered, pixels */
    int32_t seq_len;      /* longest text, tokens; longer ones are cut and counted */
    int32_t pad_multiple; /* a batch is padded to the next multiple of this, at most seq_len; 0: always to seq_len */
    int32_t shuffle;
    int32_t augment; /* random crop and flip, keyed by (seed, epoch, sample) */
    int64_t seed;
    int32_t rank, world;
    int32_t drop_last;             /* 0: the last batch repeats samples of the epoch's start, marked by weight 0, no labels */
    char bad_samples[LF_TEXT_MAX]; /* error | skip | substitute; see docs/internals/loader.md */
    double bad_budget;             /* bad samples that are still no error, as a share of the set */
    int64_t max_pixels;            /* of one image, checked before anything is allocated */
    int32_t blank_images;          /* deliver grey images: the control of an evaluation */
} lf_loader_options;

/** Times and counts since the loader was opened. Latencies in seconds. */
typedef struct lf_loader_stats {
    size_t size;
    int64_t batches, samples, bad_samples, cut_texts;
    int64_t tokens, padding_tokens, label_tokens;
    double read_s, decode_s, assemble_s; /* busy time of each stage, summed over threads */
    double stall_s;                      /* time lf_loader_next waited */
    double latency_mean_s, latency_std_s, latency_p50_s, latency_p95_s, latency_p99_s; /* start of reading to ready */
} lf_loader_stats;

/** A model-ready batch in device memory. B samples, S = image_size, T = padded length.
 *  images (B,3,S,S) f32 normalised to mean 0.5, deviation 0.25; tokens (B,T) i64, pad_id behind the text;
 *  labels (B,T) i64, -100 where nothing is trained on; mask (B,T) u8, 1 on real tokens;
 *  index (B) i64: the sample's number; weight (B) f32: 0 on repeated samples. */
typedef struct lf_batch {
    size_t size;
    float *images;
    int64_t *tokens, *labels, *index;
    uint8_t *mask;
    float *weight;
    int32_t n, seq, image_size, slot;
    int64_t epoch, number; /* which batch of which epoch */
    int64_t label_tokens;  /* labels that are not -100 */
    int32_t last_of_epoch; /* 1: the next batch begins another epoch */
} lf_batch;

/** Where the stream of batches stands: everything needed to go on bit for bit, at any depth and thread count. */
typedef struct lf_loader_state {
    size_t size;
    int64_t epoch;
    int64_t samples_done; /* of this epoch, over all ranks */
    int64_t seed;
    int64_t n_samples;
} lf_loader_state;

/** Start the pipeline; reading begins with the first lf_loader_next. The loader keeps a reference to set and device.
 *  @param device where batches are delivered.
 *  @return LF_OK; LF_ERR_INVALID (an option; with drop_last a set smaller than one global batch); LF_ERR_NOMEM. */
LF_API lf_status lf_loader_open(lf_loader **out, lf_dataset *set, lf_device *device, const lf_loader_options *opts);
/** Stop, join threads, free. Batches not released are invalid. */
LF_API void lf_loader_close(lf_loader *loader);

/** The next batch; epochs follow one another without end, batch->epoch says which.
 *  @param batch `size` set by the caller, the rest is filled; unchanged on error.
 *  @param stream the consumer's stream waits for the batch; NULL: ready on return. Blocks until a batch is there.
 *  @return LF_OK; LF_ERR_CORRUPT, LF_ERR_FORMAT, LF_ERR_UNSUPPORTED (a bad sample under policy `error`: key and reason);
 *  LF_ERR_BUDGET; LF_ERR_NOMEM, LF_ERR_DEVICE (from a stage); LF_ERR_STATE (every slot is held: release one, then go on).
 *  After an error, but for LF_ERR_STATE, the loader only answers that error. One thread at a time. */
LF_API lf_status lf_loader_next(lf_loader *loader, lf_batch *batch, lf_stream *stream);
/** Give a batch's slot back. It is reused when work queued on `stream` so far is done.
 *  @return LF_OK; LF_ERR_STATE (released already, or of another loader). */
LF_API lf_status lf_batch_release(lf_loader *loader, const lf_batch *batch, lf_stream *stream);

/** The state after the last batch that lf_loader_next delivered; batches in flight are not counted. */
LF_API lf_status lf_loader_get_state(const lf_loader *loader, lf_loader_state *state);
/** Go on from a state. Only before the first lf_loader_next. @return LF_ERR_STATE; LF_ERR_INVALID (other seed or set: says
 *  both values). World size and batch size may differ from those of the saved run. */
LF_API lf_status lf_loader_set_state(lf_loader *loader, const lf_loader_state *state);
LF_API lf_status lf_loader_get_stats(const lf_loader *loader, lf_loader_stats *stats);
/** Batches one rank gets in an epoch. */
LF_API int64_t lf_loader_batches_per_epoch(const lf_loader *loader);
/** Bad samples so far, each once, newest last: "key: reason", one a line, the newest that fit into `size` bytes with the
 *  final 0 (at most the last 64 KiB are kept; lf_loader_stats has the count). */
LF_API lf_status lf_loader_bad_samples(const lf_loader *loader, char *text, size_t size);

/** Progress of a long call: `done` of `total` (0: unknown). Return non-zero to cancel. */
typedef int32_t (*lf_progress_fn)(void *user, int64_t done, int64_t total);

/** Options, section "pack". */
typedef struct lf_pack_options {
    size_t size;
    int64_t scenes; /* how many to draw */
    int64_t first;  /* number of the first scene: sets with disjoint numbers share no scene */
    int64_t seed;
    int32_t quality;    /* JPEG quality */
    int32_t chroma_420; /* 1: 4:2:0, 0: 4:4:4 */
    int32_t overwrite;  /* 1: replace an existing set */
    int32_t threads;    /* 0: one a core */
    int64_t map_bytes;  /* largest size of the set */
} lf_pack_options;

typedef struct lf_pack_summary {
    size_t size;
    int64_t samples, skipped, images, bytes; /* bytes: of all values */
} lf_pack_summary;

/** Draw scenes of coloured shapes with instruction turns and pack them (docs/format/records.md). Same seed and number, same
 *  bytes. The set is built in `<path>.tmp` and renamed when it is complete and on disk, so an error, a cancel or a crash
 *  leaves `path` as it was. One packer a path at a time.
 *  @return LF_OK; LF_ERR_EXISTS (and no overwrite, or what is there is no set); LF_ERR_NOSPACE (disk full, or map_bytes);
 *  LF_ERR_IO; LF_ERR_NOMEM; LF_ERR_STATE (cancelled by `progress`). */
LF_API lf_status lf_pack_scenes(const char *path, const lf_pack_options *opts, lf_progress_fn progress, void *user,
                                lf_pack_summary *summary);
/** Pack folders, each with `instruct.jsonl` or `captions.jsonl`, into one set. A record may carry `tokens` (array of turns of
 *  ids) made by a tokenizer whose vocabulary size is `vocab_size`; without, texts are tokenised by bytes (vocab_size 0).
 *  A broken record is reported through the log by key and counted in `skipped`; ids met again are made unique.
 *  @param folders n_folders paths, at least one.
 *  @param list the list's name in a folder, or a path to it when it holds a '/'; NULL: instruct.jsonl, else captions.jsonl.
 *  @param tokenizer its name for the set's metadata; NULL or "" with vocab_size 0.
 *  @return as lf_pack_scenes, and LF_ERR_NOTFOUND (no such folder or no list in it), LF_ERR_FORMAT (a folder without a usable
 *  record). */
LF_API lf_status lf_pack_folders(const char *path, const char *const *folders, int32_t n_folders, const char *list,
                                 const char *tokenizer, int32_t vocab_size, const lf_pack_options *opts, lf_progress_fn progress,
                                 void *user, lf_pack_summary *summary);

/** Decode one JPEG to (S,S,3) u8, resized; what stage 2 does to one sample, for `loongforge data show` and tests.
 *  @return LF_OK; LF_ERR_INVALID; LF_ERR_FORMAT (no JPEG: says what it is instead); LF_ERR_CORRUPT (damaged: says how);
 *  LF_ERR_UNSUPPORTED (a JPEG process that is not decoded, more than max_pixels); LF_ERR_NOMEM. Threads: any. */
LF_API lf_status lf_decode_image(const void *bytes, size_t n_bytes, int32_t image_size, int64_t max_pixels, uint8_t *rgb);

#ifdef __cplusplus
}
#endif
#endif
