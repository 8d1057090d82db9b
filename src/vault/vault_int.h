/* SPDX-License-Identifier: Apache-2.0 */
/** @file vault_int.h  Inside of CheckpointVault. docs/format/vault.md has the bytes, docs/internals/vault.md the threads.
 *
 *  Words. A *plane* is one saved role of one class; it is cut into *slices* of a fixed number of elements, numbered through
 *  all planes. A *ref* says where a slice's newest record lies. A *manifest* is a checkpoint: one ref a slice, blobs, and
 *  the files that the refs point into; file 0 is always the base. A *record* is a slice or blob as stored. */
#ifndef LF_VAULT_INT_H
#define LF_VAULT_INT_H

#include <zstd.h>

#include "io/io.h"
#include "loongforge/vault.h"

enum {
    LF__VAULT_VERSION = 1,
    LF__VAULT_HEAD_BYTES = 64, /* of a data file, and of a record */
    LF__VAULT_TAIL_BYTES = 48, /* of a base file */
    LF__VAULT_NAME_MAX = 64,   /* of a file, relative to the vault's folder */
    LF__VAULT_PATH_MAX = 4096,
    LF__VAULT_ROLE_BLOB = 255,
    LF__VAULT_CLASS_BLOB = 65535,
    LF__VAULT_MAX_CLASSES = 1024,
    LF__VAULT_MAX_SLICE_BYTES = 64 << 20,
    LF__VAULT_MAX_META_BYTES = 1 << 30,
    LF__VAULT_MAX_BLOB_BYTES = 1 << 30,
    LF__VAULT_MAX_BLOBS = 65536,
};
#define LF__VAULT_MAX_SLICES (INT64_C(1) << 26)
#define LF__VAULT_MAX_ELEMENTS (INT64_C(1) << 48)

enum { LF__VAULT_BASE = 1, LF__VAULT_DIFF = 2 }; /* kind of a data file and of a manifest */

/* ---- codecs (vault_codec.c) ---------------------------------------------------------------------------------------- */

/** Buffers of one encoder or reader; each holds the largest slice. Not shared between threads. */
typedef struct lf__vault_work {
    ZSTD_CCtx *pack;
    ZSTD_DCtx *unpack;
    size_t room;                                   /* of each buffer below */
    uint8_t *raw, *base, *planes, *stored, *probe; /* record bytes go to `stored`, which has a record head in front */
    uint8_t *head;                                 /* = stored - LF__VAULT_HEAD_BYTES */
    int32_t codec;                                 /* of what `stored` holds */
    size_t stored_bytes;
    uint64_t checksum; /* of `stored` */
    lf__fault fault;
} lf__vault_work;

lf_status lf__vault_work_open(lf__vault_work *work, size_t room);
void lf__vault_work_close(lf__vault_work *work);

enum { LF__CODEC_RAW = 0, LF__CODEC_ZSTD = 1, LF__CODEC_PLANES = 2, LF__CODEC_XOR = 3, LF__N_CODECS = 4 };

/** A lossless code of `bytes` bytes made of elements of `elem` bytes. */
typedef struct lf__vault_codec {
    const char *name;
    bool needs_base; /* the same slice of the base, same length */
    /** LF_AGAIN: does not fit into `room`, which the caller makes as large as is still worth it. */
    lf_status (*encode)(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem, int32_t level,
                        uint8_t *out, size_t room, size_t *used);
    /** Fills all of raw or says LF_ERR_CORRUPT. Safe on any input. */
    lf_status (*decode)(lf__vault_work *w, const uint8_t *stored, size_t stored_bytes, const uint8_t *base, size_t elem,
                        uint8_t *raw, size_t bytes);
} lf__vault_codec;

extern const lf__vault_codec lf__vault_codecs[LF__N_CODECS];

/** Choose by measuring on a probe of the slice, encode into work->stored, set codec, stored_bytes and checksum.
 *  @param base NULL: codecs that need one are not tried.  @param level 0: raw. */
lf_status lf__vault_encode(lf__vault_work *work, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem,
                           int32_t level);

