#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the sample data once, train the tiny model on it, print the result.
#   SCENES (24000)  scenes to train on       NAME (make-train)  of the run       TRAIN_ARGS  more options of `loongforge train`
# A run that was interrupted goes on: its checkpoints are in runs/NAME.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
scenes=${SCENES:-24000}
train=data/scenes-$scenes
held_out=data/scenes-held-out
mkdir -p data
[ -e "$train" ] || loongforge pack --scenes "$scenes" "$train"
[ -e "$held_out" ] || loongforge pack --scenes 600 --first 1000000000 "$held_out"
# shellcheck disable=SC2086
loongforge train --preset tiny --data "$train" --val_data "$held_out" --name "${NAME:-make-train}" --resume ${TRAIN_ARGS:-}
