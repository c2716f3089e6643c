#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that a GPU can tell, on a machine that reaches nothing: run in the repository's root.
#
#   benchmarks/gpu_machine.sh kernels OUT         torch and triton are enough: about 8 minutes
#   benchmarks/gpu_machine.sh engines OUT [MORE]  also vLLM, unpacked in /opt/vllm_site or installed
#
# MORE goes to benchmarks.gpu_engine. Where a command may take ten minutes, in this order:
#   --kinds identity                              is every policy right, on this machine's runner?
#   --kinds speed --models 1B                     and how fast beside stock vLLM; then 8B
#
# `engines` needs a wheel in dist/, because vLLM finds plugins by an installation's metadata:
#   python -m pip wheel -q --no-deps -w dist .    made before, where packages can be installed
set -euo pipefail
what=$1 out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kernels() {
    python -m benchmarks.gpu_check --out "$out"
}

engines() {
    # Without pip, and away from the sources, whose folders are not laid out as they are installed.
    local site
    site=$(mktemp -d)
    python -m zipfile -e dist/vllm_cascade-*.whl "$site"
    cp -r benchmarks tests "$site"
    cd "$site"
    export PYTHONPATH=$site:/opt/vllm_site VLLM_CASCADE_CUDA=1 HF_HUB_OFFLINE=1
    python -m benchmarks.gpu_engine --out "$out" "$@"
}

"$what" "$@"
