#!/bin/sh
# Prints the path of a CPython >= 3.12 that can build and run this project: with its C headers, with venv and pip, with the GIL.
# The oldest that will do comes first, because what builds and passes there does so on later ones; `--newest` turns it round.
# $PYTHON, if set, is the only candidate.
set -u
HOME=${HOME:-/}

versions="3.12 3.13 3.14"
if [ "${1:-}" = "--newest" ]; then versions="3.14 3.13 3.12"; fi

check='
import os, sys, sysconfig
if sys.implementation.name != "cpython" or not (3, 12) <= sys.version_info[:2] <= (3, 14):
    sys.exit(1)
import ensurepip, venv
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(2)
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys.executable)
'

# Prints the interpreter behind $1 and ends the search, if it will do. -I: look at Python itself, not at $PYTHONPATH or the like.
# </dev/null: a shim that asks questions must not wait for an answer.
try() {
  found=$("$1" -I -c "$check" 2>/dev/null </dev/null) || return 0
  if [ -n "$found" ]; then
    printf '%s\n' "$found"
    exit 0
  fi
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  echo "PYTHON=$PYTHON is no CPython 3.12, 3.13 or 3.14 with its C headers, venv and pip; set another or leave PYTHON unset" >&2
  exit 1
fi

for version in $versions; do
  try "python$version"
  # Places that people's tools put one without naming it on PATH; a pattern without a match stays a word that fails to run.
  for candidate in \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version".*/bin/python3 \
    "$HOME"/.asdf/installs/python/"$version".*/bin/python3 \
    "$HOME"/.local/share/mise/installs/python/"$version"*/bin/python3 \
    "$HOME/.local/bin/python$version" \
    /usr/bin/"python$version" \
    /usr/local/bin/"python$version" \
    /opt/homebrew/bin/"python$version" \
    /opt/*/bin/"python$version" \
    /opt/*/*/bin/"python$version" \
    "$HOME"/*conda3/bin/"python$version" \
    "$HOME"/*conda3/envs/*/bin/"python$version" \
    "$HOME"/*forge3/bin/"python$version" \
    "$HOME"/*forge3/envs/*/bin/"python$version"; do
    try "$candidate"
  done
done
try python3
try python

echo "no Python 3.12, 3.13 or 3.14 with C headers and venv found: install one (Debian, Ubuntu: apt install python3.12-dev python3.12-venv) or set PYTHON=/path/to/python3.12" >&2
exit 1
