/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' products on the CPU against float64: unequal sizes, experts without rows, poisoned outputs, threads, streams. */
#include "experts_problem.h"

static lf_device *cpu;
static lf_stream *worker;

static void set_up(void)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (!worker) CHECK_OK(lf_stream_open(cpu, 0, &worker));
    CHECK_OK(lf_loom_set_threads(0));
}

/* ---- against float64 -------------------------------------------------------------------------------------------------- */

static const struct shape {
    int32_t n_experts, d;
    int64_t spare;
    int32_t hidden[6], count[6];
} shapes[] = {
    {6, 40, 5, {8, 264, 72, 130, 33, 1}, {0, 1, 131, 30, 57, 0}}, /* counts of 0 and 1, no multiple of any tile */
    {6, 67, 0, {8, 64, 3, 100, 24, 9}, {1, 0, 0, 0, 143, 1}},     /* nearly all rows with one expert */
    {3, 33, 4, {65, 32, 128}, {0, 97, 0}},                        /* all of them */
    {4, 129, 7, {16, 40, 8, 24}, {0, 0, 0, 0}},                   /* no rows */
    {2, 16, 0, {24, 8}, {0, 0}},                                  /* no room for rows either */
    {1, 1, 1, {1}, {1}},
    {1, 256, 0, {64}, {260}}, /* several tiles in every direction */
};

/* A plan over the problem's weights and the output's gradients. */
static lf_experts *open_on(const experts_problem *p, const experts_output *o, int32_t trained)
{
    lf_experts *e = NULL;
    CHECK_OK(open_experts(&e, cpu, p, p->w_gu, p->w_down, o->dw_gu, o->dw_down, trained));
    CHECK(lf_experts_device(e) == cpu);
    return e;
}

static void run(const experts_problem *p, const experts_output *o, lf_stream *stream, int32_t accumulate, int32_t trained)
{
    lf_experts *e = open_on(p, o, trained);
    CHECK_OK(lf_experts_forward(e, stream, p->offset, p->xs, o->gu, o->h, o->ys));
    const void *h = p->keep_h ? o->h : NULL;
    CHECK_OK(lf_experts_backward(e, stream, p->offset, p->xs, o->gu, h, p->dys, o->dgu, o->dh, o->dxs, accumulate));
    CHECK_OK(lf_stream_sync(stream));
    lf_experts_close(e);
}

static void make_shape(experts_problem *p, const struct shape *s, int32_t dtype, int32_t grad_dtype)
{
    make_experts(p, s->n_experts, s->hidden, s->count, s->d, s->spare, dtype, grad_dtype);
}

static void check_all(int32_t dtype, int32_t grad_dtype)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++)
        for (int32_t accumulate = 0; accumulate <= 1; accumulate++) {
            experts_problem p;
            make_shape(&p, &shapes[i], dtype, grad_dtype);
            experts_output o[2];
            for (p.keep_h = 0; p.keep_h <= 1; p.keep_h++) {
                experts_output *mine = &o[p.keep_h];
                *mine = make_output(&p, accumulate);
                run(&p, mine, i % 2 ? worker : NULL, accumulate, 1);
                check_forward(&p, mine);
                check_backward(&p, mine, mine->gu, accumulate, 1);
            }
            check_same_but_dh(&p, &o[0], &o[1]);
            free_output(&o[0]), free_output(&o[1]);
            free_experts(&p);
        }
}

TEST(experts_f32_match_float64) { check_all(LF_DTYPE_F32, LF_DTYPE_F32); }
TEST(experts_bf16_match_float64) { check_all(LF_DTYPE_BF16, LF_DTYPE_BF16); }
TEST(experts_bf16_with_f32_gradients_match_float64) { check_all(LF_DTYPE_BF16, LF_DTYPE_F32); }
TEST(experts_f32_with_bf16_gradients_match_float64) { check_all(LF_DTYPE_F32, LF_DTYPE_BF16); }

TEST(experts_without_gradients_leave_weights_alone)
{
    set_up();
    experts_problem p;
    make_shape(&p, &shapes[0], LF_DTYPE_BF16, LF_DTYPE_F32);
    for (p.keep_h = 0; p.keep_h <= 1; p.keep_h++) {
        experts_output o = make_output(&p, 0);
        run(&p, &o, NULL, 0, 0);
        check_forward(&p, &o);
        check_backward(&p, &o, o.gu, 0, 0);
        free_output(&o);
    }
    free_experts(&p);
}

