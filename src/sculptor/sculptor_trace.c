/* SPDX-License-Identifier: Apache-2.0 */
/* The lifetime table: rows in the order in which they were added. */
#include <string.h>

#include "sculptor_int.h"

static const char *const role_names[] = {"weight", "activation", "gradient", "optimizer", "workspace", "input"};

const char *lf_tensor_role_name(int32_t role)
{
    return role >= 0 && role < (int32_t)LF_COUNT(role_names) ? role_names[role] : "?";
}

int32_t lf__tensor_role(const char *name)
{
    for (int32_t i = 0; i < (int32_t)LF_COUNT(role_names); i++)
        if (strcmp(role_names[i], name) == 0) return i;
    return -1;
}

lf_status lf_trace_open(lf_trace **out)
{
    LF_CHECK_ARG(out, "out is NULL");
    *out = lf__alloc(sizeof **out);
    if (!*out) return LF_FAIL(LF_ERR_NOMEM, "lifetime table");
    (*out)->default_align = 1;
    return LF_OK;
}

void lf__trace_cut(lf_trace *trace, int64_t n)
{
    while (trace->n > n) {
        lf__row *row = &trace->rows[--trace->n];
        trace->total_bytes -= row->bytes + row->align;
        lf__free(row->name);
        lf__free(row->module);
    }
}

void lf_trace_close(lf_trace *trace)
{
    if (!trace) return;
    lf__trace_cut(trace, 0);
    lf__free(trace->rows);
    lf__free(trace);
}

static lf_status check_row(const lf_trace *trace, const lf_lifetime *row)
{
    const char *name = row->name ? row->name : "";
    LF_CHECK_ARG(row->last > row->first, "tensor '%s' lives from %lld to %lld, expected last after first (half open)", name,
                 (long long)row->first, (long long)row->last);
    LF_CHECK_ARG(row->bytes >= 0, "tensor '%s' has %lld bytes, expected 0 or more", name, (long long)row->bytes);
    LF_CHECK_ARG(row->role >= 0 && row->role < (int32_t)LF_COUNT(role_names), "tensor '%s' has role %d, expected 0 to %zu", name,
                 row->role, LF_COUNT(role_names) - 1);
    LF_CHECK_ARG(row->align_bytes >= 0 && row->align_bytes <= (int64_t)1 << 40,
                 "tensor '%s' is aligned to %lld bytes, expected 0 (default) to 2^40", name, (long long)row->align_bytes);
    LF_CHECK_ARG(row->offset >= -1 && row->offset <= LF_TRACE_MAX_BYTES,
                 "tensor '%s' has offset %lld, expected -1 (none) to 2^61", name, (long long)row->offset);
    LF_CHECK_ARG(row->bytes <= LF_TRACE_MAX_BYTES - row->align_bytes - trace->total_bytes,
                 "tensor '%s' of %lld bytes: all tensors together have more than 2^61 bytes", name, (long long)row->bytes);
    LF_CHECK_ARG(trace->n < INT32_MAX, "tensor '%s': the table is full with %lld rows", name, (long long)trace->n);
    return LF_OK;
}

lf_status lf_trace_add(lf_trace *trace, const lf_lifetime *row)
{
    LF_CHECK_ARG(trace && row, "trace or row is NULL");
    LF_CHECK_ARG(row->size == sizeof *row, "lifetime row: size is %zu, expected %zu", row->size, sizeof *row);
    lf_status rc = check_row(trace, row);
    if (rc < 0) return rc;
    if (trace->n == trace->room) {
        int64_t room = trace->room ? trace->room * 2 : 256;
        lf__row *grown = lf__realloc(trace->rows, (size_t)room, sizeof *grown);
        if (!grown) return LF_FAIL(LF_ERR_NOMEM, "lifetime table of %lld rows", (long long)room);
        trace->rows = grown;
        trace->room = room;
    }
    char *name = lf__strdup(row->name ? row->name : ""), *module = lf__strdup(row->module ? row->module : "");
    if (!name || !module) {
        lf__free(name);
        lf__free(module);
        return LF_FAIL(LF_ERR_NOMEM, "lifetime table: names of row %lld", (long long)trace->n);
    }
    trace->rows[trace->n++] = (lf__row){.name = name,
                                        .module = module,
                                        .first = row->first,
                                        .last = row->last,
                                        .bytes = row->bytes,
                                        .align = row->align_bytes,
                                        .offset = row->offset,
                                        .role = row->role,
                                        .stream = row->stream};
    trace->total_bytes += row->bytes + row->align_bytes;
    return LF_OK;
}

int64_t lf_trace_n(const lf_trace *trace) { return trace ? trace->n : 0; }

lf_status lf_trace_get(const lf_trace *trace, int64_t i, lf_lifetime *row)
{
    LF_CHECK_ARG(trace && row, "trace or row is NULL");
    LF_CHECK_ARG(row->size == sizeof *row, "lifetime row: size is %zu, expected %zu", row->size, sizeof *row);
    LF_CHECK_ARG(i >= 0 && i < trace->n, "row is %lld, expected 0 to %lld", (long long)i, (long long)trace->n - 1);
    const lf__row *r = &trace->rows[i];
    *row = (lf_lifetime){.size = sizeof *row,
                         .name = r->name,
                         .module = r->module,
                         .role = r->role,
                         .stream = r->stream,
                         .first = r->first,
                         .last = r->last,
                         .bytes = r->bytes,
                         .align_bytes = r->align,
                         .offset = r->offset};
    return LF_OK;
}
