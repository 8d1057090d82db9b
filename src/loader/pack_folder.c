/* SPDX-License-Identifier: Apache-2.0 */
/* Packing a folder: a list of JSON lines and the files it names. Files keep their bytes; each is decoded once to see that it
 * can be. */
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "io/io.h"
#include "pack_int.h"

enum { LIST_MOST = 1 << 30, IMAGE_MOST = 256 << 20, CHECK_SIZE = 8, SAME_IDS = 100000, ID_BYTES = 400, SHOWN_KEY = 80 };
static const int64_t CHECK_PIXELS = 100000000; /* the loader's default limit */

typedef struct folder {
    const char *dir;
    lf__vocabulary vocabulary;
    lf__decoder *decoder;
    lf__pack_writer writer;
    lf_progress_fn progress;
    void *user;
} folder;

/* One line of the list on its way into the set. */
typedef struct record {
    char key[SHOWN_KEY]; /* for messages */
    char id[ID_BYTES];
    json_t *root, *text; /* text: what is stored */
    char *json, *image;
    size_t json_bytes, image_bytes;
} record;

static void close_record(record *r)
{
    json_decref(r->root);
    json_decref(r->text);
    lf__free(r->json);
    lf__free(r->image);
}

/* ---- reading a line ---------------------------------------------------------------------------------------------------------- */

/* "id", or the file's name without folder and ending. */
static lf_status take_id(record *r, const char *file)
{
    const json_t *id = json_object_get(r->root, "id");
    int n = 0;
    if (json_is_string(id)) {
        n = snprintf(r->id, sizeof r->id, "%s", json_string_value(id));
    } else if (json_is_integer(id)) {
        n = snprintf(r->id, sizeof r->id, "%lld", (long long)json_integer_value(id));
    } else if (file) {
        const char *base = strrchr(file, '/') ? strrchr(file, '/') + 1 : file, *dot = strrchr(base, '.');
        n = snprintf(r->id, sizeof r->id, "%.*s", dot && dot > base ? (int)(dot - base) : (int)strlen(base), base);
    }
    if (n <= 0 || n >= (int)sizeof r->id)
        return LF_FAIL(LF_ERR_FORMAT, "%s", n > 0 ? "id is longer than 399 bytes" : "neither an id nor a file");
    snprintf(r->key, sizeof r->key, "%.79s", r->id);
    return LF_OK;
}

static json_t *turn(const char *from, const char *before, const char *value)
{
    char small[64];
    if (*before) snprintf(small, sizeof small, "%s%s", before, value);
    return json_pack("{s:s, s:s}", "from", from, "value", *before ? small : value);
}

/* Turns as they are, or a caption as the answer to a request for one. */
static lf_status take_turns(record *r, bool has_image)
{
    static const char *const kept[] = {"tokens", "words"};
    json_t *turns = json_object_get(r->root, "turns");
    if (!turns) turns = json_object_get(r->root, "conversations");
    const char *caption = json_string_value(json_object_get(r->root, "text"));
    if (turns) {
        r->text = json_pack("{s:O}", "turns", turns);
    } else if (caption) {
        r->text = json_pack("{s:[o, o]}", "turns", turn("human", has_image ? "<image>\n" : "", "Describe this image."),
                            turn("gpt", "", caption));
    } else {
        return LF_FAIL(LF_ERR_FORMAT, "neither 'conversations' nor 'text'");
    }
    for (size_t i = 0; i < LF_COUNT(kept) && r->text; i++) {
        json_t *value = json_object_get(r->root, kept[i]);
        if (value && json_object_set(r->text, kept[i], value) != 0) return LF_FAIL(LF_ERR_NOMEM, "text record");
    }
    r->json_bytes = r->text ? json_dumpb(r->text, NULL, 0, JSON_COMPACT) : 0;
    r->json = lf__alloc(r->json_bytes);
    if (r->json_bytes == 0 || !r->json) return LF_FAIL(LF_ERR_NOMEM, "text record");
    json_dumpb(r->text, r->json, r->json_bytes, JSON_COMPACT);
    return LF_OK;
}

/* The same check as a reader's: a record that it would refuse is not packed. */
static lf_status check_text(const folder *f, const record *r)
{
    int32_t id[1];
    uint8_t trained[1];
    lf__tokens tokens = {.id = id, .trained = trained, .room = 1};
    return lf__record_tokens(r->json, r->json_bytes, &f->vocabulary, &tokens);
}

