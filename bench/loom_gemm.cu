/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped expert GEMMs against cuBLAS called expert by expert, in one run on one GPU.
 *
 * Shapes: d 1024, 16 experts of 640 to 2048, 65,536 rows. Every kernel's output is poisoned and compared with float64 before
 * anything is timed. Both sides run as captured graphs, in turns; times are medians. cuBLAS knows the counts when it is
 * captured, ours read them on the device. One JSON object a line; exit code 1 when a result is wrong.
 *
 *   nvcc -O3 -DNDEBUG --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -I$(scripts/cutlass.sh) -Iinclude -Isrc \
 *        -o build/loom_gemm bench/loom_gemm.cu src/loom/gemm/grouped_gemm*.c src/loom/gemm/grouped_gemm*.cu -ldl
 *   build/loom_gemm [rounds]   cuBLAS is opened at run time (libcublas.so.13 or .12); without it only our side is timed */
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.cuh"
#include "loom/gemm/grouped_gemm.h"

/* What the library would bring. */
static thread_local char error_text[512];
extern "C" {
const char *lf_error_text(void) { return error_text; }
lf_status lf__fail(lf_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
    return status;
}
lf_status lf__cuda_fail(cudaError_t error, const char *what)
{
    return lf__fail(LF_ERR_DEVICE, "%s: %s", what, cudaGetErrorString(error));
}
void *lf__alloc(size_t bytes) { return calloc(1, bytes); }
void lf__free(void *p) { free(p); }
}

constexpr int kExperts = 16, kD = 1024, kRows = 65536;
static const int32_t kHidden[kExperts] = {2048, 2048, 640,  704,  768,  832,  896,  2048,
                                          960,  1024, 1088, 1152, 2048, 1216, 1280, 1344};
static const char *const kOps[] = {"gu", "y", "dh", "dx", "dw_gu", "dw_down"};

/* ---- cuBLAS at run time ---- */

struct Blas {
    void *handle = nullptr;
    int (*create)(void **);
    int (*set_stream)(void *, cudaStream_t);
    int (*set_workspace)(void *, void *, size_t);
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int, const void *,
                void *, int, int, int, int);
};
constexpr int kOpN = 0, kOpT = 1, kBf16 = 14, kF32 = 0, kCompute32F = 68, kDefaultAlgo = -1;

static Blas open_blas(cudaStream_t stream)
{
    Blas b;
    void *lib = dlopen("libcublas.so.13", RTLD_NOW);
    if (!lib) lib = dlopen("libcublas.so.12", RTLD_NOW);
    if (!lib) {
        fprintf(stderr, "loom_gemm: no cuBLAS: %s\n", dlerror());
        return b;
    }
    b.create = reinterpret_cast<decltype(b.create)>(dlsym(lib, "cublasCreate_v2"));
    b.set_stream = reinterpret_cast<decltype(b.set_stream)>(dlsym(lib, "cublasSetStream_v2"));
    b.set_workspace = reinterpret_cast<decltype(b.set_workspace)>(dlsym(lib, "cublasSetWorkspace_v2"));
    b.gemm = reinterpret_cast<decltype(b.gemm)>(dlsym(lib, "cublasGemmEx"));
    void *workspace;
    CUDA(cudaMalloc(&workspace, 64 << 20));
    if (b.create(&b.handle) || b.set_stream(b.handle, stream) || b.set_workspace(b.handle, workspace, 64 << 20)) {
        fprintf(stderr, "loom_gemm: cuBLAS does not start\n");
        b.handle = nullptr;
    }
    return b;
}

/* ---- data and references ---- */

__global__ void fill_kernel(__nv_bfloat16 *to, int64_t n, uint32_t seed, float scale)
{
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        uint32_t x = uint32_t(i) * 2654435761u ^ uint32_t(i >> 32) ^ seed * 0x9E3779B9u;
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
        to[i] = __float2bfloat16((float(x >> 8) * 0x1p-23f - 1.0f) * scale);
    }
}

/* One GEMM in row-major terms: A element (i, l) at a[i am + l ak], and so on. */
struct Product {
    int64_t m, n, k;
    const __nv_bfloat16 *a, *b;
    int64_t am, ak, bk, bn, out; /* out: elements in front of D (m, n) */
};

