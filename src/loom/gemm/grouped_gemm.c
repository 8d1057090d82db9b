/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of grouped GEMMs: checks, memory layout, and the choice of a kernel for each operation. Everything that depends on the
 * routing happens on the device (grouped_gemm_setup.cu). */
#include "grouped_gemm.h"

#include <string.h>

#include "base/base.h"
#include "device/cuda/cuda_int.h"
#include "grouped_gemm_int.h"
#include "loongforge/loom.h"

enum { ALIGN = 256, MAX_CHOICES = 16 };

typedef struct op_kernels {
    const lf__gemm_kernel *kernel[MAX_CHOICES];
    int32_t n_resident[MAX_CHOICES];
    int32_t n, chosen;
} op_kernels;

struct lf__gemm_plan {
    int32_t n_experts, d, device, n_units, grad_dtype;
    bool has_gradients;
    const lf__gemm_expert *experts; /* device */
    lf__gemm_groups groups;
    void *workspace;
    op_kernels ops[LF_GEMM_N_OPS];
};

static const char *const op_names[LF_GEMM_N_OPS] = {"gu", "y", "dh", "dx", "dw_gu", "dw_down"};

static int32_t op_layout(int32_t op) { return op <= LF_GEMM_Y ? LF_GEMM_TN : op <= LF_GEMM_DX ? LF_GEMM_NN : LF_GEMM_NT; }

static bool is_aligned(const void *p) { return p && (uintptr_t)p % 16 == 0; }

static lf_status check_layer(const lf__gemm_layer *layer)
{
    LF_CHECK_ARG(layer && layer->hidden && layer->w_gu && layer->w_down, "grouped gemm: layer, hidden, w_gu or w_down is NULL");
    LF_CHECK_ARG(layer->n_experts >= 1 && layer->n_experts <= LF_MAX_EXPERTS, "n_experts is %d, expected 1 to %d",
                 layer->n_experts, LF_MAX_EXPERTS);
    LF_CHECK_ARG(layer->d >= 8 && layer->d % 8 == 0, "d is %d, expected a multiple of 8", layer->d);
    LF_CHECK_ARG(layer->max_rows >= 0 && layer->max_rows <= INT32_MAX, "max_rows is %lld, expected 0 to %d",
                 (long long)layer->max_rows, INT32_MAX);
    LF_CHECK_ARG(!layer->dw_gu == !layer->dw_down, "grouped gemm: dw_gu and dw_down are given both or neither");
    LF_CHECK_ARG(!layer->dw_gu || layer->grad_dtype == LF_DTYPE_F32 || layer->grad_dtype == LF_DTYPE_BF16,
                 "grad_dtype is %d, expected F32 or BF16", layer->grad_dtype);
    for (int32_t i = 0; i < layer->n_experts; i++) {
        int32_t f = layer->hidden[i];
        LF_CHECK_ARG(f >= 8 && f % 8 == 0 && f <= INT32_MAX / 2, "hidden size of expert %d is %d, expected a multiple of 8", i,
                     f);
        LF_CHECK_ARG(is_aligned(layer->w_gu[i]) && is_aligned(layer->w_down[i]),
                     "weights of expert %d at %p and %p, expected 16-byte aligned addresses", i, layer->w_gu[i],
                     layer->w_down[i]);
        LF_CHECK_ARG(!layer->dw_gu || (is_aligned(layer->dw_gu[i]) && is_aligned(layer->dw_down[i])),
                     "gradients of expert %d: expected 16-byte aligned addresses", i);
    }
    return LF_OK;
}

static lf_status query_device(int32_t device, int32_t *n_units, int32_t *capability)
{
    int32_t major = 0, minor = 0;
    LF_CUDA(cudaDeviceGetAttribute(n_units, cudaDevAttrMultiProcessorCount, device));
    LF_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    LF_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    *capability = major * 10 + minor;
    return LF_OK;
}

static bool fits(const lf__gemm_kernel *kernel, int32_t op, int32_t grad_dtype, int32_t capability)
{
    int32_t dtype = op >= LF_GEMM_DW_GU ? grad_dtype : LF_DTYPE_BF16;
    bool runs = kernel->capability == 90 ? capability == 90 : capability >= kernel->capability;
    return runs && kernel->layout == op_layout(op) && kernel->out_dtype == dtype;
}

