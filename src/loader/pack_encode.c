/* SPDX-License-Identifier: Apache-2.0 */
/* RGB to JPEG in memory. */
#include <stdio.h> /* before jpeglib.h, which needs FILE and size_t */

#include <jpeglib.h>
#include <setjmp.h>

#include "pack_int.h"

typedef struct encoder {
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_destination_mgr target;
    jmp_buf leave;
    lf__buf *out;
    lf_status status; /* of adding to out */
    JOCTET chunk[4096];
} encoder;

static void leave_on_error(j_common_ptr jpeg)
{
    encoder *e = jpeg->client_data;
    longjmp(e->leave, 1);
}

static void print_nothing(j_common_ptr jpeg) { (void)jpeg; }

static void start_target(j_compress_ptr jpeg)
{
    encoder *e = jpeg->client_data;
    e->target.next_output_byte = e->chunk;
    e->target.free_in_buffer = sizeof e->chunk;
}

static void add_bytes(encoder *e, size_t bytes)
{
    e->status = lf__buf_add(e->out, e->chunk, bytes);
    if (e->status < 0) longjmp(e->leave, 1);
}

static boolean empty_target(j_compress_ptr jpeg)
{
    add_bytes(jpeg->client_data, sizeof((encoder *)0)->chunk);
    start_target(jpeg);
    return TRUE;
}

static void end_target(j_compress_ptr jpeg)
{
    encoder *e = jpeg->client_data;
    add_bytes(e, sizeof e->chunk - e->target.free_in_buffer);
}

/* Only calls of libjpeg and what cannot fail between setjmp and the end. */
static lf_status encode(encoder *e, const uint8_t *rgb, int32_t width, int32_t height, int32_t quality, bool chroma_420)
{
    struct jpeg_compress_struct *jpeg = &e->jpeg;
    if (setjmp(e->leave)) {
        char text[JMSG_LENGTH_MAX];
        if (e->status < 0) return e->status;
        e->errors.format_message((j_common_ptr)jpeg, text);
        return LF_FAIL(LF_ERR_INTERNAL, "encoding %d x %d pixels: %s", width, height, text);
    }
    jpeg_create_compress(jpeg);
    jpeg->dest = &e->target;
    jpeg->image_width = (JDIMENSION)width;
    jpeg->image_height = (JDIMENSION)height;
    jpeg->input_components = 3;
    jpeg->in_color_space = JCS_RGB;
    jpeg_set_defaults(jpeg);
    jpeg_set_quality(jpeg, quality, TRUE);
    jpeg->dct_method = JDCT_ISLOW; /* the same bits with and without SIMD */
    jpeg->comp_info[0].h_samp_factor = jpeg->comp_info[0].v_samp_factor = chroma_420 ? 2 : 1;
    jpeg_start_compress(jpeg, TRUE);
    while (jpeg->next_scanline < jpeg->image_height) {
        JSAMPROW row[1] = {(JSAMPROW)(uintptr_t)(rgb + (size_t)jpeg->next_scanline * (size_t)width * 3)};
        jpeg_write_scanlines(jpeg, row, 1);
    }
    jpeg_finish_compress(jpeg);
    return LF_OK;
}

lf_status lf__pack_encode(const uint8_t *rgb, int32_t width, int32_t height, int32_t quality, bool chroma_420, lf__buf *out)
{
    encoder e = {.out = out};
    e.jpeg.err = jpeg_std_error(&e.errors);
    e.errors.error_exit = leave_on_error;
    e.errors.output_message = print_nothing;
    e.jpeg.client_data = &e;
    e.target = (struct jpeg_destination_mgr){
        .init_destination = start_target, .empty_output_buffer = empty_target, .term_destination = end_target};
    lf_status rc = encode(&e, rgb, width, height, quality, chroma_420);
    jpeg_destroy_compress(&e.jpeg);
    return rc;
}
