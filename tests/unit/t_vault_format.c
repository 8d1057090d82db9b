/* SPDX-License-Identifier: Apache-2.0 */
/* What CheckpointVault reads: codecs, rounding, flipped bytes, hostile manifests, stepping back over damage. */
#include "crash/vault_fixture.h"
#include "kept_log.h"
#include "vault/vault_int.h"

/* A base at 10, diffs at 20 and 30. */
static void make_vault(const char *dir, lf_map *map)
{
    lf_vault_options o = fixture_options(1);
    lf_vault *v;
    CHECK_OK(lf_vault_open(&v, dir, map, &o));
    for (int64_t step = 10; step <= 30; step += 10) {
        fixture_fill(map, step);
        lf_blob blob = {"note", "abcdefgh", 8};
        CHECK_OK(lf_vault_save(v, step, &blob, 1, NULL));
        CHECK_OK(lf_vault_wait(v));
    }
    CHECK_OK(lf_vault_close(v));
}

static void read_file(const char *dir, const char *name, char **data, size_t *bytes)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    CHECK_OK(lf__io_read_all(lf__io_posix(), path, 1 << 28, data, bytes));
}

static void write_file(const char *dir, const char *name, const void *data, size_t bytes)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
}

/* ---- codecs --------------------------------------------------------------------------------------------------------------- */

static void fill_random(uint8_t *p, size_t n, uint64_t seed)
{
    lf__rng r;
    lf__rng_init(&r, seed, 0, 0, 0);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)lf__rng_u32(&r);
}

static void fill_kind(uint8_t *p, size_t n, int kind)
{
    static const uint32_t odd[] = {0x80000000u, 0x7fc00001u, 0xffffffffu, 0x7f800000u, 1, 0x7f800001u};
    lf__rng r;
    lf__rng_init(&r, 5, 0, 0, 0);
    if (kind == 0) memset(p, 0, n);
    else if (kind == 1) fill_random(p, n, 1);
    else
        for (size_t i = 0; i < n; i += 4) {
            float x = (float)(lf__rng_unit(&r) - 0.5) * 0.1f;
            uint32_t u;
            memcpy(&u, &x, 4);
            if (kind == 3) u = odd[i / 4 % LF_COUNT(odd)];
            memcpy(p + i, &u, n - i < 4 ? n - i : 4);
        }
}

TEST(every_codec_gives_back_every_bit)
{
    enum { MOST = 300000 };
    static const size_t sizes[] = {8, 16, 4096, 65536, 65544, 200000, MOST};
    static uint8_t raw[MOST], base[MOST], back[MOST], out[MOST];
    lf__vault_work w;
    CHECK_OK(lf__vault_work_open(&w, MOST));
    int tried = 0;
    for (int kind = 0; kind < 4; kind++)
        for (size_t s = 0; s < LF_COUNT(sizes); s++)
            for (size_t elem = 1; elem <= 8; elem *= 2)
                for (int c = 0; c < LF__N_CODECS; c++) {
                    size_t n = sizes[s], used = 0;
                    fill_kind(raw, n, kind);
                    memcpy(base, raw, n);
                    for (size_t i = 0; i < n; i += 7) base[i] ^= 3;
                    const uint8_t *against = lf__vault_codecs[c].needs_base ? base : NULL;
                    lf_status rc = lf__vault_codecs[c].encode(&w, raw, against, n, elem, 1, out, n, &used);
                    if (rc == LF_AGAIN) continue;
                    CHECK_OK(rc);
                    CHECK(used <= n);
                    memset(back, 0xee, n);
                    CHECK_OK(lf__vault_codecs[c].decode(&w, out, used, against, elem, back, n));
                    CHECK(memcmp(raw, back, n) == 0);
                    tried++;
                    if (used > 0 && c != LF__CODEC_RAW) /* cut off: an error, and no read past the end */
                        CHECK_STATUS(lf__vault_codecs[c].decode(&w, out, used - 1, against, elem, back, n), LF_ERR_CORRUPT);
                }
    CHECK(tried > 200);
    lf__vault_work_close(&w);
}

