#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that a GPU can tell, on a machine that reaches nothing: run in the repository's root.
#
#   benchmarks/gpu_machine.sh correct OUT         every kernel, then every policy in an engine
#   benchmarks/gpu_machine.sh measure OUT [MORE]  engines beside stock vLLM
#
# `correct` begins with torch and triton alone (8 minutes at most, kernels' timings among them); all
# else needs vLLM, unpacked in /opt/vllm_site or installed, and a wheel in dist/, because vLLM finds
# plugins by an installation's metadata:
#   python -m pip wheel -q --no-deps -w dist .    made before, where packages can be installed
# MORE goes to benchmarks.gpu_engine. Where time is short: --models 8B --policies stock cascade
# --requests 16 --contexts 1024 32000 --alone, with --at-once 2 if the card holds both engines.
# --alone without lengths leaves out the longest prompt, which decides how much cache engines have.
# On an H200 with 16 cores the comparisons took 4 minutes, and an 8B engine 40 to 100 s to start.
set -euo pipefail
what=$1 out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

engines() {
    # Without pip, and away from the sources, whose folders are not laid out as they are installed.
    local wheel newest=
    for wheel in dist/vllm_cascade-*.whl; do
        if [[ -z $newest || $wheel -nt $newest ]]; then newest=$wheel; fi
    done
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python -m zipfile -e "$newest" "$site"
    cp -r benchmarks tests "$site"
    cd "$site"
    PYTHONPATH=$site:/opt/vllm_site HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 \
        python -m benchmarks.gpu_engine --out "$out" "$@"
    cd "$root"
}

correct() {
    local kernels=0 compared
    python -m benchmarks.gpu_check --out "$out" || kernels=$?
    set +e # a subshell with a set of its own: after `||`, bash would ignore -e in all of engines
    (
        set -e
        engines --kinds identity windows latent recurrent drafts '8 bits' sessions --at-once 13 "$@"
    )
    compared=$?
    set -e
    if [[ -f $out/gpu_engine.json ]]; then # else `measure` would overwrite it
        mv "$out/gpu_engine.json" "$out/gpu_engine_identity.json"
    fi
    return $((kernels > compared ? kernels : compared))
}

measure() {
    engines --kinds speed "$@"
}

case $what in
correct | measure) "$what" "$@" ;;
*) echo "gpu_machine.sh: correct or measure, not $what" >&2 && exit 2 ;;
esac
