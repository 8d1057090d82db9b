/* SPDX-License-Identifier: Apache-2.0 */
/* Heads of files and records, names: docs/format/vault.md. Numbers are little-endian whatever the machine. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

enum { CHECKED_BYTES = 56, TAIL_CHECKED_BYTES = 40 };
static const char file_magic[8] = "LFVAULT1", record_magic[4] = "LFSR", tail_magic[8] = "LFVTAIL1";

static void put(uint8_t *to, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(x >> (8 * i));
}

static uint64_t get(const uint8_t *from, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++) x |= (uint64_t)from[i] << (8 * i);
    return x;
}

uint64_t lf__vault_checksum(const void *data, size_t bytes) { return lf__hash(data, bytes, 0).lo; }

void lf__vault_file_head_put(uint8_t out[LF__VAULT_HEAD_BYTES], const lf__vault_file_head *head)
{
    memset(out, 0, LF__VAULT_HEAD_BYTES);
    memcpy(out, file_magic, 8);
    put(out + 8, LF__VAULT_VERSION, 4);
    put(out + 12, (uint64_t)head->kind, 4);
    put(out + 16, (uint64_t)head->step, 8);
    put(out + 24, head->seed, 8);
    memcpy(out + 32, head->map_digest, 16);
    put(out + CHECKED_BYTES, lf__vault_checksum(out, CHECKED_BYTES), 8);
}

lf_status lf__vault_file_head_get(lf__vault_file_head *head, const uint8_t in[LF__VAULT_HEAD_BYTES])
{
    if (memcmp(in, file_magic, 8) != 0) return LF_FAIL(LF_ERR_CORRUPT, "file head: no vault file");
    if (get(in + CHECKED_BYTES, 8) != lf__vault_checksum(in, CHECKED_BYTES))
        return LF_FAIL(LF_ERR_CORRUPT, "file head: wrong checksum");
    uint32_t version = (uint32_t)get(in + 8, 4);
    if (version != LF__VAULT_VERSION)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "file head: format version %u, this library reads %d", version, LF__VAULT_VERSION);
    *head = (lf__vault_file_head){.kind = (int32_t)get(in + 12, 4), .step = (int64_t)get(in + 16, 8), .seed = get(in + 24, 8)};
    memcpy(head->map_digest, in + 32, 16);
    return LF_OK;
}

void lf__vault_record_put(uint8_t out[LF__VAULT_HEAD_BYTES], const lf__vault_record *r)
{
    memset(out, 0, LF__VAULT_HEAD_BYTES);
    memcpy(out, record_magic, 4);
    put(out + 4, (uint64_t)r->klass, 2);
    put(out + 6, (uint64_t)r->role, 1);
    put(out + 7, (uint64_t)r->codec, 1);
    put(out + 8, (uint64_t)r->slice, 8);
    put(out + 16, (uint64_t)r->raw_bytes, 8);
    put(out + 24, (uint64_t)r->stored_bytes, 8);
    put(out + 32, r->hash.lo, 8);
    put(out + 40, r->hash.hi, 8);
    put(out + 48, r->checksum, 8);
    put(out + CHECKED_BYTES, lf__vault_checksum(out, CHECKED_BYTES), 8);
}

lf_status lf__vault_record_get(lf__vault_record *r, const uint8_t in[LF__VAULT_HEAD_BYTES])
{
    if (memcmp(in, record_magic, 4) != 0) return LF_FAIL(LF_ERR_CORRUPT, "record head: no record begins here");
    if (get(in + CHECKED_BYTES, 8) != lf__vault_checksum(in, CHECKED_BYTES))
        return LF_FAIL(LF_ERR_CORRUPT, "record head: wrong checksum");
    *r = (lf__vault_record){.klass = (int32_t)get(in + 4, 2),
                            .role = in[6],
                            .codec = in[7],
                            .slice = (int64_t)get(in + 8, 8),
                            .raw_bytes = (int64_t)get(in + 16, 8),
                            .stored_bytes = (int64_t)get(in + 24, 8),
                            .hash = {get(in + 32, 8), get(in + 40, 8)},
                            .checksum = get(in + 48, 8)};
    if (r->codec >= LF__N_CODECS)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "record head: codec %d, this library knows 0 to %d", r->codec, LF__N_CODECS - 1);
    return LF_OK;
}

void lf__vault_tail_put(uint8_t out[LF__VAULT_TAIL_BYTES], const lf__vault_tail *tail)
{
    memcpy(out, tail_magic, 8);
    put(out + 8, (uint64_t)tail->meta_offset, 8);
    put(out + 16, (uint64_t)tail->meta_bytes, 8);
    put(out + 24, tail->meta_hash.lo, 8);
    put(out + 32, tail->meta_hash.hi, 8);
    put(out + TAIL_CHECKED_BYTES, lf__vault_checksum(out, TAIL_CHECKED_BYTES), 8);
}

lf_status lf__vault_tail_get(lf__vault_tail *tail, const uint8_t in[LF__VAULT_TAIL_BYTES])
{
    if (memcmp(in, tail_magic, 8) != 0) return LF_FAIL(LF_ERR_CORRUPT, "file tail: the file does not end as a base does");
    if (get(in + TAIL_CHECKED_BYTES, 8) != lf__vault_checksum(in, TAIL_CHECKED_BYTES))
        return LF_FAIL(LF_ERR_CORRUPT, "file tail: wrong checksum");
    *tail = (lf__vault_tail){(int64_t)get(in + 8, 8), (int64_t)get(in + 16, 8), {get(in + 24, 8), get(in + 32, 8)}};
    return LF_OK;
}

int32_t lf__vault_role_parse(const char *name)
{
    for (int32_t r = 0; r < LF_N_ROLES; r++)
        if (strcmp(lf_role_name(r), name) == 0) return r;
    return -1;
}

int32_t lf__vault_dtype_parse(const char *name)
{
    for (int32_t d = LF_DTYPE_F32; d <= LF_DTYPE_BOOL; d++)
        if (strcmp(lf_dtype_name(d), name) == 0) return d;
    return 0;
}

/* ---- names ------------------------------------------------------------------------------------------------------------- */

