/* SPDX-License-Identifier: Apache-2.0 */
/* One layer of SwiGLU experts with rows, and every result of lf_experts_* checked against float64. Each stage starts from what the
 * stage before it really wrote, so a tolerance covers one rounding and one sum. Used on the CPU and on GPUs; memory is the host's. */
#ifndef LF_EXPERTS_PROBLEM_H
#define LF_EXPERTS_PROBLEM_H

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/loom.h"

enum { UNTOUCHED = 0xff }; /* fills outputs, and rows that must not be read: NaN in either dtype */

typedef struct experts_problem {
    int32_t n_experts, d, dtype, grad_dtype;
    int64_t max_rows, n_weight, most; /* n_weight: elements of all w_down; most: the largest hidden size */
    const int32_t *hidden;
    int32_t offset[LF_MAX_EXPERTS + 1];
    int32_t keep_h;   /* the backward is given the forward's h, so dh stays dh; 0, from make_experts: it makes h again */
    double sum_error; /* of a sum in f32, relative to the sum of its terms' sizes */
    void *w_gu, *w_down, *xs, *dys, *dw_gu, *dw_down; /* dw_*: what the gradients hold before they are added to */
} experts_problem;

typedef struct experts_output {
    void *gu, *h, *ys, *dgu, *dh, *dxs, *dw_gu, *dw_down;
} experts_output;

static inline size_t bytes_of(int64_t n, int32_t dtype) { return (size_t)n * lf_dtype_bytes(dtype); }