static lf_status take_image(folder *f, record *r, const char *file)
{
    char path[PATH_MAX];
    lf__decode_want want = {.size = CHECK_SIZE, .max_pixels = CHECK_PIXELS, .right = 1, .bottom = 1};
    lf_status rc = LF_OK;
    if (file[0] == '/') snprintf(path, sizeof path, "%s", file);
    else rc = lf__io_join(path, sizeof path, f->dir, file);
    if (rc == LF_OK) rc = lf__io_read_all(lf__io_posix(), path, IMAGE_MOST, &r->image, &r->image_bytes);
    if (rc == LF_OK) rc = lf__decoder_run(f->decoder, r->image, r->image_bytes, &want);
    return rc < 0 ? lf__fail_prefix(rc, "image %s", file) : LF_OK;
}

static lf_status read_record(folder *f, record *r, const char *line, size_t n)
{
    json_error_t error;
    r->root = json_loadb(line, n, JSON_REJECT_DUPLICATES, &error);
    if (!r->root && json_error_code(&error) == json_error_out_of_memory) return LF_FAIL(LF_ERR_NOMEM, "a line of %zu bytes", n);
    if (!json_is_object(r->root)) return LF_FAIL(LF_ERR_FORMAT, "%s", r->root ? "no JSON object" : error.text);
    const char *file = json_string_value(json_object_get(r->root, "image"));
    if (!file) file = json_string_value(json_object_get(r->root, "file"));
    lf_status rc = take_id(r, file);
    if (rc == LF_OK) rc = take_turns(r, file != NULL);
    if (rc == LF_OK) rc = check_text(f, r);
    if (rc == LF_OK && file) rc = take_image(f, r, file);
    return rc;
}

/* ---- writing it --------------------------------------------------------------------------------------------------------------- */

/* The text's key tells whether an id is taken: each sample has a text. Further ones become "id-2", "id-3", … */
static lf_status put_record(folder *f, record *r)
{
    char id[ID_BYTES + 16];
    bool taken = true;
    lf_status rc = lf__pack_begin(&f->writer, (int64_t)(r->json_bytes + r->image_bytes), 2);
    for (int32_t k = 1; rc == LF_OK && taken; k++) {
        if (k > SAME_IDS) return LF_FAIL(LF_ERR_FORMAT, "more than %d records have the id '%s'", SAME_IDS, r->id);
        if (k == 1) snprintf(id, sizeof id, "%s", r->id);
        else snprintf(id, sizeof id, "%s-%d", r->id, k);
        rc = lf__pack_put(&f->writer, id, "text", r->json, r->json_bytes, &taken);
    }
    if (rc == LF_OK && r->image) rc = lf__pack_put(&f->writer, id, "image", r->image, r->image_bytes, &taken);
    if (rc == LF_OK) rc = lf__pack_commit(&f->writer);
    if (rc == LF_OK) {
        f->writer.sum.samples++;
        f->writer.sum.images += r->image != NULL;
    }
    return rc;
}

/* Whatever is wrong with one record is no error of the pack; a lack of memory, or what writing meets, is. */
static lf_status pack_line(folder *f, const char *line, size_t n, int64_t number)
{
    record r = {0};
    snprintf(r.key, sizeof r.key, "line %lld", (long long)number);
    lf_status rc = read_record(f, &r, line, n);
    if (rc < 0 && rc != LF_ERR_NOMEM) {
        lf__log(LF_LOG_WARN, "skipped %s: %s", r.key, lf_error_text());
        f->writer.sum.skipped++;
        rc = LF_OK;
    } else if (rc == LF_OK) {
        rc = put_record(f, &r);
    }
    close_record(&r);
    return rc;
}

static lf_status pack_lines(folder *f, const char *text, size_t bytes)
{
    int64_t total = 0, done = 0;
    for (size_t i = 0; i < bytes; i++) total += text[i] == '\n';
    total += bytes > 0 && text[bytes - 1] != '\n';
    for (size_t at = 0; at < bytes; done++) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t n = end ? (size_t)(end - text) - at : bytes - at;
        bool blank = strspn(text + at, " \t\r") >= n;
        lf_status rc = blank ? LF_OK : pack_line(f, text + at, n, done + 1);
        if (rc == LF_OK) rc = lf__pack_progress(f->progress, f->user, done + 1, total);
        if (rc < 0) return rc;
        at += n + 1;
    }
    return LF_OK;
}

/* ---- the list ----------------------------------------------------------------------------------------------------------------- */

