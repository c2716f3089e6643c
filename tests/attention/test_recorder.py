# SPDX-License-Identifier: Apache-2.0
"""What a trace forgets when drafts are rejected."""

from vllm_cascade.attention.recorder import Kept, Recorder


def test_only_a_requests_own_tokens_are_forgotten() -> None:
    """A request that ended had the same first page, and another layer and request have theirs."""
    recorder = Recorder()
    ended = [Kept("a", 7, end, []) for end in range(1, 31)]
    others = [Kept("b", 7, 25, []), Kept("a", 9, 25, [])]
    own = [Kept("a", 7, end, []) for end in range(1, 24)]
    recorder.kept = [*ended, *own[:21], *others, *own[21:]]
    recorder.forget("a", 7, 20)
    assert recorder.kept == [*ended, *own[:20], *others]
