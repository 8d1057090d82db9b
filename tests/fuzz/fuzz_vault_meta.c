/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzing of what a vault's folder may hold: manifests, ends of base files, whole folders.
 *
 *   clang -fsanitize=fuzzer,address,undefined …      a libFuzzer target
 *   cc -DLF_FUZZ_ALONE -fsanitize=address,undefined  a program of its own:
 *     fuzz_vault_meta [--runs N] [--seed S] FILE…    runs each manifest, then N changed ones; without files, a built-in one
 *
 * The first byte of an input chooses: 0 the text as it is, 1 with its digest made right (so that what lies behind is reached),
 * 2 as records for every codec. A manifest that is accepted must be written and read again to the same one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vault/vault_int.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken: %s (%s)\n", what, lf_error_text());
    abort();
}

/* Put the digest of what follows the first line into it. */
static void make_digest_right(char *text, size_t n)
{
    static const char head[] = "{\"format\":\"loongforge-vault\",\"version\":1,\"digest\":\"";
    char *end = memchr(text, '\n', n), digest[33];
    if (!end || (size_t)(end - text) < sizeof head - 1 + 34 || memcmp(text, head, sizeof head - 1) != 0) return;
    size_t from = (size_t)(end + 1 - text);
    lf__hash_hex(lf__hash(text + from, n - from, 0), digest);
    memcpy(text + sizeof head - 1, digest, 32);
}

static void check_manifest(lf__vault_manifest *m)
{
    lf__vault_manifest *again;
    lf__buf text = {.max = 1 << 26};
    int64_t slices = 0;
    for (int64_t i = 0; i < m->layout->n_slices; i++) {
        const lf__vault_ref *r = &m->refs_of[i];
        size_t bytes;
        char words[200];
        lf__vault_plane_of(m->layout, i, NULL, &bytes);
        must(bytes <= m->layout->slice_bytes && r->file >= 0 && r->file < m->n_files, "a slice lies in a file");
        must(r->offset >= LF__VAULT_HEAD_BYTES && r->offset + LF__VAULT_HEAD_BYTES + r->stored_bytes <= m->files[r->file].end,
             "inside it");
        lf__vault_slice_text(m->layout, i, words, sizeof words);
        slices++;
    }
    must(slices == m->layout->n_slices, "slices are numbered");
    must(lf__vault_meta_write(m, &text) == LF_OK, "what was read can be written");
    must(lf__vault_meta_read(&again, text.data, text.used, "again") == LF_OK, "and read again");
    must(again->step == m->step && again->state_digest.lo == m->state_digest.lo &&
             lf__vault_layout_match(m->layout, again->layout) == LF_OK,
         "and is the same");
    lf__vault_manifest_unref(again);
    lf__buf_free(&text);
}

static void try_manifest(const uint8_t *data, size_t size, int right)
{
    char *text = malloc(size + 1);
    lf__vault_manifest *m;
    if (!text) return;
    memcpy(text, data, size);
    if (right) make_digest_right(text, size);
    lf_status rc = lf__vault_meta_read(&m, text, size, "input");
    must((rc == LF_OK) == (m != NULL), "a manifest or an error");
    must(rc == LF_OK || rc == LF_ERR_CORRUPT || rc == LF_ERR_UNSUPPORTED || rc == LF_ERR_NOMEM, "an error of the right kind");
    if (m) check_manifest(m);
    lf__vault_manifest_unref(m);
    free(text);
}

