/* SPDX-License-Identifier: Apache-2.0 */
/** @file pack_int.h  Making a set: the writer that builds beside the target and renames, scenes, JPEG encoding. */
#ifndef LF_PACK_INT_H
#define LF_PACK_INT_H

#include "loader_int.h"

/* ---- the writer (pack_writer.c) ------------------------------------------------------------------------------------------ */

enum { LF__PACK_PATH_BYTES = 4096 };

/** A set being built in `<path>.tmp`. Zero-initialised; lf__pack_close accepts any stage. */
typedef struct lf__pack_writer {
    char path[LF__PACK_PATH_BYTES - 64], temp[LF__PACK_PATH_BYTES];
    MDB_env *env;
    MDB_txn *txn; /* NULL between chunks */
    MDB_dbi dbi;
    int64_t mapped, most, page; /* bytes of addresses now, and allowed; of a page */
    int64_t chunk_bytes;        /* what the chunk being written may take at most */
    bool overwrite, replaces;   /* may replace; does replace */
    bool made_temp;
    lf_pack_summary sum;
} lf__pack_writer;

lf_status lf__pack_open(lf__pack_writer *w, const char *path, const lf_pack_options *opts);
/** Start a chunk of records of at most `bytes` in all; ended by lf__pack_commit. A failed chunk is undone by lf__pack_close. */
lf_status lf__pack_begin(lf__pack_writer *w, int64_t bytes, int64_t n_records);
/** Put one record under `{id}_{modality}`. *taken: a record of that key is there already; nothing was written. */
lf_status lf__pack_put(lf__pack_writer *w, const char *id, const char *modality, const void *value, size_t bytes, bool *taken);
lf_status lf__pack_commit(lf__pack_writer *w);
/** Write the metadata, make everything durable and rename. tokenizer_ids 0: bytes. */
lf_status lf__pack_finish(lf__pack_writer *w, const char *source, const char *tokenizer, int32_t tokenizer_ids);
/** Free; before a successful finish also remove what was built. */
void lf__pack_close(lf__pack_writer *w);

/** Call the caller's progress. LF_ERR_STATE when it cancels. */
lf_status lf__pack_progress(lf_progress_fn progress, void *user, int64_t done, int64_t total);
/** Bytes as a JSON string with its quotes. */
lf_status lf__pack_put_json_text(lf__buf *buf, const char *text);

/* ---- JPEG (pack_encode.c) -------------------------------------------------------------------------------------------------- */

/** rgb: (height, width, 3) u8 to a JPEG behind what `out` holds. */
lf_status lf__pack_encode(const uint8_t *rgb, int32_t width, int32_t height, int32_t quality, bool chroma_420, lf__buf *out);

/* ---- scenes (pack_scene.c, pack_scene_draw.c, pack_scene_text.c) ------------------------------------------------------------- */

enum { LF__SHAPES = 6, LF__COLOURS = 8, LF__TEXTURES = 3, LF__MOST_OBJECTS = 3, LF__SCENE_SIDE_MOST = 160 };

typedef struct lf__scene_object {
    int32_t shape, colour, texture, quadrant;
    bool large;
    double x, y, r; /* shares of the side */
    double rgb[3];
} lf__scene_object;

typedef struct lf__scene {
    int32_t side, n; /* pixels; objects, in the order of quadrants */
    lf__scene_object object[LF__MOST_OBJECTS];
    double ground[3], slope[2], noise; /* background: grey with a tint, its gradient, noise amplitude */
} lf__scene;

/** Every probability and range of the scenes, docs/format/records.md. Lengths are shares of the picture's side. */
typedef struct lf__scene_recipe {
    int32_t side[4];                         /* pixels, equally likely */
    double one, two;                         /* objects: probability of 1 and of 2; else 3 */
    double large[2], small[2];               /* radius */
    double shift;                            /* of the centre, either way */
    double tone;                             /* of each colour channel, either way */
    double striped, checked;                 /* probability; else plain */
    double tile, dark;                       /* width of a stripe or square; factor of the dark ones */
    double grey[2], tint;                    /* background and its channels, either way */
    double uneven, slope[2], noise;          /* probability of a gradient; its amplitude; noise a pixel, either way */
    double describe, count;                  /* probability of a description, of "How many shapes?"; up to two objects */
    double ask_place, ask_colour, ask_shape; /* probability of a question's form; else "Where is" */
} lf__scene_recipe;
extern const lf__scene_recipe lf__recipe;

extern const char *const lf__shape_names[LF__SHAPES], *const lf__colour_names[LF__COLOURS];
extern const char *const lf__texture_names[LF__TEXTURES], *const lf__quadrant_names[4];

/** What is in the scene that (seed, number) names. */
void lf__scene_make(lf__scene *scene, int64_t seed, int64_t number);
/** Draw it. rgb: (side, side, 3) u8 */
void lf__scene_draw(const lf__scene *scene, int64_t seed, int64_t number, uint8_t *rgb);
/** Its text record: turns and attribute words, JSON. */
lf_status lf__scene_text(const lf__scene *scene, int64_t seed, int64_t number, lf__buf *json);

#endif
