# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with prompt chunks that end at stride boundaries.

Strides end at absolute multiples of ``prefill_stride`` and at the prompt's end. Chunks must end
there too, so that a request's tokens do not depend on the rest of the batch. The scheduler uses
vLLM's hook that aligns prompt chunks for Mamba states. As with Mamba, a chunk also ends where the
state is kept for later requests (prefix caching, ``snapshots.py``).

In the same hook, the scheduler sets each request's maximum length. The page managers reserve pages
for it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_cascade.cache.manager import KVPolicyManager
from vllm_cascade.cache.snapshots import SnapshotCounters, SnapshotStore
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.states import StateManager
from vllm_cascade.engine.encoder_inputs import (
    held_inputs,
    needed_room,
    release_unreached,
    whole_inputs,
)
from vllm_cascade.engine.metrics import KVPolicySchedulerStats, Meter
from vllm_cascade.engine.recall_memory import log_memory, model_shape, open_memory
from vllm_cascade.engine.session_header import page_bytes
from vllm_cascade.engine.sessions import SchedulerSessions
from vllm_cascade.log import logger
from vllm_cascade.models.architectures import shares_caches
from vllm_cascade.patches import weight_updates
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.strides import aligned_chunk, first_stride
from vllm_cascade.recall.memory import RecallMemory
from vllm_cascade.sessions.session import Command
from vllm_cascade.sessions.settings import SessionSettings


@dataclass
class PolicySchedulerOutput(SchedulerOutput):
    """vLLM's scheduler output, plus what else workers must know.

    Attributes:
        dropped_snapshots: first page of each snapshot dropped since the previous output; other
            requests may already own these pages.
        sessions: what workers do with sessions before the step.
        ended: with speculative decoding, the tokens that requests which stopped since the previous
            output keep computed. Drafts behind them are undone.
    """

    dropped_snapshots: tuple[int, ...] = ()
    sessions: tuple[Command, ...] = ()
    ended: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        output: SchedulerOutput,
        dropped: list[int],
        sessions: tuple[Command, ...],
        ended: dict[str, int],
    ) -> SchedulerOutput:
        if not dropped and not sessions and not ended:
            return output
        parts = {part.name: getattr(output, part.name) for part in fields(output)}
        own = {"dropped_snapshots": tuple(dropped), "sessions": sessions, "ended": ended}
        return cls(**parts, **own)


_Base = Scheduler if TYPE_CHECKING else object


