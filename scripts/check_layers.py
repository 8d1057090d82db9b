#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the include direction: base <- io, device <- map <- the crews.

Crews never include one another. A public header counts as part of the module of its name, the others as base.
tools/ and python/ include only <loongforge/...> and files beside them; public headers include only public headers.
"""

import re
from pathlib import Path, PurePosixPath

from checklib import C_SUFFIXES, finish, line_of, list_files, read_args, read_text

CREWS = ("loader", "sculptor", "nexus", "loom", "vault", "scope")
ALLOWED = {
    "base": (),
    "io": ("base",),
    "device": ("base",),
    "map": ("base", "io", "device"),
    **{crew: ("base", "io", "device", "map") for crew in CREWS},
}
EVERYTHING = "loongforge/loongforge.h"  # the umbrella: for users of the library, not for its parts
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.M)


def module_of(path):
    """Module that a file belongs to: "base", …, "tools", "python"; None when the rules say nothing about it."""
    parts = path.parts
    if parts[:2] == ("include", "loongforge"):
        return path.stem if path.stem in ALLOWED else "base"
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    if parts[0] in ("tools", "python"):
        return parts[0]
    return None


def resolve(root, source, quote, name, by_name):
    """Project file that an include names; None for the system's and generated ones."""
    places = [Path("include"), Path("src")]
    if quote == '"':
        places.insert(0, source.parent)
    for place in places:
        target = PurePosixPath(*_normal((place / name).parts))
        if (root / target).is_file():
            return Path(target)
    if quote == '"' and "/" not in name and len(by_name.get(name, ())) == 1:
        return by_name[name][0]
    return None


def _normal(parts):
    out = []
    for part in parts:
        if part == ".." and out:
            out.pop()
        elif part != ".":
            out.append(part)
    return out


def check_include(source, module, target, name):
    """One line of complaint, or None."""
    public = target.parts[:2] == ("include", "loongforge")
    if source.parts[0] == "include" and not public:
        return f"public header includes {target}, expected only public headers"
    if module in ("tools", "python"):
        if public or target.parent == source.parent or target.parts[0] == source.parts[0]:
            return None
        return f"{module}/ includes {target}, expected only <loongforge/...> and its own files"
    if name == EVERYTHING:
        return f"{module} includes the umbrella header, expected the headers it needs"
    other = module_of(target)
    if other is None or other == module or other in ALLOWED[module]:
        return None
    if module in CREWS and other in CREWS:
        return f"crew {module} includes {target} of crew {other}: what two crews share goes below, or the caller joins it"
    may = ", ".join(ALLOWED[module]) or "nothing"
    return f"{module} includes {target} of {other}, expected only: {may}"


def main():
    root = read_args(__doc__).root
    files = [p for p in list_files(root) if p.suffix in C_SUFFIXES]
    by_name = {}
    for path in files:
        by_name.setdefault(path.name, []).append(path)
    problems = []
    n_checked = 0
    for path in files:
        module = module_of(path)
        if module is None or path.name == "loongforge.h":
            continue
        if module not in ALLOWED and module not in ("tools", "python"):
            problems.append(f"{path}:1: folder src/{module} is in no layer; add it to scripts/check_layers.py")
            continue
        n_checked += 1
        text = read_text(root / path) or ""
        for match in INCLUDE.finditer(text):
            target = resolve(root, path, match[1], match[2], by_name)
            complaint = target and check_include(path, module, target, match[2])
            if complaint:
                problems.append(f"{path}:{line_of(text, match.start())}: {complaint}")
    finish("check_layers", problems, n_checked)


if __name__ == "__main__":
    main()
