# SPDX-License-Identifier: Apache-2.0
"""Patch of ``vllm.engine.arg_utils.EngineArgs``.

What: adds ``--kv-policy``, ``--kv-budget``, ``--kv-recall``, ``--kv-keep-prompt``,
``--kv-policy-config``, ``--kv-policy-check`` and ``--kv-sessions*`` to every command that builds
its parser after plugins load, and the same names as arguments of ``LLM`` and ``EngineArgs``. A
policy is checked and applied when vLLM creates its configuration. The settings travel in
``additional_config``, which reaches every process of the engine, and in the parsed arguments, which
reach spawned API servers. These also get a middleware that rejects requests with misplaced ``kv_*``
keys. A server that only renders prompts accepts the engine's ``--max-model-len`` and checks the
policy's settings.
Why: vLLM has no hook for a general plugin to add flags or to adjust ``VllmConfig``.
Removed when: vLLM offers such a hook.
"""

import argparse
import functools
from collections.abc import Mapping
from copy import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from vllm_cascade.patches import max_model_len
from vllm_cascade.policies.arguments import ARGUMENTS, CHECK, CONFIG, FLAGS, default_of, parse
from vllm_cascade.policies.flags import add_flags
from vllm_cascade.policies.registry import policy_of, resolve
from vllm_cascade.policies.settings import CONFIG_KEY, Given, KVPolicyError
from vllm_cascade.sessions import settings as sessions
from vllm_cascade.sessions.settings import SessionSettings

CHECKS_NOTHING = (
    f"{FLAGS.name(CHECK)} compares a policy's kernels; add {FLAGS.name(CONFIG_KEY)}, or remove it"
)
NAMES = (*ARGUMENTS, CHECK, *sessions.ARGUMENTS)
"""All arguments that the plugin adds."""


class Shared(dict[str, Any]):
    """``additional_config`` of parsed arguments, which API servers get with what ``_keep`` adds."""


def merge_settings(additional_config: Any, arguments: dict[str, Any]) -> Any:
    """Put policy arguments into a copy of ``additional_config``; None is an argument not given.

    Args:
        additional_config: a dict, None, or an object of a platform's own, which is returned.

    Raises:
        KVPolicyError: a setting is given twice, or settings without a policy, or beside an object.
    """
    if not isinstance(additional_config, Mapping | None):
        if given := [FLAGS.name(name) for name in NAMES if arguments.get(name) is not None]:
            raise KVPolicyError(
                f"{', '.join(given)} is kept in additional_config, which must be a dict, not "
                f"{type(additional_config).__name__}; remove one of the two"
            )
        return additional_config
    merged = dict(additional_config or {})
    if arguments.get(CHECK) is not None:
        merged[CHECK] = arguments[CHECK]
    flags = {key: arguments[key] for key in ARGUMENTS if arguments.get(key) is not None}
    if arguments.get(CHECK) is not None and not any(
        key in {**merged, **flags} for key in ARGUMENTS
    ):
        raise KVPolicyError(CHECKS_NOTHING)
    settings = parse(flags, FLAGS)
    kept = {key: arguments[key] for key in sessions.ARGUMENTS if arguments.get(key) is not None}
    SessionSettings.of(kept, FLAGS)  # raises errors that name flags
    for key in kept:
        if key in merged:
            raise KVPolicyError(
                f"{FLAGS.name(key)} and {CONFIG.name(key)} are the same; remove one"
            )
    merged |= kept
    for key in ARGUMENTS if flags else ():
        if key in merged:
            raise KVPolicyError(
                f"the KV policy is given twice, by {', '.join(map(FLAGS.name, flags))} and in "
                f"{CONFIG.name(key)}; remove one"
            )
    if settings is not None:
        return {**merged, CONFIG_KEY: settings}
    if flags:  # ``full``
        merged.pop(CHECK, None)
    return merged


def has_settings(args: argparse.Namespace) -> bool:
    """Whether parsed arguments ask for a policy or sessions.

    Raises:
        KVPolicyError: see ``merge_settings``.
    """
    settings = merge_settings(args.additional_config, vars(args))
    return parse(settings) is not None or SessionSettings.of(settings) is not None


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    """Add the KVSessions group to one of vLLM's parsers."""
    group = parser.add_argument_group(
        title="KVSessions",
        description="States of finished requests, kept for the next turn (vllm_cascade).",
    )
    group.add_argument(
        FLAGS.name(sessions.SESSIONS),
        action="store_true",
        default=argparse.SUPPRESS,
        help="Keep the state of a finished request. A prompt that begins with all of its tokens "
        "continues it. (default: False)",
    )
    for argument, field in sessions.FIELDS.items():
        text = f"{field.description}. (default: {default_of(field)})"
        switch = field.annotation == bool | None
        kind: Any = {"action": argparse.BooleanOptionalAction} if switch else {}
        if not switch:
            kind["type"] = field.annotation if field.annotation is float else str
        group.add_argument(
            FLAGS.name(argument),
            default=argparse.SUPPRESS,
            help=text[0].upper() + text[1:],
            **kind,
        )


