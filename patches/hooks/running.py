# SPDX-License-Identifier: Apache-2.0
"""What a worker does: our backend, the model runners' rows, rotary tables, kernels."""

from .row import called, given, overridden, read, replaced, rows

AOT = "tests/kernels/aot.py"
LAUNCHERS = "tests/kernels/launchers.py"
BACKEND = "vllm_cascade/attention/backend.py"
BUILDER = "vllm_cascade/step/builder.py"
CONFIGURE = "vllm_cascade/engine/configure.py"
CPU_BACKEND = "vllm_cascade/attention/cpu/backend.py"
CPU_BUILDER = "vllm_cascade/attention/cpu/builder.py"
CUDA_BACKEND = "vllm_cascade/attention/cuda/backend.py"
DEVICES = "vllm_cascade/engine/devices.py"
LAYER = "vllm_cascade/attention/layer.py"
IMPL = "vllm_cascade/attention/impl.py"
CUDA_BUILDER = "vllm_cascade/attention/cuda/builder.py"
CUDA_METADATA = "vllm_cascade/attention/cuda/metadata.py"
CUDA_IMPL = "vllm_cascade/attention/cuda/impl.py"
FAMILIES = "patches/hooks/models.py"
GPU_WORKER = "vllm_cascade/engine/gpu_worker.py"
POSITIONS = "vllm_cascade/models/rotary.py"
PROBE = "vllm_cascade/models/probe.py"
REFUSALS = "vllm_cascade/engine/refusals.py"
ROWS = "vllm_cascade/step/requests.py"
SEEDS = "vllm_cascade/engine/seeds.py"
STAGES = "vllm_cascade/engine/stages.py"
TEST_KINDS = "tests/cache/test_kinds.py"
TILES = "kernels/triton/tiles.py"
WORKER = "vllm_cascade/engine/worker.py"

OTHER_STAGES = "layers of the other pipeline stages"
ASKED = "how a model of transformers' rotates keys"
STAGE_BEFORE = "what arrives from the stage before"
BOUNDED_TABLE = "slot mapping would read past the end of a bounded table"

