# SPDX-License-Identifier: Apache-2.0
"""What a front-end does: arguments, configuration, checks of requests, metrics."""

from .row import called, given, overridden, read, replaced, rows

ENGINE_ARGS = "patches/engine_args.py"
MAX_MODEL_LEN = "patches/max_model_len.py"
POOL_SIZE = "patches/pool_size.py"
REQUEST_CHECKS = "patches/request_checks.py"
STAT_LOGGERS = "patches/stat_loggers.py"
ADMISSION = "vllm_cascade/engine/admission.py"
BACKEND = "vllm_cascade/attention/backend.py"
BUILDER = "vllm_cascade/step/builder.py"
CLI = "vllm_cascade/cli.py"
CONFIGURE = "vllm_cascade/engine/configure.py"
CUDA_BUILDER = "vllm_cascade/attention/cuda/builder.py"
DEVICES = "vllm_cascade/engine/devices.py"
GPU_WORKER = "vllm_cascade/engine/gpu_worker.py"
LOOKUP = "vllm_cascade/engine/lookup.py"
MANAGER = "vllm_cascade/cache/manager.py"
SPEC = "vllm_cascade/cache/spec.py"
METRICS = "vllm_cascade/engine/metrics.py"
PROBE = "vllm_cascade/models/probe.py"
REFUSALS = "vllm_cascade/engine/refusals.py"
ROWS = "vllm_cascade/step/requests.py"
SCHEDULER = "vllm_cascade/engine/scheduler.py"
WORKER = "vllm_cascade/engine/worker.py"

UNSUPPORTED = "what no policy supports"
SMALL_POOL = "a small pool serves all requests that fit it"
BOUND = "the check is given it, bound to the configuration"
ENOUGH_MEMORY = "(available_memory, get_needed_memory, max_model_len, estimate_max_model_len)"

ARGUMENTS = (
    *rows(
        "vllm.engine.arg_utils.EngineArgs",
        __init__=replaced(
            "a policy's arguments", "(self, ..., additional_config=, ...)", ENGINE_ARGS
        ),
        add_cli_args=replaced("a policy's flags", "(parser)", ENGINE_ARGS),
        from_cli_args=replaced("a policy's flags", "(args)", ENGINE_ARGS),
        create_engine_config=replaced(
            "a policy is checked and applied", "(self, usage_context=, headless=)", ENGINE_ARGS
        ),
        additional_config=read(
            "a policy's settings travel in it to every process", "dict[str, Any]", ENGINE_ARGS
        ),
    ),
    *rows(
        "vllm.engine.arg_utils.AsyncEngineArgs",
        __init__=replaced(
            "a server's arguments; a dataclass has its own",
            "(self, ..., additional_config=, ...)",
            ENGINE_ARGS,
        ),
    ),
    *rows(
        "vllm.config.model",
        _get_and_verify_max_len=replaced(
            "streams may be longer than the model's positions",
            "(hf_config, model_arch_config, tokenizer_config, max_model_len, "
            "disable_sliding_window, sliding_window, spec_target_max_model_len=, encoder_config=)",
            MAX_MODEL_LEN,
        ),
    ),
    *rows(
        "vllm.v1.core.kv_cache_utils",
        _check_enough_kv_cache_memory=replaced(
            SMALL_POOL, {"0.32": ENOUGH_MEMORY, "0.33": None}, POOL_SIZE
        ),
        _max_memory_usage_bytes_from_groups=called(
            BOUND, {"0.32": "(vllm_config, kv_cache_groups)", "0.33": None}, POOL_SIZE
        ),
    ),
    *rows(
        "vllm.v1.core.kv_cache_planning",
        "0.33",
        _check_enough_kv_cache_memory=replaced(SMALL_POOL, ENOUGH_MEMORY, POOL_SIZE),
        _max_memory_usage_bytes_from_groups=called(
            BOUND, "(builder, vllm_config, kv_cache_groups)", POOL_SIZE
        ),
    ),
    *rows(
        "vllm.utils.argparse_utils",
        FlexibleArgumentParser=called("flags read as vLLM's do", "(*args, **kwargs)", CLI),
    ),
    *rows(
        "vllm.tokenizers",
        get_tokenizer=called(
            "a corpus is counted with the engine's tokenizer",
            "(tokenizer_name, *args, tokenizer_cls=, trust_remote_code=, revision=, "
            "download_dir=, **kwargs)",
            CLI,
        ),
    ),
    *rows("vllm", __version__=read("others are refused", "", "patches/__init__.py")),
)

