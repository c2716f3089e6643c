# SPDX-License-Identifier: Apache-2.0
"""The soak's verdict on made-up runs; and, slow, two real minutes of it."""

import pytest

from tests.soak import WARM_UP, Soak, run, verdict

END = WARM_UP + 1800.0


def seen(memory: float = 0.0, latency: float = 0.0, **kwargs: int) -> Soak:
    """A run of 30 minutes whose memory and latency grew by these shares at its middle."""
    soak = Soak(finished=10, aborted=3)
    for second in range(int(END)):
        late = second > END / 2
        soak.memory.append((second, int(1e9 * (1 + memory * late))))
        soak.gaps += [(second, 0.02 * (1 + latency * late))] * 3
    for name, value in kwargs.items():
        setattr(soak, name, value)
    return soak


@pytest.mark.parametrize(
    ("soak", "wrong"),
    [
        (seen(), []),
        (seen(memory=0.009, latency=0.09), []),
        (seen(memory=-0.2, latency=-0.5), []),
        (seen(memory=0.012), ["resident memory grew by 1.20%, more than 1%"]),
        (seen(latency=0.11), ["p99 between tokens grew by 11.0%, more than 10%"]),
        (seen(wrong=2), ["2 answers to the same prompt differ from the first"]),
        (seen(aborted=0), ["no mixed load: nothing finished or nothing was aborted"]),
    ],
)
def test_verdict(soak: Soak, wrong: list[str]) -> None:
    assert verdict(soak, END) == wrong


@pytest.mark.slow
def test_two_minutes() -> None:
    """Whatever else the machine does meanwhile changes latencies, so those are not judged."""
    assert [line for line in run(2.0) if "p99" not in line] == []
