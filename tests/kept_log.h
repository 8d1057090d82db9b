/* SPDX-License-Identifier: Apache-2.0 */
/** @file kept_log.h  What the library logs between start_log and end_log, in log_text. */
#ifndef LF_KEPT_LOG_H
#define LF_KEPT_LOG_H

#include <stdio.h>
#include <string.h>

#include "loongforge/status.h"

static char log_text[1 << 16];

static inline void keep_line(void *user, int32_t level, const char *line)
{
    (void)user, (void)level;
    size_t n = strlen(log_text);
    snprintf(log_text + n, sizeof log_text - n, "%s\n", line);
}

static inline void start_log(int32_t level)
{
    log_text[0] = 0;
    lf_log_set(keep_line, NULL, level);
}

static inline void end_log(void) { lf_log_set(NULL, NULL, 0); }

#endif
