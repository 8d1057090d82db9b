#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Python packages of pyproject.toml that are not installed here.

usage: python_packages.py missing EXTRA...    requirements of these extras that are not met, one a line
       python_packages.py pins                pip constraints for packages that are not installed
"""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("cmake", "ninja", "clang-format", "ruff")  # a program on the PATH does as well as the package


def load_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    try:
        import tomllib
    except ImportError:  # Python 3.10: pip brings its own copy
        from pip._vendor import tomli as tomllib
    return tomllib.loads(text)


def version_tuple(text):
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:4])


def satisfies(version, spec):
    """True when version meets 'NAME>=1.2' or 'NAME==1.2'. These two forms are all that the lists use."""
    match = re.fullmatch(r"[A-Za-z0-9_.-]+?(?:(>=|==)([0-9.]+))?", spec)
    if not match:
        raise SystemExit(f"pyproject.toml: requirement '{spec}' has a form this script does not read: NAME[>=|==VERSION]")
    if not match[1]:
        return True
    have, want = version_tuple(version), version_tuple(match[2])
    return have[: len(want)] == want if match[1] == "==" else have >= want


def name_of(spec):
    return re.match(r"[A-Za-z0-9_.-]+?(?=[><=]|$)", spec)[0]


def installed_version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    program = shutil.which(name) if name in PROGRAMS else None
    if program:
        try:
            out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.search(r"\d+(\.\d+)+", out)
        return found[0] if found else None
    return None


def main(argv):
    if len(argv) < 2 or argv[1] not in ("missing", "pins"):
        raise SystemExit(__doc__)
    project = load_project()
    if argv[1] == "pins":
        pins = project["tool"]["loongforge"]["pins"]
        print("\n".join(pin for pin in pins if installed_version(name_of(pin)) is None))
        return
    extras = project["project"]["optional-dependencies"]
    for extra in argv[2:]:
        if extra not in extras:
            raise SystemExit(f"pyproject.toml has no extra '{extra}', expected one of: {', '.join(extras)}")
        for spec in extras[extra]:
            version = installed_version(name_of(spec))
            if version is None or not satisfies(version, spec):
                print(spec)


if __name__ == "__main__":
    main(sys.argv)
