/* SPDX-License-Identifier: Apache-2.0 */
/* Public calls: check, fill the args, run or queue. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "loom_int.h"

static _Atomic int32_t threads_allowed;

lf_status lf_loom_set_threads(int32_t threads)
{
    LF_CHECK_ARG(threads >= 0, "threads is %d, expected 0 (one a core) or more", threads);
    atomic_store(&threads_allowed, threads);
    return LF_OK;
}

int32_t lf__loom_threads(void) { return atomic_load(&threads_allowed); }

/* ---- queued work ----------------------------------------------------------------------------------------------------- */

/* A call on its way through a stream, with the arrays that a sweep needs. Done ones wait in `spare` for the next call, with
 * their arrays, so that a training step allocates nothing once its first steps are over. */
typedef struct job {
    lf__loom_fn fn;
    lf__loom_args args;
    lf__loom_piece *pieces;
    double *partial;
    size_t pieces_room, partial_room;
} job;

enum { N_SPARE = 128 };
static _Atomic(job *) spare[N_SPARE];

static void free_job(job *j)
{
    if (!j) return;
    lf__free(j->pieces);
    lf__free(j->partial);
    lf__free(j);
}

static void give_job(job *j)
{
    for (int32_t i = 0; j && i < N_SPARE; i++) {
        job *none = NULL;
        if (!atomic_load(&spare[i]) && atomic_compare_exchange_strong(&spare[i], &none, j)) return;
    }
    free_job(j);
}

static void __attribute__((destructor)) free_spare_jobs(void)
{
    for (int32_t i = 0; i < N_SPARE; i++) free_job(atomic_exchange(&spare[i], NULL));
}

static lf_status grow(void **array, size_t *room, size_t n, size_t bytes)
{
    if (n <= *room) return LF_OK;
    void *bigger = lf__realloc(*array, n + n / 2, bytes);
    if (!bigger) return LF_FAIL(LF_ERR_NOMEM, "a sweep of %zu pieces", n);
    *array = bigger;
    *room = n + n / 2;
    return LF_OK;
}

static lf_status take_job(job **out, size_t n_pieces, size_t n_partial)
{
    job *j = NULL;
    for (int32_t i = 0; !j && i < N_SPARE; i++)
        if (atomic_load(&spare[i])) j = atomic_exchange(&spare[i], NULL);
    if (!j) j = lf__alloc(sizeof *j);
    if (!j) return LF_FAIL(LF_ERR_NOMEM, "queueing work");
    lf_status rc = grow((void **)&j->pieces, &j->pieces_room, n_pieces, sizeof *j->pieces);
    if (rc == LF_OK) rc = grow((void **)&j->partial, &j->partial_room, n_partial, sizeof *j->partial);
    if (rc == LF_OK) *out = j;
    else give_job(j);
    return rc;
}

static lf_status run_job(void *user)
{
    job *j = user;
    lf_status rc = j->fn(NULL, &j->args);
    give_job(j);
    return rc;
}

/* Run or queue `j`, which is given back in every case. An error of lf_stream_run on a stream means that the job was not queued:
 * one that fails later is told at the stream's sync. */
static lf_status submit_job(lf_device *device, lf_stream *stream, job *j)
{
    lf_status rc;
    if (lf__device_is_cpu(device)) {
        if (!stream) return run_job(j);
        rc = lf_stream_run(stream, run_job, j);
        if (rc < 0) give_job(j);
        return rc;
    }
    lf__loom_call call = {device->context, lf_stream_native(stream), stream == NULL};
    rc = j->fn(&call, &j->args);
    give_job(j);
    return rc;
}

lf_status lf__loom_table(lf_device *device, const lf__loom_kernels **table)
{
    LF_CHECK_ARG(device, "device is NULL");
    *table = &lf__loom_cpu;
    if (lf__device_is_cpu(device)) return LF_OK;
    const void *found = NULL;
    lf_status rc = lf__device_kernels(device, "loom", &found);
    *table = found;
    if (rc == LF_OK && ((*table)->size != sizeof **table || (*table)->layout != LF_LOOM_LAYOUT))
        return LF_FAIL(LF_ERR_UNSUPPORTED,
                       "kernels are of another build: a table of %u bytes and layout %u, expected %zu and %u; hint: rebuild both "
                       "together",
                       (*table)->size, (*table)->layout, sizeof **table, LF_LOOM_LAYOUT);
    return rc;
}

