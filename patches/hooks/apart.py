# SPDX-License-Identifier: Apache-2.0
"""What only tests and benchmarks use: nothing that is installed depends on it."""

from .row import called, given, read, replaced, rows

ASYNC_CPU = "tests/engine/async_cpu.py"
CPU_ATTENTION = "benchmarks/cpu_attention.py"
DELTA_RULE = "tests/engine/delta_rule.py"
POOL = "tests/engine/pool.py"
RUNNER_V2 = "tests/engine/runner_v2.py"
STEPS = "tests/attention/steps.py"
STREAM = "benchmarks/running/stream.py"
TEST_ADMISSION = "tests/engine/test_admission.py"
TEST_BATCHING = "tests/engine/test_batching.py"
TEST_CUDA = "tests/attention/test_cuda.py"
TEST_FULL = "tests/engine/test_full_attention.py"
TEST_KINDS = "tests/cache/test_kinds.py"
TEST_PAGES = "tests/cache/test_pages.py"
TEST_ROWS = "tests/attention/test_requests.py"
TEST_SCHEDULER = "tests/engine/test_scheduler.py"
TEST_SNAPSHOTS = "tests/cache/test_snapshots.py"
TEST_STATES = "tests/cache/test_states.py"
TEST_PAGED = "tests/attention/test_paged.py"
TEST_WINDOWS = "tests/attention/test_windows.py"
POOLS = "benchmarks/running/pools.py"
TOKEN_TIME = "benchmarks/token_time.py"

FROM_GROUPS = "(vllm_config, kv_cache_groups, available_memory)"
OF_SPECS = "(vllm_config, kv_cache_specs, available_memory)"
GROUPS = "(vllm_config, kv_cache_spec)"

ENGINES = (
    *rows(
        "vllm.model_executor.layers.fused_moe.router.cpu_router.CPURouter",
        __init__=replaced("experts with biases are one group", "(self, ...)", TEST_FULL),
        use_grouped_topk=read("experts with biases are one group", "", TEST_FULL),
    ),
    *rows(
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        cpu_gdn_attention_core=replaced(
            "delta nets in fp32", "(mixed_qkv, b, a, core_attn_out, layer_name)", DELTA_RULE
        ),
        register_cpu_gdn_attention_ops=called("delta nets in fp32", "()", DELTA_RULE),
    ),
    *rows(
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata",
        has_initial_state=read("delta nets in fp32", "torch.Tensor | None", DELTA_RULE),
        non_spec_query_start_loc=read("delta nets in fp32", "torch.Tensor | None", DELTA_RULE),
        non_spec_state_indices_tensor=read("delta nets in fp32", "torch.Tensor | None", DELTA_RULE),
        num_actual_tokens=read("delta nets in fp32", "int", DELTA_RULE),
        num_decodes=read("delta nets in fp32", "int", DELTA_RULE),
        num_prefills=read("delta nets in fp32", "int", DELTA_RULE),
    ),
    *rows(
        "vllm.utils.torch_utils",
        _resolve_layer_name=called("delta nets in fp32", "(layer_name)", DELTA_RULE),
    ),
    *rows(
        "vllm.entrypoints.llm.LLM",
        llm_engine=read("an engine step by step", "", POOL, RUNNER_V2, STREAM, TOKEN_TIME),
    ),
    *rows(
        "vllm.v1.engine.llm_engine.LLMEngine",
        add_request=called(
            "an engine step by step",
            "(self, request_id, prompt, params, ...)",
            *(RUNNER_V2, TOKEN_TIME),
        ),
        engine_core=read("an engine in this process", "", POOL, RUNNER_V2),
        has_unfinished_requests=called("an engine step by step", "(self)", RUNNER_V2, TOKEN_TIME),
        model_executor=read("a clock around attention", "", TOKEN_TIME),
        step=called("an engine step by step", "(self)", RUNNER_V2, TOKEN_TIME),
        vllm_config=read("what was resolved", "", STREAM),
    ),
    *rows(
        "vllm.v1.engine.core_client.InprocClient",
        engine_core=read("an engine in this process", "", RUNNER_V2),
        shutdown=called("one engine at a time", "(self, timeout=)", POOL),
    ),
    *rows(
        "vllm.v1.engine.core.EngineCore",
        scheduler=read("an engine in this process", "SchedulerInterface", RUNNER_V2),
    ),
    *rows(
        "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        driver_worker=read("a clock around attention", "", TOKEN_TIME),
    ),
    *rows(
        "vllm.v1.worker.worker_base.WorkerWrapperBase",
        worker=read("a clock around attention", "WorkerBase", TOKEN_TIME),
    ),
    *rows(
        "vllm.config.VllmConfig",
        compilation_config=read("all layers of a model", "CompilationConfig", TOKEN_TIME),
    ),
    *rows(
        "vllm.config.CompilationConfig",
        static_forward_context=read("all layers of a model", "dict[str, Any]", TOKEN_TIME),
    ),
    *rows(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
        do_kv_cache_update=replaced(
            "a clock around attention",
            "(self, layer, key, value, kv_cache, slot_mapping)",
            TOKEN_TIME,
        ),
    ),
    *rows("vllm.envs", disable_envs_cache=called("one engine at a time", "()", POOL)),
    *rows(
        "vllm.distributed",
        cleanup_dist_env_and_memory=called("one engine at a time", "(shutdown_ray=)", POOL),
    ),
    *rows(
        "vllm.platforms.cpu.CpuPlatform",
        check_and_update_config=replaced("asynchronous on CPUs", "(vllm_config)", ASYNC_CPU),
    ),
)

