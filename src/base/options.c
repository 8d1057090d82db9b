/* SPDX-License-Identifier: Apache-2.0 */
/* Options tables: reading, checking and printing fields by their rows. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

const lf_options_section *lf_options_at(uint32_t i) { return i < lf__n_sections ? lf__sections[i] : NULL; }

const lf_options_section *lf_options_find(const char *section)
{
    for (uint32_t i = 0; section && i < lf__n_sections; i++)
        if (strcmp(lf__sections[i]->name, section) == 0) return lf__sections[i];
    return NULL;
}

/* Letters that differ, position by position and in length: enough to suggest the key that was meant. */
static int32_t spelling_distance(const char *a, const char *b)
{
    enum { MOST = 48 };
    int32_t row[MOST + 1], n = (int32_t)strnlen(b, MOST);
    for (int32_t j = 0; j <= n; j++) row[j] = j;
    for (int32_t i = 0; a[i] && i < MOST; i++) {
        int32_t diagonal = row[0];
        row[0] = i + 1;
        for (int32_t j = 1; j <= n; j++) {
            int32_t replace = diagonal + (a[i] != b[j - 1]), shift = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replace < shift ? replace : shift;
        }
    }
    return row[n];
}

static lf_status find_row(const lf_options_section *s, const char *key, const lf_option **row)
{
    const lf_option *near = NULL;
    int32_t best = 4;
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (strcmp(s->rows[i].name, key) == 0) {
            *row = &s->rows[i];
            return LF_OK;
        }
        int32_t d = spelling_distance(key, s->rows[i].name);
        if (d < best) {
            best = d;
            near = &s->rows[i];
        }
    }
    return LF_FAIL(LF_ERR_NOTFOUND, "unknown option '%s' in section [%s]; hint: %s%s%s", key, s->name,
                   near ? "did you mean '" : "`loongforge config ", near ? near->name : s->name, near ? "'?" : "` lists them");
}

static bool parse_bool(const char *text, int32_t *value)
{
    static const struct {
        const char *text;
        int32_t value;
    } words[] = {{"1", 1}, {"true", 1},  {"True", 1},  {"on", 1},  {"yes", 1},
                 {"0", 0}, {"false", 0}, {"False", 0}, {"off", 0}, {"no", 0}};
    for (size_t i = 0; i < LF_COUNT(words); i++)
        if (strcmp(words[i].text, text) == 0) {
            *value = words[i].value;
            return true;
        }
    return false;
}

/* Numbers with an optional binary or decimal suffix: 64, 1.5GiB, 16MB, 4k. */
static bool parse_number(const char *text, bool sizes, double *value)
{
    static const struct {
        const char *text;
        double factor;
    } units[] = {{"", 1},         {"k", 1e3},         {"K", 1024},   {"KB", 1e3},       {"MB", 1e6},         {"GB", 1e9},
                 {"M", 1048576.}, {"G", 1073741824.}, {"KiB", 1024}, {"MiB", 1048576.}, {"GiB", 1073741824.}};
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (end == text || errno == ERANGE || !isfinite(*value)) return false;
    while (*end == ' ') end++;
    for (size_t i = 0; i < (sizes ? LF_COUNT(units) : 1); i++)
        if (strcmp(end, units[i].text) == 0) {
            *value *= units[i].factor;
            return true;
        }
    return false;
}

static bool is_choice(const char *choices, const char *value)
{
    size_t n = strlen(value);
    for (const char *p = choices; p && *p;) {
        const char *bar = strchr(p, '|');
        size_t len = bar ? (size_t)(bar - p) : strlen(p);
        if (len == n && memcmp(p, value, n) == 0) return true;
        p = bar ? bar + 1 : NULL;
    }
    return false;
}

static lf_status set_text(const lf_options_section *s, const lf_option *row, char *field, const char *value)
{
    if (strlen(value) >= LF_TEXT_MAX)
        return LF_FAIL(LF_ERR_INVALID, "[%s] %s has %zu bytes, expected fewer than %d", s->name, row->name, strlen(value),
                       LF_TEXT_MAX);
    if (row->choices && !is_choice(row->choices, value))
        return LF_FAIL(LF_ERR_INVALID, "[%s] %s is '%s', expected one of %s", s->name, row->name, value, row->choices);
    memset(field, 0, LF_TEXT_MAX);
    memcpy(field, value, strlen(value));
    return LF_OK;
}

static lf_status set_number(const lf_options_section *s, const lf_option *row, char *field, const char *value)
{
    double x;
    bool whole = row->type != LF_OPT_F64;
    if (!parse_number(value, row->type == LF_OPT_I64, &x) || (whole && x != floor(x)))
        return LF_FAIL(LF_ERR_INVALID, "[%s] %s is '%s', expected a %snumber", s->name, row->name, value, whole ? "whole " : "");
    if (x < row->min || x > row->max)
        return LF_FAIL(LF_ERR_INVALID, "[%s] %s is %s, expected %.15g to %.15g", s->name, row->name, value, row->min, row->max);
    if (row->type == LF_OPT_I32) memcpy(field, &(int32_t){(int32_t)x}, sizeof(int32_t));
    if (row->type == LF_OPT_I64) memcpy(field, &(int64_t){(int64_t)x}, sizeof(int64_t));
    if (row->type == LF_OPT_F64) memcpy(field, &x, sizeof x);
    return LF_OK;
}

