# SPDX-License-Identifier: Apache-2.0
"""The arms of a comparison: engines with policies, models and requests, by name."""

from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.oracle import full_attention
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.random_models import write_bloom, write_llama
from tests.oracle.recurrent import RECURRENT, write_recurrent

ROOT = Path(__file__).resolve().parent.parent.parent
BOOKS = ROOT / "benchmarks/inputs/models/books-5m"
TEXT = ROOT / "benchmarks/inputs/books/persuasion.txt"
ATTENTION = {**FAMILIES, **full_attention.OWN_MODULES, **full_attention.BY_TRANSFORMERS}
NOT_ON_CPUS = ("minimax-m2",)
"""Families whose experts vLLM's router for CPUs cannot choose."""
PYTORCH = {"VLLM_CASCADE_CPU": "pytorch"}
"""The environment in which no layer runs in C++."""
LENGTHS = (200, 47), 40, 32
"""Of random models: the prompts' tokens, the generated tokens, and a request's own budget."""

Request = dict[str, Any]
"""``prompt``, token ids, and arguments of ``SamplingParams``."""


@dataclass(frozen=True)
class Arm:
    """One engine and its requests.

    Attributes:
        policy: settings of ``kv_policy``.
        model: "books", or a name that ``write_model`` knows.
        engine: arguments of ``LLM`` that differ from the usual ones.
        env: environment variables of the engine.
        rounds: of requests; prompts of a later round extend those of the one before.
        own: the second and the third request ask for policies of their own.
        triton: Triton's interpreter runs the CUDA kernels, on two short requests.
    """

    policy: dict[str, Any]
    model: str = "books"
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    rounds: int = 1
    own: bool = False
    triton: bool = False


SMALL = {"budget": 64, "prefill_stride": 32, "trace": True}
EACH = {"head_policy": "per_kv_head"}
UNITS = {**SMALL, "budget": 128, "num_subcaches": 2, "unit": 16}
RECALL = {**UNITS, "recall": 8, "recall_store": 256}


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "name": name, **more}


def in_units(name: str, common: dict[str, Any] = UNITS, **more: Any) -> dict[str, Any]:
    own = {key: value for key, value in common.items() if key != "num_subcaches"}
    return {**(common if name == "cascade" else own), "name": name, **more}


