# SPDX-License-Identifier: Apache-2.0
"""What vLLM does before it serves on a GPU, less the capture of CUDA graphs, on a CPU.

To measure graphs' memory, a GPU's worker builds a small cache before the real one, from the
runner's own specs, and runs the model on it. Engines that are told their cache's bytes, or that run
eagerly, leave it out. With the second model runner it also serves requests of its own, so that
kernels are compiled; no scheduler knows these.
"""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_cascade.engine.cpu_worker import CPUKVPolicyWorker

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


def warm_kernels_up() -> list[int]:
    """Every engine on the second runner serves vLLM's own requests first.

    Returns:
        A list that gets the number of steps that each engine ran for them.
    """
    from vllm.v1.worker.gpu.warmup import warmup_kernels  # imports what needs Triton

    found: list[int] = []
    original = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(worker: Any) -> Any:
        times = original(worker)
        if worker.use_v2_model_runner:
            found.append(0)

            def execute_model(output: Any) -> Any:
                found[-1] += 1
                return worker.execute_model(output)

            warmup_kernels(worker.model_runner, execute_model, worker.sample_tokens)
        return times

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    torch.accelerator.synchronize = lambda *_: None
    # Triton's interpreter cannot run vLLM's kernel for top-k and top-p.
    SamplingParams.for_sampler_warmup = lambda: SamplingParams(temperature=0.0)
    return found
