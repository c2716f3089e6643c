# SPDX-License-Identifier: Apache-2.0
"""What a scheduler does: prompt chunks, pages, prefix caching."""

from .row import called, given, overridden, read, rows

ADMISSION = "vllm_cascade/engine/admission.py"
BACKEND = "vllm_cascade/attention/backend.py"
KINDS = "vllm_cascade/cache/kinds.py"
LAYOUT = "vllm_cascade/cache/layout.py"
MANAGER = "vllm_cascade/cache/manager.py"
SPEC = "vllm_cascade/cache/spec.py"
METRICS = "vllm_cascade/engine/metrics.py"
ROWS = "vllm_cascade/step/requests.py"
SCHEDULER = "vllm_cascade/engine/scheduler.py"
SNAPSHOTS = "vllm_cascade/cache/snapshots.py"
STATES = "vllm_cascade/cache/states.py"
RECALL = "vllm_cascade/recall/stores.py"
WORKER = "vllm_cascade/engine/worker.py"

STEPS = (
    *rows(
        "vllm.v1.core.sched.scheduler.Scheduler",
        __init__=overridden(
            "finds our managers",
            "(self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
            "hash_block_size=, mm_registry=, include_finished_set=, log_stats=)",
            SCHEDULER,
        ),
        _mamba_block_aligned_split=overridden(
            "prompt chunks end where strides end",
            "(self, request, num_new_tokens, num_new_local_computed_tokens=, "
            "num_external_computed_tokens=)",
            SCHEDULER,
        ),
        need_mamba_block_aligned_split=overridden("asks for the split", "", SCHEDULER),
        _get_local_prefix_cache_hit=overridden(
            "prompts begin from snapshots",
            {"0.32": "(self, request)", "0.33": "(self, request, max_cache_hit_length=)"},
            SCHEDULER,
        ),
        schedule=overridden("takes snapshots", "(self, throttle_prefills=)", SCHEDULER),
        reset_prefix_cache=overridden(
            "snapshots go", "(self, reset_running_requests=, reset_connector=)", SCHEDULER
        ),
        _update_after_schedule=overridden(
            "a step is counted", "(self, scheduler_output)", SCHEDULER
        ),
        make_stats=overridden(
            "a policy's statistics go along",
            "(self, spec_decoding_stats=, kv_connector_stats=, cudagraph_stats=, perf_stats=, "
            "ec_connector_stats=)",
            SCHEDULER,
        ),
        block_size=read("named in a warning", "", SCHEDULER),
        kv_cache_config=read("layers of each manager", "", SCHEDULER),
        kv_cache_manager=read("pages", "", SCHEDULER),
        log_stats=read("without them nothing is counted", "", SCHEDULER),
        max_model_len=read("the longest stream", "", SCHEDULER),
        parallel_config=read("ranks that hold pages", "", SCHEDULER),
        requests=read("all unfinished ones", "dict[str, Request]", SCHEDULER),
    ),
    *rows(
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        _update_after_schedule=overridden(
            "a step is counted", "(self, scheduler_output)", SCHEDULER
        ),
    ),
    *rows(
        "vllm.v1.core.sched.output.SchedulerOutput",
        finished_req_ids=read("requests that end", "set[str]", ROWS, RECALL),
        kv_cache_block_copies=read(
            "copies before the step", "list[KVCacheBlockCopy] | None", SCHEDULER, RECALL
        ),
        num_scheduled_tokens=read("who is in a step", "dict[str, int]", SCHEDULER),
        preempted_req_ids=read("requests that pause", "set[str] | None", ROWS, RECALL),
        scheduled_cached_reqs=read("requests that resume", "CachedRequestData", SCHEDULER, RECALL),
        scheduled_new_reqs=read(
            "requests that begin", "list[NewRequestData]", ROWS, SCHEDULER, RECALL
        ),
    ),
    *rows(
        "vllm.v1.core.sched.output.CachedRequestData",
        new_block_ids=read("their pages", "list[tuple[list[int], ...] | None]", RECALL),
        num_computed_tokens=read("tokens they need not compute", "list[int]", RECALL),
        req_ids=read("who they are", "list[str]", RECALL),
        resumed_req_ids=read("requests that resume", "set[str]", SCHEDULER, RECALL),
    ),
    *rows(
        "vllm.v1.core.sched.output.NewRequestData",
        block_ids=read("their pages", "tuple[list[int], ...]", RECALL),
        num_computed_tokens=read("tokens they need not compute", "int", RECALL),
        prefill_token_ids=read("scored by their text", "list[int] | None", ROWS),
        prompt_len=read("strides end with it", "int", ROWS),
        req_id=read("a request's name", "str", ROWS, SCHEDULER, RECALL),
        sampling_params=read("a request's own policy", "SamplingParams | None", ROWS),
    ),
    *rows("vllm.v1.core.sched.output", GrammarOutput=given("sampling is given it", WORKER)),
    *rows(
        "vllm.v1.request.Request",
        block_hashes=read("prefixes it shares", "list[BlockHash]", SCHEDULER),
        max_tokens=read("how long it may become", "", SCHEDULER),
        num_computed_tokens=read("where it stands", "", METRICS, SCHEDULER),
        num_prompt_tokens=read("strides end with the prompt", "", METRICS, SCHEDULER),
        num_tokens=read("the last one is left to compute", "int", SCHEDULER),
        request_id=read("its name", "", SCHEDULER),
        resumable=read("its prompt has decoded tokens in it", "", SCHEDULER),
        sampling_params=read("its own policy", "", SCHEDULER),
        shared_prefix_boundary=read("where prompts part", "", SCHEDULER),
    ),
)