/* The kernels for each operation, and the largest workspace among them. */
static lf_status find_kernels(const lf__gemm_layer *layer, op_kernels *ops, int32_t *n_units, size_t *workspace_bytes)
{
    int32_t capability = 0;
    lf_status rc = query_device(layer->device, n_units, &capability);
    if (rc < 0) return rc;
    if (*n_units > LF_GEMM_MAX_CLUSTERS)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "grouped gemm: %d multiprocessors, expected at most %d", *n_units,
                       LF_GEMM_MAX_CLUSTERS);
    *workspace_bytes = 0;
    for (int32_t op = 0; op < (layer->dw_gu ? LF_GEMM_N_OPS : LF_GEMM_DW_GU); op++) {
        op_kernels *found = &ops[op];
        found->n = 0;
        found->chosen = -1;
        for (int32_t i = 0; lf__gemm_kernels[i] && found->n < MAX_CHOICES; i++) {
            const lf__gemm_kernel *kernel = lf__gemm_kernels[i];
            if (!fits(kernel, op, layer->grad_dtype, capability)) continue;
            size_t bytes = kernel->workspace(*n_units);
            if (bytes > *workspace_bytes) *workspace_bytes = bytes;
            if (found->chosen < 0 && kernel->prefer >> op & 1) found->chosen = found->n;
            found->kernel[found->n++] = kernel;
        }
        if (!found->n)
            return LF_FAIL(LF_ERR_UNSUPPORTED,
                           "grouped gemm %s: no kernel for compute capability %d was compiled, expected 80 or newer",
                           op_names[op], capability);
        if (found->chosen < 0) found->chosen = 0;
    }
    return LF_OK;
}

static size_t align_up(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static void *take(char *base, size_t *used, size_t bytes)
{
    void *at = base ? base + *used : NULL;
    *used += align_up(bytes);
    return at;
}

/* Lay the scratch out from `base` (NULL: only count). Calls are ordered, so one set of groups serves all operations. */
static size_t lay_out(char *base, int32_t n_experts, size_t workspace_bytes, lf__gemm_groups *groups, void **workspace)
{
    size_t used = 0, n = (size_t)n_experts;
    *workspace = take(base, &used, workspace_bytes);
    groups->shape = take(base, &used, n * 3 * sizeof(int32_t));
    groups->a = take(base, &used, n * sizeof(void *));
    groups->b = take(base, &used, n * sizeof(void *));
    groups->d = take(base, &used, n * sizeof(void *));
    groups->lda = take(base, &used, n * sizeof(int64_t));
    groups->ldb = take(base, &used, n * sizeof(int64_t));
    groups->ldd = take(base, &used, n * sizeof(int64_t));
    groups->queue = take(base, &used, sizeof *groups->queue);
    return used;
}

lf_status lf__gemm_sizes(const lf__gemm_layer *layer, size_t *table_bytes, size_t *scratch_bytes)
{
    op_kernels ops[LF_GEMM_N_OPS];
    lf__gemm_groups groups;
    int32_t n_units;
    size_t workspace_bytes;
    void *workspace;
    lf_status rc = check_layer(layer);
    if (rc == LF_OK) rc = find_kernels(layer, ops, &n_units, &workspace_bytes);
    if (rc < 0) return rc;
    *table_bytes = align_up((size_t)layer->n_experts * sizeof(lf__gemm_expert));
    *scratch_bytes = lay_out(NULL, layer->n_experts, workspace_bytes, &groups, &workspace);
    return LF_OK;
}

static lf_status copy_table(const lf__gemm_layer *layer, void *table)
{
    size_t bytes = (size_t)layer->n_experts * sizeof(lf__gemm_expert);
    lf__gemm_expert *experts = lf__alloc(bytes);
    if (!experts) return LF_FAIL(LF_ERR_NOMEM, "no memory for the table of %d experts", layer->n_experts);
    for (int32_t i = 0; i < layer->n_experts; i++)
        experts[i] = (lf__gemm_expert){
            .w_gu = layer->w_gu[i],
            .w_down = layer->w_down[i],
            .dw_gu = layer->dw_gu ? layer->dw_gu[i] : NULL,
            .dw_down = layer->dw_down ? layer->dw_down[i] : NULL,
            .hidden = layer->hidden[i],
        };
    cudaError_t error = cudaMemcpy(table, experts, bytes, cudaMemcpyHostToDevice);
    lf__free(experts);
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, "grouped gemm: table of experts");
}

