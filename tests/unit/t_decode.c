/* SPDX-License-Identifier: Apache-2.0 */
/* JPEG heads, decoding, resizing, orientation; the odd files of the test data, and self-made ones that always run. */
#include <stdio.h>

#include <jpeglib.h>

#include "io/io.h"
#include "lf_test.h"
#include "loader/loader_int.h"

enum { MOST_PIXELS = 100000000 };

/* ---- making files ---------------------------------------------------------------------------------------------------- */

typedef struct jpeg_file {
    uint8_t *bytes;
    unsigned long n;
} jpeg_file;

static void paint(uint8_t *p, int32_t w, int32_t h, int32_t y, int32_t x)
{
    p[0] = (uint8_t)(40 + 180 * x / w);
    p[1] = (uint8_t)(40 + 180 * y / h);
    p[2] = (uint8_t)(x * 4 < w && y * 4 < h ? 220 : 30); /* the upright top left corner is blue */
}

/* A smooth picture with a blue corner; orientation o > 1 stores it turned, with an EXIF segment that says so. */
static jpeg_file make(int32_t w, int32_t h, int32_t components, int32_t orientation, void (*tune)(j_compress_ptr))
{
    struct jpeg_compress_struct c;
    struct jpeg_error_mgr errors;
    jpeg_file file = {0};
    c.err = jpeg_std_error(&errors);
    jpeg_create_compress(&c);
    jpeg_mem_dest(&c, &file.bytes, &file.n);
    bool turned = orientation >= 5;
    int32_t stored_w = turned ? h : w, stored_h = turned ? w : h;
    c.image_width = (unsigned)stored_w;
    c.image_height = (unsigned)stored_h;
    c.input_components = components;
    c.in_color_space = components == 1 ? JCS_GRAYSCALE : components == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&c);
    jpeg_set_quality(&c, 95, TRUE);
    if (tune) tune(&c);
    jpeg_start_compress(&c, TRUE);
    if (orientation >= 0) {
        uint8_t exif[32] = "Exif\0\0MM\0*\0\0\0\010\0\001\001\022\0\003\0\0\0\001\0";
        exif[25] = (uint8_t)orientation;
        jpeg_write_marker(&c, JPEG_APP0 + 1, exif, 32);
    }
    uint8_t *row = malloc((size_t)stored_w * 4);
    for (int32_t r = 0; r < stored_h; r++) {
        for (int32_t k = 0; k < stored_w; k++) {
            int32_t y = turned ? k : r, x = turned ? r : k; /* upright place, before flips */
            if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7) x = w - 1 - x;
            if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8) y = h - 1 - y;
            uint8_t rgb[3];
            paint(rgb, w, h, y, x);
            if (components == 1) row[k] = rgb[0];
            if (components == 3) memcpy(row + k * 3, rgb, 3);
            if (components == 4) { /* Adobe's inverted ink, no black */
                memcpy(row + k * 4, rgb, 3);
                row[k * 4 + 3] = 255;
            }
        }
        jpeg_write_scanlines(&c, &row, 1);
    }
    jpeg_finish_compress(&c);
    jpeg_destroy_compress(&c);
    free(row);
    return file;
}

static void with_adobe(j_compress_ptr c) { c->write_Adobe_marker = TRUE; }
static void progressive(j_compress_ptr c) { jpeg_simple_progression(c); }
static void chroma_444(j_compress_ptr c) { c->comp_info[0].h_samp_factor = c->comp_info[0].v_samp_factor = 1; }
static void with_restarts(j_compress_ptr c) { c->restart_interval = 4; }

static double mean_difference(const uint8_t *a, const uint8_t *b, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += abs(a[i] - b[i]);
    return sum / n;
}

/* ---- heads ----------------------------------------------------------------------------------------------------------- */

TEST(head_says_size_and_orientation)
{
    jpeg_file f = make(70, 50, 3, 6, NULL);
    lf__jpeg_head head;
    CHECK_OK(lf__jpeg_read_head(f.bytes, f.n, MOST_PIXELS, &head));
    CHECK_EQ(head.width, 50); /* stored lying on its side */
    CHECK_EQ(head.height, 70);
    CHECK_EQ(head.n_components, 3);
    CHECK_EQ(head.orientation, 6);
    CHECK_EQ(head.sof, 0xC0);
    free(f.bytes);
}

