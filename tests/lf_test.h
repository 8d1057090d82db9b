/* SPDX-License-Identifier: Apache-2.0 */
/* The test harness: named cases in one program.
 *
 *   TEST(map_orders_layers_backwards) { …; CHECK_EQ(a, b); }
 *   int main(int argc, char **argv) { return lf_test_main(argc, argv); }      — written by LF_TEST_MAIN
 *
 * `t_map` runs all cases, `t_map NAME` one. The last line is "N passed, N failed, N skipped"; exit code 77 when all cases
 * were skipped. A failed check ends its case and the run goes on. */
#ifndef LF_TEST_H
#define LF_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "loongforge/status.h"

typedef struct lf_test_case {
    const char *name;
    void (*fn)(void);
    struct lf_test_case *next;
} lf_test_case;

static lf_test_case *lf_test_first, **lf_test_tail = &lf_test_first;
static jmp_buf lf_test_leave;
static char lf_test_dir[256]; /* a fresh folder for the program, removed at the end */

enum { LF_TEST_FAILED = 1, LF_TEST_SKIPPED = 2 };

#define TEST(name_)                                            \
    static void name_(void);                                   \
    static lf_test_case case_##name_ = {#name_, name_, NULL};  \
    __attribute__((constructor)) static void add_##name_(void) \
    {                                                          \
        *lf_test_tail = &case_##name_;                         \
        lf_test_tail = &case_##name_.next;                     \
    }                                                          \
    static void name_(void)

#define FAIL_(...)                                      \
    do {                                                \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                   \
        fprintf(stderr, "\n");                          \
        longjmp(lf_test_leave, LF_TEST_FAILED);         \
    } while (0)
#define SKIP(...)                                \
    do {                                         \
        printf("skipped: " __VA_ARGS__);         \
        printf("\n");                            \
        longjmp(lf_test_leave, LF_TEST_SKIPPED); \
    } while (0)
#define CHECK(cond)                                \
    do {                                           \
        if (!(cond)) FAIL_("not true: %s", #cond); \
    } while (0)
#define CHECK_EQ(a, b)                                                 \
    do {                                                               \
        long long a_ = (long long)(a), b_ = (long long)(b);            \
        if (a_ != b_) FAIL_("%s is %lld, %s is %lld", #a, a_, #b, b_); \
    } while (0)
#define CHECK_NEAR(a, b, tolerance)                                                                                            \
    do {                                                                                                                       \
        double a_ = (double)(a), b_ = (double)(b);                                                                             \
        if (!(fabs(a_ - b_) <= (tolerance))) FAIL_("%s is %.9g, %s is %.9g (within %g)", #a, a_, #b, b_, (double)(tolerance)); \
    } while (0)
#define CHECK_STR(a, b)                                                              \
    do {                                                                             \
        const char *a_ = (a), *b_ = (b);                                             \
        if (strcmp(a_, b_) != 0) FAIL_("%s is \"%s\", expected \"%s\"", #a, a_, b_); \
    } while (0)
/* The text contains a part. */
#define CHECK_HAS(text, part)                                                 \
    do {                                                                      \
        const char *t_ = (text), *p_ = (part);                                \
        if (!strstr(t_, p_)) FAIL_("\"%s\" does not contain \"%s\"", t_, p_); \
    } while (0)
#define CHECK_OK(call)                                                                    \
    do {                                                                                  \
        lf_status s_ = (call);                                                            \
        if (s_ != LF_OK) FAIL_("%s: %s: %s", #call, lf_status_name(s_), lf_error_text()); \
    } while (0)
#define CHECK_STATUS(call, want)                                                                                               \
    do {                                                                                                                       \
        lf_status s_ = (call);                                                                                                 \
        if (s_ != (want)) FAIL_("%s: %s (%s), expected %s", #call, lf_status_name(s_), lf_error_text(), lf_status_name(want)); \
    } while (0)

/* A path inside the program's folder; four can be in use at once. */
static inline const char *lf_test_path(const char *name)
{
    static char path[4][512];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", lf_test_dir, name);
    return path[next];
}

/* Folder of outside test data, NULL when absent. */
static inline const char *lf_test_data(void)
{
    const char *dir = getenv("LOONGFORGE_TEST_DATA");
    struct stat st;
    if (!dir) dir = "../shared/data";
    return stat(dir, &st) == 0 ? dir : NULL;
}

static inline int lf_test_main(int argc, char **argv)
{
    static int passed, failed, skipped; /* static: longjmp */
    const char *tmp = getenv("TMPDIR");
    snprintf(lf_test_dir, sizeof lf_test_dir, "%s/lf_test_XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(lf_test_dir)) {
        perror(lf_test_dir);
        return 1;
    }
    for (lf_test_case *c = lf_test_first; c; c = c->next) {
        if (argc > 1 && strcmp(argv[1], c->name) != 0) continue;
        int how = setjmp(lf_test_leave);
        if (how == 0) {
            c->fn();
            passed++;
        } else if (how == LF_TEST_SKIPPED) {
            skipped++;
        } else {
            fprintf(stderr, "FAILED %s\n", c->name);
            failed++;
        }
    }
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", lf_test_dir);
    if (system(command) != 0) fprintf(stderr, "could not remove %s\n", lf_test_dir);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed || (passed == 0 && skipped == 0) ? 1 : passed == 0 ? 77 : 0;
}

#define LF_TEST_MAIN \
    int main(int argc, char **argv) { return lf_test_main(argc, argv); }

#endif
