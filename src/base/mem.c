/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory with a fault point, and bounded growing buffers. */
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

static _Atomic int64_t n_allocs, fail_at;

int64_t lf__alloc_fail_at(int64_t n)
{
    atomic_store(&fail_at, n);
    return atomic_exchange(&n_allocs, 0);
}

static bool must_fail(void)
{
    int64_t at = atomic_load(&fail_at);
    return LF_UNLIKELY(atomic_fetch_add(&n_allocs, 1) + 1 == at);
}

void *lf__alloc(size_t bytes)
{
    if (must_fail()) return NULL;
    return calloc(1, bytes ? bytes : 1);
}

void *lf__alloc_array(size_t n, size_t bytes)
{
    if (bytes && n > SIZE_MAX / 2 / bytes) return NULL;
    return lf__alloc(n * bytes);
}

void *lf__realloc(void *p, size_t n, size_t bytes)
{
    if (must_fail() || (bytes && n > SIZE_MAX / 2 / bytes)) return NULL;
    return realloc(p, n > 0 && bytes > 0 ? n * bytes : 1);
}

void *lf__alloc_aligned(size_t bytes, size_t align)
{
    if (must_fail()) return NULL;
    return aligned_alloc(align, (size_t)lf__round_up((int64_t)(bytes ? bytes : 1), (int64_t)align));
}

char *lf__strdup(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = lf__alloc(n);
    return copy ? memcpy(copy, text, n) : NULL;
}

void lf__free(void *p) { free(p); }

lf_status lf__buf_add(lf__buf *buf, const void *data, size_t bytes)
{
    if (bytes > buf->max || buf->used > buf->max - bytes) {
        size_t max = buf->max;
        lf__buf_free(buf);
        return LF_FAIL(LF_ERR_INVALID, "text grows past its limit of %zu bytes", max);
    }
    if (buf->used + bytes + 1 > buf->room) {
        size_t room = buf->room ? buf->room * 2 : 256;
        while (room < buf->used + bytes + 1) room *= 2;
        char *grown = lf__realloc(buf->data, room, 1);
        if (!grown) {
            lf__buf_free(buf);
            return LF_FAIL(LF_ERR_NOMEM, "buffer of %zu bytes", room);
        }
        buf->data = grown;
        buf->room = room;
    }
    if (bytes) memcpy(buf->data + buf->used, data, bytes);
    buf->used += bytes;
    buf->data[buf->used] = 0;
    return LF_OK;
}

lf_status lf__buf_printf(lf__buf *buf, const char *format, ...)
{
    char small[1024];
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(small, sizeof small, format, args);
    lf_status rc;
    if (n < 0) {
        rc = LF_FAIL(LF_ERR_INTERNAL, "format %s", format);
    } else if ((size_t)n < sizeof small) {
        rc = lf__buf_add(buf, small, (size_t)n);
    } else {
        char *big = lf__alloc((size_t)n + 1);
        if (big) {
            vsnprintf(big, (size_t)n + 1, format, again);
            rc = lf__buf_add(buf, big, (size_t)n);
            lf__free(big);
        } else {
            rc = LF_FAIL(LF_ERR_NOMEM, "text of %d bytes", n);
        }
    }
    va_end(again);
    va_end(args);
    return rc;
}

void lf__buf_free(lf__buf *buf)
{
    lf__free(buf->data);
    *buf = (lf__buf){.max = buf->max};
}
