#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the sample data once, train the tiny model on it, print the result.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
scenes=${SCENES:-4000}
data=data/scenes-$scenes
if [ ! -e "$data/.done" ]; then
    rm -rf "$data"
    mkdir -p data
    loongforge pack --scenes "$scenes" "$data"
    touch "$data/.done"
fi
# shellcheck disable=SC2086
loongforge train --preset tiny --data "$data" --name make-train ${TRAIN_ARGS:-}