CONFIGURATION = (
    *rows(
        "vllm.config.VllmConfig",
        additional_config=read("a policy's settings", "dict | SupportsHash", CONFIGURE, LOOKUP),
        attention_config=read("names our backend", "AttentionConfig", CONFIGURE),
        cache_config=read("the pool", "CacheConfig", *(ADMISSION, CONFIGURE, REFUSALS, WORKER)),
        kv_transfer_config=read(UNSUPPORTED, "KVTransferConfig | None", REFUSALS),
        model_config=read(
            "the model",
            "ModelConfig",
            *(ADMISSION, CONFIGURE, SPEC, REFUSALS),
        ),
        parallel_config=read(
            "names our worker",
            "ParallelConfig",
            *(ADMISSION, CONFIGURE, REFUSALS),
        ),
        scheduler_config=read("names our scheduler", "SchedulerConfig", BUILDER, CONFIGURE),
        speculative_config=read(UNSUPPORTED, "SpeculativeConfig | None", REFUSALS),
    ),
    *rows(
        "vllm.entrypoints.launchers.cli_args.FrontendArgs",
        middleware=read("ours is its default", {"0.32": "list[str]", "0.33": None}, ENGINE_ARGS),
    ),
    *rows(
        "vllm.entrypoints.common.cli_args.FrontendArgs",
        "0.33",
        middleware=read("ours is its default", "list[str]", ENGINE_ARGS),
    ),
    *rows(
        "vllm.config.ModelConfig",
        dtype=read(
            "rows that come in, and on CUDA pages", "ModelDType | torch.dtype", REFUSALS, WORKER
        ),
        enable_prompt_embeds=read("such prompts have no token ids", "bool", REFUSALS),
        enforce_eager=read("a captured graph would skip recording", "bool", GPU_WORKER),
        get_sliding_window=called(UNSUPPORTED, "(self)", REFUSALS),
        get_hidden_size=called("how a model of transformers' rotates keys", "(self)", PROBE),
        get_total_num_kv_heads=called("heads over ranks", "(self)", REFUSALS),
        get_vocab_size=called("larger than its tokenizer's", "(self)", LOOKUP),
        hf_text_config=read(
            "positions and layers of a model", "PreTrainedConfig", REFUSALS, WORKER
        ),
        is_attention_free=read(UNSUPPORTED, "bool", REFUSALS),
        is_encoder_decoder=read(UNSUPPORTED, "bool", REFUSALS),
        is_hybrid=read("recurrent layers", "bool", ADMISSION, CONFIGURE, REFUSALS),
        is_mm_prefix_lm=read(UNSUPPORTED, "bool", REFUSALS),
        max_model_len=read("the longest stream", "int", ADMISSION, CONFIGURE, SPEC),
        rswa_window=read(UNSUPPORTED, "int | None", REFUSALS),
        runner_type=read(UNSUPPORTED, "", REFUSALS),
        served_model_name=read("a label of the metrics", "str | list[str] | None", METRICS),
        skip_tokenizer_init=read("token ids are scored by their text", "bool", LOOKUP),
        tokenizer=read("named where a table is another's", "str", LOOKUP),
        use_mla=read(UNSUPPORTED, "bool", REFUSALS),
        uses_alibi=read("such models have no last position", "bool", CONFIGURE, REFUSALS),
        uses_mrope=read("pictures are refused", "bool", ADMISSION),
    ),
    *rows(
        "vllm.config.CacheConfig",
        block_size=read("tokens in a page", "int", ADMISSION, CONFIGURE, WORKER),
        cache_dtype=read(
            "what keys and values are stored in",
            {"0.32": "CacheDType", "0.33": "CacheDType | str"},
            REFUSALS,
        ),
        enable_prefix_caching=read("recall on CUDA has no snapshots", "bool", REFUSALS),
        kv_cache_dtype_skip_layers=read(UNSUPPORTED, "list[str]", REFUSALS),
        mamba_cache_mode=read("one state a request", "MambaCacheMode", CONFIGURE),
        num_gpu_blocks=read("pages in the pool", "int | None", ADMISSION),
        use_replayssm=read(UNSUPPORTED, "bool", REFUSALS),
        user_specified_block_size=read("a page's size is fixed early", "bool", CONFIGURE),
    ),
    *rows(
        "vllm.config.ParallelConfig",
        data_parallel_size=read("engines that share a front-end", "int", ADMISSION, REFUSALS),
        data_parallel_size_local=read("engines that share a front-end", "int", ADMISSION),
        decode_context_parallel_size=read(UNSUPPORTED, "int", REFUSALS),
        enable_dbo=read(UNSUPPORTED, "bool", REFUSALS),
        local_engines_only=read("engines that share a front-end", "bool", ADMISSION),
        pipeline_parallel_size=read(UNSUPPORTED, "int", REFUSALS),
        prefill_context_parallel_size=read(UNSUPPORTED, "int", REFUSALS),
        tensor_parallel_size=read(
            "ranks that keep the same tokens",
            "int",
            *(REFUSALS, SCHEDULER, WORKER),
        ),
        worker_cls=read("names our worker", "str", CONFIGURE, REFUSALS),
    ),
    *rows(
        "vllm.config.SchedulerConfig",
        async_scheduling=read("which of our schedulers", "bool | None", CONFIGURE),
        long_prefill_token_threshold=read("a stride must fit in it", "int", REFUSALS),
        max_num_batched_tokens=read("a stride must fit in it", "int", BUILDER, CONFIGURE),
        max_num_seqs=read("rows of a step", "int", CONFIGURE, CUDA_BUILDER),
        scheduler_cls=read("names our scheduler", "str | type[object] | None", CONFIGURE, REFUSALS),
    ),
    *rows(
        "vllm.config.AttentionConfig",
        backend=read("names our backend", "AttentionBackendEnum | None", CONFIGURE, REFUSALS),
    ),
    *rows(
        "vllm.config",
        get_current_vllm_config_or_none=called("customize_spec is not given it", "()", BACKEND),
        get_layers_from_vllm_config=called(
            "layers to wire", "(vllm_config, layer_type, layer_names=)", WORKER
        ),
        set_current_vllm_config=called(
            "customize_spec is not given it", "(vllm_config, check_compile=, prefix=)", WORKER
        ),
    ),
    *rows(
        "vllm.platforms",
        current_platform=called(
            "the device", "Platform", *(ADMISSION, CONFIGURE, DEVICES, REFUSALS)
        ),
    ),
    *rows(
        "vllm.platforms.interface.Platform",
        is_cpu=called("the device", "(self)", CONFIGURE, REFUSALS),
        is_cuda=called("the device", "(self)", ADMISSION, REFUSALS),
    ),
    *rows(
        "vllm.tokenizers",
        cached_tokenizer_from_config=called(
            "token ids are scored by their text", "(model_config, **kwargs)", LOOKUP
        ),
    ),
    *rows(
        "vllm.transformers_utils.config",
        iter_rope_parameters=called("a model's rope types", "(config)", PROBE, REFUSALS),
    ),
    *rows(
        "vllm.envs",
        VLLM_CACHE_ROOT=read("compiled code lies beside vLLM's", "str", "kernels/cpp/build.py"),
        VLLM_USE_V2_MODEL_RUNNER=read("not tested on CPUs", "bool | None", REFUSALS),
    ),
    *rows(
        "vllm.logger",
        init_logger=called("log lines obey vLLM's settings", "(name)", "vllm_cascade/log.py"),
    ),
)

