# SPDX-License-Identifier: Apache-2.0
"""`loongforge train` as a user runs it: a real process, killed, resumed, given nonsense, on a full disk."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loongforge import _C, CheckpointVault
from loongforge.models.gr00t_n16 import Gr00tN16, preset
from loongforge.vault_reader import VaultReader

SMALL = ("--batch_size", "4", "--threads", "1", "--log_every", "5", "--eval", "false", "--lr", "1e-3")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    path = tmp_path_factory.mktemp("set") / "scenes"
    _C.pack_scenes(str(path), {"scenes": 200})
    return path


def start(cwd, *args, **kw):
    return subprocess.Popen(
        [sys.executable, "-m", "loongforge.train", *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kw,
    )


def train(cwd, *args, expect=0):
    process = start(cwd, *args)
    out, err = process.communicate(timeout=240)
    assert process.returncode == expect, (process.returncode, out, err[-3000:])
    return out, err


def rows(cwd, name):
    return [json.loads(line) for line in (pathlib.Path(cwd) / "runs" / name / "log.jsonl").read_text().splitlines()]


def losses(cwd, name):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in rows(cwd, name)]


def one_line(err):
    """The last line is the error; no traceback came with it."""
    assert "Traceback" not in err, err[-2000:]
    last = err.strip().splitlines()[-1]
    assert last.startswith("loongforge: ")
    return last


def test_a_killed_run_goes_on_bit_for_bit(scenes, tmp_path):
    train(tmp_path, "--data", scenes, "--name", "whole", "--steps", "30", "--vault.diff_interval", "5", *SMALL)
    whole = losses(tmp_path, "whole")
    assert [s for s, _, _ in whole] == list(range(1, 31))
    args = ("--data", scenes, "--name", "cut", "--steps", "30", "--vault.diff_interval", "5", *SMALL)
    process = start(tmp_path, *args)
    log = tmp_path / "runs" / "cut" / "log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and len(log.read_text().splitlines()) >= 17):
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = len(losses_safe(log))
    assert 17 <= done < 30, "the run ended before it was killed"
    out, err = train(tmp_path, *args, "--resume")
    assert losses(tmp_path, "cut") == whole
    summary = json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())
    assert summary["resumed_from"] in range(5, done + 1) and summary["steps"] == 30
    assert (tmp_path / "runs" / "latest").resolve() == (tmp_path / "runs" / "cut").resolve()


def losses_safe(log):
    return [line for line in log.read_text().splitlines() if line.endswith("}")]


def test_resume_at_the_end_and_a_name_in_use(scenes, tmp_path):
    args = ("--data", scenes, "--name", "one", "--steps", "4", *SMALL)
    train(tmp_path, *args)
    before = losses(tmp_path, "one")
    _, err = train(tmp_path, *args, expect=1)
    assert "--resume goes on with it" in one_line(err)
    train(tmp_path, *args, "--resume")
    assert losses(tmp_path, "one") == before
    train(tmp_path, "--data", scenes, "--name", "one", "--steps", "6", *SMALL, "--resume")
    assert [r["step"] for r in rows(tmp_path, "one")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("interval", [1, 1000000])
def test_term_saves_and_leaves(scenes, tmp_path, interval):
    process = start(
        tmp_path, "--data", scenes, "--name", "t", "--steps", "100000", "--vault.diff_interval", str(interval), *SMALL
    )
    log = tmp_path / "runs" / "t" / "log.jsonl"
    while not (log.exists() and len(losses_safe(log)) >= 3):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    last = len(losses_safe(log))
    assert [c["step"] for c in _C.vault_list(str(tmp_path / "runs" / "t" / "checkpoints"))][-1] == last
    assert json.loads((tmp_path / "runs" / "t" / "summary.json").read_text())["steps"] == last


def test_two_ranks_train_evaluate_and_resume(scenes, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "loongforge.train"]
    options = ["--data", scenes, "--val_data", scenes, "--name", "two", *SMALL[:4], "--log_every", "1", "--lr", "1e-3"]
    options += ["--vault.diff_interval", "2"]
    for steps, more in (("3", ()), ("5", ("--resume",))):
        args = [*command, *map(str, options), "--steps", steps, *more]
        done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["world"] == 2 and summary["resumed_from"] == 3 and summary["attribute_accuracy"] is not None
    nexus, skew = summary["nexus"], summary["skew"]
    assert nexus["bus_bytes_s"] == pytest.approx(nexus["bytes"] / nexus["busy_s"])  # 2 (P - 1) / P of two ranks is 1
    assert 0 < nexus["exposed_share"] and nexus["p50_s"] <= nexus["p95_s"] <= nexus["p99_s"]
    assert len(skew["ahead_s"]) == 2 and min(skew["ahead_s"]) >= 0 and skew["last_rank"] in (0, 1)
    assert "bus bandwidth" in done.stdout and "ranks ahead of the slowest" in done.stdout
    assert [r["step"] for r in rows(tmp_path, "two")] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_two_ranks_tune_the_chunk_size(scenes, tmp_path):
    """Sizes change in the middle of the run on both ranks at once; two ranks' sums are the same bits however they are cut."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "loongforge.train"]
    options = ["--data", scenes, "--steps", "45", "--clip", "0", "--capture", "false", *SMALL[:4], *SMALL[6:], "--log_every", "1"]
    options += ["--nexus.chunk_bytes", "65536"]
    bounds = ["--nexus.chunk_tune", "true", "--nexus.chunk_least", "65536", "--nexus.chunk_most", "1048576"]
    out = {}
    for name, more in (("plain", ()), ("tuned", bounds)):
        args = [*command, *map(str, options), "--name", name, *more]
        done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        out[name] = done.stderr
    assert [r[:2] for r in losses(tmp_path, "tuned")] == [r[:2] for r in losses(tmp_path, "plain")]
    sizes = {n: json.loads((tmp_path / "runs" / n / "summary.json").read_text())["nexus"] for n in out}
    assert sizes["plain"]["chunk_bytes"] == 65536 and sizes["tuned"]["chunk_bytes"] in (65536, 262144, 1048576)
    assert sizes["tuned"]["collectives"] < sizes["plain"]["collectives"]  # larger ones were tried
    line = [line for line in out["tuned"].splitlines() if "chunk size" in line]
    assert len(line) == 1 and f"{sizes['tuned']['chunk_bytes']:,} bytes: settled, 3 sizes tried" in line[0], out["tuned"]
    assert "chunk size" not in out["plain"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_runs_as_the_readme_says(scenes, tmp_path, ranks):
    script = pathlib.Path(__file__).parents[2] / "examples" / "train_gr00t_n16.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks == 2 else []
    command = [sys.executable, *launcher, str(script), str(scenes), "--steps", "6", "--batch-size", "4", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "merged checkpoint out/final_model.bin" in done.stdout, done.stderr[-3000:]
    assert (tmp_path / "out" / "gr00t_n16_base.bin").exists()
    assert [c["step"] for c in _C.vault_list(str(tmp_path / "out" / "checkpoints"))] == [6]


def test_micro_steps_are_the_whole_batch_in_parts(scenes, tmp_path):
    for name, parts in (("whole", "1"), ("parts", "2")):
        train(
            tmp_path,
            "--data",
            scenes,
            "--name",
            name,
            "--steps",
            "3",
            "--micro_steps",
            parts,
            "--loader.pad_multiple",
            "0",
            *SMALL,
        )
    # The balance loss is taken over each part alone: a small difference.
    a, b = (rows(tmp_path, n) for n in ("whole", "parts"))
    assert b[0]["loss"] == pytest.approx(a[0]["loss"], rel=1e-5) and b[0]["grad_norm"] == pytest.approx(
        a[0]["grad_norm"], rel=2e-3
    )


def test_holding_back_needs_somebody_who_tells(scenes, tmp_path):
    args = ("--data", scenes, "--name", "g", "--steps", "2", "--device", "cpu", "--nexus.launch_busy_pct", "80", *SMALL)
    _, err = train(tmp_path, *args, expect=1)
    assert "launch_busy_pct is 80, expected 0: nothing tells how busy it is: the model is on cpu" in one_line(err)


def test_bf16_weights_train_on_the_cpu(scenes, tmp_path):
    train(tmp_path, "--data", scenes, "--name", "b", "--steps", "4", "--dtype", "bf16", *SMALL)
    got = [r["loss"] for r in rows(tmp_path, "b")]
    assert got[-1] < got[0]


def test_summary_has_the_names_that_are_compared_over_time(scenes, tmp_path):
    val = tmp_path / "val"
    _C.pack_scenes(str(val), {"scenes": 20, "first": 100000})
    out, err = train(tmp_path, "--data", scenes, "--val_data", val, "--name", "s", "--steps", "6", *SMALL[:6], "--lr", "1e-3")
    summary = json.loads((tmp_path / "runs" / "s" / "summary.json").read_text())
    wanted = (
        "steps",
        "tokens",
        "wall_s",
        "tokens_per_s",
        "parts",
        "overlap_efficiency",
        "bottleneck",
        "train_loss",
        "val_loss",
        "val_loss_blank_images",
        "attribute_accuracy",
        "resumed_from",
    )
    assert not [k for k in wanted if k not in summary]
    assert summary["tokens"] == sum(r["tokens"] for r in rows(tmp_path, "s"))
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["wall_s"], rel=1e-6)
    assert sum(summary["parts"].values()) * 6 == pytest.approx(summary["wall_s"], rel=0.02)
    assert 0 < summary["memory"]["bound_bytes"] <= summary["memory"]["peak_bytes"]
    assert "chance" in out and "bottleneck" in out and "live at most" in err
    table = (tmp_path / "runs" / "s" / "lifetimes.csv").read_text().splitlines()
    assert len(table) > 100 and any("static/layer00/expert00.weight" in line for line in table)


def test_the_checkpoint_is_readable_by_the_independent_reader(scenes, tmp_path):
    train(tmp_path, "--data", scenes, "--name", "r", "--steps", "3", *SMALL)
    saved = tmp_path / "runs" / "r" / "checkpoints"
    read = VaultReader(saved).read()
    assert read["step"] == 3 and json.loads(read["blobs"]["run"])["tokens"] > 0
    model = Gr00tN16(preset("tiny"))
    vault = CheckpointVault(saved, model=model)
    vault.restore()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), torch.from_numpy(read["params"][name]["weight"].copy())), name
    vault.close()


