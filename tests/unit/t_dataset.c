/* SPDX-License-Identifier: Apache-2.0 */
/* Sets: opening what is and what is no LMDB, the index, metadata, text records to tokens. */
#include <lmdb.h>

#include "lf_test.h"
#include "loader/loader_int.h"

/* ---- making sets ------------------------------------------------------------------------------------------------------- */

typedef struct pair {
    const char *key, *value;
} pair;

static void make_set(const char *path, const pair *pairs, int32_t n)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    CHECK(mkdir(path, 0777) == 0);
    CHECK(mdb_env_create(&env) == 0 && mdb_env_set_mapsize(env, 64 << 20) == 0 && mdb_env_open(env, path, MDB_NOLOCK, 0666) == 0);
    CHECK(mdb_txn_begin(env, NULL, 0, &txn) == 0 && mdb_dbi_open(txn, NULL, 0, &dbi) == 0);
    for (int32_t i = 0; i < n; i++) {
        MDB_val k = {strlen(pairs[i].key), (void *)(uintptr_t)pairs[i].key},
                v = {strlen(pairs[i].value), (void *)(uintptr_t)pairs[i].value};
        CHECK(mdb_put(txn, dbi, &k, &v, 0) == 0);
    }
    CHECK(mdb_txn_commit(txn) == 0);
    mdb_env_close(env);
}

static void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "w");
    CHECK(f && fwrite(bytes, 1, n, f) == n);
    fclose(f);
}

/* ---- opening ------------------------------------------------------------------------------------------------------------ */

TEST(what_is_no_set_is_named_in_one_line)
{
    lf_dataset *set = (void *)1;
    CHECK_STATUS(lf_dataset_open(&set, lf_test_path("nowhere")), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "nowhere");
    CHECK(set == NULL);
    const char *dir = lf_test_path("empty_dir");
    mkdir(dir, 0777);
    CHECK_STATUS(lf_dataset_open(&set, dir), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "data.mdb");
    const char *file = lf_test_path("empty.mdb");
    write_file(file, "", 0);
    CHECK_STATUS(lf_dataset_open(&set, file), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "0 bytes");
    file = lf_test_path("text.mdb");
    write_file(file, "this is no database", 19);
    CHECK_STATUS(lf_dataset_open(&set, file), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "no LMDB");
    static char big[20000];
    memset(big, 'x', sizeof big);
    write_file(file, big, sizeof big);
    CHECK_STATUS(lf_dataset_open(&set, file), LF_ERR_FORMAT);
    memset(big, 0, sizeof big);
    write_file(file, big, sizeof big);
    CHECK_STATUS(lf_dataset_open(&set, file), LF_ERR_FORMAT);
    CHECK_STATUS(lf_dataset_open(&set, "/dev/null"), LF_ERR_NOTFOUND);
}

TEST(set_without_a_sample_is_refused)
{
    static const pair strange[] = {{"noseparator", "x"}, {"_text", "no id"}, {"a_video", "x"}, {"b_", "x"}};
    lf_dataset *set;
    const char *path = lf_test_path("no_sample");
    make_set(path, strange, 4);
    CHECK_STATUS(lf_dataset_open(&set, path), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "_text"); /* the first key, in order */
    CHECK_HAS(lf_error_text(), "{id}_image");
    path = lf_test_path("no_record");
    make_set(path, NULL, 0);
    CHECK_STATUS(lf_dataset_open(&set, path), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "no sample");
}

