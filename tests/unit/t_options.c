/* SPDX-License-Identifier: Apache-2.0 */
/* Options tables of every section: defaults, bounds, texts, older callers. */
#include "base/base.h"
#include "lf_test.h"
#include "loongforge/scope.h"
#include "loongforge/sculptor.h"

/* Room for the options of any section. */
static union {
    size_t size;
    char room[1 << 16];
} one, two;

TEST(every_row_is_complete)
{
    const lf_options_section *s;
    for (uint32_t i = 0; (s = lf_options_at(i)) != NULL; i++) {
        CHECK(lf_options_find(s->name) == s);
        CHECK(s->help && s->help[0] && s->n_rows > 0);
        CHECK(s->struct_bytes <= sizeof one);
        for (uint32_t j = 0; j < s->n_rows; j++) {
            const lf_option *r = &s->rows[j];
            if (!r->help || strlen(r->help) < 10) FAIL_("[%s] %s has no help", s->name, r->name);
            CHECK(r->offset >= sizeof(size_t) && r->offset < s->struct_bytes);
            if (r->type != LF_OPT_TEXT && !(r->min < r->max)) FAIL_("[%s] %s: bounds %g to %g", s->name, r->name, r->min, r->max);
            for (uint32_t k = 0; k < j; k++) {
                CHECK(strcmp(r->name, s->rows[k].name) != 0);
                CHECK(r->offset != s->rows[k].offset);
            }
        }
    }
    CHECK(lf_options_at(0) && !lf_options_at(1000));
    CHECK(!lf_options_find("nonsense") && !lf_options_find(NULL));
}

/* Defaults, printed and read back, are the same bytes; and so they are within their own bounds and choices. */
TEST(defaults_of_every_section_read_back)
{
    const lf_options_section *s;
    for (uint32_t i = 0; (s = lf_options_at(i)) != NULL; i++) {
        memset(&one, 0xAA, sizeof one);
        memset(&two, 0x55, sizeof two);
        CHECK_OK(lf_options_init(s->name, &one, s->struct_bytes));
        CHECK_EQ(one.size, s->struct_bytes);
        CHECK_OK(lf_options_init(s->name, &two, s->struct_bytes));
        for (uint32_t j = 0; j < s->n_rows; j++) {
            char text[LF_TEXT_MAX];
            CHECK_OK(lf_options_get(s->name, &one, s->rows[j].name, text, sizeof text));
            CHECK_OK(lf_options_set(s->name, &two, s->rows[j].name, text));
        }
        CHECK(memcmp(&one, &two, s->struct_bytes) == 0);
        CHECK_OK(lf__options_take(s->name, &two, s->struct_bytes, &one));
        CHECK(memcmp(&one, &two, s->struct_bytes) == 0);
    }
}

TEST(bounds_hold_for_every_number)
{
    const lf_options_section *s;
    for (uint32_t i = 0; (s = lf_options_at(i)) != NULL; i++) {
        CHECK_OK(lf_options_init(s->name, &one, s->struct_bytes));
        memcpy(&two, &one, s->struct_bytes);
        for (uint32_t j = 0; j < s->n_rows; j++) {
            const lf_option *r = &s->rows[j];
            char text[64];
            if (r->type == LF_OPT_TEXT || r->type == LF_OPT_BOOL) continue;
            for (int side = 0; side < 2; side++) {
                double edge = side ? r->max : r->min,
                       step = r->type == LF_OPT_F64 ? fmax(1e-9, fabs(edge) * 1e-6) : fmax(1, fabs(edge) * 1e-6);
                snprintf(text, sizeof text, r->type == LF_OPT_F64 ? "%.17g" : "%.0f", side ? edge + step : edge - step);
                CHECK_STATUS(lf_options_set(s->name, &one, r->name, text), LF_ERR_INVALID);
                CHECK_HAS(lf_error_text(), r->name);
                CHECK_HAS(lf_error_text(), "expected");
            }
            CHECK_STATUS(lf_options_set(s->name, &one, r->name, "many"), LF_ERR_INVALID);
            CHECK_STATUS(lf_options_set(s->name, &one, r->name, ""), LF_ERR_INVALID);
            CHECK_STATUS(lf_options_set(s->name, &one, r->name, "nan"), LF_ERR_INVALID);
        }
        CHECK(memcmp(&one, &two, s->struct_bytes) == 0); /* unchanged by errors */
    }
}

TEST(unknown_keys_suggest_a_known_one)
{
    lf_train_options o;
    CHECK_OK(lf_options_init("train", &o, sizeof o));
    CHECK_STATUS(lf_options_set("train", &o, "batchsize", "4"), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "batchsize");
    CHECK_HAS(lf_error_text(), "did you mean 'batch_size'?");
    CHECK_STATUS(lf_options_set("train", &o, "completely_different", "4"), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "loongforge config train");
    CHECK_STATUS(lf_options_set("trian", &o, "steps", "4"), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "trian");
    CHECK_STATUS(lf_options_set("train", &o, NULL, "4"), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_set("train", &o, "steps", NULL), LF_ERR_INVALID);
    char text[8];
    CHECK_STATUS(lf_options_get("train", &o, "stepz", text, sizeof text), LF_ERR_NOTFOUND);
}