CASCADE = settings("cascade")
POLICIES = {
    "window": Arm(settings("window")),
    "sink": Arm(settings("sink")),
    "cascade": Arm(CASCADE),
    "cascade-heads": Arm({**CASCADE, **EACH, "head_reduction": "max"}),
    "cascade-paper": Arm({**CASCADE, "preset": "paper", "prefill_stride": 1}),
    "cascade-overflow": Arm({**CASCADE, "overflow": 5, "tie": "resident"}),
    "beehive": Arm(settings("beehive", stride=3)),
    "beehive-shared": Arm(settings("beehive", head_policy="homogeneous", log_n=True)),
    "lazy": Arm(settings("lazy", overflow=8, slack=6, max_drop=3)),
    "h2o": Arm(settings("h2o")),
    "h2o-per-age": Arm(settings("h2o", normalise=True, overflow=3)),
    "dgc": Arm(settings("dgc")),
    "dgc-attention": Arm(settings("dgc", importance="attention")),
    "dgc-cluster": Arm(settings("dgc", importance="cluster")),
    "dgc-by-importance": Arm(settings("dgc", order="importance")),
    "own": Arm(CASCADE, own=True),
    "own-pytorch": Arm(CASCADE, own=True, env=PYTORCH),
    "untraced": Arm({**CASCADE, "trace": False}),
    "untraced-heads": Arm({**CASCADE, **EACH, "trace": False}),
    "pytorch": Arm({**CASCADE, **EACH}, env=PYTORCH),
    "h2o-pytorch": Arm(settings("h2o", head_reduction="median"), env=PYTORCH),
    "beehive-pytorch": Arm(settings("beehive", stride=3), env=PYTORCH),
    "bfloat16": Arm(CASCADE, engine={"dtype": "bfloat16"}),
    "bfloat16-heads": Arm({**CASCADE, **EACH}, engine={"dtype": "bfloat16"}),
    "bfloat16-pages": Arm(CASCADE, engine={"kv_cache_dtype": "bfloat16"}),
    "float16": Arm(CASCADE, engine={"dtype": "float16"}),
    "snapshots": Arm(CASCADE, rounds=3),
    "snapshots-h2o": Arm(settings("h2o", normalise=True), rounds=3),
    "snapshots-own": Arm({**CASCADE, **EACH, "overflow": 5}, own=True, rounds=3),
    "ties": Arm(CASCADE, "saturated"),
    "ties-heads": Arm({**CASCADE, **EACH, "overflow": 5, "tie": "resident"}, "saturated"),
    "ties-h2o": Arm(settings("h2o"), "saturated"),
    "ties-beehive": Arm(settings("beehive", stride=3), "saturated"),
    "ties-pytorch": Arm(CASCADE, "saturated", env=PYTORCH),
    "compiled": Arm(CASCADE, engine={"enforce_eager": False}),
}
UNIT_ARMS = {
    "units": Arm(in_units("cascade")),
    "units-heads": Arm(in_units("cascade", **EACH)),
    "units-pytorch": Arm(in_units("cascade", **EACH), env=PYTORCH),
    "units-overflow": Arm(in_units("cascade", overflow=32)),
    "units-8": Arm(in_units("cascade", unit=8, budget=96, num_subcaches=3)),
    "units-page": Arm(in_units("cascade", unit="page", num_sinks=32)),
    "units-sink": Arm(in_units("sink")),
    "units-h2o": Arm(in_units("h2o", normalise=True)),
    "units-beehive": Arm(in_units("beehive", window=32, threshold=96)),
    "units-dgc": Arm(in_units("dgc")),
    "units-own": Arm(in_units("cascade"), own=True),
    "units-snapshots": Arm(in_units("cascade"), rounds=3),
}
RECALL_ARMS = {
    "recall": Arm(in_units("cascade", RECALL)),
    "recall-heads": Arm(in_units("cascade", RECALL, **EACH)),
    "recall-sink": Arm(in_units("sink", RECALL)),
    "recall-sink-heads": Arm(in_units("sink", RECALL, **EACH, recall_every=1)),
    "recall-h2o": Arm(in_units("h2o", RECALL)),
    "recall-rarely": Arm(in_units("cascade", RECALL, recall_every=48, recall_queries=1)),
    "recall-pytorch": Arm(in_units("cascade", RECALL, **EACH), env=PYTORCH),
    "recall-h2o-pytorch": Arm(in_units("h2o", RECALL), env=PYTORCH),
    "recall-snapshots": Arm(in_units("cascade", RECALL), rounds=3),
    "recall-fp8-rows": Arm(
        in_units("cascade", RECALL, **EACH), engine={"kv_cache_dtype": "fp8_per_token_head"}
    ),
}
QUANTISED = {
    f"{kind}{suffix}": Arm(policy, engine={"kv_cache_dtype": kind}, env=env, own=own)
    for kind in ("fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head")
    for suffix, policy, env, own in (
        ("", CASCADE, {}, True),
        ("-heads", {**CASCADE, **EACH}, {}, False),
        ("-units", in_units("cascade"), {}, True),
        ("-pytorch", {**CASCADE, **EACH}, PYTORCH, False),
    )
}
OTHER_POLICIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "gemma3-pytorch": ("gemma3", settings("sink", budget=24, **EACH), PYTORCH),
    "gemma3-h2o": ("gemma3", settings("h2o", budget=40, overflow=3), {}),
    "gemma3-units": ("gemma3", in_units("cascade", unit=8, budget=64), {}),
    "gpt-oss-sink": ("gpt-oss", settings("sink", budget=24), {}),
    "gpt-oss-pytorch": ("gpt-oss", settings("h2o", budget=40), PYTORCH),
    "gpt-oss-units": ("gpt-oss", in_units("cascade", unit=8, budget=64), {}),
    "granite4-rope-units": ("granite4-rope", in_units("cascade", unit=8, budget=64), {}),
    "lfm2-pytorch": ("lfm2", CASCADE, PYTORCH),
    "bloom-pytorch": ("bloom", {**CASCADE, **EACH}, PYTORCH),
    "qwen3-recall": ("qwen3", in_units("cascade", RECALL, recall_store=128), {}),
}
FAMILY_ARMS = {
    **{
        name: Arm({**CASCADE, **EACH}, name, rounds=2)
        for name in ("llama", "bloom", *ATTENTION, *RECURRENT)
        # vLLM's module of Qwen 3.5 also has the models with images.
        if name not in NOT_ON_CPUS and (find_spec("torchvision") or "qwen3.5" not in name)
    },
    **{
        name: Arm(policy, model, env=env, rounds=2)
        for name, (model, policy, env) in OTHER_POLICIES.items()
    },
}
TINY = {"name": "cascade", "budget": 16, "num_subcaches": 2, "num_sinks": 2, "prefill_stride": 8}
TRITON_ARMS = {
    "triton": Arm({**TINY, "trace": True}, "llama-1", triton=True, own=True),
    "triton-chunks": Arm({**TINY, **EACH}, "bloom", triton=True),
    "triton-recall": Arm(
        {**TINY, **EACH, "num_sinks": 4, "unit": 4, "recall": 2, "recall_store": 12},
        "llama-1",
        triton=True,
    ),
    "triton-windows": Arm({**SMALL, "name": "h2o", "budget": 24}, "gpt-oss", triton=True),
}
ROOMS = {
    "policies": POLICIES,
    "units": UNIT_ARMS,
    "recall": RECALL_ARMS,
    "quantised": QUANTISED,
    "families": FAMILY_ARMS,
    "triton": TRITON_ARMS,
}
ARMS = {f"{room}/{name}": arm for room, arms in ROOMS.items() for name, arm in arms.items()}


