/* SPDX-License-Identifier: Apache-2.0 */
/* The one list of options sections; each is defined beside the code that reads it. */
#include "base/base.h"

extern const lf_options_section lf__train_section;    /* scope/scope_options.c */
extern const lf_options_section lf__map_section;      /* map/map_options.c */
extern const lf_options_section lf__loader_section;   /* loader/loader_options.c */
extern const lf_options_section lf__pack_section;     /* loader/loader_options.c */
extern const lf_options_section lf__sculptor_section; /* sculptor/sculptor_options.c */
extern const lf_options_section lf__nexus_section;    /* nexus/nexus_options.c */
extern const lf_options_section lf__vault_section;    /* vault/vault_options.c */

const lf_options_section *const lf__sections[] = {
    &lf__train_section,    &lf__map_section,   &lf__loader_section, &lf__pack_section,
    &lf__sculptor_section, &lf__nexus_section, &lf__vault_section,
};
const uint32_t lf__n_sections = LF_COUNT(lf__sections);
