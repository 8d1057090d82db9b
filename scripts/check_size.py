#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check sizes: files over 600 lines are noted, over 1000 fail; functions over 60 lines are noted, over 100 fail.

Tests are exempt, and so are tables: lines inside a top-level initializer do not count.
"""

import ast
import re

from checklib import C_SUFFIXES, finish, list_files, read_args, read_text, strip_c

FILE_SOFT, FILE_HARD = 600, 1000
FUNCTION_SOFT, FUNCTION_HARD = 60, 100
CHECKED = ("src", "include", "tools", "python", "scripts", "bench", "examples")


def c_blocks(text):
    """(kind, name, first line, last line) of the top-level braces of C text; kind is "function" or "table"."""
    depth = start = 0
    head_from = 0
    line = 1
    for i, c in enumerate(text):
        if c == "\n":
            line += 1
        elif c == "{":
            head = text[head_from:i]
            if depth == 0 and re.search(r'extern\s+"[ C]*"\s*$', head):
                head_from = i + 1  # extern "C" { … } is no level of its own
                continue
            if depth == 0:
                start, opening = line - _lines_of_declaration(head), head
            depth += 1
        elif c == "}":
            if depth == 0:
                continue  # end of extern "C"
            depth -= 1
            if depth == 0:
                yield from _classify(opening, start, line)
                head_from = i + 1
        elif c == ";" and depth == 0:
            head_from = i + 1


def _lines_of_declaration(head):
    """Lines from the declaration's first to its brace: 0 when the brace is on the same line."""
    head = re.sub(r"(?m)^[ \t]*#(?:\\\n|[^\n])*", "", head)
    return head.lstrip().count("\n")


def _classify(head, start, end):
    head = re.sub(r"(?m)^[ \t]*#(?:\\\n|[^\n])*", "", head).strip()
    if re.search(r"=\s*$", head):
        yield "table", head, start, end
        return
    names = re.findall(r"([A-Za-z_]\w*)\s*\(", head)
    if names and head.endswith(")"):
        yield "function", names[0], start, end


def py_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", node.name, node.lineno, node.end_lineno


def judge(where, what, count, soft, hard, problems, notes):
    if count > hard:
        problems.append(f"{where}: {what} has {count} lines, expected at most {hard}: split it")
    elif count > soft:
        notes.append(f"{where}: {what} has {count} lines, better under {soft}")


def main():
    root = read_args(__doc__).root
    problems, notes, n_checked = [], [], 0
    for path in list_files(root):
        if path.parts[0] not in CHECKED or path.suffix not in (*C_SUFFIXES, ".py"):
            continue
        text = read_text(root / path)
        if text is None:
            continue
        n_checked += 1
        try:
            blocks = list(py_functions(text) if path.suffix == ".py" else c_blocks(strip_c(text)))
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}: {error.msg}")
            continue
        table_lines = sum(end - start for kind, _, start, end in blocks if kind == "table")
        judge(f"{path}:1", "file", text.count("\n") - table_lines, FILE_SOFT, FILE_HARD, problems, notes)
        for kind, name, start, end in blocks:
            if kind == "function":
                judge(f"{path}:{start}", name, end - start + 1, FUNCTION_SOFT, FUNCTION_HARD, problems, notes)
    finish("check_size", problems, n_checked, notes)


if __name__ == "__main__":
    main()
