/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge doctor`: what this machine has, what is missing and what that means. */
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "doctor.h"

static const char *const states[] = {"ok", "warning", "missing", "broken"};

doctor_row *doctor_add(doctor_report *report, const char *name)
{
    doctor_row *row = &report->row[report->n < DOCTOR_MOST ? report->n++ : DOCTOR_MOST - 1];
    *row = (doctor_row){.name = name};
    return row;
}

void doctor_say(doctor_row *row, int state, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(row->meaning, sizeof row->meaning, format, args);
    va_end(args);
    row->state = state;
}

static int count_state(const doctor_report *report, int state)
{
    int n = 0;
    for (int i = 0; i < report->n; i++) n += report->row[i].state == state;
    return n;
}

static void print_text(const doctor_report *report)
{
    for (int i = 0; i < report->n; i++) {
        const doctor_row *row = &report->row[i];
        printf("%-8s %-18s %s\n", row->state == DOCTOR_OK ? "ok" : states[row->state], row->name, row->found);
        if (row->meaning[0]) printf("%-8s %-18s -> %s\n", "", "", row->meaning);
    }
    printf("\n%d ok, %d warnings, %d optional parts missing, %d broken\n", count_state(report, DOCTOR_OK),
           count_state(report, DOCTOR_WARN), count_state(report, DOCTOR_MISSING), count_state(report, DOCTOR_BROKEN));
}

/* A path may hold bytes that are no UTF-8; JSON may not. */
static json_t *text_value(const char *text)
{
    json_t *value = json_string(text);
    return value ? value : json_string("(not UTF-8)");
}

static int print_json(const doctor_report *report)
{
    json_t *rows = json_array();
    for (int i = 0; rows && i < report->n; i++) {
        const doctor_row *row = &report->row[i];
        json_t *item = json_pack("{s:s,s:s,s:o,s:o}", "name", row->name, "state", states[row->state], "found",
                                 text_value(row->found), "meaning", text_value(row->meaning));
        if (!item || json_array_append_new(rows, item) != 0) {
            json_decref(rows);
            rows = NULL;
        }
    }
    json_t *root = rows ? json_pack("{s:s,s:b,s:o}", "version", lf_version_string(), "ok",
                                    count_state(report, DOCTOR_BROKEN) == 0, "rows", rows)
                        : NULL;
    if (!root) return cmd_fail("no memory for the report");
    int failed = json_dumpf(root, stdout, JSON_INDENT(2) | JSON_ENSURE_ASCII);
    printf("\n");
    json_decref(root);
    return failed ? cmd_fail("cannot write the report") : CMD_OK;
}

int lf_cmd_doctor(int argc, char **argv)
{
    int json = 0;
    const cmd_extra extras[] = {
        {"json", NULL, "the report as JSON: version, ok, rows of name, state, found, meaning", NULL, &json}};
    cmd_spec spec = {
        .usage = "doctor [--json]", .help = "Exit code 1 when something will break, else 0.", .extras = extras, .n_extras = 1};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    doctor_report *report = calloc(1, sizeof *report);
    if (!report) return cmd_fail("no memory for the report");
    doctor_row *row = doctor_add(report, "loongforge");
    snprintf(row->found, sizeof row->found, "%s (ABI %d)", lf_version_string(), (int)lf_abi_version());
    doctor_check_system(report);
    doctor_check_libraries(report);
    if (json) code = print_json(report);
    else print_text(report);
    int broken = count_state(report, DOCTOR_BROKEN);
    free(report);
    return json && code != CMD_OK ? code : broken ? CMD_FAILED : CMD_OK;
}
