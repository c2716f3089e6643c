# SPDX-License-Identifier: Apache-2.0
"""Per-request policies, budgets and recall, within the limits of the engine's pages and tables.

Set them with ``SamplingParams(extra_args={"kv_budget": 512, "kv_policy": "sink", "kv_recall": 4})``
or with ``vllm_xargs`` in the OpenAI API. Front-end, scheduler and worker each derive the request's
policy from these values and the engine's policy, so no other data is sent.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, resolve
from vllm_cascade.policies.schedule import MAX_SCHEDULES, Schedule, compiled
from vllm_cascade.policies.settings import KVPolicyConfig, KVPolicyError

BUDGET, NAME, RECALL = KEYS = ("kv_budget", "kv_policy", "kv_recall")
SHORT = {key.removeprefix("kv_"): key for key in KEYS}
"""Likely short spellings (``budget``, ``policy``, ``recall``), used to suggest the right key."""


def plain_key(key: str) -> str:
    """Normalise a key: lower case, underscores."""
    return key.lower().replace("-", "_")


class PerRequest:
    """Caches schedules by the values that a request may set."""

    def __init__(self, engine: Schedule) -> None:
        self.engine = engine
        self._known: dict[tuple[str | None, int | None, int | None], Schedule] = {}

    def schedule(self, extra_args: Mapping[str, Any] | None) -> Schedule:
        """A request's schedule; the engine's unless the request sets its own values.

        Raises:
            KVPolicyError: names the key and the fix.
        """
        if not extra_args:
            return self.engine
        name, budget, recall = (extra_args.get(key) for key in (NAME, BUDGET, RECALL))
        if name is None and budget is None and recall is None:
            return self.engine
        for key, number, what in ((BUDGET, budget, "tokens"), (RECALL, recall, "units")):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise KVPolicyError(f"{key} must be an integer number of {what}, not {number!r}")
        if name is not None and not isinstance(name, str):
            raise KVPolicyError(f"{NAME} must be the name of a policy, not {name!r}")
        own = self._known.get((name, budget, recall))
        if own is None:
            policy = derive(self.engine.policy, name, budget, recall)
            own = self.engine if policy == self.engine.policy else compiled(policy)
            if len(self._known) >= MAX_SCHEDULES:
                self._known.clear()
            self._known[name, budget, recall] = own
        return own


def derive(
    policy: Policy, name: str | None, budget: int | None, recall: int | None = None
) -> Policy:
    """Derive a request's policy from the engine's policy.

    Args:
        policy: the engine's policy.
        name: the request's policy name; None: the engine's.
        budget: tokens, at most the engine's budget; None: the engine's for the same policy, else
            the largest that fits.
        recall: units, at most the engine's recall; None: the engine's.

    Raises:
        KVPolicyError: a value is not allowed. The message names the key and the fix.
    """
    name = policy.name if name is None else name
    if budget is not None and not 1 <= budget <= policy.budget:
        raise KVPolicyError(
            f"{BUDGET} {budget} is not within the server's --kv-budget: ask for 1 to "
            f"{policy.budget}"
        )
    if recall is not None and not 0 <= recall <= policy.recall:
        fix = f"ask for 0 to {policy.recall}" if policy.recall else "start it with --kv-recall"
        raise KVPolicyError(f"{RECALL} {recall} is not within the server's --kv-recall: {fix}")
    cls = _allowed_class(policy, name)
    settings = _inherited(policy, cls)
    if recall is not None:
        settings["recall"] = recall
    largest = _largest_budget(policy, cls, settings)
    default = policy.budget if cls is type(policy) else largest
    settings["budget"] = default if budget is None else budget
    try:
        own = cls.model_validate(settings)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        key = NAME if budget is None else f"{BUDGET} {budget}"
        raise KVPolicyError(f"{key} cannot work with kv_policy {name}: {reasons}") from None
    if own.capacity > policy.capacity:
        raise KVPolicyError(
            f"{BUDGET} {budget} with {NAME} {name} needs up to {own.capacity} cached tokens a "
            f"request, but the server's {policy.name} has tables for {policy.capacity}; ask for "
            f"a {BUDGET} of at most {largest}"
        )
    assert own.head_policy == policy.head_policy and own.prefill_stride == policy.prefill_stride
    assert own.head_reduction == policy.head_reduction and own.unit == policy.unit
    assert own.keeps_ages <= policy.keeps_ages, "pages without token indices"
    return own


def _allowed_class(policy: Policy, name: str) -> type[Policy]:
    """The class of policy ``name``, which must work with the engine's state.

    Raises:
        KVPolicyError: the policy is unknown, ``full``, or needs scores the engine lacks.
    """
    allowed = [key for key, cls in POLICIES.items() if _missing(policy, cls) is None]
    choices = f"choose from {', '.join(allowed)}"
    if name == "full":
        raise KVPolicyError(
            f"{NAME} full cannot be chosen for one request: this server's pages are those of "
            f"{policy.name}; {choices}"
        )
    if name not in POLICIES:
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise KVPolicyError(f"{NAME}: unknown policy {name!r}, {choices}{hint}")
    if name not in allowed:
        raise KVPolicyError(
            f"{NAME} {name} needs {_missing(policy, POLICIES[name])}; "
            f"{choices}, or start the server with --kv-policy {name}"
        )
    return POLICIES[name]


def _missing(policy: Policy, cls: type[Policy]) -> str | None:
    """What ``cls`` with its defaults needs and the engine's policy lacks; None if nothing."""
    if cls is type(policy):
        return None
    other = resolve({"name": cls.name})
    if other.token_scores is not None:
        return f"scores of token ids, and this server's {policy.name} asks the host for none"
    if other.uses_attention and not policy.uses_attention:
        return f"attention scores, and this server's {policy.name} computes none"
    return None


def _inherited(policy: Policy, cls: type[Policy]) -> dict[str, Any]:
    """The engine's settings that keep their meaning under policy class ``cls``.

    If either class overrides the default of a shared setting, that setting is not inherited.
    ``head_policy`` is always inherited, because the page layout fixes it.
    """
    if cls is type(policy):
        return policy.model_dump()
    common = {"head_policy"} | {
        key
        for key, field in KVPolicyConfig.model_fields.items()
        if cls.model_fields[key].default == field.default == type(policy).model_fields[key].default
    }
    changed = cls.unit_defaults(policy.unit) if policy.unit > 1 else {}
    return {**changed, **{key: getattr(policy, key) for key in common}}


def _largest_budget(policy: Policy, cls: type[Policy], settings: dict[str, Any]) -> int:
    """Largest budget, in tokens, with which ``cls`` fits the engine's tables."""
    sinks, overflow = (
        settings.get(key, cls.model_fields[key].default) for key in ("num_sinks", "overflow")
    )
    unit = policy.unit
    filling, waiting = unit if unit > 1 else 0, max(overflow - unit, 0)
    room = policy.capacity - policy.recalled - sinks - waiting - filling
    room = min(policy.budget, room)
    step = cls.budget_step(settings)
    return room // step * step