TEST(head_ends_cleanly_wherever_the_file_is_cut)
{
    jpeg_file f = make(40, 40, 3, 1, NULL);
    lf__jpeg_head head;
    int32_t bad = 0, good = 0;
    for (unsigned long n = 0; n < f.n; n++) {
        uint8_t *copy = malloc(n ? n : 1); /* exactly n bytes: a sanitizer sees a read past the end */
        memcpy(copy, f.bytes, n);
        if (lf__jpeg_read_head(copy, n, MOST_PIXELS, &head) == LF_OK) good++;
        else bad++;
        free(copy);
    }
    CHECK(bad > 300);
    CHECK(good > 100);
    free(f.bytes);
}

TEST(head_names_what_a_file_is_instead)
{
    static const struct {
        const char *bytes, *name;
    } files[] = {{"\x89PNG\r\n\x1a\n....", "PNG"},
                 {"RIFF....WEBPVP8 ", "WebP"},
                 {"<!DOCTYPE html>...", "HTML"},
                 {"hello, world, hello", "FF D8"}};
    lf__jpeg_head head;
    for (size_t i = 0; i < LF_COUNT(files); i++) {
        CHECK_STATUS(lf__jpeg_read_head(files[i].bytes, 16, MOST_PIXELS, &head), LF_ERR_FORMAT);
        CHECK_HAS(lf_error_text(), files[i].name);
    }
    CHECK_STATUS(lf__jpeg_read_head(NULL, 0, MOST_PIXELS, &head), LF_ERR_FORMAT);
}

TEST(pixel_limit_holds_before_memory_is_taken)
{
    jpeg_file f = make(16, 16, 1, -1, NULL);
    uint8_t rgb[8 * 8 * 3];
    for (unsigned long i = 0; i + 8 < f.n; i++)
        if (f.bytes[i] == 0xFF && f.bytes[i + 1] == 0xC0) memset(f.bytes + i + 5, 0xFF, 4); /* 65535 x 65535 */
    CHECK_STATUS(lf_decode_image(f.bytes, f.n, 8, MOST_PIXELS, rgb), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "65535 x 65535");
    CHECK_HAS(lf_error_text(), "max_pixels");
    CHECK_STATUS(lf_decode_image(f.bytes, f.n, 8, (int64_t)1 << 40, rgb), LF_ERR_UNSUPPORTED);
    free(f.bytes);
}

/* ---- pixels ---------------------------------------------------------------------------------------------------------- */

TEST(orientations_all_give_the_same_upright_picture)
{
    enum { S = 32 };
    uint8_t first[S * S * 3], rgb[S * S * 3];
    for (int32_t o = 1; o <= 8; o++) {
        jpeg_file f = make(96, 64, 3, o, chroma_444);
        CHECK_OK(lf_decode_image(f.bytes, f.n, S, MOST_PIXELS, o == 1 ? first : rgb));
        if (o > 1) {
            double d = mean_difference(first, rgb, S * S * 3);
            if (d > 1.5) FAIL_("orientation %d differs by %g on average", o, d);
        }
        free(f.bytes);
    }
    CHECK(first[2] > 180);                      /* blue, top left */
    CHECK(first[(S - 1) * 3 + 2] < 80);         /* and only there */
    CHECK(first[(S - 1) * 3] > first[0] + 100); /* red grows to the right */
}

TEST(orientation_out_of_range_counts_as_upright)
{
    uint8_t a[16 * 16 * 3], b[16 * 16 * 3];
    jpeg_file plain = make(40, 30, 3, -1, NULL), odd = make(40, 30, 3, 0, NULL), high = make(40, 30, 3, 1, NULL);
    CHECK_OK(lf_decode_image(plain.bytes, plain.n, 16, MOST_PIXELS, a));
    CHECK_OK(lf_decode_image(odd.bytes, odd.n, 16, MOST_PIXELS, b));
    CHECK(memcmp(a, b, sizeof a) == 0);
    for (unsigned long i = 0; i + 32 < high.n; i++)
        if (memcmp(high.bytes + i, "Exif", 4) == 0) high.bytes[i + 25] = 9;
    CHECK_OK(lf_decode_image(high.bytes, high.n, 16, MOST_PIXELS, b));
    CHECK(memcmp(a, b, sizeof a) == 0);
    free(plain.bytes), free(odd.bytes), free(high.bytes);
}

