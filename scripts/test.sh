#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests of one tier (TESTING.md) and close with each runner's own summary lines.
# Every stage runs even if an earlier one failed; the exit status is 1 if any did.
# Usage: scripts/test.sh short | long
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
tier=${1:-short}
log=build/test-$tier.log
summary=build/test-$tier-summary.txt
mkdir -p build
: >"$log"
: >"$summary"
failed=
no_tests=error

stage() { # NAME PATTERN COMMAND...: run, keep the lines that match PATTERN for the end
    local name=$1 pattern=$2 rc=0 start=$SECONDS out=build/test-$1.log
    shift 2
    say "== $name: $*"
    "$@" >"$out" 2>&1 </dev/null || rc=$?
    cat "$out" >>"$log"
    if [ "$rc" != 0 ]; then
        failed="$failed $name"
        tail -n 150 "$out"
    else
        tail -n 3 "$out"
    fi
    printf -- '-- %s (%d s)%s\n' "$name" $((SECONDS - start)) "$([ "$rc" = 0 ] || echo " FAILED, exit $rc")" >>"$summary"
    grep -E "$pattern" "$out" | tail -n 4 >>"$summary" || true
}

run_ctest() { ctest --test-dir "build/$1" --output-on-failure --no-tests="$no_tests" -j "$(jobs_count)" "${@:2}"; }
pytest_long() { "$PY" -m pytest -m long || [ $? = 5 ]; } # 5: none marked long
build_and_ctest() { scripts/build.sh "$1" && run_ctest "$@"; }

ctest_lines='tests passed|tests failed|Total Test time|No tests|\*\*\*(Failed|Exception|Timeout)|error:'
pytest_lines='^(=+ )?.*[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s'

if [ "$tier" = short ]; then
    stage checks 'problem|passed|error' scripts/lint.sh checks
    stage ctest-release "$ctest_lines" run_ctest release -LE long
    stage ctest-asan "$ctest_lines" build_and_ctest asan -LE long
    stage pytest "$pytest_lines" "$PY" -m pytest
elif [ "$tier" = long ]; then
    no_tests=ignore
    stage ctest-long "$ctest_lines" run_ctest release -L long
    stage ctest-tsan "$ctest_lines" build_and_ctest tsan
    if [ ! -d tests/fuzz ]; then
        warn "skipped: fuzzing - there is no tests/fuzz yet"
    elif command -v clang >/dev/null; then
        stage ctest-fuzz "$ctest_lines" build_and_ctest fuzz -L fuzz
    else
        warn "skipped: fuzzing - missing: clang (apt-get install clang)"
    fi
    stage pytest-long "$pytest_lines" pytest_long
else
    die "tier is '$tier', expected short or long"
fi

echo
cat "$summary"
[ -z "$failed" ] || die "failed:$failed - logs in build/test-*.log"
