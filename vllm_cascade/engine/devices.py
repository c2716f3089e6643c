# SPDX-License-Identifier: Apache-2.0
"""The devices that policies run on, and the contract that each of them fulfils."""

import os
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import import_pynvml
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_cascade.attention.cuda.rule_room import MOST_BYTES, too_large
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.engine.refusals import REFUSALS, Refusal
from vllm_cascade.kernels.columns import LONGEST_HEAD, MOST_RULES, MOST_UNIT
from vllm_cascade.log import logger
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import DEFAULT_RECALL, KVPolicyError
from vllm_cascade.sessions.copies import Copies, StreamCopies

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

WITHOUT_CPU_KERNEL = ("bailing_hybrid", "jamba", "kimi_linear", "olmo_hybrid")
"""Models whose recurrent layers vLLM runs on GPUs only, by ``model_type``."""

KIMI_DELTA = ("AliceAIForCausalLM",)
"""The same by architecture: their checkpoints' own code names the ``model_type``."""

DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with gated delta nets, by ``model_type``."""

OLDEST_CARD = DeviceCapability(8, 0)
"""Compute capability of the oldest cards that kernels are compiled for."""

OFFSETS = 1 << 31
"""Bound of the offsets, in numbers, by which CUDA's kernels reach a request's rows of a head."""


class Device:
    """Everything that the engine asks of a device; one subclass per device, listed in ``DEVICES``.

    Before a model is loaded the engine uses the attributes and methods below. Afterwards it uses
    the base classes of what they name: ``KVPolicyWorker`` (``engine/worker.py``),
    ``KVPolicyBackend``, ``KVPolicyImpl`` (``attention/``) and ``StepBuilder``
    (``step/builder.py``). A device overrides their methods that raise ``NotImplementedError``.

    Attributes:
        name: the device's type in PyTorch, and its key in ``DEVICES``.
        stock_worker: name of vLLM's worker class.
        worker: name of our worker class, a ``KVPolicyWorker``, which replaces it.
        slot: vLLM's backend name that our backend is registered under while layers are built.
        backend: name of our backend class, a ``KVPolicyBackend``. It names a ``StepBuilder`` and a
            ``KVPolicyImpl``.
        latent_slots, latent_backend: the same for models with multi-head latent attention.
        page_tokens: tokens of a page without ``--block-size``; None: vLLM's configuration has it.
        most_rules: maximum further rules of one request's own policy; None: no limit.
        own_refusals: what this device cannot run. The first that applies is raised.
        default_recall: units that are recalled if nothing is said about it.
        session_copies: class of copies between pages and sessions in host memory.
        pages_on_host: whether pages lie in the host's memory, beside evicted units.
        default_check: ``--kv-policy-check`` where it is not given.
        check_repeats: runs of a step that must give the same bytes in that check.
    """

    name: ClassVar[str]
    stock_worker: ClassVar[str]
    worker: ClassVar[str]
    slot: ClassVar[AttentionBackendEnum]
    backend: ClassVar[str]
    latent_slots: ClassVar[tuple[AttentionBackendEnum, ...]] = ()
    latent_backend: ClassVar[str] = ""
    page_tokens: ClassVar[int | None] = None
    most_rules: ClassVar[int | None] = None
    own_refusals: ClassVar[tuple[Refusal, ...]] = ()
    default_recall: ClassVar[int] = 0
    session_copies: ClassVar[type[Copies]] = Copies
    pages_on_host: ClassVar[bool] = False
    default_check: ClassVar[str] = "off"
    check_repeats: ClassVar[int] = 2

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """All refusals on this device: its own, another worker, and those of every device."""
        worker = Refusal(
            "worker",
            lambda config, _: (
                config.parallel_config.worker_cls not in (self.worker, self.stock_worker)
            ),
            "--worker-cls cannot be combined with --kv-policy, which brings its own worker; "
            "remove one of the two",
        )
        return (*self.own_refusals, worker, *REFUSALS)

    def backends(self, config: VllmConfig) -> dict[AttentionBackendEnum, str]:
        """Our backend classes for a model, by the name of vLLM's that each replaces."""
        slots = self.latent_slots if config.model_config.use_mla else ()
        return {self.slot: self.backend, **dict.fromkeys(slots, self.latent_backend)}

    def is_current(self) -> bool:
        """Whether vLLM runs on this device in this process."""
        raise NotImplementedError

    def memory_bytes(self) -> int:
        """Memory of a device whose stores of evicted units take some of it."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What a check's verdict holds for, besides versions of packages."""
        return {}

    def prepare(self) -> None:
        """Choose what vLLM reads from the environment; called before ``config`` is made."""

    def restore(self, config: VllmConfig, arguments: EngineArgs) -> None:
        """Restore what vLLM changed for kernels and prefix caching of its own that ours replace.

        Args:
            config: changed in place; called before all checks.
            arguments: what the user asked for, with vLLM's defaults.
        """
        if config.model_config.is_hybrid:
            mode = getattr(arguments, "mamba_cache_mode", None)  # vLLM is about to remove it
            config.cache_config.mamba_cache_mode = mode or "none"
            config.cache_config.mamba_block_size = arguments.mamba_block_size

    def configure(self, config: VllmConfig, policy: Policy) -> None:
        """Change ``config`` further; called once, after all checks have passed."""


