/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' products on CUDA through the public calls against float64: unequal sizes, experts without rows, poisoned outputs,
 * graphs whose counts change between replays, streams at once. Kernels that are not the first choice: t_grouped_gemm. */
#include "../experts_problem.h"
#include "cuda_graph.h"
#include "loom_cuda_fixture.h"

/* A problem and its outputs on the device. */
typedef struct copy_of {
    void *w_gu, *w_down, *xs, *dys;
    int32_t *offset;
    void *out[N_OUTPUTS];
    lf_experts *e;
    int32_t keep_h;
} copy_of;

/* NULL where there is nothing: callers have no address then. */
static void *up_some(const void *from, size_t bytes) { return bytes ? up(from, bytes) : NULL; }

static void reset_output(const experts_problem *p, copy_of *c, int32_t accumulate)
{
    experts_output o = make_output(p, accumulate);
    void *from[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
    output_sizes(p, n);
    list_output(&o, from);
    for (int32_t i = 0; i < N_OUTPUTS; i++) {
        const size_t bytes = bytes_of(n[i], output_dtype(p, i));
        if (!c->out[i]) c->out[i] = up_some(from[i], bytes);
        else CHECK_OK(lf_copy(gpu, c->out[i], from[i], bytes, NULL));
    }
    free_output(&o);
}

static void set_offset(const experts_problem *p, const copy_of *c)
{
    CHECK_OK(lf_copy(gpu, c->offset, p->offset, sizeof(int32_t) * ((size_t)p->n_experts + 1), NULL));
}

static void upload(experts_problem *p, copy_of *c, int32_t accumulate, int32_t trained)
{
    const size_t rows = bytes_of(p->max_rows * p->d, p->dtype), weights = bytes_of(p->n_weight, p->dtype);
    *c = (copy_of){.keep_h = p->keep_h, .w_gu = up(p->w_gu, 2 * weights), .w_down = up(p->w_down, weights)};
    c->xs = up_some(p->xs, rows), c->dys = up_some(p->dys, rows);
    c->offset = up(p->offset, sizeof(int32_t) * ((size_t)p->n_experts + 1));
    reset_output(p, c, accumulate);
    lf_status rc = open_experts(&c->e, gpu, p, c->w_gu, c->w_down, c->out[6], c->out[7], trained);
    if (rc == LF_ERR_UNSUPPORTED && strstr(lf_error_text(), "CUTLASS")) SKIP("%s", lf_error_text());
    CHECK_OK(rc);
    p->sum_error = 4e-6; /* tensor cores add in an order and to a precision of their own */
}

static experts_output download(const experts_problem *p, const copy_of *c)
{
    experts_output o = make_output(p, 0);
    void *to[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
    output_sizes(p, n);
    list_output(&o, to);
    for (int32_t i = 0; i < N_OUTPUTS; i++) CHECK_OK(lf_copy(gpu, to[i], c->out[i], bytes_of(n[i], output_dtype(p, i)), NULL));
    return o;
}

static lf_status forward(const copy_of *c, lf_stream *on)
{
    return lf_experts_forward(c->e, on, c->offset, c->xs, c->out[0], c->out[1], c->out[2]);
}

static lf_status backward(const copy_of *c, lf_stream *on, int32_t accumulate)
{
    const void *h = c->keep_h ? c->out[1] : NULL;
    return lf_experts_backward(c->e, on, c->offset, c->xs, c->out[0], h, c->dys, c->out[3], c->out[4], c->out[5], accumulate);
}

/* ---- against float64 -------------------------------------------------------------------------------------------------- */

static const struct shape {
    int32_t n_experts, d;
    int64_t spare;
    int32_t hidden[8], count[8];
} shapes[] = {
    {6, 136, 26, {8, 264, 72, 520, 200, 136}, {0, 1, 131, 300, 57, 0}}, /* counts of 0 and 1, no multiple of any tile */
    {6, 136, 3, {8, 264, 72, 520, 200, 136}, {1, 0, 0, 0, 643, 1}},     /* one expert has nearly all rows */
    {3, 8, 0, {64, 128, 8}, {0, 257, 0}},                               /* all of them */
    {4, 136, 9, {16, 40, 8, 24}, {0, 0, 0, 0}},                         /* no rows */
    {2, 16, 0, {24, 8}, {0, 0}},                                        /* no room for rows either */
    {1, 8, 0, {8}, {1}},
    {8, 264, 0, {640, 128, 256, 384, 136, 512, 8, 264}, {257, 129, 128, 127, 500, 1, 255, 100}}, /* tiles enough for a queue */
};

static void check_shape(const struct shape *s, int32_t grad_dtype, int32_t accumulate)
{
    experts_problem p;
    copy_of c;
    make_experts(&p, s->n_experts, s->hidden, s->count, s->d, s->spare, LF_DTYPE_BF16, grad_dtype);
    upload(&p, &c, accumulate, 1);
    lf_stream *on = next_stream();
    CHECK_OK(forward(&c, on));
    CHECK_OK(backward(&c, on, accumulate));
    CHECK_OK(lf_stream_sync(on));
    experts_output first = download(&p, &c);
    check_forward(&p, &first);
    check_backward(&p, &first, first.gu, accumulate, 1);
    reset_output(&p, &c, accumulate);
    CHECK_OK(forward(&c, on));
    CHECK_OK(backward(&c, on, accumulate));
    CHECK_OK(lf_stream_sync(on));
    experts_output again = download(&p, &c);
    check_same_output(&p, &first, &again);
    p.keep_h = c.keep_h = 1;
    reset_output(&p, &c, accumulate);
    CHECK_OK(forward(&c, on));
    CHECK_OK(backward(&c, on, accumulate));
    CHECK_OK(lf_stream_sync(on));
    experts_output kept = download(&p, &c);
    check_forward(&p, &kept);
    check_backward(&p, &kept, kept.gu, accumulate, 1);
    check_same_but_dh(&p, &first, &kept);
    lf_experts_close(c.e);
    free_output(&first), free_output(&again), free_output(&kept);
    free_experts(&p);
    release();
}

static void check_all(int32_t grad_dtype, int32_t accumulate)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) check_shape(&shapes[i], grad_dtype, accumulate);
}

