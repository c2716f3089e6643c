# SPDX-License-Identifier: Apache-2.0
"""The settings shared by all KV policies, and how they are read from ``additional_config``.

``KVPolicyConfig`` holds the validated settings. Users write them as flags, as
``additional_config["kv_policy"]`` or as ``LLM`` arguments. A policy subclasses it, so settings and
behaviour are one frozen, hashable, picklable object that can be sent to every process.
"""

import difflib
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

CONFIG_KEY = "kv_policy"
"""Key of the settings in ``VllmConfig.additional_config``."""
ARGUMENTS = (CONFIG_KEY, "kv_budget", "kv_policy_config", "kv_recall")
"""Flag names, which also work as keys of ``additional_config``."""

DEFAULT_BUDGET = 2048
DEFAULT_PREFILL_STRIDE = 256
RECALL_UNIT = 16
"""Default of ``unit`` if ``recall`` is set."""


class KVPolicyError(ValueError):
    """Invalid setting. The message names the setting and the fix."""


class KVPolicyConfig(BaseModel):
    """Settings shared by every policy (``vllm_cascade/policies``); each policy adds its own.

    ``extra="forbid"`` turns a mistyped key into an error instead of ignoring it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    inert_keys: ClassVar[frozenset[str]] = frozenset()
    """Shared keys that have no effect on this policy. Setting one logs a warning."""
    token_keys: ClassVar[tuple[str, ...]] = ("budget", "num_sinks", "overflow", "prefill_stride")
    """Settings that count tokens and must be multiples of ``unit``."""

    budget: int = Field(ge=1, description="cached tokens per layer and head, besides the sinks")
    num_sinks: int = Field(4, ge=0, description="first tokens of a stream, kept for ever")
    prefill_stride: int = Field(
        DEFAULT_PREFILL_STRIDE,
        ge=1,
        description="prompt tokens attended before the next eviction; 1 is token by token",
    )
    head_policy: Literal["homogeneous", "per_kv_head"] = Field(
        "homogeneous", description="one kept set for all heads, or one for each KV head"
    )
    head_reduction: Literal["mean", "max", "median"] = Field(
        "mean", description="how the query heads' scores become one score a token"
    )
    ema_gamma: float | None = Field(
        None, gt=0.0, lt=1.0, description="decay of the attention average; null is the paper's"
    )
    tie: Literal["incoming", "resident"] = Field(
        "incoming", description="which of two tokens with equal scores stays"
    )
    overflow: int = Field(
        1, ge=1, description="evict every this many tokens, in one batch (lazy pruning's R)"
    )
    unit: int | Literal["page"] = Field(
        1, description="consecutive tokens that are kept and evicted together; `page` is a block"
    )
    recall: int = Field(
        0, ge=0, description="evicted units that a query can bring back, besides the budget"
    )
    recall_store: int = Field(
        32768, ge=1, description="evicted tokens a request that wait in host memory"
    )
    recall_every: int = Field(
        16, ge=1, description="decoded tokens from one choice of recalled units to the next"
    )
    recall_queries: int = Field(
        32, ge=1, description="tokens of a prompt's stride that choose its recalled units"
    )
    trace: bool = Field(
        False, description="remember original token indices in the pages, for inspection"
    )

    @field_validator("unit", mode="before")
    @classmethod
    def _check_unit(cls, unit: Any) -> int:
        if unit == "page":
            raise ValueError("only an engine has pages; here, set a number of tokens")
        if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1:
            raise ValueError("set it to a number of tokens, at least 1, or to 'page'")
        return unit

    @model_validator(mode="after")
    def _check_units(self) -> Self:
        for key in self.token_keys:
            tokens = getattr(self, key)
            if tokens is None or tokens % self.unit == 0 or (key, tokens) == ("overflow", 1):
                continue
            below, above = tokens // self.unit * self.unit, -(-tokens // self.unit) * self.unit
            good = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"{key} {tokens} is not a whole number of units of {self.unit} tokens; set it to "
                f"{good}, or change unit"
            )
        return self

    @model_validator(mode="after")
    def _check_recall(self) -> Self:
        if not self.recall:
            return self
        if self.unit == 1:
            raise ValueError(
                f"recall {self.recall} brings back units of several tokens; set unit to "
                f"{RECALL_UNIT}, or recall to 0"
            )
        if self.recall_store < self.recall * self.unit:
            raise ValueError(
                f"recall_store {self.recall_store} has no room for the {self.recall} units of "
                f"{self.unit} tokens that are recalled; set it to at least "
                f"{self.recall * self.unit}"
            )
        return self

    @classmethod
    def unit_of(cls, raw: dict[str, Any]) -> int:
        """The unit in raw settings; 1 if it is invalid, which validation reports later."""
        unit = raw.get("unit", cls.model_fields["unit"].default)
        return unit if isinstance(unit, int) and unit >= 1 else 1

    @classmethod
    def unit_defaults(cls, unit: int) -> dict[str, Any]:
        """Defaults that differ if ``unit`` is larger than 1."""
        return {"num_sinks": unit}

    @property
    def in_units(self) -> Self:
        """The same policy with every token count converted to units."""
        if self.unit == 1:
            return self
        tokens = {key: getattr(self, key) for key in self.token_keys}
        units = {
            key: None if n is None else max(n // self.unit, n > 0) for key, n in tokens.items()
        }
        return self.model_copy(update={**units, "unit": 1, "recall": 0})

    @property
    def waiting(self) -> int:
        """Most tokens in complete units that wait for a batch, without its last unit."""
        return (self.in_units.overflow - 1) * self.unit

    @property
    def recalled(self) -> int:
        """Most tokens recalled at a time."""
        return self.recall * self.unit

    @property
    def max_position(self) -> int:
        """End (exclusive) of the rotary positions that a stream can reach under this policy."""
        return self.num_sinks + self.recalled + self.budget + self.waiting + self.prefill_stride


def describe_errors(error: ValidationError, name: str, own_keys: list[str]) -> str:
    """Describe every invalid key and its fix in one line."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "kv_policy"
        if item["type"] == "extra_forbidden":
            lines.append(
                f"kv_policy: unknown key {key!r} for policy {name!r}; known keys: "
                + ", ".join(own_keys)
            )
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"kv_policy: {key} = {item['input']!r}: {message}")
    return "; ".join(lines)


