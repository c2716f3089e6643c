# SPDX-License-Identifier: Apache-2.0
"""The policy registry: finds policies by name and resolves raw settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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
from vllm_cascade.policies.rules import MOST_INSERTIONS
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import (
    CONFIG_KEY,
    DEFAULT_BUDGET,
    DEFAULT_PREFILL_STRIDE,
    RECALL_UNIT,
    Change,
    Given,
    KVPolicyError,
    Misfit,
    check_numbers,
    describe,
    did_you_mean,
    explaining,
    shown,
)
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


def policy_class(
    name: Any, place: str = CONFIG_KEY, choices: Sequence[str] = CHOICES
) -> type[Policy]:
    """The class of policy ``name``.

    Args:
        place: how the user wrote the setting, for the message.
        choices: the policies to choose from.

    Raises:
        KVPolicyError: no policy has this name. The message lists the choices.
    """
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    if isinstance(name, str) and name in UNUSABLE:
        raise KVPolicyError(
            f"{place} {name}: its package cannot be loaded ({UNUSABLE[name]}); "
            "repair or uninstall that package"
        )
    hint = did_you_mean(name, choices) if isinstance(name, str) else ""
    raise KVPolicyError(
        f"{place}: unknown policy {shown(name)}, choose from {', '.join(choices)}{hint}"
    )


def resolve(
    raw: dict[str, Any],
    *,
    max_position: int | None = None,
    default_position: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
) -> Policy:
    """Check settings, fill in the defaults, and return the policy.

    Args:
        raw: the user's settings, including ``name``. ``Given`` has the user's names of them.
        max_position: positions of the model. None: unbounded, as with ALiBi.
        default_position: positions that defaults stay within. None: ``max_position``.
        max_num_batched_tokens: most tokens of a prompt in a step of vLLM's. None: unknown.
        block_size: tokens per page. ``unit: page`` resolves to it; other units must divide it.
            None: unknown.

    Raises:
        KVPolicyError: an unknown key, a wrong type or an impossible size.
    """
    given = raw if isinstance(raw, Given) else Given(raw)
    room = max_position if default_position is None else default_position

    def attempt(change: Change) -> Policy:
        settings = {**given, **change}
        check_numbers(settings, given.name)
        cls = policy_class(settings.get("name"), given.name("name"))
        preset = settings.get("preset")
        if isinstance(preset, str):  # validation reports the others
            settings = {**getattr(cls, "presets", {}).get(preset, {}), **settings}
        if settings.get("recall"):
            settings.setdefault("unit", RECALL_UNIT)
        if settings.get("unit") == "page" and block_size is not None:
            settings["unit"] = block_size
        unit = cls.unit_of(settings)
        if block_size is not None and block_size % unit:
            reason, hint = f"does not divide a page of {block_size} tokens", "choose a divisor"
            raise Misfit("unit", unit, reason, {"unit": "page"}, hint=hint)
        if unit > 1:
            settings = {**cls.unit_defaults(unit), **settings}
        if "prefill_stride" not in settings:
            settings["prefill_stride"] = _default_stride(unit, room, max_num_batched_tokens)
        if "budget" not in settings:
            settings["budget"] = _default_budget(cls, settings, room)
        policy = validated(settings, given)
        _check_fit(policy, max_position, max_num_batched_tokens)
        check_batches(policy)
        return policy

    return explaining(attempt, given)


def validated(settings: dict[str, Any], given: Given) -> Policy:
    """The policy with these settings, including ``name``.

    Raises:
        Misfit: settings do not fit together.
        KVPolicyError: an unknown key, a wrong type or a huge number.
    """
    own = dict(settings)
    check_numbers(own, given.name)
    cls = policy_class(own.pop("name", None), given.name("name"))
    try:
        policy = cls.model_validate(own)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, Misfit):
            raise cause from None
        raise KVPolicyError(describe(error, given.name, cls)) from None
    policy.check_rows()
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
        without = {key: {k: v for k, v in given.items() if k != key} for key in given}
        steps = [key for key, others in without.items() if cls.budget_step(others) < step]
        raise KVPolicyError(
            f"kv_policy: with {', '.join(f'{key} {given[key]}' for key in steps)} a budget must be "
            f"a multiple of {step}, more than the default of {limit}; lower {' or '.join(steps)}, "
            "or set budget"
        )
    if max_position is not None:
        with suppress(TypeError, ZeroDivisionError):  # wrong settings, which validation reports
            limit = min(limit, max_position - cls.model_construct(**given, budget=0).max_position)
    return max(limit // step * step, step)


def _largest(policy: Policy) -> str:
    """Name of the setting, besides the budget, that takes the most positions."""
    keys = {key: getattr(policy, key) for key in ("num_sinks", "overflow", "prefill_stride")}
    if policy.keep_prompt > policy.num_sinks:
        keys["keep_prompt"] = policy.keep_prompt
    keys["recall"] = policy.recalled
    key = max(keys, key=keys.__getitem__)
    return "prefill_stride and the budget" if key == "prefill_stride" else key


def _check_fit(
    policy: Policy, max_position: int | None, max_num_batched_tokens: int | None
) -> None:
    """Check a policy against the model and the engine.

    Raises:
        Misfit: it needs too many positions, or a size that the engine cannot have.
    """
    if max_position is not None and policy.max_position > max_position:
        room = max_position - (policy.max_position - policy.budget)
        step = policy.budget_step(policy.model_dump())
        extra = f" + overflow {policy.overflow} - {policy.unit}" if policy.waiting else ""
        if policy.recall:
            extra += f" + recall {policy.recall} x unit {policy.unit}"
        first = "num_sinks" if policy.protected == policy.num_sinks else "keep_prompt"
        raise Misfit(
            "budget",
            policy.budget,
            f"is too large: {first} {policy.protected} + budget {policy.budget} + prefill_stride "
            f"{policy.prefill_stride}{extra} = {policy.max_position} positions, but the model has "
            f"{max_position}",
            *([{"budget": room // step * step}] if room >= step else []),
            bound="at most ",
            hint="" if room >= step else f"lower {_largest(policy)}",
        )
    if max_num_batched_tokens is not None and policy.prefill_stride > max_num_batched_tokens:
        raise Misfit(
            "prefill_stride",
            policy.prefill_stride,
            f"is larger than the {max_num_batched_tokens} tokens of a prompt that a step may have, "
            "so no prompt could ever be scheduled",
            {"prefill_stride": max_num_batched_tokens // policy.unit * policy.unit},
            bound="at most ",
            hint="raise --max-num-batched-tokens (and --max-num-scheduled-tokens, if given)",
        )


def may_have_cells(policy: Policy) -> bool:
    """Whether rules of an engine's policy, or of one that a request may choose, may have cells.

    Of the built-in policies only ``beehive`` has cells. It needs scores by attention, and a request
    can choose it only where the engine's policy has them, too.
    """
    built_in = set(_built_in().values())
    return policy.uses_attention or not built_in.issuperset({type(policy), *POLICIES.values()})


def check_batches(policy: Policy) -> None:
    """Check how many rows the table of rules has if ``overflow`` evicts in batches.

    Rules then repeat after the least common multiple of the policy's period and the batch size.

    Raises:
        Misfit: more than ``MOST_INSERTIONS``; names a smaller ``overflow`` that works.
    """
    batch = policy.in_units.overflow
    if batch == 1 or policy.batches_itself:
        return
    base = policy.in_units.insertions()
    transient = len(base.rules) - base.period

    def bounds(batch: int) -> tuple[int, int]:
        """Fewest and most rows. ``Schedule`` adds periods until it is steady."""
        period = math.lcm(base.period, batch)
        least = transient + batch + period
        return least, least + period * max(-(-policy.recall // period), 1)

    rows, most = bounds(batch)
    if rows <= MOST_INSERTIONS < most:  # only the table itself tells
        rows = len(compiled(policy).count)
    if rows > MOST_INSERTIONS:
        fits = next((n for n in range(batch, 1, -1) if bounds(n)[1] <= MOST_INSERTIONS), 1)
        raise Misfit(
            "overflow",
            policy.overflow,
            f"makes rules that repeat only after {rows} units: the engine has a table of at "
            f"most {MOST_INSERTIONS} rows, and without overflow rules repeat after {base.period}",
            {"overflow": fits * policy.unit},
        )


def policy_of(additional_config: Any) -> Policy | None:
    """The policy in an engine's resolved ``additional_config``; None for stock vLLM."""
    if not isinstance(additional_config, dict) or CONFIG_KEY not in additional_config:
        return None
    settings = additional_config[CONFIG_KEY]
    given = settings if isinstance(settings, Given) else Given(settings)
    return validated({**given, **given.measured}, given)
