#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/lint.sh checks   project rules and ruff: part of `make test`
#        scripts/lint.sh all      and the layout of C files
#        scripts/lint.sh format   lay files out
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mode=${1:-checks}
failed=0

c_files() { git ls-files -co --exclude-standard -- '*.c' '*.h' '*.cu' '*.cc' | while read -r f; do [ ! -e "$f" ] || echo "$f"; done; }
clang_format() {
    scripts/setup.sh lint
    clang-format --version | grep -q ' 14\.' || die "$(clang-format --version), expected clang-format 14"
    c_files | xargs -r clang-format --style=file "$@"
}

if [ "$mode" = format ]; then
    clang_format -i
    ruff format python tests scripts examples bench
    ruff check --fix --quiet . || true
    exit 0
fi

for check in layers banned size text; do
    "$PY" "scripts/check_$check.py" || failed=1
done
if command -v ruff >/dev/null; then ruff check --quiet --output-format concise . || failed=1; else warn "skipped: ruff is not installed"; fi
if [ "$mode" = all ]; then
    clang_format --dry-run -Werror || failed=1
    if command -v shellcheck >/dev/null; then shellcheck -x -P scripts scripts/*.sh .ci/run || failed=1; fi
    if command -v clang-tidy >/dev/null && [ -f build/dev/compile_commands.json ]; then
        c_files | grep -E '^(src|tools)/.*\.c$' | xargs -r clang-tidy --quiet -p build/dev || failed=1
    fi
fi
[ "$failed" = 0 ] || die "lint: problems above"
say "lint passed"
