# SPDX-License-Identifier: Apache-2.0
"""Each project check finds a planted violation, names its place, and passes the same tree without it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPDX_C = "/* SPDX-License-Identifier: Apache-2.0 */\n"
SPDX_PY = "# SPDX-License-Identifier: Apache-2.0\n"
CLEAN = {
    "include/loongforge/status.h": SPDX_C,
    "include/loongforge/map.h": SPDX_C + '#include "loongforge/status.h"\n',
    "include/loongforge/vault.h": SPDX_C + '#include "loongforge/map.h"\n',
    "src/base/base.h": SPDX_C + '#include "loongforge/status.h"\n',
    "src/base/mem.c": SPDX_C + '#include "base/base.h"\nvoid *lf__alloc(size_t n) { return malloc(n); }\n',
    "src/io/io_int.h": SPDX_C + '#include "base/base.h"\n',
    "src/map/map_int.h": SPDX_C + '#include "io/io_int.h"\n#include "loongforge/map.h"\n',
    "src/loader/loader_int.h": SPDX_C + '#include "map/map_int.h"\n',
    "src/vault/vault.c": SPDX_C
    + '#include "loongforge/vault.h"\n#include "map/map_int.h"\n#include <stdio.h>\n'
    + '/* free(x) in a comment */\nint lf_vault_free(struct t *t) { t->free(t); return ops.printf("exit(1)"); }\n',
    "tools/loongforge/main.c": SPDX_C + '#include "cli.h"\n#include <loongforge/vault.h>\nint main(void) { return 0; }\n',
    "tools/loongforge/cli.h": SPDX_C,
    "python/loongforge/__init__.py": SPDX_PY,
}


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run_check(name, root):
    script = ROOT / "scripts" / f"check_{name}.py"
    done = subprocess.run([sys.executable, str(script), "--root", str(root)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def c_function(n_lines):
    return SPDX_C + "static int grow(void)\n{\n" + "    x();\n" * (n_lines - 3) + "}\n"


@pytest.mark.parametrize("name", ["layers", "banned", "size", "text"])
def test_clean_tree_passes(tmp_path, name):
    write_tree(tmp_path, CLEAN)
    code, out = run_check(name, tmp_path)
    assert code == 0, out


VIOLATIONS = [
    ("layers", "src/vault/v.c", SPDX_C + '#include "loader/loader_int.h"\n', "v.c:2: crew vault includes"),
    ("layers", "src/vault/v.c", SPDX_C + '#include "../loader/loader_int.h"\n', "v.c:2: crew vault includes"),
    ("layers", "src/vault/v.c", SPDX_C + '#include "loader_int.h"\n', "v.c:2: crew vault includes"),
    ("layers", "src/loader/l.c", SPDX_C + "#include <loongforge/vault.h>\n", "l.c:2: crew loader includes"),
    ("layers", "src/base/b.c", SPDX_C + '#include "io/io_int.h"\n', "b.c:2: base includes"),
    ("layers", "src/io/i.c", SPDX_C + '#include "map/map_int.h"\n', "i.c:2: io includes"),
    ("layers", "src/map/m.c", SPDX_C + '#include "loongforge/vault.h"\n', "m.c:2: map includes"),
    ("layers", "tools/loongforge/t.c", SPDX_C + '#include "../../src/base/base.h"\n', "t.c:2: tools/ includes"),
    ("layers", "python/_C/p.c", SPDX_C + '#include "base/base.h"\n', "p.c:2: python/ includes"),
    ("layers", "include/loongforge/bad.h", SPDX_C + '#include "../../src/base/base.h"\n', "bad.h:2: public header"),
    ("layers", "src/extra/e.c", SPDX_C, "src/extra is in no layer"),
    ("banned", "src/vault/v.c", SPDX_C + "void f(void) { free(p); }\n", "v.c:2: free()"),
    ("banned", "src/map/m.c", SPDX_C + "char *s = strdup (x);\n", "m.c:2: strdup()"),
    ("banned", "src/base/b.c", SPDX_C + 'void f(void) { fprintf(stderr, "x"); }\n', "b.c:2: fprintf()"),
    ("banned", "src/base/b.c", SPDX_C + "\nvoid f(void) { abort(); }\n", "b.c:3: abort()"),
    ("banned", "src/io/i.c", SPDX_C + 'char *s = getenv("HOME");\n', "i.c:2: getenv()"),
    ("banned", "tools/loongforge/t.c", SPDX_C + "void f(void) { strcpy(a, b); }\n", "t.c:2: strcpy()"),
    ("size", "src/map/m.c", c_function(101), "m.c:2: grow has 101 lines"),
    ("size", "src/map/m.c", SPDX_C + "int x;\n" * 1001, "file has 1002 lines"),
    ("size", "python/loongforge/p.py", SPDX_PY + "def f():\n" + "    x = 1\n" * 101, "f has 102 lines"),
    ("text", "src/map/m.c", "int x;\n", "m.c:1: no line 'SPDX"),
    ("text", "src/map/m.c", SPDX_C + "int x; \n", "m.c:2: blanks at the end"),
    ("text", "src/map/m.c", SPDX_C + "int x;", "m.c:2: no newline at the end"),
    ("text", "src/map/m.c", SPDX_C + "\tint x;\n", "m.c:2: tab"),
    ("text", "docs/a.md", "see /" + "home/someone/data\n", "a.md:1: '/" + "home/someone/data'"),
    ("text", "python/loongforge/p.py", SPDX_PY + 'DATA = "/' + 'work/x"\n', "p.py:2: '/" + "work/x'"),
]


@pytest.mark.parametrize(("name", "path", "text", "expected"), VIOLATIONS)
def test_planted_violation_is_found(tmp_path, name, path, text, expected):
    write_tree(tmp_path, {**CLEAN, path: text})
    code, out = run_check(name, tmp_path)
    assert code == 1, out
    assert expected in out
    assert "1 problem" in out.splitlines()[-1]


def test_sizes_below_the_limit_and_tables_pass(tmp_path):
    table = SPDX_C + "static const int rows[] = {\n" + "    1,\n" * 2000 + "};\n"
    write_tree(tmp_path, {**CLEAN, "src/map/m.c": c_function(100), "src/map/table.c": table})
    code, out = run_check("size", tmp_path)
    assert code == 0, out
    assert "grow has 100 lines, better under 60" in out


def test_allow_list_lets_one_function_pass_and_reports_stale_rows(tmp_path):
    allow = "# comment\nsrc/vault/v.c free hands memory of libjansson back\n"
    tree = {**CLEAN, "src/vault/v.c": SPDX_C + "void f(void) { free(p); }\n", "scripts/banned_allow.txt": allow}
    write_tree(tmp_path, tree)
    assert run_check("banned", tmp_path)[0] == 0
    (tmp_path / "src/vault/v.c").write_text(SPDX_C)
    code, out = run_check("banned", tmp_path)
    assert code == 1
    assert "'src/vault/v.c free' allows nothing any more" in out


def test_exports_check_names_foreign_missing_and_undeclared_symbols(tmp_path):
    cc = shutil.which("cc")
    if not cc or not shutil.which("nm"):
        pytest.skip("no C compiler here")
    write_tree(tmp_path, {"inc/a.h": "LF_API int lf_a(void);\n/* LF_API int lf_comment(void); */\nLF_API int lf_b(void);\n"})
    script = [sys.executable, str(ROOT / "tests/abi/check_exports.py"), "--include", str(tmp_path / "inc")]

    def check(code):
        write_tree(tmp_path, {"x.c": code})
        library = tmp_path / "libx.so"
        subprocess.run([cc, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "x.c")], check=True)
        done = subprocess.run([*script, "--library", str(library)], capture_output=True, text=True)
        return done.returncode, done.stdout

    code, out = check("int lf_a(void) { return 0; } int lf_b(void) { return 0; }")
    assert code == 0, out
    code, out = check("int lf_a(void) { return 0; } int lf_c(void) { return 0; } int helper(void) { return 0; }")
    assert code == 1
    assert "expected only lf_*: helper" in out
    assert "in no public header: lf_c" in out
    assert "not in the library: lf_b" in out
