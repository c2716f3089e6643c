# SPDX-License-Identifier: Apache-2.0
"""Looks up an engine's policy and its scorer of token ids, in any process."""

from functools import lru_cache

import numpy as np
from vllm.config import ModelConfig, VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_cascade.policies.idf import fingerprint, sentence_ends
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.text_importance import IdfTable, TokenImportance


def requests_of(vllm_config: VllmConfig) -> PerRequest | None:
    """The schedules of an engine's requests, for its front-end; None for stock vLLM."""
    policy = policy_of(vllm_config.additional_config)
    return None if policy is None else _per_request(policy)


@lru_cache(maxsize=8)
def _per_request(policy: Policy) -> PerRequest:
    return PerRequest(compiled(policy))


def token_importance(policy: Policy, model_config: ModelConfig) -> TokenImportance | None:
    """The scorer of token ids, or None if the policy uses no such scores.

    Raises:
        KVPolicyError: the table is missing or was made with another tokenizer, or there is
            neither a table nor a tokenizer to find sentence ends with.
    """
    source = policy.token_scores
    if source is None:
        return None
    table = IdfTable.load(source.idf) if source.idf else None
    tokenizer = None
    if not model_config.skip_tokenizer_init:
        tokenizer = cached_tokenizer_from_config(model_config)
    if table is None and tokenizer is None:
        raise KVPolicyError(
            f"kv_policy {policy.name}: importance {source.rule!r} needs to know which tokens end a "
            "sentence, and --skip-tokenizer-init leaves no tokenizer to ask; set idf to a table "
            "made by `vllm-cascade idf`, or drop the flag"
        )
    if table is not None and tokenizer is not None and fingerprint(tokenizer) != table.tokenizer:
        raise KVPolicyError(
            f"kv_policy {policy.name}: idf = {source.idf!r} was made with another tokenizer; make "
            f"it with `vllm-cascade idf --tokenizer {model_config.tokenizer}`"
        )
    ends = sentence_ends(tokenizer) if table is None else table.ends
    # A model's vocabulary may be larger than that of its tokenizer.
    missing = max(model_config.get_vocab_size() - len(ends), 0)
    return TokenImportance(source.rule, np.pad(ends, (0, missing)), table)
