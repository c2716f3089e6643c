# SPDX-License-Identifier: Apache-2.0
"""Per-request policies, budgets and recall, within the limits of the engine's pages and tables.

Set them with ``SamplingParams(extra_args={"kv_budget": 512, "kv_policy": "sink", "kv_recall": 4})``
or with ``vllm_xargs`` in the OpenAI API. Front-end, scheduler and worker each derive the request's
policy from these values, the length of its prompt and the engine's policy, so no other data is
sent.
"""

from collections.abc import Mapping
from typing import Any

from vllm_cascade.policies.arguments import FLAGS, KEYS, REQUEST, collect
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, check_batches, policy_class, resolve, validated
from vllm_cascade.policies.remembered import Remembered
from vllm_cascade.policies.schedule import Schedule, compiled
from vllm_cascade.policies.settings import (
    CONFIG_KEY,
    Change,
    Given,
    KVPolicyConfig,
    KVPolicyError,
    Misfit,
    explaining,
)

FIXED = ("head_policy", "head_reduction", "prefill_stride", "unit")
"""Settings that pages, kernels and strides are made for, so no request can change them."""


class PerRequest:
    """Caches schedules by the values that a request may set."""

    def __init__(self, engine: Schedule) -> None:
        self.engine = engine
        self._known: Remembered[Schedule] = Remembered()

    def schedule(
        self, extra_args: Mapping[str, Any] | None, prompt_len: int | None = None
    ) -> Schedule:
        """A request's schedule: the engine's, unless it sets values or its prompt is short.

        Args:
            prompt_len: tokens of the request's first prompt, which ``keep_prompt`` keeps; None:
                at least ``keep_prompt``.

        Raises:
            KVPolicyError: names the key and the fix.
        """
        given = collect(extra_args, REQUEST) if extra_args else Given()
        most = self.engine.policy.keep_prompt
        kept = most if prompt_len is None else self.engine.policy.kept(prompt_len)
        if not given and kept == most:
            return self.engine

        def make() -> Schedule:
            policy = derive(self.engine.policy, given) if given else self.engine.policy
            policy = policy.model_copy(update={"keep_prompt": policy.kept(kept)})
            return self.engine if policy == self.engine.policy else compiled(policy)

        return self._known.get((kept, *given.items()), make)


def derive(policy: Policy, given: Given) -> Policy:
    """Derive a request's policy from the engine's policy.

    Args:
        policy: the engine's policy.
        given: the request's settings, each at most the engine's. Without ``budget``, another policy
            gets the largest that fits. All else is the engine's.

    Raises:
        KVPolicyError: a value is not allowed. The message names the key and the fix.
    """

    def attempt(change: Change) -> Policy:
        if not change.keys() <= set(KEYS.values()):
            raise KVPolicyError("a request cannot set this")
        try:
            return _derived(policy, given, {**given, **change})
        except Misfit as misfit:
            misfit.hint = ""  # names settings of the engine
            raise

    is_servers = given.get("name", policy.name) == policy.name
    return explaining(attempt, given, "the server's " if is_servers else "the default ")


def _derived(policy: Policy, given: Given, asked: Mapping[str, Any]) -> Policy:
    cls = _allowed_class(policy, asked.get("name", policy.name))
    _check_bounds({key: asked[key] for key in asked.keys() - {"name"}}, policy)
    settings = {**_inherited(policy, cls), **asked, "name": cls.name}
    # Without a budget: how large may one be?
    least = cls.model_construct(**{**settings, "budget": 0, "recall": policy.recall})
    step = cls.budget_step(settings)
    largest = min(policy.budget, policy.capacity - least.capacity) // step * step
    if "budget" not in asked and cls is not type(policy):
        settings["budget"] = largest
        if largest < 1:
            reason = f"has no budget that fits the server's {policy.name}"
            raise Misfit("name", cls.name, reason, {"name": policy.name})
    own = validated(settings, given)
    _check_bounds({key: getattr(own, key) for key in cls.own_arguments}, policy)
    if own.capacity > policy.capacity:
        raise Misfit(
            "budget",
            own.budget,
            f"with {CONFIG_KEY} {own.name} needs up to {own.capacity} cached tokens a request, but "
            f"the server's {policy.name} has tables for {policy.capacity}",
            {"budget": largest},
            bound="at most ",
        )
    check_batches(own)
    return own


def _check_bounds(values: Mapping[str, Any], policy: Policy) -> None:
    """Compare a request's settings, or its policy's defaults, with the engine's.

    Raises:
        Misfit: one of them is larger.
    """
    for key, value in values.items():
        if value > (most := getattr(policy, key)):
            reason = f"is more than the server's {FLAGS.name(f'kv_{key}')} {most}"
            raise Misfit(key, value, reason, {key: most}, bound="at most ")


def _allowed_class(policy: Policy, name: str) -> type[Policy]:
    """The class of policy ``name``, which must work with the engine's state.

    Raises:
        KVPolicyError: the policy is unknown, ``full``, or needs what the engine lacks.
    """
    missing = {key: _missing(policy, cls) for key, cls in POLICIES.items()}
    allowed = [key for key in POLICIES if missing[key] is None]
    choices = f"choose from {', '.join(allowed)}"
    if name == "full":
        raise KVPolicyError(
            f"{CONFIG_KEY} full cannot be chosen for one request: this server's pages are those of "
            f"{policy.name}; {choices}"
        )
    cls = policy_class(name, CONFIG_KEY, allowed)
    if name not in allowed:
        raise KVPolicyError(
            f"{CONFIG_KEY} {name} needs {missing[name]}; {choices}, or start the server with "
            f"{FLAGS.name(CONFIG_KEY)} {name}"
        )
    return cls


def _missing(policy: Policy, cls: type[Policy]) -> str | None:
    """What ``cls`` with its defaults needs and the engine's policy lacks; None if nothing."""
    if cls is type(policy):
        return None
    try:
        other = resolve({"name": cls.name})
    except KVPolicyError as error:  # a policy of another package
        return f"settings that no request can give ({error})"
    if other.token_scores is not None:
        return f"scores of token ids, and this server's {policy.name} asks the host for none"
    if other.scoring.source == "random" != policy.scoring.source:
        return f"drawn numbers, and this server's {policy.name} draws none"
    if other.uses_attention and not policy.uses_attention:
        return f"attention scores, and this server's {policy.name} computes none"
    if other.keeps_ages and not policy.keeps_ages:
        return f"token indices in the pages, and this server's {policy.name} stores none"
    settings = _inherited(policy, cls)
    for key in FIXED:
        value, fixed = settings.get(key, cls.model_fields[key].default), getattr(policy, key)
        if value != fixed:
            return f"{key} {value}, and this server has {key} {fixed}"
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