class CPU(Device):
    """C++ or PyTorch kernels; Model Runner V1."""

    name = "cpu"
    pages_on_host = True
    stock_worker = "vllm.v1.worker.cpu_worker.CPUWorker"
    worker = "vllm_cascade.engine.cpu_worker.CPUKVPolicyWorker"
    slot = AttentionBackendEnum.CPU_ATTN  # the CPU platform knows no other
    backend = "vllm_cascade.attention.cpu.backend.CPUKVPolicyBackend"
    latent_slots = AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA
    latent_backend = "vllm_cascade.attention.cpu.backend.CPULatentBackend"
    # vLLM's own default, which it sets at model load from 0.33 on. Units may be pages, and
    # admission counts pages, so it must be known earlier.
    page_tokens = 128
    default_recall = DEFAULT_RECALL  # not on CUDA, which allocates all stores in full at start
    own_refusals = (
        Refusal(
            "recurrent layers without a kernel",
            lambda config, _: _lacks_cpu_kernel(config),
            "vLLM's CPU platform has no kernel for this model's recurrent layers (Mamba-1, Kimi's "
            "delta attention and others), with or without a policy; use another model or a GPU",
        ),
        Refusal(
            "type of delta nets",
            lambda config, _: (
                _model_type(config) in DELTA_NETS and config.model_config.dtype != torch.bfloat16
            ),
            "vLLM's CPU kernels for gated delta nets (Qwen3-Next, Qwen 3.5) compute in bfloat16 "
            "only, with or without a policy; set --dtype bfloat16",
        ),
        Refusal(
            "recall of odd head sizes",
            lambda config, policy: (
                policy.recall > 0 and any(size % 4 for size in _head_sizes(config.model_config))
            ),
            "recall multiplies four channels of a key at once, and the model has a head size that "
            "is no multiple of 4; set --kv-recall 0",
        ),
        Refusal(  # first, because vLLM then ignores the variable that the next message names
            "watermarks on the CPU",
            lambda config, _: config.watermark_config is not None,
            "--watermark-config cannot be combined with --kv-policy on the CPU: vLLM watermarks in "
            "Model Runner V2 only, which is not tested with a policy there; remove one of the two",
        ),
        Refusal(
            "Model Runner V2 on the CPU",
            lambda config, _: config.use_v2_model_runner,
            f"Model Runner V2 is not tested with --kv-policy on the CPU; set {RUNNER}=0",
        ),
    )

    def is_current(self) -> bool:
        return current_platform.is_cpu()

    def prepare(self) -> None:
        """Choose Model Runner V1, where nothing else is asked for.

        Where Triton has a CPU backend, as in vLLM's image for CPUs, vLLM would choose V2.
        """
        if HAS_TRITON and RUNNER not in os.environ:
            os.environ[RUNNER] = "0"
            envs.disable_envs_cache()  # an earlier engine of this process may have read it
            logger.info("KV policy: engines on CPUs have Model Runner V1 (%s=0)", RUNNER)

    def restore(self, config: VllmConfig, arguments: EngineArgs) -> None:
        super().restore(config, arguments)
        if not config.model_config.use_mla:
            return
        # vLLM has set the defaults of what was None.
        assert arguments.enable_chunked_prefill is not None
        assert arguments.max_num_batched_tokens is not None
        assert arguments.enable_prefix_caching is not None
        config.scheduler_config.enable_chunked_prefill = arguments.enable_chunked_prefill
        config.scheduler_config.max_num_batched_tokens = arguments.max_num_batched_tokens
        config.cache_config.enable_prefix_caching = arguments.enable_prefix_caching
        config.cache_config.block_size = arguments.block_size or config.cache_config.block_size


