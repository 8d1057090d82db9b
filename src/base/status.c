/* SPDX-License-Identifier: Apache-2.0 */
/* Status names and the per-thread error text. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base.h"

static _Thread_local char error_text[1024];

#define ROW(name_, value_, text_) {value_, #name_, text_},
static const struct {
    lf_status value;
    const char *name, *text;
} rows[] = {LF_STATUS_MAP(ROW)};
#undef ROW

const char *lf_status_name(lf_status status)
{
    for (size_t i = 0; i < LF_COUNT(rows); i++)
        if (rows[i].value == status) return rows[i].name;
    return "UNKNOWN";
}

const char *lf_status_text(lf_status status)
{
    for (size_t i = 0; i < LF_COUNT(rows); i++)
        if (rows[i].value == status) return rows[i].text;
    return "unknown status";
}

const char *lf_error_text(void) { return error_text; }
void lf_error_clear(void) { error_text[0] = 0; }

lf_status lf__fail(lf_status status, const char *format, ...)
{
    char text[sizeof error_text]; /* arguments may point into error_text */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(error_text, text, sizeof text);
    return status;
}

lf_status lf__fail_errno(int err, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    lf_status status = err == ENOSPC || err == EDQUOT ? LF_ERR_NOSPACE
                       : err == ENOENT                ? LF_ERR_NOTFOUND
                       : err == EEXIST                ? LF_ERR_EXISTS
                       : err == ENOMEM                ? LF_ERR_NOMEM
                                                      : LF_ERR_IO;
    return lf__fail(status, "%s: %s (errno %d)", text, strerror(err), err);
}

lf_status lf__fail_prefix(lf_status status, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return lf__fail(status, "%s: %s", text, error_text);
}

void lf__fault_keep(lf__fault *fault, lf_status status)
{
    if (fault->status < 0 || status >= 0) return;
    fault->status = status;
    snprintf(fault->text, sizeof fault->text, "%.511s", error_text);
}

lf_status lf__fault_raise(const lf__fault *fault)
{
    return fault->status < 0 ? lf__fail(fault->status, "%s", fault->text) : LF_OK;
}
