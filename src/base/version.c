/* SPDX-License-Identifier: Apache-2.0 */
#include "base.h"

const char *lf_version_string(void) { return LF_VERSION; }
int32_t lf_abi_version(void) { return LF_ABI; }
