# SPDX-License-Identifier: Apache-2.0
"""What the check_*.py scripts share: the list of files, C text without comments and strings, the report."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

C_SUFFIXES = (".c", ".h", ".cu", ".cuh", ".cc", ".cpp")
SKIP_DIRS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "runs",
    "data",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    ".ruff_cache",
}


def read_args(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="tree to check")
    return parser.parse_args()


def list_files(root):
    """Files that belong to the project, relative to root: what git tracks or would, without git all of them."""
    if (root / ".git").exists():
        out = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True
        ).stdout
        paths = [Path(name) for name in out.decode().split("\0") if name]
    else:
        paths = [p.relative_to(root) for p in root.rglob("*")]
        paths = [p for p in paths if not SKIP_DIRS.intersection(p.parts)]
    return sorted({p for p in paths if (root / p).is_file() and not (root / p).is_symlink()})


def read_text(path):
    """Text of a file; None when it is not text."""
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


_TOKEN = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def strip_c(text):
    """C text with comments, strings and character constants blanked; lines and columns stay."""

    def blank(match):
        token = match[0]
        if token[0] in "\"'":
            return token[0] + re.sub(r"[^\n]", " ", token[1:-1]) + token[-1]
        return re.sub(r"[^\n]", " ", token)

    return _TOKEN.sub(blank, text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def finish(name, problems, n_files, notes=()):
    """Print what was found and exit: 1 when there is a problem."""
    for note in notes:
        print(f"{note} (note)")
    for problem in problems:
        print(problem)
    print(f"{name}: {n_files} files, {len(problems)} problem{'' if len(problems) == 1 else 's'}")
    sys.exit(1 if problems else 0)
