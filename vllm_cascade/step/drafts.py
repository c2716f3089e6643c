# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step are drafts (speculative decoding), and which drafts were rejected.

A row of a known token and drafts runs as waves of single tokens, as without speculation. Before
each draft, every layer saves what inserting it changes. In the next step the scheduler says how
many tokens of the request are computed. The drafts behind them were rejected, and are undone before
anything else reads or writes pages. A request's state is then that of a run without speculation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

HOST_DRAFTERS = ("ngram", "suffix", "custom_class")
"""Methods of vLLM whose drafts come from token ids, without a model that has a cache."""
MODEL_DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafts come from a model with layers that attend."""


def most_drafts(config: VllmConfig) -> int:
    """Most draft tokens of a request in a step; 0: no speculative decoding."""
    return 0 if config.speculative_config is None else config.num_speculative_tokens


@dataclass(frozen=True)
class Drafted:
    """Drafts of a request's last row: all of them, or the last ones, which were rejected.

    Attributes:
        name: the request's id.
        begin: stream index of the first one.
        num: their number.
        place: number of the first one's place in the layers' saved rows.
    """

    name: str
    begin: int
    num: int
    place: int


class Drafts:
    """A worker's requests with drafts that are neither accepted nor rejected yet.

    Args:
        most_requests: requests that run at once.
        most: drafts of a request in a step.

    Attributes:
        warming_up: True while vLLM runs requests of its own before it serves. No scheduler counts
            the tokens that they keep, so their drafts are dropped and not undone.
    """

    def __init__(self, most_requests: int, most: int) -> None:
        self.most = most
        self.warming_up = False
        self._free = list(range(most_requests))[::-1]
        self._drafted: dict[str, Drafted] = {}

    def note(self, output: SchedulerOutput) -> list[Drafted]:
        """Follow the scheduler; called before every step. Returns what is to be undone."""
        for name in output.preempted_req_ids or ():
            self._take(name)  # its pages are gone
        computed = dict(getattr(output, "ended", {}))
        rejected = [self._reject(name, num) for name, num in computed.items()]
        for name in output.finished_req_ids:
            dropped = self._take(name)
            assert dropped is None or self.warming_up, (
                "a request ended, and its tokens are not known"
            )
        cached = output.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        rejected += [self._reject(name, num) for name, num in begins.items()]
        for name, num, drafts in self._rows(output):
            begin = begins[name] + num - drafts
            assert begin > begins[name], "a row begins with a token that is known"
            self._drafted[name] = Drafted(name, begin, drafts, self._free.pop() * self.most)
        return [found for found in rejected if found is not None]

    def _rows(self, output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
        """Rows whose tokens are saved: the request, its tokens, and how many of them are drafts."""
        for name, tokens in output.scheduled_spec_decode_tokens.items():
            yield name, output.num_scheduled_tokens[name], len(tokens)

    def _take(self, name: str) -> Drafted | None:
        drafted = self._drafted.pop(name, None)
        if drafted is not None:
            self._free.append(drafted.place // self.most)
        return drafted

    def _reject(self, name: str, computed: int) -> Drafted | None:
        """The drafts behind the first ``computed`` tokens of a request, if it had drafts."""
        drafted = self._take(name)
        if drafted is None or self.warming_up:
            return None
        accepted = computed - drafted.begin
        assert 0 <= accepted <= drafted.num, (computed, drafted)
        if accepted == drafted.num:
            return None
        return Drafted(name, computed, drafted.num - accepted, drafted.place + accepted)

    def drafting(self, names: Sequence[str | None], ends: np.ndarray) -> list[int]:
        """Rows of a batch whose last tokens may be undone.

        Args:
            names: request ids by row in the batch.
            ends: int ``[B]``, the rows' ends in the stream.
        """
        own = [self._drafted.get(name) if name else None for name in names]
        pairs = enumerate(zip(own, ends.tolist(), strict=False))
        return [row for row, (one, end) in pairs if one is not None and one.begin < end]

    def saves(
        self, names: Sequence[str | None], rows: np.ndarray, stream: np.ndarray
    ) -> np.ndarray:
        """Places of a wave's tokens, int32; -1: not a draft.

        Args:
            names: request ids by row in the batch.
            rows: int ``[R]``, each token's row in the batch.
            stream: int ``[R]``, stream indices.
        """
        places = np.full(len(rows), -1, dtype=np.int32)
        for i, (row, token) in enumerate(zip(rows.tolist(), stream.tolist(), strict=True)):
            drafted = self._drafted.get(names[row]) if row < len(names) else None
            if drafted is not None and token >= drafted.begin:
                places[i] = drafted.place + token - drafted.begin
        return places


class ModelDrafts(Drafts):
    """The tokens that a drafting model's layers may have to undo.

    Its rows continue behind the target's: with the token that the target has sampled, and with all
    drafts but the last. The next step begins before these, whatever was accepted. Accepted drafts
    of the target's row are undone only behind the end of an answer.

    Args:
        most_requests: requests that run at once.
        most: drafts of a request in a step.
    """

    def __init__(self, most_requests: int, most: int) -> None:
        super().__init__(most_requests, self.saved(most))

    @staticmethod
    def saved(most: int) -> int:
        """Most tokens of a request in a step that may be undone."""
        return 2 * most

    def _rows(self, output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
        for name, num in output.num_scheduled_tokens.items():
            yield name, num, len(output.scheduled_spec_decode_tokens.get(name, ()))

    def ran(self, name: str, end: int) -> None:
        """Note that the layers have inserted a request's tokens before ``end``."""
        drafted = self._drafted[name]
        assert end - drafted.begin <= self.most, (end, drafted)
        self._drafted[name] = replace(drafted, num=max(end - drafted.begin, 0))
