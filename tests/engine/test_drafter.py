# SPDX-License-Identifier: Apache-2.0
"""The passes of a drafting model, beside lists that say what each of them runs.

On the meta device, which refuses tensors of the host as a GPU does, nothing is computed.
"""

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_cascade.engine.drafter import BoundedDrafter, TargetStep

HIDDEN = 3
NAMES = ["a", "b", "c", "d"]


class Builder:
    """Notes the batches that it plans. Each request's page has 100 slots, and ``d``'s is full."""

    kv_cache_spec = SimpleNamespace(page_slots=100, window=None)

    def __init__(self) -> None:
        self.layer_names = ["layer"]
        self.planned: list[CommonAttentionMetadata] = []

    def build(self, _: int, common: CommonAttentionMetadata) -> str:
        self.planned.append(common)
        return "metadata"

    def peaks(self, common: CommonAttentionMetadata, end: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(end)) == 3, 101, end)


class Drafter(BoundedDrafter):
    """Its hidden states are those that it gets, or else the token ids, plus 1000."""

    def __init__(self, device: torch.device, shifts: bool) -> None:
        self.device, self.shifts, self.builder = device, shifts, Builder()
        self.builders = [self.builder]
        self.requests = SimpleNamespace(names=lambda _: NAMES, blocks=lambda name: [0])
        self.calls: list[Any] = []
        self.padding: list[Any] = []
        self.ends: dict[str, int] = {}
        self.drafts = SimpleNamespace(ran=self.ends.__setitem__)

    @property
    def sees_hidden_states(self) -> bool:
        return self.shifts

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def call_model(self, metadata: Any, token_ids: Any, hidden: Any, images: Any) -> Any:
        assert token_ids.dtype == torch.int32
        if metadata is None:
            self.padding.append((token_ids, hidden))
            return
        assert metadata == {"layer": "metadata"}
        self.calls.append((token_ids, hidden, images))
        states = token_ids[:, None].expand(-1, HIDDEN).float() if hidden is None else hidden
        return token_ids[:, None].expand(-1, HIDDEN).float(), states + 1000


class IndicesAt(TorchDispatchMode):
    """Refuses indices on the host, for which a GPU would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index" in str(func):
            flat = [x for one in args for x in (one if isinstance(one, list | tuple) else [one])]
            devices = {x.device.type for x in flat if isinstance(x, torch.Tensor)}
            assert devices == {"meta"}, func
        return func(*args, **(kwargs or {}))


def step_on(device: torch.device, first: list[int], length: list[int], end: list[int]) -> Any:
    """A step of four requests: ``a`` and ``d`` decode, ``b``'s prompt goes on, and ``c``'s ends.

    The token with index ``i`` of request ``n`` is ``100 * n + i``.
    """
    starts = torch.tensor(np.append(0, np.cumsum(length)), dtype=torch.int32)
    tokens = [100 * n + first[n] + i for n in range(4) for i in range(length[n])]
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(end, dtype=torch.int32).to(device),
        num_reqs=4,
        num_actual_tokens=len(tokens),
        max_query_len=max(length),
        max_seq_len=max(end),
        block_table_tensor=torch.zeros(4, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(0, device=device),
    )
    hidden = torch.tensor(tokens).float()[:, None].expand(-1, HIDDEN) + 0.5
    return TargetStep(
        common,
        np.asarray(first),
        np.asarray(end),
        asked=np.asarray([True, False, True, True]),
        prompt=np.asarray([False, True, True, False]),
        token_ids=torch.tensor(tokens).to(device),
        hidden=hidden.to(device),
        sampled=torch.tensor([901, 902, 903, 904]).to(device),
        following=torch.tensor([777], dtype=torch.int32).to(device),
        images=([torch.zeros(1, HIDDEN, device=device)], torch.arange(len(tokens)) == 4),
    )


def run(
    device: str,
    shifts: bool,
    prompts: bool = True,
    asked: bool = True,
    shared: bool = False,
    num: int = 3,
) -> tuple[Drafter, TargetStep, Any]:
    """Of ``a``'s 5 tokens 2 are rejected. Without ``prompts``, all requests decode.

    ``asked``: False: for no request. ``shared``: with other engines. ``num``: drafts.
    """
    step = step_on(torch.device(device), [20, 5, 30, 40], [5, 4, 3, 1], [23, 9, 33, 41])
    if not prompts:
        step.prompt[:], step.asked[:] = False, True
    step.asked[:] &= asked
    if not asked:
        step = replace(step, following=torch.arange(4, dtype=torch.int32, device=device))
    drafter = Drafter(torch.device(device), shifts)
    drafter.shares_experts = shared
    ends: list[list[int]] = []

    def sample(last: torch.Tensor, end: np.ndarray, number: int) -> torch.Tensor:
        ends.append(end.tolist())
        return last[:, 0].long() + 1

    return drafter, step, (drafter.draft(step, num, sample), ends)


def lists(drafter: Drafter) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each pass: tokens, rows' lengths, and their ends."""
    return [
        (tokens.tolist(), np.diff(common.query_start_loc_cpu).tolist(), common.seq_lens.tolist())
        for (tokens, *_), common in zip(drafter.calls, drafter.builder.planned, strict=True)
    ]


