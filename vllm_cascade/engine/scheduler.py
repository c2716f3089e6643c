# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with prompt chunks that end at stride boundaries.

Strides end at absolute multiples of ``prefill_stride`` and at the prompt's end. Chunks must end
there too, so that a request's tokens do not depend on the rest of the batch. The scheduler uses
vLLM's hook that aligns prompt chunks for Mamba states. As with Mamba, a chunk also ends where the
state is kept for later requests (prefix caching, ``snapshots.py``).

In the same hook, the scheduler sets each request's maximum length. The page managers reserve pages
for it.
"""

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.snapshots import SnapshotCounters, SnapshotStore
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.states import StateManager
from vllm_cascade.engine.metrics import KVPolicySchedulerStats, Meter
from vllm_cascade.log import logger
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.strides import aligned_chunk


@dataclass
class PolicySchedulerOutput(SchedulerOutput):
    """vLLM's scheduler output, plus the snapshots dropped since the previous one.

    Attributes:
        dropped_snapshots: first page of each; other requests may already own these pages.
    """

    dropped_snapshots: tuple[int, ...] = ()

    @classmethod
    def of(cls, output: SchedulerOutput, dropped: list[int]) -> SchedulerOutput:
        if not dropped:
            return output
        parts = {field.name: getattr(output, field.name) for field in fields(output)}
        return cls(**parts, dropped_snapshots=tuple(dropped))


class _StrideAligned:
    """Mixin that adds stride alignment, snapshots and metrics to vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM calls _mamba_block_aligned_split only if this is set.
        self.need_mamba_block_aligned_split = True
        self._managers = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, KVPolicyManager)
        ]
        assert self._managers, "a KV policy is on, but no cache group uses it"
        self._states = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, StateManager)
        ]
        self._managers[0].states = self._states
        spec: KVPolicySpec = self._managers[0].kv_cache_spec
        self._stride = spec.policy.prefill_stride
        self._recalls = spec.policy.recall > 0
        self._requests = PerRequest(spec.engine_schedule)
        self._snapshots: SnapshotStore | None = self._managers[0].snapshots
        self._prefilling: dict[str, None] = {}  # in order of admission
        self._warn_of_small_pool()
        ranks = self.parallel_config.tensor_parallel_size
        copies = [(manager, ranks * self._num_layers(manager)) for manager in self._managers]
        self._meter = Meter(copies, self._schedule_of, self._states)
        self._log_prefix_caching()

    def _num_layers(self, manager: KVPolicyManager) -> int:
        """Layers that share a manager's page; 1 if they are of several kinds.

        With several kinds, byte counts already cover all layers (``metrics.saved_bytes``).
        """
        spec: KVPolicySpec = manager.kv_cache_spec
        # vLLM gives a scheduler the layers of the first pipeline stage.
        group = self.kv_cache_config.kv_cache_groups[manager.kv_cache_group_id]
        return 1 if spec.kinds else spec.num_layers or len(group.layer_names)

    @property
    def snapshot_counters(self) -> SnapshotCounters:
        """Counters of prefix caching; all zero if it is off."""
        return SnapshotCounters() if self._snapshots is None else self._snapshots.counters

    def _log_prefix_caching(self) -> None:
        if self._snapshots is None:
            return
        interval, block_size = self._snapshots.interval, self._snapshots.hash_block_size
        logger.info("Prefix caching: state snapshots at multiples of %d prompt tokens", interval)
        if interval > max(self._stride, block_size):
            logger.warning(
                f"Prefix caching works only at multiples of {interval} tokens, where a stride of "
                f"{self._stride} and a block of {block_size} both end; make one of prefill_stride "
                "and --block-size a multiple of the other"
            )

    def _warn_of_small_pool(self) -> None:
        """Warn if the longest request does not fit the pool.

        ``admission.check_request`` refuses each request that does not fit.

        Raises:
            KVPolicyError: the longest request does not fit and layers have windows or states,
                which admission cannot size.
        """
        need = sum(m.kv_cache_spec.num_pages(self.max_model_len) for m in self._managers)
        need += len(self._states)
        have = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # block 0 is the null block
        if need > have and any(m.kv_cache_spec.kinds for m in self._managers):
            others = "recurrent states" if self._states else "sliding windows"
            raise KVPolicyError(
                f"kv_policy: a request of --max-model-len {self.max_model_len} tokens needs {need} "
                f"pages, also for the model's {others}, but the pool has {have}; raise "
                "--kv-cache-memory-bytes (or --num-gpu-blocks-override), or lower --kv-budget"
            )
        if need > have:
            logger.warning(
                f"kv_policy: a request of --max-model-len {self.max_model_len} tokens needs {need} "
                f"pages of {self.block_size} tokens, but the pool has {have}; requests that need "
                "more are refused. Raise --kv-cache-memory-bytes (or --num-gpu-blocks-override), "
                "or lower --kv-budget or --max-model-len"
            )

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """vLLM's hook, called for every request just before its pages are allocated."""
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        for manager in self._managers:
            manager.set_limit(request.request_id, limit, self._schedule_of(request))
        start = request.num_computed_tokens + num_new_local_computed_tokens
        prompt_len = request.num_prompt_tokens
        stops = self._stops(request) if start < prompt_len else ()
        return aligned_chunk(start, num_new_tokens, prompt_len, self._stride, stops)

    def _schedule_of(self, request: Request) -> Schedule:
        """The schedule that a request runs under."""
        params = request.sampling_params
        return self._requests.schedule(params.extra_args if params else None)

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """vLLM's hook: find the longest cached prefix, and a longer prefix that is shared.

        Args:
            max_cache_hit_length: longest prefix to use; passed from vLLM 0.33 on.

        Returns:
            The snapshot's blocks, its number of tokens, the end of a longer shared prefix without
            a snapshot (0: none), and False.
        """
        manager, store = self.kv_cache_manager, self._snapshots
        if store is None or not manager.prefix_cache_lookup_enabled(request):
            return manager.empty_kv_cache_blocks, 0, 0, False
        # A preempted request resumes inside its prompt. The last token must be computed: it gives
        # the first logits.
        longest = min(request.num_prompt_tokens, request.num_tokens - 1)
        if max_cache_hit_length is not None:
            longest = min(longest, max_cache_hit_length)
        schedule, hashes = self._schedule_of(request), request.block_hashes
        snapshot = store.find(schedule, hashes, longest)
        hit, blocks = (snapshot.num_tokens, snapshot.blocks) if snapshot else (0, ())
        junction = store.junction(schedule, hashes, longest, hit)
        groups: list[list[KVCacheBlock]] = [[] for _ in range(1 + len(self._states))]
        groups[self._managers[0].kv_cache_group_id] = list(blocks)  # the manager splits them
        return manager.create_kv_cache_blocks(tuple(groups)), hit, junction, False

    def _stops(self, request: Request) -> list[int]:
        """Prompt positions at which to take a snapshot, without those that have one.

        Resumable sessions take none. Their prompts contain tokens that were decoded one by one, so
        no other prompt reaches the same states.
        """
        if self._snapshots is None or request.resumable or not request.block_hashes:
            return []
        last = self._snapshots.last_boundary(request.num_prompt_tokens)
        schedule, hashes = self._schedule_of(request), request.block_hashes
        return [
            stop
            for stop in {last, request.shared_prefix_boundary}
            if stop and not self._snapshots.has(schedule, hashes, stop)
        ]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        if self._snapshots is not None:
            # Snapshots come last: they use only pages that this step's requests left free.
            self._note_admissions(output)
            self._take_snapshots(output)
            output.kv_cache_block_copies = self._snapshots.end_of_step() or None
            dropped = self._snapshots.take_dropped()
            if self._recalls:
                output = PolicySchedulerOutput.of(output, dropped)
        return output

    def _note_admissions(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        resumed = [name for name in cached.req_ids if name in cached.resumed_req_ids]
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *resumed]:
            request = self.requests[name]
            hit = request.num_computed_tokens - output.num_scheduled_tokens[name]
            if hit:
                self._snapshots.counters.hits += 1
                self._snapshots.counters.hit_tokens += hit
            self._snapshots.remember(
                self._schedule_of(request), request.block_hashes, request.num_prompt_tokens
            )
            self._prefilling[name] = None

    def _take_snapshots(self, output: SchedulerOutput) -> None:
        """Take snapshots at the start of this step's chunks.

        The forward pass has not run yet, so pages still hold the state at a chunk's start.
        """
        (manager,) = self._managers
        for name in list(self._prefilling):
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens >= request.num_prompt_tokens:
                del self._prefilling[name]
            if request is None or name not in output.num_scheduled_tokens:
                continue
            start = request.num_computed_tokens - output.num_scheduled_tokens[name]
            if start in self._stops(request):
                schedule, hashes = self._schedule_of(request), request.block_hashes
                pages = manager.state_after(name, start)
                self._snapshots.take(schedule, hashes, start, pages, manager.reserved_pages())

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop all snapshots, even if running requests prevent vLLM from resetting the pool."""
        if self._snapshots is not None:
            self._snapshots.clear()
        return super().reset_prefix_cache(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.log_stats:
            scheduled = scheduler_output.num_scheduled_tokens.items()
            self._meter.step((self.requests[name], num) for name, num in scheduled)
        super()._update_after_schedule(scheduler_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        report = self._meter.report(self.requests, self.snapshot_counters.hits)
        return KVPolicySchedulerStats(**vars(stats), kv_policy=report)


class KVPolicyScheduler(_StrideAligned, Scheduler):
    """vLLM's scheduler with stride-aligned prompt chunks."""


class AsyncKVPolicyScheduler(_StrideAligned, AsyncScheduler):
    """vLLM's asynchronous scheduler with stride-aligned prompt chunks."""
