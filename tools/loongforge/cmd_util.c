/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments by the options tables, messages, progress bar. */
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cmd.h"

static cmd_progress *shown; /* the bar on the terminal, to be wiped before a message */

/* ---- messages */

static void wipe_bar(void)
{
    if (!shown || !shown->terminal || !shown->width) return;
    fprintf(stderr, "\r%*s\r", shown->width, "");
    shown->width = 0;
}

static void print_message(const char *format, va_list args, const char *behind)
{
    wipe_bar();
    fprintf(stderr, "loongforge: ");
    if (format) vfprintf(stderr, format, args);
    if (format && behind[0]) fprintf(stderr, ": ");
    fprintf(stderr, "%s\n", behind);
}

int cmd_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_message(format, args, "");
    va_end(args);
    return CMD_FAILED;
}

int cmd_fail_usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    wipe_bar();
    fprintf(stderr, "loongforge: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "; hint: --help lists the arguments\n");
    va_end(args);
    return CMD_USAGE;
}

int cmd_fail_lf(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_message(format, args, lf_error_text());
    va_end(args);
    return CMD_FAILED;
}

/* Called from threads of the library, one call at a time; the bar belongs to the main thread and is left alone. */
static void print_log(void *user, int32_t level, const char *line)
{
    static const char *const words[] = {"error: ", "warning: ", "", "debug: "};
    (void)user;
    fprintf(stderr, "%s%s%s\n", isatty(STDERR_FILENO) ? "\r\033[K" : "", words[level & 3], line);
}

void cmd_log_to_stderr(int32_t level) { lf_log_set(print_log, NULL, level); }

const char *cmd_bytes(char *text, size_t size, int64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double x = (double)bytes;
    int unit = 0;
    for (; (x >= 1024 || x <= -1024) && unit < 5; unit++) x /= 1024;
    snprintf(text, size, unit == 0 ? "%.0f %s" : "%.2f %s", x, units[unit]);
    return text;
}

const char *cmd_seconds(char *text, size_t size, double seconds)
{
    long long s = (long long)seconds;
    if (s >= 3600) snprintf(text, size, "%lldh %02lldm", s / 3600, s / 60 % 60);
    else if (s >= 60) snprintf(text, size, "%lldm %02llds", s / 60, s % 60);
    else snprintf(text, size, "%.1fs", seconds);
    return text;
}

double cmd_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- arguments */

static void print_row(FILE *to, const lf_option *row)
{
    char key[64];
    snprintf(key, sizeof key, "--%s", row->name);
    fprintf(to, "  %-22s %s", key, row->help);
    if (row->choices) fprintf(to, " (%s)", row->choices);
    fprintf(to, " [%s]\n", row->default_text[0] ? row->default_text : "\"\"");
}

void cmd_print_help(FILE *to, const cmd_spec *spec)
{
    fprintf(to, "usage: loongforge %s\n", spec->usage);
    if (spec->help) fprintf(to, "%s\n", spec->help);
    if (spec->n_extras) fprintf(to, "\n");
    for (int i = 0; i < spec->n_extras; i++) {
        const cmd_extra *e = &spec->extras[i];
        char key[64];
        snprintf(key, sizeof key, "--%s%s%s", e->name, e->metavar ? " " : "", e->metavar ? e->metavar : "");
        fprintf(to, "  %-22s %s\n", key, e->help);
    }
    for (int i = 0; i < spec->n_sections; i++) {
        const lf_options_section *s = lf_options_find(spec->sections[i].name);
        if (!s) continue;
        fprintf(to, "\noptions [%s]: %s\n", s->name, s->help);
        for (uint32_t j = 0; j < s->n_rows; j++) print_row(to, &s->rows[j]);
    }
}

static const lf_option *find_option(const cmd_section *section, const char *key)
{
    const lf_options_section *s = lf_options_find(section->name);
    for (uint32_t i = 0; s && i < s->n_rows; i++)
        if (strcmp(s->rows[i].name, key) == 0) return &s->rows[i];
    return NULL;
}

