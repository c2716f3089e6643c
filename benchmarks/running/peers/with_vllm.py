# SPDX-License-Identifier: Apache-2.0
"""This project's own arms, and stock vLLM: a text is a prompt, which the engine cuts into steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.running import pools
from benchmarks.running.engines import EngineSettings
from benchmarks.running.peers.process import Task
from benchmarks.running.peers.questions import Held, Program, Timing

if TYPE_CHECKING:
    from benchmarks.running.stream import Together


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
        self._settings = EngineSettings(
            model=model,
            policy=policy,
            dtype="bfloat16",
            max_model_len=positions,
            max_num_batched_tokens=1024,
            # A prompt that warms up is read again, and timed.
            arguments={"enforce_eager": not compiled, "enable_prefix_caching": False},
        )
        self._llm = self._settings.start()
        self._most = Held(0, 0)

    def stream(self, token_ids: Sequence[int]) -> np.ndarray:
        from benchmarks.running import prompt_scores

        prompt_scores.install(self._llm)
        (nll,) = self._read(list(token_ids), 2).nll
        return nll.astype(np.float64)

    def continuation(self, prompt: Sequence[int], following: Sequence[int]) -> np.ndarray:
        return self.stream([*prompt, *following])[-len(following) :]

    def answer(self, context: Sequence[int], question: Sequence[int], most: int) -> list[int]:
        made = self._read([*context, *question], most, scored=False, ignore_eos=False)
        stops = self._llm.get_tokenizer().all_special_ids
        return [token for token in made.written if token not in stops]

    def speed(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        found = self._read(list(prompt), new_tokens, scored=False)
        return Timing(found.seconds, sum(found.token_seconds))

    def held(self) -> Held:
        return self._most

    def _read(self, token_ids: list[int], most: int, **options: bool) -> "Together":
        """Read a prompt and write at most ``most`` tokens; counts what is held meanwhile."""
        from benchmarks.running.stream import read_together

        found = read_together(self._llm, [token_ids], label="vLLM", max_new_tokens=most, **options)
        pages, page = found.pages_peak, pools.page_bytes(self._settings)
        tokens = pages * self._settings.block_size
        self._most = Held(max(self._most.tokens, tokens), max(self._most.bytes, pages * page))
        return found
