/* SPDX-License-Identifier: Apache-2.0 */
/* The process-wide log callback: one call at a time, complete lines only. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static lf_log_fn log_fn;
static void *log_user;
static _Atomic int32_t log_level = -1;

void lf_log_set(lf_log_fn fn, void *user, int32_t level)
{
    pthread_mutex_lock(&lock);
    log_fn = fn;
    log_user = user;
    atomic_store(&log_level, fn ? level : -1);
    pthread_mutex_unlock(&lock);
}

void lf__log(int32_t level, const char *format, ...)
{
    if (level > atomic_load(&log_level)) return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (log_fn) log_fn(log_user, level, line);
    pthread_mutex_unlock(&lock);
}
