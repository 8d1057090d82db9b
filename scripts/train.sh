#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the sample data once, train the tiny model on it, print the result.
#   SCENES (24000)  scenes to train on       NAME (make-train)  of the run       TRAIN_ARGS  more options of `loongforge train`
#   DEVICE (auto)   cuda or cpu; auto is a GPU where there is one
#   SIZE (tiny)     small: the preset of 100 M parameters, for a GPU
# A run that was interrupted goes on: its checkpoints are in runs/NAME.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
scenes=${SCENES:-24000}
train=data/scenes-$scenes
held_out=data/scenes-held-out
mkdir -p data
[ -e "$train" ] || loongforge pack --scenes "$scenes" "$train"
[ -e "$held_out" ] || loongforge pack --scenes 600 --first 1000000000 "$held_out"
device=${DEVICE:-auto}
size=${SIZE:-tiny}
name=${NAME:-make-train}
[ "$device" = auto ] || name=$name-$device
[ "$size" = tiny ] || name=$name-$size
# shellcheck disable=SC2086
loongforge train --preset "$size" --data "$train" --val_data "$held_out" --name "$name" --device "$device" --resume ${TRAIN_ARGS:-}