/* ---- heads of files and records (vault_format.c) --------------------------------------------------------------------- */

typedef struct lf__vault_file_head {
    int32_t kind;
    int64_t step;
    uint64_t seed; /* of content hashes, one a vault */
    uint8_t map_digest[16];
} lf__vault_file_head;

typedef struct lf__vault_record {
    int32_t klass, role, codec;
    int64_t slice; /* within its plane; number of a blob */
    int64_t raw_bytes, stored_bytes;
    lf__hash128 hash;  /* of the raw bytes, with the vault's seed */
    uint64_t checksum; /* of the stored bytes */
} lf__vault_record;

typedef struct lf__vault_tail {
    int64_t meta_offset, meta_bytes;
    lf__hash128 meta_hash;
} lf__vault_tail;

uint64_t lf__vault_checksum(const void *data, size_t bytes);
void lf__vault_file_head_put(uint8_t out[LF__VAULT_HEAD_BYTES], const lf__vault_file_head *head);
lf_status lf__vault_file_head_get(lf__vault_file_head *head, const uint8_t in[LF__VAULT_HEAD_BYTES]);
void lf__vault_record_put(uint8_t out[LF__VAULT_HEAD_BYTES], const lf__vault_record *record);
lf_status lf__vault_record_get(lf__vault_record *record, const uint8_t in[LF__VAULT_HEAD_BYTES]);
void lf__vault_tail_put(uint8_t out[LF__VAULT_TAIL_BYTES], const lf__vault_tail *tail);
lf_status lf__vault_tail_get(lf__vault_tail *tail, const uint8_t in[LF__VAULT_TAIL_BYTES]);
int32_t lf__vault_role_parse(const char *name);  /* -1: none */
int32_t lf__vault_dtype_parse(const char *name); /* 0: none */

/** What a name in a vault's folder is. */
enum { LF__NAME_OTHER = 0, LF__NAME_CHECKPOINT, LF__NAME_BASE, LF__NAME_BASE_MODEL, LF__NAME_TEMP };
/** `base_model.bin`, `base_<step>.bin`, `checkpoint_<step>` or one of these with ".tmp" behind it; *step where there is one. */
int32_t lf__vault_name_kind(const char *name, int64_t *step);
/** A data file as manifests name it: a base, or `checkpoint_<step>/diff_<nnn>.bin`. -1: neither. */
int32_t lf__vault_data_kind(const char *name, int64_t *step);

/* ---- manifests (vault_manifest.c, vault_meta_read.c, vault_meta_write.c) ----------------------------------------------- */

typedef struct lf__vault_class {
    int32_t dtype, frozen;
    int64_t count, slice_elements;
} lf__vault_class;

typedef struct lf__vault_param {
    char *name;
    int32_t dtype, ndim, klass, tied_to;
    int64_t offset, count;
    int64_t shape[LF_MAX_DIMS];
} lf__vault_param;

typedef struct lf__vault_plane {
    int32_t klass, role, dtype;
    int32_t n_slices;
    int64_t first; /* number of its first slice */
    int64_t count, slice_elements;
    size_t elem_bytes;
    int64_t raw_offset; /* of its bytes when all planes lie one behind the other, each 64-byte aligned */
} lf__vault_plane;

/** What is saved and how it is cut: the same for all checkpoints of a run. Counted; never changed once shared. */
typedef struct lf__vault_layout {
    _Atomic int32_t refs;
    uint8_t map_digest[16];
    lf__vault_class *classes;
    lf__vault_param *params;
    lf__vault_plane *planes;
    int32_t n_classes, n_params, n_planes;
    int64_t n_slices;
    int64_t raw_bytes;    /* of the saved state */
    int64_t staged_bytes; /* with the planes' alignment */
    size_t slice_bytes;   /* of the largest slice */
} lf__vault_layout;