TEST(the_smallest_codec_is_chosen)
{
    enum { N = 1 << 18 };
    static uint8_t raw[N], base[N];
    lf__vault_work w;
    CHECK_OK(lf__vault_work_open(&w, N));
    fill_kind(raw, N, 1);
    CHECK_OK(lf__vault_encode(&w, raw, NULL, N, 4, 1));
    CHECK_EQ(w.codec, LF__CODEC_RAW);
    CHECK_EQ(w.stored_bytes, N);
    fill_kind(raw, N, 0);
    CHECK_OK(lf__vault_encode(&w, raw, NULL, N, 4, 1));
    CHECK(w.stored_bytes < 100);
    fill_kind(raw, N, 2);
    CHECK_OK(lf__vault_encode(&w, raw, NULL, N, 4, 1));
    CHECK_EQ(w.codec, LF__CODEC_PLANES);
    CHECK(w.stored_bytes < N * 9 / 10);
    memcpy(base, raw, N);
    for (size_t i = 0; i < N; i += 4) base[i] ^= (uint8_t)(1 + i / 4 % 200); /* the lowest byte of each float */
    size_t alone = w.stored_bytes;
    CHECK_OK(lf__vault_encode(&w, raw, base, N, 4, 1));
    CHECK_EQ(w.codec, LF__CODEC_XOR);
    CHECK(w.stored_bytes < alone / 2);
    CHECK_OK(lf__vault_encode(&w, raw, base, N, 4, 0));
    CHECK_EQ(w.codec, LF__CODEC_RAW);
    lf__vault_work_close(&w);
}

TEST(decoders_take_any_bytes)
{
    enum { N = 4096 };
    uint8_t stored[512], raw[N], base[N] = {0};
    lf__vault_work w;
    CHECK_OK(lf__vault_work_open(&w, N));
    for (int i = 0; i < 20000; i++) {
        fill_random(stored, sizeof stored, (uint64_t)i);
        if (i % 2) stored[3] = (uint8_t)(i % 4 == 1 ? 0x80 : 0), stored[2] = stored[1] = 0;
        int c = i % LF__N_CODECS;
        lf_status rc = lf__vault_codecs[c].decode(&w, stored, (size_t)(i % 512), base, (size_t)1 << (i % 4), raw, N);
        CHECK(rc == LF_ERR_CORRUPT || rc == LF_OK);
    }
    lf__vault_work_close(&w);
}

static double f16_value(uint16_t h)
{
    int e = (h >> 10) & 31, m = h & 1023;
    double x = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -x : x;
}

/* Every f16 number, the middles between neighbours (ties to even) and a bit beside them. */
TEST(weights_are_rounded_to_nearest_even)
{
    for (uint32_t h = 0; h < 0x7bff; h++) {
        double low = f16_value((uint16_t)h), high = f16_value((uint16_t)(h + 1));
        float middle = (float)((low + high) / 2);
        float x[6] = {(float)low, middle, nextafterf(middle, 0), nextafterf(middle, 1e9f), -middle, -(float)low};
        uint16_t even = (uint16_t)(h + (h & 1)), got[6];
        lf__vault_round((const uint8_t *)x, 6, LF_DTYPE_F16, (uint8_t *)got);
        uint16_t want[6] = {(uint16_t)h, even, (uint16_t)h, (uint16_t)(h + 1), (uint16_t)(even | 0x8000), (uint16_t)(h | 0x8000)};
        for (int i = 0; i < 6; i++)
            if (got[i] != want[i]) FAIL_("%.9g rounds to %04x, expected %04x", (double)x[i], got[i], want[i]);
    }
    float edge[] = {65504, 65519.996f, 65520, 1e30f, INFINITY, -INFINITY, NAN, -0.0f, 1e-30f};
    uint16_t got[9], want[] = {0x7bff, 0x7bff, 0x7c00, 0x7c00, 0x7c00, 0xfc00, 0x7e00, 0x8000, 0};
    lf__vault_round((const uint8_t *)edge, 9, LF_DTYPE_F16, (uint8_t *)got);
    for (int i = 0; i < 9; i++) CHECK_EQ(got[i] & (i == 6 ? 0x7e00 : 0xffff), want[i]);
}

/* ---- names ------------------------------------------------------------------------------------------------------------------ */

