# SPDX-License-Identifier: Apache-2.0
"""What a worker of one pipeline stage has to know of the layers of the others.

A layer's cache depends on its own attention only, so stages evict each for itself. But pages are
handed out for all stages at once: how many slots a page has in layers with windows, how many pages
a request may need and what it saves follow from all layers of the model.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from vllm.distributed import get_pp_group
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_cascade.cache.spec import KVPolicySpec


def of_all_stages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Every layer's cache, in the model's order; all stages have to call this together.

    Args:
        specs: of this worker's layers, whose names are the model's.
    """
    group = get_pp_group()
    if group.world_size == 1:
        return dict(specs)
    parts: list[dict[str, KVCacheSpec]] = [{} for _ in range(group.world_size)]
    torch.distributed.all_gather_object(parts, dict(specs), group=group.cpu_group)
    return {name: spec for part in parts for name, spec in part.items()}


def own_part(
    whole: Mapping[str, KVCacheSpec], own: Mapping[str, KVCacheSpec]
) -> dict[str, KVCacheSpec]:
    """The layers of ``whole`` that a worker has, each with the number of all of them."""
    if len(own) == len(whole):
        return dict(whole)
    num = len(whole)
    return {
        name: replace(spec, num_layers=num) if isinstance(spec, KVPolicySpec) else spec
        for name, spec in whole.items()
        if name in own
    }


def expect_hidden_states(runner: GPUModelRunner) -> None:
    """Make the buffer for what arrives from the stage before, where vLLM has not.

    vLLM makes it in a profiling run, and on CPUs it has none with ``--enforce-eager``: without a
    policy such an engine dies in its first step.
    """
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )
