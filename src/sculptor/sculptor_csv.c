/* SPDX-License-Identifier: Apache-2.0 */
/* Lifetime tables as CSV (RFC 4180 quoting), MiniMalloc's columns first. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "io/io.h"
#include "sculptor_int.h"

enum { MOST_COLUMNS = 64, MAX_FILE = 1 << 30 };

/* Fields of one column; END is `end`, the inclusive form of UPPER. */
enum { F_ID, F_LOWER, F_UPPER, F_END, F_SIZE, F_ALIGN, F_OFFSET, F_NAME, F_MODULE, F_ROLE, F_STREAM, N_FIELDS, F_OTHER = -1 };

static const struct {
    const char *name;
    int32_t field;
} column_names[] = {
    {"id", F_ID},         {"buffer", F_ID},   {"buffer_id", F_ID},  {"lower", F_LOWER}, {"begin", F_LOWER},
    {"start", F_LOWER},   {"upper", F_UPPER}, {"end", F_END},       {"size", F_SIZE},   {"alignment", F_ALIGN},
    {"offset", F_OFFSET}, {"name", F_NAME},   {"module", F_MODULE}, {"role", F_ROLE},   {"stream", F_STREAM},
};
static const char *const field_names[N_FIELDS] = {"id",     "lower", "upper",  "end",  "size",  "alignment",
                                                  "offset", "name",  "module", "role", "stream"};

typedef struct reader {
    const char *path;
    char *at, *stop; /* unread text, changed in place; *stop is 0 */
    int64_t line;    /* of the record being read */
    int64_t next_line;
    char *cell[MOST_COLUMNS];
    int32_t n_cells;
    int32_t n_columns, column[N_FIELDS]; /* column of each field, -1: none */
} reader;

/* One cell, unquoted in place and 0-terminated; `*end` is the character that ended it. */
static lf_status read_cell(reader *r, char **cell, char *end)
{
    char *to = r->at;
    *cell = to;
    if (r->at < r->stop && *r->at == '"') {
        for (r->at++;; r->at++) {
            if (r->at >= r->stop) return LF_FAIL(LF_ERR_FORMAT, "%s:%lld: quote without an end", r->path, (long long)r->line);
            if (*r->at == '"' && *++r->at != '"') break; /* a doubled quote is one */
            if (*r->at == '\n') r->next_line++;
            *to++ = *r->at;
        }
    }
    while (r->at < r->stop && *r->at != ',' && *r->at != '\n') *to++ = *r->at++;
    *end = r->at < r->stop ? *r->at : 0;
    if (*end == '\n') r->next_line++;
    if (r->at < r->stop) r->at++;
    if (*end != ',' && to > *cell && to[-1] == '\r') to--;
    *to = 0;
    return LF_OK;
}

/* The next record with anything in it; LF_END at the end. */
static lf_status read_record(reader *r)
{
    while (r->at < r->stop) {
        char end = ',';
        r->line = r->next_line;
        for (r->n_cells = 0; end == ','; r->n_cells++) {
            if (r->n_cells == MOST_COLUMNS)
                return LF_FAIL(LF_ERR_FORMAT, "%s:%lld: more than %d columns", r->path, (long long)r->line, MOST_COLUMNS);
            lf_status rc = read_cell(r, &r->cell[r->n_cells], &end);
            if (rc < 0) return rc;
        }
        if (r->n_cells > 1 || r->cell[0][0]) return LF_OK;
    }
    return LF_END;
}

static int32_t field_of(const char *name)
{
    for (size_t i = 0; i < LF_COUNT(column_names); i++)
        if (strcmp(column_names[i].name, name) == 0) return column_names[i].field;
    return F_OTHER;
}

static lf_status read_header(reader *r)
{
    for (int32_t f = 0; f < N_FIELDS; f++) r->column[f] = -1;
    lf_status rc = read_record(r);
    if (rc < 0) return rc;
    if (rc == LF_END) return LF_FAIL(LF_ERR_FORMAT, "%s is empty, expected a line of column names", r->path);
    r->n_columns = r->n_cells;
    for (int32_t i = 0; i < r->n_cells; i++) {
        int32_t f = field_of(r->cell[i]);
        if (f == F_OTHER) continue;
        if (r->column[f] >= 0)
            return LF_FAIL(LF_ERR_FORMAT, "%s:%lld: two columns say '%s'", r->path, (long long)r->line, field_names[f]);
        r->column[f] = i;
    }
    const char *missing = r->column[F_LOWER] < 0                           ? "lower"
                          : r->column[F_UPPER] < 0 && r->column[F_END] < 0 ? "upper"
                          : r->column[F_SIZE] < 0                          ? "size"
                                                                           : NULL;
    if (missing)
        return LF_FAIL(LF_ERR_FORMAT, "%s:%lld: no column '%s', expected id,lower,upper,size", r->path, (long long)r->line,
                       missing);
    return LF_OK;
}

static const char *cell_of(const reader *r, int32_t field) { return r->column[field] >= 0 ? r->cell[r->column[field]] : ""; }

/* A whole number; an empty cell or an absent column is `absent`. */
static lf_status read_number(const reader *r, int32_t field, int64_t absent, int64_t *value)
{
    const char *text = cell_of(r, field);
    char *end;
    *value = absent;
    if (!text[0] && field != F_LOWER && field != F_UPPER && field != F_END && field != F_SIZE) return LF_OK;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    while (*end == ' ') end++;
    if (end == text || *end || errno == ERANGE)
        return LF_FAIL(LF_ERR_FORMAT, "%s:%lld: %s is '%.40s', expected a whole number", r->path, (long long)r->line,
                       field_names[field], text);
    *value = x;
    return LF_OK;
}