TEST(truncated_file_is_an_error_at_every_length)
{
    static char value[30000], path[512], data[600], cut[512];
    memset(value, 'v', sizeof value - 1);
    pair pairs[40];
    static char keys[40][32];
    for (int32_t i = 0; i < 40; i++) {
        snprintf(keys[i], sizeof keys[i], "%04d_image", i);
        pairs[i] = (pair){keys[i], value};
    }
    snprintf(path, sizeof path, "%s", lf_test_path("whole"));
    make_set(path, pairs, 40);
    snprintf(data, sizeof data, "%s/data.mdb", path);
    FILE *f = fopen(data, "r");
    static char bytes[4 << 20];
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    CHECK(n > 1000000 && n < sizeof bytes);
    snprintf(cut, sizeof cut, "%s", lf_test_path("cut.mdb"));
    for (size_t keep = 0; keep < n; keep += keep < 20000 ? 500 : 65536) {
        lf_dataset *set;
        write_file(cut, bytes, keep);
        lf_status rc = lf_dataset_open(&set, cut);
        if (rc != LF_ERR_CORRUPT && rc != LF_ERR_FORMAT) FAIL_("cut to %zu of %zu bytes: %s", keep, n, lf_status_name(rc));
        if (keep >= 2 * 4096) CHECK_HAS(lf_error_text(), "pages");
    }
    lf_dataset *set;
    write_file(cut, bytes, n);
    CHECK_OK(lf_dataset_open(&set, cut)); /* the file itself instead of its folder */
    lf_dataset_close(set);
    lf_dataset_close(NULL);
}

/* ---- the index ----------------------------------------------------------------------------------------------------------- */

TEST(keys_are_split_at_the_last_underscore_and_ids_sorted)
{
    /* in LMDB's order the records of "a" lie around those of "a_j"; "12" comes behind "123" */
    static const pair pairs[] = {{"12_image", "i12"}, {"12_text", "t12"},      {"123_text", "t123"},
                                 {"a_image", "ia"},   {"a_text", "ta"},        {"a_j_image", "iaj"},
                                 {"a_j_text", "taj"}, {"b_c_d_image", "ibcd"}, {"odd_video", "v"}};
    static const struct {
        const char *id, *image, *text;
    } want[] = {{"12", "i12", "t12"}, {"123", NULL, "t123"}, {"a", "ia", "ta"}, {"a_j", "iaj", "taj"}, {"b_c_d", "ibcd", NULL}};
    lf_dataset *set;
    const char *path = lf_test_path("index");
    make_set(path, pairs, LF_COUNT(pairs));
    CHECK_OK(lf_dataset_open(&set, path));
    lf_dataset_info info = {.size = sizeof info};
    CHECK_OK(lf_dataset_get_info(set, &info));
    CHECK_EQ(info.n_samples, 5);
    CHECK_EQ(info.n_other, 1);
    CHECK_EQ(info.n_bytes, 3 + 3 + 4 + 2 + 2 + 3 + 3 + 4);
    CHECK_EQ(info.vocab_size, 264);
    CHECK_EQ(info.pad_id, 256);
    CHECK_EQ(info.gpt_id, 261);
    CHECK_STR(info.tokenizer, "bytes");
    for (int32_t i = 0; i < 5; i++) {
        lf_sample s = {.size = sizeof s};
        CHECK_OK(lf_dataset_get(set, i, &s));
        CHECK(s.id_bytes == (int64_t)strlen(want[i].id) && memcmp(s.id, want[i].id, (size_t)s.id_bytes) == 0);
        CHECK((s.image != NULL) == (want[i].image != NULL) && (s.text != NULL) == (want[i].text != NULL));
        if (s.image) CHECK(memcmp(s.image, want[i].image, (size_t)s.image_bytes) == 0);
        if (s.text) CHECK(memcmp(s.text, want[i].text, (size_t)s.text_bytes) == 0);
    }
    lf_sample s = {.size = sizeof s};
    CHECK_STATUS(lf_dataset_get(set, 5, &s), LF_ERR_INVALID);
    CHECK_STATUS(lf_dataset_get(set, -1, &s), LF_ERR_INVALID);
    s.size = 3;
    CHECK_STATUS(lf_dataset_get(set, 0, &s), LF_ERR_INVALID);
    CHECK_STATUS(lf_dataset_verify(set, 0, 1 << 20), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "12: ");
    lf_dataset_close(set);
}

