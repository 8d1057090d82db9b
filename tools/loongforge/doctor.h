/* SPDX-License-Identifier: Apache-2.0 */
/** @file doctor.h  What the files of `loongforge doctor` share: findings. */
#ifndef LF_DOCTOR_H
#define LF_DOCTOR_H

#include "cmd.h"

/** OK; WARN: works, at a cost; MISSING: an optional part is not there; BROKEN: something will fail. */
enum { DOCTOR_OK = 0, DOCTOR_WARN = 1, DOCTOR_MISSING = 2, DOCTOR_BROKEN = 3 };
enum { DOCTOR_MOST = 64 };

typedef struct doctor_row {
    const char *name;
    int state;         /* DOCTOR_* */
    char found[256];   /* "2.19.3", "missing" */
    char meaning[320]; /* what it costs and the remedy; "" when all is well */
} doctor_row;

typedef struct doctor_report {
    doctor_row row[DOCTOR_MOST];
    int n;
} doctor_report;

/** A new row to fill; the last one again when the report is full. */
doctor_row *doctor_add(doctor_report *report, const char *name);
/** Set state and meaning. */
void doctor_say(doctor_row *row, int state, const char *format, ...) __attribute__((format(printf, 3, 4)));

/** The operating system's side: cores, memory, limits, file systems, Python. */
void doctor_check_system(doctor_report *report);
/** Libraries: those linked in, and the optional ones that are found at run time. */
void doctor_check_libraries(doctor_report *report);

#endif
