#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what is missing: system packages (packages/system.txt), .venv, Python packages (pyproject.toml).
# A second run does nothing until one of the lists, this script or the Python changes.
# Usage: scripts/setup.sh [EXTRA...]     extras of pyproject.toml; default: train test build
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
extras=("$@")
[ ${#extras[@]} -gt 0 ] || extras=(train test build)

base_python() {
    if [ "$OWN_ENV" = 0 ] || [ -x "$PY" ]; then echo "$PY"; else command -v "${PYTHON:-python3}" || true; fi
}

stamp_value() {
    cat packages/system.txt pyproject.toml scripts/setup.sh scripts/env.sh
    printf '%s\n' "${extras[*]}" "$ENV_DIR" "${LOONGFORGE_DEPS:-}"
    "$PY" -VV 2>/dev/null || echo none
}
stamp_hash() { stamp_value | cksum | tr ' ' -; }
stamp=$ENV_DIR/.loongforge-setup-$(IFS=-; echo "${extras[*]}")

# ---------------------------------------------------------------- offline bundle
unpack_bundle() {
    local bundle=${LOONGFORGE_DEPS:-}
    if [ -z "$bundle" ]; then
        for bundle in dist/loongforge-deps-"$(uname -m)".tar.*; do break; done
        [ -e "$bundle" ] || return 0
        # Where the system packages are installed (on the machine that made the bundle, say) they go first.
        [ -d build/deps ] || [ -n "$(missing_system header)" ] || return 0
    fi
    [ -r "$bundle" ] || die "LOONGFORGE_DEPS is '$bundle', expected the file that 'make offline-bundle' writes"
    [ build/deps/.from -nt "$bundle" ] && return 0
    rm -rf build/deps && mkdir -p build/deps
    tar -xf "$bundle" -C build/deps --strip-components=1 || die "cannot unpack $bundle"
    touch build/deps/.from
    DEPS=$ROOT/build/deps
    say "offline bundle unpacked: $bundle"
}

# ---------------------------------------------------------------- system packages
probe() {
    local what=${1#*:} python
    case $1 in
    cmd:pkg-config) [ -n "$DEPS" ] || command -v "$what" >/dev/null ;; # the bundle needs none
    cmd:* | want:*) command -v "$what" >/dev/null ;;
    header:*)
        command -v cc >/dev/null &&
            printf '#include <stddef.h>\n#include <stdio.h>\n#include <%s>\n' "$what" |
            cc -E ${DEPS:+-I"$DEPS/include"} -x c - >/dev/null 2>&1
        ;;
    python:venv) [ -x "$PY" ] || "${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null ;;
    python:headers)
        python=$(base_python)
        [ -n "$python" ] && "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null
        ;;
    *) die "packages/system.txt: unknown probe '$1'" ;;
    esac
}

# Packages that are needed and whose probe fails; with an argument, only probes of that kind.
missing_system() {
    local package test
    while read -r package test _; do
        case $package in '' | '#'*) continue ;; esac
        case ${1:-needed} in needed) [ "${test%%:*}" != want ] ;; *) [ "${test%%:*}" = "$1" ] ;; esac || continue
        probe "$test" || echo "$package"
    done <packages/system.txt | sort -u | tr '\n' ' '
}

install_system() {
    local missing wanted sudo='' log=build/setup-apt.log
    missing=$(missing_system)
    wanted=$(missing_system want)
    [ -n "$missing$wanted" ] || return 0
    if [ -z "$missing" ]; then
        command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; } || return 0
    fi
    command -v apt-get >/dev/null ||
        die "missing: ${missing}- no apt-get here; install your system's packages for them, or bring the offline bundle"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "missing: ${missing}- run as root: apt-get install $missing"
        sudo=sudo
    fi
    say "installing system packages: $missing$wanted"
    mkdir -p build
    install() {
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
            install -y --no-install-recommends "$@" </dev/null
    }
    # shellcheck disable=SC2086
    install $missing $wanted >"$log" 2>&1 ||
        { $sudo apt-get -o Acquire::Retries=1 update </dev/null >>"$log" 2>&1 && install $missing $wanted >>"$log" 2>&1; } ||
        { [ -n "$missing" ] && [ -n "$wanted" ] && install $missing >>"$log" 2>&1; } || true
    wanted=$(missing_system want)
    [ -z "$wanted" ] || warn "going on without $wanted- apt-get could not install it ($log)"
    missing=$(missing_system)
    [ -z "$missing" ] || die "missing: ${missing}- apt-get could not install it ($log); without a network, run 'make" \
        "offline-bundle' on a machine that has one and put the file it names into dist/ here"
}

