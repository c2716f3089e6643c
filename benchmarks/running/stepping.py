# SPDX-License-Identifier: Apache-2.0
"""Engines of one process that take their steps in turn, each with a clock.

Whatever else the machine does hits all of them within the same few milliseconds.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.running.engines import EngineSettings

ATTENTION = ("forward", "do_kv_cache_update")
"""What an attention layer's implementation does in a step."""


@dataclass(frozen=True)
class Step:
    """One step of one engine; milliseconds.

    Attributes:
        attention: the part of it inside the attention implementations of all layers.
    """

    total: float
    attention: float


class Arm:
    """An engine in this process, with a clock around its steps and its attention.

    A step ends when the device has done its work, which all engines of the process share.
    """

    def __init__(self, settings: EngineSettings) -> None:
        arguments = {"async_scheduling": False, **settings.arguments}
        settings = replace(settings, arguments=arguments)
        self.engine = settings.start().llm_engine
        import torch  # not before the engine has set the number of its threads

        on_card = torch.accelerator.is_available()
        self._wait = torch.accelerator.synchronize if on_card else lambda: None
        self._attention = 0.0
        self._requests = itertools.count()
        self._generated = 0
        worker = self.engine.model_executor.driver_worker.worker
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            for name in ATTENTION:
                if hasattr(layer.impl, name):
                    setattr(layer.impl, name, self._clocked(getattr(layer.impl, name)))

    def _now(self) -> float:
        """Seconds, once the device has done what it was told to."""
        self._wait()
        return time.perf_counter()

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = call(*args, **kwargs)
            self._attention += self._now() - begin
            return result

        return clocked

    def add(self, prompt: list[int], output_len: int) -> None:
        """A request that generates ``output_len`` tokens, whatever they are."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=False
        )
        self._generated = 0
        name = f"{id(self)}-{next(self._requests)}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def read(self, prompt: list[int]) -> Iterator[float]:
        """The prompt alone, a step at a time; ms of each."""
        self.add(prompt, 1)
        while self.reading:
            yield self.step().total

    @property
    def reading(self) -> bool:
        """Whether the request has no output yet."""
        return self._generated == 0

    def step(self) -> Step:
        self._attention, begin = 0.0, self._now()
        outputs = self.engine.step()
        total = self._now() - begin
        for output in outputs:
            self._generated = len(output.outputs[0].token_ids)
        return Step(total * 1e3, self._attention * 1e3)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def in_turn(names: Sequence[str], turn: int) -> Sequence[str]:
    """Every other turn the other way round."""
    return names if turn % 2 == 0 else names[::-1]


def generate(arms: Mapping[str, Arm], num: int) -> dict[str, list[Step]]:
    """``num`` steps of every arm, of requests whose prompts have been read and that then end."""
    steps: dict[str, list[Step]] = {name: [] for name in arms}
    for turn in range(num):
        for name in in_turn(list(arms), turn):
            steps[name].append(arms[name].step())
    for arm in arms.values():
        arm.finish()
    return steps