def apply() -> None:
    """Wrap the methods. ``patches.apply_all`` calls this once."""
    # Both: a dataclass generates its own __init__ and does not call its parent's.
    for cls in (EngineArgs, AsyncEngineArgs):
        cls.__init__ = _wrap_init(cls.__init__)
    EngineArgs.add_cli_args = staticmethod(_wrap_add_cli_args(EngineArgs.add_cli_args))
    from_cli_args: Any = classmethod(_wrap_from_cli_args(EngineArgs.from_cli_args.__func__))
    EngineArgs.from_cli_args = from_cli_args
    EngineArgs.create_engine_config = _wrap_create(EngineArgs.create_engine_config)
    EngineArgs.create_model_config = _wrap_create_model(EngineArgs.create_model_config)


def _wrap_init(original):
    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name, None) for name in NAMES}
        original(self, *args, **kwargs)
        self.additional_config = merge_settings(self.additional_config, given)

    return __init__


def _wrap_add_cli_args(original):
    @functools.wraps(original)
    def add_cli_args(parser):
        parser = original(parser)
        add_flags(parser, check=True)
        add_session_flags(parser)
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
        merged = merge_settings(engine_args.additional_config, vars(args))
        for name in NAMES:
            vars(args).pop(name, None)
        if isinstance(merged, dict):
            merged = Shared(merged)
        args.additional_config = engine_args.additional_config = merged
        return engine_args

    return from_cli_args


def _wrap_create(original):
    @functools.wraps(original)
    def create_engine_config(self, *args: Any, **kwargs: Any):
        raw = parse(self.additional_config)
        if raw is None:
            # `full` is stock vLLM: the settings would change the key of its compile cache.
            if SessionSettings.of(self.additional_config) is not None:
                raise KVPolicyError(
                    f"{FLAGS.name(sessions.SESSIONS)} keeps states of a bounded cache; add "
                    f"{FLAGS.name(CONFIG_KEY)}, or remove it"
                )
            if isinstance(self.additional_config, dict):
                if self.additional_config.get(CHECK) is not None and not any(
                    key in self.additional_config for key in ARGUMENTS
                ):
                    raise KVPolicyError(CHECKS_NOTHING)
                others = {k: v for k, v in self.additional_config.items() if k not in NAMES}
                self.additional_config = others
            return original(self, *args, **kwargs)
        from vllm_cascade.engine.configure import apply_policy
        from vllm_cascade.engine.devices import this_device

        device = this_device()
        device.prepare()
        with max_model_len.positions_are_bounded() as native:
            config = original(self, *args, **kwargs)
        device.restore(config, self)
        apply_policy(config, raw, *native.of(config.speculative_config))
        if isinstance(self.additional_config, Shared):
            _keep(self.additional_config, raw, config)
        return config

    return create_engine_config


def _keep(additional_config: Shared, raw: Given, config: VllmConfig) -> None:
    """Add defaults that depend on the host's free memory to the settings of ``config``.

    API servers of several are configured again, beside engines that may have taken that memory.

    Args:
        additional_config: what ``raw`` was read from; changed in place.
    """
    policy, resolved = policy_of(config.additional_config), config.additional_config
    assert policy is not None and isinstance(resolved, dict)
    kept = copy(raw)  # with the names of its keys
    if raw.get("preset") is None:  # a preset's recall has no default
        kept.setdefault("recall", policy.recall)
    kept.measured = resolved[CONFIG_KEY].measured
    for key in ARGUMENTS:
        additional_config.pop(key, None)
    additional_config[CONFIG_KEY] = kept


def _wrap_create_model(original):
    @functools.wraps(original)
    def create_model_config(self):
        # A server that only renders prompts creates no configuration of an engine.
        raw = None if max_model_len.is_bounded() else parse(self.additional_config)
        if raw is None:
            return original(self)
        with max_model_len.positions_are_bounded() as native:
            model = original(self)
        if raw.get("unit") != "page" or self.block_size is not None:
            ranges = (None, None) if model.uses_alibi else native.of(None)
            resolve(  # raises errors
                raw,
                max_position=ranges[0],
                default_position=ranges[1],
                max_num_batched_tokens=self.max_num_batched_tokens,
                block_size=self.block_size,
            )
        return model

    return create_model_config
