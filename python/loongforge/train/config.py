# SPDX-License-Identifier: Apache-2.0
"""Options of a run: defaults of the library's tables, then a TOML file, then the command line; all checked by the same rows."""

from __future__ import annotations

import sys

from .. import _C

# Sections a run takes and the keys it sets itself.
SECTIONS = {
    "train": (),
    "map": ("optimizer_state",),
    "vault": (),
    "nexus": ("reduce",),
    "sculptor": (),
    "loader": ("batch_size", "image_size", "seq_len", "seed", "rank", "world", "blank_images"),
}

# Where a run wants another default than the library alone.
RUN_DEFAULTS = {"vault": {"keep_last": 3}}


class ConfigError(Exception):
    """One line: what, which value, what was expected, a hint."""


class Help(Exception):
    pass


def help_text() -> str:
    lines = ["usage: loongforge train --data LMDB [--config FILE.toml] [--key value] [--section.key value]", ""]
    for section, rows in _C.options_tables().items():
        if section not in SECTIONS:
            continue
        lines.append(f"[{section}]")
        for row in rows:
            if row["name"] in SECTIONS[section]:
                continue
            prefix = "" if section == "train" else f"{section}."
            choices = f" ({row['choices']})" if row["choices"] else ""
            default = RUN_DEFAULTS.get(section, {}).get(row["name"], row["default"])
            lines.append(f"  --{prefix}{row['name']:<18} {row['help']}{choices} [{default}]")
        lines.append("")
    return "\n".join(lines)


def _read_toml(path: str) -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is no TOML: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is no TOML: {error}") from None


def _put(given: dict, section: str, key: str, value, where: str) -> None:
    if section not in SECTIONS:
        raise ConfigError(f"{where}: unknown section [{section}], expected one of {', '.join(SECTIONS)}")
    if key in SECTIONS[section]:
        raise ConfigError(f"{where}: [{section}] {key} is set by the run itself; hint: see [train]")
    given.setdefault(section, {})[key] = value


def _parse(argv: list) -> tuple:
    """-> (given, path of the TOML file or None)"""
    given, path, i = {}, None, 0
    flags = {(s, r["name"]) for s, rows in _C.options_tables().items() for r in rows if r["type"] == "bool"}
    while i < len(argv):
        word = argv[i]
        i += 1
        if word in ("-h", "--help"):
            raise Help(help_text())
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument '{word}', expected --key value; hint: --help")
        key, equals, value = word[2:].partition("=")
        section, _, key = key.rpartition(".") if "." in key else ("train", "", key)
        key = key.replace("-", "_")
        if not equals:
            following = argv[i] if i < len(argv) else None
            if (section, key) in flags and (following is None or following.startswith("--")):
                value = "true"
            elif following is None:
                raise ConfigError(f"{word} needs a value")
            else:
                value = following
                i += 1
        if section == "train" and key == "config":
            path = value
        else:
            _put(given, section, key, value, word)
    return given, path


def read_arguments(argv: list) -> dict:
    """-> {section: {key: value}} with every option of SECTIONS, typed. Raises ConfigError, Help."""
    given, path = _parse(argv)
    merged: dict = {section: dict(values) for section, values in RUN_DEFAULTS.items()}
    if path is not None:
        for section, table in _read_toml(path).items():
            if not isinstance(table, dict):
                raise ConfigError(f"--config {path}: '{section}' stands outside a section, expected [train], [loader], …")
            for key, value in table.items():
                _put(merged, section, key, value, f"--config {path}")
    for section, table in given.items():
        merged.setdefault(section, {}).update(table)
    try:
        return {section: _C.options_check(section, merged.get(section)) for section in SECTIONS}
    except _C.Error as error:
        raise ConfigError(error.args[2]) from None
    except ValueError as error:  # a value with a 0 byte
        raise ConfigError(str(error)) from None
