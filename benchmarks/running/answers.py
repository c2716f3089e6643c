# SPDX-License-Identifier: Apache-2.0
"""Answers to prompts: greedy, of one engine an arm, kept one by one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.inputs.texts import whole_text
from benchmarks.running import arms, parts
from benchmarks.running.engines import EngineSettings

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Asking:
    """All prompts for one engine.

    Attributes:
        prompts: as tokens (``as_tokens``).
        arm: where answers are kept; None: nowhere.
    """

    label: str
    engine: EngineSettings
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    max_tokens: int
    arm: parts.Arm | None = None

    @property
    def keys(self) -> list[str]:
        return [parts.digest_of_tokens(prompt) for prompt in self.prompts]

    def determines(self) -> dict[str, Any]:
        return {**self.engine.determines(), "max_tokens": self.max_tokens}

    def result(self, values: list[str]) -> list[str]:
        return values


def as_tokens(tokenizer: Any, text: str, chat: bool, answer: str = "") -> tuple[int, ...]:
    """A prompt, or what the chat template makes of it as the user's turn, up to the answer.

    Args:
        answer: how the answer begins.

    Raises:
        ValueError: ``chat``, but the model has no template.
    """
    if not chat:
        return tuple(whole_text(tokenizer, f"{text} {answer}" if answer else text))
    if not tokenizer.chat_template:
        raise ValueError(
            f"--chat: {tokenizer.name_or_path} has no chat template; leave --chat out, or name an "
            "instruct model with --model"
        )
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(whole + answer, add_special_tokens=False)["input_ids"])


def ask_all(
    jobs: Sequence[Asking], at_a_time: int = 1, kept_in: parts.Parts | None = None
) -> arms.Outcome[list[str]]:
    """Every engine's answers, each in a process of its own."""
    return arms.run_all(ask, jobs, at_a_time, kept_in)


def ask(job: Asking) -> list[str]:
    """One engine's answers, in this (child) process."""
    llm = job.engine.start()
    return arms.fill(job, lambda places: _answers(llm, job, places))


def _answers(llm: "LLM", job: Asking, places: Sequence[int]) -> Iterable[dict[int, str]]:
    from tqdm import tqdm
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    engine = llm.llm_engine
    for place in places:
        engine.add_request(str(place), {"prompt_token_ids": list(job.prompts[place])}, params)
    with tqdm(total=len(places), desc=job.label[:40], unit="prompt", leave=False) as bar:
        while engine.has_unfinished_requests():
            ended = [output for output in engine.step() if output.finished]
            if ended:
                bar.update(len(ended))
                yield {int(output.request_id): output.outputs[0].text for output in ended}