TEST(grey_ink_and_progressive_become_rgb)
{
    enum { S = 24 };
    uint8_t rgb[S * S * 3], other[S * S * 3];
    jpeg_file base = make(64, 64, 3, -1, chroma_444);
    CHECK_OK(lf_decode_image(base.bytes, base.n, S, MOST_PIXELS, rgb));
    jpeg_file grey = make(64, 64, 1, -1, NULL);
    CHECK_OK(lf_decode_image(grey.bytes, grey.n, S, MOST_PIXELS, other));
    for (int32_t i = 0; i < S * S; i++) CHECK(other[i * 3] == other[i * 3 + 1] && other[i * 3] == other[i * 3 + 2]);
    CHECK(abs(other[S * 3 * 12] - rgb[S * 3 * 12]) < 6); /* it holds the red plane */
    jpeg_file ink = make(64, 64, 4, -1, with_adobe);
    CHECK_OK(lf_decode_image(ink.bytes, ink.n, S, MOST_PIXELS, other));
    CHECK(mean_difference(rgb, other, S * S * 3) < 3);
    jpeg_file prog = make(64, 64, 3, -1, progressive);
    CHECK_OK(lf_decode_image(prog.bytes, prog.n, S, MOST_PIXELS, other));
    CHECK(mean_difference(rgb, other, S * S * 3) < 4);
    free(base.bytes), free(grey.bytes), free(ink.bytes), free(prog.bytes);
}

TEST(ink_without_adobes_marker_is_not_inverted)
{
    uint8_t rgb[8 * 8 * 3];
    jpeg_file f = make(32, 32, 4, -1, NULL); /* cyan = the red plane, black = 255: all black */
    for (unsigned long i = 0; i + 16 < f.n; i++)
        if (f.bytes[i] == 0xFF && f.bytes[i + 1] == 0xEE) f.bytes[i + 1] = 0xE8; /* hide the marker */
    CHECK_OK(lf_decode_image(f.bytes, f.n, 8, MOST_PIXELS, rgb));
    for (size_t i = 0; i < sizeof rgb; i++) CHECK(rgb[i] < 6);
    free(f.bytes);
}

/* The weights against the definition, by brute force on a constant and on a ramp. */
TEST(filter_keeps_constants_and_ramps)
{
    static const struct {
        int32_t n_in, size;
        double from, to;
    } cases[] = {{100, 10, 0, 100}, {7, 32, 0, 7}, {640, 224, 13.25, 600.5}, {1, 16, 0, 1}, {65500, 64, 0, 65500},
                 {33, 33, 0, 33},   {5, 8, 4.2, 5}};
    for (size_t c = 0; c < LF_COUNT(cases); c++) {
        lf__filter f = {0};
        int32_t n = cases[c].size;
        double scale = (cases[c].to - cases[c].from) / n;
        CHECK(lf__filter_open(&f, n));
        CHECK(lf__filter_set(&f, n, cases[c].n_in, cases[c].from, cases[c].to));
        for (int32_t i = 0; i < n; i++) {
            double sum = 0, place = 0;
            CHECK(f.first[i] >= 0 && f.count[i] >= 1 && f.first[i] + f.count[i] <= cases[c].n_in);
            for (int32_t k = 0; k < f.count[i]; k++) {
                sum += f.weight[f.from[i] + k];
                place += f.weight[f.from[i] + k] * (f.first[i] + k + 0.5);
            }
            CHECK_NEAR(sum, 1, 1e-5);
            double centre = cases[c].from + (i + 0.5) * scale, reach = fmax(scale, 1);
            if (centre - reach > 0 && centre + reach < cases[c].n_in) CHECK_NEAR(place, centre, 0.02 * reach); /* not cut */
        }
        lf__filter_close(&f);
    }
}

TEST(identity_size_gives_libjpegs_own_pixels)
{
    enum { S = 48 };
    uint8_t rgb[S * S * 3];
    jpeg_file f = make(S, S, 3, -1, NULL);
    struct jpeg_decompress_struct d;
    struct jpeg_error_mgr errors;
    d.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&d);
    jpeg_mem_src(&d, f.bytes, f.n);
    jpeg_read_header(&d, TRUE);
    jpeg_start_decompress(&d);
    CHECK_OK(lf_decode_image(f.bytes, f.n, S, MOST_PIXELS, rgb));
    for (int32_t y = 0; y < S; y++) {
        uint8_t row[S * 3], *rows[1] = {row};
        jpeg_read_scanlines(&d, rows, 1);
        CHECK(memcmp(row, rgb + y * S * 3, sizeof row) == 0);
    }
    jpeg_finish_decompress(&d);
    jpeg_destroy_decompress(&d);
    free(f.bytes);
}

TEST(scaled_decode_is_close_to_a_full_one)
{
    enum { S = 50 };
    uint8_t rgb[S * S * 3];
    jpeg_file f = make(800, 600, 3, -1, chroma_444);
    CHECK_OK(lf_decode_image(f.bytes, f.n, S, MOST_PIXELS, rgb));
    for (int32_t y = 1; y < S - 1; y++)
        for (int32_t x = 1; x < S - 1; x++) {
            CHECK_NEAR(rgb[(y * S + x) * 3], 40 + 180 * (x + 0.5) / S, 4);
            CHECK_NEAR(rgb[(y * S + x) * 3 + 1], 40 + 180 * (y + 0.5) / S, 4);
        }
    free(f.bytes);
}

