/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_sparse_ranks.h  Ranks that train with the sparse form, for its tests: what each step left and what is kept back, saving
 *  and loading that, and flushing it. */
#ifndef LF_NEXUS_SPARSE_RANKS_H
#define LF_NEXUS_SPARSE_RANKS_H

#include "nexus/nexus_int.h"
#include "nexus_ranks.h"

enum { N_LAYERS = 3, N_EXPERTS = 4, STEPS_MOST = 100 };

typedef struct training {
    int32_t n_experts, first_step, flush_at; /* n_experts 0: an ordinary model */
    bool whole;                              /* small whole numbers: sums over ranks and steps are exact in f32 */
    void (*after)(rank *r, int32_t step);    /* each step; or NULL */
    char save[300], load[2][300], hash[33], load_hash[33];
    lf__hash128 steps_hash[STEPS_MOST]; /* of the gradients after each step */
    double total;                       /* of what finish left, over all steps, plus what is kept back at the end */
} training;

static training trainings[RANKS_MOST];

/* Sizes are no multiples of anything. */
static inline lf_map *make_sparse_map(int32_t grad_f32, int32_t n_experts)
{
    const model_shape m = {.grad_f32 = grad_f32,
                           .high_load = 1,
                           .n_layers = N_LAYERS,
                           .n_experts = n_experts,
                           .embed = 1501,
                           .norm = 33,
                           .qkv = 701,
                           .expert = 601,
                           .expert_step = 1203};
    return make_model(&m);
}

static inline lf_map *make_map(const rank *r) { return make_sparse_map(r->grad_f32, trainings[r->t.rank].n_experts); }

/* The gradient of a block, or what must not come out: an earlier step's. */
static inline void write_grad(const lf_map *map, int32_t from, int32_t step, int32_t block, bool whole, bool garbage)
{
    const lf_block_info b = block_at(map, block);
    const int32_t dtype = dtype_of(map, b.range.klass, LF_ROLE_GRAD);
    void *g = lf_map_address(map, &b.range, LF_ROLE_GRAD);
    lf__rng rng;
    lf__rng_init(&rng, 5, (uint32_t)from, (uint32_t)step, (uint32_t)block);
    for (int64_t i = 0; i < b.range.count; i++) {
        const float unit = (float)lf__rng_unit(&rng) - 0.5f;
        float v = whole ? (float)(lf__rng_below(&rng, 9) - 4) : unit * unit * unit * 0.01f;
        put(g, i, dtype, garbage ? 777 : v);
    }
}

static inline lf_status reduce_once(const rank *r, int32_t step)
{
    int32_t order[100], n = lf_map_n_blocks(r->map);
    lf_status rc = lf_nexus_begin(r->nexus);
    order_of_marks(r->t.rank, step, order, n);
    for (int32_t i = 0; i < n && rc == LF_OK; i++) {
        const lf_block_info b = block_at(r->map, order[i]);
        const bool late = is_late(r->t.rank, step, &b);
        write_grad(r->map, r->t.rank, step, order[i], trainings[r->t.rank].whole, late);
        if (!late) rc = lf_nexus_mark(r->nexus, order[i], r->stream);
    }
    if (rc == LF_OK) rc = lf_nexus_finish(r->nexus, r->stream);
    return rc == LF_OK ? lf_stream_sync(r->stream) : rc;
}

static inline void note_step(training *t, const lf_nexus *nexus, int32_t at)
{
    lf__hash128 all = {0};
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        const lf__hash128 one[2] = {all, lf__hash(c->data, (size_t)c->bytes, 0)};
        all = lf__hash(one, sizeof one, 0);
        for (int64_t k = 0; k < c->range.count; k++) t->total += get(c->data, k, c->dtype);
    }
    if (at < STEPS_MOST) t->steps_hash[at] = all;
}

static inline double kept_back(const lf_nexus *nexus)
{
    double sum = 0;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++)
        for (int64_t k = 0; nexus->plan.chunks[i].topk.residual && k < nexus->plan.chunks[i].range.count; k++)
            sum += (double)nexus->plan.chunks[i].topk.residual[k];
    return sum;
}

static inline lf_status resume(const training *t, lf_nexus *nexus)
{
    lf_status rc = t->first_step ? lf_nexus_seek(nexus, t->first_step) : LF_OK;
    for (int32_t i = 0; i < 2 && rc == LF_OK; i++)
        if (t->load[i][0]) rc = lf_nexus_residual_load(nexus, t->load[i], t->load_hash[0] ? t->load_hash : NULL);
    return rc;
}

static inline void train(rank *r)
{
    training *t = &trainings[r->t.rank];
    r->status = resume(t, r->nexus);
    for (int32_t step = t->first_step; step < t->first_step + r->steps && r->status == LF_OK; step++) {
        if (step == t->flush_at) r->status = lf_nexus_residual_flush(r->nexus);
        if (r->status == LF_OK) r->status = reduce_once(r, step);
        if (r->status == LF_OK && t->after) t->after(r, step);
        if (r->status == LF_OK) note_step(t, r->nexus, step - t->first_step);
    }
    if (r->status == LF_OK && t->save[0]) r->status = lf_nexus_residual_save(r->nexus, t->save, t->hash);
    if (r->status == LF_OK) t->total += kept_back(r->nexus);
}

static inline void prepare_training(int32_t world, int32_t steps)
{
    prepare(world, make_map, train);
    for (int32_t i = 0; i < world; i++) {
        trainings[i] = (training){.n_experts = N_EXPERTS, .flush_at = -1};
        ranks[i].steps = steps;
        CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "comm_strategy", "sparse"));
    }
}

#endif