/* Only queued work needs a job. */
lf_status lf__loom_submit(lf_device *device, lf_stream *stream, size_t which, const char *name, const lf__loom_args *args)
{
    const lf__loom_kernels *table = NULL;
    lf_status rc = lf__loom_table(device, &table);
    if (rc < 0) return rc;
    lf__loom_fn fn;
    memcpy(&fn, (const char *)table + which, sizeof fn);
    if (!fn) return LF_FAIL(LF_ERR_UNSUPPORTED, "kernels %s lack %s", table->name, name);
    if (!stream || !lf__device_is_cpu(device)) {
        lf__loom_call call = {device->context, lf_stream_native(stream), stream == NULL};
        return fn(&call, args);
    }
    job *j = NULL;
    rc = take_job(&j, 0, 0);
    if (rc < 0) return rc;
    j->fn = fn;
    j->args = *args;
    return submit_job(device, stream, j);
}
#define SUBMIT(name, ...) LF_LOOM_SUBMIT(device, stream, name, __VA_ARGS__)

/* ---- routing --------------------------------------------------------------------------------------------------------- */

static lf_status check_shape(int64_t n, int32_t e, int32_t k)
{
    LF_CHECK_ARG(e >= 1 && e <= LF_MAX_EXPERTS, "e is %d experts, expected 1 to %d", e, LF_MAX_EXPERTS);
    LF_CHECK_ARG(k >= 1 && k <= LF_MAX_TOP_K && k <= e, "k is %d choices of %d experts, expected 1 to %d", k, e,
                 e < LF_MAX_TOP_K ? e : LF_MAX_TOP_K);
    LF_CHECK_ARG(n >= 0 && n <= INT32_MAX / k, "n is %lld tokens, expected 0 to %d", (long long)n, INT32_MAX / k);
    return LF_OK;
}

/* The arrays that a call touches; the others may be NULL. count and offset exist also for no tokens. */
enum {
    EXPERT = LF_LOOM_EXPERT,
    WEIGHT = LF_LOOM_WEIGHT,
    PROB = LF_LOOM_PROB,
    ROW = LF_LOOM_ROW,
    SLOT = LF_LOOM_SLOT,
    COUNT = 32,
    OFFSET = 64
};

static lf_status check_routing(const lf_routing *r, int64_t n, uint32_t touched)
{
    LF_CHECK_ARG(r, "routing is NULL");
    LF_CHECK_ARG(r->size == sizeof *r, "lf_routing: size is %zu, expected %zu", r->size, sizeof *r);
    const struct {
        const char *name;
        const void *array;
        uint32_t bit;
    } arrays[] = {{"expert", r->expert, EXPERT}, {"weight", r->weight, WEIGHT}, {"prob", r->prob, PROB},
                  {"row", r->row, ROW},          {"slot", r->slot, SLOT},       {"count", r->count, COUNT},
                  {"offset", r->offset, OFFSET}};
    for (size_t i = 0; i < LF_COUNT(arrays); i++) {
        if (!(touched & arrays[i].bit) || (n == 0 && arrays[i].bit < COUNT)) continue;
        LF_CHECK_ARG(arrays[i].array, "routing: %s is NULL", arrays[i].name);
    }
    return LF_OK;
}

lf_status lf_loom_route(lf_device *device, lf_stream *stream, const lf_route_args *args, const lf_routing *out, float *prob_sum)
{
    LF_CHECK_ARG(args, "args is NULL");
    const lf_route_args *a = args;
    LF_CHECK_ARG(a->size == sizeof *a, "lf_route_args: size is %zu, expected %zu", a->size, sizeof *a);
    lf_status rc = check_shape(a->n, a->e, a->k);
    if (rc == LF_OK) rc = check_routing(out, a->n, EXPERT | WEIGHT | ROW | SLOT | COUNT | OFFSET);
    if (rc < 0) return rc;
    LF_CHECK_ARG(a->layer >= 0 && a->layer < 1 << 25, "layer is %d, expected 0 to %d", a->layer, (1 << 25) - 1);
    LF_CHECK_ARG(a->n == 0 || a->logits, "logits is NULL");
    return SUBMIT(route, .route = {.logits = a->logits,
                                   .token = a->token,
                                   .valid = a->valid,
                                   .schedule = a->schedule,
                                   .n = a->n,
                                   .seed = a->seed,
                                   .e = a->e,
                                   .k = a->k,
                                   .layer = a->layer,
                                   .routing = *out,
                                   .prob_sum = prob_sum});
}

