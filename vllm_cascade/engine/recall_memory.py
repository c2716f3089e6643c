# SPDX-License-Identifier: Apache-2.0
"""Sizes an engine's host memory for recall: its default, its bound, and the class that counts it.

``recall_memory`` bounds the stores of all ranks and stages of an engine. Each data-parallel engine
has a bound of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import psutil
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.devices import this_device
from vllm_cascade.log import logger
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.memory import GIB, RecallMemory, check_one_fits
from vllm_cascade.sessions.settings import SessionSettings
from vllm_cascade.step.recall import shape_of_units, unit_shape

SHARE = 0.25
"""Part of the host's available memory, and of a device's, that the default of ``recall_memory`` may
take."""
FEW = 4
"""Fewer requests than this that can recall at a time are worth a warning."""
CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    (
        *("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)
"""Of control groups in versions 2 and 1: the controller in ``MEMBERSHIP``, its folder, the limit,
what is used, and which part of that is a cache of files, which the kernel gives up for a process
that asks for memory."""

UNLIMITED = "full_attention", "attention"
LIMITS_OF_KINDS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Where a model's configuration has the tokens that layers of a kind attend to."""


def available_bytes() -> int:
    """Host memory that this process may still take, within its control groups."""
    free = psutil.virtual_memory().available
    for group, limit, used, cache in _control_groups():
        try:
            most = int((group / limit).read_text()) - int((group / used).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            free = min(free, most + int(dict(line.split() for line in lines)[cache]))
        except (OSError, ValueError, KeyError):  # no such control group, or no limit ("max")
            continue
    return free


def _engine_bytes(config: VllmConfig) -> int:
    """Available host memory of one of the engines on this host, less that of its sessions."""
    sessions = SessionSettings.of(config.additional_config)
    share = available_bytes() // (config.parallel_config.data_parallel_size_local or 1)
    return share - (0 if sessions is None else sessions.memory_bytes)


def _free_bytes(config: VllmConfig) -> int:
    """Host memory of an engine beside its sessions, token ids and a pool of a given size."""
    pool = config.cache_config.kv_cache_memory_bytes if this_device().pages_on_host else None
    taken = (pool or 0) + _token_id_bytes(config)[0]
    return max(_engine_bytes(config) - taken * config.parallel_config.world_size, 0)


def _token_id_bytes(config: VllmConfig) -> tuple[int, int]:
    """Memory in which a worker of Model Runner V2 holds token ids: of the host, and of the device.

    vLLM allocates an int32 ``[max_num_seqs, max_model_len]`` when the worker starts. Where memory
    cannot be pinned it is on the device. Model Runner V1 takes memory as streams grow.
    """
    if not config.use_v2_model_runner:
        return 0, 0
    size = 4 * config.scheduler_config.max_num_seqs * config.model_config.max_model_len
    drafts = config.speculative_config
    if not is_uva_available() or (drafts is not None and drafts.use_ngram()):
        return 0, size
    return 1 << (size - 1).bit_length(), 0  # pinned memory is taken in powers of two


def log_token_ids(config: VllmConfig) -> None:
    """Warn if ``_token_id_bytes`` are many."""
    for size, where in zip(_token_id_bytes(config), ("host", "device"), strict=True):
        if size > GIB:
            logger.warning(
                "KV policy: the table of the token ids of --max-num-seqs %d requests of "
                "--max-model-len %d tokens takes %.3g GiB of %s memory at start, in each worker; "
                "lower one of the two",
                config.scheduler_config.max_num_seqs,
                config.model_config.max_model_len,
                size / GIB,
                where,
            )


def memory_beside(config: VllmConfig) -> int:
    """Host memory for a worker's pool beside all that evicted units and sessions may take."""
    policy = policy_of(config.additional_config)
    recall = 0.0 if policy is None or not policy.recall else policy.recall_memory or 0.0
    return (_engine_bytes(config) - int(recall * GIB)) // config.parallel_config.world_size


def _control_groups() -> Iterator[tuple[Path, str, str, str]]:
    """The folder of each group that this process is in, and the names of its numbers.

    A unit of systemd or a job of Slurm is a group within groups, each with a limit of its own.
    """
    paths: dict[str, str] = {}
    try:
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    except (OSError, ValueError):  # not Linux's
        pass
    for controller, name, limit, used, cache in VERSIONS:
        root = CGROUP / name
        group = root / paths.get(controller, "")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield folder, limit, used, cache


def model_shape(spec: KVPolicySpec, num_layers: int) -> UnitShape:
    """Shape of a rank's units in all layers of the model that recall.

    Args:
        spec: Spec of any layer under the policy, maybe one with a window.
        num_layers: Layers with this spec in a worker that runs all of them.
    """
    if not spec.kinds:
        return unit_shape(spec, spec.num_layers or num_layers)
    kind, *_ = spec.kinds
    own = replace(spec, num_kv_heads=kind.num_kv_heads, head_size=kind.head_size)
    return unit_shape(own, kind.num_layers)


def _sees_all(text: PretrainedConfig, kind: str) -> bool:
    """Whether layers of a kind with windows or chunks run under the engine's policy.

    So they do with ``--disable-sliding-window``, and where no stream is longer than a window.
    """
    limit = getattr(text, LIMITS_OF_KINDS.get(kind, ""), 0)
    last = getattr(text, "max_position_embeddings", None)
    return limit is None or (isinstance(limit, int) and last is not None and limit >= last)


def _shape_of_config(config: VllmConfig, policy: Policy) -> tuple[UnitShape, bool]:
    """Shape of a rank's units in all layers, before the model exists.

    Returns:
        The shape, and whether it is exact. Otherwise it is at least as large: of layers that
        differ, it has the most heads and the longest.
    """
    model, parallel = config.model_config, config.parallel_config
    text, dtype = model.hf_text_config, config.cache_config.cache_dtype
    kinds = getattr(text, "layer_types", None) or ()
    kinds_of_owners = kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)]
    whole = [
        layer
        for layer, kind in enumerate(kinds_of_owners)
        if kind in UNLIMITED or _sees_all(text, kind)
    ]
    arch = model.model_arch_config
    layers = [arch[layer] for layer in whole] or [arch]
    shape = shape_of_units(
        policy,
        len(whole) or model.get_total_num_hidden_layers(),
        max(model.get_num_kv_heads(parallel, layer) for layer in layers),
        max(layer.head_size for layer in layers),
        kv_cache_dtype_str_to_dtype(dtype, model),
        dtype.endswith("per_token_head"),
        model.use_mla,
    )
    return shape, len(set(kinds)) <= 1


