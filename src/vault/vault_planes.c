/* SPDX-License-Identifier: Apache-2.0 */
/* The map's memory as the vault reads and writes it: ranges of one role, in one piece or one piece a parameter. */
#include <string.h>

#include "vault_int.h"

lf_status lf__vault_view_open(lf__vault_view *view, const lf_map *map, int32_t klass, int32_t role)
{
    lf_status rc = LF_OK;
    lf_class_info info = {.size = sizeof info};
    *view = (lf__vault_view){0};
    LF_TRY(lf_map_get_class(map, klass, &info));
    lf_range all = {klass, 0, 0, info.count};
    int32_t n = 0;
    rc = lf_map_pieces(map, &all, role, NULL, &n); /* asks only how many */
    if (rc < 0 && rc != LF_ERR_NOMEM) goto out;
    rc = LF_OK;
    view->pieces = lf__alloc_array((size_t)n, sizeof *view->pieces);
    view->starts = lf__alloc_array((size_t)n, sizeof *view->starts);
    if (!view->pieces || !view->starts) LF_THROW(LF_ERR_NOMEM, "%d pieces of class %d", n, klass);
    view->n = n;
    LF_TRY(lf_map_pieces(map, &all, role, view->pieces, &view->n));
    for (int32_t i = 1; i < view->n; i++) view->starts[i] = view->starts[i - 1] + view->pieces[i - 1].count;
    view->elem_bytes = lf_dtype_bytes(info.role_dtype[role]);
    lf_device *device = lf_map_device(map);
    lf_device_info about = {.size = sizeof about};
    if (device) LF_TRY(lf_device_get_info(device, &about));
    view->device = device && about.kind != 1 ? device : NULL;
out:
    if (rc < 0) lf__vault_view_close(view);
    return rc;
}

void lf__vault_view_close(lf__vault_view *view)
{
    lf__free(view->pieces);
    lf__free(view->starts);
    *view = (lf__vault_view){0};
}

/* The piece that holds an element. */
static int32_t find_piece(const lf__vault_view *view, int64_t element)
{
    int32_t low = 0, high = view->n - 1;
    while (low < high) {
        int32_t mid = low + (high - low + 1) / 2;
        if (view->starts[mid] <= element) low = mid;
        else high = mid - 1;
    }
    return low;
}

lf_status lf__vault_gather(const lf__vault_view *view, int64_t first, int64_t count, uint8_t *to, lf_stream *stream)
{
    for (int32_t i = find_piece(view, first); count > 0; i++) {
        const lf_piece *p = &view->pieces[i];
        int64_t skip = first - view->starts[i], n = p->count - skip < count ? p->count - skip : count;
        size_t bytes = (size_t)n * view->elem_bytes;
        const char *from = p->data ? (const char *)p->data + (size_t)skip * view->elem_bytes : NULL;
        if (!from) memset(to, 0, bytes);
        else if (!view->device) memcpy(to, from, bytes);
        else {
            lf_status rc = lf_copy(view->device, to, from, bytes, stream);
            if (rc < 0) return rc;
        }
        to += bytes;
        first += n;
        count -= n;
    }
    return LF_OK;
}

lf_status lf__vault_scatter(const lf__vault_view *view, int64_t first, int64_t count, const uint8_t *from)
{
    for (int32_t i = find_piece(view, first); count > 0; i++) {
        const lf_piece *p = &view->pieces[i];
        int64_t skip = first - view->starts[i], n = p->count - skip < count ? p->count - skip : count;
        size_t bytes = (size_t)n * view->elem_bytes;
        char *to = p->data ? (char *)p->data + (size_t)skip * view->elem_bytes : NULL;
        if (to && !view->device) memcpy(to, from, bytes);
        else if (to) {
            lf_status rc = lf_copy(view->device, to, from, bytes, NULL);
            if (rc < 0) return rc;
        }
        from += bytes;
        first += n;
        count -= n;
    }
    return LF_OK;
}

/* Round to nearest even, subnormals and infinities included; a NaN keeps its sign and upper payload bits. */
static uint16_t f16_from_f32(uint32_t u)
{
    uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or is infinite */
    if (magnitude < 0x33000001u) return (uint16_t)sign;              /* at most half of the smallest subnormal */
    uint32_t exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffffu) | 0x800000u, shift = 13;
    uint32_t bits = (exponent - 112) << 10;
    if (exponent < 113) { /* subnormal: 2^-24 is one unit */
        shift = 126 - exponent;
        bits = 0;
    } else {
        mantissa &= 0x7fffffu;
    }
    uint32_t half = 1u << (shift - 1), rest = mantissa & ((1u << shift) - 1), kept = mantissa >> shift;
    if (rest > half || (rest == half && (kept & 1u))) kept++;
    return (uint16_t)(sign | (bits + kept)); /* a carry moves into the exponent, as it should */
}

void lf__vault_round(const uint8_t *f32, int64_t count, int32_t dtype, uint8_t *out)
{
    if (dtype == LF_DTYPE_F32) {
        memcpy(out, f32, (size_t)count * 4);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint32_t u;
        float x;
        memcpy(&u, f32 + i * 4, 4);
        memcpy(&x, &u, 4);
        uint16_t y = dtype == LF_DTYPE_BF16 ? lf__bf16_from_f32(x) : f16_from_f32(u);
        memcpy(out + i * 2, &y, 2);
    }
}