TEST(cuda_experts_write_bf16_gradients) { check_all(LF_DTYPE_BF16, 0); }
TEST(cuda_experts_write_f32_gradients) { check_all(LF_DTYPE_F32, 0); }
TEST(cuda_experts_add_to_bf16_gradients) { check_all(LF_DTYPE_BF16, 1); }
TEST(cuda_experts_add_to_f32_gradients) { check_all(LF_DTYPE_F32, 1); }

TEST(cuda_experts_without_gradients_leave_weights_alone)
{
    set_up();
    experts_problem p;
    copy_of c;
    make_experts(&p, 6, shapes[0].hidden, shapes[0].count, 136, 5, LF_DTYPE_BF16, LF_DTYPE_F32);
    upload(&p, &c, 0, 0);
    CHECK_OK(forward(&c, NULL));
    CHECK_OK(backward(&c, NULL, 0));
    experts_output o = download(&p, &c);
    check_backward(&p, &o, o.gu, 0, 0);
    lf_experts_close(c.e);
    free_output(&o);
    free_experts(&p);
    release();
}

/* As many experts as there may be, with a handful of rows each: the widest scans and the most scratch. */
TEST(cuda_experts_as_many_as_there_may_be)
{
    set_up();
    int32_t hidden[LF_MAX_EXPERTS], count[LF_MAX_EXPERTS];
    for (int32_t i = 0; i < LF_MAX_EXPERTS; i++) {
        hidden[i] = 8 + 8 * (int32_t)lf__rng_below(&rng, 5);
        count[i] = (int32_t)lf__rng_below(&rng, 6);
    }
    experts_problem p;
    copy_of c;
    make_experts(&p, LF_MAX_EXPERTS, hidden, count, 40, 2, LF_DTYPE_BF16, LF_DTYPE_F32);
    upload(&p, &c, 0, 1);
    CHECK_OK(forward(&c, NULL));
    CHECK_OK(backward(&c, NULL, 0));
    experts_output o = download(&p, &c);
    check_forward(&p, &o);
    check_backward(&p, &o, o.gu, 0, 1);
    lf_experts_close(c.e);
    free_output(&o);
    free_experts(&p);
    release();
}