def with_defaults(policy: Policy, config: VllmConfig) -> Policy:
    """Set the default of ``recall_memory``, which depends on host, model and engine.

    It is what ``max_num_seqs`` requests of ``max_model_len`` tokens can need, at most ``SHARE`` of
    the available memory, and no less than one request needs. Stores that also take memory of the
    device take at most ``SHARE`` of that.

    Raises:
        KVPolicyError: the memory has no room for the longest request. Without an exact shape the
            scheduler raises it, once the model is loaded.
    """
    if not policy.recall:
        return policy
    shape, is_exact = _shape_of_config(config, policy)
    available = _free_bytes(config)
    if policy.recall_memory is None:
        memory = _count(shape, policy, available, config)
        longest = config.model_config.max_model_len
        one = memory.most_need(longest)
        most = memory.most_bytes(longest, config.scheduler_config.max_num_seqs) * memory.ranks
        least = memory.bytes_of(one) * memory.ranks
        limit = max(min(most, SHARE * available), least)
        if memory.device_bytes:
            stages = config.parallel_config.pipeline_parallel_size
            room = int(SHARE * this_device().memory_bytes()) * stages
            limit = max(min(limit, memory.bytes_on_device(room) * memory.ranks), least)
        policy = policy.model_copy(update={"recall_memory": math.ceil(limit * 1000 / GIB) / 1000})
    if is_exact:
        open_memory(shape, policy, config)
    return policy


def shortage(policy: Policy, config: VllmConfig) -> str:
    """What the host lacks for ``policy.recall_memory``; empty if there is enough."""
    available = _free_bytes(config)
    if not policy.recall or (policy.recall_memory or 0) * GIB <= available:
        return ""
    return (
        f"recall_memory {policy.recall_memory:.3g} GiB is more than the {available / GIB:.3g} GiB "
        "of host memory that are available beside --kv-cache-memory-bytes and --kv-sessions-memory"
    )


def open_memory(shape: UnitShape, policy: Policy, config: VllmConfig) -> RecallMemory:
    """Create the count of an engine's stores.

    Args:
        shape: A rank's units in all layers of the model.

    Raises:
        KVPolicyError: The memory has no room for the longest request.
    """
    assert policy.recall_memory is not None
    memory = _count(shape, policy, int(policy.recall_memory * GIB), config)
    check_one_fits(memory, policy, config.model_config.max_model_len)
    return memory


def _count(shape: UnitShape, policy: Policy, limit: int, config: VllmConfig) -> RecallMemory:
    """The device's count of an engine's stores, for at most ``limit`` bytes over all ranks."""
    ranks = config.parallel_config.tensor_parallel_size
    backend = resolve_name(this_device().backend)
    memory: RecallMemory = backend.count_stores(shape, compiled(policy), limit // ranks, config)
    memory.ranks = ranks
    return memory


def log_memory(memory: RecallMemory, policy: Policy, config: VllmConfig) -> None:
    """Log the bound, and how many of the longest requests fit in it; warn if these are few."""
    most, limits = config.model_config.max_model_len, config.scheduler_config
    requests = memory.capacity // memory.most_need(most)
    logger.info(
        "KV policy %s: recall may take %.3g GiB of host memory (recall_memory), enough for "
        "%d of the longest requests at once (%d tokens, of which %d stored); --max-num-seqs is %d",
        policy.name,
        memory.limit_bytes / GIB,
        requests,
        most,
        min(policy.recall_store, most),
        limits.max_num_seqs,
    )
    if requests < min(FEW, limits.max_num_seqs):
        logger.warning(
            "KV policy %s: recall_memory has room for %d of the longest requests, and further ones "
            "that evict wait until it is free; raise recall_memory, or lower recall_store (%d)",
            policy.name,
            requests,
            policy.recall_store,
        )
