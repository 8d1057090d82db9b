/* SPDX-License-Identifier: Apache-2.0 */
/* The markers of a JPEG file up to its first scan: size, process, EXIF orientation. */
#include <string.h>

#include "loader_int.h"

/* What a file that is no JPEG looks like; NULL: nothing known. */
static const char *name_content(const uint8_t *p, size_t n)
{
    static const struct {
        const char *magic;
        uint8_t bytes, at;
        const char *name;
    } known[] = {
        {"\x89PNG", 4, 0, "a PNG file"},      {"GIF8", 4, 0, "a GIF file"},     {"WEBP", 4, 8, "a WebP file"},
        {"II*\0", 4, 0, "a TIFF file"},       {"MM\0*", 4, 0, "a TIFF file"},   {"BM", 2, 0, "a BMP file"},
        {"<!DO", 4, 0, "an HTML page"},       {"<!do", 4, 0, "an HTML page"},   {"<htm", 4, 0, "an HTML page"},
        {"ftypavif", 8, 4, "an AVIF file"},   {"ftyphei", 7, 4, "a HEIF file"}, {"%PDF", 4, 0, "a PDF file"},
        {"\xff\x0a", 2, 0, "a JPEG XL file"}, {"\0\0\0\0", 4, 0, "zero bytes"},
    };
    for (size_t i = 0; i < LF_COUNT(known); i++)
        if (n >= (size_t)known[i].at + known[i].bytes && memcmp(p + known[i].at, known[i].magic, known[i].bytes) == 0)
            return known[i].name;
    return NULL;
}

static uint32_t load(const uint8_t *p, int32_t bytes, bool big)
{
    uint32_t v = 0;
    for (int32_t i = 0; i < bytes; i++) v |= (uint32_t)p[big ? i : bytes - 1 - i] << (8 * (bytes - 1 - i));
    return v;
}

/* Orientation of an APP1 segment's body; 0 when it has none that can be read. A broken EXIF never makes an image bad. */
static int32_t read_orientation(const uint8_t *p, size_t n)
{
    if (n < 14 || memcmp(p, "Exif\0\0", 6) != 0) return 0;
    p += 6;
    n -= 6;
    bool big = p[0] == 'M' && p[1] == 'M';
    if ((!big && (p[0] != 'I' || p[1] != 'I')) || load(p + 2, 2, big) != 42) return 0;
    uint32_t at = load(p + 4, 4, big);
    if (at > n || n - at < 2) return 0;
    uint32_t entries = load(p + at, 2, big);
    for (uint32_t i = 0; i < entries; i++) {
        size_t entry = (size_t)at + 2 + (size_t)i * 12;
        if (entry + 12 > n) return 0;
        if (load(p + entry, 2, big) != 0x0112) continue;
        uint32_t value = load(p + entry + 8, 2, big);
        bool is_short = load(p + entry + 2, 2, big) == 3 && load(p + entry + 4, 4, big) == 1;
        return is_short && value >= 1 && value <= 8 ? (int32_t)value : 0;
    }
    return 0;
}

static lf_status read_frame(const uint8_t *p, size_t n, int32_t marker, int64_t max_pixels, lf__jpeg_head *head)
{
    if (head->sof) return LF_FAIL(LF_ERR_CORRUPT, "two frame headers (SOF)");
    if (n < 6) return LF_FAIL(LF_ERR_CORRUPT, "frame header of %zu bytes", n);
    bool decoded = marker == 0xC0 || marker == 0xC1 || marker == 0xC2 || marker == 0xC9 || marker == 0xCA;
    if (!decoded) return LF_FAIL(LF_ERR_UNSUPPORTED, "JPEG process SOF%d is not decoded", marker - 0xC0);
    *head = (lf__jpeg_head){.width = (int32_t)load(p + 3, 2, true),
                            .height = (int32_t)load(p + 1, 2, true),
                            .n_components = p[5],
                            .precision = p[0],
                            .sof = marker,
                            .orientation = head->orientation,
                            .n_junk = head->n_junk};
    if (head->precision != 8) return LF_FAIL(LF_ERR_UNSUPPORTED, "samples of %d bits, expected 8", head->precision);
    if (head->width == 0 || head->height == 0)
        return LF_FAIL(LF_ERR_CORRUPT, "header says %d x %d pixels", head->width, head->height);
    if ((int64_t)head->width * head->height > max_pixels)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "header says %d x %d pixels, more than max_pixels = %lld", head->width, head->height,
                       (long long)max_pixels);
    if (head->n_components != 1 && head->n_components != 3 && head->n_components != 4)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "%d colour components, expected 1, 3 or 4", head->n_components);
    return LF_OK;
}

/* One segment with a length. *done: it starts the scan. */
static lf_status read_segment(const uint8_t *body, size_t n, int32_t marker, int64_t max_pixels, lf__jpeg_head *head, bool *done)
{
    *done = marker == 0xDA;
    if (*done && !head->sof) return LF_FAIL(LF_ERR_CORRUPT, "scan without a frame header (SOF)");
    if (marker == 0xE1 && head->orientation == 0) head->orientation = read_orientation(body, n);
    if (marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC)
        return read_frame(body, n, marker, max_pixels, head);
    return LF_OK;
}

lf_status lf__jpeg_read_head(const void *bytes, size_t n_bytes, int64_t max_pixels, lf__jpeg_head *head)
{
    const uint8_t *p = bytes;
    *head = (lf__jpeg_head){0};
    if (n_bytes < 4 || p[0] != 0xFF || p[1] != 0xD8) {
        const char *name = name_content(p, n_bytes);
        if (n_bytes < 4) return LF_FAIL(LF_ERR_FORMAT, "not a JPEG: %zu bytes", n_bytes);
        return LF_FAIL(LF_ERR_FORMAT, "not a JPEG: %s%s", name ? name : "starts with other bytes than FF D8",
                       name ? ", whatever its name" : "");
    }
    bool done = false;
    for (size_t at = 2; !done;) {
        while (at < n_bytes && p[at] != 0xFF) at++, head->n_junk++;
        while (at < n_bytes && p[at] == 0xFF) at++; /* the marker, with fill bytes before it */
        if (at >= n_bytes) return LF_FAIL(LF_ERR_CORRUPT, "file ends in the header");
        int32_t marker = p[at++];
        if (marker == 0) { /* a stuffed byte where no scan is */
            head->n_junk += 2;
            continue;
        }
        if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD7)) continue; /* no length */
        if (marker == 0xD9) return LF_FAIL(LF_ERR_CORRUPT, "no image before the end marker");
        if (marker == 0xD8) return LF_FAIL(LF_ERR_CORRUPT, "two start markers (SOI)");
        size_t length = n_bytes - at >= 2 ? load(p + at, 2, true) : 0;
        if (length > n_bytes - at || n_bytes - at < 2) return LF_FAIL(LF_ERR_CORRUPT, "file ends in the header");
        if (length < 2) return LF_FAIL(LF_ERR_CORRUPT, "segment FF%02X of length %zu", (unsigned)marker, length);
        lf_status rc = read_segment(p + at + 2, length - 2, marker, max_pixels, head, &done);
        if (rc < 0) return rc;
        at += length;
    }
    if (head->orientation == 0) head->orientation = 1;
    return LF_OK;
}