WORKERS = (
    *rows(
        "vllm.v1.worker.gpu_worker.Worker",
        compile_or_warm_up_model=overridden("our kernels are compiled, too", "(self)", GPU_WORKER),
        load_model=overridden("layers take our backend", "(self, *, load_dummy_weights=)", WORKER),
        get_kv_cache_spec=overridden("customize_spec asks for the configuration", "(self)", WORKER),
        initialize_from_config=overridden("layers are wired", "(self, kv_cache_config)", WORKER),
        execute_model=overridden("rows are noted", "(self, scheduler_output)", WORKER),
        sample_tokens=overridden("seeds on CPUs", "(self, grammar_output)", WORKER),
        model_runner=read("the runner", "GPUModelRunner", WORKER),
        use_v2_model_runner=read("which runner", "", WORKER),
    ),
    *rows(
        "vllm.v1.worker.worker_base.WorkerBase",
        compile_or_warm_up_model=overridden("our kernels are compiled, too", "(self)", GPU_WORKER),
        model_config=read("token ids are scored by their text", "", WORKER),
        parallel_config=read("ranks that keep the same tokens", "", WORKER),
        vllm_config=read("the policy", "", WORKER),
    ),
    *rows(
        "vllm.v1.worker.worker_base",
        CompilationTimes=given("what compiling took", GPU_WORKER),
    ),
    *rows("vllm.v1.worker.cpu_worker", CPUWorker=given("the base of ours", DEVICES, WORKER)),
    *rows(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        attn_groups=read("the metadata builder", "list[list[AttentionGroup]]", WORKER),
        discard_request_mask=read("rows whose samples are thrown away", "", SEEDS),
        get_model=called("is given our positions", "(self)", WORKER),
        input_batch=read("the first runner's rows", "", ROWS, SEEDS, WORKER),
        device=read(STAGE_BEFORE, "", STAGES),
        dtype=read(STAGE_BEFORE, "", STAGES),
        intermediate_tensors=read(STAGE_BEFORE, "IntermediateTensors | None", STAGES),
        kv_caches=read("what is copied is whole pages", "list[torch.Tensor]", WORKER),
        max_num_tokens=read(STAGE_BEFORE, "", STAGES),
        requests=read("the first runner's requests", "dict[str, CachedRequestState]", ROWS),
    ),
    *rows(
        "vllm.model_executor.models.interfaces.SupportsPP",
        make_empty_intermediate_tensors=called(
            STAGE_BEFORE, "_MakeEmptyIntermediateTensors", PROBE, STAGES
        ),
    ),
    *rows(
        "vllm.v1.utils.CpuGpuBuffer",
        gpu=read("how wide a block table is", "", GPU_WORKER),
        np=read("the mask on the host", "np.ndarray", SEEDS),
    ),
    *rows(
        "vllm.v1.worker.gpu.block_table.BlockTables",
        input_block_tables=read("how wide a block table is", "list[torch.Tensor]", GPU_WORKER),
    ),
    *rows(
        "vllm.v1.worker.gpu_input_batch.CachedRequestState",
        sampling_params=read("a request's own policy", "SamplingParams | None", ROWS),
    ),
    *rows(
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        block_table=read(BOUNDED_TABLE, "", WORKER),
        generators=read("hidden from rows that must not draw", "dict[int, torch.Generator]", SEEDS),
        max_num_reqs=read("when to forget requests", "", ROWS),
        num_reqs=read("rows in use", "int", ROWS, SEEDS),
        req_ids=read("whose a row is", "list[str]", ROWS),
        token_ids_cpu=read("a row's tokens", "", ROWS),
    ),
    *rows(
        "vllm.v1.worker.block_table.MultiGroupBlockTable",
        block_tables=read(BOUNDED_TABLE, "", WORKER),
    ),
    *rows(
        "vllm.v1.worker.block_table.BlockTable",
        slot_mapping_mode=read(BOUNDED_TABLE, "", WORKER),
    ),
    *rows("vllm.v1.worker.block_table.SlotMappingMode", NONE=read(BOUNDED_TABLE, "", WORKER)),
    *rows(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        attn_groups=read("the metadata builder", "", WORKER),
        get_model=called("is given our positions", "(self)", WORKER),
        kv_caches=read("what is copied is whole pages", "", WORKER),
        req_states=read("the second runner's requests", "", ROWS),
    ),
    *rows(
        "vllm.v1.worker.gpu.states.RequestState",
        index_to_req_id=read("whose a row is", "dict[int, str]", ROWS),
        last_sampled_tokens=read("the token before", "", ROWS),
    ),
    *rows(
        "vllm.v1.worker.utils.AttentionGroup",
        get_metadata_builder=called("the metadata builder", "(self, ubatch_id=)", WORKER),
    ),
)

