# SPDX-License-Identifier: Apache-2.0
"""The command-line flags of the settings, of ``vllm serve`` and ``vllm-cascade`` alike."""

import argparse
import json
from typing import Any

from vllm_cascade.policies.arguments import (
    CHECK,
    CHECK_MODES,
    FIELDS,
    FLAGS,
    OTHERS,
    default_of,
    settings_of,
)
from vllm_cascade.policies.registry import CHOICES, POLICIES, UNUSABLE
from vllm_cascade.policies.settings import CONFIG_KEY, KVPolicyConfig


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


class _Names(tuple[str, ...]):
    """The policies to choose from. Those that cannot be loaded pass: ``parse`` says why."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in UNUSABLE


def add_flags(parser: argparse.ArgumentParser, check: bool = False, default: str = "full") -> None:
    """Add the KVPolicy group to a parser.

    Args:
        check: with the flag of the check at a start.
        default: the policy where none is named, for the help text.

    The defaults depend on the policy and the model. They stand in the help texts; the flags use
    SUPPRESS, so that the help does not show None.
    """
    group = parser.add_argument_group(
        title="KVPolicy",
        description="Bounded, training-free KV cache (vllm_cascade).",
    )
    group.add_argument(
        FLAGS.name(CONFIG_KEY),
        choices=_Names(CHOICES),
        default=argparse.SUPPRESS,
        help=f"Which tokens stay in the KV cache. `full` is stock vLLM. (default: {default})",
    )
    for argument, field in FIELDS.items():
        kind: Any = field.annotation
        text = f"{field.description}. (default: {default_of(field)})"
        group.add_argument(
            FLAGS.name(argument),
            type=kind,
            default=argparse.SUPPRESS,
            help=text[0].upper() + text[1:],
        )
    if check:
        group.add_argument(
            FLAGS.name(CHECK),
            choices=CHECK_MODES,
            default=argparse.SUPPRESS,
            help="When the policy's kernels are compared with PyTorch on this device, at a start; "
            "`once` keeps the verdict. (default: once, and off on CPUs)",
        )
    group.add_argument(
        FLAGS.name(OTHERS),
        action=_Settings,
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


class _Settings(argparse.Action):
    """``--kv-policy-config`` or one key of it; a later value adds to earlier ones.

    vLLM's parsers turn keys into an object of their own, behind one that is given as JSON or in a
    file of ``--config``.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        key = (option or "").partition(".")[2]
        others = getattr(namespace, OTHERS, {})
        setattr(namespace, OTHERS, {**others, **({key: values} if key else values)})


def add_dotted_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--kv-policy-config.KEY VALUE``, which vLLM's own parsers accept for any JSON flag."""
    for key in sorted({"name"}.union(*(cls.model_fields for cls in POLICIES.values()))):
        name = FLAGS.inside.format(FLAGS.name(OTHERS), key)
        parser.add_argument(name, action=_Settings, type=_value, help=argparse.SUPPRESS)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
