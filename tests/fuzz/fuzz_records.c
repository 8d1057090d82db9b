/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzing of what a set may hold: text records, JPEG heads, JPEG pixels.
 *
 *   clang -fsanitize=fuzzer,address,undefined …      a libFuzzer target
 *   cc -DLF_FUZZ_ALONE -fsanitize=address,undefined  a program of its own:
 *     fuzz_records [--runs N] [--seed S] FILE…       runs each file, then N changed ones; without files, built-in ones
 *
 * The first byte of an input chooses the parser: even the text record (bit 1: with a vocabulary), odd the JPEG. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/loader_int.h"

enum { SIZE = 16, MOST_PIXELS = 1 << 16, MOST_TOKENS = 512, VOCABULARY = 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A broken promise of the parser itself, which no sanitizer would see. */
static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

static void try_text(const uint8_t *data, size_t size, int32_t tokenizer_ids)
{
    static int32_t id[MOST_TOKENS];
    static uint8_t trained[MOST_TOKENS];
    lf__tokens t = {.id = id, .trained = trained, .room = MOST_TOKENS};
    lf__vocabulary v;
    lf__vocabulary_set(&v, tokenizer_ids);
    lf_status rc = lf__record_tokens(data, size, &v, &t);
    must(t.n >= 1 && t.n <= MOST_TOKENS && id[0] == v.bos, "a text begins with its marker and fits");
    if (rc == LF_OK)
        for (int32_t i = 0; i < t.n; i++)
            must(id[i] >= 0 && id[i] < v.size && id[i] != v.pad && trained[i] <= 1, "ids are of the vocabulary");
    else must(lf_error_text()[0] != 0, "an error has a text");
}

static void try_jpeg(const uint8_t *data, size_t size)
{
    static lf__decoder *decoder;
    static float planes[3 * SIZE * SIZE];
    if (!decoder) decoder = lf__decoder_open(SIZE);
    if (!decoder) return;
    lf__jpeg_head head;
    lf_status rc = lf__jpeg_read_head(data, size, MOST_PIXELS, &head);
    if (rc == LF_OK)
        must(head.width > 0 && head.height > 0 && (int64_t)head.width * head.height <= MOST_PIXELS && head.orientation >= 1 &&
                 head.orientation <= 8,
             "a head within its limits");
    lf__decode_want want = {.size = SIZE, .max_pixels = MOST_PIXELS, .left = 0.1, .top = 0.2, .right = 0.9, .bottom = 1};
    if (lf__decoder_run(decoder, data, size, &want) < 0) {
        must(lf_error_text()[0] != 0, "an error has a text");
        return;
    }
    must(rc == LF_OK, "nothing is decoded whose head is refused");
    lf__decoder_planes(decoder, planes);
    for (int32_t i = 0; i < 3 * SIZE * SIZE; i++) must(planes[i] >= -2.001f && planes[i] <= 2.001f, "pixels are normalised");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    if (data[0] & 1) try_jpeg(data + 1, size - 1);
    else try_text(data + 1, size - 1, data[0] & 2 ? VOCABULARY : 0);
    return 0;
}

#ifdef LF_FUZZ_ALONE

#include "loader/pack_int.h"

typedef struct input {
    uint8_t *bytes; /* with the first byte that chooses */
    size_t n;
} input;

enum { MOST_INPUTS = 4096 };
static input inputs[MOST_INPUTS];
static int32_t n_inputs;

static void add_input(uint8_t choice, const void *bytes, size_t n)
{
    if (n_inputs == MOST_INPUTS) return;
    input *to = &inputs[n_inputs++];
    to->n = n + 1;
    to->bytes = malloc(n + 1);
    if (!to->bytes) exit(1);
    to->bytes[0] = choice;
    memcpy(to->bytes + 1, bytes, n);
}

/* A file whose name does not say that it is a fuzzer's input is one of the two kinds by its first byte. */
static int add_file(const char *path)
{
    static uint8_t bytes[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    add_input(n > 0 && bytes[0] == '{' ? 0 : 1, bytes, n);
    return 0;
}

static void add_built_in(void)
{
    static const char with_ids[] =
        "{\"conversations\":[{\"from\":\"human\",\"value\":\"<image>\\nq\"},{\"from\":\"gpt\",\"value\":\"\\u00e9\"}],"
        "\"tokens\":[[1,2],[3,999]]}";
    static uint8_t rgb[LF__SCENE_SIDE_MOST * LF__SCENE_SIDE_MOST * 3];
    add_input(2, with_ids, sizeof with_ids - 1);
    for (int64_t i = 0; i < 4; i++) {
        lf__scene scene;
        lf__buf jpeg = {.max = 1 << 20}, text = {.max = 1 << 16};
        lf__scene_make(&scene, 1, i);
        lf__scene_draw(&scene, 1, i, rgb);
        if (lf__pack_encode(rgb, 40, 40, 70, i % 2, &jpeg) == LF_OK) add_input(1, jpeg.data, jpeg.used);
        if (lf__scene_text(&scene, 1, i, &text) == LF_OK) add_input(0, text.data, text.used);
        lf__buf_free(&jpeg);
        lf__buf_free(&text);
    }
}

/* One change: a bit, a byte, a cut, a run of bytes moved, or a piece of another input. */
static size_t change(uint8_t *p, size_t n, size_t room, lf__rng *r)
{
    size_t at = 1 + lf__rng_u32(r) % (n > 1 ? n - 1 : 1), len = 1 + lf__rng_u32(r) % 16;
    if (at >= n) return n;
    if (len > n - at) len = n - at;
    switch (lf__rng_below(r, 6)) {
    case 0: p[at] ^= (uint8_t)(1u << lf__rng_below(r, 8)); return n;
    case 1: p[at] = (uint8_t)lf__rng_u32(r); return n;
    case 2: return at; /* cut */
    case 3: memmove(p + at, p + 1 + lf__rng_u32(r) % (n - len), len); return n;
    case 4: memmove(p + at, p + at + len, n - at - len); return n - len;
    default: {
        const input *other = &inputs[lf__rng_below(r, n_inputs)];
        size_t from = lf__rng_u32(r) % other->n, take = other->n - from < 64 ? other->n - from : 64;
        if (take > room - at) take = room - at;
        memcpy(p + at, other->bytes + from, take);
        return at + take > n ? at + take : n;
    }
    }
}

int main(int argc, char **argv)
{
    long long runs = 20000, seed = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc) runs = strtoll(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = strtoll(argv[++i], NULL, 10);
        else if (add_file(argv[i]) != 0) return 1;
    }
    if (n_inputs == 0) add_built_in();
    for (int32_t i = 0; i < n_inputs; i++) LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].n);
    for (long long k = 0; k < runs; k++) {
        lf__rng r;
        lf__rng_init(&r, (uint64_t)seed, (uint32_t)k, 0, 0);
        const input *from = &inputs[lf__rng_below(&r, n_inputs)];
        size_t room = from->n + 256, n = from->n;
        uint8_t *p = malloc(room);
        if (!p) return 1;
        memcpy(p, from->bytes, n);
        for (int32_t times = 1 + lf__rng_below(&r, 6); times > 0; times--) n = change(p, n, room, &r);
        uint8_t *exact = realloc(p, n); /* so that a sanitizer sees a read past the end */
        LLVMFuzzerTestOneInput(exact ? exact : p, n);
        free(exact ? exact : p);
    }
    printf("%d inputs, %lld changed ones, nothing found\n", n_inputs, runs);
    for (int32_t i = 0; i < n_inputs; i++) free(inputs[i].bytes);
    return 0;
}

#endif