class CUDA(Device):
    """Triton kernels; Model Runner V1 and V2."""

    name = "cuda"
    stock_worker = "vllm.v1.worker.gpu_worker.Worker"
    worker = "vllm_cascade.engine.gpu_worker.GPUKVPolicyWorker"
    slot = AttentionBackendEnum.CUSTOM
    backend = "vllm_cascade.attention.cuda.backend.CUDAKVPolicyBackend"
    latent_slots = (AttentionBackendEnum.CUSTOM,)
    latent_backend = "vllm_cascade.attention.cuda.backend.CUDALatentBackend"
    most_rules = MOST_RULES
    session_copies = StreamCopies
    default_check = "once"
    check_repeats = 10
    own_refusals = (
        Refusal(
            "old cards",
            lambda *_: (
                (card := current_platform.get_device_capability()) is not None
                and card < OLDEST_CARD
            ),
            f"the kernels of KV policies are compiled for cards of compute capability "
            f"{OLDEST_CARD.as_version_str()} and newer (Ampere); use --kv-policy full on this one",
        ),
        Refusal(
            "attention backend",
            lambda config, _: (
                config.attention_config.backend not in (None, AttentionBackendEnum.CUSTOM)
                or config.attention_config.mla_prefill_backend
                not in (None, MLAPrefillBackendEnum.CUSTOM)
                or bool(config.attention_config.backend_per_kind)
            ),
            "--attention-backend, and mla_prefill_backend and backend_per_kind of "
            "--attention-config, cannot be combined with --kv-policy, which brings its own "
            "backend; remove one of the two",
        ),
        Refusal(
            "batch invariance on CUDA",
            lambda *_: envs.VLLM_BATCH_INVARIANT,
            "VLLM_BATCH_INVARIANT=1 cannot be combined with --kv-policy on CUDA: the fewer "
            "requests decode, the more parts their cached tokens are attended in, and sums are "
            "rounded differently; unset it, or use --kv-policy full",
        ),
        Refusal(
            "start plans on CUDA",
            lambda _, policy: (
                policy.recall > 0 and policy.recall_memory is None and envs.VLLM_ENABLE_STARTUP_PLAN
            ),
            "VLLM_ENABLE_STARTUP_PLAN=1 repeats the size that the cache had at an earlier start, "
            "and the default of recall_memory, which depends on the host's free memory, also "
            "decides about the device's; set recall_memory, or unset the variable",
        ),
        Refusal(
            "long heads on CUDA",
            lambda config, _: _longest_head(config.model_config) > LONGEST_HEAD,
            f"the model has attention heads of more than {LONGEST_HEAD} channels, for which there "
            "are no kernels on CUDA; use --kv-policy full",
        ),
        Refusal(
            "cache type on CUDA",
            lambda config, _: (
                config.cache_config.cache_dtype
                not in (
                    "auto",
                    str(config.model_config.dtype).removeprefix("torch."),
                    *CODES,
                )
            ),
            "--kv-cache-dtype must be auto (a 16-bit model's dtype if its checkpoint has keys and "
            "values in another type) or an 8-bit type with --kv-policy on CUDA: the kernels read "
            "keys and values in the model's own type or in 8 bits",
        ),
        Refusal(
            "recall of long units on CUDA",
            lambda _, policy: policy.recall > 0 and policy.unit > MOST_UNIT,
            f"recall's kernels take units of {MOST_UNIT} tokens at most; set unit to no more, or "
            "--kv-recall 0",
        ),
        Refusal(
            "rules of kept prompts on CUDA",
            lambda config, policy: (
                policy.keep_prompt > 0 and too_large(policy, config.scheduler_config.max_num_seqs)
            ),
            f"each length of a kept prompt has eviction rules of its own, and those of "
            f"--max-num-seqs requests take more than {MOST_BYTES >> 20} MiB of the GPU's memory; "
            "set overflow or --max-num-seqs to less, or --kv-keep-prompt 0",
        ),
        Refusal(
            "cached tokens on CUDA",
            lambda config, policy: policy.capacity * _row_size(config.model_config) >= OFFSETS,
            "the kernels reach a request's cached rows of a head by offsets of 32 bits, so its "
            "cached tokens times the channels of a row, which are a key's and a value's, must be "
            f"below {OFFSETS:,}: with 128 channels each, fewer than {OFFSETS // 256:,} tokens; "
            "lower --kv-budget, or --kv-keep-prompt or --kv-recall",
        ),
        Refusal(
            "recalled rows in 8 bits on CUDA",
            lambda _, policy: policy.recall > 0 and policy.recall_rows == "int8",
            "on CUDA recall stores rows as they are in the cache; set recall_rows to exact",
        ),
        Refusal(
            "untested recurrent layers on CUDA",
            lambda config, _: _lacks_cpu_kernel(config),
            "this model's recurrent layers (Mamba-1, Kimi's delta attention, OLMo Hybrid, Ring) "
            "are not tested with --kv-policy: vLLM runs them on GPUs only; use --kv-policy full",
        ),
        Refusal(
            "attention backend of drafts",
            lambda config, _: (
                (drafts := config.speculative_config) is not None
                and drafts.attention_backend is not None
            ),
            "attention_backend in --speculative-config cannot be combined with --kv-policy, which "
            "brings its own backend; remove it",
        ),
    )

    def is_current(self) -> bool:
        return current_platform.is_cuda()

    def restore(self, config: VllmConfig, arguments: EngineArgs) -> None:
        super().restore(config, arguments)
        given = arguments.attention_backend, arguments.attention_config.backend
        # For Gemma 4 vLLM names a backend itself on cards without FlashAttention 4.
        if all(one in (None, "auto") for one in given):
            config.attention_config.backend = None

    def memory_bytes(self) -> int:
        try:
            return int(current_platform.get_device_total_memory())
        except import_pynvml().NVMLError:  # GB10 shares the host's memory; NVML reports none
            return int(torch.cuda.get_device_properties(0).total_memory)

    def facts(self) -> dict[str, Any]:
        from vllm_cascade.attention.cuda.repeats import make_repeater  # imports Triton's kernels

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "card": properties.name,
            "capability": [properties.major, properties.minor],
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "repeats": make_repeater() is not None,
        }

    def configure(self, config: VllmConfig, policy: Policy) -> None:
        config.attention_config.backend = self.slot
        if config.model_config.use_mla:
            # This pass, on by default for quantised models, rotates latent keys in vLLM's kernel
            # that writes them to its own slots of the cache.
            config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
            # Or vLLM would select one of its own for prompts, or raise where it has none.
            config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM
        if compiled(policy).moves_tokens:
            logger.warning(
                "KV policy %s: attention runs in PyTorch, outside full CUDA graphs and slower than "
                "the kernels, where tokens are merged or put out of order; importance and order "
                "say so.",
                policy.name,
            )