TEST(planes_are_the_normalised_picture_and_mirror_flips)
{
    enum { S = 20 };
    static float planes[3 * S * S], mirrored[3 * S * S];
    uint8_t rgb[S * S * 3];
    jpeg_file f = make(60, 40, 3, 8, NULL);
    lf__decoder *d = lf__decoder_open(S);
    lf__decode_want want = {.size = S, .max_pixels = MOST_PIXELS, .right = 1, .bottom = 1};
    CHECK_OK(lf__decoder_run(d, f.bytes, f.n, &want));
    lf__decoder_planes(d, planes);
    lf__decoder_rgb(d, rgb);
    want.mirror = true;
    CHECK_OK(lf__decoder_run(d, f.bytes, f.n, &want));
    lf__decoder_planes(d, mirrored);
    for (int32_t c = 0; c < 3; c++)
        for (int32_t y = 0; y < S; y++)
            for (int32_t x = 0; x < S; x++) {
                CHECK_NEAR(planes[(c * S + y) * S + x], (rgb[(y * S + x) * 3 + c] / 255.0 - 0.5) / 0.25, 0.51 / 255 / 0.25);
                CHECK(planes[(c * S + y) * S + x] == mirrored[(c * S + y) * S + S - 1 - x]);
            }
    lf__decoder_close(d);
    free(f.bytes);
}

TEST(box_is_cut_from_the_upright_picture)
{
    enum { S = 16 };
    uint8_t rgb[S * S * 3];
    lf__decode_want want = {.size = S, .max_pixels = MOST_PIXELS, .right = 0.25, .bottom = 0.25}; /* the blue corner */
    for (int32_t o = 1; o <= 8; o++) {
        jpeg_file f = make(128, 96, 3, o, chroma_444);
        lf__decoder *d = lf__decoder_open(S);
        CHECK_OK(lf__decoder_run(d, f.bytes, f.n, &want));
        lf__decoder_rgb(d, rgb);
        for (int32_t y = 0; y < S - 2; y++)
            for (int32_t x = 0; x < S - 2; x++) CHECK(rgb[(y * S + x) * 3 + 2] > 180);
        lf__decoder_close(d);
        free(f.bytes);
    }
}

/* ---- damage ---------------------------------------------------------------------------------------------------------- */

TEST(damage_is_told_apart_from_oddities)
{
    uint8_t rgb[16 * 16 * 3];
    jpeg_file f = make(120, 90, 3, -1, with_restarts);
    CHECK_OK(lf_decode_image(f.bytes, f.n, 16, MOST_PIXELS, rgb));
    CHECK_OK(lf_decode_image(f.bytes, f.n - 2, 16, MOST_PIXELS, rgb)); /* only the end marker is missing */
    CHECK_STATUS(lf_decode_image(f.bytes, f.n - 200, 16, MOST_PIXELS, rgb), LF_ERR_CORRUPT);
    for (unsigned long i = f.n - 3; i > 0; i--)
        if (f.bytes[i] == 0xFF && (f.bytes[i + 1] & 0xF8) == 0xD0) {
            f.bytes[i + 1] ^= 5; /* another restart number */
            break;
        }
    CHECK_STATUS(lf_decode_image(f.bytes, f.n, 16, MOST_PIXELS, rgb), LF_ERR_CORRUPT);
    jpeg_file p = make(120, 90, 3, -1, progressive);
    CHECK_STATUS(lf_decode_image(p.bytes, p.n - 2, 16, MOST_PIXELS, rgb), LF_ERR_CORRUPT); /* scans may be missing */
    uint8_t *junk = malloc(f.n + 4); /* four stray bytes between header segments */
    jpeg_file g = make(120, 90, 3, -1, NULL);
    memcpy(junk, g.bytes, 20);
    memcpy(junk + 20, "\x01\x02\x03\x04", 4);
    junk = realloc(junk, g.n + 4);
    memcpy(junk + 24, g.bytes + 20, g.n - 20);
    CHECK_OK(lf_decode_image(junk, g.n + 4, 16, MOST_PIXELS, rgb));
    free(f.bytes), free(p.bytes), free(g.bytes), free(junk);
}

