/* SPDX-License-Identifier: Apache-2.0 */
/* The contact sheet of `loongforge data show`. */
#include <errno.h>
#include <stdio.h> /* before jpeglib.h, which needs FILE and size_t */

#include <jansson.h>
#include <jpeglib.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "cmd.h"
#include "data.h"

enum { GAP = 4, QUALITY = 92, MOST_CELLS = 4096 };

typedef struct sheet {
    int32_t columns, rows, cell; /* cell: side of an image, pixels */
    int32_t width, height;
    uint8_t *rgb; /* (height, width, 3) */
} sheet;

static int open_sheet(sheet *s, int64_t n, int32_t cell)
{
    s->columns = 1;
    while ((int64_t)s->columns * s->columns < n) s->columns++;
    s->rows = (int32_t)((n + s->columns - 1) / s->columns);
    s->cell = cell;
    s->width = s->columns * (cell + GAP) + GAP;
    s->height = s->rows * (cell + GAP) + GAP;
    if (s->width > JPEG_MAX_DIMENSION || s->height > JPEG_MAX_DIMENSION) return 0;
    s->rgb = malloc((size_t)s->width * (size_t)s->height * 3);
    if (s->rgb) memset(s->rgb, 255, (size_t)s->width * (size_t)s->height * 3);
    return s->rgb != NULL;
}

/* rgb: (cell, cell, 3) u8; NULL: a red cell */
static void put_cell(sheet *s, int64_t i, const uint8_t *rgb)
{
    int32_t top = GAP + (int32_t)(i / s->columns) * (s->cell + GAP), left = GAP + (int32_t)(i % s->columns) * (s->cell + GAP);
    for (int32_t y = 0; y < s->cell; y++) {
        uint8_t *to = s->rgb + ((size_t)(top + y) * (size_t)s->width + (size_t)left) * 3;
        if (rgb) memcpy(to, rgb + (size_t)y * (size_t)s->cell * 3, (size_t)s->cell * 3);
        for (int32_t x = 0; !rgb && x < s->cell; x++) memcpy(to + x * 3, "\xd0\x20\x20", 3);
    }
}

typedef struct jpeg_errors {
    struct jpeg_error_mgr base;
    jmp_buf leave;
} jpeg_errors;

static void leave_on_error(j_common_ptr jpeg) { longjmp(((jpeg_errors *)jpeg->err)->leave, 1); }

