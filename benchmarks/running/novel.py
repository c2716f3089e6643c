# SPDX-License-Identifier: Apache-2.0
"""One text through several engines, stock vLLM's among them, which stops where its model does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchmarks.running import pools
from benchmarks.running.arms import EngineJob
from benchmarks.running.children import in_children

if TYPE_CHECKING:
    from vllm import LLM

    from benchmarks.running.stream import Together


@dataclass(frozen=True)
class Arm(EngineJob):
    """One engine and what it reads.

    Attributes:
        token_ids: the whole text; stock vLLM reads as much of it as its positions leave room for.
        question: about the text, after all of it.
        new_tokens: generated after that, to time them and for the answer.
    """

    token_ids: list[int] = field(repr=False)
    question: list[int] = field(repr=False)
    new_tokens: int

    @property
    def stock(self) -> bool:
        return self.engine.policy is None

    @property
    def readable(self) -> list[int]:
        """What this engine can read: the text and the question, or the text's first part."""
        if not self.stock:
            return self.token_ids + self.question
        assert self.engine.max_model_len is not None, "stock vLLM's own limit"
        return self.token_ids[: self.engine.max_model_len - self.new_tokens]


@dataclass(frozen=True)
class Read:
    """What an arm gave.

    Attributes:
        page_bytes: one page of every layer, with the policy's per-slot numbers.
        cached: tokens each layer and head set held at the end of the prompt.
        refusal: what the engine says to the whole text; empty if it takes it.
        asked: the question's tokens, which it read after the text; 0 if it could not.
    """

    result: "Together"
    page_bytes: int
    cached: int
    refusal: str
    asked: int


def run(arm: Arm) -> Read:
    """An arm, in this (child) process."""
    llm = arm.engine.start()
    from benchmarks.running.stream import prepare, read_together
    from vllm_cascade.policies.registry import resolve
    from vllm_cascade.policies.schedule import compiled

    read, policy = arm.readable, arm.engine.policy
    whole = len(read) >= len(arm.token_ids)
    refused = "" if whole else refusal(llm, arm.token_ids)
    prepare(llm, read[:256])
    shown = {"label": arm.label, "bar_line": arm.bar_line}
    result = read_together(llm, [read], max_new_tokens=arm.new_tokens, **shown)
    cached = compiled(resolve(policy)).count_at(len(read)) if policy else len(read)
    page = pools.page_bytes(arm.engine)
    return Read(result, page, cached, refused, len(arm.question) if whole else 0)


def refusal(llm: "LLM", token_ids: list[int]) -> str:
    """The engine's own words when it is given a text that is too long for it.

    Raises:
        AssertionError: it takes the text.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        llm.llm_engine.add_request(
            "too long", {"prompt_token_ids": token_ids}, SamplingParams(max_tokens=1)
        )
    except VLLMValidationError as error:
        return str(error)
    llm.llm_engine.abort_request(["too long"])
    raise AssertionError(f"{len(token_ids)} tokens were to be too many, and are not")


def run_all(arms: Sequence[Arm], at_a_time: int) -> Iterable[tuple[str, Read]]:
    """Every arm in a process of its own, ``at_a_time`` at once; in their order, when done.

    Recall's arm, which takes longest of ours, begins second, so that all end at about one time.
    """
    import torch
    from vllm import LLM  # noqa: F401 (children that are forked need not import it again)

    method = "spawn" if torch.cuda.is_initialized() else "fork"
    order = sorted(
        arms, key=lambda arm: (not arm.stock, not (arm.engine.policy or {}).get("recall"))
    )
    placed = [replace(arm, bar_line=index % at_a_time) for index, arm in enumerate(order)]
    done = zip(order, in_children(run, placed, at_a_time, method), strict=True)
    read = {arm.label: found for arm, found in done}
    yield from ((arm.label, read[arm.label]) for arm in arms)
