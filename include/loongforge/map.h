/* SPDX-License-Identifier: Apache-2.0 */
/** @file map.h  The map: where every byte of a training step lives, decided once before step 0.
 *
 *  Terms. A *class* holds all parameters of one dtype and one trainability; inside it a parameter has an *element offset*
 *  that is the same for its weight, gradient, master copy and moments. Each of those is a *role*: one plane of the class,
 *  `count` elements of the role's dtype. A *block* is one parameter's place, a *pool* a named range of blocks
 *  ("static/layer05/expert03"), a *group* a list of ranges that are reduced together ("dense", "high", "low"). A *range*
 *  (class, offset, count) therefore names a communication chunk, an optimizer sweep and a checkpoint slice at once.
 *
 *  Order: layers from last to first; inside a layer dense parameters, then experts from large to small; so a backward pass
 *  finishes ranges front to back. Blocks are padded to `align_elements`; padding is zero in every role and stays zero.
 *
 *  Life: lf_map_open, lf_map_add per parameter, lf_map_plan; then lf_map_allocate (the map owns a slab) or lf_map_attach
 *  (tensors stay where the caller has them). After planning, the layout never changes and reading it is safe from any
 *  thread. Maps are reference counted: every exported tensor holds a reference. */
#ifndef LOONGFORGE_MAP_H
#define LOONGFORGE_MAP_H

#include "loongforge/device.h"
#include "loongforge/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_map lf_map;

enum { LF_ROLE_WEIGHT = 0, LF_ROLE_GRAD = 1, LF_ROLE_MASTER = 2, LF_ROLE_EXP_AVG = 3, LF_ROLE_EXP_AVG_SQ = 4, LF_N_ROLES = 5 };
/** "weight", "grad", "master", "exp_avg", "exp_avg_sq"; "?" otherwise. Static. */
LF_API const char *lf_role_name(int32_t role);

/** Class of a pool by lifetime: weights; activations and gradients; optimizer state. */
enum { LF_POOL_STATIC = 0, LF_POOL_DYNAMIC = 1, LF_POOL_TRANSIENT = 2 };

#define LF_MAX_DIMS 8
#define LF_NAME_MAX 256

/** Options, section "map". */
typedef struct lf_map_options {
    size_t size;
    int32_t align_elements;    /* of a block; a power of two */
    int32_t high_load_experts; /* how many of the largest experts form the group "high" */
    int32_t plane_align_bytes; /* of a role's plane inside the slab; a power of two */
    int32_t grad_f32;          /* 1: gradients accumulate in f32 whatever the weight's dtype; 0: in the weight's dtype */
    int32_t optimizer_state;   /* 1: planes for master copies and moments; 0: weights and gradients only */
    int32_t moments_bf16;      /* 1: moments in bf16, rounded stochastically (lf_loom_adamw); 0: in f32 */
} lf_map_options;

enum { LF_PARAM_FROZEN = 1u, LF_PARAM_NO_DECAY = 2u };

/** One parameter of the model. */
typedef struct lf_param {
    size_t size;
    const char *name;     /* unique, as in the state dict; copied */
    const int64_t *shape; /* (ndim); copied */
    int32_t ndim;         /* 0 (a scalar) to LF_MAX_DIMS */
    int32_t dtype;        /* F32, BF16 or F16 */
    int32_t layer;        /* 0 … n-1; -1: used before the first layer, so finished last in backward (embeddings);
                              INT32_MAX: after the last layer (final norm, untied head) */
    int32_t expert;       /* index of the expert, -1: dense */
    int32_t tied_to;      /* index of an earlier parameter whose block this one shares, -1: none */
    uint32_t flags;       /* LF_PARAM_* */
} lf_param;

typedef struct lf_range {
    int32_t klass;
    int32_t reserved; /* 0 */
    int64_t offset;   /* elements from the class's start */
    int64_t count;    /* elements */
} lf_range;

/** A contiguous piece of a range in memory; data is NULL for padding of an attached map (reads as zero). */
typedef struct lf_piece {
    void *data;
    int64_t count; /* elements */
} lf_piece;

typedef struct lf_class_info {
    size_t size;
    int32_t dtype; /* of the weights */
    int32_t frozen;
    int64_t count;                   /* elements, padding included */
    int32_t role_dtype[LF_N_ROLES];  /* 0: the class has no such role */
    int64_t role_offset[LF_N_ROLES]; /* bytes from the slab's base, -1: none */
} lf_class_info;

typedef struct lf_block_info {
    size_t size;
    const char *name; /* owned by the map */
    const char *pool; /* owned by the map */
    lf_range range;   /* count without padding */
    int64_t shape[LF_MAX_DIMS];
    int32_t ndim;
    int32_t layer, expert, group;
    int32_t tied_to; /* -1 or the owner's index */
    uint32_t flags;
} lf_block_info;

typedef struct lf_pool_info {
    size_t size;
    const char *name;       /* owned by the map */
    int32_t kind;           /* LF_POOL_* */
    int32_t klass;          /* -1: an arena of bytes */
    int64_t offset;         /* elements in the class; bytes in the slab for an arena */
    int64_t used, capacity; /* elements, bytes for an arena; capacity - used is head-room */
} lf_pool_info;

/** Start a map.  @param[out] out new map with one reference, NULL on error.  @param opts NULL: defaults.
 *  @return LF_OK; LF_ERR_INVALID (an option out of bounds or not a power of two); LF_ERR_NOMEM. */
