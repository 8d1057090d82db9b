#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring CUTLASS's headers (BSD-3-Clause, header-only) for the grouped GEMMs; prints the folder to name with -I.
# They come from the offline bundle (build/deps/cutlass) or from the package nvidia-cutlass, whose wheel carries the sources;
# nothing of it is built, installed or committed. A second run only prints.
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
python=$PY
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}") || die "no Python to fetch nvidia-cutlass with"
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$tmp" "nvidia-cutlass==$VERSION" >&2 ||
    die "cannot fetch nvidia-cutlass $VERSION; offline, put its headers into $dir/include"
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
