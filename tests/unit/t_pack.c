/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: scenes (what is in them, their words, their bytes), folders with broken records, targets, full disks. */
#include <dirent.h>
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>

#include "kept_log.h"
#include "lf_test.h"
#include "loader/pack_int.h"

static lf_pack_options options(int64_t scenes)
{
    lf_pack_options o;
    CHECK_OK(lf_options_init("pack", &o, sizeof o));
    o.scenes = scenes;
    return o;
}

static lf_dataset *open_set(const char *path)
{
    lf_dataset *set;
    CHECK_OK(lf_dataset_open(&set, path));
    return set;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static const char *beside(const char *path, const char *ending)
{
    static char text[600];
    snprintf(text, sizeof text, "%s%s", path, ending);
    return text;
}

/* ---- scenes --------------------------------------------------------------------------------------------------------------- */

/* Most cases pack one folder. */
#define lf_pack_folder(path, dir, ...) lf_pack_folders(path, &(const char *){dir}, 1, __VA_ARGS__)

TEST(scenes_are_as_likely_as_their_recipe_says)
{
    enum { N = 20000 };
    static int32_t count[4], shape[LF__SHAPES], colour[LF__COLOURS], texture[3], quadrant[4], side[161], large, objects;
    for (int64_t i = 0; i < N; i++) {
        lf__scene s;
        lf__scene_make(&s, 5, i);
        count[s.n]++;
        side[s.side]++;
        for (int32_t k = 0; k < s.n; k++) {
            const lf__scene_object *o = &s.object[k];
            objects++;
            shape[o->shape]++, colour[o->colour]++, texture[o->texture]++, quadrant[o->quadrant]++;
            large += o->large;
            if (k > 0) CHECK(o->quadrant > s.object[k - 1].quadrant);
            for (int32_t j = 0; j < k; j++) CHECK(o->shape != s.object[j].shape && o->colour != s.object[j].colour);
            CHECK(fabs(o->x - (0.25 + 0.5 * (o->quadrant % 2))) <= lf__recipe.shift);
            double reach = 1.1 * o->r; /* of a star: inside the picture and out of the other quadrants */
            CHECK(o->x - reach > -0.02 && o->x + reach < 1.02 && (o->x < 0.5 ? o->x + reach < 0.55 : o->x - reach > 0.45));
        }
    }
    CHECK_NEAR(count[1], lf__recipe.one * N, 0.02 * N);
    CHECK_NEAR(count[2], lf__recipe.two * N, 0.02 * N);
    CHECK_EQ(count[1] + count[2] + count[3], N);
    for (int32_t i = 0; i < LF__SHAPES; i++) CHECK_NEAR(shape[i], objects / 6.0, 0.01 * objects);
    for (int32_t i = 0; i < LF__COLOURS; i++) CHECK_NEAR(colour[i], objects / 8.0, 0.01 * objects);
    for (int32_t i = 0; i < 4; i++) CHECK_NEAR(quadrant[i], objects / 4.0, 0.01 * objects);
    CHECK_NEAR(texture[1], lf__recipe.striped * objects, 0.01 * objects);
    CHECK_NEAR(large, objects / 2.0, 0.02 * objects);
    CHECK_EQ(side[64] + side[96] + side[128] + side[160], N);
}

/* The picture shows what the scene says: the middle of a plain disc has its colour, a far corner the background's. */
TEST(objects_are_drawn_where_they_are)
{
    static uint8_t rgb[LF__SCENE_SIDE_MOST * LF__SCENE_SIDE_MOST * 3];
    int32_t looked = 0;
    for (int64_t i = 0; i < 300; i++) {
        lf__scene s;
        lf__scene_make(&s, 1, i);
        lf__scene_draw(&s, 1, i, rgb);
        for (int32_t k = 0; k < s.n; k++) {
            const lf__scene_object *o = &s.object[k];
            int32_t x = (int32_t)(o->x * s.side), y = (int32_t)(o->y * s.side);
            const uint8_t *p = rgb + (y * s.side + x) * 3;
            if (o->shape == 3) { /* a ring is empty in the middle */
                for (int32_t c = 0; c < 3; c++) CHECK(p[c] < 140);
            } else if (o->texture == 0) {
                for (int32_t c = 0; c < 3; c++) CHECK_NEAR(p[c], fmin(fmax(o->rgb[c], 0), 255), 0.51);
            }
            looked++;
        }
    }
    CHECK(looked > 400);
}

/* Areas of the shapes against geometry: the distance functions are right inside and out. */
TEST(shapes_have_their_areas)
{
    enum { S = 160 };
    static uint8_t rgb[S * S * 3];
    const double r = 0.4, ring = 3.14159265 * (1 - 0.48 * 0.48), h = (0.55 + 2 * 0.55) /* triangle's height / r */;
    const double half_base = (0.55 * 1.5) / 0.8660254, outer = 1.1, inner = 0.45 * 1.1;
    const double want[LF__SHAPES] = {
        3.14159265, 4 * 0.84 * 0.84, half_base * h, ring, 8 * 0.32 - 4 * 0.32 * 0.32, 5 * outer * inner * sin(3.14159265 / 5)};
    for (int32_t shape = 0; shape < LF__SHAPES; shape++) {
        lf__scene s = {.side = S, .n = 1};
        s.object[0] = (lf__scene_object){.shape = shape, .x = 0.5, .y = 0.5, .r = r, .rgb = {200, 200, 200}};
        lf__scene_draw(&s, 1, 1, rgb);
        double area = 0;
        for (int32_t i = 0; i < S * S; i++) area += rgb[i * 3] / 200.0;
        area /= (double)S * S * r * r;
        if (fabs(area - want[shape]) > 0.02 * want[shape])
            FAIL_("%s: area %g, expected %g", lf__shape_names[shape], area, want[shape]);
    }
}

/* Words are where they say, and say what is in the scene; no answer stands in an earlier text. */
TEST(texts_and_words_belong_to_the_scene)
{
    int32_t forms[6] = {0}, longest = 0, total = 0;
    for (int64_t i = 0; i < 3000; i++) {
        lf__scene s;
        lf__buf json = {.max = 1 << 16};
        int32_t id[512];
        uint8_t trained[512];
        lf__tokens t = {.id = id, .trained = trained, .room = 512};
        lf__vocabulary v;
        lf__vocabulary_set(&v, 0);
        lf__scene_make(&s, 3, i);
        CHECK_OK(lf__scene_text(&s, 3, i, &json));
        CHECK_OK(lf__record_tokens(json.data, json.used, &v, &t));
        CHECK_EQ(id[2], 259); /* the image's marker */
        longest = t.n > longest ? t.n : longest;
        total += t.n;
        json_t *root = json_loadb(json.data, json.used, 0, NULL), *turns = json_object_get(root, "turns"),
               *words = json_object_get(root, "words");
        CHECK(json_array_size(turns) % 2 == 0 && json_array_size(words) >= 1);
        const char *first = json_string_value(json_object_get(json_array_get(turns, 0), "value"));
        forms[0] += strstr(first, "Describe") != NULL;
        forms[1] += strstr(first, "How many") != NULL;
        for (size_t k = 0; k < json_array_size(words); k++) {
            const json_t *w = json_array_get(words, k);
            size_t turn = (size_t)json_integer_value(json_object_get(w, "turn")),
                   start = (size_t)json_integer_value(json_object_get(w, "start"));
            size_t bytes = (size_t)json_integer_value(json_object_get(w, "bytes"));
            const char *kind = json_string_value(json_object_get(w, "kind"));
            CHECK(turn % 2 == 1 && turn < json_array_size(turns));
            const char *value = json_string_value(json_object_get(json_array_get(turns, turn), "value"));
            CHECK(start + bytes < strlen(value) && value[strlen(value) - 1] == '.');
            bool found = false;
            for (int32_t o = 0; o < s.n; o++) {
                const char *word = strcmp(kind, "colour") == 0  ? lf__colour_names[s.object[o].colour]
                                   : strcmp(kind, "shape") == 0 ? lf__shape_names[s.object[o].shape]
                                   : strcmp(kind, "place") == 0 ? lf__quadrant_names[s.object[o].quadrant]
                                   : strcmp(kind, "size") == 0  ? (s.object[o].large ? "large" : "small")
                                   : strcmp(kind, "count") == 0 ? (s.n == 1 ? "one" : "two")
                                                                : lf__texture_names[s.object[o].texture];
                found = found || (strlen(word) == bytes && strncmp(value + start, word, bytes) == 0);
            }
            if (!found)
                FAIL_("scene %lld: no object has %s '%.*s' (%s)", (long long)i, kind, (int)bytes, value + start, json.data);
            if (strcmp(kind, "count") != 0 && strcmp(kind, "size") != 0)
                for (size_t earlier = 0; earlier < turn; earlier++) {
                    const char *text = json_string_value(json_object_get(json_array_get(turns, earlier), "value"));
                    char word[32];
                    snprintf(word, sizeof word, "%.*s", (int)bytes, value + start);
                    if (strstr(text, word)) FAIL_("scene %lld: '%s' is given away (%s)", (long long)i, word, json.data);
                }
        }
        json_decref(root);
        lf__buf_free(&json);
    }
    CHECK(longest <= 128);
    CHECK(total / 3000 > 50);
    CHECK_NEAR(forms[0], 3000 * (lf__recipe.one + lf__recipe.two) * lf__recipe.describe, 120);
    CHECK(forms[1] > 50);
}

TEST(same_seed_and_number_give_the_same_bytes_at_any_thread_count)
{
    static const int32_t threads[3] = {1, 2, 7};
    lf_dataset *sets[3];
    for (int32_t k = 0; k < 3; k++) {
        char name[16];
        lf_pack_options o = options(300); /* more than a chunk */
        o.threads = threads[k];
        o.seed = 42;
        snprintf(name, sizeof name, "same%d", k);
        lf_pack_summary sum = {.size = sizeof sum};
        CHECK_OK(lf_pack_scenes(lf_test_path(name), &o, NULL, NULL, &sum));
        CHECK_EQ(sum.samples, 300);
        CHECK_EQ(sum.skipped, 0);
        sets[k] = open_set(lf_test_path(name));
        lf_dataset_info info = {.size = sizeof info};
        CHECK_OK(lf_dataset_get_info(sets[k], &info));
        CHECK_EQ(info.n_samples, 300);
        CHECK_EQ(info.n_bytes, sum.bytes);
        CHECK_HAS(info.source, "seed=42");
    }
    lf_pack_options part = options(20); /* the same scenes by number, packed alone */
    part.seed = 42;
    part.first = 250;
    CHECK_OK(lf_pack_scenes(lf_test_path("part"), &part, NULL, NULL, NULL));
    lf_dataset *alone = open_set(lf_test_path("part"));
    for (int64_t i = 0; i < 300; i++) {
        lf_sample a = {.size = sizeof a}, b = {.size = sizeof b};
        CHECK_OK(lf_dataset_get(sets[0], i, &a));
        for (int32_t k = 1; k < 4; k++) {
            if (k == 3 && (i < 250 || i >= 270)) continue;
            CHECK_OK(k < 3 ? lf_dataset_get(sets[k], i, &b) : lf_dataset_get(alone, i - 250, &b));
            CHECK(a.id_bytes == b.id_bytes && memcmp(a.id, b.id, (size_t)a.id_bytes) == 0);
            CHECK(a.image_bytes == b.image_bytes && memcmp(a.image, b.image, (size_t)a.image_bytes) == 0);
            CHECK(a.text_bytes == b.text_bytes && memcmp(a.text, b.text, (size_t)a.text_bytes) == 0);
        }
        CHECK_OK(lf_dataset_verify(sets[0], i, 1 << 20));
    }
    lf_dataset_close(sets[0]), lf_dataset_close(sets[1]), lf_dataset_close(sets[2]), lf_dataset_close(alone);
}

/* ---- targets ----------------------------------------------------------------------------------------------------------------- */

TEST(what_is_there_is_kept_unless_it_is_a_set_and_overwrite_is_on)
{
    lf_pack_options o = options(3);
    char path[512];
    snprintf(path, sizeof path, "%s", lf_test_path("target"));
    CHECK_OK(lf_pack_scenes(path, &o, NULL, NULL, NULL));
    o.scenes = 5;
    CHECK_STATUS(lf_pack_scenes(path, &o, NULL, NULL, NULL), LF_ERR_EXISTS);
    CHECK_HAS(lf_error_text(), "--overwrite");
    o.overwrite = 1;
    CHECK_OK(lf_pack_scenes(path, &o, NULL, NULL, NULL));
    lf_dataset *set = open_set(path);
    lf_dataset_info info = {.size = sizeof info};
    CHECK_OK(lf_dataset_get_info(set, &info));
    CHECK_EQ(info.n_samples, 5);
    lf_dataset_close(set);
    CHECK(!exists(beside(path, ".tmp")) && !exists(beside(path, ".old")));
    FILE *f = fopen(beside(path, "/notes.txt"), "w");
    fputs("mine", f);
    fclose(f);
    CHECK_STATUS(lf_pack_scenes(path, &o, NULL, NULL, NULL), LF_ERR_EXISTS);
    CHECK_HAS(lf_error_text(), "notes.txt");
    CHECK(exists(beside(path, "/notes.txt")) && exists(beside(path, "/data.mdb")));
    f = fopen(lf_test_path("a_file"), "w");
    fclose(f);
    CHECK_STATUS(lf_pack_scenes(lf_test_path("a_file"), &o, NULL, NULL, NULL), LF_ERR_EXISTS);
    CHECK_STATUS(lf_pack_scenes(lf_test_path("a_file/below"), &o, NULL, NULL, NULL), LF_ERR_IO); /* a file is no folder */
    CHECK_OK(lf_pack_scenes(lf_test_path("no/such/folder"), &o, NULL, NULL, NULL));              /* folders above are made */
    CHECK_STATUS(lf_pack_scenes("", &o, NULL, NULL, NULL), LF_ERR_INVALID);
    mkdir(beside(lf_test_path("again"), ".tmp"), 0777); /* a pack that was killed left this */
    CHECK_OK(lf_pack_scenes(lf_test_path("again"), &o, NULL, NULL, NULL));
    CHECK(!exists(beside(lf_test_path("again"), ".tmp")));
}

static int32_t cancel_late(void *user, int64_t done, int64_t total)
{
    *(int64_t *)user = done;
    return done >= 256 && done < total;
}

TEST(cancel_and_errors_leave_nothing_behind)
{
    lf_pack_options o = options(600);
    int64_t done = 0;
    char path[512];
    snprintf(path, sizeof path, "%s", lf_test_path("cancelled"));
    CHECK_STATUS(lf_pack_scenes(path, &o, cancel_late, &done, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "256 of 600");
    CHECK_EQ(done, 256);
    CHECK(!exists(path) && !exists(beside(path, ".tmp")));
    o.map_bytes = 1 << 20; /* 600 scenes do not fit */
    CHECK_STATUS(lf_pack_scenes(path, &o, NULL, NULL, NULL), LF_ERR_NOSPACE);
    CHECK_HAS(lf_error_text(), "map_bytes");
    CHECK(!exists(path) && !exists(beside(path, ".tmp")));
    o = options(0);
    CHECK_STATUS(lf_pack_scenes(path, &o, NULL, NULL, NULL), LF_ERR_INVALID);
}

/* A limit on the size of files stands in for a full disk: writing fails in the middle. */
TEST(failing_writes_are_an_error_and_keep_the_old_set)
{
    lf_pack_options o = options(2);
    char path[512];
    snprintf(path, sizeof path, "%s", lf_test_path("limited"));
    CHECK_OK(lf_pack_scenes(path, &o, NULL, NULL, NULL));
    struct rlimit old, low;
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 300000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &low);
    o = options(1000);
    o.overwrite = 1;
    lf_status rc = lf_pack_scenes(path, &o, NULL, NULL, NULL);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK(rc == LF_ERR_IO || rc == LF_ERR_NOSPACE);
    CHECK_HAS(lf_error_text(), path);
    CHECK(!exists(beside(path, ".tmp")));
    lf_dataset *set = open_set(path);
    lf_dataset_info info = {.size = sizeof info};
    CHECK_OK(lf_dataset_get_info(set, &info));
    CHECK_EQ(info.n_samples, 2);
    lf_dataset_close(set);
}

TEST(scenes_survive_every_failing_allocation)
{
    lf_pack_options o = options(2);
    o.threads = 1;
    char path[512];
    snprintf(path, sizeof path, "%s", lf_test_path("sweep"));
    lf__alloc_fail_at(0);
    CHECK_OK(lf_pack_scenes(lf_test_path("sweep0"), &o, NULL, NULL, NULL));
    int64_t n = lf__alloc_fail_at(0);
    CHECK(n > 8);
    for (int64_t i = 1; i <= n; i++) {
        lf__alloc_fail_at(i);
        lf_status rc = lf_pack_scenes(path, &o, NULL, NULL, NULL);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) FAIL_("allocation %lld failed, packing did not", (long long)i);
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(!exists(path) && !exists(beside(path, ".tmp")));
    }
}