/* dgu may be gu: a caller that no longer needs gu saves the larger of the two buffers. */
TEST(experts_backward_over_gu)
{
    set_up();
    for (int32_t i = 0; i < 4; i++) {
        const int32_t dtype = i < 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16;
        experts_problem p;
        make_shape(&p, &shapes[0], dtype, dtype);
        p.keep_h = i % 2;
        experts_output o = make_output(&p, 0);
        lf_experts *e = open_on(&p, &o, 1);
        CHECK_OK(lf_experts_forward(e, NULL, p.offset, p.xs, o.gu, o.h, o.ys));
        const int64_t n = 2 * p.max_rows * p.most;
        memcpy(o.dgu, o.gu, bytes_of(n, dtype));
        const void *h = p.keep_h ? o.h : NULL;
        CHECK_OK(lf_experts_backward(e, NULL, p.offset, p.xs, o.dgu, h, p.dys, o.dgu, o.dh, o.dxs, 0));
        check_backward(&p, &o, o.gu, 0, 1);
        lf_experts_close(e);
        free_output(&o);
        free_experts(&p);
    }
}

/* One plan serves any routing. */
TEST(experts_take_other_counts)
{
    set_up();
    experts_problem p;
    make_shape(&p, &shapes[0], LF_DTYPE_F32, LF_DTYPE_F32);
    const int32_t other[][6] = {{0, 0, 0, 0, 0, 219}, {40, 40, 40, 40, 40, 19}, {0, 1, 131, 30, 57, 0}};
    experts_output plan_of = make_output(&p, 0);
    lf_experts *e = open_on(&p, &plan_of, 1);
    for (size_t i = 0; i < LF_COUNT(other); i++) {
        experts_output o = make_output(&p, 0);
        for (int32_t j = 0; j < 6; j++) p.offset[j + 1] = p.offset[j] + other[i][j];
        CHECK_OK(lf_experts_forward(e, worker, p.offset, p.xs, o.gu, o.h, o.ys));
        CHECK_OK(lf_experts_backward(e, worker, p.offset, p.xs, o.gu, NULL, p.dys, o.dgu, o.dh, o.dxs, 0));
        CHECK_OK(lf_stream_sync(worker));
        experts_output seen = o;
        seen.dw_gu = plan_of.dw_gu, seen.dw_down = plan_of.dw_down;
        check_forward(&p, &seen);
        check_backward(&p, &seen, o.gu, 0, 1);
        free_output(&o);
    }
    lf_experts_close(e);
    free_output(&plan_of);
    free_experts(&p);
}

TEST(experts_same_bits_for_any_threads)
{
    set_up();
    for (int32_t grad_dtype = LF_DTYPE_F32; grad_dtype <= LF_DTYPE_BF16; grad_dtype++)
        for (size_t i = 0; i < LF_COUNT(shapes); i++) {
            experts_problem p;
            make_shape(&p, &shapes[i], i % 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16, grad_dtype);
            experts_output first = make_output(&p, 1);
            run(&p, &first, NULL, 1, 1);
            for (int32_t threads = 1; threads <= 3; threads++) {
                experts_output o = make_output(&p, 1);
                CHECK_OK(lf_loom_set_threads(threads));
                run(&p, &o, threads == 2 ? worker : NULL, 1, 1);
                check_same_output(&p, &first, &o);
                free_output(&o);
            }
            free_output(&first);
            free_experts(&p);
        }
}

/* ---- errors ----------------------------------------------------------------------------------------------------------- */

#define REFUSED(field_, value_, status_, text_)                \
    do {                                                       \
        lf_experts_options o_ = good;                          \
        lf_experts *e_ = (lf_experts *)&o_;                    \
        o_.field_ = value_;                                    \
        CHECK_STATUS(lf_experts_open(&e_, cpu, &o_), status_); \
        CHECK_HAS(lf_error_text(), text_);                     \
        CHECK(e_ == NULL);                                     \
    } while (0)