TEST(byte_counts_take_units)
{
    static const struct {
        const char *text;
        int64_t value;
    } rows[] = {
        {"64", 64},           {"1KiB", 1024},   {"1K", 1024},       {"2k", 2000}, {"16MB", 16000000}, {"1.5GiB", 1610612736},
        {"16 MiB", 16777216}, {"1e6", 1000000}, {"1G", 1073741824}, {"0", 0}};
    lf_plan_options o;
    CHECK_OK(lf_options_init("sculptor", &o, sizeof o));
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        CHECK_OK(lf_options_set("sculptor", &o, "capacity_bytes", rows[i].text));
        CHECK_EQ(o.capacity_bytes, rows[i].value);
    }
    CHECK_STATUS(lf_options_set("sculptor", &o, "capacity_bytes", "1.5"), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_set("sculptor", &o, "capacity_bytes", "1 GiBB"), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_set("sculptor", &o, "capacity_bytes", "-1"), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_set("sculptor", &o, "short_ops", "1K"), LF_ERR_INVALID); /* no byte count */
    CHECK_EQ(o.capacity_bytes, 0);
}

TEST(words_texts_and_choices)
{
    lf_train_options o;
    char longest[LF_TEXT_MAX + 1], text[LF_TEXT_MAX];
    CHECK_OK(lf_options_init("train", &o, sizeof o));
    CHECK_OK(lf_options_set("train", &o, "resume", "on"));
    CHECK_EQ(o.resume, 1);
    CHECK_OK(lf_options_set("train", &o, "resume", "False"));
    CHECK_EQ(o.resume, 0);
    CHECK_STATUS(lf_options_set("train", &o, "resume", "maybe"), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "true or false");
    CHECK_OK(lf_options_set("train", &o, "preset", "n16"));
    CHECK_STATUS(lf_options_set("train", &o, "preset", "n1"), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "tiny|small|n16");
    CHECK_STR(o.preset, "n16");
    memset(longest, 'x', LF_TEXT_MAX);
    longest[LF_TEXT_MAX] = 0;
    CHECK_STATUS(lf_options_set("train", &o, "data", longest), LF_ERR_INVALID);
    longest[LF_TEXT_MAX - 1] = 0;
    CHECK_OK(lf_options_set("train", &o, "data", longest));
    CHECK_OK(lf_options_get("train", &o, "data", text, sizeof text));
    CHECK_STR(text, longest);
    CHECK_STATUS(lf_options_get("train", &o, "data", text, 10), LF_ERR_INVALID);
    CHECK_OK(lf_options_set("train", &o, "lr", "0.1"));
    CHECK_OK(lf_options_get("train", &o, "lr", text, sizeof text));
    CHECK_STR(text, "0.1");
    CHECK_OK(lf_options_set("train", &o, "lr", "0.30000000000000004"));
    CHECK_OK(lf_options_get("train", &o, "lr", text, sizeof text));
    CHECK_STR(text, "0.30000000000000004");
}

/* A caller built when [sculptor] ended before long_ops. */
TEST(an_older_shorter_struct_keeps_working)
{
    lf_plan_options o, whole;
    size_t old = offsetof(lf_plan_options, long_ops);
    memset(&o, 0x77, sizeof o);
    CHECK_OK(lf_options_init("sculptor", &o, old));
    CHECK_EQ(o.size, old);
    CHECK_EQ(o.long_ops, 0x77777777); /* not ours to touch */
    CHECK_OK(lf_options_set("sculptor", &o, "short_ops", "3"));
    CHECK_STATUS(lf_options_set("sculptor", &o, "long_ops", "9"), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "newer than the caller's struct");
    CHECK_OK(lf__options_take("sculptor", &whole, sizeof whole, &o));
    CHECK_EQ(whole.size, sizeof whole);
    CHECK_EQ(whole.short_ops, 3);
    CHECK_EQ(whole.long_ops, 20); /* the default */
    CHECK_STR(whole.strategy, "moefusion");
}

TEST(sizes_that_make_no_sense_are_refused)
{
    lf_plan_options o;
    CHECK_STATUS(lf_options_init("sculptor", &o, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_init("sculptor", &o, sizeof o + 8), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_init("sculptor", NULL, sizeof o), LF_ERR_INVALID);
    CHECK_STATUS(lf_options_init("none", &o, sizeof o), LF_ERR_NOTFOUND);
    memset(&one, 0, sizeof one);
    CHECK_STATUS(lf__options_take("sculptor", &o, sizeof o, &one), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "lf_options_init");
    CHECK_OK(lf_options_init("sculptor", &one, sizeof o));
    ((lf_plan_options *)(void *)&one)->align_bytes = -4; /* written without lf_options_set */
    CHECK_STATUS(lf__options_take("sculptor", &o, sizeof o, &one), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "align_bytes is -4");
}

LF_TEST_MAIN