static int is_bool_word(const char *text)
{
    static const char *const words[] = {"1", "0", "true", "false", "True", "False", "on", "off", "yes", "no"};
    for (size_t i = 0; text && i < sizeof words / sizeof words[0]; i++)
        if (strcmp(words[i], text) == 0) return 1;
    return 0;
}

/* One "--key" on its way through the parser. */
typedef struct argument {
    char key[128];     /* '-' turned into '_' */
    const char *given; /* as written */
    const char *value; /* behind '=', else NULL */
    const char *next;  /* the following argument, NULL at the end */
    int took_next;
} argument;

static int split_argument(argument *a, const char *text, const char *next)
{
    const char *key = text + 2, *equals = strchr(key, '=');
    size_t n = equals ? (size_t)(equals - key) : strlen(key);
    if (n == 0 || n >= sizeof a->key) return cmd_fail_usage("argument '%s' has no usable key", text);
    *a = (argument){.given = text, .value = equals ? equals + 1 : NULL, .next = next};
    memcpy(a->key, key, n);
    for (char *c = a->key; *c; c++)
        if (*c == '-') *c = '_';
    return CMD_GO;
}

static int take_value(argument *a, const char **value)
{
    if (!a->value && a->next) {
        a->value = a->next;
        a->took_next = 1;
    }
    if (!a->value) return cmd_fail_usage("argument '%s' needs a value", a->given);
    *value = a->value;
    return CMD_GO;
}

static int set_option(const cmd_section *section, const lf_option *row, argument *a)
{
    const char *value = a->value;
    if (row->type == LF_OPT_BOOL && !value && !is_bool_word(a->next)) {
        value = "true";
    } else {
        int code = take_value(a, &value);
        if (code != CMD_GO) return code;
    }
    if (lf_options_set(section->name, section->options, row->name, value) == LF_OK) return CMD_GO;
    cmd_fail_lf(NULL);
    return CMD_USAGE;
}

/* Another section's key is told as that; else the complaint of the section that knows a similar key, else of the first one. */
static int fail_unknown(const cmd_spec *spec, const char *key, const char *given)
{
    if (spec->n_sections == 0) return cmd_fail_usage("unknown argument '%s'", given);
    for (int i = spec->n_plain; spec->n_plain && i < spec->n_sections; i++)
        if (find_option(&spec->sections[i], key)) {
            cmd_fail("unknown option '%s'; hint: it belongs to section [%s]: --%s.%s", key, spec->sections[i].name,
                     spec->sections[i].name, key);
            return CMD_USAGE;
        }
    for (int i = 0; i < spec->n_sections; i++) {
        (void)lf_options_set(spec->sections[i].name, spec->sections[i].options, key, "");
        if (strstr(lf_error_text(), "did you mean") && (!spec->n_plain || i < spec->n_plain)) break;
        if (i == spec->n_sections - 1) (void)lf_options_set(spec->sections[0].name, spec->sections[0].options, key, "");
    }
    cmd_fail_lf(NULL);
    return CMD_USAGE;
}

static int take_argument(const cmd_spec *spec, argument *a)
{
    for (int i = 0; i < spec->n_extras; i++) {
        const cmd_extra *e = &spec->extras[i];
        char name[128];
        snprintf(name, sizeof name, "%s", e->name);
        for (char *c = name; *c; c++)
            if (*c == '-') *c = '_';
        if (strcmp(name, a->key) != 0) continue;
        if (e->text) return take_value(a, e->text);
        if (a->value) return cmd_fail_usage("argument '--%s' is a switch and takes no value", e->name);
        *e->flag = 1;
        return CMD_GO;
    }
    const char *key = a->key, *dot = strchr(key, '.');
    for (int i = 0; i < spec->n_sections; i++) {
        const cmd_section *s = &spec->sections[i];
        if (!dot && spec->n_plain && i >= spec->n_plain) continue;
        if (dot && (strlen(s->name) != (size_t)(dot - key) || strncmp(s->name, key, (size_t)(dot - key)) != 0)) continue;
        const lf_option *row = find_option(s, dot ? dot + 1 : key);
        if (row) return set_option(s, row, a);
        if (dot) {
            (void)lf_options_set(s->name, s->options, dot + 1, "");
            cmd_fail_lf(NULL);
            return CMD_USAGE;
        }
    }
    return fail_unknown(spec, key, a->given);
}

