/* SPDX-License-Identifier: Apache-2.0 */
/* Options, section "vault". */
#include "vault_int.h"

#define S lf_vault_options
static const lf_option rows[] = {
    LF_ROW_I32(S, diff_interval, "50", 1, 1e9, "steps between saves"),
    LF_ROW_I64(
        S, slice_bytes, "1MiB", 4096, LF__VAULT_MAX_SLICE_BYTES,
        "bytes of a slice's largest role, a multiple of 4096; small slices find more that is unchanged but cost more to list"),
    LF_ROW_I32(S, compress, "1", 0, 19, "zstd level of changed slices; 0 stores them raw"),
    LF_ROW_I32(S, threads, "0", 0, 256, "threads that hash and encode; 0: one a core"),
    LF_ROW_I32(S, keep_last, "0", 0, 1e9, "committed checkpoints to keep; 0: all"),
    LF_ROW_I32(S, keep_every, "0", 0, 1e9, "also keep checkpoints whose step is a multiple of this; 0: none"),
    LF_ROW_I32(S, rebase_every, "50", 0, 1e9, "write a new base after this many diffs; 0: never by count"),
    LF_ROW_F64(S, rebase_ratio, "0.8", 0, 1e9, "write a new base when a diff would exceed this share of the base's bytes"),
    LF_ROW_I64(S, staging_bytes, "0", 0, 9007199254740992.0,
               "most host memory for the snapshot in flight; 0: as much as one snapshot takes"),
    LF_ROW_BOOL(S, verify, "false", "read back and check every file before it is committed"),
};
#undef S

const lf_options_section lf__vault_section = {"vault", "CheckpointVault: a base, diffs, and always a good checkpoint on disk",
                                              rows, LF_COUNT(rows), sizeof(lf_vault_options)};