lf_status lf__vault_layout_of_map(lf__vault_layout **out, const lf_map *map, int64_t slice_bytes);
lf__vault_layout *lf__vault_layout_ref(lf__vault_layout *layout);
void lf__vault_layout_unref(lf__vault_layout *layout);
/** Number the slices and sum the bytes once classes and planes are filled; checks every bound. */
lf_status lf__vault_layout_finish(lf__vault_layout *layout);
/** LF_OK when a stored layout fits this model (slices may be cut differently); LF_ERR_FORMAT names what differs first. */
lf_status lf__vault_layout_match(const lf__vault_layout *here, const lf__vault_layout *stored);
bool lf__vault_layout_same_slices(const lf__vault_layout *a, const lf__vault_layout *b);
/** The plane of a slice; *slice becomes its number within it, *bytes its raw bytes (both may be NULL). */
const lf__vault_plane *lf__vault_plane_of(const lf__vault_layout *layout, int64_t index, int64_t *slice, size_t *bytes);

typedef struct lf__vault_ref {
    lf__hash128 hash;
    int64_t offset, stored_bytes; /* of the record's head in its file; of its data */
    int32_t file;                 /* -1: nowhere yet */
} lf__vault_ref;

typedef struct lf__vault_file {
    char name[LF__VAULT_NAME_MAX];
    int64_t end; /* behind its last record */
} lf__vault_file;

typedef struct lf__vault_blob {
    char *name;
    int64_t bytes;
    lf__vault_ref ref;
} lf__vault_blob;

typedef struct lf__vault_manifest {
    _Atomic int32_t refs;
    int32_t kind; /* LF__VAULT_BASE: all refs are in file 0, which this checkpoint wrote */
    int64_t step, base_step, time_unix;
    uint64_t seed;
    lf__hash128 state_digest, base_digest; /* over all slice hashes; that of the base */
    lf__vault_layout *layout;
    lf__vault_ref *refs_of; /* (layout->n_slices) */
    lf__vault_file *files;
    lf__vault_blob *blobs;
    int32_t n_files, n_blobs;
    int64_t n_changed; /* slices written by this checkpoint */
} lf__vault_manifest;

/** An empty manifest of a layout (a new reference to it is taken). */
lf_status lf__vault_manifest_new(lf__vault_manifest **out, lf__vault_layout *layout);
lf__vault_manifest *lf__vault_manifest_ref(lf__vault_manifest *m);
void lf__vault_manifest_unref(lf__vault_manifest *m);
lf__hash128 lf__vault_manifest_digest(const lf__vault_manifest *m);
/** Number of the file this checkpoint wrote, -1: none (nothing changed). */
int32_t lf__vault_own_file(const lf__vault_manifest *m);
/** Bytes of records that this checkpoint wrote into its own folder. */
int64_t lf__vault_diff_bytes(const lf__vault_manifest *m);
/** "class 1 exp_avg slice 7 (layer0.w)" for messages. */
void lf__vault_slice_text(const lf__vault_layout *layout, int64_t index, char *text, size_t size);

lf_status lf__vault_meta_write(const lf__vault_manifest *m, lf__buf *text);
/** @param what names the document in errors. All limits, ranges and overlaps are checked here. */
lf_status lf__vault_meta_read(lf__vault_manifest **out, const char *text, size_t bytes, const char *what);
/** Of checkpoint_<step>/meta.json. */
lf_status lf__vault_load_meta(lf__io *io, const char *dir, int64_t step, lf__vault_manifest **out);
/** Of the end of a base file; file 0 is then `name` whatever the document calls it. */
lf_status lf__vault_load_base(lf__io *io, const char *dir, const char *name, lf__vault_manifest **out);

/* ---- reading records (vault_read.c) -------------------------------------------------------------------------------------- */

/** Open files of a manifest, and its base's manifest for slices coded against it. */
typedef struct lf__vault_source {
    lf__io *io;
    const char *dir;
    lf__vault_manifest *m, *base; /* references; the same for a base */
    lf__file **files;             /* (m->n_files), opened when first read */
    lf__mutex *lock;
    int32_t n_open;
    int32_t other_file; /* file that is not yet under its own name, -1: none */
    const char *other_path;
} lf__vault_source;

