# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.engine.arg_utils.EngineArgs`` (checked against vLLM 0.32.0).

What: adds ``--kv-policy``, ``--kv-budget``, ``--kv-recall``, ``--kv-policy-config`` and
``--kv-policy-check`` to every command that builds its parser after plugins load, and the same names
as arguments of ``LLM`` and ``EngineArgs``. A policy is checked and applied when vLLM creates its
configuration. The settings travel in ``additional_config``, which reaches every process of the
engine. API servers also get a middleware that rejects requests with misplaced ``kv_*`` keys.
Why: vLLM has no hook for a general plugin to add flags or to adjust ``VllmConfig``.
Removed when: vLLM offers such a hook.
"""

import argparse
import functools
import json
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from vllm_cascade.patches import max_model_len
from vllm_cascade.policies.arguments import (
    ARGUMENTS,
    CHECK,
    CHECK_MODES,
    CONFIG,
    FIELDS,
    FLAGS,
    OTHERS,
    default_of,
    parse,
    settings_of,
)
from vllm_cascade.policies.registry import CHOICES, POLICIES
from vllm_cascade.policies.settings import CONFIG_KEY, KVPolicyConfig, KVPolicyError


def merge_settings(
    additional_config: dict[str, Any] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Put policy arguments into a copy of ``additional_config``; None is an argument not given.

    Raises:
        KVPolicyError: a setting is given twice, or settings without a policy.
    """
    merged = dict(additional_config or {})
    if arguments.get(CHECK) is not None:
        merged[CHECK] = arguments[CHECK]
    flags = {key: arguments[key] for key in ARGUMENTS if arguments.get(key) is not None}
    settings = parse(flags, FLAGS)
    for key in ARGUMENTS if flags else ():
        if key in merged:
            raise KVPolicyError(
                f"the KV policy is given twice, by {', '.join(map(FLAGS.name, flags))} and in "
                f"{CONFIG.name(key)}; remove one"
            )
    return merged if settings is None else {**merged, CONFIG_KEY: settings}


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
        FLAGS.name(CONFIG_KEY),
        choices=CHOICES,
        default=argparse.SUPPRESS,
        help="Which tokens stay in the KV cache. `full` is stock vLLM. (default: full)",
    )
    for argument, field in FIELDS.items():
        text = f"{field.description}. (default: {default_of(field)})"
        group.add_argument(
            FLAGS.name(argument),
            type=field.annotation,
            default=argparse.SUPPRESS,
            help=text[0].upper() + text[1:],
        )
    group.add_argument(
        FLAGS.name(CHECK),
        choices=CHECK_MODES,
        default=argparse.SUPPRESS,
        help="When the policy's kernels are compared with PyTorch on this device before the model "
        "is loaded; `once` keeps the verdict. (default: once, and off on CPUs)",
    )
    group.add_argument(
        FLAGS.name(OTHERS),
        type=_json_object,
        default=argparse.SUPPRESS,
        help=f"The policy's other settings as JSON. Every policy has {_keys(KVPolicyConfig)}. "
        + " ".join(f"{name}: {_keys(cls)}." for name, cls in POLICIES.items() if settings_of(cls))
        + " `vllm-cascade policies` explains them. (default: {})",
    )


def _keys(cls: type[KVPolicyConfig]) -> str:
    """The settings of ``cls`` without a flag of their own, with their defaults."""
    fields = [(key, f) for key, f in settings_of(cls).items() if f not in FIELDS.values()]
    return ", ".join(f"{key} ({default_of(field)})" for key, field in fields)


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
        given = {name: kwargs.pop(name, None) for name in (*ARGUMENTS, CHECK)}
        original(self, *args, **kwargs)
        self.additional_config = merge_settings(self.additional_config, given)

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
        engine_args.additional_config = merge_settings(engine_args.additional_config, vars(args))
        return engine_args

    return from_cli_args


def _wrap_create(original):
    @functools.wraps(original)
    def create_engine_config(self, *args: Any, **kwargs: Any):
        raw = parse(self.additional_config)
        if raw is None:
            # `full` is stock vLLM: the settings would change the key of its compile cache.
            for key in (*ARGUMENTS, CHECK):
                self.additional_config.pop(key, None)
            return original(self, *args, **kwargs)
        from vllm_cascade.engine.configure import apply_policy

        with max_model_len.positions_are_bounded() as native:
            config = original(self, *args, **kwargs)
        apply_policy(config, raw, native.max_len)
        return config

    return create_engine_config
