# SPDX-License-Identifier: Apache-2.0
"""Step tables on the device: the engine's policy, and those of requests' own as they come.

A captured graph has the address of the rules that a step row points to, so these stay in one
buffer for the engine's whole life. Everything else is read before a graph is replayed, and may
move when a policy is added.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_cascade.kernels.triton.schedule import HEAD_COLUMNS, TABLE_COLUMNS, Schedule
from vllm_cascade.kernels.triton.tiles import float_bits
from vllm_cascade.policies import Policy
from vllm_cascade.policies.per_request import MAX_OWN_RULES
from vllm_cascade.policies.rules import COUNT, MORE, RuleTables, rule_tables

SPARE = 64
"""Policies remembered besides those that can be in one batch."""


class DeviceTables:
    """What ``kernels.schedule`` and ``kernels.insert`` read, for all policies in use.

    Attributes:
        schedule: the step tables; None where the engine's policy has none.
        rules: int32 ``[n, 4]``, further rules of all policies; never moves.
    """

    def __init__(self, policy: Policy, device: torch.device, max_requests: int) -> None:
        self._engine, self._device = policy, device
        self._most = max_requests + SPARE
        own = rule_tables(policy)
        more = 0 if own is None else len(own.more)
        room = 1 + more + self._most * MAX_OWN_RULES
        self.rules = torch.zeros(room, 4, dtype=torch.int32, device=device)
        self._numbers: dict[int, int] = {}
        self._policies: list[Policy] = []
        self._host: dict[int, np.ndarray] = {}
        self.schedule: Schedule | None = None
        self._load([policy])

    def numbers(self, policies: Sequence[Policy]) -> np.ndarray:
        """int32, each policy's row of ``schedule.heads``; those not there yet are added.

        Policies are told apart by identity, as ``request_policy`` allows.
        """
        missing = {id(p): p for p in policies if id(p) not in self._numbers}
        if missing:
            kept = [*self._policies, *missing.values()]
            if len(kept) > self._most:
                in_use = {id(policy): policy for policy in (self._engine, *policies)}
                kept = list(in_use.values())
            self._load(kept)
        return np.asarray([self._numbers[id(policy)] for policy in policies], dtype=np.int32)

    def rows(self, policy: Policy, stream: np.ndarray) -> np.ndarray:
        """int32 ``[n, 6]``: the rules of inserting tokens ``stream``, as in a step row."""
        self.numbers([policy])
        tables = rule_tables(policy)
        assert tables is not None
        wrapped = tables.transient + (stream - tables.transient) % tables.period
        rows = np.where(stream < tables.transient, stream, wrapped)
        return self._host[id(policy)][rows]

    def _load(self, policies: list[Policy]) -> None:
        self._policies = [policy for policy in policies if rule_tables(policy) is not None]
        self._numbers, self._host = {}, {}
        steps, heads, more = [], [], [np.zeros((1, 4), dtype=np.int32)]
        first_row = 0
        for number, policy in enumerate(self._policies):
            tables = rule_tables(policy)
            assert tables is not None
            columns = tables.steps.copy()
            columns[:, MORE] += sum(len(part) for part in more)
            self._numbers[id(policy)] = number
            self._host[id(policy)] = columns[:, :COUNT]
            heads.append(_head(policy, tables, first_row))
            steps.append(columns)
            more.append(tables.more)
            first_row += len(columns)
        if steps:
            self.schedule = Schedule(
                self._to_device(np.concatenate(steps).reshape(-1, TABLE_COLUMNS)),
                self._to_device(np.asarray(heads, dtype=np.int32).reshape(-1, HEAD_COLUMNS)),
            )
        rules = self._to_device(np.concatenate(more))
        self.rules[: len(rules)].copy_(rules)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def score_numbers(policy: Policy) -> list[int]:
    """A step row's columns from ``PER_QUERY`` on: how scores are compared and updated."""
    average = float_bits(policy.decay), float_bits(policy.weight)
    return [int(policy.needs_age), int(policy.tie == "incoming"), *average]


def _head(policy: Policy, tables: RuleTables, first_row: int) -> list[int]:
    return [first_row, tables.transient, tables.period, *score_numbers(policy)]