class _StrideAligned(_Base):
    """Mixin that adds stride alignment, snapshots and metrics to vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM calls _mamba_block_aligned_split only if this is set.
        self.need_mamba_block_aligned_split = True
        managers = self.kv_cache_manager.coordinator.single_type_managers
        own = [manager for manager in managers if isinstance(manager, KVPolicyManager)]
        assert len(own) == 1, f"{len(own)} cache groups use the KV policy"  # workers check first
        self._manager = own[0]
        self._states = [manager for manager in managers if isinstance(manager, StateManager)]
        self._manager.states = self._states
        spec: KVPolicySpec = self._manager.kv_cache_spec
        self._stride = spec.policy.prefill_stride
        self._shares_caches = shares_caches(self.vllm_config.model_config.hf_text_config)
        self._memory = self._open_memory(spec)
        self._manager.memory = self._memory
        self._requests = PerRequest(spec.engine_schedule)
        self._schedules: WeakKeyDictionary[Request, Schedule] = WeakKeyDictionary()
        self._rejected: WeakSet[Request] = WeakSet()  # they wait for their end
        self._snapshots: SnapshotStore | None = self._manager.snapshots
        self._prefilling: dict[str, None] = {}  # in order of admission
        self._looked_up: set[str] = set()  # requests that this step looks for in the prefix cache
        self._adapters: tuple[int, set[int]] = -1, set()  # how many requests run, and under which
        self._ended: dict[str, int] = {}
        self._drafted: list[tuple[Request, int]] = []  # with the first draft's index
        self._compare_with_pool()
        ranks = self.parallel_config.tensor_parallel_size
        copies = ranks * self._num_layers(spec)
        self._meter = Meter(self._manager, copies, self._schedule_of, self._states)
        self._log_prefix_caching()
        self.sessions = self._open_sessions(spec)

    def _open_sessions(self, spec: KVPolicySpec) -> SchedulerSessions | None:
        """The scheduler's sessions; None: off."""
        settings = SessionSettings.of(self.vllm_config.additional_config)
        if settings is None:
            return None
        memory = self._memory
        chunk_bytes = 0 if memory is None else memory.kept_chunk_bytes * memory.ranks
        config, caches = self.vllm_config, self.kv_cache_config
        return SchedulerSessions(config, caches, settings, self._schedule_of, spec, chunk_bytes)

    def _open_memory(self, spec: KVPolicySpec) -> RecallMemory | None:
        """Count the host memory of evicted units, and log its bound; None without recall."""
        group = self.kv_cache_config.kv_cache_groups[self._manager.kv_cache_group_id]
        policy = spec.engine_schedule.policy  # the spec may be that of a layer with a window
        shape = model_shape(spec, len(group.layer_names))
        if not policy.recall or not shape.num_layers:
            return None
        weight_updates.apply()  # a reset wakes an idle engine
        memory = open_memory(shape, policy, self.vllm_config)
        log_memory(memory, policy, self.vllm_config)
        return memory

    def _num_layers(self, spec: KVPolicySpec) -> int:
        """Layers that share a page; 1 if they are of several kinds.

        With several kinds, byte counts already cover all layers (``metrics.saved_bytes``).
        """
        # vLLM gives a scheduler the layers of the first pipeline stage.
        group = self.kv_cache_config.kv_cache_groups[self._manager.kv_cache_group_id]
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

    def _compare_with_pool(self) -> None:
        """Warn if the longest request does not fit the pool, and say if all requests leave room.

        ``admission.check_request`` refuses each request that does not fit.

        Raises:
            KVPolicyError: the longest request does not fit and layers have windows or states,
                which admission cannot size.
        """
        spec: KVPolicySpec = self._manager.kv_cache_spec
        need = spec.num_pages(self.max_model_len) + len(self._states)
        have = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # block 0 is the null block
        if need > have and (self._states or spec.windows):
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
        requests = self.scheduler_config.max_num_seqs
        pages = spec.max_num_blocks_per_req(self.vllm_config, self.max_model_len)
        if (most := requests * (pages + len(self._states))) < have:
            ranks = self.parallel_config.tensor_parallel_size
            page = page_bytes(self.vllm_config, self.kv_cache_config, spec) // ranks
            logger.info(
                f"KV pool: {requests} requests (--max-num-seqs) hold at most {most} of {have} "
                f"pages; the rest is for prompts that prefix caching keeps. Without it, "
                f"--kv-cache-memory-bytes {(most + 1) * page} is enough"
            )

    def _limit(self, request: Request) -> tuple[str, int, Schedule]:
        """A request's id, the most tokens that it may process, and its schedule."""
        most = self.max_model_len  # of streaming input further parts may follow
        if not request.resumable:
            most = min(request.num_prompt_tokens + request.max_tokens, most)
        return request.request_id, most, self._schedule_of(request)

    def add_request(self, request: Request) -> None:
        """Add a request; one that this engine can never run ends with an error.

        Front-ends refuse such requests (``admission.py``). But they know only the mean of the pools
        of several engines, and do not check the requests that callers of ``AsyncLLM`` make
        themselves.
        """
        super().add_request(request)
        if self.requests.get(request.request_id) is not request:
            return  # a part of streaming input that runs already
        try:
            name, most, schedule = self._limit(request)
        except KVPolicyError as error:
            self._reject(request, str(error))
            return
        need = self._manager.kv_cache_spec.num_pages(most, schedule) + len(self._states)
        have = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        if need > have:
            self._reject(
                request,
                f"request {name} of up to {most} tokens needs {need} pages, but this engine's pool "
                f"has {have}. Give all data-parallel engines pools of one size with "
                "--num-gpu-blocks-override",
            )

    def _reject(self, request: Request, reason: str) -> None:
        """Let vLLM end a request with an error after its next step, and never schedule it.

        Until then statistics and sessions still ask for its schedule.
        """
        name = request.request_id
        logger.error("kv_policy: request %s ends with an error: %s", name, reason)
        self._schedules.setdefault(request, self._requests.engine)
        self._rejected.add(request)
        self.encoder_cache_mismatch_reqs.add(name)  # vLLM ends these after its next step

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """vLLM's hook, called for every request just before its pages are allocated."""
        if request.resumable and request.num_output_placeholders:
            # Asynchronous scheduling: the last token is not known yet. If it ends an answer, vLLM
            # takes back the token that ran ahead, which pages and logs cannot.
            return 0
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        self._manager.set_limit(*self._limit(request))
        start = request.num_computed_tokens + num_new_local_computed_tokens
        prompt_len = request.num_prompt_tokens
        if self.num_spec_tokens and start >= prompt_len:
            return self._with_drafts(request, start + num_new_tokens, limit) - start
        stops = self._prompt_stops(request) if start < prompt_len else ()
        chunk = aligned_chunk(start, num_new_tokens, prompt_len, self._stride, stops)
        if self.scheduler_config.disable_chunked_mm_input:
            ahead = self.num_prefill_lookahead
            chunk = whole_inputs(request, start, num_new_tokens, chunk, ahead)
        if not self._shares_caches:
            return chunk
        # Layers attend to a shared cache as it was when its owner attended (attention/shared.py).
        unit = self._manager.kv_cache_spec.engine_schedule.unit
        return first_stride(start, chunk, prompt_len, self._stride, unit)

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        """vLLM's hook: choose encoder inputs for an aligned chunk (``encoder_inputs.py``).

        Returns:
            vLLM's tuple. The second value is the chunk's length, 0 if the request has to wait.
        """
        cache, start = self.encoder_cache_manager, num_computed_tokens
        held = held_inputs(cache, request, start)
        # Requests could wait for each other's room forever: one that holds some waits for no more
        # than is free, so only until the encoder has time.
        room = cache.num_freeable_slots if held else cache.cache_size
        choose = super()._try_schedule_encoder_inputs
        rest = encoder_compute_budget, shift_computed_tokens
        chosen = choose(request, start, num_new_tokens, *rest)
        cut, prompt_len = chosen[1], request.num_prompt_tokens
        chunk = aligned_chunk(start, cut, prompt_len, self._stride)
        if self.scheduler_config.disable_chunked_mm_input:
            chunk = whole_inputs(request, start, cut, chunk, shift_computed_tokens)
        if cut == num_new_tokens or chunk == cut:
            return chosen
        if chunk == 0:
            end = min((start // self._stride + 1) * self._stride, prompt_len)
            need = needed_room(request, start, end + shift_computed_tokens, held)
            room = min(room, self.max_num_encoder_input_tokens)
            if need > room or self.scheduler_config.disable_chunked_mm_input:
                return chosen  # waiting would not help
        reached = start + chunk + shift_computed_tokens if chunk else 0
        release_unreached(cache, request, reached, held)
        again = choose(request, start, chunk, *rest)
        if again[1] or not chunk:
            return again
        # A stride ends inside an input that must be in one piece.
        return choose(request, start, num_new_tokens, *rest)

    def _with_drafts(self, request: Request, end: int, limit: int) -> int:
        """End of a row of generated tokens and drafts, at most ``end``.

        The last token of the longest answer is never computed. Placeholders instead of drafts,
        which vLLM gives to resumed requests, are left out.
        """
        known = request.num_tokens
        end = min(end, max(limit - 1, known), request.num_tokens_with_spec)
        return end if end <= known else self._schedule_of(request).quiet(known, end)

    def _schedule_of(self, request: Request) -> Schedule:
        """The schedule that a request runs under.

        It never changes: a prompt that grows (streaming input) has the schedule of its first part.
        """
        schedule = self._schedules.get(request)
        if schedule is None:
            params, prompt_len = request.sampling_params, request.num_prompt_tokens
            schedule = self._requests.schedule(params.extra_args if params else None, prompt_len)
            self._schedules[request] = schedule
        return schedule

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
        self._looked_up.add(request.request_id)
        resumed = 0 if self.sessions is None else self.sessions.tokens_of(request)
        if resumed:
            return manager.empty_kv_cache_blocks, resumed, 0, False  # its pages are new
        if store is None or not manager.prefix_cache_lookup_enabled(request):
            return manager.empty_kv_cache_blocks, 0, 0, False
        longest = self._longest_hit(request)
        if max_cache_hit_length is not None:
            longest = min(longest, max_cache_hit_length)
        schedule, hashes = self._schedule_of(request), request.block_hashes
        snapshot, junction = store.lookup(schedule, hashes, longest)
        hit, blocks = (snapshot.num_tokens, snapshot.blocks) if snapshot else (0, ())
        groups: list[list[KVCacheBlock]] = [[] for _ in range(1 + len(self._states))]
        groups[self._manager.kv_cache_group_id] = list(blocks)  # the manager splits them
        return manager.create_kv_cache_blocks(tuple(groups)), hit, junction, False

    @staticmethod
    def _longest_hit(request: Request) -> int:
        """Most prefix tokens that need not be computed.

        A preempted request resumes inside its prompt. The last token must be computed: it gives
        the first logits.
        """
        return min(request.num_prompt_tokens, request.num_tokens - 1)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM's hook: whether a waiting request can be scheduled. Here, it finds its session."""
        if request in self._rejected or self._lacks_adapter(request):
            return False
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.sessions is None or request.num_computed_tokens:
            return True
        known, store = 0, self._snapshots
        if store is not None and self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            schedule, hashes = self._schedule_of(request), request.block_hashes
            snapshot, _ = store.lookup(schedule, hashes, self._longest_hit(request))
            known = snapshot.num_tokens if snapshot else 0
        return self.sessions.may_start(request, known)

    def _lacks_adapter(self, request: Request) -> bool:
        """Whether a request must wait until fewer LoRA adapters run.

        vLLM 0.32 counts those of a step. A prompt of which less than a stride would be read is not
        in the step, but in a later one.
        """
        if self.lora_config is None or request.lora_request is None:
            return False
        counted, run = self._adapters
        if counted != len(self.running):  # once a step, and again when a request has started
            run = {one.lora_request.lora_int_id for one in self.running if one.lora_request}
            self._adapters = len(self.running), run
        return len(run | {request.lora_request.lora_int_id}) > self.lora_config.max_loras

    def _prompt_stops(self, request: Request) -> list[int]:
        """Prompt positions at which a chunk ends, because the state there is kept."""
        sessions = self.sessions
        return [*self._stops(request), 0 if sessions is None else sessions.prompt_stop(request)]

    def _stops(self, request: Request) -> list[int]:
        """Prompt positions at which to take a snapshot, without those that have one.

        Resumable requests and those that start from a session take none. Their prompts contain
        tokens that were decoded one by one, so no other prompt reaches the same states.
        """
        if self._snapshots is None or request.resumable or not request.block_hashes:
            return []
        if self.sessions is not None and self.sessions.continues(request):
            return []
        last = self._snapshots.last_boundary(request.num_prompt_tokens)
        schedule, hashes = self._schedule_of(request), request.block_hashes
        return [
            stop
            for stop in {last, request.shared_prefix_boundary}
            if stop and not self._snapshots.has(schedule, hashes, stop)
        ]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._looked_up.clear()
        self._adapters = -1, set()  # the same number may be other requests
        output = super().schedule(*args, **kwargs)
        dropped: list[int] = []
        admitted = {request.request_id: hit for request, hit in self._admitted(output)}
        started = self._start_sessions(admitted)
        if self._snapshots is not None:
            self._note_admissions(self._snapshots, admitted, started)
        self._prefilling |= dict.fromkeys(admitted)
        # States are kept last: snapshots use only pages that this step's requests left free.
        for request, start in self._prompt_chunks(output):
            if self._snapshots is not None and start in self._stops(request):
                self._take_snapshot(self._snapshots, request, start)
            # The pages of a request that this step starts are not filled yet.
            if self.sessions is not None and start and request.request_id not in admitted:
                if start == self.sessions.prompt_stop(request):
                    self.sessions.keep_prompt(request, self._pages_of(request))
        if self._memory is not None:
            requests = [self.requests[name] for name in output.num_scheduled_tokens]
            rows = [(r.request_id, self._schedule_of(r), r.num_computed_tokens) for r in requests]
            self._memory.grow(rows, self._snapshots)
        if self._snapshots is not None:
            output.kv_cache_block_copies = self._snapshots.end_of_step() or None
            dropped = self._snapshots.take_dropped()
        commands = () if self.sessions is None else self.sessions.take_commands()
        ended, self._ended = self._ended, {}
        return PolicySchedulerOutput.of(output, dropped if self._memory else [], commands, ended)

    def _admitted(self, output: SchedulerOutput) -> Iterator[tuple[Request, int]]:
        """Requests that this step starts or resumes, each with the tokens it did not compute.

        For vLLM a further part of streaming input is a new request, too, but one that has pages,
        so it is not looked up.
        """
        cached = output.scheduled_cached_reqs
        resumed = [name for name in cached.req_ids if name in cached.resumed_req_ids]
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *resumed]:
            request = self.requests[name]
            if name in self._looked_up:
                yield request, request.num_computed_tokens - output.num_scheduled_tokens[name]

    def _start_sessions(self, admitted: Mapping[str, int]) -> set[str]:
        """Restore the sessions of requests that this step starts; returns these requests' ids."""
        if self.sessions is None:
            return set()
        started = set()
        for name, hit in admitted.items():
            request = self.requests[name]
            if self.sessions.admitted(request, self._pages_of(request), hit):
                started.add(name)
                if self._memory is not None:
                    units = self._schedule_of(request).evicted(np.asarray(hit))
                    self._memory.resume(name, int(units))
        return started

    def _pages_of(self, request: Request) -> Callable[[int], list[int]]:
        """Returns the block ids of a request's state after so many tokens."""
        manager, name = self._manager, request.request_id
        return lambda num: [block.block_id for block in manager.state_after(name, num)]

    def _end_drafts(self, request: Request) -> None:
        """Forget what a request that stops has computed beyond its answer.

        As without drafts, the last token is not computed. Workers undo accepted drafts behind it.
        A request that is aborted while a step computes has computed all tokens that are known.
        """
        if self.num_spec_tokens:
            known = request.num_tokens - (0 if request.num_in_flight_tokens else 1)
            computed = min(request.num_computed_tokens, known)
            request.num_computed_tokens = self._ended[request.request_id] = computed

    def _handle_stopped_request(self, request: Request) -> bool:
        self._end_drafts(request)
        return super()._handle_stopped_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's hook for finished requests: their states are kept as sessions."""
        self._end_drafts(request)
        if self.sessions is not None:
            self.sessions.ended(request, self._pages_of(request))
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.sessions is not None:
            self.sessions.note(getattr(model_runner_output, "kv_sessions", None))
        for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            request = self.requests.get(name)
            if self.log_stats and request is not None:
                self._drafted.append((request, request.num_computed_tokens - len(drafts)))
        return super().update_from_output(scheduler_output, model_runner_output)

    def has_requests(self) -> bool:
        """Whether the engine takes a step; also one without requests, for states and sessions."""
        is_paused = self.pause_state != PauseState.UNPAUSED
        pending = self.sessions is not None and self.sessions.pending(is_paused)
        return super().has_requests() or pending or self._drops_units()

    def _drops_units(self) -> bool:
        """Whether workers still hold evicted units of snapshots that were dropped."""
        return self._memory is not None and self._snapshots is not None and self._snapshots.pending

    def shutdown(self) -> None:
        super().shutdown()
        if self.sessions is not None:
            self.sessions.close()

    def _note_admissions(
        self, snapshots: SnapshotStore, admitted: Mapping[str, int], started: set[str]
    ) -> None:
        for name, hit in admitted.items():
            if hit and name not in started:
                snapshots.counters.hits += 1
                snapshots.counters.hit_tokens += hit
            request = self.requests[name]
            snapshots.remember(
                self._schedule_of(request), request.block_hashes, request.num_prompt_tokens
            )

    def _prompt_chunks(self, output: SchedulerOutput) -> Iterator[tuple[Request, int]]:
        """Requests of which this step reads a chunk of the prompt, each with the chunk's start.

        The forward pass has not run yet, so pages still hold the state at that start.
        """
        for name in list(self._prefilling):
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens >= request.num_prompt_tokens:
                del self._prefilling[name]
            if request is not None and name in output.num_scheduled_tokens:
                yield request, request.num_computed_tokens - output.num_scheduled_tokens[name]

    def _take_snapshot(self, snapshots: SnapshotStore, request: Request, start: int) -> None:
        name = request.request_id
        schedule, hashes = self._schedule_of(request), request.block_hashes
        pages = self._manager.state_after(name, start)
        log = None
        if self._memory is not None:
            log = self._memory.fork(name, int(schedule.evicted(np.asarray(start))))
        reserved = self._manager.reserved_pages()
        snapshots.take(schedule, hashes, start, pages, reserved, log)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop all snapshots and sessions, even if running requests keep vLLM from resetting."""
        if self._snapshots is not None:
            self._snapshots.clear()
        if self.sessions is not None:
            self.sessions.index.clear()
        return super().reset_prefix_cache(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.log_stats:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            rows = [
                (self.requests[name], num - len(drafts.get(name, ())))
                for name, num in scheduler_output.num_scheduled_tokens.items()
            ]
            self._meter.step((r, r.num_computed_tokens, n, r.num_prompt_tokens) for r, n in rows)
        super()._update_after_schedule(scheduler_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        accepted = [(r, begin, r.num_computed_tokens - begin, 0) for r, begin in self._drafted]
        self._meter.step(row for row in accepted if row[2] > 0)
        self._drafted = []
        if stats is None:
            if self.sessions is not None:
                self.sessions.index.counters.load_seconds.clear()  # as a report would
            return None
        report = self._meter.report(self.requests, self.snapshot_counters.hits, self._memory)
        sessions = None if self.sessions is None else self.sessions.report()
        return KVPolicySchedulerStats(**vars(stats), kv_policy=report, kv_sessions=sessions)


class KVPolicyScheduler(_StrideAligned, Scheduler):
    """vLLM's scheduler with stride-aligned prompt chunks."""


class AsyncKVPolicyScheduler(_StrideAligned, AsyncScheduler):
    """vLLM's asynchronous scheduler with stride-aligned prompt chunks."""