lf_status lf_loom_sort(lf_device *device, lf_stream *stream, const int32_t *expert, int64_t n, int32_t e, int32_t k,
                       const lf_routing *out)
{
    lf_status rc = check_shape(n, e, k);
    if (rc == LF_OK) rc = check_routing(out, n, ROW | SLOT | COUNT | OFFSET);
    if (rc < 0) return rc;
    LF_CHECK_ARG(n == 0 || expert, "expert is NULL");
    return SUBMIT(sort, .route = {.given = expert, .n = n, .e = e, .k = k, .routing = *out});
}

lf_status lf_loom_route_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const uint8_t *valid,
                                 const float *dweight, const float *dprob_sum, int64_t n, int32_t e, int32_t k,
                                 const lf_route_schedule *schedule, float *dlogits)
{
    lf_status rc = check_shape(n, e, k);
    if (rc == LF_OK) rc = check_routing(routing, n, EXPERT | WEIGHT | (dprob_sum ? PROB : 0));
    if (rc < 0) return rc;
    LF_CHECK_ARG(n == 0 || (dweight && dlogits), "dweight or dlogits is NULL");
    return SUBMIT(route_backward, .route = {.valid = valid,
                                            .schedule = schedule,
                                            .n = n,
                                            .e = e,
                                            .k = k,
                                            .routing = *routing,
                                            .dweight = dweight,
                                            .dprob_sum = dprob_sum,
                                            .dlogits = dlogits});
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

lf_status lf__loom_check_dtype(const char *what, int32_t dtype)
{
    LF_CHECK_ARG(dtype == LF_DTYPE_F32 || dtype == LF_DTYPE_BF16, "%s is %s, expected f32 or bf16", what, lf_dtype_name(dtype));
    return LF_OK;
}

lf_status lf__loom_check_rows(const lf__loom_rows_args *a, uint32_t touched)
{
    lf_status rc = check_shape(a->n, a->e, a->k);
    if (rc == LF_OK) rc = check_routing(&a->routing, a->n, touched | OFFSET);
    if (rc == LF_OK) rc = lf__loom_check_dtype("dtype", a->dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(a->d >= 0 && (a->n == 0 || a->d <= INT64_MAX / 8 / a->k / a->n), "d is %lld features, expected 0 or more",
                 (long long)a->d);
    LF_CHECK_ARG(a->n == 0 || a->d == 0 || (a->a && a->out), "an input or output is NULL");
    return LF_OK;
}

static lf_status submit_rows(lf_device *device, lf_stream *stream, size_t which, const char *name, uint32_t touched,
                             const lf__loom_rows_args *a)
{
    lf_status rc = lf__loom_check_rows(a, touched);
    return rc < 0 ? rc : lf__loom_submit(device, stream, which, name, &(lf__loom_args){.rows = *a});
}
#define SUBMIT_ROWS(name, touched, ...)                                                                                 \
    LF_CHECK_ARG(routing, "routing is NULL");                                                                           \
    const lf__loom_rows_args rows = {.routing = *routing, .n = n, .d = d, .e = e, .k = k, .dtype = dtype, __VA_ARGS__}; \
    return submit_rows(device, stream, offsetof(lf__loom_kernels, name), #name, touched, &rows)

lf_status lf_loom_permute(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *x, int64_t n, int32_t e,
                          int32_t k, int64_t d, int32_t dtype, void *xs)
{
    SUBMIT_ROWS(permute, ROW, .a = x, .out = xs);
}

lf_status lf_loom_permute_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *dxs, int64_t n,
                                   int32_t e, int32_t k, int64_t d, int32_t dtype, const float *dlogits, const float *weight,
                                   void *dx)
{
    LF_CHECK_ARG(!dlogits == !weight, "one of dlogits and weight is NULL, expected both or neither");
    SUBMIT_ROWS(permute_backward, SLOT, .a = dxs, .out = dx, .dlogits = dlogits, .router = weight);
}

lf_status lf_loom_combine(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys, int64_t n, int32_t e,
                          int32_t k, int64_t d, int32_t dtype, void *y)
{
    SUBMIT_ROWS(combine, SLOT | WEIGHT, .a = ys, .out = y);
}

lf_status lf_loom_combine_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys,
                                   const void *dy, int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, void *dys,
                                   float *dweight)
{
    LF_CHECK_ARG(n == 0 || (dweight && (dy || d == 0)), "dy or dweight is NULL");
    SUBMIT_ROWS(combine_backward, SLOT | WEIGHT, .a = ys, .b = dy, .out = dys, .dweight = dweight);
}

/* ---- sweeps ---------------------------------------------------------------------------------------------------------- */

lf_status lf_adamw_init(lf_adamw *hyper, double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                        double grad_scale)
{
    LF_CHECK_ARG(hyper, "hyper is NULL");
    LF_CHECK_ARG(lr >= 0 && isfinite(lr), "lr is %g, expected 0 or more", lr);
    LF_CHECK_ARG(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "betas are (%g, %g), expected 0 to below 1", beta1, beta2);
    LF_CHECK_ARG(eps >= 0 && isfinite(eps), "eps is %g, expected 0 or more", eps);
    LF_CHECK_ARG(weight_decay >= 0 && isfinite(weight_decay), "weight_decay is %g, expected 0 or more", weight_decay);
    LF_CHECK_ARG(step >= 1, "step is %lld, expected 1 or more", (long long)step);
    LF_CHECK_ARG(isfinite(grad_scale), "grad_scale is %g, expected a finite number", grad_scale);
    *hyper = (lf_adamw){.decay = (float)(1 - lr * weight_decay),
                        .beta1_rest = (float)(1 - beta1),
                        .beta2 = (float)beta2,
                        .beta2_rest = (float)(1 - beta2),
                        .eps = (float)eps,
                        .step_size = (float)(lr / (1 - pow(beta1, (double)step))),
                        .bias2_sqrt = (float)sqrt(1 - pow(beta2, (double)step)),
                        .step = (uint32_t)step,
                        .grad_scale = (float)grad_scale};
    return LF_OK;
}

static lf_status check_range(const lf_map *map, const lf_range *r, lf_class_info *info)
{
    LF_CHECK_ARG(r->klass >= 0 && r->klass < lf_map_n_classes(map), "range of class %d, expected 0 to %d", r->klass,
                 lf_map_n_classes(map) - 1);
    *info = (lf_class_info){.size = sizeof *info};
    lf_status rc = lf_map_get_class(map, r->klass, info);
    if (rc < 0) return rc;
    LF_CHECK_ARG(r->offset >= 0 && r->count >= 0 && r->offset <= info->count - r->count,
                 "range (%lld, %lld) of class %d, expected inside its %lld elements", (long long)r->offset, (long long)r->count,
                 r->klass, (long long)info->count);
    return LF_OK;
}

static lf_status adamw_piece(const lf_map *map, const lf_range *r, lf__loom_piece *p)
{
    lf_class_info info;
    lf_status rc = check_range(map, r, &info);
    if (rc < 0) return rc;
    LF_CHECK_ARG(!info.frozen, "range of class %d, which is frozen and has no gradient", r->klass);
    if (!info.role_dtype[LF_ROLE_EXP_AVG])
        return LF_FAIL(LF_ERR_STATE, "the map holds no moments; hint: [map] optimizer_state = true");
    p->weight_dtype = info.dtype;
    p->grad_dtype = info.role_dtype[LF_ROLE_GRAD];
    p->moments_dtype = info.role_dtype[LF_ROLE_EXP_AVG];
    p->klass = r->klass;
    p->first = r->offset;
    bool known = (info.dtype == LF_DTYPE_F32 || info.role_dtype[LF_ROLE_MASTER] == LF_DTYPE_F32) && info.dtype != LF_DTYPE_F16 &&
                 (p->grad_dtype == LF_DTYPE_F32 || p->grad_dtype == LF_DTYPE_BF16);
    if (!known)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "adamw on %s weights with %s gradients, expected f32, or bf16 with an f32 master",
                       lf_dtype_name(info.dtype), lf_dtype_name(p->grad_dtype));
    p->weight = lf_map_address(map, r, LF_ROLE_WEIGHT);
    p->grad = lf_map_address(map, r, LF_ROLE_GRAD);
    p->exp_avg = lf_map_address(map, r, LF_ROLE_EXP_AVG);
    p->exp_avg_sq = lf_map_address(map, r, LF_ROLE_EXP_AVG_SQ);
    p->master = info.dtype == LF_DTYPE_F32 ? p->weight : lf_map_address(map, r, LF_ROLE_MASTER);
    return LF_OK;
}

