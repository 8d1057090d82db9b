/* SPDX-License-Identifier: Apache-2.0 */
/** @file loader_int.h  What the files of the loader share: JPEG heads and decoding, text records, the order of samples, bad
 *  samples, the pipeline. docs/internals/loader.md says how they work together. */
#ifndef LF_LOADER_INT_H
#define LF_LOADER_INT_H

#include <lmdb.h>

#include "base/base.h"
#include "device/device_int.h"
#include "loongforge/loader.h"

/* ---- JPEG: what the header says (loader_head.c) --------------------------------------------------------------------- */

typedef struct lf__jpeg_head {
    int32_t width, height;
    int32_t n_components, precision;
    int32_t sof;         /* 0xC0 … */
    int32_t orientation; /* EXIF 1 to 8; 1 where it is absent or unreadable */
    int32_t n_junk;      /* bytes between segments that belong to none */
} lf__jpeg_head;

/** Walk the markers up to the first scan. Allocates nothing, reads no pixel.
 *  @return LF_OK; LF_ERR_FORMAT (no JPEG: the text says what it is); LF_ERR_CORRUPT; LF_ERR_UNSUPPORTED (a process or a
 *  precision that is not decoded, or more pixels than max_pixels). */
lf_status lf__jpeg_read_head(const void *bytes, size_t n_bytes, int64_t max_pixels, lf__jpeg_head *head);

/* ---- JPEG: pixels (loader_decode.c, loader_resize.c) ----------------------------------------------------------------- */

/** What one image is decoded to: a box of the upright picture, as shares of its sides, resized to size x size. */
typedef struct lf__decode_want {
    int32_t size;
    int64_t max_pixels;
    double left, top, right, bottom; /* 0, 0, 1, 1: all of it */
    bool mirror;
} lf__decode_want;

/** Weights of a triangle filter along one axis: output i is the sum over k of weight[from[i] + k] * input[first[i] + k]. */
typedef struct lf__filter {
    int32_t *first, *count, *from; /* (size) */
    float *weight;
    size_t room; /* of weight */
} lf__filter;

/** One thread's decoder with its scratch memory, which grows to the largest image seen. */
typedef struct lf__decoder lf__decoder;
/** @param max_size the largest `size` that will be wanted.  NULL: out of memory. */
lf__decoder *lf__decoder_open(int32_t max_size);
void lf__decoder_close(lf__decoder *decoder);
/** Decode into the decoder. Errors as lf_decode_image. */
lf_status lf__decoder_run(lf__decoder *decoder, const void *bytes, size_t n_bytes, const lf__decode_want *want);
/** The last result: planes (3, size, size) f32 normalised to mean 0.5, deviation 0.25. */
void lf__decoder_planes(const lf__decoder *decoder, float *planes);
/** The last result: rgb (size, size, 3) u8. */
void lf__decoder_rgb(const lf__decoder *decoder, uint8_t *rgb);

bool lf__filter_open(lf__filter *f, int32_t max_size);
void lf__filter_close(lf__filter *f);
/** Fill for `size` outputs from the interval [from, to) of `n_in` inputs; antialiased where it shrinks. false: no memory. */
bool lf__filter_set(lf__filter *f, int32_t size, int32_t n_in, double from, double to);

/** Which pixel of the stored picture is at (y, x) of the upright one, both (size, size). */
void lf__orient(int32_t orientation, int32_t size, int32_t y, int32_t x, int32_t *stored_y, int32_t *stored_x);

/* ---- text records (loader_record.c) ----------------------------------------------------------------------------------- */

enum { LF__BYTES_VOCABULARY = 256, LF__MOST_TURNS = 4096 };

/** Ids of a set. The markers lie behind the vocabulary: pad, begin, end, image, human, gpt. */
typedef struct lf__vocabulary {
    int32_t n;     /* ids of text are below it; 256: bytes */
    bool is_bytes; /* texts are their UTF-8 bytes; else records carry their ids */
    int32_t pad, bos, eos, image, human, gpt;
    int32_t size; /* all of them, rounded up to a multiple of 8 */
} lf__vocabulary;
void lf__vocabulary_set(lf__vocabulary *v, int32_t tokenizer_ids /* 0: bytes */);

/** Where the tokens of a sample go: `room` tokens, more are cut. */
typedef struct lf__tokens {
    int32_t *id;
    uint8_t *trained; /* 1: a label */
    int32_t n, room;
    bool cut;
} lf__tokens;

/** Turn a JSON text record into tokens. NULL json: no text, only the begin marker.
 *  @return LF_OK; LF_ERR_FORMAT (not JSON, or not of the form in docs/format/records.md: says where); LF_ERR_NOMEM. */
lf_status lf__record_tokens(const void *json, size_t n_bytes, const lf__vocabulary *v, lf__tokens *out);

/* ---- the set (loader_dataset.c) ---------------------------------------------------------------------------------------- */

/** The metadata record. A sample's key has something behind its last '_', so no sample has this key. */
#define LF__META_KEY "__meta__"
enum { LF__RECORD_FORMAT = 1 };

