# SPDX-License-Identifier: Apache-2.0
"""The policy registry: finds policies by name and resolves raw settings."""

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from vllm_cascade.policies.beehive import Beehive
from vllm_cascade.policies.cascade import Cascade
from vllm_cascade.policies.dgc import DGC
from vllm_cascade.policies.h2o import H2O
from vllm_cascade.policies.lazy import Lazy
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.random import Random
from vllm_cascade.policies.settings import (
    DEFAULT_BUDGET,
    DEFAULT_PREFILL_STRIDE,
    RECALL_UNIT,
    KVPolicyError,
    raw_settings,
)
from vllm_cascade.policies.settings import describe_errors as _describe_errors
from vllm_cascade.policies.sink import Sink
from vllm_cascade.policies.window import Window

ENTRY_POINTS = "vllm_cascade.policies"
"""Entry-point group of policies in other packages; an entry is ``name = module:Class``."""


def _built_in() -> dict[str, type[Policy]]:
    return {cls.name: cls for cls in (Window, Sink, Cascade, Beehive, Lazy, DGC, H2O, Random)}


def discover(
    entries: Iterable[EntryPoint], known: Mapping[str, type[Policy]]
) -> tuple[dict[str, type[Policy]], dict[str, str]]:
    """Load policies of other packages.

    A package that cannot be loaded must not stop an engine that does not use it. So its error is
    kept: the engine logs it at start, and choosing the policy raises it.

    Args:
        known: policies whose names are taken.

    Returns:
        Classes by name, and the errors of entry points that are refused, by name.
    """
    found: dict[str, type[Policy]] = {}
    errors: dict[str, str] = {}
    for entry in sorted(entries):
        try:
            found[entry.name] = _checked(entry, {**known, **found})
        except Exception as error:  # whatever another package raises when it is imported
            errors[entry.name] = f"{entry.value}: {type(error).__name__}: {error}"
    return found, errors


def _checked(entry: EntryPoint, known: Mapping[str, type[Policy]]) -> type[Policy]:
    """The class of an entry point.

    Raises:
        TypeError: it is not a ``Policy``.
        ValueError: its name is another one, or is taken.
    """
    cls = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise TypeError(
            "an entry point must name a subclass of vllm_cascade.policies.policy.Policy"
        )
    if getattr(cls, "name", None) != entry.name:
        raise ValueError(f"the class's name is {getattr(cls, 'name', None)!r}, not {entry.name!r}")
    if entry.name == "full" or entry.name in known:
        raise ValueError(f"the name {entry.name!r} is taken; choose another")
    return cls


_others, UNUSABLE = discover(entry_points(group=ENTRY_POINTS), _built_in())
"""``UNUSABLE``: errors of entry points that were refused, by name."""

POLICIES: dict[str, type[Policy]] = {**_built_in(), **_others}
CHOICES = ("full", *POLICIES)


