#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check for calls that the project does not make (CONTRIBUTING.md, errors and cleanup).

Exceptions are rows of scripts/banned_allow.txt: file, function, reason. A row that nothing needs is a problem too.
"""

import re

from checklib import C_SUFFIXES, finish, line_of, list_files, read_args, read_text, strip_c

ALLOCATORS = (
    "malloc",
    "calloc",
    "realloc",
    "reallocarray",
    "aligned_alloc",
    "posix_memalign",
    "free",
    "strdup",
    "strndup",
)
MEMORY = {name: "use lf__alloc/lf__free of src/base" for name in ALLOCATORS}
UNSAFE = {
    "strcpy": "use snprintf or memcpy with a size",
    "strcat": "use snprintf with a size",
    "sprintf": "use snprintf",
    "vsprintf": "use vsnprintf",
    "gets": "use fgets",
    "atoi": "use strtol and look at its end pointer",
    "atol": "use strtol and look at its end pointer",
    "atof": "use strtod and look at its end pointer",
    "strtok": "use strtok_r",
    "alloca": "use lf__alloc",
    "rand": "use the generator of src/base",
    "srand": "use the generator of src/base",
    "usleep": "wait on a condition, or use the clock of src/base",
    "tmpnam": "use mkstemp",
}
LIBRARY = {
    "exit": "return an lf_status",
    "_exit": "return an lf_status",
    "abort": "return an lf_status",
    "printf": "use the log callback",
    "fprintf": "use the log callback",
    "vprintf": "use the log callback",
    "vfprintf": "use the log callback",
    "puts": "use the log callback",
    "putchar": "use the log callback",
    "perror": "use LF_FAIL",
    "getenv": "take an option; only tools/ and python/ read the environment",
    "secure_getenv": "take an option; only tools/ and python/ read the environment",
    "setenv": "the library leaves the environment alone",
}


def banned_in(path):
    """Names banned in a file, with what to do instead."""
    top = path.parts[0]
    if top == "src":
        rules = {**UNSAFE, **LIBRARY}
        if path.parts[1] != "base":
            rules.update(MEMORY)
        return rules
    return UNSAFE if top in ("tools", "python", "include") else {}


def read_allow(path):
    """{(file, function): reason}"""
    rows = {}
    if path.exists():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            fields = line.split("#")[0].split(None, 2)
            if fields and len(fields) < 3:
                raise SystemExit(f"{path}:{number}: row is '{line}', expected: file function reason")
            if fields:
                rows[fields[0], fields[1]] = fields[2]
    return rows


def main():
    root = read_args(__doc__).root
    allow = read_allow(root / "scripts/banned_allow.txt")
    used, problems, n_checked = set(), [], 0
    for path in list_files(root):
        rules = banned_in(path) if path.suffix in C_SUFFIXES else {}
        if not rules:
            continue
        n_checked += 1
        text = strip_c(read_text(root / path) or "")
        # a call or a name passed on, not a member (x.free, x->free) and not part of a longer name
        pattern = re.compile(rf"(?<![\w.])(?<!->)({'|'.join(rules)})[ \t]*\(")
        for match in pattern.finditer(text):
            name = match[1]
            if (str(path), name) in allow:
                used.add((str(path), name))
                continue
            problems.append(f"{path}:{line_of(text, match.start())}: {name}() is banned here: {rules[name]}")
    for file, name in allow:
        if (file, name) not in used:
            problems.append(f"scripts/banned_allow.txt: '{file} {name}' allows nothing any more; remove the row")
    finish("check_banned", problems, n_checked)


if __name__ == "__main__":
    main()