def _model_type(config: VllmConfig) -> str | None:
    return getattr(config.model_config.hf_text_config, "model_type", None)


def _lacks_cpu_kernel(config: VllmConfig) -> bool:
    names = getattr(config.model_config.hf_text_config, "architectures", None) or ()
    return _model_type(config) in WITHOUT_CPU_KERNEL or any(name in KIMI_DELTA for name in names)


def _head_sizes(model: ModelConfig) -> set[int]:
    """Channels of the heads of all layers, with windows and without."""
    arch = model.model_arch_config
    layers = range(arch.total_num_hidden_layers)
    return {arch.head_size, *(arch[layer].head_size for layer in layers)}


def _longest_head(model: ModelConfig) -> int:
    """Channels of the longest heads; 0 for latent rows."""
    return 0 if model.use_mla else max(_head_sizes(model))


def _row_size(model: ModelConfig) -> int:
    """Channels of the longest cached rows: a key's and a value's, or a latent row's."""
    return max(_head_sizes(model)) * (1 if model.use_mla else 2)


DEVICES: dict[str, Device] = {device.name: device for device in (CPU(), CUDA())}


def this_device() -> Device:
    """The device of vLLM's current platform.

    Raises:
        KVPolicyError: policies do not support it.
    """
    for device in DEVICES.values():
        if device.is_current():
            return device
    raise KVPolicyError(
        "kv_policy: KV policies run on CPUs and on CUDA; remove --kv-policy to run stock vLLM on "
        "this device"
    )


def driver_version() -> str:
    """The NVIDIA driver's version, from NVML; ``unknown`` where NVML is missing (Jetson)."""
    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return "unknown"
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()
