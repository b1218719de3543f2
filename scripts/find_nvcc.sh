#!/bin/sh
# Prints the path of a CUDA 13 compiler: $CUDACXX, nvcc on PATH or in /usr/local/cuda; with none of them, one from PyPI, which it
# installs into the folder $2 with the Python $1 (about 270 MB; no GPU or driver is needed to compile).
set -eu
usage="usage: find_nvcc.sh PYTHON FOLDER"

is_cuda13() {
  "$1" --version 2>/dev/null | grep -Eq 'release (1[3-9]|[2-9][0-9])\.'
}

if [ -n "${CUDACXX:-}" ]; then
  echo "$CUDACXX"
  exit
fi
for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
  if is_cuda13 "$nvcc"; then
    command -v "$nvcc"
    exit
  fi
done

python=${1:?$usage}
folder=$(realpath -m "${2:?$usage}")
root="$folder/nvidia/cu13"
if [ ! -e "$folder/complete" ]; then
  echo "no nvcc of CUDA 13 found, fetching one from PyPI into $folder" >&2
  rm -rf "$folder"
  "$python" -m pip install --quiet --target "$folder" -r "$(dirname "$0")/../requirements/nvcc.txt" >&2
  # Names that a toolkit has and the wheels lack: nvcc links with -L lib64, CMake looks for libcudart.so.
  ln -s lib "$root/lib64"
  ln -s libcudart.so.13 "$root/lib/libcudart.so"
  touch "$folder/complete"
fi
echo "$root/bin/nvcc"
