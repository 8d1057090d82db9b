#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring CUTLASS's headers (BSD-3-Clause, header-only) for the grouped GEMMs; prints the folder to name with -I.
# They come from the offline bundle (build/deps/cutlass, or the file in dist/) or from the package nvidia-cutlass, whose wheel
# carries the sources; nothing of it is built, installed or committed. A second run only prints.
# Usage: scripts/cutlass.sh        prints build/deps/cutlass/include or build/cutlass/include
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
VERSION=4.2.0.0
SHA256=f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6

for dir in build/deps/cutlass build/cutlass; do
    if [ -f "$dir/include/cutlass/cutlass.h" ]; then
        echo "$ROOT/$dir/include"
        exit 0
    fi
done

dir=build/cutlass
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
# A bundle that was not unpacked, because the system has the C libraries.
for bundle in "${LOONGFORGE_DEPS:-}" dist/loongforge-deps-"$(uname -m)".tar.*; do
    [ -f "$bundle" ] || continue
    tar -xf "$bundle" -C "$tmp" --strip-components=1 --wildcards '*/cutlass/*' 2>/dev/null || continue
    mkdir -p build && rm -rf "$dir" && mv "$tmp/cutlass" "$dir"
    echo "$ROOT/$dir/include"
    exit 0
done
python=$PY
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}") || die "no Python to fetch nvidia-cutlass with"
"$python" -m pip download -q --retries 1 --timeout 20 --disable-pip-version-check --no-deps --only-binary=:all: -d "$tmp" "nvidia-cutlass==$VERSION" >&2 ||
    die "cannot fetch nvidia-cutlass $VERSION; without a network bring the bundle that 'make offline-bundle' writes"
wheel=$(echo "$tmp"/nvidia_cutlass-*.whl)
echo "$SHA256  $wheel" | sha256sum -c --quiet - >&2 || die "$wheel is not the file that was reviewed (sha256 differs)"

"$python" - "$wheel" "$dir.new" <<'PY'
import sys, zipfile
from pathlib import Path

wheel, out = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
source = "cutlass_library/source/"
for name in wheel.namelist():
    if name.endswith("/"):
        continue
    if name.startswith(source + "include/"):
        to = out / name[len(source):]
    elif name.startswith(source + "tools/util/include/"):
        to = out / "include" / name[len(source + "tools/util/include/"):]
    elif "LICENSE" in name and ".dist-info/" in name:
        to = out / Path(name).name
    else:
        continue
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(wheel.read(name))
PY
rm -rf "$dir" && mv "$dir.new" "$dir"
echo "$ROOT/$dir/include"