lf_dataset *lf__dataset_ref(lf_dataset *set);
const lf__vocabulary *lf__dataset_vocabulary(const lf_dataset *set);
/** An LMDB error as a status with text. */
lf_status lf__lmdb_fail(int err, const char *what, const char *path);

/* ---- order (loader_order.c) --------------------------------------------------------------------------------------------- */

/** Where a stream of batches stands: epoch and samples of it that are done, over all ranks. */
typedef struct lf__cursor {
    int64_t epoch, done;
} lf__cursor;

typedef struct lf__order {
    int64_t n_samples, seed;
    int32_t batch, rank, world;
    bool shuffle, drop_last;
} lf__order;

/** The next batch from `at`: its epoch, number and first position on this rank; `at` moves behind it. */
void lf__order_next(const lf__order *order, lf__cursor *at, int64_t *epoch, int64_t *number, int64_t *position);
/** The sample at a position of an epoch; positions past the end repeat the start: *repeated is then set. */
int64_t lf__order_sample(const lf__order *order, int64_t epoch, int64_t position, bool *repeated);
/** What stands in for a bad sample, attempt 0, 1, …; never the sample itself unless the set has no other. */
int64_t lf__order_substitute(const lf__order *order, int64_t epoch, int64_t sample, int32_t attempt);
/** The random crop and mirror image of a sample in an epoch. */
void lf__order_augment(const lf__order *order, int64_t epoch, int64_t sample, lf__decode_want *want);

/* ---- bad samples (loader_bad.c) ------------------------------------------------------------------------------------------ */

typedef struct lf__bad_list {
    uint8_t *seen; /* a bit a sample */
    char *text;    /* "key: reason\n" each, the newest of them */
    size_t used;
    int64_t count, n_samples;
    double budget;
} lf__bad_list;
enum { LF__BAD_TEXT_BYTES = 64 << 10 };

lf_status lf__bad_open(lf__bad_list *list, int64_t n_samples, double budget);
void lf__bad_close(lf__bad_list *list);
/** Note a bad sample; the second time it is no news. @return true: news, to be logged. */
bool lf__bad_add(lf__bad_list *list, int64_t sample, const char *line);
lf_status lf__bad_check_budget(const lf__bad_list *list);

/* ---- the pipeline (loader.c, loader_stages.c, loader_batch.c) -------------------------------------------------------------- */

enum { SLOT_FREE, SLOT_READING, SLOT_DECODING, SLOT_DECODED, SLOT_ASSEMBLING, SLOT_READY, SLOT_HELD };

typedef struct lf__row {
    int64_t sample;
    bool repeated; /* the place was filled up: weight 0 */
    lf_sample record;
    lf__tokens tokens;
    lf__fault fault; /* why the sample is bad */
} lf__row;

typedef struct lf__slot {
    int32_t state, number_of_slot;
    int64_t serial; /* batches counted from the loader's start */
    int64_t epoch, number, position;
    lf__cursor after;
    int64_t started_ns;
    lf__row *rows; /* (B) */
    int32_t *token_room;
    uint8_t *trained_room;
    int32_t next_row, done_rows;
    lf_batch host, device; /* buffers; the same ones on the CPU */
    lf_event *ready, *released;
    lf__fault fault;                         /* ends the loader when this batch's turn comes */
    int64_t n_tokens, n_label_tokens, n_cut; /* of this batch, for the statistics */
} lf__slot;

struct lf_loader {
    lf_dataset *set;
    lf_device *device;
    lf_loader_options opts;
    lf__order order;
    int32_t policy; /* enum below */
    int32_t n_threads;
    lf_stream *copy_stream; /* NULL on the CPU */

    lf__mutex *mutex; /* guards all below and the state of slots */
    bool go, stop, failed;
    lf__slot *slots;
    lf__cursor read_at, delivered;
    int64_t read_serial, assemble_serial;
    lf__fault fault; /* sticky, once delivered */
    lf__bad_list bad;
    lf_loader_stats stats;
    lf__hist *latency;
    int64_t read_ns, decode_ns, assemble_ns, stall_ns;

    lf__decoder **decoders; /* (n_threads + 1); the last one is the assembler's */
    struct lf__worker {
        lf_loader *loader;
        lf__decoder *decoder;
        lf__thread *thread;
    } * workers; /* (n_threads) */
    lf__thread *reader, *assembler;
};

enum { POLICY_ERROR, POLICY_SKIP, POLICY_SUBSTITUTE };

/** Thread bodies. */
void lf__stage_read(void *loader);
void lf__stage_decode(void *worker);
void lf__stage_assemble(void *loader);
/** The slot in `state` with the smallest serial; NULL: none. The mutex is held. */
lf__slot *lf__find_slot(lf_loader *loader, int32_t state);
/** Fetch the records of a sample and parse its text; what is wrong with it goes to row->fault. */
void lf__row_read(lf_loader *loader, lf__row *row);
/** Decode a row's image into its place of the slot; what is wrong with it goes to row->fault. */
void lf__row_decode(lf_loader *loader, lf__slot *slot, int32_t i, lf__decoder *decoder);
/** Deal with bad rows, then build tokens, labels, mask, index and weight. @return LF_OK or what ends the loader. */
lf_status lf__batch_build(lf_loader *loader, lf__slot *slot, lf__decoder *decoder);

#endif