static lf_status find_list(const char *dir, const char *list, char *path, size_t size)
{
    static const char *const names[] = {"instruct.jsonl", "captions.jsonl"};
    lf__io *io = lf__io_posix();
    bool yes = false;
    lf_status rc = io->ops->exists(io, dir, &yes);
    if (rc < 0) return rc;
    if (!yes) return LF_FAIL(LF_ERR_NOTFOUND, "no folder %s", dir);
    if (list && strchr(list, '/')) {
        LF_CHECK_ARG(strlen(list) < size, "the list's path is longer than %zu bytes", size - 1);
        snprintf(path, size, "%s", list);
        return LF_OK;
    }
    if (list) return lf__io_join(path, size, dir, list);
    for (size_t i = 0; i < LF_COUNT(names); i++) {
        rc = lf__io_join(path, size, dir, names[i]);
        if (rc == LF_OK) rc = io->ops->exists(io, path, &yes);
        if (rc < 0 || yes) return rc;
    }
    return LF_FAIL(LF_ERR_NOTFOUND, "%s has neither instruct.jsonl nor captions.jsonl", dir);
}

/* The last part of a path, as the set's source. */
static void name_source(const char *dir, int32_t n_dirs, char *source, size_t size)
{
    char more[24] = "";
    size_t end = strlen(dir), from;
    while (end > 1 && dir[end - 1] == '/') end--;
    for (from = end; from > 0 && dir[from - 1] != '/'; from--) {}
    if (n_dirs > 1) snprintf(more, sizeof more, " and %d more", n_dirs - 1);
    size_t room = size - 1 - strlen(more), n = end - from < room ? end - from : room;
    snprintf(source, size, "%.*s%s", (int)n, dir + from, more);
}

static lf_status check_arguments(const char *path, const char *dir, const char *tokenizer, int32_t vocab_size,
                                 const lf_pack_summary *summary)
{
    LF_CHECK_ARG(path && dir, "path or folder is NULL");
    LF_CHECK_ARG(!summary || summary->size == sizeof *summary, "lf_pack_summary: size is %zu, expected %zu", summary->size,
                 sizeof *summary);
    LF_CHECK_ARG(vocab_size >= 0 && vocab_size <= 1 << 24, "vocab_size is %d, expected 0 (bytes) to %d", vocab_size, 1 << 24);
    LF_CHECK_ARG((vocab_size > 0) == (tokenizer && *tokenizer), "a tokenizer's name and vocab_size go together: '%s' and %d",
                 tokenizer ? tokenizer : "", vocab_size);
    return LF_OK;
}

/* All records of one folder. */
static lf_status pack_one_folder(folder *f, const char *dir, const char *list)
{
    lf_status rc = LF_OK;
    char list_path[PATH_MAX], *text = NULL;
    size_t bytes;
    int64_t before = f->writer.sum.samples, skipped = f->writer.sum.skipped;
    f->dir = dir;
    LF_TRY(find_list(dir, list, list_path, sizeof list_path));
    LF_TRY(lf__io_read_all(lf__io_posix(), list_path, LIST_MOST, &text, &bytes));
    LF_TRY(pack_lines(f, text, bytes));
    if (f->writer.sum.samples == before)
        LF_THROW(LF_ERR_FORMAT, "%s holds no usable record (%lld skipped)", list_path,
                 (long long)(f->writer.sum.skipped - skipped));
out:
    lf__free(text);
    return rc;
}

lf_status lf_pack_folders(const char *path, const char *const *dirs, int32_t n_dirs, const char *list, const char *tokenizer,
                          int32_t vocab_size, const lf_pack_options *opts, lf_progress_fn progress, void *user,
                          lf_pack_summary *summary)
{
    lf_status rc = LF_OK;
    lf_pack_options o;
    folder f = {.progress = progress, .user = user};
    char source[128];
    LF_CHECK_ARG(dirs && n_dirs > 0, "no folder to pack");
    for (int32_t i = 0; i < n_dirs; i++) LF_TRY(check_arguments(path, dirs[i], tokenizer, vocab_size, summary));
    LF_TRY(lf__options_take("pack", &o, sizeof o, opts));
    lf__vocabulary_set(&f.vocabulary, vocab_size);
    f.decoder = lf__decoder_open(CHECK_SIZE);
    if (!f.decoder) LF_THROW(LF_ERR_NOMEM, "decoder");
    LF_TRY(lf__pack_open(&f.writer, path, &o));
    for (int32_t i = 0; i < n_dirs; i++) LF_TRY(pack_one_folder(&f, dirs[i], list));
    name_source(dirs[0], n_dirs, source, sizeof source);
    LF_TRY(lf__pack_finish(&f.writer, source, vocab_size ? tokenizer : "bytes", vocab_size));
    if (summary) {
        *summary = f.writer.sum;
        summary->size = sizeof *summary;
    }
out:
    lf__pack_close(&f.writer);
    lf__decoder_close(f.decoder);
    return rc;
}