static lf_status prepare(lf__gemm_plan *plan)
{
    for (int32_t op = 0; op < LF_GEMM_N_OPS; op++) {
        op_kernels *k = &plan->ops[op];
        for (int32_t i = 0; i < k->n; i++) {
            cudaError_t error = k->kernel[i]->prepare(&k->n_resident[i]);
            if (error != cudaSuccess) return lf__cuda_fail(error, k->kernel[i]->name);
        }
    }
    return LF_OK;
}

lf_status lf__gemm_open(lf__gemm_plan **out, const lf__gemm_layer *layer, void *table, void *scratch)
{
    lf_status rc;
    size_t workspace_bytes;
    *out = NULL;
    rc = check_layer(layer);
    if (rc < 0) return rc;
    LF_CHECK_ARG(table && scratch && (uintptr_t)table % ALIGN == 0 && (uintptr_t)scratch % ALIGN == 0,
                 "table and scratch at %p and %p, expected %d-byte aligned addresses", table, scratch, ALIGN);
    lf__gemm_plan *plan = lf__alloc(sizeof *plan);
    if (!plan) return LF_FAIL(LF_ERR_NOMEM, "no memory for a plan of grouped gemms");
    plan->n_experts = layer->n_experts;
    plan->d = layer->d;
    plan->device = layer->device;
    plan->grad_dtype = layer->grad_dtype;
    plan->has_gradients = layer->dw_gu != NULL;
    plan->experts = table;
    LF_TRY(find_kernels(layer, plan->ops, &plan->n_units, &workspace_bytes));
    lay_out(scratch, layer->n_experts, workspace_bytes, &plan->groups, &plan->workspace);
    LF_TRY(copy_table(layer, table));
    LF_TRY(prepare(plan));
    *out = plan;
    plan = NULL;
out:
    lf__gemm_close(plan);
    return rc;
}

void lf__gemm_close(lf__gemm_plan *plan) { lf__free(plan); }

static lf_status check_call(const lf__gemm_plan *plan, int32_t op, const lf__gemm_call *call)
{
    LF_CHECK_ARG(plan && call && call->offset, "grouped gemm: plan, call or offset is NULL");
    LF_CHECK_ARG(op >= 0 && op < LF_GEMM_N_OPS, "op is %d, expected 0 to %d", op, LF_GEMM_N_OPS - 1);
    bool weights = op >= LF_GEMM_DW_GU;
    if (weights && !plan->has_gradients)
        return LF_FAIL(LF_ERR_STATE, "grouped gemm %s: the plan was made without gradients of weights", op_names[op]);
    LF_CHECK_ARG(is_aligned(call->a), "grouped gemm %s: a at %p, expected a 16-byte aligned address", op_names[op], call->a);
    LF_CHECK_ARG(weights ? is_aligned(call->b) : !call->b, "grouped gemm %s: b at %p, expected %s", op_names[op], call->b,
                 weights ? "a 16-byte aligned address" : "NULL");
    LF_CHECK_ARG(weights ? !call->out : is_aligned(call->out), "grouped gemm %s: out at %p, expected %s", op_names[op], call->out,
                 weights ? "NULL, gradients go where the plan says" : "a 16-byte aligned address");
    LF_CHECK_ARG(weights || !call->accumulate, "grouped gemm %s: accumulate is for gradients of weights", op_names[op]);
    return LF_OK;
}

