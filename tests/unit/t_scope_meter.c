/* SPDX-License-Identifier: Apache-2.0 */
/* What the stamps of a device's step clock count, with times that the test gives. */
#include "lf_test.h"
#include "scope/scope_int.h"

enum { C = LF_PART_COMPUTE, D = LF_PART_DATA, M = LF_PART_COMM, IO = LF_PART_IO, O = LF_PART_OPTIMIZER };

typedef struct stamped {
    int32_t what, part;
    int64_t at_ns;
} stamped;

static void stamp_all(lf__meter *m, lf__meter_page *page, int64_t ticket, const stamped *s, size_t n)
{
    for (size_t i = 0; i < n; i++) lf__meter_stamp(&(lf__stamp){m, page, ticket, s[i].what, s[i].part}, s[i].at_ns);
}
#define STAMP(m, page, ticket, ...) \
    stamp_all(m, page, ticket, (const stamped[]){__VA_ARGS__}, LF_COUNT(((const stamped[]){__VA_ARGS__})))
#define OPEN(t)             \
    {                       \
        LF_STAMP_OPEN, 0, t \
    }
#define BEGIN(p, t)          \
    {                        \
        LF_STAMP_BEGIN, p, t \
    }
#define END(p, t)          \
    {                      \
        LF_STAMP_END, p, t \
    }
#define CLOSE(t)             \
    {                        \
        LF_STAMP_CLOSE, 0, t \
    }

TEST(time_belongs_to_the_innermost_mark)
{
    lf__meter m = {0};
    lf__meter_page page;
    memset(&page, 0xff, sizeof page); /* all of it is written */
    STAMP(&m, &page, 7, OPEN(100), BEGIN(D, 110), END(D, 130), BEGIN(C, 135), BEGIN(M, 200), END(M, 240), BEGIN(O, 300),
          END(O, 900), END(C, 1000), BEGIN(C, 1001), END(C, 1003), CLOSE(1100));
    CHECK_EQ(page.opened, 7);
    CHECK_EQ(page.closed, 7);
    CHECK_EQ(page.begin_ns, 100);
    CHECK_EQ(page.end_ns, 1100);
    CHECK_EQ(page.part_ns[C], 65 + 60 + 100 + 2);
    CHECK_EQ(page.part_ns[D], 20);
    CHECK_EQ(page.part_ns[M], 40);
    CHECK_EQ(page.part_ns[O], 600);
    CHECK_EQ(page.part_ns[IO], 0);
    CHECK_EQ(page.seen, 1 << C | 1 << D | 1 << M | 1 << O);
    CHECK_EQ(page.wrong, 0);
}

TEST(a_step_starts_afresh)
{
    lf__meter m = {0};
    lf__meter_page pages[2] = {{0}};
    STAMP(&m, NULL, 0, BEGIN(O, 1), BEGIN(C, 2), END(O, 3),
          CLOSE(4)); /* before the first step, out of order: counts for nothing */
    STAMP(&m, &pages[0], 1, OPEN(10), BEGIN(C, 20), END(C, 30), CLOSE(40));
    STAMP(&m, NULL, 0, BEGIN(C, 41), BEGIN(IO, 42)); /* a warm-up between steps */
    STAMP(&m, &pages[1], 2, OPEN(50), BEGIN(C, 60), END(C, 61), CLOSE(70));
    STAMP(&m, NULL, 2, CLOSE(99));
    STAMP(&m, NULL, 2, BEGIN(C, 100), END(C, 200));
    CHECK_EQ(pages[0].part_ns[C], 10);
    CHECK_EQ(pages[1].part_ns[C], 1);
    CHECK_EQ(pages[1].part_ns[IO] + pages[1].part_ns[O], 0);
    CHECK_EQ(pages[0].wrong + pages[1].wrong, 0);
    CHECK_EQ(pages[1].end_ns, 70);
    STAMP(&m, &pages[0], 3, OPEN(300)); /* its end was dropped: the end of a later step must not fill the page */
    STAMP(&m, NULL, 4, CLOSE(400));
    CHECK_EQ(pages[0].opened, 3);
    CHECK_EQ(pages[0].closed, 1);
}

TEST(marks_out_of_order_are_seen)
{
    lf__meter m = {0};
    lf__meter_page page = {0};
    STAMP(&m, &page, 0, OPEN(0), END(C, 1), CLOSE(2));
    CHECK_EQ(page.wrong, 1);
    STAMP(&m, &page, 1, OPEN(0), BEGIN(C, 1), CLOSE(2)); /* left open */
    CHECK_EQ(page.wrong, 1);
    STAMP(&m, &page, 2, OPEN(0), BEGIN(C, 1), BEGIN(O, 2), END(C, 3), END(O, 4), CLOSE(5)); /* crossed */
    CHECK_EQ(page.wrong, 2);
    STAMP(&m, &page, 3, OPEN(0));
    for (int32_t i = 0; i < LF_METER_NEST; i++) STAMP(&m, NULL, 0, BEGIN(i % LF_N_PARTS, 10 + i));
    for (int32_t i = LF_METER_NEST - 1; i >= 0; i--) STAMP(&m, NULL, 0, END(i % LF_N_PARTS, 30 - i));
    STAMP(&m, NULL, 3, CLOSE(90)); /* as deep as it may be */
    CHECK_EQ(page.wrong, 0);
    STAMP(&m, &page, 4, OPEN(0));
    for (int32_t i = 0; i < 100; i++) STAMP(&m, NULL, 0, BEGIN(C, 10 + i));
    for (int32_t i = 0; i < 100; i++) STAMP(&m, NULL, 0, END(C, 200 + i));
    STAMP(&m, NULL, 4, CLOSE(900));
    CHECK_EQ(page.wrong, 2 * (100 - LF_METER_NEST));
}

LF_TEST_MAIN
