# SPDX-License-Identifier: Apache-2.0
"""python -m loongforge.train [--config FILE.toml] [--key value] [--section.key value]; also under torchrun, mpirun and srun."""

from __future__ import annotations

import os
import sys

# Before torch brings OpenMP in: threads that wait should sleep. Spinning ones take the cores from the loader's and the vault's
# threads, and where cores are shared a step can take fifty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(argv=None) -> int:
    from .config import ConfigError, Help, read_arguments

    argv = sys.argv[1:] if argv is None else argv
    try:
        config = read_arguments(argv)
    except Help as help_text:
        print(help_text)
        return 0
    except ConfigError as error:
        print(f"loongforge: {error}", file=sys.stderr)
        return 2
    from .fault import cause_of
    from .run import run

    try:
        return run(config)
    except BaseException as error:
        cause = cause_of(error)
        if not cause.known:
            raise
        print(f"loongforge: {cause.text}", file=sys.stderr)
        return cause.code


if __name__ == "__main__":
    status = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Everything is closed and on disk, or failed before ranks met. A gloo thread that drops its last tensor while the
        # interpreter shuts down takes the process with it ("terminate called without an active exception", torch 2.13), and
        # torchrun then calls the run failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
