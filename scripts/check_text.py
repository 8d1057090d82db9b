#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check every text file: licence line in sources, no trailing blanks, tabs or carriage returns, a final newline,
and no absolute path of somebody's machine."""

import re

from checklib import C_SUFFIXES, finish, line_of, list_files, read_args, read_text

SPDX = "SPDX-License-Identifier: Apache-2.0"
SOURCES = (*C_SUFFIXES, ".py", ".sh", ".cmake")
SOURCE_NAMES = ("CMakeLists.txt", "Makefile", "run")
TABS_ALLOWED = ("Makefile",)
EXEMPT = (".jsonl", ".patch", ".diff", ".csv", ".exact")  # written by programs, kept byte for byte
HOME = re.compile(r"(?<![\w.$}~/-])/(?:home/\w|root/|Users/\w|work/|workspace/|scratch/|mnt/\w)[\w./-]*")


def check_file(path, text):
    is_source = path.suffix in SOURCES or path.name in SOURCE_NAMES
    if is_source and text and SPDX not in "\n".join(text.split("\n")[:5]):
        yield 1, f"no line '{SPDX}' at the top"
    if text and not text.endswith("\n"):
        yield text.count("\n") + 1, "no newline at the end"
    if text.endswith("\n\n"):
        yield text.count("\n"), "blank line at the end"
    for number, line in enumerate(text.split("\n"), 1):
        if line.endswith("\r"):
            yield number, "carriage return"
        elif line != line.rstrip() and path.suffix != ".md":
            yield number, "blanks at the end of the line"
        if is_source and "\t" in line and path.name not in TABS_ALLOWED:
            yield number, "tab, expected spaces"
    for match in HOME.finditer(text):
        yield line_of(text, match.start()), f"'{match[0]}' is a path of one machine; use a relative path or an option"


def main():
    root = read_args(__doc__).root
    problems, n_checked = [], 0
    for path in list_files(root):
        text = None if path.suffix in EXEMPT else read_text(root / path)
        if text is None:
            continue
        n_checked += 1
        problems += [f"{path}:{number}: {what}" for number, what in check_file(path, text)]
    finish("check_text", problems, n_checked)


if __name__ == "__main__":
    main()
