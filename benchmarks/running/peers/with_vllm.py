# SPDX-License-Identifier: Apache-2.0
"""This project's own arms, and stock vLLM: a text is a prompt, which the engine cuts into steps."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.running.engines import EngineSettings
from benchmarks.running.peers.process import Task
from benchmarks.running.peers.questions import Held, Program, Timing


def load(task: Task) -> Program:
    """An engine under ``settings["policy"]`` (None: stock); see ``Engine``."""
    return Engine(task.model, **task.settings)


class Engine(Program):
    """A ``Program``: one engine, one request at a time.

    Args:
        positions: longest text, prompt and answer together.
        compiled: by torch.compile, as vLLM does by itself; quality does not need it.
    """

    def __init__(
        self, model: str, policy: dict[str, Any] | None, positions: int, compiled: bool = False
    ) -> None:
        self.positions = None if policy else positions - 2  # two tokens are written
        self._llm = EngineSettings(
            model=model,
            policy=policy,
            dtype="bfloat16",
            max_model_len=positions,
            max_num_batched_tokens=1024,
            arguments={
                "enforce_eager": not compiled,
                "use_tqdm_on_load": False,
                "enable_prefix_caching": False,  # a prompt that warms up is read again, and timed
            },
        ).start()
        self._most, self._count, self._scoring = Held(0, 0), 0, False

    def stream(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._costs(list(token_ids))

    def continuation(self, prompt: Sequence[int], following: Sequence[int]) -> np.ndarray:
        return self._costs([*prompt, *following])[-len(following) :]

    def answer(self, context: Sequence[int], question: Sequence[int], most: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=most, temperature=0.0)
        made, _ = self._request([*context, *question], params)
        stops = self._llm.get_tokenizer().all_special_ids
        return [token for token in made.outputs[0].token_ids if token not in stops]

    def speed(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        _, (start, first, end) = self._request(list(prompt), params)
        return Timing(first - start, end - first)

    def held(self) -> Held:
        return self._most

    def _costs(self, token_ids: list[int]) -> np.ndarray:
        from vllm import SamplingParams

        from benchmarks.running import prompt_scores

        if not self._scoring:
            prompt_scores.install(self._llm)
            self._scoring = True
        params = SamplingParams(
            max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=0, flat_logprobs=True
        )
        output, _ = self._request(token_ids, params)
        return -np.asarray(output.prompt_logprobs.logprobs, dtype=np.float64)

    def _request(self, token_ids: list[int], params: Any) -> tuple[Any, tuple[float, ...]]:
        """The last output of a request, and when it came, gave its first token and ended."""
        from benchmarks.running.stream import bytes_per_page, pages_in_use

        engine, output, first, pages = self._llm.llm_engine, None, 0.0, 0
        self._count += 1
        start = time.perf_counter()
        engine.add_request(str(self._count), {"prompt_token_ids": token_ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not first and output.outputs and output.outputs[0].token_ids:
                    first = time.perf_counter()
            pages = max(pages, pages_in_use(self._llm))
        end = time.perf_counter()
        page = bytes_per_page(engine.vllm_config)
        block = engine.vllm_config.cache_config.block_size
        self._most = Held(
            max(self._most.tokens, pages * block), max(self._most.bytes, pages * page)
        )
        return output, (start, first, end)