lf_status lf__gemm_run(lf__gemm_plan *plan, int32_t op, const lf__gemm_call *call, void *stream)
{
    lf_status rc = check_call(plan, op, call);
    if (rc < 0) return rc;
    const op_kernels *k = &plan->ops[op];
    const lf__gemm_kernel *kernel = k->kernel[k->chosen];
    lf__gemm_setup setup = {
        .experts = plan->experts,
        .offset = call->offset,
        .a = call->a,
        .b = call->b,
        .out = call->out,
        .groups = plan->groups,
        .op = op,
        .n_experts = plan->n_experts,
        .d = plan->d,
        .out_bytes = kernel->out_dtype == LF_DTYPE_F32 ? 4 : 2,
        .accumulate = call->accumulate,
    };
    lf__gemm_launch launch = {
        .groups = plan->groups,
        .n_groups = plan->n_experts,
        .accumulate = call->accumulate,
        .device = plan->device,
        .n_units = plan->n_units,
        .n_resident = k->n_resident[k->chosen],
        .workspace = plan->workspace,
        .stream = stream,
    };
    cudaError_t error = lf__gemm_set_up(&setup, stream);
    if (error != cudaSuccess) return lf__cuda_fail(error, "grouped gemm: set-up");
    error = kernel->launch(&launch);
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, kernel->name);
}

static lf_status run_swiglu(const lf__gemm_swiglu_args *args, bool backward, void *stream)
{
    cudaError_t error = backward ? lf__gemm_swiglu_backward(args, stream) : lf__gemm_swiglu_forward(args, stream);
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, backward ? "swiglu backward" : "swiglu");
}

lf_status lf__gemm_swiglu(lf__gemm_plan *plan, const int32_t *offset, const void *gu, void *h, void *stream)
{
    LF_CHECK_ARG(plan && offset && is_aligned(gu) && is_aligned(h),
                 "swiglu: plan, offset, gu or h is NULL or not 16-byte aligned");
    lf__gemm_swiglu_args args = {
        .experts = plan->experts, .offset = offset, .n_experts = plan->n_experts, .n_units = plan->n_units, .gu = gu, .h = h};
    return run_swiglu(&args, false, stream);
}

lf_status lf__gemm_swiglu_back(lf__gemm_plan *plan, const int32_t *offset, const void *gu, const void *dh, void *dgu, void *h,
                               void *stream)
{
    LF_CHECK_ARG(plan && offset && is_aligned(gu) && is_aligned(dh) && is_aligned(dgu) && (!h || is_aligned(h)),
                 "swiglu backward: plan, offset, gu, dh or dgu is NULL, or an address is not 16-byte aligned");
    lf__gemm_swiglu_args args = {.experts = plan->experts,
                                 .offset = offset,
                                 .n_experts = plan->n_experts,
                                 .n_units = plan->n_units,
                                 .gu = gu,
                                 .dh = dh,
                                 .h = h,
                                 .dgu = dgu};
    return run_swiglu(&args, true, stream);
}

int64_t lf__gemm_region(const lf__gemm_layer *layer, const int32_t *count)
{
    int64_t elements = 0;
    for (int32_t i = 0; i < layer->n_experts; i++) elements += (int64_t)count[i] * layer->hidden[i];
    return elements;
}

int32_t lf__gemm_n_choices(const lf__gemm_plan *plan, int32_t op) { return op >= 0 && op < LF_GEMM_N_OPS ? plan->ops[op].n : 0; }

const char *lf__gemm_choice_name(const lf__gemm_plan *plan, int32_t op, int32_t choice)
{
    return choice >= 0 && choice < lf__gemm_n_choices(plan, op) ? plan->ops[op].kernel[choice]->name : NULL;
}

int32_t lf__gemm_choice(const lf__gemm_plan *plan, int32_t op)
{
    return lf__gemm_n_choices(plan, op) ? plan->ops[op].chosen : -1;
}

lf_status lf__gemm_choose(lf__gemm_plan *plan, int32_t op, int32_t choice)
{
    LF_CHECK_ARG(choice >= 0 && choice < lf__gemm_n_choices(plan, op), "choice is %d, expected 0 to %d", choice,
                 lf__gemm_n_choices(plan, op) - 1);
    plan->ops[op].chosen = choice;
    return LF_OK;
}