__global__ void __launch_bounds__(1024) reference_kernel(Product p, float *out)
{
    __shared__ float a[32][33], b[32][33];
    int x = threadIdx.x, y = threadIdx.y;
    int64_t row = blockIdx.y * 32 + y, col = blockIdx.x * 32 + x;
    double sum = 0;
    for (int64_t l = 0; l < p.k; l += 32) {
        int64_t i = blockIdx.y * 32 + (p.ak == 1 ? y : x), la = l + (p.ak == 1 ? x : y);
        float va = i < p.m && la < p.k ? __bfloat162float(p.a[i * p.am + la * p.ak]) : 0.0f;
        int64_t j = blockIdx.x * 32 + (p.bk == 1 ? y : x), lb = l + (p.bk == 1 ? x : y);
        float vb = j < p.n && lb < p.k ? __bfloat162float(p.b[lb * p.bk + j * p.bn]) : 0.0f;
        a[p.ak == 1 ? y : x][p.ak == 1 ? x : y] = va;
        b[p.bk == 1 ? x : y][p.bk == 1 ? y : x] = vb;
        __syncthreads();
        for (int t = 0; t < 32; t++) sum += double(a[y][t]) * double(b[t][x]);
        __syncthreads();
    }
    if (row < p.m && col < p.n) out[p.out + row * p.n + col] = float(sum);
}

__global__ void compare_kernel(const void *got, int is_f32, const float *want, int64_t n, double *sums)
{
    double error = 0, norm = 0, bad = 0;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        double g = is_f32 ? static_cast<const float *>(got)[i] : __bfloat162float(static_cast<const __nv_bfloat16 *>(got)[i]);
        double w = want[i];
        if (g != g) bad++;
        else error += (g - w) * (g - w), norm += w * w;
    }
    atomicAdd(sums, error), atomicAdd(sums + 1, norm), atomicAdd(sums + 2, bad);
}

struct Bench {
    __nv_bfloat16 *x, *dy, *h, *gu, *wgu, *wdown;
    void *out, *dwgu, *dwdown, *table, *scratch;
    float *want;
    double *sums;
    int32_t *offset;
    cudaStream_t stream;
    cudaEvent_t from, to;
    Blas blas;
    int grad_dtype, rounds;
    std::vector<int32_t> count;
    lf__gemm_plan *plan;
};

static __nv_bfloat16 *make(int64_t n, uint32_t seed, float scale)
{
    __nv_bfloat16 *p;
    CUDA(cudaMalloc(&p, n * 2));
    fill_kernel<<<2048, 256>>>(p, n, seed, scale);
    CUDA(cudaGetLastError());
    return p;
}

static int64_t total_hidden()
{
    int64_t sum = 0;
    for (int f : kHidden) sum += f;
    return sum;
}

static void make_data(Bench &b)
{
    int64_t weights = total_hidden() * kD, region = int64_t(kRows) * 2048;
    b.x = make(int64_t(kRows) * kD, 1, 1.7f);
    b.dy = make(int64_t(kRows) * kD, 2, 1.7f);
    b.h = make(region, 3, 1.0f);
    b.gu = make(2 * region, 4, 1.0f);
    b.wgu = make(2 * weights, 5, 0.05f);
    b.wdown = make(weights, 6, 0.05f);
    CUDA(cudaMalloc(&b.out, 4 * region));
    CUDA(cudaMalloc(&b.want, 8 * region));
    CUDA(cudaMalloc(&b.dwgu, 8 * weights));
    CUDA(cudaMalloc(&b.dwdown, 4 * weights));
    CUDA(cudaMalloc(&b.sums, 3 * sizeof(double)));
    CUDA(cudaMalloc(&b.offset, (kExperts + 1) * sizeof(int32_t)));
    CUDA(cudaStreamCreate(&b.stream));
    CUDA(cudaEventCreate(&b.from));
    CUDA(cudaEventCreate(&b.to));
}

