/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge mem`: plan a lifetime table, print it. */
#include <stdlib.h>
#include <string.h>

#include "cmd.h"

static const char usage[] = "mem (plan IN.csv [--out OUT.csv] | table IN.csv [--rows N])";
static const char help[] =
    "IN.csv has the columns id,lower,upper,size; optional: alignment, offset, name, module, role, stream.\n"
    "plan gives every tensor an offset and checks the result; table lists the tensors that cost the most.";

static void print_line(const char *what, int64_t bytes, const char *remark)
{
    char text[24];
    printf("%-12s %16lld bytes  %10s  %s\n", what, (long long)bytes, cmd_bytes(text, sizeof text, bytes), remark);
}

static void print_plan(const lf_plan_summary *s)
{
    char remark[96];
    printf("tensors      %16lld\n", (long long)s->n);
    print_line("all bytes", s->live_sum_bytes, "as if none shared");
    print_line("bound", s->bound_bytes, "most that is live at once");
    snprintf(remark, sizeof remark, "waste %.3f %%%s", 100 * s->waste, s->optimal ? ", no plan is smaller" : "");
    print_line("plan", s->peak_bytes, remark);
    printf("\n%-12s %16s %22s\n", "class", "tensors", "most live at once");
    int64_t walls = 0;
    for (int32_t k = 0; k < LF_N_CLASSES; k++) {
        char text[24];
        walls += s->class_peak_bytes[k];
        printf("%-12s %16lld %16lld bytes  %10s\n", lf_class_name(k), (long long)s->class_n[k], (long long)s->class_peak_bytes[k],
               cmd_bytes(text, sizeof text, s->class_peak_bytes[k]));
    }
    if (s->peak_bytes > 0)
        printf("Pools with walls between the classes would need %.3f times the plan.\n", (double)walls / (double)s->peak_bytes);
    printf("planned in %.3f s\n", s->seconds);
}

static int plan(lf_trace *trace, const lf_plan_options *o, const char *out)
{
    lf_plan_summary s = {.size = sizeof s};
    if (lf_trace_plan(trace, o, &s) < 0) return cmd_fail_lf(NULL);
    if (lf_trace_validate(trace, s.peak_bytes) < 0) return cmd_fail_lf("the plan does not pass its check, nothing is written");
    if (out && lf_trace_write_csv(trace, out) < 0) return cmd_fail_lf(NULL);
    print_plan(&s);
    if (out) printf("written to %s\n", out);
    return CMD_OK;
}

/* ---- table */

typedef struct ranked {
    double cost; /* bytes x lifetime */
    int64_t row;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->cost != y->cost) return x->cost > y->cost ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

static void print_roles(const lf_trace *trace)
{
    int64_t n[LF_TENSOR_INPUT + 1] = {0}, bytes[LF_TENSOR_INPUT + 1] = {0};
    for (int64_t i = 0; i < lf_trace_n(trace); i++) {
        lf_lifetime r = {.size = sizeof r};
        if (lf_trace_get(trace, i, &r) < 0) continue;
        n[r.role]++;
        bytes[r.role] += r.bytes;
    }
    printf("\n%-12s %10s %18s\n", "role", "tensors", "bytes");
    for (int32_t k = 0; k <= LF_TENSOR_INPUT; k++) {
        char text[24];
        if (n[k])
            printf("%-12s %10lld %18lld  %10s\n", lf_tensor_role_name(k), (long long)n[k], (long long)bytes[k],
                   cmd_bytes(text, sizeof text, bytes[k]));
    }
}

static int print_table(const lf_trace *trace, long rows)
{
    int64_t n = lf_trace_n(trace);
    ranked *by_cost = calloc(n > 0 ? (size_t)n : 1, sizeof *by_cost);
    if (!by_cost) return cmd_fail("no memory to sort %lld rows", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        lf_lifetime r = {.size = sizeof r};
        if (lf_trace_get(trace, i, &r) < 0) continue;
        by_cost[i] = (ranked){(double)r.bytes * ((double)r.last - (double)r.first), i};
    }
    qsort(by_cost, (size_t)n, sizeof *by_cost, compare_ranked);
    printf("%-28s %-20s %-10s %14s %10s %10s %14s\n", "tensor", "module", "role", "bytes", "first", "last", "offset");
    for (int64_t i = 0; i < n && i < rows; i++) {
        lf_lifetime r = {.size = sizeof r};
        if (lf_trace_get(trace, by_cost[i].row, &r) < 0) continue;
        char offset[24] = "-";
        if (r.offset >= 0) snprintf(offset, sizeof offset, "%lld", (long long)r.offset);
        printf("%-28.28s %-20.20s %-10s %14lld %10lld %10lld %14s\n", r.name, r.module, lf_tensor_role_name(r.role),
               (long long)r.bytes, (long long)r.first, (long long)r.last, offset);
    }
    if (rows < n) printf("... %lld more\n", (long long)(n - rows));
    print_roles(trace);
    free(by_cost);
    return CMD_OK;
}

int lf_cmd_mem(int argc, char **argv)
{
    const char *out = NULL, *rows_text = "20";
    lf_plan_options o;
    lf_trace *trace = NULL;
    if (lf_options_init("sculptor", &o, sizeof o) < 0) return cmd_fail_lf(NULL);
    const cmd_section sections[] = {{"sculptor", &o}};
    const cmd_extra extras[] = {{"out", "FILE", "plan: write the table with its offsets there", &out, NULL},
                                {"rows", "N", "table: how many rows [20]", &rows_text, NULL}};
    cmd_spec spec = {.usage = usage,
                     .help = help,
                     .sections = sections,
                     .n_sections = 1,
                     .extras = extras,
                     .n_extras = 2,
                     .min_words = 2,
                     .max_words = 2};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    char *end;
    long rows = strtol(rows_text, &end, 10);
    if (*end || end == rows_text || rows < 0) return cmd_fail_usage("--rows is '%s', expected a whole number", rows_text);
    int is_plan = strcmp(spec.words[0], "plan") == 0;
    if (!is_plan && strcmp(spec.words[0], "table") != 0) return cmd_fail_usage("mem '%s', expected plan or table", spec.words[0]);
    if (lf_trace_open(&trace) < 0 || lf_trace_read_csv(trace, spec.words[1]) < 0) code = cmd_fail_lf(NULL);
    else code = is_plan ? plan(trace, &o, out) : print_table(trace, rows);
    lf_trace_close(trace);
    return code;
}
