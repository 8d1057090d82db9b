#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Configure and build one CMake preset. `release` (or $PRESET) is also what the Python package in this checkout uses.
# Usage: scripts/build.sh [PRESET | wheel]
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:-${PRESET:-release}}
used=${PRESET:-release}
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(jobs_count)}
if [ -z "${CMAKE_GENERATOR:-}" ] && command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi

# The CUDA side builds its grouped GEMMs from CUTLASS's headers, which takes minutes; without them it builds all the rest. They are
# brought where they will be used: on a machine with a GPU, for the preset cuda and for a wheel, or when CUTLASS=1 asks for it.
case $preset in
dev | asan | tsan | fuzz) cutlass=0 ;;
cuda | wheel) cutlass=1 ;;
*) if nvidia-smi -L >/dev/null 2>&1; then cutlass=1; else cutlass=${CUTLASS:-0}; fi ;;
esac
if [ "$cutlass" = 1 ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
    scripts/cutlass.sh >/dev/null || warn "going on without CUTLASS: the CUDA device will lack the experts' products"
fi

if [ "$preset" = wheel ]; then
    scripts/setup.sh wheel
    "$PY" -m build --wheel --outdir dist
    exit 0
fi

command -v cmake >/dev/null || die "missing: cmake 3.25 or newer - run scripts/setup.sh"

log=build/$preset/configure.log
mkdir -p "build/$preset"
if ! cmake --preset "$preset" --no-warn-unused-cli -DPython_EXECUTABLE="$PY" -DPython3_EXECUTABLE="$PY" \
    ${DEPS:+-DCMAKE_PREFIX_PATH="$DEPS"} >"$log" 2>&1; then
    cat "$log" >&2
    die "cmake --preset $preset failed; the lines above are $log"
fi
cmake --build "build/$preset" >"build/$preset/build.log" 2>&1 || {
    grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Generating)' "build/$preset/build.log" | head -n 200 >&2 || true
    die "building $preset failed; the whole log is build/$preset/build.log"
}
grep -E 'warning:' "build/$preset/build.log" >&2 || true

# The checkout's Python package sees the extension and the library that were just built.
if [ "$preset" = "$used" ]; then
    for file in "build/$preset"/python/_C*.so "build/$preset"/libloongforge*.so; do
        [ ! -e "$file" ] || ln -sfn "../../$file" "python/loongforge/${file##*/}"
    done
fi
say "built $preset in build/$preset"
