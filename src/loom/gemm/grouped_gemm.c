/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of grouped GEMMs: memory layout, and the choice of a kernel for each operation. Everything that depends on the
 * routing happens on the device (grouped_gemm_setup.cu). */
#include "grouped_gemm.h"

#include "device/cuda/cuda_int.h"
#include "grouped_gemm_int.h"

enum { ALIGN = 256, MAX_CHOICES = 16 };

typedef struct op_kernels {
    const lf__gemm_kernel *kernel[MAX_CHOICES];
    int32_t n_resident[MAX_CHOICES];
    int32_t n, chosen;
} op_kernels;

struct lf__gemm_plan {
    int32_t n_experts, d, device, n_units;
    size_t workspace_bytes;         /* the largest of the kernels' */
    const lf__loom_expert *experts; /* device */
    op_kernels ops[LF_GEMM_N_OPS];
};

static const char *const op_names[LF_GEMM_N_OPS] = {"gu", "y", "dh", "dx", "dw_gu", "dw_down"};

static int32_t op_layout(int32_t op) { return op <= LF_GEMM_Y ? LF_GEMM_TN : op <= LF_GEMM_DX ? LF_GEMM_NN : LF_GEMM_NT; }

static lf_status query_device(lf__gemm_plan *plan, int32_t *capability)
{
    int32_t major = 0, minor = 0;
    LF_CUDA(cudaGetDevice(&plan->device));
    LF_CUDA(cudaDeviceGetAttribute(&plan->n_units, cudaDevAttrMultiProcessorCount, plan->device));
    LF_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, plan->device));
    LF_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, plan->device));
    *capability = major * 10 + minor;
    if (plan->n_units <= LF_GEMM_MAX_CLUSTERS) return LF_OK;
    return LF_FAIL(LF_ERR_UNSUPPORTED, "grouped gemm: %d multiprocessors, expected at most %d", plan->n_units,
                   LF_GEMM_MAX_CLUSTERS);
}

static bool fits(const lf__gemm_kernel *kernel, int32_t op, int32_t grad_dtype, int32_t capability)
{
    int32_t dtype = op >= LF_GEMM_DW_GU ? grad_dtype : LF_DTYPE_BF16;
    bool runs = kernel->capability == 90 ? capability == 90 : capability >= kernel->capability;
    return runs && kernel->layout == op_layout(op) && kernel->out_dtype == dtype;
}

/* Attributes of a kernel are set when it is first chosen: naming one loads its code, which may have to be made from PTX. */
static lf_status choose(op_kernels *k, int32_t choice)
{
    if (!k->n_resident[choice]) {
        cudaError_t error = k->kernel[choice]->prepare(&k->n_resident[choice]);
        if (error != cudaSuccess) return lf__cuda_fail(error, k->kernel[choice]->name);
    }
    k->chosen = choice;
    return LF_OK;
}

/* The kernels for each operation, and the largest workspace among them. */
static lf_status find_kernels(lf__gemm_plan *plan, const lf__loom_layer *layer, int32_t capability)
{
    for (int32_t op = 0; op < (layer->expert[0].dw_gu ? LF_GEMM_N_OPS : LF_GEMM_DW_GU); op++) {
        op_kernels *found = &plan->ops[op];
        int32_t best = -1;
        for (int32_t i = 0; lf__gemm_kernels[i] && found->n < MAX_CHOICES; i++) {
            const lf__gemm_kernel *kernel = lf__gemm_kernels[i];
            if (!fits(kernel, op, layer->grad_dtype, capability)) continue;
            size_t bytes = kernel->workspace(plan->n_units);
            if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
            if (best < 0 && kernel->prefer >> op & 1) best = found->n;
            found->kernel[found->n++] = kernel;
        }
        if (!found->n)
            return LF_FAIL(LF_ERR_UNSUPPORTED,
                           "grouped gemm %s: no kernel for compute capability %d was compiled; hint: LOONGFORGE_CUDA_ARCHS",
                           op_names[op], capability);
        lf_status rc = choose(found, best < 0 ? 0 : best);
        if (rc < 0) return rc;
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

size_t lf__gemm_scratch_bytes(const lf__gemm_plan *plan)
{
    lf__gemm_groups groups;
    void *workspace;
    return lay_out(NULL, plan->n_experts, plan->workspace_bytes, &groups, &workspace);
}

/* A copy from pageable memory may still be under way when cudaMemcpy returns. */
static lf_status copy_table(const lf__loom_layer *layer, void *table)
{
    const size_t bytes = (size_t)layer->n_experts * sizeof *layer->expert;
    LF_CUDA(cudaMemcpy(table, layer->expert, bytes, cudaMemcpyHostToDevice));
    LF_CUDA(cudaStreamSynchronize(NULL));
    return LF_OK;
}

lf_status lf__gemm_open(lf__gemm_plan **out, const lf__loom_layer *layer, void *table)
{
    lf_status rc;
    int32_t capability = 0;
    *out = NULL;
    lf__gemm_plan *plan = lf__alloc(sizeof *plan);
    if (!plan) return LF_FAIL(LF_ERR_NOMEM, "a plan of grouped gemms");
    plan->n_experts = layer->n_experts;
    plan->d = layer->d;
    plan->experts = table;
    LF_TRY(query_device(plan, &capability));
    LF_TRY(find_kernels(plan, layer, capability));
    LF_TRY(copy_table(layer, table));
    *out = plan;
    return LF_OK;
out:
    lf__gemm_close(plan);
    return rc;
}

void lf__gemm_close(lf__gemm_plan *plan) { lf__free(plan); }

lf_status lf__gemm_run(const lf__gemm_plan *plan, int32_t op, const lf__gemm_call *call, void *stream)
{
    const op_kernels *k = &plan->ops[op];
    const lf__gemm_kernel *kernel = k->kernel[k->chosen];
    lf__gemm_groups groups;
    void *workspace;
    lay_out(call->scratch, plan->n_experts, plan->workspace_bytes, &groups, &workspace);
    lf__gemm_setup setup = {
        .experts = plan->experts,
        .offset = call->offset,
        .a = call->a,
        .b = call->b,
        .out = call->out,
        .groups = groups,
        .op = op,
        .n_experts = plan->n_experts,
        .d = plan->d,
        .out_bytes = kernel->out_dtype == LF_DTYPE_F32 ? 4 : 2,
        .accumulate = call->accumulate,
    };
    lf__gemm_launch launch = {
        .groups = groups,
        .n_groups = plan->n_experts,
        .accumulate = call->accumulate,
        .device = plan->device,
        .n_units = plan->n_units,
        .n_resident = k->n_resident[k->chosen],
        .workspace = workspace,
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

lf_status lf__gemm_swiglu(const lf__gemm_plan *plan, const int32_t *offset, const void *gu, void *h, void *stream)
{
    lf__gemm_swiglu_args args = {
        .experts = plan->experts, .offset = offset, .n_experts = plan->n_experts, .n_units = plan->n_units, .gu = gu, .h = h};
    return run_swiglu(&args, false, stream);
}

lf_status lf__gemm_swiglu_back(const lf__gemm_plan *plan, const int32_t *offset, const void *gu, const void *dh, void *dgu,
                               void *h, void *stream)
{
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
    return choose(&plan->ops[op], choice);
}