def policy_class(name: Any) -> type[Policy]:
    """The class of policy ``name``.

    Raises:
        KVPolicyError: no policy has this name. The message lists the valid names.
    """
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    if isinstance(name, str) and name in UNUSABLE:
        raise KVPolicyError(
            f"kv_policy {name}: its package cannot be loaded ({UNUSABLE[name]}); "
            "repair or uninstall that package"
        )
    close = difflib.get_close_matches(str(name), CHOICES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    shown = repr(name) if len(repr(name)) < 80 else f"{repr(name)[:60]}..."
    raise KVPolicyError(f"kv_policy: unknown name {shown}, choose from {', '.join(CHOICES)}{hint}")


def resolve(
    raw: dict[str, Any],
    *,
    max_position: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
) -> Policy:
    """Check raw settings, fill in the defaults, and return the policy.

    Args:
        raw: the user's settings, including ``name``.
        max_position: positions of the model. None: unbounded, as with ALiBi.
        max_num_batched_tokens: most tokens that vLLM schedules in a step. None: unknown.
        block_size: tokens per page. ``unit: page`` resolves to it; other units must divide it.
            None: unknown.

    Raises:
        KVPolicyError: an unknown key, a wrong type or an impossible size.
    """
    given = dict(raw)
    cls = policy_class(given.pop("name", None))
    preset = given.get("preset")
    given = {**getattr(cls, "presets", {}).get(preset, {}), **given}
    if given.get("recall"):
        given.setdefault("unit", RECALL_UNIT)
    if given.get("unit") == "page" and block_size is not None:
        given["unit"] = block_size
    unit = cls.unit_of(given)
    if unit > 1:
        given = {**cls.unit_defaults(unit), **given}
    if "prefill_stride" not in given:
        given["prefill_stride"] = _default_stride(unit, max_position, max_num_batched_tokens)
    if "budget" not in given:
        given["budget"] = _default_budget(cls, given, max_position)
    try:
        policy = cls.model_validate(given)
    except ValidationError as error:
        keys = ["name", *cls.model_fields]
        raise KVPolicyError(_describe_errors(error, cls.name, keys)) from None
    _check_fit(policy, max_position, max_num_batched_tokens)
    if block_size is not None and block_size % policy.unit:
        raise KVPolicyError(
            f"kv_policy: unit {policy.unit} does not divide a page of {block_size} tokens; choose "
            "a divisor of --block-size, or 'page'"
        )
    return policy


def _default_stride(unit: int, max_position: int | None, max_num_batched_tokens: int | None) -> int:
    """256, or a smaller power of two for short models and small batches, in whole units."""
    limit = DEFAULT_PREFILL_STRIDE
    if max_position is not None:
        limit = min(limit, max(max_position // 4, 1))
    if max_num_batched_tokens is not None:
        limit = min(limit, max(max_num_batched_tokens, 1))
    return max((1 << (limit.bit_length() - 1)) // unit * unit, unit)


def _default_budget(cls: type[Policy], given: dict[str, Any], max_position: int | None) -> int:
    """2048, or the largest valid budget whose positions fit the model."""
    limit, step = DEFAULT_BUDGET, cls.budget_step(given)
    if step > limit:
        steps = [key for key in ("num_subcaches", "cascade_base", "unit") if key in given]
        raise KVPolicyError(
            f"kv_policy: with {', '.join(f'{key} {given[key]}' for key in steps)} a budget must be "
            f"a multiple of {step}, more than the default of {limit}; lower {' or '.join(steps)}, "
            "or set budget"
        )
    others = [
        given.get(key, cls.model_fields[key].default)
        for key in ("num_sinks", "overflow", "prefill_stride", "recall")
    ]
    if max_position is not None and all(isinstance(value, int) for value in others):
        unit = cls.unit_of(given)
        waiting = max(others[1] - unit, 0)
        limit = min(limit, max_position - others[0] - waiting - others[2] - others[3] * unit)
    return max(limit // step * step, step)


def _largest(policy: Policy) -> str:
    """Name of the setting, besides the budget, that takes the most positions."""
    keys = {key: getattr(policy, key) for key in ("num_sinks", "overflow", "prefill_stride")}
    keys["recall"] = policy.recalled
    key = max(keys, key=keys.__getitem__)
    return "prefill_stride and the budget" if key == "prefill_stride" else key


def _check_fit(
    policy: Policy, max_position: int | None, max_num_batched_tokens: int | None
) -> None:
    if max_position is not None and policy.max_position > max_position:
        room = max_position - (policy.max_position - policy.budget)
        step = policy.budget_step(policy.model_dump())
        fix = (
            f"lower the budget to at most {room // step * step}"
            if room >= step
            else f"lower {_largest(policy)}"
        )
        extra = f" + overflow {policy.overflow} - {policy.unit}" if policy.waiting else ""
        if policy.recall:
            extra += f" + recall {policy.recall} x unit {policy.unit}"
        raise KVPolicyError(
            f"kv_policy: num_sinks {policy.num_sinks} + budget {policy.budget} + prefill_stride "
            f"{policy.prefill_stride}{extra} = {policy.max_position} positions, but the model has "
            f"{max_position}; {fix}"
        )
    if max_num_batched_tokens is not None and policy.prefill_stride > max_num_batched_tokens:
        raise KVPolicyError(
            f"kv_policy: prefill_stride {policy.prefill_stride} is larger than "
            f"max_num_batched_tokens {max_num_batched_tokens}, so no prompt could ever be "
            f"scheduled; set prefill_stride to at most {max_num_batched_tokens} or raise "
            "--max-num-batched-tokens"
        )


def policy_of(additional_config: Mapping[str, Any]) -> Policy | None:
    """The policy in an engine's resolved ``additional_config``; None for stock vLLM."""
    settings = raw_settings(additional_config)
    if settings is None:
        return None
    return policy_class(settings.pop("name")).model_validate(settings)
