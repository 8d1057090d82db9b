/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: a layer's expert products as grouped GEMMs (loom/gemm). They are built from CUTLASS's headers: without them there is no
 * plan, and nothing else is missing. */
#include "loom_cuda.h"

#ifdef LF_LOOM_CUTLASS
#include "loom/gemm/grouped_gemm.h"

typedef struct plan {
    lf__gemm_plan *gemm;
    lf__loom_expert *table; /* device memory: (n_experts) */
    int64_t max_rows;
    int32_t has_gradients;
} plan;

static int32_t is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

static lf_status check_layer(const lf__loom_layer *layer)
{
    if (layer->dtype != LF_DTYPE_BF16)
        return LF_FAIL(LF_ERR_UNSUPPORTED,
                       "experts in f32 on CUDA, expected bf16; hint: bf16 weights with f32 masters in the map");
    LF_CHECK_ARG(layer->d % 8 == 0, "d is %d, expected a multiple of 8 on CUDA", layer->d);
    for (int32_t i = 0; i < layer->n_experts; i++) {
        const lf__loom_expert *e = &layer->expert[i];
        LF_CHECK_ARG(e->hidden % 8 == 0, "hidden size of expert %d is %lld, expected a multiple of 8 on CUDA", i,
                     (long long)e->hidden);
        LF_CHECK_ARG(is_aligned(e->w_gu) && is_aligned(e->w_down),
                     "w_gu and w_down of expert %d at %p and %p, expected 16-byte aligned addresses", i, e->w_gu, e->w_down);
        LF_CHECK_ARG(is_aligned(e->dw_gu) && is_aligned(e->dw_down),
                     "dw_gu and dw_down of expert %d at %p and %p, expected 16-byte aligned addresses", i, e->dw_gu, e->dw_down);
    }
    return LF_OK;
}

static lf_status open_gemm(plan *p, const lf__loom_layer *layer)
{
    lf_status rc = lf__gemm_open(&p->gemm, layer, p->table);
    if (rc < 0) return rc;
    const size_t bytes = lf__gemm_scratch_bytes(p->gemm);
    if (bytes <= LF_LOOM_CUDA_SCRATCH) return LF_OK;
    return LF_FAIL(LF_ERR_UNSUPPORTED, "grouped gemm: %zu bytes of scratch for %d experts, expected at most %d", bytes,
                   layer->n_experts, LF_LOOM_CUDA_SCRATCH);
}

lf_status lf__loom_cuda_experts_open(void *context, const lf__loom_layer *layer, void **out)
{
    const lf__loom_call call = {context, NULL, 0};
    void *table = NULL;
    lf_status rc = check_layer(layer);
    if (rc < 0) return rc;
    plan *p = lf__alloc(sizeof *p);
    if (!p) return LF_FAIL(LF_ERR_NOMEM, "a plan of %d experts", layer->n_experts);
    p->max_rows = layer->max_rows;
    p->has_gradients = layer->expert[0].dw_gu != NULL;
    const int before = lf__loom_cuda_enter(&call);
    rc = lf__device_cuda.alloc(context, (size_t)layer->n_experts * sizeof *p->table, &table);
    p->table = table;
    if (rc == LF_OK) rc = open_gemm(p, layer);
    rc = lf__loom_cuda_leave(&call, before, rc, "experts_open");
    if (rc == LF_OK) *out = p;
    else lf__loom_cuda_experts_close(context, p);
    return rc;
}

void lf__loom_cuda_experts_close(void *context, void *plan_)
{
    plan *p = plan_;
    if (!p) return;
    lf__gemm_close(p->gemm);
    if (p->table) lf__device_cuda.free(context, p->table);
    lf__free(p);
}

static lf_status check_call(const lf__loom_experts_args *a)
{
    const struct {
        const char *name;
        const void *address;
    } arrays[] = {{"xs", a->xs}, {"gu", a->gu},   {"gu", a->gu_in}, {"h", a->h},   {"h", a->h_in},
                  {"ys", a->ys}, {"dys", a->dys}, {"dgu", a->dgu},  {"dh", a->dh}, {"dxs", a->dxs}};
    for (size_t i = 0; i < LF_COUNT(arrays); i++)
        LF_CHECK_ARG(is_aligned(arrays[i].address), "%s at %p, expected a 16-byte aligned address", arrays[i].name,
                     arrays[i].address);
    return LF_OK;
}

/* One launch after another on the call's stream, all with its scratch. */
typedef struct frame {
    const plan *p;
    const lf__loom_experts_args *a;
    void *scratch, *stream;
} frame;

static lf_status multiply(const frame *f, int32_t op, const void *a, const void *b, void *out, int32_t accumulate)
{
    const lf__gemm_call call = {f->a->offset, a, b, out, f->scratch, accumulate};
    return lf__gemm_run(f->p->gemm, op, &call, f->stream);
}

static lf_status run_forward(const frame *f)
{
    const lf__loom_experts_args *a = f->a;
    lf_status rc;
    LF_TRY(multiply(f, LF_GEMM_GU, a->xs, NULL, a->gu, 0));
    LF_TRY(lf__gemm_swiglu(f->p->gemm, a->offset, a->gu, a->h, f->stream));
    LF_TRY(multiply(f, LF_GEMM_Y, a->h, NULL, a->ys, 0));
out:
    return rc;
}

static lf_status run_backward(const frame *f)
{
    const lf__loom_experts_args *a = f->a;
    void *again = a->h_in ? NULL : a->dh;
    lf_status rc;
    LF_TRY(multiply(f, LF_GEMM_DH, a->dys, NULL, a->dh, 0));
    LF_TRY(lf__gemm_swiglu_back(f->p->gemm, a->offset, a->gu_in, a->dh, a->dgu, again, f->stream));
    LF_TRY(multiply(f, LF_GEMM_DX, a->dgu, NULL, a->dxs, 0));
    if (!f->p->has_gradients) return LF_OK;
    LF_TRY(multiply(f, LF_GEMM_DW_GU, a->dgu, a->xs, NULL, a->accumulate));
    LF_TRY(multiply(f, LF_GEMM_DW_DOWN, a->dys, again ? again : a->h_in, NULL, a->accumulate));
out:
    return rc;
}

static lf_status run(const lf__loom_call *call, const lf__loom_experts_args *a, lf_status (*fn)(const frame *), const char *name)
{
    frame f = {a->plan, a, NULL, call->stream};
    lf_status rc = check_call(a);
    if (rc < 0) return rc;
    const int before = lf__loom_cuda_enter(call);
    rc = lf__loom_cuda_scratch(call, &f.scratch);
    if (rc == LF_OK) rc = fn(&f);
    return lf__loom_cuda_leave(call, before, rc, name);
}

lf_status lf__loom_cuda_experts_forward(const lf__loom_call *call, const lf__loom_args *args)
{
    return run(call, &args->experts, run_forward, "experts_forward");
}

lf_status lf__loom_cuda_experts_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    return run(call, &args->experts, run_backward, "experts_backward");
}

#else

lf_status lf__loom_cuda_experts_open(void *context, const lf__loom_layer *layer, void **plan)
{
    (void)context, (void)layer, (void)plan;
    return LF_FAIL(LF_ERR_UNSUPPORTED, "the experts' products on CUDA were not built: CUTLASS's headers were missing; hint: run "
                                       "scripts/cutlass.sh, then build again");
}

#endif
