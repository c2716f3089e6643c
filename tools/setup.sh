#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv with everything that the tests and the demo need; `make setup` runs it.
# It does nothing when .venv is already up to date, and never needs root.
#
#   DEVICE=cpu|cuda       don't look for a GPU
#   PYTHON=/path/python   don't look for a Python
#   TORCH_CPU_INDEX=url   another index for torch's CPU build

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
STAMP=$VENV/.vllm-cascade-setup
LOG=$VENV/setup.log
FOREIGN=$VENV/.made-elsewhere # this script did not make it: it may install there, and never removes it

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '       %s\n' "$@" >&2
    exit 1
}

[[ $(uname -s) == Linux ]] || fail "vLLM 0.32.0 has wheels for Linux only, and this is $(uname -s)"

# --- CPU or GPU ---------------------------------------------------------------------------------
device=${DEVICE:-}
if [[ -z $device ]]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        device=cuda
    else
        device=cpu
    fi
fi
[[ $device == cpu || $device == cuda ]] || fail "DEVICE must be cpu or cuda, not '$device'"

# --- is it done already? ------------------------------------------------------------------------
# Everything that decides what is installed, and where: a moved or copied .venv is made again.
want=$({
    printf '%s\n' "$device" "$PWD" "$VENV"
    cat requirements/*.txt setup.py tools/setup.sh tools/vllm_metadata/pyproject.toml
    grep '^__version__' vllm_cascade/__init__.py
} | sha256sum | cut -c1-64)
if [[ -f $STAMP && $(sed -n 1p "$STAMP") == "$want" ]] && "$VENV/bin/python" -c "" 2>/dev/null; then
    exit 0
fi

# --- Python -------------------------------------------------------------------------------------
suitable='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$suitable" 2>/dev/null; then
        python=$(command -v "$candidate")
        break
    fi
done
[[ -n $python ]] || fail "no Python 3.11, 3.12, 3.13 or 3.14 found (looked for: ${PYTHON:-python3, python3.14 ... python3.11})" \
    "Install one, or name it: make setup PYTHON=/path/to/python"

# --- the virtual environment --------------------------------------------------------------------
started=$SECONDS
# Where .venv/bin/pip installs: somewhere else when .venv was copied or moved.
venv_of_pip() { "$VENV/bin/pip" --version 2>/dev/null | sed 's/.* from \(.*\)\/lib\/python.*/\1/'; }
if [[ -e $VENV ]]; then
    [[ -d $VENV ]] || fail "$VENV is not a folder: move it away"
    [[ -f $LOG ]] || touch "$FOREIGN"
    if ! "$VENV/bin/python" -c "$suitable" 2>/dev/null \
        || [[ $(realpath "$(venv_of_pip)" 2>/dev/null) != "$(realpath "$VENV")" ]] \
        || [[ -f $STAMP && $(sed -n 2p "$STAMP") != "$device" ]]; then
        [[ ! -f $FOREIGN ]] || fail "$VENV cannot be used: it has no pip or another Python, or was moved" \
            "This script did not make it and does not remove it. Move it away."
        say "making $VENV again (it is broken, was moved, or is for another kind of machine)"
        rm -rf "$VENV"
    fi
fi
if [[ ! -e $VENV ]]; then
    say "$VENV with $("$python" --version) ($python)"
    mkdir "$VENV" && : >"$LOG" # says whose it is, should this be interrupted
    "$python" -m venv "$VENV" >/dev/null || {
        rm -rf "$VENV"
        fail "could not make a virtual environment" \
            "On Debian and Ubuntu: install the package python3-venv, then run this again."
    }
fi
rm -f "$STAMP"
: >"$LOG"
bin=$VENV/bin

# Runs pip; shows what it said only when it fails. Files are byte-compiled when first imported, or
# below.
quiet_pip() {
    printf '\n$ pip %s\n' "$*" >>"$LOG"
    "$bin/python" -m pip "$@" --disable-pip-version-check >>"$LOG" 2>&1
}
install() {
    local what=$1
    shift
    quiet_pip install --no-compile --progress-bar off "$@" && return
    grep -vE 'is ignored: it is either|^Requirement already satisfied' "$LOG" | tail -n 15 >&2
    fail "could not install $what" "All that pip said is in $LOG" \
        "Is the package index reachable? \`make setup\` goes on from where it stopped."
}

# --- packages -----------------------------------------------------------------------------------
if [[ $device == cpu ]]; then
    say "PyTorch (CPU build)"
    # First where pip is configured to look, which fails at once on an ordinary machine: PyPI has
    # no +cpu builds. Then PyTorch's own index. --no-deps: what torch needs is in cpu.txt.
    quiet_pip install --no-compile --progress-bar off --no-deps -r requirements/cpu-torch.txt \
        || install "torch, neither from pip's own locations nor from $TORCH_CPU_INDEX" \
            --no-deps --retries 2 --timeout 60 --index-url "$TORCH_CPU_INDEX" \
            -r requirements/cpu-torch.txt
    say "vLLM 0.32.0 (CPU) and what it needs"
    install "the packages of requirements/cpu.txt, dev.txt and bench.txt" --no-deps \
        -r requirements/cpu.txt -r requirements/dev.txt -r requirements/bench.txt
    # CUDA builds, which break `import transformers` beside a CPU torch.
    quiet_pip uninstall --yes torchvision torchaudio torchcodec \
        || fail "could not remove torchvision, torchaudio and torchcodec" "See $LOG"
    scratch=$(mktemp -d) # setuptools would leave its build folders in the source
    trap 'rm -rf "$scratch"' EXIT
    cp tools/vllm_metadata/pyproject.toml "$scratch"
    install "the metadata of the distribution vllm" --no-deps --no-build-isolation "$scratch"
else
    say "vLLM 0.32.0 (CUDA) and what it needs: several GB"
    install "the packages of requirements/cuda.txt and dev.txt" \
        -r requirements/cuda.txt -r requirements/dev.txt
    install "the packages of requirements/bench.txt" --no-deps -r requirements/bench.txt
fi
say "vllm-cascade (editable)"
install "vllm-cascade" --no-deps --no-build-isolation --editable .

# Where Python is told to write no byte code, as in many containers, every process would compile all
# that it imports anew: with vLLM that is 15 seconds, and the tests start many.
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then
    say "byte code of the packages, as PYTHONDONTWRITEBYTECODE is set"
    packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Templates among them are no Python, which is no fault.
    "$bin/python" -m compileall -q -j 0 "$packages" >>"$LOG" 2>&1 || true
fi

# --- does it work? ------------------------------------------------------------------------------
if ! found=$("$bin/vllm" --version 2>>"$LOG" | tail -n 1) || [[ -z $found ]]; then
    tail -n 15 "$LOG" >&2
    fail "everything is installed, but \`$bin/vllm --version\` fails" "See $LOG"
fi
command -v g++ >/dev/null || command -v c++ >/dev/null \
    || say "note: no C++ compiler found: vLLM can't compile models here; pass --enforce-eager"
# --- the benchmarks' model ----------------------------------------------------------------------
say "the model of the benchmarks"
if ! "$bin/python" -m benchmarks.models >>"$LOG" 2>&1; then
    say "note: the model of the benchmarks could not be had; they run with a smaller one that cannot" \
        "rank policies, and try again each time. Why: $LOG, or $bin/python -m benchmarks.models"
fi
printf '%s\n%s\n' "$want" "$device" >"$STAMP"
say "done in $((SECONDS - started)) s: vllm $found, $device"
