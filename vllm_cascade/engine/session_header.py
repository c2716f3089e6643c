# SPDX-License-Identifier: Apache-2.0
"""What the states of requests depend on, as text in files of sessions and in their ids."""

import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.transformers_utils.config import iter_rope_parameters
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

import vllm_cascade
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.log import logger
from vllm_cascade.models.rotary import longest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.sessions.files import FORMAT
from vllm_cascade.step.drafts import MODEL_DRAFTERS

LAYOUT = (
    *("block_size", "page_size_bytes", "num_kv_heads", "head_size", "dtype", "kv_quant_mode"),
    *("page_slots", "window", "num_sets", "words", "shapes", "dtypes"),
)
"""Attributes of cache specs that pages depend on."""
UNRELATED = {"recall_memory"}
"""Settings of a policy that states do not depend on."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Places of a weight file that are read to recognise it, and bytes of each."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How the names of weight files end."""
NAMELESS = {"_name_or_path", "transformers_version"}
"""Entries of a model's configuration that states do not depend on."""


def digest(thing: Any) -> str:
    text = json.dumps(thing, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def policy_settings(policy: Policy, tables: dict[str, str] | None = None) -> dict[str, Any]:
    """A policy's settings that states depend on; of a table of scores also its content.

    Args:
        tables: digests of tables by path, as they were read before; a table that is new is added.
    """
    found = {"name": policy.name, **policy.model_dump(mode="json")}
    source, tables = policy.token_scores, {} if tables is None else tables
    if source is not None and (path := source.idf):
        if path not in tables:
            tables[path] = hashlib.blake2b(Path(path).read_bytes()).hexdigest()
        found["idf"] = tables[path]
    return {key: value for key, value in found.items() if key not in UNRELATED}


def _local(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where a model or an adapter is on this machine; None: not in files that can be found."""
    from huggingface_hub import snapshot_download

    try:
        if (path := Path(name).expanduser()).exists():
            return path
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError):  # it is not there, or this is no name of the Hub's
        return None
    return Path(found)


def _stats(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files.

    Raises:
        OSError: one is gone.
    """
    found = [(file.name, file.stat()) for file in sorted(files)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _sample(file: Path, size: int) -> str:
    """Digest of parts of a file: all of it would take minutes to read."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as content:
        for i in range(SAMPLES):
            content.seek(size * i // SAMPLES)
            found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest()


def weights_of(model: ModelConfig, download_dir: str | None = None) -> list[Any]:
    """Names, sizes, times and samples of the model's weight files.

    If there are none on this machine (object storage), a random text, so that no session of other
    weights is found.
    """
    folder = _local(model.model, model.revision, download_dir)
    files: list[Path] = []
    if folder is not None:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        files = [file for file in files if file.suffix in WEIGHTS]
    if not files:
        logger.warning(
            "KV sessions: no weight files of %s were found on this machine, so a restarted server "
            "finds no sessions of this one; give --model a folder with the weights",
            model.model,
        )
        return [secrets.token_hex(16)]
    stats = zip(files, _stats(files), strict=True)
    return [(name, size, time, _sample(file, size)) for file, (name, size, time) in stats]


def _plain(config: Any) -> Any:
    """A model's configuration without what states do not depend on."""
    if isinstance(config, dict):
        return {key: _plain(value) for key, value in config.items() if key not in NAMELESS}
    return config


class Adapters:
    """The files of LoRA adapters, as they were before each was loaded under its number.

    That is when a client asks vLLM to load it, or its first request. vLLM does not say from which
    state of its files. So an adapter whose files have changed is not known any more: states may
    come from either. A new number or ``load_inplace`` makes vLLM load it again.
    """

    def __init__(self) -> None:
        self._folders: dict[str, Path | None] = {}
        self._seen: dict[tuple[int, str], list[tuple[str, int, int]]] = {}

    def note(self, lora: LoRARequest) -> None:
        """Note the files of an adapter that is loaded next; vLLM does not load one again."""
        key = lora.lora_int_id, lora.lora_path
        if lora.load_inplace or key not in self._seen:
            self._seen[key] = self._stats_of(lora) or []

    def of(self, lora: LoRARequest) -> list[Any] | None:
        """What states under an adapter depend on; None: not known."""
        stats = self._stats_of(lora)
        if stats and lora.load_inplace:
            self.note(lora)
        if not stats or self._seen.setdefault((lora.lora_int_id, lora.lora_path), stats) != stats:
            return None
        return [lora.lora_name, lora.lora_path, stats]

    def _stats_of(self, lora: LoRARequest) -> list[tuple[str, int, int]] | None:
        """Names, sizes and times of an adapter's files; None: they cannot be found."""
        if self._folders.get(lora.lora_path) is None:
            self._folders[lora.lora_path] = _local(lora.lora_path)
        folder = self._folders[lora.lora_path]
        try:
            return None if folder is None else _stats(folder.glob("adapter_*"))
        except OSError:
            return None


def _drafting_of(config: VllmConfig) -> list[Any]:
    """What the states of a drafting model's layers depend on; empty without one."""
    drafts = config.speculative_config
    if drafts is None or drafts.method not in MODEL_DRAFTERS:
        return []
    model = drafts.draft_model_config
    weights = weights_of(model, config.load_config.download_dir)
    return [drafts.method, _plain(model.hf_config.to_dict()), weights, str(model.dtype)]


def _long_tables(policy: Policy, model: ModelConfig) -> list[bool]:
    """Whether LongRoPE's frequencies are those for long streams; empty for other rotary types."""
    ropes = iter_rope_parameters(model.hf_text_config)
    ranges = [
        rope["original_max_position_embeddings"]
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    return [longest(policy, model) > short for short in ranges]


def layout_of(spec: KVCacheSpec) -> list[Any]:
    """What the pages of a group of layers depend on, also where each layer has a spec."""
    inner = getattr(spec, "kv_cache_specs", {})
    own = {key: str(getattr(spec, key, None)) for key in LAYOUT}
    if isinstance(spec, KVPolicySpec) and spec.kv_quant_mode.is_per_token_head:
        own["drafts"] = str(spec.drafts)  # their words lie before the rows' scales
    return [type(spec).__name__, own, *(layout_of(inner[name]) for name in sorted(inner))]


def engine_header(
    config: VllmConfig, caches: KVCacheConfig, tables: dict[str, str] | None = None
) -> dict[str, str]:
    """What the states of all of an engine's requests depend on (``files.FOREIGN``).

    Args:
        tables: as in ``policy_settings``.
    """
    policy, model = policy_of(config.additional_config), config.model_config
    parallel = config.parallel_config
    assert policy is not None
    layout = [
        [sorted(group.layer_names), layout_of(group.kv_cache_spec)]
        for group in caches.kv_cache_groups
    ]
    return {
        "format": FORMAT,
        "plugin": vllm_cascade.__version__,
        "vllm": vllm.__version__,
        "model": digest(
            [
                _plain(model.hf_config.to_dict()),
                weights_of(model, config.load_config.download_dir),
                *(config.load_config.load_format, model.quantization),
                *_drafting_of(config),
                *_long_tables(policy, model),
            ]
        ),
        "dtype": f"{model.dtype} {config.cache_config.cache_dtype}",
        "policy": digest(policy_settings(policy, tables)),
        "parallelism": f"tensor {parallel.tensor_parallel_size}, "
        f"pipeline {parallel.pipeline_parallel_size}",
        "layout": digest(layout),
        "model_name": str(model.model),  # for people
    }


def page_bytes(config: VllmConfig, caches: KVCacheConfig, spec: KVPolicySpec) -> int:
    """Bytes of a page in all layers of all ranks.

    Args:
        caches: of one rank of the first pipeline stage.
        spec: cache spec of the policy's layers.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if spec.num_layers is None:
        return ranks * sum(tensor.size for tensor in caches.kv_cache_tensors) // caches.num_blocks
    kinds = sum(kind.page_bytes for kind in spec.kinds)
    return ranks * (kinds or spec.num_layers * spec.page_size_bytes)
