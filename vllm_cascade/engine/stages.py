# SPDX-License-Identifier: Apache-2.0
"""Shares the layers' cache specs among pipeline stages.

A layer's cache depends only on its own attention, so each stage evicts independently. Pages,
however, are allocated for all stages at once. These depend on all layers of the model:

- the slots of a page in layers with windows,
- the pages that a request may need,
- the bytes that a request saves.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_cascade.cache.spec import KVPolicySpec


def of_all_stages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Cache specs of all layers, in the model's order; a collective call of all stages.

    Args:
        specs: cache specs of this worker's layers, by their names in the model.
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
    """The specs of a worker's own layers, each with the number of layers in ``whole``."""
    if len(own) == len(whole):
        return dict(whole)
    num = len(whole)
    return {
        name: replace(spec, num_layers=num) if isinstance(spec, KVPolicySpec) else spec
        for name, spec in whole.items()
        if name in own
    }


def expect_hidden_states(runner: GPUModelRunner) -> None:
    """Allocate the buffer for the previous stage's hidden states if vLLM has not.

    vLLM allocates it in a profiling run, which CPUs skip with ``--enforce-eager``. Even without a
    policy, such an engine fails in its first step.
    """
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    model: Any = runner.get_model()
    runner.intermediate_tensors = model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )
