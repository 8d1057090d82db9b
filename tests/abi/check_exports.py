#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The library exports lf_* only, and exactly the functions that the public headers declare with LF_API."""

import argparse
import re
import subprocess
import sys
from pathlib import Path


def exported(nm, library):
    out = subprocess.run([nm, "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()]
    return {row[-1].split("@")[0] for row in rows if len(row) >= 2 and row[-2] != "A"}  # A: version nodes


def declared(folder):
    names = set()
    for header in sorted(folder.glob("*.h")):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"(?m)^[ \t]*#(?:\\\n|[^\n])*", " ", text)
        names.update(re.findall(r"\bLF_API\b[^;{]*?\b(\w+)\s*\(", text))
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    args = parser.parse_args()
    have, want = exported(args.nm, args.library), declared(args.include)
    problems = [f"exported, expected only lf_*: {name}" for name in sorted(have) if not name.startswith("lf_")]
    problems += [f"exported, in no public header: {n}" for n in sorted(have - want) if n.startswith("lf_")]
    problems += [f"declared with LF_API, not in the library: {name}" for name in sorted(want - have)]
    for problem in problems:
        print(problem)
    print(f"{args.library.name}: {len(have)} exports, {len(want)} declared, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
