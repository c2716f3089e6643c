# SPDX-License-Identifier: Apache-2.0
"""What the host plans for a step of many requests, against a loop over their tokens."""

from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.attention.steps import step_of
from vllm_cascade.attention.metadata import KVPolicyMetadataBuilder
from vllm_cascade.cache.manager import KVPolicySpec
from vllm_cascade.cache.strides import cut_strides
from vllm_cascade.policies import Policy, resolve

POLICY = resolve({"name": "cascade", "budget": 64, "num_sinks": 4, "prefill_stride": 16})
OWN = resolve({"name": "sink", "budget": 32, "num_sinks": 4, "prefill_stride": 16})
PRUNED = resolve(
    {"name": "sink", "budget": 32, "num_sinks": 4, "prefill_stride": 16, "overflow": 8}
)
ROW = st.tuples(
    st.sampled_from([POLICY, OWN, PRUNED]), st.integers(0, 300), st.integers(0, 70), st.booleans()
)


def builder() -> KVPolicyMetadataBuilder:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=1024))
    spec = KVPolicySpec.from_full(full, POLICY)
    return KVPolicyMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_a_step_of_many_requests(rows: list[tuple[Policy, int, int, bool]]) -> None:
    """(policy, tokens before, tokens now, in its prompt) for each request."""
    lengths = [length for _, _, length, _ in rows]
    table = torch.arange(len(rows) * 32, dtype=torch.int32).view(len(rows), 32)
    firsts, prefilling = [row[1] for row in rows], [row[3] for row in rows]
    common = step_of(firsts, lengths, prefilling, table)
    offsets = common.query_start_loc
    made = builder()
    made.batch.policies = lambda _: [policy for policy, *_ in rows]
    metadata = made.build(0, common)

    positions, planned = [], set()
    for index, (policy, first, length, prefilling) in enumerate(rows):
        bounds = cut_strides(first, first + length, POLICY.prefill_stride, prefilling)
        for depth, (begin, end) in enumerate(pairwise(bounds) if length else ()):
            positions += [policy.count(begin) + token - begin for token in range(begin, end)]
            place = int(offsets[index]) + begin - first
            drops = policy.count(begin) + 1 - policy.count(begin + 1)
            batch = end - begin == 1 and drops <= 1
            planned.add((depth, place, begin, end - begin, policy, batch))
    assert made.positions.buffer[: sum(lengths)].tolist() == positions

    found = set()
    for depth, wave in enumerate(metadata.waves):
        for tokens in wave.tokens:
            for place, begin in zip(tokens.index.tolist(), tokens.stream.tolist(), strict=True):
                policy = rows[sum(int(offset) <= place for offset in offsets[1:])][0]
                found.add((depth, place, begin, 1, policy, True))
        for stride in wave.strides:
            what = (stride.start, stride.stream, stride.num_tokens, stride.policy)
            found.add((depth, *what, False))
    assert found == planned
    assert made.counters.tokens == sum(lengths) and made.counters.strides == len(planned)


def test_no_tokens_no_waves() -> None:
    made = builder()
    made._publish_positions([])
    assert not made.positions.buffer.any()
