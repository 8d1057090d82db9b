#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a GPU machine, with or without a network: build, run the GPU tests, the memory and race checkers on the small ones where the
# machine has them, train the tiny preset on the GPU beside the CPU, and run `make train` there with two presets. Without a
# network put the offline bundle into dist/ first.
#   bench/device.sh [PYTHON]      an interpreter that has torch (default python3)
#   CHECKERS=0                    leaves the checkers out
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
set -u
export PYTHON=${1:-python3} PRESET=cuda
failed=0
say() { printf '\n== %s\n' "$*"; }
check() { # NAME COMMAND...
    local name=$1
    shift
    local rc=0
    "$@" >"build/device-$name.log" 2>&1 || rc=$?
    if [ $rc = 0 ] || [ $rc = 77 ]; then echo "$name: ok, $(tail -n 1 "build/device-$name.log")"; else
        echo "$name: FAILED"
        tail -n 30 "build/device-$name.log"
        failed=1
    fi
}

say build
make build || exit 1
. scripts/env.sh
set +e
tests=build/cuda/tests
export LD_LIBRARY_PATH=$PWD/build/cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

say tests
for test in "$tests"/t_*cuda* "$tests"/t_grouped_gem*; do check "$(basename "$test")" "$test"; done

say "Python tests"
for test in graph attention clock blocks nccl; do check "python-$test" "$PY" -m pytest -q "tests/python/test_$test.py"; done

say "several GPUs"
n_gpus=$("$PY" -c "import torch; print(torch.cuda.device_count())")
if [ "$n_gpus" -ge 2 ]; then
    nccl=$("$PY" -c "import torch; print(next(l.split()[-1] for l in open('/proc/self/maps') if 'libnccl' in l))")
    ranks() { "$PY" -m torch.distributed.run --standalone --nproc-per-node "$n_gpus" "$@"; }
    check sync-bench ranks --no-python "$(command -v loongforge)" sync bench --transport nccl --nccl_library "$nccl" \
        --sizes 1GiB,256MiB,64MiB,16MiB --chunks 16MiB,64MiB
    cat build/device-sync-bench.log
    check nexus ranks bench/nexus.py --variants default
else
    echo "$n_gpus: skipped"
fi

say checkers
if [ "${CHECKERS:-1}" = 0 ]; then
    echo "left out"
elif command -v compute-sanitizer >/dev/null && ! compute-sanitizer "$tests/t_device_cuda" 2>&1 | grep -q "not supported"; then
    check memcheck-t_experts_cuda compute-sanitizer --error-exitcode 3 "$tests/t_experts_cuda"
    for tool in memcheck racecheck synccheck; do
        for test in t_loom_cuda t_loom_cuda_rows t_loom_cuda_dense t_loom_cuda_sweep; do
            check "$tool-$test" compute-sanitizer --tool "$tool" --error-exitcode 3 "$tests/$test"
        done
    done
else
    echo "compute-sanitizer does not run on this machine: skipped"
fi

say training
data=$(mktemp -d)
loongforge pack --scenes 8000 "$data/train" && loongforge pack --scenes 200 --first 1000000000 "$data/held-out"
for device in cuda cpu; do
    check "train-$device" loongforge train --data "$data/train" --val_data "$data/held-out" --runs_dir "$data/runs" --name "$device" \
        --device "$device" --dtype f32 --steps 40 --log_every 20
done
"$PY" - "$data/runs" <<'PY' || failed=1
import json, sys
rows = {d: [json.loads(line) for line in open(f"{sys.argv[1]}/{d}/log.jsonl")] for d in ("cuda", "cpu")}
worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(rows["cuda"], rows["cpu"]))
print(f"40 losses in f32, GPU against CPU: worst relative difference {worst:.1e}, expected below 1e-3")
sys.exit(worst > 1e-3)
PY
rm -rf "$data"

say "make train"
export SCENES=6000 DEVICE=cuda
check make-train-tiny make train TRAIN_ARGS="--steps 600"
check make-train-small make train SIZE=small TRAIN_ARGS="--steps 60 --batch_size 32 --lr 3e-4"
exit $failed