/* ---- folders ------------------------------------------------------------------------------------------------------------------- */

static void write_scene(const char *dir, const char *name, int64_t number)
{
    static uint8_t rgb[LF__SCENE_SIDE_MOST * LF__SCENE_SIDE_MOST * 3];
    char path[700];
    lf__scene s;
    lf__buf jpeg = {.max = 1 << 20};
    lf__scene_make(&s, 9, number);
    lf__scene_draw(&s, 9, number, rgb);
    CHECK_OK(lf__pack_encode(rgb, s.side, s.side, 90, false, &jpeg));
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    CHECK(f && fwrite(jpeg.data, 1, jpeg.used, f) == jpeg.used);
    fclose(f);
    lf__buf_free(&jpeg);
}

TEST(folder_with_broken_records_packs_the_rest)
{
    static const char lines[] =
        "{\"id\":\"one\",\"image\":\"im/a b.jpg\",\"conversations\":[{\"from\":\"human\",\"value\":\"<image>\\nWhat?\"},{\"from\":\"gpt\",\"value\":\"A.\"}]}\n"
        "{\"id\":\"missing\",\"image\":\"im/none.jpg\",\"conversations\":[{\"from\":\"gpt\",\"value\":\"A.\"}]}\n"
        "not json\n"
        "\n"
        "{\"id\":\"notjpeg\",\"image\":\"list.jsonl\",\"text\":\"caption\"}\n"
        "{\"id\":\"one\",\"image\":\"im/c.jpg\",\"text\":\"a caption\",\"words\":[{\"turn\":1,\"start\":2,\"bytes\":7,\"kind\":\"thing\"}]}\n"
        "{\"id\":\"badturn\",\"conversations\":[{\"from\":\"cat\",\"value\":\"A.\"}]}\n"
        "{\"file\":\"im/c.jpg\",\"text\":\"by its name\"}\n"
        "{\"id\":77,\"text\":\"no image\"}";
    char dir[512], path[512], list[600];
    snprintf(dir, sizeof dir, "%s", lf_test_path("folder"));
    snprintf(path, sizeof path, "%s", lf_test_path("from_folder"));
    mkdir(dir, 0777);
    mkdir(beside(dir, "/im"), 0777);
    write_scene(dir, "im/a b.jpg", 1);
    write_scene(dir, "im/c.jpg", 2);
    snprintf(list, sizeof list, "%s/list.jsonl", dir);
    FILE *f = fopen(list, "w");
    fputs(lines, f);
    fclose(f);
    lf_pack_options o = options(0);
    lf_pack_summary sum = {.size = sizeof sum};
    CHECK_STATUS(lf_pack_folder(path, dir, NULL, NULL, 0, &o, NULL, NULL, &sum), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "captions.jsonl");
    start_log(LF_LOG_WARN);
    CHECK_OK(lf_pack_folder(path, dir, "list.jsonl", NULL, 0, &o, NULL, NULL, &sum));
    end_log();
    CHECK_EQ(sum.samples, 4);
    CHECK_EQ(sum.images, 3);
    CHECK_EQ(sum.skipped, 4);
    CHECK_HAS(log_text, "skipped missing: image im/none.jpg");
    CHECK_HAS(log_text, "skipped line 3:");
    CHECK_HAS(log_text, "skipped notjpeg: image list.jsonl: not a JPEG");
    CHECK_HAS(log_text, "skipped badturn: turn 0 is from 'cat'");
    static const char *const ids[] = {"77", "c", "one", "one-2"};
    lf_dataset *set = open_set(path);
    for (int32_t i = 0; i < 4; i++) {
        lf_sample s = {.size = sizeof s};
        CHECK_OK(lf_dataset_get(set, i, &s));
        CHECK(s.id_bytes == (int64_t)strlen(ids[i]) && memcmp(s.id, ids[i], (size_t)s.id_bytes) == 0);
        CHECK((s.image == NULL) == (i == 0));
        CHECK_OK(lf_dataset_verify(set, i, 1 << 20));
        char text[512];
        snprintf(text, sizeof text, "%.*s", (int)s.text_bytes, (const char *)s.text);
        if (i == 3) CHECK_HAS(text, "\"kind\":\"thing\"");
        if (i == 3) CHECK_HAS(text, "<image>\\nDescribe this image.");
    }
    lf_dataset_close(set);
    snprintf(path, sizeof path, "%s", lf_test_path("nothing_usable"));
    f = fopen(list, "w");
    fputs("x\ny\n", f);
    fclose(f);
    CHECK_STATUS(lf_pack_folder(path, dir, list, NULL, 0, &o, NULL, NULL, NULL), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "2 skipped");
    CHECK(!exists(path) && !exists(beside(path, ".tmp")));
    CHECK_STATUS(lf_pack_folder(path, lf_test_path("no_dir"), NULL, NULL, 0, &o, NULL, NULL, NULL), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_pack_folder(path, dir, list, "gpt2", 0, &o, NULL, NULL, NULL), LF_ERR_INVALID);
}

