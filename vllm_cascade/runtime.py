# SPDX-License-Identifier: Apache-2.0
"""Which policy an engine runs: the one way to ask, in every process."""

from vllm.config import VllmConfig

from vllm_cascade.config import raw_settings
from vllm_cascade.policies import Policy, policy_class


def policy_of(vllm_config: VllmConfig) -> Policy | None:
    """The policy of an engine whose settings are already resolved; None for stock vLLM."""
    raw = raw_settings(vllm_config.additional_config)
    if raw is None:
        return None
    settings = dict(raw)
    return policy_class(settings.pop("name")).model_validate(settings)
