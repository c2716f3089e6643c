# SPDX-License-Identifier: Apache-2.0
"""The settings shared by all KV policies, and what is raised if they do not fit.

``KVPolicyConfig`` holds the validated settings. A policy subclasses it, so settings and behaviour
are one frozen, hashable, picklable object that can be sent to every process.
``vllm_cascade/policies/arguments.py`` reads what users write.
"""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vllm_cascade.policies.rules import MOST_INSERTIONS

CONFIG_KEY = "kv_policy"
"""Key of the settings in ``VllmConfig.additional_config``."""

DEFAULT_BUDGET = 2048
DEFAULT_PREFILL_STRIDE = 256
DEFAULT_RECALL = 8
"""Units that an engine on CPUs recalls if nothing is said about ``recall``."""
RECALL_UNIT = 16
"""Default of ``unit`` if ``recall`` is set."""
UNIT_SCHEMA = {"anyOf": [{"type": "integer"}, {"const": "page", "type": "string"}]}
"""Values of ``unit`` that users may write. An engine resolves ``page`` before validation."""
MOST_SHOWN, MOST_COMPARED = 80, 64
"""Characters of a value that a message shows, and of a word that similar ones are looked for."""
MOST_NUMBER = 1 << 40
"""Largest integer that a setting may be: a trillion tokens. Others are typing errors."""
OFFER_DEPTH = 3
"""Most further settings that are changed to make an offered value valid."""

Change = dict[str, Any]
Result = TypeVar("Result")


def cut(text: str) -> str:
    """A text for a message: its beginning if it is long, since clients choose its length."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


class _Beginning(reprlib.Repr):
    """Writes as much of a value as a message shows; of a nested one, its outer levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 2 * MOST_SHOWN  # is cut in its middle

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # more digits than Python writes
            return f"an integer of {x.bit_length()} bits"


_beginning = _Beginning()


def shown(value: Any) -> str:
    """A value for a message, as Python writes it; a client's may be megabytes or nested deeply."""
    return cut(_beginning.repr(value))


@dataclass(frozen=True)
class EngineDefault:
    """Marks a field whose default in an engine is another one; ``text`` describes it."""

    text: str


RECALL_DEFAULT = EngineDefault(f"{DEFAULT_RECALL} on CPUs, if it fits; otherwise 0")
UNIT_DEFAULT = EngineDefault(f"1, or {RECALL_UNIT} with recall")
SINKS_DEFAULT = EngineDefault("4, or 1 unit if unit > 1")


class KVPolicyError(ValueError):
    """Invalid setting. The message names the setting, as the user wrote it, and the fix.

    Attributes:
        offers: the changes of settings that the message offers. Each of them is valid.
    """

    def __init__(self, message: str, offers: Sequence[Change] = ()) -> None:
        super().__init__(message)
        self.offers = offers


class Given(dict[str, Any]):
    """Unchecked settings, which remember how the user wrote each of them.

    Attributes:
        names: the user's names of keys, such as ``--kv-budget`` for ``budget``.
        template: makes the name of any other key.
        measured: values of settings that were not given and depend on the machine's free memory.
            Kept apart: vLLM hashes the items into its key of compiled models, which would
            differ at every start.
    """

    names: Mapping[str, str] = {}
    template = "kv_policy.{}"
    measured: Mapping[str, Any] = {}

    def name(self, key: str) -> str:
        return self.names.get(key) or self.template.format(key)


class Misfit(ValueError):
    """A setting that does not fit the other settings, the model or the engine.

    Args:
        key: the setting; ``value`` is its value.
        reason: completes a sentence that begins with the key and its value.
        offers: changes that may help. ``explaining`` offers those that pass every check.
        bound: "at most " or "at least ", if an offer is the end of a range.
        hint: a fix without a number.
    """

    def __init__(
        self, key: str, value: Any, reason: str, *offers: Change, bound: str = "", hint: str = ""
    ) -> None:
        self.key, self.value, self.reason, self.offers = key, value, reason, offers
        self.bound, self.hint = bound, hint
        super().__init__(self.message(offers, str))

    def good(self, attempt: Callable[[Change], Any], depth: int = OFFER_DEPTH) -> list[Change]:
        """The offers that pass ``attempt``, each with the further changes that it needs."""
        good: list[Change] = []
        for change in self.offers if depth else ():
            try:
                attempt(change)
                found = [change]
            except Misfit as other:
                more = other.good(lambda c, change=change: attempt({**change, **c}), depth - 1)
                found = [{**change, **one} for one in more]
            except KVPolicyError:
                continue
            good += [one for one in found if one not in good]
        return good

    def message(self, offers: Iterable[Change], name: Callable[[str], str]) -> str:
        same = [str(change[self.key]) for change in offers if change.keys() == {self.key}]
        fixes = [f"set it to {self.bound}{' or '.join(same)}"] if same else []
        for change in offers:
            if change.keys() != {self.key}:
                fixes.append("set " + " and ".join(f"{name(k)} to {v}" for k, v in change.items()))
        fix = ", or ".join([*fixes, *filter(None, [self.hint])]) or "change the other settings"
        value = cut(self.value) if isinstance(self.value, str) else shown(self.value)
        return f"{name(self.key)} {value} {self.reason}; {fix}"