static void open_plan(Bench &b, int grad_dtype)
{
    b.grad_dtype = grad_dtype;
    lf__loom_expert expert[kExperts];
    int64_t at = 0, bytes = grad_dtype == LF_DTYPE_F32 ? 4 : 2;
    for (int i = 0; i < kExperts; at += int64_t(kHidden[i++]) * kD)
        expert[i] = {b.wgu + 2 * at, b.wdown + at, static_cast<char *>(b.dwgu) + 2 * at * bytes,
                     static_cast<char *>(b.dwdown) + at * bytes, kHidden[i]};
    lf__loom_layer layer = {kExperts, kD, kRows, LF_DTYPE_BF16, grad_dtype, expert};
    CUDA(cudaMalloc(&b.table, sizeof expert));
    OK(lf__gemm_open(&b.plan, &layer, b.table));
    CUDA(cudaMalloc(&b.scratch, lf__gemm_scratch_bytes(b.plan)));
}

static void close_plan(Bench &b)
{
    lf__gemm_close(b.plan);
    CUDA(cudaFree(b.table));
    CUDA(cudaFree(b.scratch));
}

/* ---- one operation in both forms ---- */

static std::vector<Product> products(const Bench &b, int op)
{
    std::vector<Product> list;
    int64_t row = 0, base = 0, at = 0, d = kD;
    for (int i = 0; i < kExperts; i++) {
        int64_t r = b.count[i], f = kHidden[i];
        const __nv_bfloat16 *x = b.x + row * d, *dy = b.dy + row * d, *h = b.h + base, *gu = b.gu + 2 * base;
        const __nv_bfloat16 *wgu = b.wgu + 2 * at, *wdown = b.wdown + at;
        switch (op) {
        case LF_GEMM_GU: list.push_back({r, 2 * f, d, x, wgu, d, 1, 1, d, 2 * base}); break;
        case LF_GEMM_Y: list.push_back({r, d, f, h, wdown, f, 1, 1, f, row * d}); break;
        case LF_GEMM_DH: list.push_back({r, f, d, dy, wdown, d, 1, f, 1, base}); break;
        case LF_GEMM_DX: list.push_back({r, d, 2 * f, gu, wgu, 2 * f, 1, d, 1, row * d}); break;
        case LF_GEMM_DW_GU: list.push_back({2 * f, d, r, gu, x, 1, 2 * f, d, 1, 2 * at}); break;
        default: list.push_back({d, f, r, dy, h, 1, d, f, 1, at});
        }
        row += r, base += r * f, at += f * d;
    }
    return list;
}

static bool is_weights(int op) { return op >= LF_GEMM_DW_GU; }
static int out_bytes(const Bench &b, int op) { return is_weights(op) && b.grad_dtype == LF_DTYPE_F32 ? 4 : 2; }
static void *out_of(const Bench &b, int op) { return op == LF_GEMM_DW_GU ? b.dwgu : op == LF_GEMM_DW_DOWN ? b.dwdown : b.out; }

static double flops(const std::vector<Product> &list)
{
    double sum = 0;
    for (const Product &p : list) sum += 2.0 * double(p.m) * double(p.n) * double(p.k);
    return sum;
}

static int64_t elements(const std::vector<Product> &list)
{
    int64_t sum = 0;
    for (const Product &p : list) sum += p.m * p.n;
    return sum;
}

static void run_ours(Bench &b, int op)
{
    const void *a[] = {b.x, b.h, b.dy, b.gu, b.gu, b.dy}, *second[] = {nullptr, nullptr, nullptr, nullptr, b.x, b.h};
    lf__gemm_call call = {b.offset, a[op], second[op], is_weights(op) ? nullptr : b.out, b.scratch, 0};
    OK(lf__gemm_run(b.plan, op, &call, b.stream));
}

static void run_blas(Bench &b, int op)
{
    const float one = 1, zero = 0;
    int bytes = out_bytes(b, op);
    for (const Product &p : products(b, op)) {
        if (!p.m || !p.n) continue;
        void *out = static_cast<char *>(out_of(b, op)) + p.out * bytes;
        if (!p.k) {
            CUDA(cudaMemsetAsync(out, 0, p.m * p.n * bytes, b.stream));
            continue;
        }
        /* column-major: D^T (n, m) = B^T A^T */
        int lda = int(p.ak == 1 ? p.am : p.ak), ldb = int(p.bk == 1 ? p.bn : p.bk);
        int status =
            b.blas.gemm(b.blas.handle, p.bk == 1 ? kOpT : kOpN, p.ak == 1 ? kOpN : kOpT, int(p.n), int(p.m), int(p.k), &one, p.b,
                        kBf16, ldb, p.a, kBf16, lda, &zero, out, bytes == 4 ? kF32 : kBf16, int(p.n), kCompute32F, kDefaultAlgo);
        if (status) {
            fprintf(stderr, "loom_gemm: cublasGemmEx: status %d\n", status);
            exit(1);
        }
    }
}

