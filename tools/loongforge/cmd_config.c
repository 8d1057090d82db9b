/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge config`: the options tables as text, or as a configuration file. */
#include <string.h>

#include "cmd.h"

static const char *type_name(const lf_option *row)
{
    static const char *const names[] = {"i32", "i64", "f64", "bool", "text"};
    return row->type >= 0 && row->type < (int32_t)(sizeof names / sizeof names[0]) ? names[row->type] : "?";
}

/* "1 to 65536", "a|b", "true or false", "any text". */
static void print_range(char *text, size_t size, const lf_option *row)
{
    if (row->type == LF_OPT_BOOL) snprintf(text, size, "true or false");
    else if (row->type != LF_OPT_TEXT) snprintf(text, size, "%.12g to %.12g", row->min, row->max);
    else snprintf(text, size, "%s", row->choices ? row->choices : "any text");
}

static void print_section(const lf_options_section *s)
{
    char range[256];
    printf("[%s] %s\n", s->name, s->help);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        const lf_option *row = &s->rows[i];
        print_range(range, sizeof range, row);
        printf("  %-20s %-4s  %s%s%s  (%s)\n", row->name, type_name(row), row->type == LF_OPT_TEXT ? "\"" : "", row->default_text,
               row->type == LF_OPT_TEXT ? "\"" : "", range);
        printf("    %s\n", row->help);
    }
}

static void print_toml_text(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar(*text);
    }
    putchar('"');
}

/* Values as the tables resolve them (suffixes become numbers), so that any TOML reader gives back what was meant. */
static int print_toml(const lf_options_section *s)
{
    static union {
        size_t size;
        char room[65536];
    } options;
    char text[LF_TEXT_MAX], range[256];
    if (s->struct_bytes > sizeof options)
        return cmd_fail("options of [%s] have %u bytes, expected at most %zu", s->name, s->struct_bytes, sizeof options);
    if (lf_options_init(s->name, &options, s->struct_bytes) < 0) return cmd_fail_lf(NULL);
    printf("# %s\n[%s]\n", s->help, s->name);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        const lf_option *row = &s->rows[i];
        if (lf_options_get(s->name, &options, row->name, text, sizeof text) < 0) return cmd_fail_lf(NULL);
        print_range(range, sizeof range, row);
        printf("# %s (%s)\n%s = ", row->help, range, row->name);
        if (row->type == LF_OPT_TEXT) print_toml_text(text);
        else printf("%s", text);
        printf("\n");
    }
    return CMD_OK;
}

static int fail_section(const char *name)
{
    fprintf(stderr, "loongforge: unknown section '%s', expected one of:", name);
    for (uint32_t i = 0; lf_options_at(i); i++) fprintf(stderr, " %s", lf_options_at(i)->name);
    fprintf(stderr, "\n");
    return CMD_USAGE;
}

int lf_cmd_config(int argc, char **argv)
{
    int toml = 0;
    const cmd_extra extras[] = {
        {"toml", NULL, "print a configuration file that `loongforge train --config FILE` takes", NULL, &toml}};
    cmd_spec spec = {.usage = "config [SECTION] [--toml]",
                     .help = "Every option: name, type, default, range, meaning.",
                     .extras = extras,
                     .n_extras = 1,
                     .max_words = 1};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    if (spec.n_words && !lf_options_find(spec.words[0])) return fail_section(spec.words[0]);
    const lf_options_section *s;
    int printed = 0;
    for (uint32_t i = 0; (s = lf_options_at(i)) != NULL; i++) {
        if (spec.n_words && strcmp(s->name, spec.words[0]) != 0) continue;
        if (printed++) printf("\n");
        if (toml && (code = print_toml(s)) != CMD_OK) return code;
        if (!toml) print_section(s);
    }
    return CMD_OK;
}
