# SPDX-License-Identifier: Apache-2.0
"""Chats with one request per turn, and the same chat as one request that never ends.

The second is vLLM's streaming input: the request stays in the engine between turns and keeps its
pages, so no session code runs. The engine must run in this process.
"""

import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.engine.pool import generated

Turn = tuple[list[int], list[float]]
NEW = 75
"""Tokens that a user says each turn; no multiple of anything."""
ANSWER = 40


def params(max_tokens: int = ANSWER, **kwargs: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, logprobs=0, ignore_eos=True, **kwargs
    )


def ask(llm: Any, prompt: list[int], **kwargs: Any) -> tuple[int, Turn]:
    """Tokens that were not read, and the answer."""
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params(**kwargs), use_tqdm=False)
    return output.num_cached_tokens, generated(output)


def says(tokens: list[int], turn: int) -> list[int]:
    return tokens[500 * turn : 500 * turn + NEW]


def chat(llm: Any, tokens: list[int], turns: int, between: Any = lambda: None) -> list[Turn]:
    """A chat whose every turn is a request of its own; only new tokens are read."""
    history: list[int] = []
    answers = []
    for turn in range(turns):
        known = len(history) - 1 if history else 0
        history += says(tokens, turn)
        cached, answer = ask(llm, history)
        assert cached == known, (turn, cached, known)
        history += answer[0]
        answers.append(answer)
        between()
    return answers


def uninterrupted(llm: Any, tokens: list[int], turns: int) -> list[Turn]:
    """The same chat as one streaming-input request, which never leaves the engine."""
    from vllm.v1.engine import EngineCoreRequest

    core = llm.llm_engine.engine_core.engine_core
    answers: list[Turn] = []
    last: list[int] = []
    for turn in range(turns):
        one = params()
        one.update_from_generation_config({}, 0)
        request = EngineCoreRequest(
            request_id="stream",
            prompt_token_ids=[*last, *says(tokens, turn)],
            mm_features=None,
            sampling_params=one,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt="stream",  # finds nothing
            data_parallel_rank=None,
            resumable=True,
        )
        core.add_request(*core.preprocess_add_request(request))
        sampled: list[int] = []
        logprobs: list[float] = []
        while len(sampled) < ANSWER:
            outputs, _ = core.step_fn()
            for output in outputs[0].outputs if outputs and 0 in outputs else ():
                sampled += output.new_token_ids
                if output.new_logprobs is not None:
                    logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        answers.append((sampled, logprobs))
        last = sampled[-1:]  # a streaming request drops what was not computed
    core.abort_requests(["stream"])
    core.step_fn()
    return answers


def index_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.sessions.index


def flush(llm: Any) -> None:
    """A step without requests, in which workers hear of finished ones."""
    llm.llm_engine.engine_core.engine_core.step_fn()


def wait_for_files(folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + 20
    while len(list(folder.glob("[!.]*.session"))) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.05)