def raw_settings(additional_config: Any) -> dict[str, Any] | None:
    """The policy settings in ``additional_config``; None for stock vLLM.

    ``kv_policy`` is a policy name or an object of settings. The other flag names work beside it.
    ``full`` means stock vLLM.

    Raises:
        KVPolicyError: ``kv_policy`` is neither a name nor an object, it has no name, a setting is
            given twice, or a setting stands beside ``kv_policy`` instead of inside it.
    """
    if not isinstance(additional_config, dict):
        return None
    _check_keys(additional_config)
    given = {key: additional_config[key] for key in ARGUMENTS if key in additional_config}
    if not given:
        return None
    raw = given.get(CONFIG_KEY, {})
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, dict):
        raise KVPolicyError(
            f'additional_config["{CONFIG_KEY}"] must be a policy name or an object such as '
            f'{{"name": "cascade", "budget": 2048}}, not {raw!r}'
        )
    raw = _with_flags(raw, given)
    if "name" not in raw:
        raise KVPolicyError(
            f'additional_config["{CONFIG_KEY}"] has no "name"; add one, for example '
            '{"name": "cascade"}'
        )
    if raw["name"] == "full":
        if len(raw) > 1:
            extra = ", ".join(sorted(set(raw) - {"name"}))
            raise KVPolicyError(
                f"kv_policy: full is stock vLLM and takes no settings; remove {extra} or choose "
                "another policy"
            )
        return None
    return raw


def _with_flags(raw: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge ``kv_policy_config``, ``kv_budget`` and ``kv_recall`` into the settings ``raw``."""
    more = given.get(ARGUMENTS[2]) or {}
    if not isinstance(more, dict):
        raise KVPolicyError(
            f'additional_config["{ARGUMENTS[2]}"] must be an object of settings, not {more!r}'
        )
    flags = {"budget": given.get(ARGUMENTS[1]), "recall": given.get(ARGUMENTS[3])}
    flags = {key: value for key, value in flags.items() if value is not None}
    added = {**more, **flags}
    twice = set(raw) & set(added) | set(flags) & set(more)
    if twice:
        raise KVPolicyError(f"additional_config gives {', '.join(sorted(twice))} twice; remove one")
    return {**raw, **added}


def _setting_names(cls: type[KVPolicyConfig]) -> set[str]:
    """All keys that ``cls`` and its subclasses accept."""
    return {"name", *cls.model_fields}.union(*map(_setting_names, cls.__subclasses__()))


def _check_keys(additional_config: dict[str, Any]) -> None:
    """Reject mistyped or misplaced keys of this plugin; ignore keys of other plugins."""
    for key in additional_config.keys() - set(ARGUMENTS):
        plain = str(key).lower().replace("-", "_")
        close = difflib.get_close_matches(plain, ARGUMENTS, n=1, cutoff=0.85)
        if close:
            raise KVPolicyError(
                f"additional_config has {key!r}, which nobody reads; did you mean {close[0]!r}?"
            )
        if CONFIG_KEY in additional_config and key in _setting_names(KVPolicyConfig):
            raise KVPolicyError(
                f"additional_config has {key!r} beside {CONFIG_KEY!r}; put it inside, as in "
                f'{{"{CONFIG_KEY}": {{"name": "cascade", "{key}": ...}}}}'
            )