TEST(experts_open_names_what_is_wrong)
{
    set_up();
    static float weight[8];
    const int32_t hidden[2] = {4, 4}, none[2] = {4, 0}, huge[2] = {INT32_MAX, 4};
    const void *w[2] = {weight, weight}, *hole[2] = {weight, NULL};
    void *dw[2] = {weight, weight}, *dw_hole[2] = {NULL, weight};
    lf_experts_options good;
    CHECK_STATUS(lf_experts_options_init(NULL), LF_ERR_INVALID);
    CHECK_OK(lf_experts_options_init(&good));
    CHECK(good.dtype == LF_DTYPE_BF16 && good.grad_dtype == LF_DTYPE_BF16 && good.size == sizeof good && !good.dw_gu);
    good.n_experts = 2, good.d = 8, good.max_rows = 4, good.hidden = hidden, good.w_gu = w, good.w_down = w;
    good.dw_gu = dw, good.dw_down = dw;
    REFUSED(size, 8, LF_ERR_INVALID, "size is 8");
    REFUSED(n_experts, 0, LF_ERR_INVALID, "n_experts is 0");
    REFUSED(n_experts, 257, LF_ERR_INVALID, "n_experts is 257");
    REFUSED(d, 0, LF_ERR_INVALID, "d is 0");
    REFUSED(max_rows, -1, LF_ERR_INVALID, "max_rows is -1");
    REFUSED(max_rows, (int64_t)1 << 31, LF_ERR_INVALID, "max_rows is 2147483648");
    REFUSED(dtype, LF_DTYPE_F16, LF_ERR_INVALID, "dtype is f16");
    REFUSED(grad_dtype, LF_DTYPE_F64, LF_ERR_INVALID, "grad_dtype is f64");
    REFUSED(hidden, NULL, LF_ERR_INVALID, "hidden");
    REFUSED(hidden, none, LF_ERR_INVALID, "hidden size of expert 1 is 0");
    REFUSED(hidden, huge, LF_ERR_INVALID, "hidden size of expert 0");
    REFUSED(w_gu, NULL, LF_ERR_INVALID, "w_gu");
    REFUSED(w_gu, hole, LF_ERR_INVALID, "w_gu or w_down of expert 1 is NULL");
    REFUSED(w_down, NULL, LF_ERR_INVALID, "w_down");
    REFUSED(w_down, hole, LF_ERR_INVALID, "w_gu or w_down of expert 1 is NULL");
    REFUSED(dw_gu, NULL, LF_ERR_INVALID, "dw_gu is NULL and dw_down given");
    REFUSED(dw_down, NULL, LF_ERR_INVALID, "dw_gu is given and dw_down NULL");
    REFUSED(dw_gu, dw_hole, LF_ERR_INVALID, "dw_gu or dw_down of expert 0 is NULL");
    REFUSED(dw_down, dw_hole, LF_ERR_INVALID, "dw_gu or dw_down of expert 0 is NULL");
    lf_experts *e;
    CHECK_STATUS(lf_experts_open(NULL, cpu, &good), LF_ERR_INVALID);
    CHECK_STATUS(lf_experts_open(&e, NULL, &good), LF_ERR_INVALID);
    CHECK_STATUS(lf_experts_open(&e, cpu, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "options is NULL");
    CHECK(lf_experts_device(NULL) == NULL);
    lf_experts_close(NULL);
}

TEST(experts_open_survives_no_memory)
{
    set_up();
    experts_problem p;
    make_shape(&p, &shapes[0], LF_DTYPE_BF16, LF_DTYPE_F32);
    experts_output o = make_output(&p, 0);
    lf_experts *e = NULL;
    int32_t failures = 0;
    for (int64_t n = 1; !e; n++) {
        lf__alloc_fail_at(n);
        lf_status rc = open_experts(&e, cpu, &p, p.w_gu, p.w_down, o.dw_gu, o.dw_down, 1);
        lf__alloc_fail_at(0);
        CHECK_EQ(rc, e ? LF_OK : LF_ERR_NOMEM);
        failures += rc < 0;
    }
    CHECK_EQ(failures, 2);
    lf_experts_close(e);
    free_output(&o);
    free_experts(&p);
}

TEST(experts_calls_name_what_is_wrong)
{
    set_up();
    experts_problem p;
    make_shape(&p, &shapes[0], LF_DTYPE_BF16, LF_DTYPE_F32);
    experts_output o = make_output(&p, 0);
    lf_experts *e = open_on(&p, &o, 1);
#define FORWARD(e_, offset_, xs_, gu_, h_, ys_, text_)                                      \
    CHECK_STATUS(lf_experts_forward(e_, NULL, offset_, xs_, gu_, h_, ys_), LF_ERR_INVALID); \
    CHECK_HAS(lf_error_text(), text_)
    FORWARD(NULL, p.offset, p.xs, o.gu, o.h, o.ys, "experts is NULL");
    FORWARD(e, NULL, p.xs, o.gu, o.h, o.ys, "offset is NULL");
    FORWARD(e, p.offset, NULL, o.gu, o.h, o.ys, "xs is NULL");
    FORWARD(e, p.offset, p.xs, NULL, o.h, o.ys, "gu is NULL");
    FORWARD(e, p.offset, p.xs, o.gu, NULL, o.ys, "h is NULL");
    FORWARD(e, p.offset, p.xs, o.gu, o.h, NULL, "ys is NULL");
#define BACKWARD(e_, offset_, xs_, gu_, dys_, dgu_, dh_, dxs_, add_, text_)                                           \
    CHECK_STATUS(lf_experts_backward(e_, NULL, offset_, xs_, gu_, o.h, dys_, dgu_, dh_, dxs_, add_), LF_ERR_INVALID); \
    CHECK_HAS(lf_error_text(), text_)
    BACKWARD(NULL, p.offset, p.xs, o.gu, p.dys, o.dgu, o.dh, o.dxs, 0, "experts is NULL");
    BACKWARD(e, NULL, p.xs, o.gu, p.dys, o.dgu, o.dh, o.dxs, 0, "offset is NULL");
    BACKWARD(e, p.offset, NULL, o.gu, p.dys, o.dgu, o.dh, o.dxs, 0, "xs is NULL");
    BACKWARD(e, p.offset, p.xs, NULL, p.dys, o.dgu, o.dh, o.dxs, 0, "gu is NULL");
    BACKWARD(e, p.offset, p.xs, o.gu, NULL, o.dgu, o.dh, o.dxs, 0, "dys is NULL");
    BACKWARD(e, p.offset, p.xs, o.gu, p.dys, NULL, o.dh, o.dxs, 0, "dgu is NULL");
    BACKWARD(e, p.offset, p.xs, o.gu, p.dys, o.dgu, NULL, o.dxs, 0, "dh is NULL");
    BACKWARD(e, p.offset, p.xs, o.gu, p.dys, o.dgu, o.dh, NULL, 0, "dxs is NULL");
    BACKWARD(e, p.offset, p.xs, o.gu, p.dys, o.dgu, o.h, o.dxs, 0, "h and dh are the same");
    BACKWARD(e, p.offset, p.xs, o.gu, p.dys, o.dgu, o.dh, o.dxs, 2, "accumulate is 2");
    int32_t bad[][7] = {{1, 2, 3, 4, 5, 6, 7}, {0, 5, 4, 9, 9, 9, 9}, {0, 0, 0, 0, 0, 0, (int32_t)p.max_rows + 1}};
    const char *texts[] = {"offset[0] is 1", "offset[2] is 4 behind 5", "offset[6] is 225, expected at most max_rows, 224"};
    for (int32_t i = 0; i < 3; i++) {
        FORWARD(e, bad[i], p.xs, o.gu, o.h, o.ys, texts[i]);
        BACKWARD(e, bad[i], p.xs, o.gu, p.dys, o.dgu, o.dh, o.dxs, 0, texts[i]);
    }
    check_untouched("gu", o.gu, 0, 2 * p.max_rows * p.most, p.dtype); /* none of these wrote anything */
    check_untouched("dgu", o.dgu, 0, 2 * p.max_rows * p.most, p.dtype);
    check_untouched("dw_gu", o.dw_gu, 0, 2 * p.n_weight, p.grad_dtype);
    CHECK_OK(lf_experts_forward(e, worker, bad[0], p.xs, o.gu, o.h, o.ys)); /* on a stream it is told at the next sync */
    CHECK_STATUS(lf_stream_sync(worker), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "offset[0] is 1");
    lf_experts_close(e);
    free_output(&o);
    free_experts(&p);
}

TEST(experts_allocate_nothing_in_steady_state)
{
    set_up();
    experts_problem p;
    make_shape(&p, &shapes[0], LF_DTYPE_BF16, LF_DTYPE_F32);
    experts_output o = make_output(&p, 0);
    lf_experts *e = open_on(&p, &o, 1);
    for (int32_t i = 0; i < 4; i++) {
        if (i == 2) lf__alloc_fail_at(0);
        CHECK_OK(lf_experts_forward(e, worker, p.offset, p.xs, o.gu, o.h, o.ys));
        CHECK_OK(lf_experts_backward(e, worker, p.offset, p.xs, o.gu, i % 2 ? o.h : NULL, p.dys, o.dgu, o.dh, o.dxs, 1));
        CHECK_OK(lf_stream_sync(worker));
    }
    CHECK_EQ(lf__alloc_fail_at(0), 0);
    lf_experts_close(e);
    free_output(&o);
    free_experts(&p);
}

TEST(experts_close)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