/* A step in its only spelling: no sign, no leading zero, at most 18 digits. NULL: none. Returns what follows it. */
static const char *parse_step(const char *text, int64_t *step)
{
    int64_t x = 0;
    int n = 0;
    while (text[n] >= '0' && text[n] <= '9' && n < 18) x = x * 10 + (text[n++] - '0');
    if (n == 0 || (n > 1 && text[0] == '0')) return NULL;
    *step = x;
    return text + n;
}

static const char *skip(const char *text, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(text, prefix, n) == 0 ? text + n : NULL;
}

int32_t lf__vault_name_kind(const char *name, int64_t *step)
{
    const char *rest;
    int32_t kind;
    *step = -1;
    if ((rest = skip(name, "base_model.bin")) != NULL) {
        kind = LF__NAME_BASE_MODEL;
    } else if ((rest = skip(name, "base_")) != NULL) {
        kind = LF__NAME_BASE;
        if ((rest = parse_step(rest, step)) == NULL || (rest = skip(rest, ".bin")) == NULL) return LF__NAME_OTHER;
    } else if ((rest = skip(name, "checkpoint_")) != NULL) {
        kind = LF__NAME_CHECKPOINT;
        if ((rest = parse_step(rest, step)) == NULL) return LF__NAME_OTHER;
    } else {
        return LF__NAME_OTHER;
    }
    return *rest == 0 ? kind : strcmp(rest, ".tmp") == 0 ? LF__NAME_TEMP : LF__NAME_OTHER;
}

int32_t lf__vault_data_kind(const char *name, int64_t *step)
{
    int32_t kind = lf__vault_name_kind(name, step);
    if (kind == LF__NAME_BASE || kind == LF__NAME_BASE_MODEL) return LF__VAULT_BASE;
    const char *rest = skip(name, "checkpoint_");
    if (!rest || (rest = parse_step(rest, step)) == NULL || (rest = skip(rest, "/diff_")) == NULL) return -1;
    for (int i = 0; i < 3; i++, rest++)
        if (*rest < '0' || *rest > '9') return -1;
    return strcmp(rest, ".bin") == 0 ? LF__VAULT_DIFF : -1;
}