template <class Run> static cudaGraphExec_t capture(Bench &b, Run run)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(b.stream, cudaStreamCaptureModeThreadLocal));
    run();
    CUDA(cudaStreamEndCapture(b.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static double time_graph(Bench &b, cudaGraphExec_t exec, int n)
{
    float ms;
    CUDA(cudaEventRecord(b.from, b.stream));
    for (int i = 0; i < n; i++) CUDA(cudaGraphLaunch(exec, b.stream));
    CUDA(cudaEventRecord(b.to, b.stream));
    CUDA(cudaEventSynchronize(b.to));
    CUDA(cudaEventElapsedTime(&ms, b.from, b.to));
    return ms / n * 1e-3;
}

static double median(std::vector<double> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

/* ---- checks ---- */

static double compare(Bench &b, int op, int64_t n, double *bad)
{
    double sums[3];
    CUDA(cudaMemsetAsync(b.sums, 0, sizeof sums, b.stream));
    compare_kernel<<<1024, 256, 0, b.stream>>>(out_of(b, op), out_bytes(b, op) == 4, b.want, n, b.sums);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(sums, b.sums, sizeof sums, cudaMemcpyDeviceToHost, b.stream));
    CUDA(cudaStreamSynchronize(b.stream));
    *bad = sums[2];
    return sums[1] > 0 ? sqrt(sums[0] / sums[1]) : sqrt(sums[0]);
}

static void make_reference(Bench &b, int op)
{
    for (const Product &p : products(b, op)) {
        if (!p.m || !p.n) continue;
        dim3 grid(unsigned((p.n + 31) / 32), unsigned((p.m + 31) / 32));
        reference_kernel<<<grid, dim3(32, 32), 0, b.stream>>>(p, b.want);
        CUDA(cudaGetLastError());
    }
}

template <class Run> static bool check(Bench &b, int op, const char *name, const char *who, Run run)
{
    int64_t n = elements(products(b, op));
    /* f32 sums of up to 26,000 products: cuBLAS is off by 1.7e-5 as well; bf16 is its own rounding */
    double bad, limit = out_bytes(b, op) == 4 ? 4e-5 : 3e-3;
    CUDA(cudaMemsetAsync(out_of(b, op), 0xFF, n * out_bytes(b, op), b.stream));
    run();
    double error = compare(b, op, n, &bad);
    bool right = bad == 0 && error <= limit;
    if (!right)
        printf("{\"wrong\": \"%s\", \"case\": \"%s\", \"by\": \"%s\", \"relative_error\": %.3g, \"not_written\": %.0f}\n",
               kOps[op], name, who, error, bad);
    return right;
}

/* ---- a case: check, then time ---- */

struct Result {
    double flop = 0, blas = 0, chosen = 0, best = 0; /* seconds */
};

static Result bench_op(Bench &b, int op, const char *name, bool *right)
{
    int n = lf__gemm_n_choices(b.plan, op), chosen = lf__gemm_choice(b.plan, op);
    std::vector<cudaGraphExec_t> graphs;
    std::vector<std::vector<double>> times(n + 1);
    make_reference(b, op);
    for (int c = 0; c < n; c++) {
        OK(lf__gemm_choose(b.plan, op, c));
        *right &= check(b, op, name, lf__gemm_choice_name(b.plan, op, c), [&] { run_ours(b, op); });
        graphs.push_back(capture(b, [&] { run_ours(b, op); }));
    }
    OK(lf__gemm_choose(b.plan, op, chosen));
    if (b.blas.handle) {
        *right &= check(b, op, name, "cublas", [&] { run_blas(b, op); });
        graphs.push_back(capture(b, [&] { run_blas(b, op); }));
    }
    for (int round = 0; round < b.rounds + 1; round++)
        for (size_t c = 0; c < graphs.size(); c++) {
            double t = time_graph(b, graphs[c], 5);
            if (round) times[c].push_back(t);
        }
    for (cudaGraphExec_t g : graphs) CUDA(cudaGraphExecDestroy(g));
    Result r;
    r.flop = flops(products(b, op));
    r.blas = b.blas.handle ? median(times[n]) : 0;
    r.chosen = median(times[chosen]);
    r.best = 1e9;
    for (int c = 0; c < n; c++) {
        double t = median(times[c]);
        r.best = std::min(r.best, t);
        printf(
            "{\"op\": \"%s\", \"case\": \"%s\", \"grad\": \"%s\", \"kernel\": \"%s\", \"chosen\": %s, \"us\": %.1f, \"tflops\": %.1f, "
            "\"cublas_tflops\": %.1f, \"of_cublas\": %.3f}\n",
            kOps[op], name, b.grad_dtype == LF_DTYPE_F32 ? "f32" : "bf16", lf__gemm_choice_name(b.plan, op, c),
            c == chosen ? "true" : "false", t * 1e6, r.flop / t * 1e-12, r.blas ? r.flop / r.blas * 1e-12 : 0.0, r.blas / t);
    }
    return r;
}

static void print_part(const char *part, const char *name, int grad, const Result &a, const Result &b)
{
    double flop = a.flop + b.flop, blas = a.blas + b.blas, chosen = a.chosen + b.chosen, best = a.best + b.best;
    printf("{\"figure\": \"loom.experts_of_cublas\", \"part\": \"%s\", \"case\": \"%s\", \"grad\": \"%s\", \"tflops\": %.1f, "
           "\"cublas_tflops\": %.1f, \"value\": %.3f, \"value_of_best\": %.3f}\n",
           part, name, grad == LF_DTYPE_F32 ? "f32" : "bf16", flop / chosen * 1e-12, blas ? flop / blas * 1e-12 : 0.0,
           blas / chosen, blas / best);
}

static void time_swiglu(Bench &b, const char *name)
{
    int64_t n = 0;
    for (int i = 0; i < kExperts; i++) n += int64_t(b.count[i]) * kHidden[i];
    __nv_bfloat16 *dgu = static_cast<__nv_bfloat16 *>(b.out), *h = reinterpret_cast<__nv_bfloat16 *>(b.want);
    cudaGraphExec_t forward = capture(b, [&] { OK(lf__gemm_swiglu(b.plan, b.offset, b.gu, h, b.stream)); });
    cudaGraphExec_t backward = capture(b, [&] { OK(lf__gemm_swiglu_back(b.plan, b.offset, b.gu, b.h, dgu, h, b.stream)); });
    std::vector<double> f, g;
    for (int i = 0; i < b.rounds + 1; i++) f.push_back(time_graph(b, forward, 5)), g.push_back(time_graph(b, backward, 5));
    printf("{\"op\": \"swiglu\", \"case\": \"%s\", \"forward_us\": %.1f, \"forward_tb_s\": %.2f, \"backward_us\": %.1f, "
           "\"backward_tb_s\": %.2f}\n",
           name, median(f) * 1e6, n * 6 / median(f) * 1e-12, median(g) * 1e6, n * 12 / median(g) * 1e-12);
    CUDA(cudaGraphExecDestroy(forward));
    CUDA(cudaGraphExecDestroy(backward));
}

/* Everything a layer's experts do in one step, in one graph, with the chosen kernels; cuBLAS takes our SwiGLU. */
static void time_layer(Bench &b, const char *name)
{
    __nv_bfloat16 *dgu = static_cast<__nv_bfloat16 *>(b.out), *h = reinterpret_cast<__nv_bfloat16 *>(b.want);
    double median_s[2] = {0, 0};
    for (int who = 0; who < (b.blas.handle ? 2 : 1); who++) {
        auto gemm = [&](int op) { who ? run_blas(b, op) : run_ours(b, op); };
        cudaGraphExec_t exec = capture(b, [&] {
            gemm(LF_GEMM_GU);
            OK(lf__gemm_swiglu(b.plan, b.offset, b.gu, h, b.stream));
            for (int op : {LF_GEMM_Y, LF_GEMM_DH}) gemm(op);
            OK(lf__gemm_swiglu_back(b.plan, b.offset, b.gu, b.h, dgu, h, b.stream));
            for (int op : {LF_GEMM_DW_DOWN, LF_GEMM_DX, LF_GEMM_DW_GU}) gemm(op);
        });
        std::vector<double> times;
        for (int i = 0; i < b.rounds + 1; i++) times.push_back(time_graph(b, exec, 5));
        median_s[who] = median(times);
        CUDA(cudaGraphExecDestroy(exec));
    }
    printf("{\"op\": \"layer\", \"case\": \"%s\", \"us\": %.1f, \"cublas_us\": %.1f, \"of_cublas\": %.3f}\n", name,
           median_s[0] * 1e6, median_s[1] * 1e6, median_s[1] / median_s[0]);
}

static bool bench_case(Bench &b, const char *name, std::vector<int32_t> count, int grad_dtype)
{
    int32_t offset[kExperts + 1] = {0};
    bool right = true;
    b.count = count;
    for (int i = 0; i < kExperts; i++) offset[i + 1] = offset[i] + count[i];
    CUDA(cudaMemcpy(b.offset, offset, sizeof offset, cudaMemcpyHostToDevice));
    open_plan(b, grad_dtype);
    Result r[LF_GEMM_N_OPS];
    bool weights_only = grad_dtype == LF_DTYPE_F32; /* the others do not depend on it */
    for (int op = weights_only ? LF_GEMM_DW_GU : 0; op < LF_GEMM_N_OPS; op++) r[op] = bench_op(b, op, name, &right);
    if (!weights_only) {
        time_swiglu(b, name);
        time_layer(b, name);
        print_part("forward", name, grad_dtype, r[LF_GEMM_GU], r[LF_GEMM_Y]);
        print_part("dx", name, grad_dtype, r[LF_GEMM_DH], r[LF_GEMM_DX]);
    }
    print_part("dw", name, grad_dtype, r[LF_GEMM_DW_GU], r[LF_GEMM_DW_DOWN]);
    close_plan(b);
    fflush(stdout);
    return right;
}

/* Row counts that add up to kRows: weights drawn unevenly, then the first few experts as given. */
static std::vector<int32_t> draw_counts(uint32_t seed, std::vector<std::pair<int, int>> fixed)
{
    std::vector<int32_t> count(kExperts, -1);
    int left = kRows, last = 0;
    for (auto [expert, rows] : fixed) count[expert] = rows, left -= rows;
    double weight[kExperts], sum = 0;
    for (int i = 0; i < kExperts; i++) {
        seed = seed * 1664525u + 1013904223u;
        weight[i] = count[i] < 0 ? 0.3 + (seed >> 8) * 0x1p-24 : 0;
        sum += weight[i];
    }
    int share = left;
    for (int i = 0; i < kExperts; i++)
        if (count[i] < 0) count[i] = int(share * weight[i] / sum), left -= count[i], last = i;
    count[last] += left;
    return count;
}

int main(int argc, char **argv)
{
    Bench b = {};
    cudaDeviceProp prop;
    CUDA(cudaGetDeviceProperties(&prop, 0));
    b.rounds = argc > 1 ? std::max(1, int(strtol(argv[1], nullptr, 10))) : 7;
    make_data(b);
    b.blas = open_blas(b.stream);
    printf("{\"device\": \"%s\", \"rows\": %d, \"experts\": %d, \"d\": %d}\n", prop.name, kRows, kExperts, kD);
    std::vector<int32_t> even(kExperts, kRows / kExperts), uneven = draw_counts(7, {});
    std::vector<int32_t> skewed = draw_counts(11, {{8, kRows * 2 / 5}, {0, 0}, {5, 0}, {15, 0}, {3, 1}});
    bool right = true;
    for (int grad : {LF_DTYPE_BF16, LF_DTYPE_F32}) {
        right &= bench_case(b, "even", even, grad);
        right &= bench_case(b, "uneven", uneven, grad);
        right &= bench_case(b, "skewed", skewed, grad);
    }
    printf("{\"right\": %s}\n", right ? "true" : "false");
    return right ? 0 : 1;
}