static lf_status read_role(const reader *r, int32_t *role)
{
    const char *text = cell_of(r, F_ROLE);
    *role = text[0] ? lf__tensor_role(text) : LF_TENSOR_ACTIVATION;
    if (*role >= 0) return LF_OK;
    return LF_FAIL(LF_ERR_FORMAT,
                   "%s:%lld: role is '%.40s', expected weight, activation, gradient, optimizer, workspace or input", r->path,
                   (long long)r->line, text);
}

static lf_status read_row(const reader *r, lf_trace *trace)
{
    lf_lifetime row = {.size = sizeof row};
    int64_t stream;
    lf_status rc = LF_OK;
    bool inclusive = r->column[F_UPPER] < 0;
    if (r->n_cells != r->n_columns)
        LF_THROW(LF_ERR_FORMAT, "%s:%lld: %d cells, expected %d as in the first line", r->path, (long long)r->line, r->n_cells,
                 r->n_columns);
    LF_TRY(read_number(r, F_LOWER, 0, &row.first));
    LF_TRY(read_number(r, inclusive ? F_END : F_UPPER, 0, &row.last));
    LF_TRY(read_number(r, F_SIZE, 0, &row.bytes));
    LF_TRY(read_number(r, F_ALIGN, 0, &row.align_bytes));
    LF_TRY(read_number(r, F_OFFSET, -1, &row.offset));
    LF_TRY(read_number(r, F_STREAM, 0, &stream));
    LF_TRY(read_role(r, &row.role));
    if (stream < INT32_MIN || stream > INT32_MAX)
        LF_THROW(LF_ERR_FORMAT, "%s:%lld: stream is %lld, expected a 32-bit number", r->path, (long long)r->line,
                 (long long)stream);
    if (inclusive && row.last < INT64_MAX) row.last++;
    row.stream = (int32_t)stream;
    row.name = r->column[F_NAME] >= 0 ? cell_of(r, F_NAME) : cell_of(r, F_ID);
    row.module = cell_of(r, F_MODULE);
    rc = lf_trace_add(trace, &row);
    if (rc < 0) rc = lf__fail_prefix(rc == LF_ERR_INVALID ? LF_ERR_FORMAT : rc, "%s:%lld", r->path, (long long)r->line);
out:
    return rc;
}

lf_status lf_trace_read_csv(lf_trace *trace, const char *path)
{
    LF_CHECK_ARG(trace && path, "trace or path is NULL");
    char *text = NULL;
    size_t bytes = 0;
    int64_t before = trace->n;
    lf_status rc = lf__io_read_all(lf__io_posix(), path, MAX_FILE, &text, &bytes);
    if (rc < 0) return rc;
    reader r = {.path = path, .at = text, .stop = text + bytes, .next_line = 1};
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) r.at += 3; /* byte order mark */
    if (strlen(r.at) != (size_t)(r.stop - r.at)) LF_THROW(LF_ERR_FORMAT, "%s is no text: it contains a zero byte", path);
    LF_TRY(read_header(&r));
    for (;;) {
        LF_TRY(read_record(&r));
        if (rc == LF_END) break;
        LF_TRY(read_row(&r, trace));
    }
    rc = LF_OK;
out:
    if (rc < 0) lf__trace_cut(trace, before);
    lf__free(text);
    return rc;
}

/* ---- writing */

static lf_status add_text(lf__buf *buf, const char *text)
{
    if (!strpbrk(text, ",\"\r\n")) return lf__buf_add(buf, text, strlen(text));
    lf_status rc = lf__buf_add(buf, "\"", 1);
    for (const char *c = text; rc == LF_OK && *c; c++) rc = lf__buf_add(buf, *c == '"' ? "\"\"" : c, *c == '"' ? 2 : 1);
    return rc < 0 ? rc : lf__buf_add(buf, "\"", 1);
}

static lf_status add_row(lf__buf *buf, int64_t i, const lf__row *row)
{
    lf_status rc;
    LF_TRY(lf__buf_printf(buf, "%lld,%lld,%lld,%lld,%lld,", (long long)i, (long long)row->first, (long long)row->last,
                          (long long)row->bytes, (long long)row->align));
    if (row->offset >= 0) LF_TRY(lf__buf_printf(buf, "%lld", (long long)row->offset));
    LF_TRY(lf__buf_add(buf, ",", 1));
    LF_TRY(add_text(buf, row->name));
    LF_TRY(lf__buf_add(buf, ",", 1));
    LF_TRY(add_text(buf, row->module));
    LF_TRY(lf__buf_printf(buf, ",%s,%d\n", lf_tensor_role_name(row->role), row->stream));
out:
    return rc;
}

lf_status lf_trace_write_csv(const lf_trace *trace, const char *path)
{
    LF_CHECK_ARG(trace && path, "trace or path is NULL");
    lf__buf buf = {.max = MAX_FILE};
    lf_status rc;
    LF_TRY(lf__buf_printf(&buf, "id,lower,upper,size,alignment,offset,name,module,role,stream\n"));
    for (int64_t i = 0; i < trace->n; i++) LF_TRY(add_row(&buf, i, &trace->rows[i]));
    LF_TRY(lf__io_replace(lf__io_posix(), path, buf.data, buf.used));
out:
    lf__buf_free(&buf);
    return rc;
}
