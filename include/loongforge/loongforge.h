/* SPDX-License-Identifier: Apache-2.0 */
/** @file loongforge.h  Everything: include this, or the header of the module you use. */
#ifndef LOONGFORGE_H
#define LOONGFORGE_H

#include "loongforge/device.h"
#include "loongforge/loader.h"
#include "loongforge/loom.h"
#include "loongforge/map.h"
#include "loongforge/nexus.h"
#include "loongforge/options.h"
#include "loongforge/scope.h"
#include "loongforge/sculptor.h"
#include "loongforge/status.h"
#include "loongforge/vault.h"

#endif