TEST(folder_with_tokens_needs_its_vocabulary)
{
    char dir[512], path[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("tokens"));
    snprintf(path, sizeof path, "%s", lf_test_path("from_tokens"));
    mkdir(dir, 0777);
    FILE *f = fopen(beside(dir, "/instruct.jsonl"), "w");
    fputs(
        "{\"id\":\"a\",\"conversations\":[{\"from\":\"human\",\"value\":\"q\"},{\"from\":\"gpt\",\"value\":\"r\"}],\"tokens\":[[5],[6,9]]}\n",
        f);
    fclose(f);
    lf_pack_options o = options(0);
    CHECK_STATUS(lf_pack_folder(path, dir, NULL, NULL, 0, &o, NULL, NULL, NULL), LF_ERR_FORMAT);
    CHECK_OK(lf_pack_folder(path, dir, NULL, "ten \"words\"", 10, &o, NULL, NULL, NULL));
    lf_dataset *set = open_set(path);
    lf_dataset_info info = {.size = sizeof info};
    CHECK_OK(lf_dataset_get_info(set, &info));
    CHECK_STR(info.tokenizer, "ten \"words\"");
    CHECK_EQ(info.bos_id, 11);
    CHECK_EQ(info.vocab_size, 16);
    CHECK_STR(info.source, "tokens");
    CHECK_OK(lf_dataset_verify(set, 0, 1 << 20));
    lf_dataset_close(set);
}

