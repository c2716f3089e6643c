# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with a policy, for Model Runner V1 and V2."""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.warm_up import warm_up
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.drafting_worker import DraftingWorker
from vllm_cascade.engine.worker import owners_of
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import KVPolicyError


def keep_prompts_out_of_graphs(runner: Any) -> None:
    """Let Model Runner V1 replay full graphs of drafts for generated tokens only.

    It takes every batch for decoding in which all requests have as many tokens as a row with
    drafts. Such a prompt is a stride, and a graph's launches are single tokens.
    """
    stock = runner._is_uniform_decode

    def is_uniform_decode(*, num_reqs: int, **numbers: Any) -> bool:
        if not stock(num_reqs=num_reqs, **numbers):
            return False
        if numbers.get("force_uniform_decode") is not None:  # a dummy run
            return True
        batch = runner.input_batch
        begun = batch.num_computed_tokens_cpu[:num_reqs] >= batch.num_prompt_tokens[:num_reqs]
        return bool(begun.all())

    runner._is_uniform_decode = is_uniform_decode


class GPUKVPolicyWorker(DraftingWorker, Worker):
    """Worker on CUDA; layers use vLLM's ``CUSTOM`` backend slot."""

    device_entry = DEVICES["cuda"]

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        policy = policy_of(self.vllm_config.additional_config)
        if policy is not None and policy.recall:  # before vLLM measures the memory left
            specs = self.get_kv_cache_spec().values()
            recalling = [s for s in specs if isinstance(s, KVPolicySpec) and s.policy.recall]
            if recalling:  # windows keep their own tokens
                assert self.device is not None, "init_device sets it"
                self._make_stores(recalling, self.device)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self._drafts is not None and not self.use_v2_model_runner:
            keep_prompts_out_of_graphs(self.model_runner)

    def _maybe_activate_jit_monitor(self) -> None:
        """Compile our kernels first: from here on vLLM reports what is compiled as late."""
        self._warm_up()
        super()._maybe_activate_jit_monitor()

    @torch.inference_mode()  # as in steps: what they write in place began there, in vLLM's profile
    def _warm_up(self) -> None:
        layers, drafter = self._all_layers(), self._drafter
        runner: Any = self.model_runner  # of either version
        (group,) = self._token_groups()  # recurrent layers have block tables of their own
        if self.use_v2_model_runner:
            table = runner.block_tables.input_block_tables[group]
        else:
            table = runner.input_batch.block_table.block_tables[group].block_table.gpu
        drafting = [] if drafter is None else drafter.builders
        # One per kind of pages; some layers may not rotate keys.
        for builder in [*self._builders(), *drafting]:
            assert isinstance(builder, CUDABuilder)
            # Layers that attend to another's cache run kernels that its owner runs, too.
            owners = owners_of(layers)
            alike = [layers[n] for n in reversed(builder.layer_names) if n not in owners]
            for layer in {layer.impl.variant: layer for layer in alike}.values():
                warm_up(builder, layer.impl, layer.kv_cache, table.shape[1])

    def kv_policy_trace(self, every: int = 1) -> None:
        """Start recording the tokens that every layer keeps.

        Raises:
            KVPolicyError: the policy's ``trace`` is off, or CUDA graphs would skip the recording.
        """
        if not self.vllm_config.model_config.enforce_eager:
            raise KVPolicyError("kv_policy: tracing on a GPU needs --enforce-eager")
        super().kv_policy_trace(every)