/* Saturated gates: exp overflows there, and nothing may become NaN. dgu takes the place of gu. */
TEST(cuda_experts_saturated_gates_in_place)
{
    set_up();
    experts_problem p;
    copy_of c;
    make_experts(&p, 6, shapes[0].hidden, shapes[0].count, 136, 0, LF_DTYPE_BF16, LF_DTYPE_BF16);
    for (int64_t i = 0; i < 2 * p.n_weight; i += 3) put_value(p.w_gu, i, p.dtype, (float)(60 * get_value(p.w_gu, i, p.dtype)));
    upload(&p, &c, 0, 1);
    CHECK_OK(forward(&c, NULL));
    experts_output before = download(&p, &c), o;
    c.out[3] = c.out[0];
    CHECK_OK(backward(&c, NULL, 0));
    o = download(&p, &c);
    check_forward(&p, &before);
    check_backward(&p, &o, before.gu, 0, 1);
    lf_experts_close(c.e);
    free_output(&o), free_output(&before);
    free_experts(&p);
    release();
}

/* ---- graphs, streams -------------------------------------------------------------------------------------------------- */

/* One captured step obeys whatever counts lie in device memory when it runs; the stream it was captured on does other work. */
TEST(cuda_experts_replay_with_other_counts)
{
    set_up();
    find_driver();
    static const int32_t counts[][6] = {
        {1, 0, 0, 0, 643, 1}, {0, 1, 131, 300, 57, 0}, {0}, {100, 100, 100, 100, 100, 100}, {0, 0, 0, 645, 0, 0}};
    lf_stream *other;
    CHECK_OK(lf_stream_open(gpu, 0, &other));
    experts_problem p, noise;
    copy_of c, n;
    make_experts(&p, 6, shapes[0].hidden, shapes[1].count, 136, 26, LF_DTYPE_BF16, LF_DTYPE_F32);
    make_experts(&noise, 6, shapes[0].hidden, shapes[0].count, 136, 0, LF_DTYPE_BF16, LF_DTYPE_BF16);
    p.keep_h = 1;
    upload(&p, &c, 0, 1);
    upload(&noise, &n, 0, 1);
    CHECK_OK(forward(&n, stream)); /* kernels are loaded when first used */
    CHECK_OK(backward(&n, stream, 0));
    CHECK_OK(lf_stream_sync(stream));
    begin_capture(stream);
    lf_status rc = forward(&c, stream);
    if (rc == LF_OK) rc = backward(&c, stream, 0);
    void *exec = end_capture(stream, rc);
    for (size_t i = 0; i < LF_COUNT(counts); i++) {
        for (int32_t j = 0; j < 6; j++) p.offset[j + 1] = p.offset[j] + counts[i][j];
        set_offset(&p, &c);
        reset_output(&p, &c, 0);
        CHECK_EQ(driver.launch(exec, lf_stream_native(other)), 0);
        CHECK_OK(forward(&n, stream));
        CHECK_OK(backward(&n, stream, 0));
        CHECK_OK(lf_stream_sync(other));
        CHECK_OK(lf_stream_sync(stream));
        experts_output o = download(&p, &c);
        check_forward(&p, &o);
        check_backward(&p, &o, o.gu, 0, 1);
        free_output(&o);
    }
    CHECK_EQ(driver.free_exec(exec), 0);
    lf_experts_close(c.e), lf_experts_close(n.e);
    lf_stream_close(other);
    free_experts(&p), free_experts(&noise);
    release();
}

