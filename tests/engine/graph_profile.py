# SPDX-License-Identifier: Apache-2.0
"""What vLLM does on a GPU to measure CUDA graphs' memory, less the capture, on a CPU.

A GPU's worker builds a small cache before the real one, from the runner's own specs, and runs the
model on it. Engines that are told their cache's bytes, or that run eagerly, leave it out.
"""

from typing import Any

from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_cascade.engine.worker import CPUKVPolicyWorker

NUM_TOKENS = 4


def profile(worker: Any) -> set[str]:
    """Run the dummy steps that would be captured; returns the builders' names."""
    runner, v2 = worker.model_runner, worker.use_v2_model_runner
    worker.vllm_config.compilation_config.max_cudagraph_capture_size = NUM_TOKENS
    with set_current_vllm_config(worker.vllm_config):
        if v2:
            cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
        else:
            runner._init_minimal_kv_cache_for_profiling()
    groups = [group for several in runner.attn_groups for group in several]
    builders = {type(group.get_metadata_builder()).__name__ for group in groups}
    own = {} if v2 else {"force_attention": True}
    runner._dummy_run(NUM_TOKENS, uniform_decode=True, **own)  # what is captured
    runner._dummy_run(NUM_TOKENS, **own)
    cudagraph_utils._teardown_profiling_state(
        runner
    ) if v2 else runner._cleanup_profiling_kv_cache()
    return builders


def turn_on(setattr_: Any = setattr) -> list[set[str]]:
    """Every engine from here on does it; returns a list that gets the names of builders."""
    found: list[set[str]] = []
    original = CPUKVPolicyWorker.determine_available_memory

    def determine_available_memory(worker: Any) -> int:
        found.append(profile(worker))
        return original(worker)

    setattr_(CPUKVPolicyWorker, "determine_available_memory", determine_available_memory)
    return found