TEST(metadata_is_read_and_checked)
{
    static const struct {
        const char *meta;
        lf_status want;
        const char *text;
    } cases[] = {
        {"{\"format\":1,\"source\":\"s\",\"tokenizer\":\"gpt2\",\"tokenizer_ids\":50257,\"samples\":1}", LF_OK, ""},
        {"{\"format\":1,\"tokenizer_ids\":0,\"samples\":3}", LF_ERR_CORRUPT, "3 were packed"},
        {"{\"format\":2,\"samples\":1}", LF_ERR_UNSUPPORTED, "format 2"},
        {"{\"format\":1,\"tokenizer_ids\":-4}", LF_ERR_CORRUPT, "tokenizer_ids"},
        {"[1,2]", LF_ERR_CORRUPT, "JSON"},
        {"not json", LF_ERR_CORRUPT, "JSON"},
    };
    for (size_t i = 0; i < LF_COUNT(cases); i++) {
        char name[32];
        snprintf(name, sizeof name, "meta%zu", i);
        const char *path = lf_test_path(name);
        const pair pairs[] = {{"a_text", "{}"}, {LF__META_KEY, cases[i].meta}};
        lf_dataset *set;
        make_set(path, pairs, 2);
        CHECK_STATUS(lf_dataset_open(&set, path), cases[i].want);
        if (cases[i].want != LF_OK) CHECK_HAS(lf_error_text(), cases[i].text);
        if (!set) continue;
        lf_dataset_info info = {.size = sizeof info};
        CHECK_OK(lf_dataset_get_info(set, &info));
        CHECK_EQ(info.n_samples, 1);
        CHECK_EQ(info.n_other, 0);
        CHECK_EQ(info.pad_id, 50257);
        CHECK_EQ(info.vocab_size, 50264);
        CHECK_STR(info.tokenizer, "gpt2");
        lf_dataset_close(set);
    }
}

TEST(open_survives_every_failing_allocation)
{
    static const pair pairs[] = {{"a_text", "{}"}, {"b_text", "{}"}};
    char path[512];
    snprintf(path, sizeof path, "%s", lf_test_path("sweep"));
    make_set(path, pairs, 2);
    lf_dataset *set;
    lf__alloc_fail_at(0);
    CHECK_OK(lf_dataset_open(&set, path));
    int64_t n = lf__alloc_fail_at(0);
    lf_dataset_close(set);
    CHECK(n >= 3);
    for (int64_t i = 1; i <= n; i++) {
        lf__alloc_fail_at(i);
        lf_status rc = lf_dataset_open(&set, path);
        lf__alloc_fail_at(0);
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(set == NULL);
    }
}

/* ---- tokens -------------------------------------------------------------------------------------------------------------- */

enum { PAD = 256, BOS = 257, EOS = 258, IMAGE = 259, HUMAN = 260, GPT = 261 };

static lf_status tokens_of(const char *json, int32_t ids, int32_t room, lf__tokens *out)
{
    static int32_t id[256];
    static uint8_t trained[256];
    lf__vocabulary v;
    lf__vocabulary_set(&v, ids);
    *out = (lf__tokens){.id = id, .trained = trained, .room = room};
    return lf__record_tokens(json, json ? strlen(json) : 0, &v, out);
}

