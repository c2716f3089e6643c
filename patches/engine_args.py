# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.engine.arg_utils.EngineArgs`` (checked against vLLM 0.32.0).

What: adds ``--kv-policy``, ``--kv-budget``, ``--kv-recall`` and ``--kv-policy-config`` to every
command that builds its parser after plugins load, and the same names as arguments of ``LLM`` and
``EngineArgs``. A policy is checked and applied when vLLM creates its configuration. The settings
travel in ``additional_config``, which reaches every process of the engine. API servers also get a
middleware that rejects requests with misplaced ``kv_*`` keys.
Why: vLLM has no hook for a general plugin to add flags or to adjust ``VllmConfig``.
Removed when: vLLM offers such a hook.
"""

import argparse
import functools
import json
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from vllm_cascade.patches import max_model_len
from vllm_cascade.policies.registry import CHOICES, policy_class
from vllm_cascade.policies.settings import (
    ARGUMENTS,
    CONFIG_KEY,
    DEFAULT_BUDGET,
    DEFAULT_PREFILL_STRIDE,
    KVPolicyError,
    raw_settings,
)


def merge_settings(
    additional_config: dict[str, Any] | None,
    kv_policy: str | None,
    kv_budget: int | None,
    kv_policy_config: dict[str, Any] | None,
    kv_recall: int | None = None,
) -> dict[str, Any]:
    """Merge the policy arguments into ``additional_config``. Without arguments, return a copy.

    Raises:
        KVPolicyError: a setting is given twice, or a budget without a policy.
    """
    merged = dict(additional_config or {})
    flags = {"name": kv_policy, "budget": kv_budget, "recall": kv_recall}
    if kv_policy_config is None and all(value is None for value in flags.values()):
        return merged
    for key in merged.keys() & set(ARGUMENTS):
        raise KVPolicyError(
            f'the KV policy is given twice, by --kv-policy and in additional_config["{key}"]'
            "; remove one"
        )
    if kv_policy_config is not None and not isinstance(kv_policy_config, dict):
        raise KVPolicyError(f"--kv-policy-config must be a JSON object, not {kv_policy_config!r}")
    settings = dict(kv_policy_config or {})
    for key, value in flags.items():
        if value is None:
            continue
        if key in settings:
            flag = "policy" if key == "name" else key
            raise KVPolicyError(f"--kv-{flag} and {key!r} in --kv-policy-config: remove one")
        settings[key] = value
    if "name" not in settings:
        raise KVPolicyError(
            "--kv-budget, --kv-recall and --kv-policy-config need a policy; add --kv-policy "
            + "|".join(CHOICES[1:])
        )
    if raw_settings({CONFIG_KEY: settings}) is None:
        return merged  # `full`
    policy_class(settings["name"])
    return {**merged, CONFIG_KEY: settings}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the KVPolicy group to one of vLLM's parsers.

    The defaults depend on the policy and the model. They stand in the help texts; the flags use
    SUPPRESS, so that the help does not show None.
    """
    group = parser.add_argument_group(
        title="KVPolicy",
        description="Bounded, training-free KV cache (vllm_cascade).",
    )
    group.add_argument(
        "--kv-policy",
        choices=CHOICES,
        default=argparse.SUPPRESS,
        help="Which tokens stay in the KV cache. `full` is stock vLLM. (default: full)",
    )
    group.add_argument(
        "--kv-budget",
        type=int,
        default=argparse.SUPPRESS,
        help="Cached tokens per layer and head, besides the attention sinks. (default: "
        f"{DEFAULT_BUDGET}, or the largest that fits the model's positions)",
    )
    group.add_argument(
        "--kv-recall",
        type=int,
        default=argparse.SUPPRESS,
        help="Evicted units of tokens that wait in host memory and that a query can bring back, "
        "so many at a time, besides the budget. (default: 0)",
    )
    group.add_argument(
        "--kv-policy-config",
        type=_json_object,
        default=argparse.SUPPRESS,
        help="The policy's other settings as JSON: num_sinks (4), prefill_stride "
        f"({DEFAULT_PREFILL_STRIDE}), head_policy (homogeneous), head_reduction (mean), "
        "ema_gamma (null: the paper's), tie (incoming), overflow (1), unit (1, a number of "
        "tokens, or page; 16 with recall), recall_store (32768), recall_every (16), recall_queries "
        "(32), trace (false); for cascade also num_subcaches (4), cascade_base (2), "
        "eager_fill (true), preset (null, or paper). `vllm-cascade policies` lists every policy's "
        "own. (default: {})",
    )


def apply() -> None:
    """Wrap the methods. ``patches.apply_all`` calls this once."""
    # Both: a dataclass generates its own __init__ and does not call its parent's.
    for cls in (EngineArgs, AsyncEngineArgs):
        cls.__init__ = _wrap_init(cls.__init__)
    EngineArgs.add_cli_args = staticmethod(_wrap_add_cli_args(EngineArgs.add_cli_args))
    EngineArgs.from_cli_args = classmethod(_wrap_from_cli_args(EngineArgs.from_cli_args.__func__))
    EngineArgs.create_engine_config = _wrap_create(EngineArgs.create_engine_config)


def _wrap_init(original):
    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = [kwargs.pop(name, None) for name in ARGUMENTS]
        original(self, *args, **kwargs)
        self.additional_config = merge_settings(self.additional_config, *given)

    return __init__


def _wrap_add_cli_args(original):
    @functools.wraps(original)
    def add_cli_args(parser):
        parser = original(parser)
        add_flags(parser)
        _add_middleware(parser)
        return parser

    return add_cli_args


def _add_middleware(parser: argparse.ArgumentParser) -> None:
    """Make our middleware a default of ``--middleware``, which API servers' parsers have.

    Values of the flag are appended to the default.
    """
    from vllm_cascade.engine.request_bodies import MIDDLEWARE

    if parser.get_default("middleware") is not None:
        parser.set_defaults(middleware=[MIDDLEWARE])


def _wrap_from_cli_args(original):
    @functools.wraps(original)
    def from_cli_args(cls, args: argparse.Namespace):
        engine_args = original(cls, args)
        given = [getattr(args, name, None) for name in ARGUMENTS]
        engine_args.additional_config = merge_settings(engine_args.additional_config, *given)
        return engine_args

    return from_cli_args


def _wrap_create(original):
    @functools.wraps(original)
    def create_engine_config(self, *args: Any, **kwargs: Any):
        raw = raw_settings(self.additional_config)
        if raw is None:
            # `full` is stock vLLM: the settings would change the key of its compile cache.
            for key in ARGUMENTS:
                self.additional_config.pop(key, None)
            return original(self, *args, **kwargs)
        policy_class(raw["name"])
        from vllm_cascade.engine.configure import apply_policy

        with max_model_len.positions_are_bounded() as native:
            config = original(self, *args, **kwargs)
        apply_policy(config, raw, native.max_len)
        return config

    return create_engine_config