static lf_status set_row(const lf_options_section *s, const lf_option *row, void *options, const char *value)
{
    char *field = (char *)options + row->offset;
    if (row->type == LF_OPT_TEXT) return set_text(s, row, field, value);
    if (row->type == LF_OPT_BOOL) {
        int32_t flag;
        if (!parse_bool(value, &flag))
            return LF_FAIL(LF_ERR_INVALID, "[%s] %s is '%s', expected true or false", s->name, row->name, value);
        memcpy(field, &flag, sizeof flag);
        return LF_OK;
    }
    return set_number(s, row, field, value);
}

static size_t row_bytes(const lf_option *row)
{
    return row->type == LF_OPT_TEXT ? LF_TEXT_MAX : row->type == LF_OPT_I64 || row->type == LF_OPT_F64 ? 8 : 4;
}

lf_status lf_options_init(const char *section, void *options, size_t size)
{
    const lf_options_section *s = lf_options_find(section);
    if (!s) return LF_FAIL(LF_ERR_NOTFOUND, "no options section '%s'", section ? section : "(null)");
    LF_CHECK_ARG(options && size >= sizeof(size_t) && size <= s->struct_bytes,
                 "options of [%s]: size is %zu, expected %zu to %u; hint: rebuild against this version", section, size,
                 sizeof(size_t), s->struct_bytes);
    memset(options, 0, size);
    memcpy(options, &size, sizeof size);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (s->rows[i].offset + row_bytes(&s->rows[i]) > size) continue; /* unknown to an older caller */
        lf_status rc = set_row(s, &s->rows[i], options, s->rows[i].default_text);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

lf_status lf_options_set(const char *section, void *options, const char *key, const char *value)
{
    const lf_options_section *s = lf_options_find(section);
    if (!s) return LF_FAIL(LF_ERR_NOTFOUND, "no options section '%s'", section ? section : "(null)");
    LF_CHECK_ARG(options && key && value, "options, key or value is NULL");
    const lf_option *row;
    lf_status rc = find_row(s, key, &row);
    if (rc < 0) return rc;
    size_t size;
    memcpy(&size, options, sizeof size);
    LF_CHECK_ARG(row->offset + row_bytes(row) <= size, "[%s] %s is newer than the caller's struct of %zu bytes", section, key,
                 size);
    return set_row(s, row, options, value);
}

static void print_row(const lf_option *row, const void *options, char *text, size_t size)
{
    const char *field = (const char *)options + row->offset;
    if (row->type == LF_OPT_TEXT) {
        snprintf(text, size, "%.*s", LF_TEXT_MAX - 1, field);
    } else if (row->type == LF_OPT_F64) {
        double x;
        memcpy(&x, field, sizeof x);
        snprintf(text, size, "%.17g", x);
        for (int digits = 6; digits < 17; digits++) { /* the shortest text that reads back the same */
            char shorter[40];
            snprintf(shorter, sizeof shorter, "%.*g", digits, x);
            if (strtod(shorter, NULL) == x) {
                snprintf(text, size, "%s", shorter);
                break;
            }
        }
    } else if (row->type == LF_OPT_I64) {
        int64_t x;
        memcpy(&x, field, sizeof x);
        snprintf(text, size, "%lld", (long long)x);
    } else {
        int32_t x;
        memcpy(&x, field, sizeof x);
        if (row->type == LF_OPT_BOOL) snprintf(text, size, "%s", x ? "true" : "false");
        else snprintf(text, size, "%d", x);
    }
}

lf_status lf_options_get(const char *section, const void *options, const char *key, char *text, size_t size)
{
    const lf_options_section *s = lf_options_find(section);
    if (!s) return LF_FAIL(LF_ERR_NOTFOUND, "no options section '%s'", section ? section : "(null)");
    const lf_option *row;
    lf_status rc = find_row(s, key, &row);
    if (rc < 0) return rc;
    char whole[LF_TEXT_MAX];
    print_row(row, options, whole, sizeof whole);
    LF_CHECK_ARG(strlen(whole) < size, "[%s] %s: text of %zu bytes into %zu", section, key, strlen(whole) + 1, size);
    memcpy(text, whole, strlen(whole) + 1);
    return LF_OK;
}

/* Printing and reading back checks bounds and choices with the same code as user input. */
lf_status lf__options_take(const char *section, void *to, size_t bytes, const void *from)
{
    lf_status rc = lf_options_init(section, to, bytes);
    if (rc < 0 || !from) return rc;
    const lf_options_section *s = lf_options_find(section);
    size_t size;
    memcpy(&size, from, sizeof size);
    LF_CHECK_ARG(size >= sizeof size && size <= bytes,
                 "options of [%s]: size is %zu, expected %zu to %zu; hint: lf_options_init sets it", section, size, sizeof size,
                 bytes);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (s->rows[i].offset + row_bytes(&s->rows[i]) > size) continue;
        char text[LF_TEXT_MAX];
        print_row(&s->rows[i], from, text, sizeof text);
        rc = set_row(s, &s->rows[i], to, text);
        if (rc < 0) return rc;
    }
    return LF_OK;
}