TEST(only_our_names_are_names)
{
    static const struct {
        const char *name;
        int kind, data;
    } rows[] = {{"base_model.bin", LF__NAME_BASE_MODEL, LF__VAULT_BASE},
                {"base_50.bin", LF__NAME_BASE, LF__VAULT_BASE},
                {"base_050.bin", LF__NAME_OTHER, -1},
                {"base_-1.bin", LF__NAME_OTHER, -1},
                {"base_.bin", LF__NAME_OTHER, -1},
                {"base_0.bin", LF__NAME_BASE, LF__VAULT_BASE},
                {"base_50.bin.tmp", LF__NAME_TEMP, -1},
                {"checkpoint_5", LF__NAME_CHECKPOINT, -1},
                {"checkpoint_5.tmp", LF__NAME_TEMP, -1},
                {"checkpoint_5.damaged_1", LF__NAME_OTHER, -1},
                {"checkpoint_1234567890123456789", LF__NAME_OTHER, -1},
                {"checkpoint_5/diff_001.bin", LF__NAME_OTHER, LF__VAULT_DIFF},
                {"checkpoint_5/../x", LF__NAME_OTHER, -1},
                {"checkpoint_5/diff_01.bin", LF__NAME_OTHER, -1},
                {"../checkpoint_5/diff_001.bin", LF__NAME_OTHER, -1},
                {"checkpoint_5/diff_001.bin.tmp", LF__NAME_OTHER, -1},
                {"/etc/passwd", LF__NAME_OTHER, -1},
                {"", LF__NAME_OTHER, -1},
                {"base_model.bin/../x", LF__NAME_OTHER, -1},
                {"checkpoint_+5", LF__NAME_OTHER, -1},
                {"checkpoint_ 5", LF__NAME_OTHER, -1}};
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        int64_t step;
        if (lf__vault_name_kind(rows[i].name, &step) != rows[i].kind || lf__vault_data_kind(rows[i].name, &step) != rows[i].data)
            FAIL_("'%s' is taken for something else", rows[i].name);
    }
}

/* ---- damage ------------------------------------------------------------------------------------------------------------------- */

