/* SPDX-License-Identifier: Apache-2.0 */
/** @file options.h  Options: one table row a field holds its name, type, default, bounds and help.
 *
 *  Every options struct of the library starts with `size_t size` and is filled by lf_options_init(section, &struct,
 *  sizeof(struct)), so that a caller built against a shorter struct keeps working: fields it does not know keep their
 *  defaults. The same rows serve the command line (`loongforge config`), the Python package and configuration files. */
#ifndef LOONGFORGE_OPTIONS_H
#define LOONGFORGE_OPTIONS_H

#include "loongforge/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Type of an option's field. TEXT fields are `char name[LF_TEXT_MAX]` inside the struct. */
enum { LF_OPT_I32 = 0, LF_OPT_I64 = 1, LF_OPT_F64 = 2, LF_OPT_BOOL = 3 /* int32_t 0 or 1 */, LF_OPT_TEXT = 4 };
#define LF_TEXT_MAX 256

typedef struct lf_option {
    const char *name;
    const char *default_text; /* parsed like user input */
    const char *help;         /* one sentence; units and the effect */
    const char *choices;      /* "a|b|c" for TEXT, NULL: free */
    int32_t type;             /* LF_OPT_* */
    uint32_t offset;          /* of the field in the options struct */
    double min, max;          /* inclusive bounds for numbers; unused for TEXT and BOOL */
} lf_option;

typedef struct lf_options_section {
    const char *name; /* "loader", "vault", … */
    const char *help;
    const lf_option *rows;
    uint32_t n_rows;
    uint32_t struct_bytes;
} lf_options_section;

/** The i-th section of the library, NULL past the last. Static. */
LF_API const lf_options_section *lf_options_at(uint32_t i);

/** A section by name, NULL when there is none. Static. */
LF_API const lf_options_section *lf_options_find(const char *section);

/** Fill a caller's options struct with defaults and set its leading `size`.
 *  @param options points to the struct of `section`.   @param size its sizeof as the caller was compiled.
 *  @return LF_OK; LF_ERR_NOTFOUND (no such section); LF_ERR_INVALID (size 0 or larger than this library's struct). */
LF_API lf_status lf_options_init(const char *section, void *options, size_t size);

/** Set one field from text ("64", "0.5", "true", "1.5GiB" for byte counts in I64 fields).
 *  @return LF_OK; LF_ERR_NOTFOUND (unknown key: the error names the nearest known one); LF_ERR_INVALID (not of the type,
 *  out of bounds, not one of the choices: the error says what was expected). The struct is unchanged on error. */
LF_API lf_status lf_options_set(const char *section, void *options, const char *key, const char *value);

/** Print one field's value into `text` (at most `size` bytes with the final 0).
 *  @return LF_OK; LF_ERR_NOTFOUND; LF_ERR_INVALID (text too short). */
LF_API lf_status lf_options_get(const char *section, const void *options, const char *key, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
