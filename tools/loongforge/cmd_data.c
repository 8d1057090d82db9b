/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge data`: look into a set. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cmd.h"
#include "data.h"

static const char usage[] = "data (ls | stat | verify) SET, or data show SET OUT.jpg";
static const char help[] =
    "ls lists samples, stat sums a set up, verify decodes and parses every sample and names the bad ones (exit code 1),\n"
    "show writes a contact sheet as the model sees it, and the texts into OUT.txt beside it.";

enum { TEXT_COLUMN = 60 };

/* The text of a record's i-th turn as one line, cut to `size`; "" when there is none. */
static void first_words(const json_t *root, size_t i, char *text, size_t size)
{
    const json_t *turns = json_object_get(root, "turns");
    if (!turns) turns = json_object_get(root, "conversations");
    const char *value = json_string_value(json_object_get(json_array_get(turns, i), "value"));
    snprintf(text, size, "%s", value ? value : "");
    for (char *p = text; *p; p++)
        if (*p == '\n') *p = ' ';
}

static int list_samples(const lf_dataset *set, const data_range *range)
{
    printf("%10s  %-24s %12s %10s  %s\n", "number", "id", "image bytes", "text bytes", "text");
    for (int64_t i = range->first; i < range->end; i++) {
        lf_sample s = {.size = sizeof s};
        char text[TEXT_COLUMN];
        if (lf_dataset_get(set, i, &s) < 0) return cmd_fail_lf(NULL);
        json_t *root = s.text ? json_loadb(s.text, (size_t)s.text_bytes, 0, NULL) : NULL;
        first_words(root, 0, text, sizeof text);
        json_decref(root);
        printf("%10lld  %-24.*s %12lld %10lld  %s\n", (long long)i, (int)s.id_bytes, s.id, (long long)s.image_bytes,
               (long long)s.text_bytes, text);
    }
    if (range->end < range->n) printf("... %lld more\n", (long long)(range->n - range->end));
    return CMD_OK;
}

typedef struct column {
    int64_t n, sum, least, most;
} column;

static void count(column *c, int64_t bytes)
{
    if (c->n == 0 || bytes < c->least) c->least = bytes;
    if (bytes > c->most) c->most = bytes;
    c->sum += bytes;
    c->n++;
}

static void print_column(const char *name, const column *c)
{
    char sum[24];
    printf("%-10s %10lld  %10s  bytes each: %lld to %lld, mean %lld\n", name, (long long)c->n, cmd_bytes(sum, sizeof sum, c->sum),
           (long long)c->least, (long long)c->most, (long long)(c->n ? c->sum / c->n : 0));
}

static int print_stat(const lf_dataset *set, const lf_dataset_info *info)
{
    column image = {0}, text = {0};
    for (int64_t i = 0; i < info->n_samples; i++) {
        lf_sample s = {.size = sizeof s};
        if (lf_dataset_get(set, i, &s) < 0) return cmd_fail_lf(NULL);
        if (s.image) count(&image, s.image_bytes);
        if (s.text) count(&text, s.text_bytes);
    }
    printf("samples    %10lld\n", (long long)info->n_samples);
    print_column("images", &image);
    print_column("texts", &text);
    printf("other      %10lld  records of no known modality\n", (long long)info->n_other);
    printf("source     %s\n", info->source[0] ? info->source : "(not said)");
    printf("tokenizer  %s, %d ids with markers: pad %d, bos %d, eos %d, image %d, human %d, gpt %d\n", info->tokenizer,
           info->vocab_size, info->pad_id, info->bos_id, info->eos_id, info->image_id, info->human_id, info->gpt_id);
    return CMD_OK;
}

static int verify(const lf_dataset *set, const data_range *range, int64_t max_pixels)
{
    int64_t bad = 0, done = 0, total = range->end - range->first;
    cmd_progress bar;
    int stopped = 0;
    cmd_progress_begin(&bar, "verifying", "samples");
    for (int64_t i = range->first; i < range->end && !stopped; i++) {
        if (lf_dataset_verify(set, i, max_pixels) < 0) {
            bad++;
            printf("%s\n", lf_error_text());
        }
        stopped = cmd_progress_update(&bar, ++done, total) != 0;
    }
    cmd_progress_end(&bar);
    printf("%lld of %lld samples are good, %lld bad\n", (long long)(done - bad), (long long)done, (long long)bad);
    if (stopped) return cmd_fail("stopped after %lld of %lld samples", (long long)done, (long long)total);
    return bad ? CMD_FAILED : CMD_OK;
}

/* A whole number of at least `least` in *value; CMD_USAGE when it is none. */
static int take_number(const char *key, const char *text, int64_t least, int64_t *value)
{
    char *end;
    if (!text) return CMD_GO;
    *value = strtoll(text, &end, 10);
    if (end == text || *end || *value < least)
        return cmd_fail_usage("--%s is '%s', expected a whole number from %lld", key, text, (long long)least);
    return CMD_GO;
}

static int run(const char *what, const char *out, lf_dataset *set, data_range range, const lf_loader_options *o)
{
    lf_dataset_info info = {.size = sizeof info};
    if (lf_dataset_get_info(set, &info) < 0) return cmd_fail_lf(NULL);
    range.n = info.n_samples;
    if (range.first >= range.n)
        return cmd_fail("--first is %lld, the set has %lld samples", (long long)range.first, (long long)range.n);
    if (range.end < 0 && strcmp(what, "verify") == 0) range.end = range.n - range.first;
    if (range.end < 0) range.end = strcmp(what, "show") == 0 ? 16 : 20;
    range.end = range.end < range.n - range.first ? range.first + range.end : range.n;
    if (strcmp(what, "ls") == 0) return list_samples(set, &range);
    if (strcmp(what, "stat") == 0) return print_stat(set, &info);
    if (strcmp(what, "verify") == 0) return verify(set, &range, o->max_pixels);
    return data_show(set, &range, out, o->image_size, o->max_pixels);
}

int lf_cmd_data(int argc, char **argv)
{
    static const char *const actions[] = {"ls", "stat", "verify", "show"};
    const char *first = NULL, *n = NULL;
    lf_loader_options o;
    data_range range = {.end = -1};
    lf_dataset *set;
    int known = 0;
    if (lf_options_init("loader", &o, sizeof o) < 0) return cmd_fail_lf(NULL);
    const cmd_section sections[] = {{"loader", &o}};
    const cmd_extra extras[] = {{"first", "I", "number of the first sample [0]", &first, NULL},
                                {"n", "N", "how many samples [ls 20, show 16, verify all]", &n, NULL}};
    cmd_spec spec = {.usage = usage,
                     .help = help,
                     .sections = sections,
                     .n_sections = 1,
                     .extras = extras,
                     .n_extras = 2,
                     .min_words = 2,
                     .max_words = 3};
    int code = cmd_parse(&spec, argc, argv);
    if (code == CMD_GO) code = take_number("first", first, 0, &range.first);
    if (code == CMD_GO) code = take_number("n", n, 1, &range.end);
    if (code != CMD_GO) return code;
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++) known = known || strcmp(spec.words[0], actions[i]) == 0;
    if (!known) return cmd_fail_usage("data '%s', expected ls, stat, verify or show", spec.words[0]);
    if ((strcmp(spec.words[0], "show") == 0) != (spec.n_words == 3))
        return cmd_fail_usage(spec.n_words == 3 ? "'%s' takes no third argument"
                                                : "'%s' needs a third argument: the picture's file",
                              spec.words[0]);
    if (lf_dataset_open(&set, spec.words[1]) < 0) return cmd_fail_lf(NULL);
    code = run(spec.words[0], spec.n_words == 3 ? spec.words[2] : NULL, set, range, &o);
    lf_dataset_close(set);
    return code;
}
