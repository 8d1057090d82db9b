#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a transcript and compares: run.sh BINARY CASE.t [--update]
#
# A case is lines "$ command", each followed by what it prints (stdout and stderr together) and "? CODE" when the exit code is
# not 0. Commands run one after another in a fresh folder, `loongforge` on the PATH. --update writes the case anew: read the
# difference before committing it.
set -u
binary=$(readlink -f "$1")
case_file=$(readlink -f "$2")
folder=$(mktemp -d "${TMPDIR:-/tmp}/lf_cli_XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin" "$folder/here"
ln -s "$binary" "$folder/bin/loongforge"
export PATH="$folder/bin:$PATH" LC_ALL=C
cd "$folder/here" || exit 1

while IFS= read -r line; do
    case $line in
    '$ '*) ;;
    *) continue ;;
    esac
    printf '%s\n' "$line"
    bash -o pipefail -c "${line#\$ }" </dev/null 2>&1
    code=$?
    [ "$code" -eq 0 ] || printf '? %d\n' "$code"
done <"$case_file" >"$folder/transcript"

if [ "${3:-}" = --update ]; then
    cp "$folder/transcript" "$case_file"
elif ! grep -q '^\$ ' "$folder/transcript"; then
    echo "$case_file has no command" >&2
    exit 1
else
    diff -u "$case_file" "$folder/transcript"
fi