/* 0, or -1 when the file could not be written. */
static int write_jpeg(const sheet *s, FILE *file)
{
    struct jpeg_compress_struct jpeg;
    jpeg_errors errors;
    jpeg.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = leave_on_error;
    if (setjmp(errors.leave)) {
        jpeg_destroy_compress(&jpeg);
        return -1;
    }
    jpeg_create_compress(&jpeg);
    jpeg_stdio_dest(&jpeg, file);
    jpeg.image_width = (JDIMENSION)s->width;
    jpeg.image_height = (JDIMENSION)s->height;
    jpeg.input_components = 3;
    jpeg.in_color_space = JCS_RGB;
    jpeg_set_defaults(&jpeg);
    jpeg_set_quality(&jpeg, QUALITY, TRUE);
    jpeg.comp_info[0].h_samp_factor = jpeg.comp_info[0].v_samp_factor = 1;
    jpeg_start_compress(&jpeg, TRUE);
    while (jpeg.next_scanline < jpeg.image_height) {
        JSAMPROW row[1] = {s->rgb + (size_t)jpeg.next_scanline * (size_t)s->width * 3};
        jpeg_write_scanlines(&jpeg, row, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    return 0;
}

/* A turn's text, its lines indented; the image's marker is left out. */
static void write_value(FILE *to, const char *value)
{
    if (strncmp(value, "<image>", 7) == 0) value += value[7] == '\n' ? 8 : 7;
    for (; *value; value++) {
        fputc(*value, to);
        if (*value == '\n') fputs("    ", to);
    }
    fputc('\n', to);
}

static void write_text(FILE *to, const sheet *s, int64_t i, const lf_sample *sample, const char *fault)
{
    fprintf(to, "row %lld, column %lld: %.*s\n", (long long)(i / s->columns + 1), (long long)(i % s->columns + 1),
            (int)sample->id_bytes, sample->id);
    if (fault) fprintf(to, "  bad image: %s\n", fault);
    json_t *root = sample->text ? json_loadb(sample->text, (size_t)sample->text_bytes, 0, NULL) : NULL;
    const json_t *turns = json_object_get(root, "turns");
    if (!turns) turns = json_object_get(root, "conversations");
    for (size_t k = 0; k < json_array_size(turns); k++) {
        const char *from = json_string_value(json_object_get(json_array_get(turns, k), "from"));
        const char *value = json_string_value(json_object_get(json_array_get(turns, k), "value"));
        fprintf(to, "  %s: ", from ? from : "?");
        write_value(to, value ? value : "?");
    }
    if (sample->text && !root) fprintf(to, "  bad text: no JSON\n");
    json_decref(root);
}

/* Decode the samples into the sheet and tell their texts. */
static int fill(const lf_dataset *set, const data_range *range, sheet *s, int64_t max_pixels, FILE *text)
{
    uint8_t *rgb = malloc((size_t)s->cell * (size_t)s->cell * 3);
    if (!rgb) return cmd_fail("no memory for an image of %d x %d pixels", s->cell, s->cell);
    for (int64_t i = range->first; i < range->end; i++) {
        lf_sample sample = {.size = sizeof sample};
        lf_status rc = lf_dataset_get(set, i, &sample);
        memset(rgb, 128, (size_t)s->cell * (size_t)s->cell * 3); /* a sample without an image is grey, as for the model */
        if (rc == LF_OK && sample.image) rc = lf_decode_image(sample.image, (size_t)sample.image_bytes, s->cell, max_pixels, rgb);
        put_cell(s, i - range->first, rc < 0 ? NULL : rgb);
        write_text(text, s, i - range->first, &sample, rc < 0 ? lf_error_text() : NULL);
    }
    free(rgb);
    return CMD_OK;
}

static FILE *open_output(const char *path)
{
    FILE *file = fopen(path, "wb");
    if (!file) cmd_fail("cannot write %s: %s", path, strerror(errno));
    return file;
}

/* "sheet.jpg" to "sheet.txt"; another ending is kept in front. */
static void name_text(const char *out, char *path, size_t size)
{
    const char *slash = strrchr(out, '/'), *dot = strrchr(out, '.');
    int n = dot && (!slash || dot > slash) && dot != out ? (int)(dot - out) : (int)strlen(out);
    snprintf(path, size, "%.*s.txt", n, out);
}

static int close_output(FILE *file, const char *path, int code)
{
    int bad = ferror(file);
    if (fclose(file) != 0) bad = 1;
    return bad && code == CMD_OK ? cmd_fail("cannot write %s: %s", path, strerror(errno)) : code;
}

int data_show(const lf_dataset *set, const data_range *range, const char *out, int32_t image_size, int64_t max_pixels)
{
    sheet s = {0};
    char text_path[4096];
    if (range->end - range->first > MOST_CELLS)
        return cmd_fail("--n is %lld, expected at most %d", (long long)(range->end - range->first), MOST_CELLS);
    name_text(out, text_path, sizeof text_path);
    if (!open_sheet(&s, range->end - range->first, image_size))
        return cmd_fail("a sheet of %d x %d pixels is too large; hint: a smaller --n or --image_size", s.width, s.height);
    FILE *picture = open_output(out), *text = picture ? open_output(text_path) : NULL;
    int code = text ? fill(set, range, &s, max_pixels, text) : CMD_FAILED;
    if (code == CMD_OK && write_jpeg(&s, picture) < 0) code = cmd_fail("cannot write %s", out);
    if (picture) code = close_output(picture, out, code);
    if (text) code = close_output(text, text_path, code);
    free(s.rgb);
    if (code == CMD_OK)
        printf("%s: %lld samples in %d columns; texts in %s\n", out, (long long)(range->end - range->first), s.columns,
               text_path);
    return code;
}