static inline void put_value(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

static inline double get_value(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? (double)((const float *)base)[i] : (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static inline void *filled(int64_t n, int32_t dtype, int32_t byte)
{
    void *p = lf__alloc_aligned(bytes_of(n, dtype) + 16, 64);
    CHECK(p != NULL);
    memset(p, byte, bytes_of(n, dtype));
    return p;
}

static inline void *random_values(lf__rng *rng, int64_t n, int64_t room, int32_t dtype, double size)
{
    void *p = filled(room, dtype, UNTOUCHED);
    for (int64_t i = 0; i < n; i++) put_value(p, i, dtype, (float)((2 * lf__rng_unit(rng) - 1) * size));
    return p;
}

/* count: rows of each expert; spare: rows behind the last expert's that exist and are NaN. */
static inline void make_experts(experts_problem *p, int32_t n_experts, const int32_t *hidden, const int32_t *count, int32_t d,
                                int64_t spare, int32_t dtype, int32_t grad_dtype)
{
    lf__rng rng;
    lf__rng_init(&rng, 11, (uint32_t)n_experts, (uint32_t)d, (uint32_t)spare);
    *p = (experts_problem){.n_experts = n_experts, .d = d, .dtype = dtype, .grad_dtype = grad_dtype, .hidden = hidden};
    p->sum_error = 1e-6;
    for (int32_t i = 0; i < n_experts; i++) {
        p->offset[i + 1] = p->offset[i] + count[i];
        p->n_weight += (int64_t)hidden[i] * d;
        if (hidden[i] > p->most) p->most = hidden[i];
    }
    const int64_t rows = p->offset[n_experts];
    p->max_rows = rows + spare;
    p->w_gu = random_values(&rng, 2 * p->n_weight, 2 * p->n_weight, dtype, 0.6);
    p->w_down = random_values(&rng, p->n_weight, p->n_weight, dtype, 0.6);
    p->xs = random_values(&rng, rows * d, p->max_rows * d, dtype, 1);
    p->dys = random_values(&rng, rows * d, p->max_rows * d, dtype, 1);
    p->dw_gu = random_values(&rng, 2 * p->n_weight, 2 * p->n_weight, grad_dtype, 3);
    p->dw_down = random_values(&rng, p->n_weight, p->n_weight, grad_dtype, 3);
}

static inline void free_experts(experts_problem *p)
{
    lf__free(p->w_gu), lf__free(p->w_down), lf__free(p->xs), lf__free(p->dys), lf__free(p->dw_gu), lf__free(p->dw_down);
}

/* Elements of each output, in the order of experts_output. */
enum { N_OUTPUTS = 8 };
static inline void output_sizes(const experts_problem *p, int64_t n[N_OUTPUTS])
{
    const int64_t region = p->max_rows * p->most, rows = p->max_rows * p->d;
    const int64_t all[N_OUTPUTS] = {2 * region, region, rows, 2 * region, region, rows, 2 * p->n_weight, p->n_weight};
    memcpy(n, all, sizeof all);
}
static inline int32_t output_dtype(const experts_problem *p, int32_t i) { return i < 6 ? p->dtype : p->grad_dtype; }

static inline experts_output make_output(const experts_problem *p, int32_t accumulate)
{
    void *out[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
    output_sizes(p, n);
    for (int32_t i = 0; i < N_OUTPUTS; i++) out[i] = filled(n[i], output_dtype(p, i), UNTOUCHED);
    if (accumulate) {
        memcpy(out[6], p->dw_gu, bytes_of(n[6], p->grad_dtype));
        memcpy(out[7], p->dw_down, bytes_of(n[7], p->grad_dtype));
    }
    return (experts_output){out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]};
}

static inline void list_output(const experts_output *o, void *out[N_OUTPUTS])
{
    void *all[N_OUTPUTS] = {o->gu, o->h, o->ys, o->dgu, o->dh, o->dxs, o->dw_gu, o->dw_down};
    memcpy(out, all, sizeof all);
}

static inline void free_output(experts_output *o)
{
    void *out[N_OUTPUTS];
    list_output(o, out);
    for (int32_t i = 0; i < N_OUTPUTS; i++) lf__free(out[i]);
}

static inline void check_same_output(const experts_problem *p, const experts_output *a, const experts_output *b)
{
    void *x[N_OUTPUTS], *y[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
    output_sizes(p, n);
    list_output(a, x), list_output(b, y);
    for (int32_t i = 0; i < N_OUTPUTS; i++) CHECK(memcmp(x[i], y[i], bytes_of(n[i], output_dtype(p, i))) == 0);
}

/* Whether h was kept or made again, everything but dh, which h takes the place of then. */
static inline void check_same_but_dh(const experts_problem *p, const experts_output *a, const experts_output *b)
{
    experts_output with = *b;
    with.dh = a->dh;
    check_same_output(p, a, &with);
}

/* Open a plan over weights and gradients at these addresses; with `trained` 0 without gradients. */
static inline lf_status open_experts(lf_experts **out, lf_device *device, const experts_problem *p, void *w_gu, void *w_down,
                                     void *dw_gu, void *dw_down, int32_t trained)
{
    const void *gu[LF_MAX_EXPERTS], *down[LF_MAX_EXPERTS];
    void *dgu[LF_MAX_EXPERTS], *ddown[LF_MAX_EXPERTS];
    int64_t at = 0;
    for (int32_t i = 0; i < p->n_experts; at += (int64_t)p->hidden[i++] * p->d) {
        gu[i] = (char *)w_gu + bytes_of(2 * at, p->dtype);
        down[i] = (char *)w_down + bytes_of(at, p->dtype);
        dgu[i] = (char *)dw_gu + bytes_of(2 * at, p->grad_dtype);
        ddown[i] = (char *)dw_down + bytes_of(at, p->grad_dtype);
    }
    lf_experts_options o;
    CHECK_OK(lf_experts_options_init(&o));
    o.n_experts = p->n_experts, o.d = p->d, o.max_rows = p->max_rows, o.hidden = p->hidden;
    o.w_gu = gu, o.w_down = down, o.dtype = p->dtype, o.grad_dtype = p->grad_dtype;
    if (trained) o.dw_gu = dgu, o.dw_down = ddown;
    return lf_experts_open(out, device, &o);
}

/* ---- float64 ---------------------------------------------------------------------------------------------------------- */

static inline double round_off(int32_t dtype) { return dtype == LF_DTYPE_F32 ? 0x1p-23 : 0x1.01p-8; }

/* Element (i, l) of a matrix is value[first + i * row + l * column]. */
typedef struct operand {
    const void *value;
    int32_t dtype;
    int64_t first, row, column;
} operand;

static inline double *to_double(const operand *m, int64_t rows, int64_t columns)
{
    double *out = lf__alloc_array((size_t)(rows * columns) + 1, sizeof *out);
    CHECK(out != NULL);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t l = 0; l < columns; l++)
            out[i * columns + l] = get_value(m->value, m->first + i * m->row + l * m->column, m->dtype);
    return out;
}

/* out (m, n) = a (m, k) b (n, k)^T, size: the same of absolute values. */
static inline void multiply64(double *out, double *size, const operand *a, const operand *b, int64_t m, int64_t n, int64_t k)
{
    double *x = to_double(a, m, k), *y = to_double(b, n, k);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, all = 0;
            for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * y[j * k + l], all += fabs(x[i * k + l] * y[j * k + l]);
            out[i * n + j] = sum;
            size[i * n + j] = all;
        }
    lf__free(x), lf__free(y);
}

/* d (m, n) from element `first` is a b^T, plus `before` where that is given. */
static inline void check_product(const experts_problem *p, const char *what, const void *d, int32_t dtype, int64_t first,
                                 const void *before, const operand *a, const operand *b, int64_t m, int64_t n, int64_t k)
{
    double *want = lf__alloc_array((size_t)(m * n) + 1, 8), *size = lf__alloc_array((size_t)(m * n) + 1, 8);
    CHECK(want && size);
    multiply64(want, size, a, b, m, n, k);
    for (int64_t i = 0; i < m * n; i++) {
        const double got = get_value(d, first + i, dtype), old = before ? get_value(before, first + i, dtype) : 0;
        const double near = fabs(want[i] + old) * round_off(dtype) + p->sum_error * (size[i] + fabs(old)) + 1e-30;
        if (!(fabs(got - want[i] - old) <= near))
            FAIL_("%s: element %lld is %.9g, expected %.9g within %g", what, (long long)(first + i), got, want[i] + old, near);
    }
    lf__free(want), lf__free(size);
}

static inline void check_untouched(const char *what, const void *base, int64_t from, int64_t n, int32_t dtype)
{
    const uint8_t *byte = base;
    for (size_t i = bytes_of(from, dtype); i < bytes_of(n, dtype); i++)
        if (byte[i] != UNTOUCHED) FAIL_("%s: byte %zu behind element %lld was written", what, i, (long long)from);
}

/* Visit experts: rows r from `row` on, region from `base` on, weights from `at` on. */
typedef struct part {
    int64_t r, f, row, base, at;
} part;
static inline part first_part(const experts_problem *p) { return (part){p->offset[1], p->hidden[0], 0, 0, 0}; }
static inline void next_part(const experts_problem *p, part *x, int32_t i)
{
    x->base += x->r * x->f, x->at += x->f * p->d;
    if (i + 1 < p->n_experts) x->row = p->offset[i + 1], x->r = p->offset[i + 2] - p->offset[i + 1], x->f = p->hidden[i + 1];
}

/* h = silu(gate) up from what gu holds. */
static inline void check_h(const experts_problem *p, const char *what, const void *gu, const void *h, const part *x)
{
    for (int64_t r = 0; r < x->r; r++)
        for (int64_t j = 0; j < x->f; j++) {
            const int64_t at = x->base + r * x->f + j, gate = 2 * (x->base + r * x->f) + j;
            const double g = get_value(gu, gate, p->dtype), u = get_value(gu, gate + x->f, p->dtype),
                         got = get_value(h, at, p->dtype);
            const double want = g / (1 + exp(-g)) * u;
            if (!(fabs(got - want) <= fabs(want) * (round_off(p->dtype) + 1e-6 * (1 + fabs(g))) + 1e-30))
                FAIL_("%s: element %lld is %.9g, expected %.9g", what, (long long)at, got, want);
        }
}

static inline void check_forward(const experts_problem *p, const experts_output *o)
{
    const int32_t t = p->dtype;
    part x = first_part(p);
    for (int32_t i = 0; i < p->n_experts; next_part(p, &x, i++)) {
        const operand xs = {p->xs, t, x.row * p->d, p->d, 1}, w_gu = {p->w_gu, t, 2 * x.at, p->d, 1};
        const operand h = {o->h, t, x.base, x.f, 1}, w_down = {p->w_down, t, x.at, x.f, 1};
        check_product(p, "gu", o->gu, t, 2 * x.base, NULL, &xs, &w_gu, x.r, 2 * x.f, p->d);
        check_h(p, "h", o->gu, o->h, &x);
        check_product(p, "ys", o->ys, t, x.row * p->d, NULL, &h, &w_down, x.r, p->d, x.f);
    }
    check_untouched("gu", o->gu, 2 * x.base, 2 * p->max_rows * p->most, t);
    check_untouched("h", o->h, x.base, p->max_rows * p->most, t);
    check_untouched("ys", o->ys, (int64_t)p->offset[p->n_experts] * p->d, p->max_rows * p->d, t);
}

static inline void check_dgu_element(const experts_problem *p, const void *dgu, int64_t at, double dh, double size, double factor,
                                     double factor_size)
{
    const double want = dh * factor, got = get_value(dgu, at, p->dtype), t = round_off(p->dtype);
    const double near = 2.1 * t * fabs(want) + p->sum_error * size * fabs(factor) + 2e-6 * fabs(dh) * factor_size + 1e-30;
    if (!(fabs(got - want) <= near)) FAIL_("dgu: element %lld is %.9g, expected %.9g within %g", (long long)at, got, want, near);
}

/* dh is rounded to dtype before dgu is made from it: two roundings. gu: what the forward wrote. */
static inline void check_dgu(const experts_problem *p, const void *gu, const void *dgu, const part *x)
{
    const operand dys = {p->dys, p->dtype, x->row * p->d, p->d, 1}, w_down = {p->w_down, p->dtype, x->at, 1, x->f};
    double *dh = lf__alloc_array((size_t)(x->r * x->f) + 1, 8), *size = lf__alloc_array((size_t)(x->r * x->f) + 1, 8);
    CHECK(dh && size);
    multiply64(dh, size, &dys, &w_down, x->r, x->f, p->d);
    for (int64_t i = 0; i < x->r * x->f; i++) {
        const int64_t gate = 2 * (x->base + i / x->f * x->f) + i % x->f;
        const double g = get_value(gu, gate, p->dtype), u = get_value(gu, gate + x->f, p->dtype), s = 1 / (1 + exp(-g));
        check_dgu_element(p, dgu, gate, dh[i], size[i], u * s * (1 + g * (1 - s)), fabs(u * s) * (1 + fabs(g)));
        check_dgu_element(p, dgu, gate + x->f, dh[i], size[i], g * s, fabs(g * s) * (1 + fabs(g)));
    }
    lf__free(dh), lf__free(size);
}

/* What dh holds: dys w_down, or h again. */
static inline void check_dh(const experts_problem *p, const void *gu, const void *dh, const part *x)
{
    const operand dys = {p->dys, p->dtype, x->row * p->d, p->d, 1}, w_down = {p->w_down, p->dtype, x->at, 1, x->f};
    if (p->keep_h) check_product(p, "dh", dh, p->dtype, x->base, NULL, &dys, &w_down, x->r, x->f, p->d);
    else check_h(p, "h again", gu, dh, x);
}

/* gu: as the forward wrote it (dgu may have taken its place since). */
static inline void check_backward(const experts_problem *p, const experts_output *o, const void *gu, int32_t accumulate,
                                  int32_t trained)
{
    const int32_t t = p->dtype;
    part x = first_part(p);
    for (int32_t i = 0; i < p->n_experts; next_part(p, &x, i++)) {
        const operand dgu = {o->dgu, t, 2 * x.base, 2 * x.f, 1}, w_gu = {p->w_gu, t, 2 * x.at, 1, p->d};
        const operand dgu_t = {o->dgu, t, 2 * x.base, 1, 2 * x.f}, xs = {p->xs, t, x.row * p->d, 1, p->d};
        const operand dys = {p->dys, t, x.row * p->d, 1, p->d}, h = {p->keep_h ? o->h : o->dh, t, x.base, 1, x.f};
        check_dgu(p, gu, o->dgu, &x);
        check_dh(p, gu, o->dh, &x);
        check_product(p, "dxs", o->dxs, t, x.row * p->d, NULL, &dgu, &w_gu, x.r, p->d, 2 * x.f);
        if (!trained) continue;
        check_product(p, "dw_gu", o->dw_gu, p->grad_dtype, 2 * x.at, accumulate ? p->dw_gu : NULL, &dgu_t, &xs, 2 * x.f, p->d,
                      x.r);
        check_product(p, "dw_down", o->dw_down, p->grad_dtype, x.at, accumulate ? p->dw_down : NULL, &dys, &h, p->d, x.f, x.r);
    }
    if (!p->keep_h) CHECK(memcmp(o->h, o->dh, bytes_of(p->max_rows * p->most, t)) == 0); /* h again: the forward's bits */
    check_untouched("dgu", o->dgu, 2 * x.base, 2 * p->max_rows * p->most, t);
    check_untouched("dh", o->dh, x.base, p->max_rows * p->most, t);
    check_untouched("dxs", o->dxs, (int64_t)p->offset[p->n_experts] * p->d, p->max_rows * p->d, t);
    if (!trained) check_untouched("dw_gu", o->dw_gu, 0, 2 * p->n_weight, p->grad_dtype);
    if (!trained) check_untouched("dw_down", o->dw_down, 0, p->n_weight, p->grad_dtype);
}

#endif