ATTENTION = (
    *rows(
        "vllm.v1.attention.backend.AttentionBackend",
        customize_spec=overridden("a layer's cache becomes a bounded one", "(spec)", BACKEND),
        forward_includes_kv_cache_update=overridden("nobody else writes", "bool", BACKEND),
        get_builder_cls=overridden("our builder", "()", CPU_BACKEND, CUDA_BACKEND),
        get_impl_cls=overridden("our implementation", "()", CPU_BACKEND, CUDA_BACKEND),
        get_name=overridden("a name that vLLM knows", "()", CPU_BACKEND, CUDA_BACKEND),
        get_supported_kernel_block_sizes=overridden(
            "pages we can have", "(kv_cache_spec=)", CPU_BACKEND, CUDA_BACKEND
        ),
        supported_dtypes=overridden("models we can have", "ClassVar[list[torch.dtype]]", BACKEND),
        supported_kv_cache_dtypes=overridden(
            "what keys and values may be stored in", "ClassVar[list['CacheDType']]", CPU_BACKEND
        ),
        supported_kv_cache_layouts=overridden("pages we can have", "()", BACKEND),
        supports_attn_type=overridden("decoders only", "(attn_type)", BACKEND),
        supports_head_size=overridden("models the kernels can have", "(head_size)", CUDA_BACKEND),
        supports_sink=overridden("models the kernels can have", "()", CUDA_BACKEND),
        supports_sliding_window=overridden("models the kernels can have", "()", CUDA_BACKEND),
    ),
    *rows(
        "vllm.v1.attention.backend",
        AttentionLayer=given("the layer that calls us", IMPL, WORKER),
        AttentionMetadata=given("the base of ours", BUILDER, CPU_BUILDER, CUDA_METADATA),
        MultipleOf=called("pages we can have", "(base)", CPU_BACKEND, CUDA_BACKEND),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionLayer",
        _k_scale=read("steps of quantised keys", "torch.Tensor", WORKER),
        _v_scale=read("steps of quantised values", "torch.Tensor", WORKER),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionType",
        DECODER=read("decoders only", "", BACKEND, IMPL),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionImpl",
        __init__=overridden(
            "refuses what no policy supports",
            "(self, num_heads, head_size, scale, num_kv_heads=, alibi_slopes=, sliding_window=, "
            "kv_cache_dtype=, logits_soft_cap=, attn_type=, kv_sharing_target_layer_name=)",
            IMPL,
        ),
        forward=overridden(
            "attends, and moves the cache to its next state",
            "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, "
            "output_block_scale=)",
            LAYER,
        ),
        head_size=overridden("kept where vLLM looks for it", "int", LAYER),
        kv_cache_dtype=overridden("kept where vLLM looks for it", "str", IMPL),
        num_heads=overridden("kept where vLLM looks for it", "int", LAYER),
        scale=overridden("kept where vLLM looks for it", "float", LAYER),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionMetadataBuilder",
        __init__=overridden(
            "positions and counters",
            "(self, kv_cache_spec, layer_names, vllm_config, device)",
            BUILDER,
        ),
        build=overridden(
            "plans a step",
            "(self, common_prefix_len, common_attn_metadata, fast_build=)",
            *(CPU_BUILDER, CUDA_BUILDER),
        ),
        _cudagraph_support=overridden(
            "no full graphs", "ClassVar[AttentionCGSupport]", CPU_BUILDER
        ),
        get_cudagraph_support=overridden(
            "full graphs for decode", "(vllm_config, kv_cache_spec)", CUDA_BUILDER
        ),
        device=read("where step rows go", "", CUDA_BUILDER),
        kv_cache_spec=overridden("is always ours", "", BUILDER),
        layer_names=read("layers to wire", "", WORKER),
        reorder_batch_threshold=overridden("rows stay as they are", "int | None", BUILDER),
    ),
    *rows(
        "vllm.v1.kv_cache_interface",
        UniformTypeKVCacheSpecs=given("all kinds are one group", CUDA_BUILDER, TEST_KINDS),
    ),
    *rows(
        "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs",
        kv_cache_specs=read("layers of all kinds", "dict[str, KVCacheSpec]", CUDA_BUILDER),
    ),
    *rows(
        "vllm.v1.attention.backend.AttentionCGSupport",
        NEVER=read("no full graphs", "", CPU_BUILDER, CUDA_BUILDER),
        UNIFORM_SINGLE_TOKEN_DECODE=read("full graphs for decode", "", CUDA_BUILDER),
    ),
    *rows(
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        block_table_tensor=read("pages of each row", "torch.Tensor", CPU_BUILDER, CUDA_BUILDER),
        is_prefilling=read(
            "rows that read their prompts", "torch.Tensor | None", CUDA_BUILDER, ROWS
        ),
        max_query_len=read("whether all decode", "int", CUDA_BUILDER),
        num_reqs=read("rows", "int", CUDA_BUILDER),
        query_start_loc_cpu=read("where rows begin", "torch.Tensor", BUILDER, ROWS),
        replace=called("a warm-up prefills nothing", "(self, **kwargs)", CUDA_BUILDER),
        req_idx=read("whose a row is", "np.ndarray | None", ROWS),
        seq_lens=read("where rows end, on the device", "torch.Tensor", CUDA_BUILDER),
        seq_lens_cpu_upper_bound=read(
            "where rows end", "torch.Tensor | None", BUILDER, CUDA_BUILDER, ROWS
        ),
    ),
    *rows(
        "vllm.v1.attention.backends.registry",
        register_backend=called(
            "layers find ours by a name of vLLM's", "(backend, class_path=, is_mamba=)", WORKER
        ),
    ),
    *rows(
        "vllm.v1.attention.backends.registry.AttentionBackendEnum",
        CPU_ATTN=read("the only backend on CPUs", "", DEVICES),
        CUSTOM=read("a backend from outside", "", CONFIGURE, DEVICES, REFUSALS),
        clear_override=called("later engines find vLLM's own", "(self)", WORKER),
    ),
    *rows(
        "vllm.v1.attention.selector",
        _cached_get_attn_backend=called(
            "forgets as our backend comes and goes",
            "(backend, attn_selector_config, num_heads=, *, _run_kv_cache_dtype=)",
            WORKER,
        ),
    ),
    *rows(
        "vllm.v1.attention.selector._cached_get_attn_backend",
        cache_clear=called("forgets as our backend comes and goes", "", WORKER),
    ),
    *rows(
        "vllm.distributed",
        get_pp_group=called(OTHER_STAGES, "()", PROBE, STAGES),
        get_tp_group=called("ranks keep the same tokens", "()", LAYER),
        tensor_model_parallel_all_gather=called(
            "ranks keep the same tokens", "(input_, dim=)", CUDA_IMPL, LAYER
        ),
        tensor_model_parallel_all_reduce=called("ranks keep the same tokens", "(input_)", LAYER),
    ),
    *rows(
        "vllm.distributed.parallel_state.GroupCoordinator",
        cpu_group=read(OTHER_STAGES, "ProcessGroup", STAGES),
        device_group=read("ranks keep the same tokens", "ProcessGroup", LAYER),
        is_first_rank=read("the first stage expects nothing", "", PROBE, STAGES),
        world_size=read(OTHER_STAGES, "int", LAYER, STAGES),
    ),
    *rows(
        "vllm.model_executor.layers.attention.Attention",
        impl=read("ours", "", POSITIONS, WORKER),
        kv_cache=read("a layer's pages", "", WORKER),
        forward=replaced(ASKED, "(self, query, key, value, ...)", PROBE),
        head_size=read(ASKED, "", PROBE),
        layer_name=read("whose kept tokens are recorded", "", IMPL),
        sliding_window=read("layers that do not rotate", "", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.models.utils",
        extract_layer_index=called(
            "layers that do not rotate", "(layer_name, ...)", POSITIONS, PROBE
        ),
    ),
    *rows(
        "vllm.model_executor.models.interfaces",
        supports_multimodal=called(ASKED, "(model)", PROBE),
    ),
    *rows(
        "vllm.model_executor.models.transformers.base.Base",
        device_config=read(ASKED, "", PROBE),
        forward=called(
            ASKED,
            "(self, input_ids, positions, intermediate_tensors=, inputs_embeds=, **kwargs)",
            PROBE,
        ),
        model_config=read(ASKED, "", PROBE),
        vllm_config=read(ASKED, "", PROBE),
    ),
    *rows(
        "vllm.forward_context",
        set_forward_context=called(
            ASKED, "(attn_metadata, vllm_config, num_tokens=, ..., skip_compiled=, ...)", PROBE
        ),
    ),
    *rows(
        "vllm.model_executor.models.registry",
        _TEXT_GENERATION_MODELS=read("the page of models", "", FAMILIES),
        _TRANSFORMERS_SUPPORTED_MODELS=read("the page of models", "", FAMILIES),
    ),
)

ROTATIONS = (
    *rows(
        "vllm.model_executor.layers.rotary_embedding",
        Gemma4RotaryEmbedding=given("one frequency table", POSITIONS),
        Llama3RotaryEmbedding=given("one frequency table", POSITIONS),
        RotaryEmbedding=given("one frequency table", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbeddingBase",
        _compute_inv_freq=called("the frequencies", "(self, base)", POSITIONS),
        base=read("the frequencies", "", POSITIONS),
        cos_sin_cache=read("checked against the frequencies", "torch.Tensor", POSITIONS),
        is_neox_style=read("which channels pair up", "", POSITIONS),
        max_position_embeddings=read("checked against the frequencies", "", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.layers.rotary_embedding.LinearScalingRotaryEmbedding",
        scaling_factors=read("one frequency table, if one factor", "list[float]", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.layers.rotary_embedding.MRotaryEmbedding",
        mscale=read("checked against the frequencies", "", POSITIONS),
        scaling_factor=read("the frequencies", "", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.layers.rotary_embedding.Phi3LongRoPEScaledRotaryEmbedding",
        _compute_inv_freq=called("the frequencies", "(self, rescale_factors)", POSITIONS),
        long_factor=read("the frequencies of long streams", "", POSITIONS),
        long_mscale=read("checked against the frequencies", "", POSITIONS),
        max_position_embeddings=read("checked against the frequencies", "", POSITIONS),
        original_max_position_embeddings=read("which of two tables", "", POSITIONS),
        short_factor=read("the frequencies of short streams", "", POSITIONS),
        short_mscale=read("checked against the frequencies", "", POSITIONS),
        use_long_rope=read("which of two tables", "", POSITIONS),
    ),
    *rows(
        "vllm.model_executor.layers.rotary_embedding.YaRNScalingRotaryEmbedding",
        _compute_inv_freq=called("the frequencies", "(self, scaling_factor)", POSITIONS),
        mscale=read("checked against the frequencies", "", POSITIONS),
        scaling_factor=read("the frequencies", "", POSITIONS),
    ),
)

KERNELS = (
    *rows(
        "triton.knobs.runtime_knobs",
        interpret=read("whether kernels are interpreted", "env_bool", AOT, TILES),
    ),
    *rows(
        "triton.runtime.jit.JITFunction",
        arg_names=read("what a launch was given", "", AOT),
        fn=read("a kernel's name", "", AOT),
        params=read("what a launch is compiled for", "", AOT),
        run=replaced("launches are noted", "(self, *args, grid, warmup, **kwargs)", AOT),
    ),
    *rows(
        "triton.runtime.jit.KernelParam",
        is_constexpr=read("what a launch is compiled for", "", AOT),
        name=read("what a launch is compiled for", "", AOT),
    ),
    *rows(
        "triton",
        compile=called("for a GPU that is not here", "(src, target=, options=, _env_vars=)", AOT),
    ),
    *rows(
        "triton.compiler",
        ASTSource=called("for a GPU that is not here", "(fn, signature, constexprs=, attrs=)", AOT),
    ),
    *rows(
        "triton.backends.compiler",
        GPUTarget=called("for a GPU that is not here", "(backend, arch, warp_size)", AOT),
    ),
    *rows(
        "triton.compiler.CompiledKernel",
        asm=read("what a binary needs", "", AOT),
        metadata=read("what a binary needs", "", AOT),
    ),
    *rows(
        "torch._library.custom_ops.CustomOpDef",
        _init_fn=called("an operator without data or dispatch", "", LAUNCHERS),
    ),
)