/* Every single bit of the header and every cut: an answer, no crash, and the decoder is fit for the next image. */
TEST(decoder_survives_damage_everywhere)
{
    enum { S = 8 };
    uint8_t want_rgb[S * S * 3], rgb[S * S * 3];
    jpeg_file f = make(24, 24, 3, 1, NULL);
    lf__decoder *d = lf__decoder_open(S);
    lf__decode_want want = {.size = S, .max_pixels = 1 << 20, .right = 1, .bottom = 1};
    CHECK_OK(lf__decoder_run(d, f.bytes, f.n, &want));
    lf__decoder_rgb(d, want_rgb);
    int32_t bad = 0;
    for (unsigned long i = 0; i < f.n * 8; i += i < 5600 ? 1 : 3) {
        f.bytes[i / 8] ^= (uint8_t)(1u << (i % 8));
        bad += lf__decoder_run(d, f.bytes, f.n, &want) < 0;
        f.bytes[i / 8] ^= (uint8_t)(1u << (i % 8));
    }
    for (unsigned long n = 0; n < f.n - 2; n++) CHECK(lf__decoder_run(d, f.bytes, n, &want) < 0);
    CHECK(bad > 100);
    CHECK_OK(lf__decoder_run(d, f.bytes, f.n, &want));
    lf__decoder_rgb(d, rgb);
    CHECK(memcmp(rgb, want_rgb, sizeof rgb) == 0);
    lf__decoder_close(d);
    free(f.bytes);
}

/* ---- the odd files --------------------------------------------------------------------------------------------------- */

/* The n-th tab-separated field of a line, copied. */
static void field(const char *line, int32_t n, char *to, size_t size)
{
    while (n-- > 0 && line) line = strchr(line, '\t') ? strchr(line, '\t') + 1 : NULL;
    snprintf(to, size, "%.*s", line ? (int)strcspn(line, "\t\n") : 0, line ? line : "");
}

/* Mean colour of the upright picture against the manifest's, which djpeg made. */
static bool is_colour(const char *mean, const uint8_t *rgb, int32_t pixels)
{
    double want[3], got[3] = {0};
    if (sscanf(mean, "%lf,%lf,%lf", &want[0], &want[1], &want[2]) != 3) return true;
    for (int32_t i = 0; i < pixels * 3; i++) got[i % 3] += rgb[i];
    for (int32_t c = 0; c < 3; c++)
        if (fabs(got[c] / pixels - want[c]) > 3) {
            printf("  mean %d is %.1f, expected %.1f\n", c, got[c] / pixels, want[c]);
            return false;
        }
    return true;
}

TEST(odd_files_behave_as_their_manifest_says)
{
    enum { S = 64 };
    static uint8_t rgb[S * S * 3];
    static char path[1024], line[4096], name[256], kind[64], mean[64], what[256];
    static int32_t right, wrong;
    if (!lf_test_data()) SKIP("no test data (LOONGFORGE_TEST_DATA)");
    snprintf(path, sizeof path, "%s/odd_jpeg/manifest.tsv", lf_test_data());
    FILE *manifest = fopen(path, "r");
    if (!manifest) SKIP("no %s", path);
    CHECK(fgets(line, sizeof line, manifest));
    while (fgets(line, sizeof line, manifest)) {
        field(line, 0, name, sizeof name);
        field(line, 4, what, sizeof what);
        field(line, 5, kind, sizeof kind);
        field(line, 10, mean, sizeof mean);
        snprintf(path, sizeof path, "%s/odd_jpeg/%s", lf_test_data(), name);
        char *bytes;
        size_t n;
        CHECK_OK(lf__io_read_all(lf__io_posix(), path, 1 << 26, &bytes, &n));
        lf_status rc = lf_decode_image(bytes, n, S, 100000000, rgb);
        lf__free(bytes);
        bool must = strncmp(kind, "decode", 6) == 0 || strcmp(kind, "silent") == 0;
        bool either = strcmp(kind, "policy") == 0 || (strcmp(kind, "decode-warn") == 0 && strstr(what, "reject"));
        bool ok = either || (must ? rc == LF_OK : rc < 0);
        if (rc == LF_OK && !is_colour(mean, rgb, S * S)) ok = false;
        if (ok) right++;
        else wrong++;
        if (!ok) printf("  %s: class %s, got %s %s\n", name, kind, lf_status_name(rc), rc < 0 ? lf_error_text() : "");
        if (strcmp(kind, "limit") == 0) CHECK_EQ(rc, LF_ERR_UNSUPPORTED);
    }
    fclose(manifest);
    printf("odd files: %d of %d as the manifest says\n", right, right + wrong);
    CHECK_EQ(wrong, 0);
    CHECK_EQ(right, 63);
}

LF_TEST_MAIN