# ---------------------------------------------------------------- Python
make_env() {
    local python
    [ -x "$PY" ] && return 0
    python=$(base_python)
    [ -n "$python" ] || die "missing: ${PYTHON:-python3} - expected Python 3.10 or newer; set PYTHON to its path"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$python is $("$python" -V 2>&1), expected Python 3.10 or newer; set PYTHON to one"
    say "making $ENV_DIR from $("$python" -V)"
    "$python" -m venv "$ENV_DIR" >/dev/null 2>&1 || "$python" -m venv --clear --without-pip "$ENV_DIR" ||
        die "cannot make $ENV_DIR with $python -m venv"
    # A Python that already has torch (a GPU machine's) lends its packages; ours stay in .venv.
    if has_module "$python" torch; then
        "$PY" - "$("$python" -c 'import site, sys, sysconfig
print("\n".join(dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()])))')" <<'END'
import os, sys, sysconfig
lines = [f"import site; site.addsitedir({p!r})\n" for p in sys.argv[1].splitlines() if os.path.isdir(p)]
with open(os.path.join(sysconfig.get_paths()["purelib"], "zz_loongforge_base.pth"), "w") as f:
    f.writelines(lines)
END
        say "using the packages of $python (it has torch)"
    fi
}

install_python() {
    local missing torch rest log=build/setup-pip.log
    missing=$("$PY" scripts/python_packages.py missing "${extras[@]}") || die "cannot read pyproject.toml"
    [ -n "$missing" ] || return 0
    say "installing Python packages: ${missing//$'\n'/ }"
    mkdir -p build
    "$PY" scripts/python_packages.py pins >build/setup-pins.txt
    torch=$(grep -E '^torch([^a-z]|$)' <<<"$missing" || true)
    rest=$(grep -vE '^torch([^a-z]|$)' <<<"$missing" || true)
    pip() { "$PY" -m pip install --disable-pip-version-check --no-input -c build/setup-pins.txt "$@" </dev/null; }
    : >"$log"
    # shellcheck disable=SC2086
    {
        [ -z "$torch" ] || pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} $torch >>"$log" 2>&1 || true
        [ -z "$rest" ] || pip $rest >>"$log" 2>&1 || true
    }
    missing=$("$PY" scripts/python_packages.py missing "${extras[@]}")
    [ -n "$missing" ] || return 0
    missing=$(tr '\n' ' ' <<<"$missing")
    if ! has_module "$PY" torch || ! has_module "$PY" numpy; then
        die "missing: ${missing}- pip could not install it ($log); without a network, start from a Python that has" \
            "torch: make PYTHON=/path/to/python"
    fi
    warn "going on without ${missing}- pip could not install it ($log)"
    incomplete=1
}

# Make `import loongforge` find this checkout, and give the environment the `loongforge` command.
link_checkout() {
    "$PY" - "$ROOT/python" <<'END'
import os, sys, sysconfig
path = os.path.join(sysconfig.get_paths()["purelib"], "loongforge_checkout.pth")
line = sys.argv[1] + "\n"
if not os.path.exists(path) or open(path).read() != line:
    with open(path, "w") as f:
        f.write(line)
END
    ln -sfn "$ROOT/build/${PRESET:-release}/bin/loongforge" "$ENV_DIR/bin/loongforge"
}

# ---------------------------------------------------------------- main
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(stamp_hash)" ] && [ -x "$PY" ]; then
    [ ! -f "$ENV_DIR/.loongforge-deps" ] || unpack_bundle # `make clean` takes build/deps away
    if [ ! -f "$ENV_DIR/.loongforge-deps" ] || [ -n "$DEPS" ]; then
        link_checkout
        exit 0
    fi
fi
[ -z "${PYTHON:-}" ] || "$PYTHON" -c 'import venv' 2>/dev/null ||
    die "PYTHON is '$PYTHON', expected a Python 3.10 or newer with its venv module"
incomplete=0
unpack_bundle
install_system
make_env
install_python
link_checkout
[ -z "$DEPS" ] || touch "$ENV_DIR/.loongforge-deps"
[ "$incomplete" = 1 ] || stamp_hash >"$stamp"
say "set-up done: $("$PY" -V), environment $ENV_DIR${DEPS:+, libraries from build/deps}"