/* The real ones: every image decodes, 8 of them are CMYK. */
TEST(real_folders_pack_without_a_loss)
{
    static const struct {
        const char *name;
        int64_t n;
    } packs[] = {{"coco-mini-ccby", 22}, {"openstax-astronomy", 89}, {"openstax-microbiology", 45}};
    if (!lf_test_data()) SKIP("no test data (LOONGFORGE_TEST_DATA)");
    for (size_t i = 0; i < LF_COUNT(packs); i++) {
        char dir[1024];
        snprintf(dir, sizeof dir, "%s/image_text/%s", lf_test_data(), packs[i].name);
        if (!exists(dir)) SKIP("no %s", dir);
        for (int32_t captions = 0; captions < 2; captions++) {
            lf_pack_options o = options(0);
            lf_pack_summary sum = {.size = sizeof sum};
            o.overwrite = 1;
            CHECK_OK(lf_pack_folder(lf_test_path(packs[i].name), dir, captions ? "captions.jsonl" : NULL, NULL, 0, &o, NULL, NULL,
                                    &sum));
            CHECK_EQ(sum.samples, packs[i].n);
            CHECK_EQ(sum.images, packs[i].n);
            CHECK_EQ(sum.skipped, 0);
        }
    }
}

LF_TEST_MAIN
