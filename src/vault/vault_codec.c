/* SPDX-License-Identifier: Apache-2.0 */
/* Lossless codes of a slice, and the choice among them by measuring.
 *
 * Byte planes: byte j of every element together. A trained f32 has sign and exponent with about 3 bits of surprise and two low
 * bytes with 8: planes let zstd work where it can, and the rest stays raw. */
#include <string.h>
#include <zstd_errors.h>

#include "vault_int.h"

enum { PROBE_BYTES = 64 << 10, PLANE_HEAD_BYTES = 4 };
#define PLANE_PACKED 0x80000000u

lf_status lf__vault_work_open(lf__vault_work *w, size_t room)
{
    *w = (lf__vault_work){.room = room};
    w->raw = lf__alloc_aligned(room, 64);
    w->base = lf__alloc_aligned(room, 64);
    w->planes = lf__alloc_aligned(room, 64);
    w->probe = lf__alloc_aligned(PROBE_BYTES, 64);
    w->head = lf__alloc_aligned(room + LF__VAULT_HEAD_BYTES, 64);
    w->stored = w->head ? w->head + LF__VAULT_HEAD_BYTES : NULL;
    w->pack = ZSTD_createCCtx();
    w->unpack = ZSTD_createDCtx();
    if (w->raw && w->base && w->planes && w->probe && w->head && w->pack && w->unpack) return LF_OK;
    lf__vault_work_close(w);
    return LF_FAIL(LF_ERR_NOMEM, "buffers for slices of %zu bytes", room);
}

void lf__vault_work_close(lf__vault_work *w)
{
    lf__free(w->raw);
    lf__free(w->base);
    lf__free(w->planes);
    lf__free(w->probe);
    lf__free(w->head);
    ZSTD_freeCCtx(w->pack);
    ZSTD_freeDCtx(w->unpack);
    *w = (lf__vault_work){0};
}

/* ---- raw, zstd --------------------------------------------------------------------------------------------------------- */

static lf_status encode_raw(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem, int32_t level,
                            uint8_t *out, size_t room, size_t *used)
{
    (void)w, (void)base, (void)elem, (void)level;
    if (bytes > room) return LF_AGAIN;
    memcpy(out, raw, bytes);
    *used = bytes;
    return LF_OK;
}

static lf_status decode_raw(lf__vault_work *w, const uint8_t *stored, size_t stored_bytes, const uint8_t *base, size_t elem,
                            uint8_t *raw, size_t bytes)
{
    (void)w, (void)base, (void)elem;
    if (stored_bytes != bytes) return LF_FAIL(LF_ERR_CORRUPT, "raw record of %zu bytes, expected %zu", stored_bytes, bytes);
    memcpy(raw, stored, bytes);
    return LF_OK;
}

/* LF_AGAIN when the result would not fit: zstd reports exactly that as dstSize_tooSmall. */
static lf_status pack(lf__vault_work *w, const void *from, size_t bytes, int32_t level, void *to, size_t room, size_t *used)
{
    size_t n = ZSTD_compressCCtx(w->pack, to, room, from, bytes, level);
    if (!ZSTD_isError(n)) {
        *used = n;
        return LF_OK;
    }
    if (ZSTD_getErrorCode(n) == ZSTD_error_dstSize_tooSmall) return LF_AGAIN;
    return LF_FAIL(ZSTD_getErrorCode(n) == ZSTD_error_memory_allocation ? LF_ERR_NOMEM : LF_ERR_INTERNAL, "zstd: %s",
                   ZSTD_getErrorName(n));
}

static lf_status unpack(lf__vault_work *w, const void *from, size_t bytes, void *to, size_t expected)
{
    size_t n = ZSTD_decompressDCtx(w->unpack, to, expected, from, bytes);
    if (!ZSTD_isError(n) && n == expected) return LF_OK;
    if (ZSTD_isError(n)) return LF_FAIL(LF_ERR_CORRUPT, "zstd: %s", ZSTD_getErrorName(n));
    return LF_FAIL(LF_ERR_CORRUPT, "unpacks to %zu bytes, expected %zu", n, expected);
}

static lf_status encode_zstd(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem, int32_t level,
                             uint8_t *out, size_t room, size_t *used)
{
    (void)base, (void)elem;
    return pack(w, raw, bytes, level, out, room, used);
}

static lf_status decode_zstd(lf__vault_work *w, const uint8_t *stored, size_t stored_bytes, const uint8_t *base, size_t elem,
                             uint8_t *raw, size_t bytes)
{
    (void)base, (void)elem;
    return unpack(w, stored, stored_bytes, raw, bytes);
}

/* ---- byte planes ------------------------------------------------------------------------------------------------------- */

/* raw, base: (n, elem) bytes -> planes: (elem, n); base may be NULL */
static void split(const uint8_t *raw, const uint8_t *base, size_t n, size_t elem, uint8_t *planes)
{
    for (size_t e = 0; e < elem; e++) {
        uint8_t *to = planes + e * n;
        const uint8_t *x = raw + e, *y = base ? base + e : NULL;
        if (y)
            for (size_t i = 0; i < n; i++) to[i] = x[i * elem] ^ y[i * elem];
        else
            for (size_t i = 0; i < n; i++) to[i] = x[i * elem];
    }
}

/* planes: (elem, n) -> raw: (n, elem) */
static void join(const uint8_t *planes, const uint8_t *base, size_t n, size_t elem, uint8_t *raw)
{
    for (size_t e = 0; e < elem; e++) {
        const uint8_t *from = planes + e * n;
        uint8_t *x = raw + e;
        const uint8_t *y = base ? base + e : NULL;
        if (y)
            for (size_t i = 0; i < n; i++) x[i * elem] = from[i] ^ y[i * elem];
        else
            for (size_t i = 0; i < n; i++) x[i * elem] = from[i];
    }
}