static void try_records(const uint8_t *data, size_t size)
{
    enum { MOST = 1 << 16 };
    static lf__vault_work w;
    static uint8_t raw[MOST], base[MOST];
    lf__vault_record record;
    lf__vault_file_head head;
    lf__vault_tail tail;
    if (!w.raw && lf__vault_work_open(&w, MOST) < 0) return;
    if (size >= LF__VAULT_HEAD_BYTES) {
        (void)lf__vault_record_get(&record, data);
        (void)lf__vault_file_head_get(&head, data);
        (void)lf__vault_tail_get(&tail, data);
    }
    if (size < 4) return;
    size_t elem = (size_t)1 << (data[1] % 4), bytes = ((size_t)data[2] | (size_t)(data[3] & 15) << 8) * elem;
    for (int c = 0; c < LF__N_CODECS; c++) {
        lf_status rc = lf__vault_codecs[c].decode(&w, data + 4, size - 4, base, elem, raw, bytes);
        must(rc == LF_OK || rc == LF_ERR_CORRUPT, "decoded or refused");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    if (data[0] % 3 == 2) try_records(data + 1, size - 1);
    else try_manifest(data + 1, size - 1, data[0] % 3);
    return 0;
}

#ifdef LF_FUZZ_ALONE

/* A small valid manifest of each kind, as the library writes it. */
static lf_status built_in(lf__buf *text)
{
    lf_status rc = LF_OK;
    lf_map *map = NULL;
    lf__vault_layout *layout = NULL;
    lf__vault_manifest *m = NULL;
    int64_t shape[] = {40, 60};
    LF_TRY(lf_map_open(&map, NULL));
    for (int i = 0; i < 3; i++) {
        char name[] = "w0";
        name[1] = (char)('0' + i);
        lf_param p = {
            .size = sizeof p, .name = name, .shape = shape, .ndim = 2, .dtype = i + 1, .layer = i, .expert = -1, .tied_to = -1};
        LF_TRY(lf_map_add(map, &p, NULL));
    }
    LF_TRY(lf_map_plan(map));
    LF_TRY(lf__vault_layout_of_map(&layout, map, 4096));
    LF_TRY(lf__vault_manifest_new(&m, layout));
    m->kind = LF__VAULT_DIFF;
    m->step = 50;
    m->n_files = 2;
    m->n_blobs = 1;
    m->files = lf__alloc_array(2, sizeof *m->files);
    m->blobs = lf__alloc(sizeof *m->blobs);
    if (!m->files || !m->blobs) LF_THROW(LF_ERR_NOMEM, "built-in input");
    snprintf(m->files[0].name, sizeof m->files[0].name, "base_model.bin");
    snprintf(m->files[1].name, sizeof m->files[1].name, "checkpoint_50/diff_001.bin");
    m->files[0].end = m->files[1].end = LF__VAULT_HEAD_BYTES;
    for (int64_t i = 0; i < layout->n_slices; i++) {
        int f = (int)(i % 2);
        m->refs_of[i] = (lf__vault_ref){{(uint64_t)i, 7}, m->files[f].end, 100 + i, f};
        m->files[f].end += LF__VAULT_HEAD_BYTES + 100 + i;
    }
    m->blobs[0] = (lf__vault_blob){lf__strdup("rng"), 30, {{1, 2}, m->files[1].end, 20, 1}};
    m->files[1].end += LF__VAULT_HEAD_BYTES + 20;
    m->state_digest = lf__vault_manifest_digest(m);
    LF_TRY(lf__vault_meta_write(m, text));
out:
    lf__vault_manifest_unref(m);
    lf__vault_layout_unref(layout);
    lf_map_unref(map);
    return rc;
}

/* One change: a bit, a digit, a cut, a doubled or moved run, a number put in place of another. */
static size_t change(uint8_t *p, size_t n, size_t room, lf__rng *r)
{
    static const char *const words[] = {
        "-1",   "99999999999999999999", "0", "1e9", "null", "[]", "{}", "\"x\"", "281474976710656", "../",
        "true", "9223372036854775807"};
    size_t at = 1 + lf__rng_u32(r) % (n > 1 ? n - 1 : 1), len = 1 + lf__rng_u32(r) % 24;
    if (at >= n) return n;
    if (len > n - at) len = n - at;
    switch (lf__rng_below(r, 6)) {
    case 0: p[at] ^= (uint8_t)(1u << lf__rng_below(r, 8)); return n;
    case 1: p[at] = (uint8_t)('0' + lf__rng_below(r, 10)); return n;
    case 2: return lf__rng_below(r, 8) ? n : at; /* seldom: the rest would be all cut */
    case 3: memmove(p + at, p + 1 + lf__rng_u32(r) % (n - len), len); return n;
    case 4: memmove(p + at, p + at + len, n - at - len); return n - len;
    default: {
        const char *word = words[lf__rng_below(r, LF_COUNT(words))];
        size_t k = strlen(word), number = 0;
        while (at < n && !(p[at] >= '0' && p[at] <= '9')) at++;
        while (at + number < n && p[at + number] >= '0' && p[at + number] <= '9') number++;
        if (n - number + k > room) return n;
        memmove(p + at + k, p + at + number, n - at - number);
        memcpy(p + at, word, k);
        return n - number + k;
    }
    }
}

static size_t read_input(const char *path, uint8_t *to, size_t room)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(1);
    }
    size_t n = fread(to, 1, room, f);
    fclose(f);
    return n;
}

int main(int argc, char **argv)
{
    enum { MOST = 1 << 22 };
    static uint8_t source[MOST + 1];
    long long runs = 20000, seed = 1, accepted = 0;
    size_t n = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc) runs = strtoll(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = strtoll(argv[++i], NULL, 10);
        else n = read_input(argv[i], source + 1, MOST);
    }
    lf__buf text = {.max = MOST};
    if (n == 0) {
        must(built_in(&text) == LF_OK, "the built-in manifest");
        n = text.used;
        memcpy(source + 1, text.data, n);
        lf__buf_free(&text);
        lf__vault_manifest *m;
        must(lf__vault_meta_read(&m, (const char *)source + 1, n, "built-in") == LF_OK, "the built-in manifest is good");
        check_manifest(m);
        lf__vault_manifest_unref(m);
    }
    for (long long k = 0; k < runs; k++) {
        lf__rng r;
        lf__rng_init(&r, (uint64_t)seed, (uint32_t)k, 0, 0);
        size_t room = n + 257, used = n + 1;
        uint8_t *p = malloc(room);
        if (!p) return 1;
        memcpy(p, source, used);
        p[0] = (uint8_t)(lf__rng_below(&r, 16) == 0 ? 2 : lf__rng_below(&r, 16) == 1 ? 0 : 1);
        for (int32_t times = 1 + lf__rng_below(&r, 4); times > 0; times--) used = change(p, used, room, &r);
        uint8_t *exact = realloc(p, used ? used : 1); /* so that a sanitizer sees a read past the end */
        lf_error_clear();
        LLVMFuzzerTestOneInput(exact ? exact : p, used);
        accepted += !*lf_error_text();
        free(exact ? exact : p);
    }
    printf("%lld changed inputs, %lld accepted, nothing found\n", runs, accepted);
    return 0;
}

#endif