@pytest.mark.parametrize(
    "args, words",
    [
        (("--stepz", "3"), ["stepz", "did you mean 'steps'"]),
        (("--steps", "many"), ["steps", "'many'", "whole number"]),
        (("--preset", "huge"), ["preset", "'huge'", "tiny|small|n16"]),
        (("--vault.keep", "3"), ["keep"]),
        (("--optimizer.lr", "3"), ["unknown section [optimizer]"]),
        (("--loader.batch_size", "3"), ["batch_size", "set by the run itself"]),
        (("steps=3",), ["unexpected argument 'steps=3'"]),
        (("--lr",), ["needs a value"]),
        (("--config", "absent.toml"), ["absent.toml", "no such file"]),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_options_that_make_no_sense_are_one_line(tmp_path, args, words):
    _, err = train(tmp_path, *args, expect=2)
    line = one_line(err)
    for word in words:
        assert word in line


def test_configuration_files_are_checked_like_options(tmp_path):
    for text, words in (
        ("[train]\nstep = 3\n", ["step", "did you mean 'steps'"]),
        ("[trian]\nsteps = 3\n", ["unknown section [trian]"]),
        ("steps = 3\n", ["outside a section"]),
        ("[train\n", ["no TOML"]),
        ('[train]\nname = "a\\u0000b"\n', ["0 byte"]),
        ("[train]\nlr = -1.0\n", ["lr is -1", "0 to 10"]),
    ):
        (tmp_path / "c.toml").write_text(text)
        _, err = train(tmp_path, "--config", "c.toml", expect=2)
        line = one_line(err)
        for word in words:
            assert word in line, (line, word)


def test_the_command_line_wins_over_the_file(scenes, tmp_path):
    (tmp_path / "c.toml").write_text(
        f'[train]\ndata = "{scenes}"\nsteps = 9\nbatch_size = 4\nname = "file"\neval = false\nthreads = 1\n'
    )
    train(tmp_path, "--config", "c.toml", "--steps", "2")
    assert [r["step"] for r in rows(tmp_path, "file")] == [1, 2]


def test_data_that_cannot_be_used_is_one_line(scenes, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(scenes, cut)
    os.truncate(cut / "data.mdb", (cut / "data.mdb").stat().st_size // 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.mdb").write_text("hello" * 5000)
    (tmp_path / "file").write_text("")
    cases = [
        (("--data", tmp_path / "absent"), ["absent"]),
        (("--data", cut), ["cut"]),
        (("--data", tmp_path / "empty"), ["empty"]),
        (("--data", tmp_path / "text"), ["text"]),
        (("--data", ""), ["--data"]),
        (("--data", scenes, "--micro_steps", "3"), ["batch_size is 4, expected a multiple of 3"]),
        (("--data", scenes, "--device", "tpu"), ["device 'tpu' is unknown"]),
        (("--data", scenes, "--runs_dir", tmp_path / "file"), ["file", "Not a directory"]),
        (("--data", scenes, "--name", ""), ["name is ''"]),
        (("--data", scenes, "--name", "latest"), ["'latest'"]),
        (("--data", scenes, "--name", "../esc"), ["'../esc'", "without '/'"]),
    ]
    if not torch.cuda.is_available():
        cases.append((("--data", scenes, "--device", "cuda"), ["no CUDA device"]))

    def last_line(i):  # the last of two names counts
        return one_line(train(tmp_path, "--name", f"case{i}", *cases[i][0], *SMALL, expect=1)[1])

    with ThreadPoolExecutor(2) as pool:  # most of each is the start of an interpreter
        lines = pool.map(last_line, range(len(cases)))
        for line, (_, words) in zip(lines, cases, strict=True):
            assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "environment, code, words",
    [
        ({"WORLD_SIZE": "abc"}, 1, ["WORLD_SIZE is 'abc'"]),
        ({"WORLD_SIZE": "2", "RANK": "2"}, 1, ["RANK is 2"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 1, ["rank 0 of 2", "torchrun"]),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"},
            75,
            ["rank 1 of 2", "within 3 s"],
        ),
    ],
    ids=["word", "rank", "address", "peer"],
)
def test_ranks_that_cannot_meet_are_one_line(scenes, tmp_path, environment, code, words):
    environment = {**os.environ, "LOONGFORGE_RENDEZVOUS_S": "3", **environment}
    process = start(tmp_path, "--data", scenes, *SMALL, env=environment)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert "Traceback" not in err, err[-2000:]
    line = one_line("\n".join(x for x in err.splitlines() if x.startswith("loongforge:")))  # torch warns beside it
    for word in words:
        assert word in line, line


def test_a_full_disk_while_saving_loses_nothing(scenes, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("a small file system needs root and mount")
    try:
        args = (
            "--data",
            scenes,
            "--runs_dir",
            disk,
            "--name",
            "f",
            "--steps",
            "40",
            "--vault.diff_interval",
            "5",
            "--vault.keep_last",
            "0",
            *SMALL,
        )
        _, err = train(tmp_path, *args, expect=1)
        assert "No space left" in one_line(err)
        saved = disk / "f" / "checkpoints"
        steps = [c["step"] for c in _C.vault_list(str(saved))]
        assert steps and steps[0] == 5
        _C.vault_verify(str(saved))
        subprocess.run(["mount", "-o", "remount,size=600m", disk], check=True)
        train(tmp_path, *args, "--resume")
        assert json.loads((disk / "f" / "summary.json").read_text())["resumed_from"] == steps[-1]
    finally:
        subprocess.run(["umount", disk], check=False)