REQUESTS = (
    *rows(
        "vllm.v1.engine.input_processor.InputProcessor",
        process_inputs=replaced(
            "a request that could never be served is an error",
            "(self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, "
            "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, "
            "session_id=, kv_hints=)",
            REQUEST_CHECKS,
        ),
        vllm_config=read("which policy the engine runs", "", REQUEST_CHECKS),
    ),
    *rows(
        "vllm.v1.engine.async_llm.AsyncLLM",
        generate=replaced(
            "the same before a stream's status line is sent",
            "(self, prompt, sampling_params, request_id, *, prompt_text=, lora_request=, "
            "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, session_id=, "
            "kv_hints=, reasoning_ended=, reasoning_parser_kwargs=)",
            REQUEST_CHECKS,
        ),
        vllm_config=read("which policy the engine runs", "", REQUEST_CHECKS),
    ),
    *rows(
        "vllm.v1.engine.EngineCoreRequest",
        mm_features=read(
            "pictures are refused", "list[MultiModalFeatureSpec] | None", REQUEST_CHECKS
        ),
        prompt_embeds=read("a prompt's length", "torch.Tensor | None", REQUEST_CHECKS),
        prompt_token_ids=read("a prompt's length", "list[int] | None", REQUEST_CHECKS),
        sampling_params=read("a request's arguments", "SamplingParams | None", REQUEST_CHECKS),
    ),
    *rows(
        "vllm.utils",
        length_from_prompt_token_ids_or_embeds=called(
            "a prompt's length", "(prompt_token_ids, prompt_embeds)", REQUEST_CHECKS
        ),
    ),
    *rows("vllm.outputs", RequestOutput=given("what generate yields", REQUEST_CHECKS)),
    *rows(
        "vllm.sampling_params.SamplingParams",
        extra_args=read(
            "a request's own policy and budget",
            "dict[str, Any] | None",
            *(ADMISSION, ROWS, SCHEDULER),
        ),
        max_tokens=read("how long a stream may become", "int | None", ADMISSION),
    ),
    *rows("vllm.pooling_params", PoolingParams=given("a request's arguments", ADMISSION)),
    *rows(
        "vllm.exceptions",
        VLLMValidationError=called("status 400", "(message, *, parameter=, value=)", ADMISSION),
    ),
)