/* Any byte of any file: verify names the file, and a restore never gives a state that was not saved. */
TEST(every_flipped_byte_is_found_and_named)
{
    static const char *const files[] = {"base_model.bin",          "checkpoint_10/meta.json",
                                        "checkpoint_20/meta.json", "checkpoint_20/diff_001.bin",
                                        "checkpoint_30/meta.json", "checkpoint_30/diff_001.bin"};
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("flips"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(1);
    make_vault(dir, map);
    int64_t flips = 0, stepped = 0;
    for (size_t f = 0; f < LF_COUNT(files); f++) {
        char *data, name[64];
        size_t bytes;
        read_file(dir, files[f], &data, &bytes);
        snprintf(name, sizeof name, "%s", files[f]);
        for (size_t at = 0; at < bytes; at += at < 256 || at + 300 > bytes ? 5 : 1 + bytes / 60) {
            data[at] ^= (char)(1 << (at % 8));
            write_file(dir, files[f], data, bytes);
            lf_status rc = lf_vault_verify(dir);
            if (rc != LF_ERR_CORRUPT && rc != LF_ERR_UNSUPPORTED)
                FAIL_("byte %zu of %s: verify says %s", at, files[f], lf_status_name(rc));
            CHECK_HAS(lf_error_text(), name);
            lf_vault *v;
            lf_checkpoint_info info = {.size = sizeof info};
            rc = lf_vault_open(&v, dir, map, &o);
            if (rc == LF_OK) rc = lf_vault_restore(v, -1, &info);
            if (rc == LF_OK && !fixture_is(map, info.step)) FAIL_("byte %zu of %s: a wrong state came back", at, files[f]);
            stepped += rc == LF_OK && info.step < 30;
            lf_vault_close(v);
            data[at] ^= (char)(1 << (at % 8));
            flips++;
        }
        write_file(dir, files[f], data, bytes);
        for (int cut = 0; cut < 2; cut++) { /* and lengths */
            char *longer = calloc(1, bytes + 1);
            memcpy(longer, data, bytes);
            write_file(dir, files[f], longer, cut ? bytes - 1 : bytes + 1);
            CHECK_STATUS(lf_vault_verify(dir), LF_ERR_CORRUPT);
            CHECK_HAS(lf_error_text(), name);
            free(longer);
        }
        write_file(dir, files[f], data, bytes);
        lf__free(data);
        CHECK_OK(lf_vault_verify(dir));
    }
    printf("  %lld flips\n", (long long)flips);
    CHECK(flips > 700);
    CHECK(stepped > 50);
    lf_map_unref(map);
}

TEST(damage_is_stepped_over_and_set_aside)
{
    char dir[512], *data;
    size_t bytes;
    snprintf(dir, sizeof dir, "%s", lf_test_path("aside"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(1);
    lf_checkpoint_info info = {.size = sizeof info};
    make_vault(dir, map);
    read_file(dir, "checkpoint_30/diff_001.bin", &data, &bytes);
    data[bytes / 2] ^= 16;
    write_file(dir, "checkpoint_30/diff_001.bin", data, bytes);
    lf__free(data);
    CHECK_STATUS(lf_vault_check(dir, -1, NULL), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "checkpoint_30/diff_001.bin, record at ");
    CHECK_OK(lf_vault_check(dir, 20, &info));
    CHECK_EQ(info.step, 20);
    lf_vault *v;
    start_log(LF_LOG_WARN);
    CHECK_OK(lf_vault_open(&v, dir, map, &o));
    CHECK_OK(lf_vault_restore(v, -1, &info));
    CHECK_EQ(info.step, 20);
    CHECK(fixture_is(map, 20));
    CHECK_HAS(log_text, "checkpoint 30 is damaged, stepping back");
    CHECK_HAS(log_text, "checkpoint_30/diff_001.bin, record at ");
    fixture_fill(map, 30);
    CHECK_OK(lf_vault_save(v, 30, NULL, 0, NULL));
    CHECK_OK(lf_vault_wait(v));
    CHECK_HAS(log_text, "checkpoint_30.damaged_1");
    CHECK_OK(lf_vault_restore(v, -1, &info));
    CHECK_EQ(info.step, 30);
    CHECK(fixture_is(map, 30));
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(dir));
    end_log();
    lf_map_unref(map);
}

/* A base that rots while it is open: the next diff that reads it becomes a new base instead. */
TEST(a_rotten_base_is_replaced)
{
    char dir[512], *data;
    size_t bytes;
    snprintf(dir, sizeof dir, "%s", lf_test_path("rotten"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(1);
    lf_checkpoint_info info = {.size = sizeof info};
    make_vault(dir, map);
    lf_vault *v;
    CHECK_OK(lf_vault_open(&v, dir, map, &o));
    CHECK_OK(lf_vault_restore(v, -1, &info));
    read_file(dir, "base_model.bin", &data, &bytes);
    for (size_t at = 100; at < bytes; at += 997) data[at] ^= 1;
    write_file(dir, "base_model.bin", data, bytes);
    lf__free(data);
    fixture_fill(map, 40);
    CHECK_OK(lf_vault_save(v, 40, NULL, 0, NULL));
    lf_status rc = lf_vault_wait(v); /* frozen weights were left where they lay: that save says so and the next one is whole */
    if (rc < 0) {
        CHECK_STATUS(rc, LF_ERR_CORRUPT);
        fixture_fill(map, 50);
        CHECK_OK(lf_vault_save(v, 50, NULL, 0, NULL));
        CHECK_OK(lf_vault_wait(v));
    }
    fixture_clear(map);
    CHECK_OK(lf_vault_restore(v, -1, &info));
    CHECK_EQ(info.step, info.base_step);
    CHECK_EQ(info.step, rc < 0 ? 50 : 40);
    CHECK(fixture_is(map, info.step));
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

/* ---- hostile manifests ----------------------------------------------------------------------------------------------------------- */

/* The document with one piece of text replaced and its digest made right again. NULL: the piece is not in it. */
static char *forge(const char *text, size_t bytes, const char *from, const char *to, size_t *n)
{
    const char *body = memchr(text, '\n', bytes);
    char *at = body ? strstr(body + 1, from) : NULL;
    if (!at) return NULL;
    size_t head = (size_t)(at - text), room = bytes + strlen(to) + 1;
    char *forged = calloc(1, room);
    memcpy(forged, text, head);
    memcpy(forged + head, to, strlen(to));
    memcpy(forged + head + strlen(to), at + strlen(from), bytes - head - strlen(from));
    *n = bytes - strlen(from) + strlen(to);
    size_t start = (size_t)(body + 1 - text);
    char digest[33];
    lf__hash_hex(lf__hash(forged + start, *n - start, 0), digest);
    memcpy(strstr(forged, "\"digest\":\"") + 10, digest, 32);
    return forged;
}

TEST(hostile_manifests_are_refused)
{
    static const struct {
        const char *from, *to, *says;
    } rows[] = {
        {"\"step\":30", "\"step\":31", "is in a file of another checkpoint"},
        {"\"step\":30", "\"step\":-30", "'step' is -30"},
        {"\"step\":30", "\"step\":30.5", "'step' is missing or not a whole number"},
        {"\"step\":30", "\"step\":99999999999999999999", "JSON"},
        {"\"step\":30", "\"step\":30,\"step\":30", "JSON"},
        {"\"step\":30", "\"step\":\"30\"", "'step'"},
        {"\"kind\":\"diff\"", "\"kind\":\"base\"", "another base"},
        {"\"kind\":\"diff\"", "\"kind\":[]", "'kind'"},
        {"\"base_step\":10", "\"base_step\":40", "'base_step'"},
        {"checkpoint_30/diff_001.bin", "checkpoint_31/diff_001.bin", "does not belong there"},
        {"checkpoint_30/diff_001.bin", "../../../../etc/passwd", "does not belong there"},
        {"checkpoint_30/diff_001.bin", "/etc/passwd", "does not belong there"},
        {"checkpoint_30/diff_001.bin", "base_model.bin", "does not belong there"},
        {"\"name\":\"base_model.bin\"", "\"name\":\"checkpoint_30/diff_001.bin\"", "does not belong there"},
        {"\"count\":", "\"count\":9223372036854775807,\"x\":", "'count'"},
        {"\"count\":", "\"count\":281474976710656,\"x\":", "slice"},
        {"\"count\":", "\"count\":-1,\"x\":", "'count'"},
        {"\"slice_elements\":", "\"slice_elements\":0,\"x\":", "'slice_elements'"},
        {"\"slice_elements\":", "\"slice_elements\":1,\"x\":", "entries"},
        {"\"offset\":[", "\"offset\":[-5,", "entries"},
        {"\"shape\":[40,60]", "\"shape\":[1099511627776,1099511627776]", "shape"},
        {"\"shape\":[40,60]", "\"shape\":[-40,60]", "shape"},
        {"\"shape\":[40,60]", "\"shape\":[400,60]", "ends behind the end"},
        {"\"shape\":[40,60]", "\"shape\":[1,1,1,1,1,1,1,1,1]", "'shape'"},
        {"\"role\":\"weight\"", "\"role\":\"grad\"", "role"},
        {"\"role\":\"weight\"", "\"role\":\"%n%n%s\"", "role"},
        {"\"dtype\":\"bf16\"", "\"dtype\":\"f99\"", "'dtype'"},
        {"\"frozen\":true", "\"frozen\":1", "'frozen'"},
        {"\"seed\":\"", "\"seed\":\"0", "'seed'"},
        {"\"map_digest\":\"", "\"map_digest\":\"0", "'map_digest'"},
        {"\"state_digest\":\"", "\"state_digest\":\"0000000000000000000000000000000\",\"x\":\"", "'state_digest'"},
        {"\"tied_to\":-1", "\"tied_to\":7", "'tied_to'"},
        {"\"class\":", "\"class\":1000,\"x\":", "'class'"},
        {"\"end\":", "\"end\":64,\"x\":", ""},
        {"\"end\":", "\"end\":-1,\"x\":", "'end'"},
        {"\"n_changed\":", "\"n_changed\":-1,\"x\":", "'n_changed'"},
        {"\"planes\":[", "\"planes\":[[[[5]]],", "plane 0"},
        {"\"planes\":[", "\"planes\":[5,", "plane 0"},
        {"\"blobs\":[{", "\"blobs\":[{\"bytes\":99999999999,\"y\":{},", "JSON"},
        {"\"hash\":[\"", "\"hash\":[\"g", "hash"},
    };
    char dir[512], *text, *base;
    size_t bytes, base_bytes;
    snprintf(dir, sizeof dir, "%s", lf_test_path("hostile"));
    lf_map *map = fixture_map();
    make_vault(dir, map);
    read_file(dir, "checkpoint_30/meta.json", &text, &bytes);
    read_file(dir, "checkpoint_20/meta.json", &base, &base_bytes);
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        size_t n;
        char *forged = forge(text, bytes, rows[i].from, rows[i].to, &n);
        if (!forged) FAIL_("row %zu: no '%s' in the document", i, rows[i].from);
        write_file(dir, "checkpoint_30/meta.json", forged, n);
        lf__vault_manifest *m;
        lf_status rc = lf__vault_load_meta(lf__io_posix(), dir, 30, &m);
        if (rc != LF_ERR_CORRUPT) FAIL_("row %zu ('%s'): %s", i, rows[i].to, lf_status_name(rc));
        CHECK(m == NULL);
        if (!strstr(lf_error_text(), rows[i].says)) FAIL_("row %zu ('%s'): %s", i, rows[i].to, lf_error_text());
        free(forged);
    }
    lf__free(text);
    lf__free(base);
    lf_map_unref(map);
}

/* Two slices that claim the same record, or each other's: a valid document, refused by overlap or by the record's own head. */
TEST(swapped_and_shared_records_are_refused)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("swap"));
    lf_map *map = fixture_map();
    make_vault(dir, map);
    lf__io *io = lf__io_posix();
    for (int how = 0; how < 3; how++) {
        lf__vault_manifest *m, *again;
        lf__buf text = {.max = 1 << 24};
        CHECK_OK(lf__vault_load_meta(io, dir, 30, &m));
        const lf__vault_plane *p = m->layout->planes;
        while (p->n_slices < 3) p++;
        CHECK(p < m->layout->planes + m->layout->n_planes);
        lf__vault_ref *a = &m->refs_of[p->first], *b = a + 1, keep = *a;
        if (how == 0) *a = *b;
        if (how == 1) {
            a->offset = b->offset, a->stored_bytes = b->stored_bytes, a->file = b->file;
            b->offset = keep.offset, b->stored_bytes = keep.stored_bytes, b->file = keep.file;
        }
        if (how == 2) a->offset += 1;
        m->state_digest = lf__vault_manifest_digest(m);
        CHECK_OK(lf__vault_meta_write(m, &text));
        lf_status rc = lf__vault_meta_read(&again, text.data, text.used, "forged");
        if (how == 1) CHECK_OK(rc);
        if (how > 0 && rc == LF_OK) { /* nothing in the document contradicts itself: the record does */
            lf__vault_source src;
            lf__vault_work w;
            lf__vault_record record;
            CHECK_OK(lf__vault_source_open(&src, io, dir, again, NULL));
            CHECK_OK(lf__vault_work_open(&w, again->layout->slice_bytes));
            CHECK_STATUS(lf__vault_read_slice(&src, p->first, &w, w.raw, &record), LF_ERR_CORRUPT);
            CHECK_HAS(lf_error_text(), how == 1 ? "which is not what the manifest says" : "no record begins here");
            lf__vault_work_close(&w);
            lf__vault_source_close(&src);
            lf__vault_manifest_unref(again);
        } else {
            CHECK_STATUS(rc, LF_ERR_CORRUPT);
        }
        lf__vault_manifest_unref(m);
        lf__buf_free(&text);
    }
    lf_map_unref(map);
}

TEST(a_deep_document_is_an_error)
{
    enum { DEPTH = 100000 };
    static char text[DEPTH * 2 + 200];
    char digest[33];
    lf__vault_manifest *m;
    size_t n = (size_t)snprintf(text, sizeof text,
                                "{\"format\":\"loongforge-vault\",\"version\":1,\"digest\":\"%032d\",\n\"a\":", 0),
           start = strcspn(text, "\n") + 1;
    memset(text + n, '[', DEPTH);
    memset(text + n + DEPTH, ']', DEPTH);
    n += 2 * DEPTH;
    memcpy(text + n, "}\n", 2);
    n += 2;
    lf__hash_hex(lf__hash(text + start, n - start, 0), digest);
    memcpy(strstr(text, "\"digest\":\"") + 10, digest, 32);
    CHECK_STATUS(lf__vault_meta_read(&m, text, n, "deep"), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "deep: JSON line");
    text[strlen("{\"format\":\"loongforge-vault\",\"version\":")] = '2';
    CHECK_STATUS(lf__vault_meta_read(&m, text, n, "new"), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "format version 2");
    CHECK_STATUS(lf__vault_meta_read(&m, "", 0, "nothing"), LF_ERR_CORRUPT);
}

LF_TEST_MAIN
