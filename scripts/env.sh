# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
# Sourced by the other scripts: where things are, and how to say what went wrong in one line.
#   ROOT     the repository         ENV_DIR  the Python environment in use      PY  its interpreter
#   DEPS     unpacked offline bundle, or empty
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

say() { printf 'loongforge: %s\n' "$*"; }
warn() { printf 'loongforge: warning: %s\n' "$*" >&2; }
die() {
    printf 'loongforge: error: %s\n' "$*" >&2
    exit 1
}

has_module() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$2" 2>/dev/null; }

# An environment that was named, or an active one that has torch, is used as it is; otherwise .venv is ours.
OWN_ENV=0
if [ -n "${PYTHON_ENV:-}" ]; then
    [ -x "$PYTHON_ENV/bin/python" ] || die "PYTHON_ENV is '$PYTHON_ENV', expected an environment with bin/python"
    ENV_DIR=$(cd "$PYTHON_ENV" && pwd)
elif [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$ROOT/.venv" ] && has_module "$VIRTUAL_ENV/bin/python" torch; then
    ENV_DIR=$VIRTUAL_ENV
else
    ENV_DIR=$ROOT/.venv
    OWN_ENV=1
fi
PY=$ENV_DIR/bin/python
case ":$PATH:" in
*":$ENV_DIR/bin:"*) ;;
*) export PATH="$ENV_DIR/bin:$PATH" ;;
esac

DEPS=
[ -d build/deps/include ] && DEPS=$ROOT/build/deps

jobs_count() { nproc 2>/dev/null || echo 2; }