def write_model(folder: Path, name: str) -> Path:
    """Write a tiny random model; a name always has the same weights."""
    if name in ATTENTION:
        return write_family(folder, ATTENTION[name])
    if name in RECURRENT:
        return write_recurrent(folder, name)
    if name == "bloom":
        return write_bloom(folder)
    if name == "saturated":  # most probabilities are exactly 0, so scores tie
        return write_llama(folder, qk_std=3.0)
    return write_llama(folder, num_layers=1 if name == "llama-1" else 2)


def requests_of(arm: Arm, tokens: list[int], turn: int) -> list[Request]:
    """The requests of one round: the first decodes greedily, the others sample.

    Prompts have log-probabilities only in arms of one round, since vLLM reads no snapshot for
    a request that asks for them.
    """
    lengths, generated, least = ((700, 110, 301), 90, 32) if arm.model == "books" else LENGTHS
    if arm.triton:
        lengths, generated, least = (40, 21), 8, 12
    if "unit" in arm.policy:
        least *= 2
    asks = [None, {"kv_budget": least}, {"kv_policy": "sink", "kv_budget": least + 16}]
    return [
        {
            "prompt": tokens[900 * index :][: length + 90 * turn],
            "max_tokens": generated,
            "temperature": float(index > 0),
            "seed": index,
            "prompt_logprobs": 0 if arm.rounds == 1 else None,
            "extra_args": ask if arm.own else None,
        }
        for index, (length, ask) in enumerate(zip(lengths, asks, strict=False))
    ]


def jobs_of(arms: dict[str, Arm], folder: Path) -> dict[str, dict[str, Any]]:
    """Arms as ``child.py`` reads them; writes their models into ``folder``."""
    book = AutoTokenizer.from_pretrained(BOOKS)(TEXT.read_text()[:20_000])["input_ids"]
    random = np.random.default_rng(1).integers(1, 500, 3000).tolist()
    models = {"books": BOOKS}
    for model in {arm.model for arm in arms.values()} - {"books"}:
        models[model] = write_model(folder / model, model)
    jobs = {}
    for name, arm in arms.items():
        recurrent, is_book = RECURRENT.get(arm.model), arm.model == "books"
        engine = {
            "model": str(models[arm.model]),
            "dtype": "float32" if recurrent is None else recurrent.dtype,
            "max_model_len": 4096 if is_book else 2048,
            "max_num_batched_tokens": 256 if is_book else 100,
            "max_num_seqs": 4,
            "block_size": 32,
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": True,
            "enable_prefix_caching": arm.rounds > 1,
            "skip_tokenizer_init": not is_book,
            "disable_log_stats": False,
            **({} if recurrent is None else recurrent.engine),
            **arm.engine,
        }
        rounds = [requests_of(arm, book if is_book else random, t) for t in range(arm.rounds)]
        jobs[name] = {**asdict(arm), "engine": engine, "rounds": rounds}
    return jobs
