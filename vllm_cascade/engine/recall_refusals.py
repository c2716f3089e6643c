# SPDX-License-Identifier: Apache-2.0
"""Engine settings and models that recall cannot run with; some of them on CUDA only."""

from vllm.platforms import current_platform

from vllm_cascade.engine.refusal import Refusal, windowed
from vllm_cascade.kernels.columns import MOST_UNIT
from vllm_cascade.policies import Policy


def _recalls_on_cuda(policy: Policy) -> bool:
    return policy.recall > 0 and current_platform.is_cuda()


RECALL_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "recall over ranks on CUDA",
        lambda config, policy: (
            _recalls_on_cuda(policy) and config.parallel_config.tensor_parallel_size > 1
        ),
        "recall is not tested with --tensor-parallel-size above 1 on CUDA yet; set --kv-recall 0",
    ),
    Refusal(
        "recall beside snapshots on CUDA",
        lambda config, policy: (
            _recalls_on_cuda(policy) and config.cache_config.enable_prefix_caching
        ),
        "on CUDA evicted units are stored for running requests only, and a request that starts "
        "from a snapshot would miss them; add --no-enable-prefix-caching, or set --kv-recall 0",
    ),
    Refusal(
        "recall of long units on CUDA",
        lambda _, policy: _recalls_on_cuda(policy) and policy.unit > MOST_UNIT,
        f"recall's kernels take units of {MOST_UNIT} tokens at most; set unit to no more, or "
        "--kv-recall 0",
    ),
    Refusal(
        "recall beside windows",
        lambda config, policy: policy.recall > 0 and windowed(config.model_config),
        "recall moves positions in a way that layers with sliding windows do not follow yet; "
        "set --kv-recall 0 for this model",
    ),
    Refusal(
        "recall over stages",
        lambda config, policy: (
            policy.recall > 0 and config.parallel_config.pipeline_parallel_size > 1
        ),
        "recall is not tested with --pipeline-parallel-size above 1 yet; set --kv-recall 0, or use "
        "--tensor-parallel-size",
    ),
)
