/* SPDX-License-Identifier: Apache-2.0 */
/* One JPEG to a square of floats: libjpeg with scaled DCT, then an antialiased resize that takes the rows as they come, so
 * that the picture is never whole in memory. Damage is told apart from harmless oddities by libjpeg's warnings. */
#include <stdio.h> /* before jpeglib.h, which needs FILE and size_t */

#include <jerror.h>
#include <jpeglib.h>
#include <setjmp.h>
#include <string.h>

#include "loader_int.h"

enum { MOST_SCANS = 200, MOST_WIDTH = 65500 };

struct lf__decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    struct jpeg_progress_mgr progress;
    jmp_buf leave;
    bool opened;  /* jpeg_create_decompress is done */
    bool in_scan; /* past the first scan header: warnings mean damage */
    bool ended_early;
    bool too_many_scans;
    char damage[JMSG_LENGTH_MAX]; /* the first warning that means damage */

    lf__decode_want want;
    lf__jpeg_head head;
    lf__filter across, down;
    uint8_t *row; /* one decoded row; CMYK has 4 bytes a pixel */
    size_t row_room;
    float *line;        /* (size, 3): the row resized */
    float *sum;         /* (size, size, 3) in the stored orientation, 0 to 255 */
    int32_t first_open; /* outputs above it are complete */
};

/* ---- libjpeg's callbacks ------------------------------------------------------------------------------------------------- */

static void leave_on_error(j_common_ptr jpeg)
{
    lf__decoder *d = jpeg->client_data;
    longjmp(d->leave, 1);
}

/* Warnings about segments that do not touch the pixels, met before the scan. */
static bool is_harmless(const lf__decoder *d, int32_t code)
{
    if (code == JWRN_ADOBE_XFORM || code == JWRN_JFIF_MAJOR || code == JWRN_BOGUS_ICC || code == JWRN_NOT_SEQUENTIAL) return true;
    return code == JWRN_EXTRANEOUS_DATA && !d->in_scan;
}

static void note_warning(j_common_ptr jpeg, int level)
{
    lf__decoder *d = jpeg->client_data;
    if (level >= 0 || d->damage[0] || is_harmless(d, jpeg->err->msg_code)) return;
    jpeg->err->format_message(jpeg, d->damage);
}

static void print_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void start_source(j_decompress_ptr jpeg) { (void)jpeg; }

/* The bytes are over: go on with an end marker, as libjpeg's own source does, and remember it. */
static boolean fill_source(j_decompress_ptr jpeg)
{
    static const JOCTET end[2] = {0xFF, JPEG_EOI};
    lf__decoder *d = jpeg->client_data;
    d->ended_early = true;
    jpeg->src->next_input_byte = end;
    jpeg->src->bytes_in_buffer = sizeof end;
    return TRUE;
}

static void skip_source(j_decompress_ptr jpeg, long bytes)
{
    struct jpeg_source_mgr *s = jpeg->src;
    while (bytes > (long)s->bytes_in_buffer) {
        bytes -= (long)s->bytes_in_buffer;
        fill_source(jpeg);
    }
    if (bytes > 0) {
        s->next_input_byte += bytes;
        s->bytes_in_buffer -= (size_t)bytes;
    }
}

/* A progressive file may repeat scans without end, each of them as dear as a decode. */
static void count_scans(j_common_ptr jpeg)
{
    lf__decoder *d = jpeg->client_data;
    if (!jpeg->is_decompressor || d->jpeg.input_scan_number <= MOST_SCANS) return;
    d->too_many_scans = true;
    longjmp(d->leave, 1);
}

/* ---- life ---------------------------------------------------------------------------------------------------------------- */

static bool create_jpeg(lf__decoder *d)
{
    if (setjmp(d->leave)) return false;
    d->jpeg.err = jpeg_std_error(&d->errors);
    d->errors.error_exit = leave_on_error;
    d->errors.emit_message = note_warning;
    d->errors.output_message = print_nothing;
    d->jpeg.client_data = d;
    jpeg_create_decompress(&d->jpeg);
    d->opened = true;
    d->source = (struct jpeg_source_mgr){.init_source = start_source,
                                         .fill_input_buffer = fill_source,
                                         .skip_input_data = skip_source,
                                         .resync_to_restart = jpeg_resync_to_restart,
                                         .term_source = start_source};
    d->progress.progress_monitor = count_scans;
    d->jpeg.src = &d->source;
    d->jpeg.progress = &d->progress;
    return true;
}

lf__decoder *lf__decoder_open(int32_t max_size)
{
    size_t side = (size_t)max_size;
    lf__decoder *d = lf__alloc(sizeof *d);
    if (!d) return NULL;
    d->line = lf__alloc_array(side * 3, sizeof *d->line);
    d->sum = lf__alloc_array(side * side * 3, sizeof *d->sum);
    if (!d->line || !d->sum || !lf__filter_open(&d->across, max_size) || !lf__filter_open(&d->down, max_size) ||
        !create_jpeg(d)) {
        lf__decoder_close(d);
        return NULL;
    }
    return d;
}

void lf__decoder_close(lf__decoder *d)
{
    if (!d) return;
    if (d->opened) jpeg_destroy_decompress(&d->jpeg);
    lf__filter_close(&d->across);
    lf__filter_close(&d->down);
    lf__free(d->row);
    lf__free(d->line);
    lf__free(d->sum);
    lf__free(d);
}

/* ---- resizing row by row ---------------------------------------------------------------------------------------------------- */

/* row: (w, 3) u8; line: (size, 3) f32 */
static void resize_row(const lf__filter *f, int32_t size, const uint8_t *row, float *line)
{
    for (int32_t x = 0; x < size; x++) {
        const float *w = f->weight + f->from[x];
        const uint8_t *p = row + (size_t)f->first[x] * 3;
        float r = 0, g = 0, b = 0;
        for (int32_t k = 0; k < f->count[x]; k++, p += 3) {
            r += w[k] * (float)p[0];
            g += w[k] * (float)p[1];
            b += w[k] * (float)p[2];
        }
        line[x * 3] = r;
        line[x * 3 + 1] = g;
        line[x * 3 + 2] = b;
    }
}

/* Add row y of the picture to every output row that it belongs to. */
static void take_row(lf__decoder *d, int32_t y)
{
    const lf__filter *f = &d->down;
    int32_t size = d->want.size, n = size * 3;
    while (d->first_open < size && f->first[d->first_open] + f->count[d->first_open] <= y) d->first_open++;
    if (d->first_open == size || f->first[d->first_open] > y) return;
    resize_row(&d->across, size, d->row, d->line);
    for (int32_t i = d->first_open; i < size && f->first[i] <= y; i++) {
        float w = f->weight[f->from[i] + y - f->first[i]], *sum = d->sum + (size_t)i * n;
        for (int32_t x = 0; x < n; x++) sum[x] += w * d->line[x];
    }
}

/* Adobe's CMYK is stored inverted; without its marker the values are plain ink. row: (w, 4) to (w, 3) u8 */
static void cmyk_to_rgb(uint8_t *row, int32_t width, bool inverted)
{
    for (int32_t x = 0; x < width; x++) {
        uint32_t ink[4];
        for (int32_t c = 0; c < 4; c++) ink[c] = inverted ? row[x * 4 + c] : 255u - row[x * 4 + c];
        for (int32_t c = 0; c < 3; c++) row[x * 3 + c] = (uint8_t)((ink[c] * ink[3] + 127) / 255);
    }
}

/* ---- decoding ---------------------------------------------------------------------------------------------------------------- */

/* The box in the stored picture, as shares: {left, top, right, bottom}. */
static void orient_box(const lf__decode_want *want, int32_t orientation, double box[4])
{
    const double lo[2] = {want->left, want->top}, hi[2] = {want->right, want->bottom};
    bool swap = orientation >= 5;
    bool flip_row = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    bool flip_column = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    int32_t column = swap ? 1 : 0, row = swap ? 0 : 1;
    box[0] = flip_column ? 1 - hi[column] : lo[column];
    box[2] = flip_column ? 1 - lo[column] : hi[column];
    box[1] = flip_row ? 1 - hi[row] : lo[row];
    box[3] = flip_row ? 1 - lo[row] : hi[row];
}

