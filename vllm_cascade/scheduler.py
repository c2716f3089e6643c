# SPDX-License-Identifier: Apache-2.0
"""Prompt chunks that end where strides end, and pages reserved for a request's whole life.

A stride is cut at absolute multiples of ``prefill_stride`` in the prompt, so a chunk must end on
one or at the prompt's end; then a request's tokens do not depend on what else is in the batch.
vLLM already has a place for this, the alignment of prompt chunks for Mamba states.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_cascade.log import logger
from vllm_cascade.metrics import KVPolicySchedulerStats, Meter
from vllm_cascade.paging import KVPolicyManager, KVPolicySpec
from vllm_cascade.policies import Policy


def aligned_chunk(start: int, num_tokens: int, prompt_len: int, stride: int) -> int:
    """Largest chunk of at most ``num_tokens`` from ``start`` that ends where a stride ends.

    Zero: no whole stride fits. Past the prompt every token is a stride of its own, also when
    generated tokens are replayed, so a chunk never crosses the prompt's end.
    """
    if start >= prompt_len:
        return num_tokens
    end = start + num_tokens
    if end >= prompt_len:
        return prompt_len - start
    return max(end // stride * stride - start, 0)


class _StrideAligned:
    """Mixin for vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        self._managers = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, KVPolicyManager)
        ]
        assert self._managers, "a KV policy is on, but no cache group uses it"
        spec: KVPolicySpec = self._managers[0].kv_cache_spec
        self._stride = spec.policy.prefill_stride
        self._warn_of_small_pool()
        groups = self.kv_cache_config.kv_cache_groups
        num_layers = [len(groups[m.kv_cache_group_id].layer_names) for m in self._managers]
        num_ranks = self.parallel_config.tensor_parallel_size
        self._meter = Meter(self._managers, num_layers, num_ranks, self._policy)

    def _warn_of_small_pool(self) -> None:
        """Requests that do not fit are refused one by one (``limits.check_request``)."""
        need = sum(m.kv_cache_spec.num_pages(self.max_model_len) for m in self._managers)
        have = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # block 0 is the null block
        if need > have:
            logger.warning(
                "kv_policy: a request of --max-model-len %d tokens needs %d pages of %d tokens, "
                "but the pool has %d; requests that need more are refused. Raise "
                "--kv-cache-memory-bytes (or --num-gpu-blocks-override), or lower --kv-budget or "
                "--max-model-len",
                self.max_model_len,
                need,
                self.block_size,
                have,
            )

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """vLLM's hook, called for every request right before its pages are allocated."""
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        for manager in self._managers:
            manager.set_limit(request.request_id, limit)
        return aligned_chunk(
            request.num_computed_tokens, num_new_tokens, request.num_prompt_tokens, self._stride
        )

    def _policy(self, request: Request) -> Policy:
        return self._managers[0].kv_cache_spec.policy

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.log_stats:
            scheduled = scheduler_output.num_scheduled_tokens.items()
            self._meter.step((self.requests[name], num) for name, num in scheduled)
        super()._update_after_schedule(scheduler_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        snapshots = getattr(self, "kv_policy_snapshots", None)
        report = self._meter.report(self.requests, getattr(snapshots, "hits", 0))
        return KVPolicySchedulerStats(**vars(stats), kv_policy=report)


class KVPolicyScheduler(_StrideAligned, Scheduler):
    """vLLM's scheduler with stride-aligned prompt chunks."""


class AsyncKVPolicyScheduler(_StrideAligned, AsyncScheduler):
    """The same for asynchronous scheduling."""