TEST(turns_become_tokens_and_labels)
{
    static const char json[] =
        "{\"turns\":[{\"from\":\"human\",\"value\":\"<image>\\nHi?\"},{\"from\":\"gpt\",\"value\":\"\xc3\xa9.\"},"
        "{\"from\":\"human\",\"value\":\"b\"},{\"from\":\"gpt\",\"value\":\"\"}]}";
    static const int32_t want[] = {BOS, HUMAN, IMAGE, 'H', 'i', '?', GPT, 0xC3, 0xA9, '.', EOS, HUMAN, 'b', GPT, EOS};
    static const uint8_t trained[] = {0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1};
    lf__tokens t;
    CHECK_OK(tokens_of(json, 0, 256, &t));
    CHECK_EQ(t.n, LF_COUNT(want));
    CHECK(!t.cut);
    for (int32_t i = 0; i < t.n; i++) {
        CHECK_EQ(t.id[i], want[i]);
        CHECK_EQ(t.trained[i], trained[i]);
    }
    CHECK_OK(tokens_of(json, 0, 7, &t));
    CHECK_EQ(t.n, 7);
    CHECK(t.cut);
    CHECK_OK(tokens_of(json, 0, LF_COUNT(want), &t));
    CHECK(!t.cut);
    CHECK_OK(tokens_of(NULL, 0, 8, &t));
    CHECK_EQ(t.n, 1);
    CHECK_EQ(t.id[0], BOS);
}

TEST(vocabularys_ids_come_from_the_record)
{
    static const char json[] =
        "{\"conversations\":[{\"from\":\"human\",\"value\":\"<image>\"},{\"from\":\"gpt\",\"value\":\"x\"}],\"tokens\":[[],[7,999]]}";
    static const int32_t want[] = {1001, 1004, 1003, 1005, 7, 999, 1002};
    lf__tokens t;
    CHECK_OK(tokens_of(json, 1000, 256, &t));
    CHECK_EQ(t.n, 7);
    for (int32_t i = 0; i < 7; i++) CHECK_EQ(t.id[i], want[i]);
    CHECK_STATUS(tokens_of(json, 999, 256, &t), LF_ERR_FORMAT); /* 999 is no id of it */
    CHECK_HAS(lf_error_text(), "tokens[1][1] is 999");
    CHECK_STATUS(tokens_of(json, 0, 256, &t), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "by bytes");
}

TEST(broken_records_say_where)
{
    static const struct {
        const char *json, *text;
    } cases[] = {
        {"", "no JSON"},
        {"{", "no JSON"},
        {"{\"turns\":[]} x", "no JSON"},
        {"{\"turns\":[],\"turns\":[]}", "duplicate"},
        {"{\"turns\":[{\"from\":\"human\",\"value\":\"a\\u0000b\"}]}", "no JSON"},
        {"{\"turns\":[{\"from\":\"human\",\"value\":\"\xff\"}]}", "no JSON"},
        {"[]", "no list"},
        {"3", "no JSON"},
        {"{\"turns\":{}}", "no list"},
        {"{\"turns\":[]}", "0 turns"},
        {"{\"turns\":[3]}", "turn 0 is from '(nobody)'"},
        {"{\"turns\":[{\"from\":\"system\",\"value\":\"a\"}]}", "turn 0 is from 'system'"},
        {"{\"turns\":[{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":3}]}", "turn 1 has no text"},
    };
    lf__tokens t;
    for (size_t i = 0; i < LF_COUNT(cases); i++) {
        CHECK_STATUS(tokens_of(cases[i].json, 0, 256, &t), LF_ERR_FORMAT);
        CHECK_HAS(lf_error_text(), cases[i].text);
    }
    static const char *const ids[] = {"3", "[[1]]", "[[1],[1],[1]]", "[[1],5]", "[[1],[\"x\"]]", "[[1],[-1]]", "[[1],[1.5]]"};
    for (size_t i = 0; i < LF_COUNT(ids); i++) {
        char json[256];
        snprintf(json, sizeof json,
                 "{\"turns\":[{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":\"b\"}],\"tokens\":%s}", ids[i]);
        CHECK_STATUS(tokens_of(json, 100, 256, &t), LF_ERR_FORMAT);
        CHECK_HAS(lf_error_text(), "tokens");
    }
    static char deep[10000];
    memset(deep, '[', sizeof deep - 1);
    CHECK_STATUS(tokens_of(deep, 0, 256, &t), LF_ERR_FORMAT);
}

LF_TEST_MAIN