/* The smallest power of two of eighths at which the box still has `size` pixels on both sides. */
static int32_t choose_scale(const lf__jpeg_head *head, const double box[4], int32_t size)
{
    for (int32_t eighths = 1; eighths < 8; eighths *= 2)
        if ((box[2] - box[0]) * head->width * eighths / 8 >= size && (box[3] - box[1]) * head->height * eighths / 8 >= size)
            return eighths;
    return 8;
}

static lf_status prepare(lf__decoder *d, const double box[4])
{
    int32_t width = (int32_t)d->jpeg.output_width, height = (int32_t)d->jpeg.output_height, size = d->want.size;
    size_t need = (size_t)width * 4;
    if (need > d->row_room) {
        uint8_t *grown = lf__realloc(d->row, need, 1);
        if (!grown) return LF_FAIL(LF_ERR_NOMEM, "a row of %d pixels", width);
        d->row = grown;
        d->row_room = need;
    }
    if (!lf__filter_set(&d->across, size, width, box[0] * width, box[2] * width) ||
        !lf__filter_set(&d->down, size, height, box[1] * height, box[3] * height))
        return LF_FAIL(LF_ERR_NOMEM, "resizing %d x %d pixels", width, height);
    memset(d->sum, 0, (size_t)size * size * 3 * sizeof *d->sum);
    d->first_open = 0;
    return LF_OK;
}

/* Only calls of libjpeg and what cannot fail may stand between setjmp and the end: longjmp comes back here. */
static lf_status decode_rows(lf__decoder *d, const void *bytes, size_t n_bytes)
{
    struct jpeg_decompress_struct *jpeg = &d->jpeg;
    if (setjmp(d->leave)) {
        char text[JMSG_LENGTH_MAX] = "";
        if (!d->too_many_scans) d->errors.format_message((j_common_ptr)jpeg, text);
        bool no_memory = !d->too_many_scans && d->errors.msg_code == JERR_OUT_OF_MEMORY;
        jpeg_abort_decompress(jpeg);
        if (d->too_many_scans) return LF_FAIL(LF_ERR_UNSUPPORTED, "more than %d scans", MOST_SCANS);
        return LF_FAIL(no_memory ? LF_ERR_NOMEM : LF_ERR_CORRUPT, "libjpeg: %s", text);
    }
    d->source.next_input_byte = bytes;
    d->source.bytes_in_buffer = n_bytes;
    jpeg_read_header(jpeg, TRUE);
    if ((int32_t)jpeg->image_width != d->head.width || (int32_t)jpeg->image_height != d->head.height) {
        jpeg_abort_decompress(jpeg); /* the limit was checked on another size */
        return LF_FAIL(LF_ERR_CORRUPT, "header says %d x %d and %u x %u pixels", d->head.width, d->head.height, jpeg->image_width,
                       jpeg->image_height);
    }
    d->in_scan = true;
    double box[4];
    orient_box(&d->want, d->head.orientation, box);
    jpeg->scale_num = (unsigned)choose_scale(&d->head, box, d->want.size);
    jpeg->scale_denom = 8;
    bool ink = jpeg->num_components == 4;
    jpeg->out_color_space = ink ? JCS_CMYK : JCS_RGB;
    jpeg->dct_method = JDCT_ISLOW; /* the same bits with and without SIMD */
    jpeg_start_decompress(jpeg);
    lf_status rc = prepare(d, box);
    if (rc < 0) {
        jpeg_abort_decompress(jpeg);
        return rc;
    }
    while (jpeg->output_scanline < jpeg->output_height) {
        JSAMPROW rows[1] = {d->row};
        int32_t y = (int32_t)jpeg->output_scanline;
        jpeg_read_scanlines(jpeg, rows, 1);
        if (ink) cmyk_to_rgb(d->row, (int32_t)jpeg->output_width, jpeg->saw_Adobe_marker);
        take_row(d, y);
    }
    bool may_lack_end = !jpeg->progressive_mode && !jpeg->arith_code && jpeg->comps_in_scan == jpeg->num_components;
    jpeg_finish_decompress(jpeg);
    /* A file whose only fault is a missing end marker has all its pixels, if they are in one Huffman scan. */
    if (d->ended_early && !may_lack_end && !d->damage[0]) snprintf(d->damage, sizeof d->damage, "file ends early");
    return d->damage[0] ? LF_FAIL(LF_ERR_CORRUPT, "%s", d->damage) : LF_OK;
}