/** @param base manifest of m's base when it is at hand; NULL: read from the base file. */
lf_status lf__vault_source_open(lf__vault_source *src, lf__io *io, const char *dir, lf__vault_manifest *m,
                                lf__vault_manifest *base);
void lf__vault_source_close(lf__vault_source *src);
/** Close files while many are open. Nobody may be reading. */
void lf__vault_source_trim(lf__vault_source *src);
/** Read and check the record of a slice: its stored bytes are in work->stored, its head in *record. */
lf_status lf__vault_read_stored(lf__vault_source *src, const lf__vault_manifest *m, int64_t index, lf__vault_work *work,
                                lf__vault_record *record);
/** As above, then decode into `raw` and check the content's hash. Uses work->base for the base's slice. */
lf_status lf__vault_read_slice(lf__vault_source *src, int64_t index, lf__vault_work *work, uint8_t *raw,
                               lf__vault_record *record);
/** The base's content of a slice. */
lf_status lf__vault_read_base(lf__vault_source *src, int64_t index, lf__vault_work *work, uint8_t *raw);
/** *data is lf__alloc'ed, with a 0 behind it; the caller frees it. */
lf_status lf__vault_read_blob(lf__vault_source *src, int32_t index, void **data);
/** Only the head of a slice's record: does it belong there? */
lf_status lf__vault_check_head(lf__vault_source *src, int64_t index, lf__vault_record *record);

/* ---- many slices at once (vault_crew.c) ----------------------------------------------------------------------------------- */

typedef struct lf__vault_crew {
    lf__vault_work *work;
    int32_t n, threads;
} lf__vault_crew;

lf_status lf__vault_crew_open(lf__vault_crew *crew, int32_t threads, size_t slice_bytes);
void lf__vault_crew_close(lf__vault_crew *crew);

typedef lf_status (*lf__vault_item_fn)(void *user, lf__vault_work *work, int64_t item);
/** `each` runs in parallel on batches of items[0…n) (NULL: the numbers themselves), then `then` (may be NULL) in order on the
 *  calling thread while nobody else runs. Stops at the first error in order. @param trim (optional) closed down between batches. */
lf_status lf__vault_crew_run(lf__vault_crew *crew, const int64_t *items, int64_t n, lf__vault_item_fn each,
                             lf__vault_item_fn then, lf__vault_source *trim, void *user);

/* ---- the map's memory (vault_planes.c) -------------------------------------------------------------------------------------- */

/** Where a role of a class lies in memory. */
typedef struct lf__vault_view {
    lf_piece *pieces;
    int64_t *starts; /* element at which each begins */
    int32_t n;
    size_t elem_bytes;
    lf_device *device; /* NULL: host memory */
} lf__vault_view;

lf_status lf__vault_view_open(lf__vault_view *view, const lf_map *map, int32_t klass, int32_t role);
void lf__vault_view_close(lf__vault_view *view);
/** Between memory of the map and a host buffer, elements [first, first + count). Padding reads as zero and is not written. */
lf_status lf__vault_gather(const lf__vault_view *view, int64_t first, int64_t count, uint8_t *to, lf_stream *stream);
lf_status lf__vault_scatter(const lf__vault_view *view, int64_t first, int64_t count, const uint8_t *from);
/** Weights from masters by rounding to nearest even: f32 -> dtype (BF16, F16, F32). */
void lf__vault_round(const uint8_t *f32, int64_t count, int32_t dtype, uint8_t *out);

/* ---- a vault's folder (vault_catalog.c, vault_retain.c) ------------------------------------------------------------------------ */

/** A committed checkpoint: a folder, or a base file without one. */
typedef struct lf__vault_entry {
    int64_t step;
    char base[LF__VAULT_NAME_MAX]; /* a lone base's name, "": a folder */
    bool damaged;                  /* did not verify in this session */
    bool read;                     /* the rest is known */
    uint64_t seed;
    int64_t base_step;
    char own_base[LF__VAULT_NAME_MAX]; /* base file it needs */
    int64_t *refs;                     /* (n_refs): steps of the folders it needs, its own included */
    int64_t n_refs;
} lf__vault_entry;