PAGES = (
    *rows(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        block_pool=read("pages in all", "", SCHEDULER),
        coordinator=read("finds our managers", "", SCHEDULER),
        create_kv_cache_blocks=called("pages of a snapshot", "(self, blocks)", SCHEDULER),
        empty_kv_cache_blocks=read("no snapshot", "", SCHEDULER),
        prefix_cache_lookup_enabled=called("a request may say no", "(self, request)", SCHEDULER),
    ),
    *rows("vllm.v1.core.kv_cache_manager", KVCacheBlocks=given("pages of a snapshot", SCHEDULER)),
    *rows(
        "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
        single_type_managers=read("finds our managers", "", SCHEDULER),
    ),
    *rows(
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager",
        __init__=overridden(
            "a store for snapshots",
            "(self, kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, "
            "scheduler_block_size, dcp_world_size=, pcp_world_size=, needs_kv_cache_zeroing=, "
            "max_admission_blocks_per_request=)",
            MANAGER,
        ),
        has_positionally_stable_blocks=overridden("slots are used again", "bool", MANAGER, STATES),
        get_num_blocks_to_allocate=overridden(
            "all that are promised are counted on admission",
            "(self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
            "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=, prefill_end=)",
            *(MANAGER, STATES),
        ),
        add_local_computed_blocks=overridden(
            "pages that begin as a snapshot's",
            "(self, request_id, new_computed_blocks, num_local_computed_tokens, "
            "num_external_computed_tokens)",
            *(MANAGER, STATES),
        ),
        allocate_new_blocks=overridden(
            "a request's pages are bounded",
            "(self, request_id, num_tokens, num_tokens_main_model)",
            *(MANAGER, STATES),
        ),
        cache_blocks=overridden(
            "a state is never shared",
            "(self, request, num_tokens, retention_interval=, *, replay_boundaries)",
            STATES,
        ),
        pop_blocks_for_free=overridden("its limit goes with them", "(self, request_id)", MANAGER),
        find_longest_cache_hit=overridden(
            "live pages are never shared",
            "(block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, "
            "drop_eagle_block, alignment_tokens, dcp_world_size=, pcp_world_size=)",
            *(MANAGER, STATES),
        ),
        block_pool=read("pages", "", MANAGER, STATES),
        block_size=read("slots of a page", "", SPEC),
        enable_caching=read("whether to keep snapshots", "", MANAGER),
        kv_cache_group_id=read("layers of a manager", "", SCHEDULER),
        kv_cache_spec=overridden("is always ours", "", MANAGER, STATES),
        req_to_blocks=read(
            "pages of each request",
            "defaultdict[str, list[KVCacheBlock]]",
            *(MANAGER, METRICS, STATES),
        ),
    ),
    *rows(
        "vllm.v1.core.block_pool.BlockPool",
        get_new_blocks=called("fresh pages", "(self, num_blocks)", MANAGER, SNAPSHOTS, STATES),
        get_num_free_blocks=called("room for a snapshot", "(self)", SNAPSHOTS),
        hash_block_size=read("tokens of a prefix hash", "", MANAGER),
        num_gpu_blocks=read("pages in all", "", SCHEDULER),
        touch=called("a snapshot in use is not given away", "(self, blocks)", SNAPSHOTS),
        unpin_blocks=called("pages wait to be reused", "(self, blocks, on_reuse)", SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils",
        BlockHash=given("the hash of a prefix", SNAPSHOTS),
        KVCacheBlockCopy=called("copies before a step", "(src_block_id, dst_block_id)", SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils.KVCacheBlockCopy",
        dst_block_id=read("whose state a copy is", "int", RECALL),
        src_block_id=read("whose state is copied", "int", RECALL),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils.KVCacheBlock",
        block_id=read("a page's number", "int", SNAPSHOTS),
    ),
    *rows(
        "vllm.utils.math_utils",
        cdiv=called("pages of so many slots", "(a, b)", ADMISSION, SPEC, METRICS, STATES),
    ),
)

SPECS = (
    *rows(
        "vllm.v1.kv_cache_interface.AttentionSpec",
        __post_init__=overridden("metadata behind keys and values", "(self)", SPEC),
        block_size=read("slots of a page", "int", KINDS, SPEC, METRICS),
        head_size=read("channels of a key", "int", BACKEND, LAYOUT),
        head_size_v=read("channels of a value", "int", BACKEND),
        kv_quant_mode=read("whether rows have scales", "KVQuantMode", LAYOUT, SPEC),
        max_memory_usage_bytes=overridden("bounded", "(self, vllm_config)", SPEC),
        max_num_blocks_per_req=overridden("bounded", "(self, vllm_config, max_len)", SPEC),
        num_kv_heads=read("heads of a page", "int", LAYOUT, SPEC),
        page_size_bytes=read("a whole page", "int", KINDS, LAYOUT, SPEC, METRICS, STATES),
        page_size_padded=read("a whole page", "int | None", KINDS, SPEC, STATES),
        prefix_cacheable=overridden("live pages are never shared", "bool", SPEC),
        unpadded_page_size_bytes=read("keys and values alone", "int", LAYOUT, SPEC),
        uses_slot_mapping=overridden("our backend finds the slots", "bool", SPEC),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.FullAttentionSpec",
        attention_chunk_size=read("a bounded cache has none", "int | None", SPEC),
        non_causal=read("a bounded cache has none", "bool", SPEC),
        sliding_window=read("a bounded cache has none", "int | None", SPEC),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVCacheSpec",
        get_num_kernel_states=overridden(
            "windows have slots of their own", "(self, kernel_block_size)", SPEC
        ),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.MambaSpec",
        mamba_cache_mode=read("one state a request", "str", STATES),
        page_size_bytes=read("a whole page", "int", STATES),
        page_size_padded=read("a whole page", "int | None", STATES),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.SlidingWindowSpec",
        extra_retained_tokens=read("a bounded cache has none", "int", KINDS),
        sliding_window=read("tokens that a query sees, its own included", "int", KINDS),
    ),
    *rows(
        "vllm.v1.kv_cache_interface",
        KVCacheSpec=given("what a layer asks for", KINDS, STATES, WORKER),
        replace_as=called(
            "a layer's spec becomes ours",
            "(spec, target_cls, *, drop=, **changes)",
            *(KINDS, SPEC, STATES),
        ),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVQuantMode",
        is_per_token_head=read("whether rows have scales", "bool", SPEC),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        kv_cache_groups=read("layers of each manager", "list[KVCacheGroupSpec]", SCHEDULER),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVCacheGroupSpec",
        layer_names=read("layers of each manager", "list[str]", SCHEDULER),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVCacheLayout",
        LBHNC=read("a head's keys and values lie together", "", BACKEND),
    ),
    *rows(
        "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        _ensure_registered=called(
            "vLLM's specs come before ours", "(vllm_config=)", MANAGER, STATES
        ),
        register=called(
            "the manager of our spec",
            "(kvcache_spec_cls, manager_class=, uniform_type_base_spec=)",
            *(MANAGER, STATES),
        ),
    ),
)