lf_status lf__decoder_run(lf__decoder *d, const void *bytes, size_t n_bytes, const lf__decode_want *want)
{
    lf_status rc = lf__jpeg_read_head(bytes, n_bytes, want->max_pixels, &d->head);
    if (rc < 0) return rc;
    if (d->head.width > MOST_WIDTH || d->head.height > MOST_WIDTH)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "header says %d x %d pixels, expected at most %d on a side", d->head.width,
                       d->head.height, MOST_WIDTH);
    d->want = *want;
    d->in_scan = d->ended_early = d->too_many_scans = false;
    d->damage[0] = 0;
    return decode_rows(d, bytes, n_bytes);
}

/* ---- results ------------------------------------------------------------------------------------------------------------------ */

/* Where the upright pixel (0, 0) is stored, and how far a step down or right goes, in floats. */
typedef struct walk {
    ptrdiff_t start, down, right;
} walk;

static ptrdiff_t place_of(const lf__decoder *d, int32_t y, int32_t x)
{
    int32_t size = d->want.size, sy, sx;
    lf__orient(d->head.orientation, size, y, d->want.mirror ? size - 1 - x : x, &sy, &sx);
    return ((ptrdiff_t)sy * size + sx) * 3;
}

static walk walk_of(const lf__decoder *d)
{
    walk w = {.start = place_of(d, 0, 0)};
    if (d->want.size > 1) {
        w.down = place_of(d, 1, 0) - w.start;
        w.right = place_of(d, 0, 1) - w.start;
    }
    return w;
}

void lf__decoder_planes(const lf__decoder *d, float *planes)
{
    int32_t size = d->want.size;
    size_t plane = (size_t)size * size;
    walk w = walk_of(d);
    for (int32_t y = 0; y < size; y++) {
        const float *rgb = d->sum + w.start + y * w.down;
        float *to = planes + (size_t)y * size;
        for (int32_t x = 0; x < size; x++, rgb += w.right)
            for (int32_t c = 0; c < 3; c++) to[c * plane + x] = (rgb[c] / 255.0f - 0.5f) / 0.25f;
    }
}

void lf__decoder_rgb(const lf__decoder *d, uint8_t *to)
{
    int32_t size = d->want.size;
    walk w = walk_of(d);
    for (int32_t y = 0; y < size; y++) {
        const float *rgb = d->sum + w.start + y * w.down;
        for (int32_t x = 0; x < size; x++, rgb += w.right, to += 3)
            for (int32_t c = 0; c < 3; c++) {
                float v = rgb[c] + 0.5f;
                to[c] = (uint8_t)(v > 255 ? 255 : v);
            }
    }
}

lf_status lf_decode_image(const void *bytes, size_t n_bytes, int32_t image_size, int64_t max_pixels, uint8_t *rgb)
{
    LF_CHECK_ARG((bytes || n_bytes == 0) && rgb, "bytes or rgb is NULL");
    LF_CHECK_ARG(image_size >= 1 && image_size <= 4096, "image_size is %d, expected 1 to 4096", image_size);
    LF_CHECK_ARG(max_pixels >= 1, "max_pixels is %lld, expected 1 or more", (long long)max_pixels);
    lf__decoder *d = lf__decoder_open(image_size);
    if (!d) return LF_FAIL(LF_ERR_NOMEM, "decoder for %d x %d pixels", image_size, image_size);
    lf__decode_want want = {.size = image_size, .max_pixels = max_pixels, .right = 1, .bottom = 1};
    lf_status rc = lf__decoder_run(d, bytes, n_bytes, &want);
    if (rc == LF_OK) lf__decoder_rgb(d, rgb);
    lf__decoder_close(d);
    return rc;
}
