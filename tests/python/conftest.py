# SPDX-License-Identifier: Apache-2.0
"""One torch thread: the tests' tensors are small, and threads that spin on shared cores cost far more than they bring."""

import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))  # peers.py: the stock models that tests compare with too
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """Folder of outside test data; its absence is reported as skipped."""
    path = pathlib.Path(os.environ.get("LOONGFORGE_TEST_DATA", "../shared/data"))
    if not path.is_dir():
        pytest.skip(f"no outside test data at {path} (LOONGFORGE_TEST_DATA)")
    return path
