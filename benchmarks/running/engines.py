# SPDX-License-Identifier: Apache-2.0
"""Engines for the benchmarks: how one is set up.

Every run that is compared with others gets a fresh process: an engine that shares its caller's
process starts in seconds, and nothing of one policy (vLLM's registered backend, its metrics) is
left when the next one starts. Nothing here imports vLLM before a job runs.
"""

import json
import logging
import os
from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.running import parts
from benchmarks.running.environment import ROOT

if TYPE_CHECKING:
    from vllm import LLM

MODEL = ROOT / "benchmarks/inputs/models/books-5m"
BOOK = ROOT / "benchmarks/inputs/books/persuasion.txt"
SEED = 7
ENVIRONMENT = {
    # Without this, vLLM's CPU engine lives in two more processes that take half a minute to
    # start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A model this small gains little from a second thread, and threads that wait for each other
    # are several times slower than one as soon as another program wants a core.
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # "The prompt is longer than the model's positions" is the point of a bounded cache.
    "TRANSFORMERS_VERBOSITY": "error",
    # Tokenizers warn of a fork after their first use in threads.
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set before vLLM is imported, unless the user has set them."""


def quiet() -> None:
    """Hide all but vLLM's errors; to be called before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A warning comes while vLLM is imported, before it sets its logging up.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@dataclass(frozen=True)
class EngineSettings:
    """One engine: a model, a policy (None: stock vLLM) and the sizes that matter.

    Attributes:
        max_model_len: None lets vLLM take the model's own.
        block_size: tokens of a page, raised to the policy's unit where that is larger.
        memory_bytes: KV pool; None: what the requests of this model and policy need.
        arguments: anything else that ``vllm.LLM`` takes.
    """

    model: str = str(MODEL)
    policy: dict[str, Any] | None = None
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 1024
    block_size: int = 32
    memory_bytes: int | None = None
    seed: int = SEED
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unit = (self.policy or {}).get("unit", 1)
        if isinstance(unit, int):
            object.__setattr__(self, "block_size", max(self.block_size, unit))

    def start(self) -> "LLM":
        """The engine, in this process. Benchmark-only policies (``controls``) work too."""
        quiet()
        from vllm import LLM

        return LLM(**self.llm_arguments())

    def llm_arguments(self) -> dict[str, Any]:
        """What ``vllm.LLM`` (and anything built on it, such as lm-eval) is called with.

        Benchmark-only policies (``controls``) are known from then on.
        """
        from benchmarks.running import controls, pools

        controls.register()
        memory = pools.pool_bytes(self) if self.memory_bytes is None else self.memory_bytes
        return {
            "model": self.model,
            "dtype": self.dtype,
            "seed": self.seed,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "kv_cache_memory_bytes": memory,
            # Prompts are read as fast without compiling: nearly all time goes into products of
            # large matrices and attention, which vLLM does not compile; and it takes minutes.
            "enforce_eager": True,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,
            # Without a word on recall an engine would have it.
            "additional_config": {"kv_policy": {"recall": 0, **self.policy}} if self.policy else {},
            **self.arguments,
        }

    def flags(self) -> list[str]:
        """The same for ``vllm serve``, which does not know benchmark-only policies."""
        found: list[str] = []
        for name, value in self.llm_arguments().items():
            flag = name.replace("_", "-")
            if name in ("model", "disable_log_stats"):  # given by its place; off already
                continue
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None and value != {}:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                found += [f"--{flag}", text]
        return found

    def determines(self) -> dict[str, Any]:
        """All of it that a result depends on, as JSON: not how much room or time there is."""
        from vllm_cascade.policies.registry import resolve

        policy = None
        if self.policy:
            resolved = resolve(self.policy)
            policy = {"name": resolved.name, **resolved.model_dump(mode="json")}
        return {
            "model": parts.model(self.model),
            "policy": policy,
            "dtype": self.dtype,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "seed": self.seed,
            "arguments": self.arguments,
        }


def text_config(model: str) -> Any:
    """A model's configuration; of one that also reads images, that of its language model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return getattr(config, "get_text_config", lambda: config)()


def native_positions(model: str) -> int:
    """Positions that a model was made for."""
    return text_config(model).max_position_embeddings


def load_tokenizer(model: str) -> Any:
    """A model's tokenizer that does not warn about long texts: those are meant to be long."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = 1 << 60
    return tokenizer


def settle_dtype(dtype: str, model: str) -> str:
    """``auto`` is bfloat16 where the model is stored so and this machine multiplies it fast."""
    if dtype != "auto":
        return dtype
    import torch
    from transformers import AutoConfig

    stored = getattr(AutoConfig.from_pretrained(model), "dtype", None)
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if stored in (torch.bfloat16, "bfloat16") and fast else "float32"


def settle(args: Namespace) -> None:
    """What every command with engines begins with: quiet engines, and a settled ``--dtype``."""
    quiet()
    args.dtype = settle_dtype(args.dtype, args.model)