PARTS = (
    *rows(
        "vllm.v1.sample.logits_processor",
        AdapterLogitsProcessor=given("forces what is generated", TEST_BATCHING),
    ),
    *rows(
        "vllm.v1.core.sched.scheduler.Scheduler",
        add_request=called("a scheduler alone", "(self, request)", TEST_SCHEDULER),
        finish_requests=called(
            "a scheduler alone", "(self, request_ids, finished_status)", TEST_SCHEDULER
        ),
        update_from_output=called(
            "a scheduler alone", "(self, scheduler_output, model_runner_output)", TEST_SCHEDULER
        ),
    ),
    *rows(
        "vllm.v1.core.sched.interface.SchedulerInterface",
        has_unfinished_requests=called("a scheduler alone", "(self)", TEST_SCHEDULER),
    ),
    *rows(
        "vllm.v1.core.sched.output",
        NewRequestData=called(
            "rows alone",
            "(req_id, prompt_token_ids, mm_features, sampling_params, pooling_params, block_ids, "
            "num_computed_tokens, lora_request, ..., prefill_token_ids=, ...)",
            TEST_ROWS,
        ),
    ),
    *rows(
        "vllm.v1.core.sched.output.SchedulerOutput",
        make_empty=called("rows alone", "()", TEST_ROWS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils",
        get_kv_cache_config_from_groups=called(
            "a scheduler alone", {"0.32": FROM_GROUPS, "0.33": None}, TEST_SCHEDULER
        ),
        get_kv_cache_configs=called(
            "a small pool", {"0.32": OF_SPECS, "0.33": None}, TEST_ADMISSION
        ),
        get_kv_cache_groups=called(
            "a scheduler alone", {"0.32": GROUPS, "0.33": None}, TEST_SCHEDULER
        ),
        get_request_block_hasher=called(
            "prefixes alone", "(hash_block_size, caching_hash_fn, ...)", TEST_SNAPSHOTS
        ),
        init_none_hash=called("prefixes alone", "(hash_fn)", TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_planning",
        "0.33",
        _get_kv_cache_groups_uniform_page_size=called(
            "how vLLM groups layers", "(kv_cache_spec)", TEST_STATES
        ),
        get_global_kv_cache_groups=called(
            "a small pool", "(vllm_config, kv_cache_specs)", TEST_ADMISSION
        ),
        get_kv_cache_config_from_groups=called("a scheduler alone", FROM_GROUPS, TEST_SCHEDULER),
        get_kv_cache_configs=called(
            "a small pool",
            "(vllm_config, kv_cache_specs, available_memory, global_kv_cache_groups)",
            TEST_ADMISSION,
        ),
        get_kv_cache_groups=called("a scheduler alone", GROUPS, TEST_SCHEDULER),
    ),
    *rows(
        "vllm.utils.hashing",
        get_hash_fn_by_name=called("prefixes alone", "(hash_fn_name)", TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.structured_output",
        StructuredOutputManager=called("a scheduler alone", "(vllm_config)", TEST_SCHEDULER),
    ),
    *rows(
        "vllm.v1.outputs",
        ModelRunnerOutput=called(
            "what a runner answers",
            "(req_ids, req_id_to_index, sampled_token_ids=, ...)",
            *(TEST_SCHEDULER, TEST_SNAPSHOTS),
        ),
    ),
    *rows(
        "vllm.v1.request",
        Request=called(
            "a scheduler alone",
            "(request_id, prompt_token_ids, sampling_params, pooling_params, ..., block_hasher=, "
            "resumable=, ...)",
            *(TEST_SCHEDULER, TEST_SNAPSHOTS),
        ),
    ),
    *rows(
        "vllm.v1.request.RequestStatus",
        FINISHED_ABORTED=read("a scheduler alone", "", TEST_SCHEDULER, TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.request.Request",
        num_preemptions=read("nobody is preempted", "", TEST_SCHEDULER, TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.sampling_params.SamplingParams",
        update_from_generation_config=called(
            "a scheduler alone",
            "(self, generation_config, eos_token_id=)",
            *(TEST_SCHEDULER, TEST_SNAPSHOTS),
        ),
    ),
    *rows(
        "vllm.config.CacheConfig",
        kv_cache_layout=read("a scheduler alone", "str | None", TEST_ADMISSION, TEST_SCHEDULER),
        num_gpu_blocks_override=read("a small pool", "int | None", TEST_SCHEDULER),
    ),
    *rows(
        "vllm.v1.core.block_pool",
        BlockPool=called(
            "pages alone",
            "(num_gpu_blocks, enable_caching, hash_block_size, ...)",
            *(TEST_PAGES, TEST_SNAPSHOTS),
        ),
    ),
    *rows(
        "vllm.v1.core.block_pool.BlockPool",
        free_block_queue=read("who may be given away", "", TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils",
        _get_kv_cache_groups_uniform_page_size=called(
            "how vLLM groups layers", {"0.32": "(kv_cache_spec)", "0.33": None}, TEST_STATES
        ),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue",
        get_all_free_blocks=called("who may be given away", "(self)", TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils.KVCacheBlock",
        ref_cnt=read("who may be given away", "int", TEST_SNAPSHOTS),
    ),
    *rows(
        "vllm.v1.kv_cache_interface",
        FullAttentionSpec=called(
            "a layer's cache",
            "(block_size, *, ..., num_kv_heads, head_size, dtype, ...)",
            *(CPU_ATTENTION, STREAM, TEST_PAGES, TEST_SCHEDULER),
        ),
        SlidingWindowSpec=called(
            "a layer's cache",
            "(block_size, *, ..., num_kv_heads, head_size, dtype, ..., sliding_window, ...)",
            *(TEST_KINDS, TEST_WINDOWS),
        ),
        get_kv_quant_mode=called(
            "a layer's cache", "(kv_cache_dtype)", *(POOLS, TEST_PAGED, TEST_WINDOWS)
        ),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.KVCacheSpec",
        copy_with_new_block_size=called("pages alone", "(self, block_size)", TEST_PAGES),
    ),
    *rows(
        "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        get_manager_class=called("beside vLLM's own", "(kvcache_spec, role=)", TEST_PAGES),
    ),
    *rows(
        "vllm.v1.core.single_type_kv_cache_manager",
        FullAttentionManager=given("beside vLLM's own", TEST_PAGES),
    ),
    *rows(
        "vllm.v1.attention.backend",
        CommonAttentionMetadata=called(
            "a step alone",
            "(query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, num_actual_tokens, "
            "max_query_len, max_seq_len, block_table_tensor, slot_mapping, ..., is_prefilling=, "
            "seq_lens_cpu_upper_bound=, ...)",
            *(CPU_ATTENTION, STEPS, TEST_CUDA),
        ),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionMetadataBuilder",
        build_for_cudagraph_capture=called(
            "a capture alone", "(self, common_attn_metadata)", TEST_CUDA
        ),
    ),
    *rows(
        "vllm.platforms.interface",
        DeviceCapability=called("a GPU that is not here", "(major, minor)", TEST_CUDA),
    ),
    *rows(
        "vllm.v1.worker.gpu.states",
        RequestState=called(
            "the second runner's rows alone",
            "(max_num_reqs, max_model_len, max_num_batched_tokens, num_speculative_steps, "
            "vocab_size, device, ...)",
            TEST_ROWS,
        ),
    ),
    *rows(
        "vllm.v1.worker.gpu.states.RequestState",
        add_request=called(
            "the second runner's rows alone",
            "(self, req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens)",
            TEST_ROWS,
        ),
        remove_request=called("the second runner's rows alone", "(self, req_id)", TEST_ROWS),
        req_id_to_index=read("the second runner's rows alone", "dict[str, int]", TEST_ROWS),
    ),
    *rows(
        "vllm.v1.worker.gpu.buffer_utils",
        is_uva_available=replaced("no pinned memory", "()", TEST_ROWS),
    ),
)

STOCK = (
    *rows(
        "vllm._custom_ops",
        cpu_attn_get_scheduler_metadata=called(
            "stock attention's time",
            "(num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, query_start_loc, "
            "causal, sliding_window_size, isa, enable_kv_split, ...)",
            CPU_ATTENTION,
        ),
        cpu_attn_reshape_and_cache=called(
            "stock attention's time",
            "(key, value, key_cache, value_cache, slot_mapping, isa, ...)",
            CPU_ATTENTION,
        ),
        cpu_attention_with_kv_cache=called(
            "stock attention's time",
            "(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, "
            "alibi_slopes, sliding_window, block_table, softcap, scheduler_metadata, s_aux, ...)",
            CPU_ATTENTION,
        ),
    ),
    *rows(
        "vllm.v1.attention.backends.cpu_attn",
        _get_attn_isa=called(
            "stock attention's time", "(dtype, block_size, head_size=, ...)", CPU_ATTENTION
        ),
    ),
    *rows(
        "vllm.v1.outputs",
        LogprobsTensors=called(
            "log-probabilities of prompts, some rows at a time",
            "(logprob_token_ids, logprobs, selected_token_ranks, ...)",
            "benchmarks/running/prompt_scores.py",
        ),
    ),
    *rows(
        "vllm.benchmarks.serve",
        add_cli_args=called("vLLM's own load", "(parser)", "benchmarks/running/serving.py"),
        main=called("vLLM's own load", "(args)", "benchmarks/running/serving.py"),
    ),
)