typedef struct lf__vault_catalog {
    lf__vault_entry *entries; /* by step */
    int32_t n, room;
} lf__vault_catalog;

/** What is there by name, nothing read (but a lone base_model.bin, for its step). */
lf_status lf__vault_catalog_open(lf__vault_catalog *c, lf__io *io, const char *dir);
void lf__vault_catalog_close(lf__vault_catalog *c);
lf_status lf__vault_catalog_add(lf__vault_catalog *c, int64_t step, const char *base);
lf_status lf__vault_entry_load(const lf__vault_entry *e, lf__io *io, const char *dir, lf__vault_manifest **out);
/** Remember what a manifest needs. */
lf_status lf__vault_entry_note(lf__vault_entry *e, const lf__vault_manifest *m);
void lf__vault_entry_text(const lf__vault_entry *e, char text[LF__VAULT_NAME_MAX]);
/** Remove what an interrupted save left: names of ours that end in ".tmp", with files of ours inside. */
lf_status lf__vault_clean(lf__io *io, const char *dir);
/** Remove a checkpoint's folder of which only our own files are deleted. */
lf_status lf__vault_remove_folder(lf__io *io, const char *path);

typedef struct lf__vault_keep {
    int32_t last, every;
    int64_t after;   /* drop every checkpoint of a later step, -1: none */
    int64_t current; /* step that stays in any case, -1: none */
    uint64_t seed;
} lf__vault_keep;
/** Delete what the rule does not keep and nothing kept needs. Catalog entries follow. *removed counts (may be NULL). */
lf_status lf__vault_retain(lf__vault_catalog *c, lf__io *io, const char *dir, const lf__vault_keep *keep, int32_t *removed);

/* ---- the vault (vault.c, vault_save.c, vault_write.c, vault_commit.c, vault_restore.c) -------------------------------------------- */

/** Faults that tests plant, to see that the crash sweep finds them. */
enum {
    LF__VAULT_PLANT_NO_DATA_SYNC = 1u,
    LF__VAULT_PLANT_NO_META_SYNC = 2u,
    LF__VAULT_PLANT_NO_FOLDER_SYNC = 4u,
    LF__VAULT_PLANT_NO_DIR_SYNC = 8u,
};

typedef struct lf__vault_job {
    bool busy;
    int64_t step;
    lf_blob *blobs; /* copied */
    int32_t n_blobs;
    uint8_t *staged;     /* (n_slices): 1: its bytes are in staging; 0: equal to prev, hash in `hashes` */
    lf__hash128 *hashes; /* (n_slices) */
    int64_t *list;       /* (n_slices): slices to write */
} lf__vault_job;

struct lf_vault {
    lf__io *io;
    char dir[LF__VAULT_PATH_MAX];
    lf_vault_options opts;
    lf_map *map;
    lf__vault_layout *layout;
    lf__file *lock_file;
    uint64_t seed;
    uint32_t plant;

    lf__mutex *mutex; /* guards what follows up to the next blank line */
    lf__thread *writer;
    bool stop;
    lf__vault_job job;
    lf__fault fault;
    lf_vault_stats stats;

    /* The writer's while a job is busy, else the caller's. */
    lf__vault_catalog catalog;
    lf__vault_manifest *prev, *base; /* what the next diff is against */
    bool sound;                      /* their records were written or read in full by this vault */
    int32_t n_diffs;                 /* since the base */
    bool stale;                      /* the catalog is not what lies there */
    lf__vault_crew crew;

    /* The caller's. */
    int64_t saved_step;    /* newest step handed over, INT64_MIN: none */
    lf__vault_view *views; /* (layout->n_planes) */
    uint8_t *staging;
    lf_device *staging_device;    /* non-NULL: staging is the device's host memory */
    lf__vault_manifest *restored; /* its blobs are in blob_data, n_blobs of them */
    void **blob_data;
    int32_t n_blobs;
};

