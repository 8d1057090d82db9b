# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop, come late or fail, on CPUs and through torch.distributed: what the others do. The drill itself is
bench/kill_drill.py."""

import json
import pathlib
import subprocess
import sys

import pytest

from loongforge.peers import words

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.multi


def ranks(case, folder):
    command = [sys.executable, str(HERE / "multi" / "peers_ranks.py"), case, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = {r: (folder / f"rank{r}").read_text() for r in range(3) if (folder / f"rank{r}").exists()}
    return done, lines


def test_what_ranks_tell_each_other(tmp_path):
    done, lines = ranks("calls", tmp_path)
    assert lines == dict.fromkeys(range(3), "all good"), done.stderr[-3000:]


def test_an_error_of_the_first_rank_is_everyones(tmp_path):
    _, lines = ranks("first_fails", tmp_path)
    assert lines[0] == "OSError: the disk is full"
    assert lines[1] == lines[2] == "PeerError: saving: rank 0: OSError: the disk is full"


def test_a_stopped_rank_is_an_error_and_no_hang(tmp_path):
    done, lines = ranks("stopped", tmp_path)
    codes = dict(map(int, line.split()) for line in done.stdout.splitlines())
    assert codes[0] != 0 and codes[2] != 0, done.stderr[-2000:]
    for rank in (0, 2):
        assert lines[rank].startswith("ERR_TIMEOUT: chunk 0 of "), lines
        assert "within 1 s" in lines[rank] and lines[rank].endswith("1 failed, chunk 0")
    assert 1 not in lines


def test_debug_names_what_each_rank_was_about_to_do(tmp_path):
    _, lines = ranks("desync", tmp_path)
    assert all(line.startswith("step 2, ERR_PEER: ") and "not about to do the same" in line for line in lines.values()), lines
    assert "a sum of 5 f64 beside the gradients; something else: rank 0, 2;" in lines[1]
    for rank in (0, 2):
        assert "the sums of chunk 0 to 0 of " in lines[rank] and "something else: rank 1;" in lines[rank]


def test_words_of_gloo():
    text = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:733. This is typically caused by x.\nstack"
    assert words(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:733"
    assert words(RuntimeError()) == "RuntimeError"


def drill(tmp_path, *args, timeout):
    command = [sys.executable, str(HERE.parents[1] / "bench" / "kill_drill.py"), "--folder", str(tmp_path / "drill"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figure = json.loads(done.stdout.splitlines()[-1])
    assert figure["name"] == "nexus.kill_drill_hangs" and figure["value"] == 0
    assert figure["wrong_trials"] == figure["unrestored"] == 0 and figure["equal_to_undisturbed"]


def test_a_short_drill(tmp_path):
    """Two kills, a rank that fails, one that is stopped and one that is late."""
    drill(tmp_path, "--kinds", "kill,raise,stop,kill,late", "--trials", "5", "--seed", "4", timeout=280)


@pytest.mark.long
def test_fifty_kills(tmp_path):
    drill(tmp_path, "--trials", "50", timeout=1500)


@pytest.mark.long
def test_other_ends_of_a_rank(tmp_path):
    drill(tmp_path, "--kinds", "raise,stop,late", "--trials", "12", timeout=900)