/* One plan on two streams: neither uses the other's scratch. */
TEST(cuda_experts_on_two_streams_at_once)
{
    set_up();
    lf_stream *other = NULL;
    CHECK_OK(lf_stream_open(gpu, 0, &other));
    experts_problem p;
    copy_of a, b;
    make_experts(&p, 8, shapes[6].hidden, shapes[6].count, 264, 0, LF_DTYPE_BF16, LF_DTYPE_F32);
    upload(&p, &a, 0, 0);
    b = a;
    memset(b.out, 0, sizeof b.out);
    reset_output(&p, &b, 0);
    for (int32_t i = 0; i < 50; i++) {
        CHECK_OK(forward(&a, stream));
        CHECK_OK(forward(&b, other));
        CHECK_OK(backward(&a, stream, 0));
        CHECK_OK(backward(&b, other, 0));
    }
    CHECK_OK(lf_stream_sync(other));
    CHECK_OK(lf_stream_sync(stream));
    experts_output x = download(&p, &a), y = download(&p, &b);
    check_forward(&p, &x);
    check_backward(&p, &x, x.gu, 0, 0);
    check_same_output(&p, &x, &y);
    lf_experts_close(a.e);
    lf_stream_close(other);
    free_output(&x), free_output(&y);
    free_experts(&p);
    release();
}

/* ---- errors ----------------------------------------------------------------------------------------------------------- */

TEST(cuda_experts_name_what_is_wrong)
{
    set_up();
    if (lf__device_is_cpu(gpu)) SKIP("CUDA's own limits");
    const int32_t hidden[1] = {8}, odd[1] = {12};
    char *memory = device(4096, 0);
    const void *w[1] = {memory}, *off[1] = {memory + 8};
    void *dw[1] = {memory}, *dw_off[1] = {memory + 2};
    lf_experts *e;
    lf_experts_options good;
    CHECK_OK(lf_experts_options_init(&good));
    good.n_experts = 1, good.d = 8, good.max_rows = 4, good.hidden = hidden, good.w_gu = w, good.w_down = w;
    good.dw_gu = dw, good.dw_down = dw;
    lf_status rc = lf_experts_open(&e, gpu, &good);
    if (rc == LF_ERR_UNSUPPORTED && strstr(lf_error_text(), "CUTLASS")) SKIP("%s", lf_error_text());
    CHECK_OK(rc);
    lf_experts_close(e);
#define REFUSED(field_, value_, status_, text_)               \
    do {                                                      \
        lf_experts_options o_ = good;                         \
        o_.field_ = value_;                                   \
        CHECK_STATUS(lf_experts_open(&e, gpu, &o_), status_); \
        CHECK_HAS(lf_error_text(), text_);                    \
        CHECK(e == NULL);                                     \
    } while (0)
    REFUSED(dtype, LF_DTYPE_F32, LF_ERR_UNSUPPORTED, "experts in f32 on CUDA");
    REFUSED(d, 12, LF_ERR_INVALID, "d is 12, expected a multiple of 8");
    REFUSED(hidden, odd, LF_ERR_INVALID, "hidden size of expert 0 is 12");
    REFUSED(w_gu, off, LF_ERR_INVALID, "w_gu and w_down of expert 0");
    REFUSED(w_down, off, LF_ERR_INVALID, "w_gu and w_down of expert 0");
    REFUSED(dw_gu, dw_off, LF_ERR_INVALID, "dw_gu and dw_down of expert 0");
    REFUSED(dw_down, dw_off, LF_ERR_INVALID, "dw_gu and dw_down of expert 0");
    CHECK_OK(lf_experts_open(&e, gpu, &good));
    const int32_t *offset = (const int32_t *)memory;
    char *bad = memory + 8;
    CHECK_STATUS(lf_experts_forward(e, NULL, offset, bad, memory, memory, memory), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "xs at");
    CHECK_STATUS(lf_experts_forward(e, NULL, offset, memory, memory, memory, bad), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "ys at");
    CHECK_STATUS(lf_experts_backward(e, NULL, offset, memory, memory, NULL, memory, memory, bad, memory, 0), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "dh at");
    CHECK_STATUS(lf_experts_backward(e, NULL, offset, memory, memory, bad, memory, memory, memory, memory, 0), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "h at");
    lf_experts_close(e);
    release();
}

LF_TEST_MAIN