static int add_word(cmd_spec *spec, const char *word, int only_words)
{
    if (!only_words && word[0] == '-' && word[1] && !strchr("0123456789.", word[1]))
        return cmd_fail_usage("unknown argument '%s'", word);
    if (spec->n_words >= spec->max_words)
        return cmd_fail_usage("argument '%s' is one too many, expected: loongforge %s", word, spec->usage);
    spec->words[spec->n_words++] = word;
    return CMD_GO;
}

int cmd_parse(cmd_spec *spec, int argc, char **argv)
{
    int only_words = 0;
    spec->n_words = 0;
    for (int i = 1; i < argc; i++) {
        int code = CMD_GO;
        if (!only_words && strcmp(argv[i], "--") == 0) {
            only_words = 1;
        } else if (!only_words && (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)) {
            cmd_print_help(stdout, spec);
            return CMD_OK;
        } else if (!only_words && strncmp(argv[i], "--", 2) == 0) {
            argument a;
            code = split_argument(&a, argv[i], argv[i + 1]);
            if (code == CMD_GO) code = take_argument(spec, &a);
            i += code == CMD_GO && a.took_next;
        } else {
            code = add_word(spec, argv[i], only_words);
        }
        if (code != CMD_GO) return code;
    }
    if (spec->n_words < spec->min_words)
        return cmd_fail_usage("%d argument%s given, expected: loongforge %s", spec->n_words, spec->n_words == 1 ? "" : "s",
                              spec->usage);
    return CMD_GO;
}

/* ---- progress */

static volatile sig_atomic_t interrupted;
static struct sigaction before_bar;

static void note_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

void cmd_progress_begin(cmd_progress *bar, const char *what, const char *unit)
{
    *bar = (cmd_progress){.what = what, .unit = unit, .started = cmd_now(), .terminal = isatty(STDERR_FILENO)};
    bar->printed = bar->started;
    interrupted = 0;
    struct sigaction action = {.sa_handler = note_interrupt};
    sigaction(SIGINT, &action, &before_bar);
    shown = bar;
}

static int print_bar(const cmd_progress *bar, char *line, size_t size, int64_t done, int64_t total, double now)
{
    char left[24] = "", cells[31];
    double share = total > 0 ? (double)done / (double)total : 0, passed = now - bar->started;
    if (share > 1) share = 1;
    if (total <= 0) return snprintf(line, size, "%s %lld %s", bar->what, (long long)done, bar->unit);
    for (int i = 0; i < 30; i++) cells[i] = i < (int)(share * 30) ? '#' : '.';
    cells[30] = 0;
    if (share > 0) cmd_seconds(left, sizeof left, passed / share - passed);
    return snprintf(line, size, "%s [%s] %3.0f%% %lld/%lld %s, %.0f/s, %s left", bar->what, cells, share * 100, (long long)done,
                    (long long)total, bar->unit, passed > 0 ? (double)done / passed : 0, left);
}

int32_t cmd_progress_update(void *user, int64_t done, int64_t total)
{
    cmd_progress *bar = user;
    double now = cmd_now(), every = bar->terminal ? 0.1 : 10;
    if (now - bar->printed >= every) {
        char line[256];
        int n = print_bar(bar, line, sizeof line, done, total, now);
        if (bar->terminal) fprintf(stderr, "\r%-*s", bar->width, line);
        else fprintf(stderr, "%s\n", line);
        bar->width = n;
        bar->printed = now;
    }
    return interrupted ? 1 : 0;
}

int cmd_progress_end(cmd_progress *bar)
{
    if (shown == bar) {
        wipe_bar();
        shown = NULL;
        sigaction(SIGINT, &before_bar, NULL);
    }
    return interrupted ? 1 : 0;
}
