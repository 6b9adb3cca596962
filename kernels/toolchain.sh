#!/usr/bin/env bash
# Installs the pinned CUDA compiler, without a CUDA install, and prints the CUDA_HOME to build with:
#   export CUDA_HOME=$(kernels/toolchain.sh)
# Needs python3. The folder is kernels/.cache, or what DRAFTHORSE_TOOLCHAIN_DIR names.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=13.0.88
dir=${DRAFTHORSE_TOOLCHAIN_DIR:-$here/.cache}/nvcc-$version

if [ ! -e "$dir/.complete" ]; then
    echo "installing nvcc $version into $dir" >&2
    rm -rf "$dir"
    mkdir -p "$dir"
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir" \
        "nvidia-cuda-nvcc==$version" "nvidia-nvvm==$version" "nvidia-cuda-crt==$version" \
        nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 >&2
    chmod +x "$dir"/nvidia/cu13/bin/* "$dir"/nvidia/cu13/nvvm/bin/* 2>/dev/null || true
    touch "$dir/.complete"
fi
echo "$dir/nvidia/cu13"