LF_API lf_status lf_map_open(lf_map **out, const lf_map_options *opts);
LF_API lf_map *lf_map_ref(lf_map *map);
/** Drop a reference; the last one frees the map and its slab. Needs no lock of the caller's; NULL is allowed. */
LF_API void lf_map_unref(lf_map *map);

/** Add a parameter.  @param[out] index its number, counted from 0 in order of addition (may be NULL).
 *  @return LF_OK; LF_ERR_INVALID (bad shape, dtype, tied_to or layer); LF_ERR_EXISTS (name taken); LF_ERR_STATE (planned). */
LF_API lf_status lf_map_add(lf_map *map, const lf_param *param, int32_t *index);

/** Ask for an arena: a named pool of plain bytes behind the planes (batch slots, scratch, planned activations). */
LF_API lf_status lf_map_add_arena(lf_map *map, const char *name, int32_t kind, int64_t bytes, int64_t align_bytes);

/** Give the weights of a pool room to grow: "expert_3" means that expert in every layer, otherwise a pool's full name.
 *  Takes effect in lf_map_plan, which fails with LF_ERR_POOL when a pool's parameters need more. */
LF_API lf_status lf_map_set_pool_bytes(lf_map *map, const char *pool, int64_t bytes);

/** Fix the layout.  @return LF_OK; LF_ERR_STATE (planned already, or no parameter); LF_ERR_POOL (says which, by how much and
 *  what to set); LF_ERR_NOTFOUND (a size was set for a pool that no parameter belongs to). */
LF_API lf_status lf_map_plan(lf_map *map);

/** Back the planned layout with a zeroed slab on `device` (the map keeps a reference to it).
 *  @return LF_OK; LF_ERR_STATE (not planned, or allocated or attached already); LF_ERR_NOMEM; LF_ERR_DEVICE. */
LF_API lf_status lf_map_allocate(lf_map *map, lf_device *device);

/** Instead of a slab: say where one role of one parameter lives. The memory stays the caller's and must outlive the map's
 *  users. @return LF_OK; LF_ERR_STATE (not planned, or allocated); LF_ERR_INVALID. */
LF_API lf_status lf_map_attach(lf_map *map, int32_t index, int32_t role, void *data);

LF_API int32_t lf_map_n_classes(const lf_map *map);
LF_API int32_t lf_map_n_blocks(const lf_map *map);
LF_API int32_t lf_map_n_pools(const lf_map *map);
LF_API int32_t lf_map_n_groups(const lf_map *map);
/** Bytes of the whole layout: what lf_map_allocate commits. */
LF_API int64_t lf_map_bytes(const lf_map *map);
/** LF_ERR_INVALID for an index out of range, LF_ERR_STATE before planning. */
LF_API lf_status lf_map_get_class(const lf_map *map, int32_t klass, lf_class_info *info);
LF_API lf_status lf_map_get_block(const lf_map *map, int32_t index, lf_block_info *info);
LF_API lf_status lf_map_get_pool(const lf_map *map, int32_t pool, lf_pool_info *info);
/** A group's name and ranges, in the order in which backward finishes them. Arrays are owned by the map. */
LF_API lf_status lf_map_get_group(const lf_map *map, int32_t group, const char **name, const lf_range **ranges,
                                  int32_t *n_ranges);
/** Number of a parameter by name; LF_ERR_NOTFOUND. */
LF_API lf_status lf_map_find(const lf_map *map, const char *name, int32_t *index);

/** The fewest ranges that cover the blocks `index[0…n)` and no other block; padding between neighbours is joined in.
 *  @param ranges room for `*n_ranges` entries (n is always enough); on return `*n_ranges` is how many were written. */
LF_API lf_status lf_map_cover(const lf_map *map, const int32_t *index, int32_t n, lf_range *ranges, int32_t *n_ranges);

/** What two lists of ranges have in common: for each of `a` in order, its parts that lie in ranges of `b`, in order of `b`.
 *  @param out room for `*n_out` entries; on return `*n_out` is how many there are.
 *  @return LF_OK; LF_ERR_NOMEM: they do not all fit (with no room this counts them); LF_ERR_INVALID. */
LF_API lf_status lf_ranges_common(const lf_range *a, int32_t n_a, const lf_range *b, int32_t n_b, lf_range *out, int32_t *n_out);

/** Address of a range's first element in a role's plane. NULL when there is none: not allocated, role absent, out of bounds. */
LF_API void *lf_map_address(const lf_map *map, const lf_range *range, int32_t role);

/** Cut a range into contiguous pieces (exactly one when allocated; one a block or gap when attached).
 *  @param pieces room for `*n` entries; LF_ERR_NOMEM when they do not suffice, and `*n` then says how many are needed.
 *  @return LF_ERR_STATE when a block of the range was never attached (names it). */
LF_API lf_status lf_map_pieces(const lf_map *map, const lf_range *range, int32_t role, lf_piece *pieces, int32_t *n);

/** The device of an allocated map, NULL otherwise; borrowed. */
LF_API lf_device *lf_map_device(const lf_map *map);

/** 128-bit digest of the layout (names, shapes, dtypes, offsets, groups): equal on all ranks and in a matching checkpoint.
 *  @param[out] digest 16 bytes. */
LF_API lf_status lf_map_digest(const lf_map *map, uint8_t digest[16]);

/** An arena's memory; LF_ERR_NOTFOUND, LF_ERR_STATE (not allocated). */
LF_API lf_status lf_map_arena(const lf_map *map, const char *name, void **data, int64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
