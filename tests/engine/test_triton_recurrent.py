# SPDX-License-Identifier: Apache-2.0
"""Attention beside recurrent layers on the Triton kernels, interpreted, against the oracle.

In one test the recurrent layers are those of vLLM's CPU platform, gated delta nets those of the
tests in fp32; in the other they are vLLM's own kernels for GPUs, on both model runners. Pages hold
both kinds' caches. Log-probabilities and kept tokens of 1,000 tokens and 60 more; alone, in a batch
and from a snapshot.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.engine.delta_rule import delta_rule_in_fp32
from tests.engine.pool import EnginePool
from tests.engine.test_families import POLICIES
from tests.engine.test_recurrent import (
    DELTA_NETS,
    check,
    engine,
    model_of,
    recurrent_models,
    skip_without_images,
)
from tests.engine.test_triton_families import check_company
from tests.oracle.recurrent import RECURRENT

__all__ = ["model_of", "recurrent_models"]  # fixtures
pytestmark = pytest.mark.usefixtures("triton_backend")


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_family(family: str, engine_pool: EnginePool, model_of: Any) -> None:
    skip_without_images(family)
    path, settings = model_of(family), POLICIES["cascade-heads"] | {"prefill_stride": 64}
    engine_pool.close()  # the pool's others use the CPU's paths
    with delta_rule_in_fp32() if family in DELTA_NETS else nullcontext():
        llm = engine(engine_pool, path, family, settings, {}, dtype="float32")
        check(llm, path, family, settings, native=False)
        check_company(llm)
        engine_pool.close()


CONVOLUTIONS = {"_causal_conv1d_fwd_kernel", "_causal_conv1d_update_kernel"}
KERNELS = {
    "lfm2": CONVOLUTIONS,
    "granite4": CONVOLUTIONS | {"_chunk_scan_fwd_kernel", "_selective_scan_update_kernel"},
    "qwen3-next": CONVOLUTIONS
    | {
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "fused_recurrent_gated_delta_rule_packed_decode_kernel",
    },
}
"""Kernels of vLLM that read and write states, of prompts and of single tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("family", KERNELS)
def test_kernels_of_vllm(family: str, runner: str) -> None:
    check_kernels(family, runner)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "granite4"])
def test_recall(family: str) -> None:
    check_kernels(family, "V1", "recall")


def check_kernels(family: str, runner: str, *what: str) -> None:
    command = [sys.executable, "-m", "tests.engine.recurrent_kernels", family, *what]
    env = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=880)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, (done.stdout + done.stderr)[-4000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found["runner"] == runner and set(found["kernels"]) >= KERNELS[family], found
    assert found["grown"] == 0, "pages of states have more slots than a block has tokens"