STATISTICS = (
    *rows(
        "vllm.v1.engine.EngineCoreOutputs",
        scheduler_stats=replaced(
            "its annotation, by which a policy's statistics are decoded",
            "SchedulerStats | None",
            STAT_LOGGERS,
        ),
    ),
    *rows(
        "vllm.v1.metrics.loggers.StatLoggerManager",
        __init__=replaced(
            "front-ends of engines with a policy have our logger",
            "(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, "
            "aggregate_engine_logging=, client_count=)",
            STAT_LOGGERS,
        ),
        engine_indexes=read("what our logger is for", "", STAT_LOGGERS),
        stat_loggers=read("takes our logger", "list[AggregateStatLoggerBase]", STAT_LOGGERS),
    ),
    *rows(
        "vllm.v1.metrics.loggers.AggregateStatLoggerBase",
        __init__=overridden("our metrics", "(self, vllm_config, engine_indexes)", METRICS),
        log_engine_initialized=overridden("nothing to log", "(self)", METRICS),
        record=overridden(
            "publishes a policy's statistics",
            "(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)",
            METRICS,
        ),
    ),
    *rows(
        "vllm.v1.metrics.stats",
        IterationStats=given("a logger is given them", METRICS),
        MultiModalCacheStats=given("a logger is given them", METRICS),
        SchedulerStats=given("extended by a policy's", METRICS, SCHEDULER),
    ),
)
