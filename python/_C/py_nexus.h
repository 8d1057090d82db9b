/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_nexus.h  What a handle of NexusSync's holds in Python, and its transport. */
#ifndef LF_PY_NEXUS_H
#define LF_PY_NEXUS_H

#include "py.h"

/* What a handle of kind "lf_nexus" holds. */
typedef struct nexus_box {
    lf_nexus *nexus;
    lf_map *map;       /* borrowed: the handle keeps it */
    lf_device *device; /* the map's */
    PyObject *monitor; /* that the gate asks, or NULL */
    PyObject *post, *wait, *query, *scatter, *gather;
} nexus_box;

/* rank, world, post, wait; query, scatter and gather may be missing. */
int lfpy_adopt_transport(nexus_box *b, PyObject *object, lf_transport *t);

#endif