static void put_u32(uint8_t *to, uint32_t x)
{
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(x >> (8 * i));
}

static uint32_t get_u32(const uint8_t *from)
{
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/* Each plane: u32 (bytes, top bit: zstd), then the bytes. */
static lf_status encode_planes(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem,
                               int32_t level, uint8_t *out, size_t room, size_t *used)
{
    size_t n = bytes / elem, at = 0;
    split(raw, base, n, elem, w->planes);
    for (size_t e = 0; e < elem; e++) {
        const uint8_t *plane = w->planes + e * n;
        if (at + PLANE_HEAD_BYTES >= room) return LF_AGAIN;
        size_t left = room - at - PLANE_HEAD_BYTES, got = n;
        lf_status rc = pack(w, plane, n, level, out + at + PLANE_HEAD_BYTES, left < n ? left : n, &got);
        if (rc < 0) return rc;
        uint32_t head = (uint32_t)got | PLANE_PACKED;
        if (rc == LF_AGAIN) {
            if (n > left) return LF_AGAIN;
            memcpy(out + at + PLANE_HEAD_BYTES, plane, n);
            got = n;
            head = (uint32_t)n;
        }
        put_u32(out + at, head);
        at += PLANE_HEAD_BYTES + got;
    }
    *used = at;
    return LF_OK;
}

static lf_status decode_planes(lf__vault_work *w, const uint8_t *stored, size_t stored_bytes, const uint8_t *base, size_t elem,
                               uint8_t *raw, size_t bytes)
{
    size_t n = bytes / elem, at = 0;
    for (size_t e = 0; e < elem; e++) {
        uint8_t *plane = w->planes + e * n;
        if (stored_bytes - at < PLANE_HEAD_BYTES) return LF_FAIL(LF_ERR_CORRUPT, "plane %zu is missing", e);
        uint32_t head = get_u32(stored + at), size = head & ~PLANE_PACKED;
        at += PLANE_HEAD_BYTES;
        if (size > stored_bytes - at)
            return LF_FAIL(LF_ERR_CORRUPT, "plane %zu has %u bytes, %zu are left", e, size, stored_bytes - at);
        if (head & PLANE_PACKED) {
            lf_status rc = unpack(w, stored + at, size, plane, n);
            if (rc < 0) return rc;
        } else {
            if (size != n) return LF_FAIL(LF_ERR_CORRUPT, "plane %zu has %u bytes, expected %zu", e, size, n);
            memcpy(plane, stored + at, n);
        }
        at += size;
    }
    if (at != stored_bytes) return LF_FAIL(LF_ERR_CORRUPT, "%zu bytes behind the last plane", stored_bytes - at);
    join(w->planes, base, n, elem, raw);
    return LF_OK;
}

static lf_status encode_own_planes(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem,
                                   int32_t level, uint8_t *out, size_t room, size_t *used)
{
    (void)base;
    return encode_planes(w, raw, NULL, bytes, elem, level, out, room, used);
}

static lf_status decode_own_planes(lf__vault_work *w, const uint8_t *stored, size_t stored_bytes, const uint8_t *base,
                                   size_t elem, uint8_t *raw, size_t bytes)
{
    (void)base;
    return decode_planes(w, stored, stored_bytes, NULL, elem, raw, bytes);
}

/* Numbers are stored in files: never renumber. */
const lf__vault_codec lf__vault_codecs[LF__N_CODECS] = {
    [LF__CODEC_RAW] = {"raw", false, encode_raw, decode_raw},
    [LF__CODEC_ZSTD] = {"zstd", false, encode_zstd, decode_zstd},
    [LF__CODEC_PLANES] = {"planes", false, encode_own_planes, decode_own_planes},
    [LF__CODEC_XOR] = {"xor", true, encode_planes, decode_planes},
};

/* ---- choice ------------------------------------------------------------------------------------------------------------ */

/* The codec that is smallest on a window in the middle of the slice. */
static lf_status choose_codec(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem,
                              int32_t level)
{
    size_t window = bytes < PROBE_BYTES ? bytes : PROBE_BYTES, at = (bytes - window) / 2 / elem * elem, best = window;
    window = window / elem * elem;
    w->codec = LF__CODEC_RAW;
    for (int32_t c = LF__CODEC_ZSTD; c < LF__N_CODECS; c++) {
        const lf__vault_codec *codec = &lf__vault_codecs[c];
        size_t used = 0;
        if (codec->needs_base && !base) continue;
        lf_status rc = codec->encode(w, raw + at, base ? base + at : NULL, window, elem, level, w->probe, best, &used);
        if (rc < 0) return rc;
        if (rc == LF_AGAIN || used >= best) continue;
        best = used;
        w->codec = c;
    }
    return LF_OK;
}

lf_status lf__vault_encode(lf__vault_work *w, const uint8_t *raw, const uint8_t *base, size_t bytes, size_t elem, int32_t level)
{
    w->codec = LF__CODEC_RAW;
    lf_status rc = level > 0 ? choose_codec(w, raw, base, bytes, elem, level) : LF_OK;
    if (rc < 0) return rc;
    rc = lf__vault_codecs[w->codec].encode(w, raw, base, bytes, elem, level, w->stored, bytes, &w->stored_bytes);
    if (rc == LF_AGAIN) { /* the probe promised more than the whole keeps */
        w->codec = LF__CODEC_RAW;
        rc = encode_raw(w, raw, NULL, bytes, elem, 0, w->stored, bytes, &w->stored_bytes);
    }
    if (rc == LF_OK) w->checksum = lf__vault_checksum(w->stored, w->stored_bytes);
    return rc;
}