/** As lf_vault_open on another table. */
lf_status lf__vault_open_io(lf_vault **out, const char *dir, lf_map *map, const lf_vault_options *opts, lf__io *io);
void lf__vault_plant(lf_vault *vault, uint32_t faults);
lf_status lf__vault_list_io(lf__io *io, const char *dir, lf_checkpoint_info *infos, int32_t *n);
lf_status lf__vault_verify_io(lf__io *io, const char *dir);
lf_status lf__vault_merge_io(lf__io *io, const char *dir, int64_t step, const char *target);
lf_status lf__vault_check_io(lf__io *io, const char *dir, int64_t step, lf_checkpoint_info *info);
/** Manifest of the newest checkpoint of at most `step` (-1: any), or of exactly that one; a new reference. */
lf_status lf__vault_find(lf__io *io, const char *dir, int64_t step, bool exactly, lf__vault_manifest **out,
                         char base[LF__VAULT_NAME_MAX]);

/** A data file being written. */
typedef struct lf__vault_out {
    lf__io *io;
    lf__file *file;
    int64_t end; /* bytes written */
} lf__vault_out;
lf_status lf__vault_out_open(lf__vault_out *out, lf__io *io, const char *path, const lf__vault_file_head *head);
/** Append work->stored as a record; *ref gets its place. */
lf_status lf__vault_out_record(lf__vault_out *out, lf__vault_work *work, const lf__vault_record *record, lf__vault_ref *ref);
lf_status lf__vault_out_blob(lf__vault_out *out, const lf_blob *blob, int32_t index, uint64_t seed, int32_t level,
                             lf__vault_ref *ref);
/** End a base: its manifest and tail. */
lf_status lf__vault_out_tail(lf__vault_out *out, const lf__vault_manifest *m);
lf_status lf__vault_out_sync_close(lf__vault_out *out, bool sync);
void lf__vault_out_abandon(lf__vault_out *out);

/** The steps by which one save becomes visible; see vault_commit.c. */
typedef struct lf__vault_commit {
    lf__io *io;
    const char *dir;
    uint32_t plant;
    bool with_base, base_shown, folder_made, folder_shown;
    char folder[LF__VAULT_PATH_MAX], folder_temp[LF__VAULT_PATH_MAX]; /* checkpoint_<step>, with ".tmp" */
    char base[LF__VAULT_PATH_MAX], base_temp[LF__VAULT_PATH_MAX];
} lf__vault_commit;
/** @param base name of the base this save writes, NULL: none. */
lf_status lf__vault_commit_init(lf__vault_commit *c, lf__io *io, const char *dir, int64_t step, const char *base, uint32_t plant);
lf_status lf__vault_commit_make_folder(lf__vault_commit *c);
lf_status lf__vault_commit_base(lf__vault_commit *c);
lf_status lf__vault_commit_folder(lf__vault_commit *c, const lf__vault_manifest *m);
void lf__vault_commit_undo(lf__vault_commit *c);

/** The writer: write the job's snapshot and commit it. */
lf_status lf__vault_write(lf_vault *v);
/** The caller's half of a save: fill the job from the map. */
lf_status lf__vault_snapshot(lf_vault *v, const lf_blob *blobs, int32_t n_blobs, lf_stream *stream);
void lf__vault_job_clear(lf__vault_job *job);
/** Bytes of a slice in the staging area. */
const uint8_t *lf__vault_staged(const lf_vault *v, int64_t index, size_t *bytes);
void lf__vault_free_blobs(lf_vault *v);
/** Wait until the writer has nothing to do; errors stay for the next call. */
void lf__vault_idle(lf_vault *v);
/** Views of all planes as the map's memory lies now. */
lf_status lf__vault_refresh_views(lf_vault *v);
void lf__vault_info(const lf__vault_manifest *m, const char *dir, const char *base, lf_checkpoint_info *info);
/** LF_ERR_CORRUPT when a diff file does not end where its last record does. */
lf_status lf__vault_check_size(lf__vault_source *src, int32_t file);

#endif