def explaining(
    attempt: Callable[[Change], Result], given: Given, whose: str = "the default "
) -> Result:
    """What ``attempt`` makes of the settings ``given`` without a change.

    Args:
        attempt: raises ``Misfit`` or ``KVPolicyError`` if the settings do not fit with a change.
        whose: where settings come from that are not given, for the message.

    Raises:
        KVPolicyError: instead of ``Misfit``; the changes that it offers pass ``attempt``.
    """
    try:
        return attempt({})
    except Misfit as misfit:
        good = misfit.good(attempt)
        whose = "" if misfit.key in given else whose
        raise KVPolicyError(whose + misfit.message(good, given.name), good) from None


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown word; empty if no choice is similar.

    Nothing is similar to a long word, and comparing it may take seconds.
    """
    if len(word) > MOST_COMPARED:
        return ""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_numbers(settings: Mapping[str, Any], name: Callable[[str], str]) -> None:
    """Refuse huge integers before anything is computed from them.

    Args:
        name: the user's name of a key.

    Raises:
        KVPolicyError: names the setting.
    """
    for key, value in settings.items():
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise KVPolicyError(
                f"{cut(name(key))} = {shown(value)}: it must be at most {MOST_NUMBER}"
            )


class KVPolicyConfig(BaseModel):
    """Settings shared by every policy (``vllm_cascade/policies``); each policy adds its own.

    ``extra="forbid"`` turns a mistyped key into an error instead of ignoring it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    inert_keys: ClassVar[frozenset[str]] = frozenset()
    """Shared keys that have no effect on this policy. Setting one logs a warning."""
    own_arguments: ClassVar[tuple[str, ...]] = ("budget", "recall", "keep_prompt")
    """Settings that have a flag of their own, and that a request may set."""
    token_keys: ClassVar[tuple[str, ...]] = (
        "budget",
        "num_sinks",
        "keep_prompt",
        "overflow",
        "prefill_stride",
    )
    """Settings that count tokens and must be multiples of ``unit``."""

    budget: int = Field(
        ge=1, description="cached tokens per layer and head, besides the attention sinks"
    )
    num_sinks: Annotated[int, SINKS_DEFAULT] = Field(
        4, ge=0, description="attention sinks: first tokens of a stream, never evicted"
    )
    keep_prompt: int = Field(
        0, ge=0, description="first tokens of a prompt, never evicted, sinks included"
    )
    prefill_stride: int = Field(
        DEFAULT_PREFILL_STRIDE,
        ge=1,
        le=1 << 20,
        description="prompt tokens attended between evictions; 1 is token by token",
    )
    head_policy: Literal["homogeneous", "per_kv_head"] = Field(
        "homogeneous", description="keep the same tokens for all heads, or choose per KV head"
    )
    head_reduction: Literal["mean", "max", "median"] = Field(
        "mean", description="how the scores of several query heads become one"
    )
    ema_gamma: float | None = Field(
        None, gt=0.0, lt=1.0, description="decay of the attention average; null: the paper's"
    )
    tie: Literal["incoming", "resident"] = Field(
        "incoming", description="which of two tokens with equal scores stays"
    )
    overflow: int = Field(
        1, ge=1, description="evict this many tokens at a time (R of lazy pruning)"
    )
    unit: Annotated[int, WithJsonSchema(UNIT_SCHEMA), UNIT_DEFAULT] = Field(
        1, description="consecutive tokens that are kept or evicted together; `page`: a block"
    )
    recall: Annotated[int, RECALL_DEFAULT] = Field(
        0, ge=0, description="evicted units that a query can bring back, besides the budget"
    )
    recall_store: int = Field(
        32768, ge=1, description="evicted tokens per request that host memory holds"
    )
    recall_rows: Literal["exact", "int8"] = Field(
        "exact",
        description="how host memory stores evicted keys and values: as in the cache, or in 8 bits",
    )
    recall_memory: float | None = Field(
        None,
        gt=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="GiB of host memory for the evicted units of all requests and snapshots; null: "
        "as much as --max-num-seqs requests can need, at most a quarter of what is available",
    )
    recall_every: int = Field(4, ge=1, description="decode steps between selections of units")
    recall_queries: int = Field(
        32,
        ge=1,
        le=1 << 16,
        description="evenly spaced queries of a prompt's stride that select units",
    )
    trace: bool = Field(
        False, description="store original token indices in the pages, for inspection"
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
            reason = f"is not a whole number of units of {self.unit} tokens"
            changes = nearest(key, tokens, self.unit)
            raise Misfit(key, tokens, reason, *changes, hint="change unit")
        return self

    @model_validator(mode="after")
    def _check_recall(self) -> Self:
        if not self.recall:
            return self
        if self.unit == 1:
            changes = {"unit": RECALL_UNIT}, {"recall": 0}
            raise Misfit("recall", self.recall, "needs units of several tokens", *changes)
        if self.recall_store < self.recalled:
            reason = f"has no room for {self.recall} recalled units of {self.unit} tokens"
            change = {"recall_store": self.recalled}
            raise Misfit("recall_store", self.recall_store, reason, change, bound="at least ")
        return self

    def check_rows(self) -> None:
        """Bound the table of rules, which has a row per unit of sinks, budget, overflow and recall.

        Raises:
            Misfit: names the setting that takes the most rows.
        """
        units = self.in_units
        first = "keep_prompt" if self.keep_prompt > self.num_sinks else "num_sinks"
        rows = {first: units.num_sinks, "budget": units.budget}
        rows |= {"overflow": units.overflow, "recall": self.recall}
        if (total := sum(rows.values())) > MOST_INSERTIONS:
            key = max(rows, key=rows.__getitem__)
            raise Misfit(
                key,
                getattr(self, key),
                f"makes a table of {total} rows of rules, and the engine has one of at most "
                f"{MOST_INSERTIONS}",
                hint=f"lower {key}",
            )

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
        """The same policy with every token count converted to units.

        A kept prompt becomes sinks, so the rules of all policies keep it.
        """
        if self.unit == 1 and not self.keep_prompt:
            return self
        tokens: dict[str, int | None] = {key: getattr(self, key) for key in self.token_keys}
        units = {
            key: None if n is None else max(n // self.unit, n > 0) for key, n in tokens.items()
        }
        units |= {"num_sinks": max(units["num_sinks"] or 0, units["keep_prompt"] or 0)}
        return self.model_copy(update={**units, "keep_prompt": 0, "unit": 1, "recall": 0})

    def kept(self, prompt_len: int) -> int:
        """Tokens of a prompt that ``keep_prompt`` keeps, rounded up to whole units."""
        return min(-(-prompt_len // self.unit) * self.unit, self.keep_prompt)

    @property
    def protected(self) -> int:
        """Most tokens at a stream's start that are never evicted."""
        return max(self.num_sinks, self.keep_prompt)

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
        return self.protected + self.recalled + self.budget + self.waiting + self.prefill_stride


def nearest(key: str, value: int, step: int) -> list[Change]:
    """The positive multiples of ``step`` next to ``value``, as changes of ``key``."""
    below = value // step * step
    return [{key: multiple} for multiple in (below, below + step) if multiple]


def describe(
    error: ValidationError, name: Callable[[str], str], cls: type[KVPolicyConfig] | None = None
) -> str:
    """Describe every invalid setting in one line.

    Args:
        name: the user's name of a key.
        cls: the policy, whose settings are listed after an unknown key.
    """
    lines = []
    for item in error.errors():
        where = name(cut(str(item["loc"][0]))) if item["loc"] else "kv_policy"
        if item["type"] == "extra_forbidden" and cls is not None:
            keys = ["name", *cls.model_fields]
            hint = did_you_mean(str(item["loc"][0]), keys)
            lines.append(
                f"{where}: unknown key for policy {cls.name!r}; known keys: {', '.join(keys)}{hint}"
            )
        else:
            given = f" = {shown(item['input'])}" if item["loc"] else ""
            lines.append(f"{where}{given}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