static lf_status sumsq_piece(const lf_map *map, const lf_range *r, int32_t role, lf__loom_piece *p)
{
    LF_CHECK_ARG(role >= 0 && role < LF_N_ROLES, "role is %d, expected 0 to %d", role, LF_N_ROLES - 1);
    lf_class_info info;
    lf_status rc = check_range(map, r, &info);
    if (rc < 0) return rc;
    LF_CHECK_ARG(info.role_dtype[role], "class %d has no role %s", r->klass, lf_role_name(role));
    p->grad_dtype = info.role_dtype[role];
    p->grad = lf_map_address(map, r, role);
    if (p->grad_dtype == LF_DTYPE_F32 || p->grad_dtype == LF_DTYPE_BF16) return LF_OK;
    return LF_FAIL(LF_ERR_UNSUPPORTED, "sum of squares of %s, expected f32 or bf16", lf_dtype_name(p->grad_dtype));
}

/* Resolve ranges into the job's pieces; role -1 means all that adamw needs. */
static lf_status fill_pieces(const lf_map *map, const lf_range *ranges, int32_t n, int32_t role, job *j, int64_t *n_blocks)
{
    *n_blocks = 0;
    for (int32_t i = 0; i < n; i++) {
        lf__loom_piece *p = &j->pieces[i];
        *p = (lf__loom_piece){.count = ranges[i].count, .first_block = *n_blocks};
        lf_status rc = role < 0 ? adamw_piece(map, &ranges[i], p) : sumsq_piece(map, &ranges[i], role, p);
        if (rc < 0) return rc;
        *n_blocks += (p->count + LF_LOOM_BLOCK - 1) / LF_LOOM_BLOCK;
    }
    return LF_OK;
}