def test_layers_that_follow_the_target() -> None:
    """At a token they see the next one, and the target's hidden state; then their own."""
    drafter, _, (drafts, ends) = run("cpu", shifts=True)
    first, second, third = lists(drafter)
    assert first == (
        [21, 22, 901, 106, 107, 108, 777, 231, 232, 903, 904],
        [3, 4, 3, 1],
        [23, 9, 33, 41],
    )
    # ``b`` is asked for nothing, and ``d`` has no room.
    assert second == ([902, 904], [1, 0, 1, 0], [24, 9, 34, 41])
    assert third == ([903, 905], [1, 0, 1, 0], [25, 9, 35, 41])
    own = [20, 21, 22, 105, 106, 107, 108, 230, 231, 232, 340]
    assert (drafter.calls[0][1][:, 0] - 0.5).tolist() == own
    assert drafter.calls[1][1][:, 0].tolist() == [1022.5, 1232.5]
    assert drafter.calls[2][1][:, 0].tolist() == [2022.5, 2232.5]
    seen = drafter.calls[0][2][1]  # of the step's fifth token, which was rejected, nothing is left
    assert seen.tolist() == [False] * 11
    assert [one.tolist() for one in drafts] == [
        [902, 778, 904, 905],
        [903, 778, 905, 905],
        [904, 778, 906, 905],
    ]
    assert ends == [[23, 9, 33, 41], [24, 9, 34, 41], [25, 9, 35, 41]]
    assert drafter.ends == dict(zip(NAMES, ends[-1], strict=True))


@pytest.mark.parametrize("prompts", [True, False])
def test_a_draft_model(prompts: bool) -> None:
    """The sampled token is no part of a prompt's stride, so it has a pass of its own."""
    drafter, _, (_, ends) = run("cpu", shifts=False, prompts=prompts)
    passes = lists(drafter)
    accepted = [[20, 21, 22], [105, 106, 107, 108], [230, 231, 232], [340]]
    if prompts:
        assert passes[0] == (list(chain(*accepted)), [3, 4, 3, 1], [23, 9, 33, 41])
        assert passes[1] == ([901, 903], [1, 0, 1, 0], [24, 9, 34, 41])
        assert passes[2:] == [
            ([902, 904], [1, 0, 1, 0], [25, 9, 35, 41]),
            ([903, 905], [1, 0, 1, 0], [26, 9, 36, 41]),
        ]
    else:
        rows = [[*row, token] for row, token in zip(accepted, range(901, 905), strict=True)]
        assert passes[0] == (list(chain(*rows)), [4, 5, 4, 2], [24, 10, 34, 42])
        assert passes[1:] == [
            ([902, 903, 904], [1, 1, 1, 0], [25, 11, 35, 42]),
            ([903, 904, 905], [1, 1, 1, 0], [26, 12, 36, 42]),
        ]
    assert drafter.ends == dict(zip(NAMES, ends[-1], strict=True))
    assert all(hidden is None for _, hidden, _ in drafter.calls)


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("shifts", [True, False])
def test_all_tensors_are_on_the_model_s_device(shifts: bool, prompts: bool) -> None:
    with IndicesAt():
        drafter, _, (drafts, _) = run("meta", shifts, prompts)
    assert {one.device.type for one in drafts} == {"meta"}
    for (tokens, hidden, images), common in zip(
        drafter.calls, drafter.builder.planned, strict=True
    ):
        given = [tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor]
        given += [] if hidden is None else [hidden]
        given += [] if images is None else [images[1]]
        assert {one.device.type for one in given} == {"meta"}
        host = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound, common.is_prefilling
        assert {one.device.type for one in host} == {"cpu"}
        assert len(tokens) == common.num_actual_tokens == int(common.query_start_loc_cpu[-1])


@pytest.mark.parametrize("shifts", [True, False])
def test_engines_that_share_experts_run_the_model_equally_often(shifts: bool) -> None:
    """In every step, and where an engine has no request."""
    most = 3 if shifts else 4
    for prompts, asked in ((True, True), (False, True), (True, False)):
        drafter, step, _ = run("cpu", shifts, prompts, asked, shared=True)
        assert len(drafter.calls) + len(drafter.padding) == most, (prompts, asked)
        assert (
            len(drafter.calls)
            == {(True, True): most, (False, True): 3, (True, False): 1}[prompts, asked]
        )
        for token_ids, hidden in drafter.padding:
            assert token_ids.tolist() == [0] and (hidden is not None) == shifts
    drafter.padding.clear()
    drafter.run_padding(5, step.hidden[:5] if shifts else None, 3)
    assert [len(tokens) for tokens, _ in drafter.padding] == [5] * most
    alone, *_ = run("cpu", shifts, asked=False)
    assert len(alone.calls) == 1 and not alone.padding


@pytest.mark.parametrize("shifts", [True, False])
def test_without_drafts_engines_that_share_experts_run_the_model_once(shifts: bool) -> None:
    """vLLM 0.33 asks for none where no engine's requests could use them.

    In a draft model, the token sampled behind a prompt then waits for the next step.
    """
    for prompts, asked in ((True, True), (False, True), (True, False)):
        drafter, step, (drafts, ends) = run("cpu", shifts, prompts, asked, shared=True, num=0)
        assert (len(drafter.calls), len(drafter.padding)) == (1, 0), (prompts, asked)
        assert drafts == [] == ends
        joined = not (shifts or prompts)
        assert list(drafter.ends.values()) == (step.end + joined).tolist()


def test_pictures_reach_the_model_as_embeddings() -> None:
    drafter, given = Drafter(torch.device("cpu"), shifts=True), {}
    tokens, part_of = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([False, True])
    drafter.supports_mm_inputs = False
    assert drafter.inputs_of(tokens, None, None) == {"input_ids": tokens, "inputs_embeds": None}

    def embed_input_ids(ids: torch.Tensor, **kwargs: Any) -> str:
        given.update(kwargs, ids=ids)
        return "embeddings"

    drafter.model, hidden = SimpleNamespace(embed_input_ids=embed_input_ids), torch.zeros(2, 3)
    drafter.supports_mm_inputs = True
    for images in (None, (["image"], part_of)):
        found = drafter.inputs_of(tokens, hidden, images)
        assert found.pop("hidden_states") is hidden
        assert found == {"input_ids": None, "inputs_embeds": "embeddings"}
        embeds, where = images or (None, None)
        assert given == {
            "ids": tokens, "multimodal_embeddings": embeds, "is_multimodal": where
        }  # fmt: skip