static lf_status sweep(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n, int32_t role, const lf_adamw *hyper,
                       double *out)
{
    LF_CHECK_ARG(map && (ranges || n == 0) && n >= 0, "map or ranges is NULL, or n_ranges is negative");
    LF_CHECK_ARG(role < 0 ? hyper != NULL : out != NULL, "%s is NULL", role < 0 ? "hyper" : "out");
    lf_device *device = lf_map_device(map);
    if (!device) return LF_FAIL(LF_ERR_STATE, "the map is not allocated; hint: lf_map_allocate");
    const lf__loom_kernels *table = NULL;
    job *j = NULL;
    int64_t n_blocks;
    lf_status rc = LF_OK;
    LF_TRY(lf__loom_table(device, &table));
    LF_TRY(take_job(&j, (size_t)n, 0));
    LF_TRY(fill_pieces(map, ranges, n, role, j, &n_blocks));
    if (role >= 0) LF_TRY(grow((void **)&j->partial, &j->partial_room, (size_t)n_blocks, sizeof *j->partial));
    j->fn = role < 0 ? table->adamw : table->sumsq;
    if (!j->fn) LF_THROW(LF_ERR_UNSUPPORTED, "kernels %s lack %s", table->name, role < 0 ? "adamw" : "sumsq");
    j->args.sweep = (lf__loom_sweep_args){j->pieces, n, n_blocks, hyper, j->partial, out};
    return submit_job(device, stream, j);
out:
    give_job(j);
    return rc;
}

lf_status lf_loom_adamw(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges, const lf_adamw *hyper)
{
    return sweep(map, stream, ranges, n_ranges, -1, hyper, NULL);
}

lf_status lf_loom_sumsq(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges, int32_t role, double *out)
{
    LF_CHECK_ARG(role >= 0 && role < LF_N_ROLES, "role is %d, expected 0 to %d", role, LF_N_ROLES - 1);
    return sweep(map, stream, ranges, n_ranges, role, NULL, out);
}

lf_status lf_loom_add(lf_device *device, lf_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int64_t count, const float *scale, int32_t accumulate)
{
    lf_status rc = lf__loom_check_dtype("dst_dtype", dst_dtype);
    if (rc == LF_OK) rc = lf__loom_check_dtype("src_dtype", src_dtype);
    if (rc < 0) return rc;
    LF_CHECK_ARG(count >= 0 && (count == 0 || (dst && src)), "dst or src is NULL, or count is negative");
    return SUBMIT(add, .add = {dst, src, count, scale, dst_dtype, src_dtype, accumulate});
}

lf_status lf_loom_clip(lf_device *device, lf_stream *stream, const double *sumsq, double max_norm, lf_adamw *hyper,
                       int32_t n_hyper, float *norm)
{
    LF_CHECK_ARG(!isnan(max_norm), "max_norm is %g, expected a number", max_norm);
    LF_CHECK_ARG(n_hyper >= 1, "n_hyper is %d, expected 1 or more", n_hyper);
    LF_CHECK_ARG(sumsq && hyper && norm, "sumsq, hyper or norm is NULL");
    return SUBMIT(clip, .clip = {sumsq, max_norm > 0 && isfinite(max_norm) ? max_norm : 0, hyper, n_hyper, norm});
}
