# SPDX-License-Identifier: Apache-2.0
"""Copies beside the steps: a side stream that is as late as it may be changes nothing.

``LateStream`` copies when somebody waits, and never before. Between, the test does what steps do:
it changes pages. Memory that may be used again is spoiled.
"""

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_cascade.sessions import copies as module
from vllm_cascade.sessions.copies import Copies, StreamCopies

BLOCKS = 12
WIDTHS = (64, 68, 200)


class LateStream:
    """A side stream whose copies run as late as events allow, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[LateEvent, torch.Tensor, torch.Tensor]] = []
        self.held = 0
        self.lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> "LateEvent":
        event = LateEvent(self)
        self.waiting.append((event, target, source))
        return event

    def mark(self) -> "LateEvent":
        event = LateEvent(self)
        event.done = True
        return event

    def hold_steps(self, event: "LateEvent") -> None:
        self.held += 1
        event.synchronize()

    def advance(self) -> None:
        event, target, source = self.waiting.pop(0)
        target.copy_(source)
        event.done = True


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self.stream, self.done = stream, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        with self.stream.lock:
            while not self.done:
                self.stream.advance()


def pools(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 127, (BLOCKS, width), dtype=torch.int8, generator=generator)
        for width in WIDTHS
    ]


def in_turn(made: StreamCopies) -> list[Any]:
    """Let the thread of copies run only when the returned tasks are called."""
    tasks: list[Any] = []
    submit, shutdown = made._thread.submit, made._thread.shutdown

    class Held:
        def submit(self, task: Any) -> Any:
            gate = module.Future()
            tasks.append(lambda: gate.set_result(None))
            return submit(lambda: (gate.result(), task())[1])

        def shutdown(self) -> None:
            shutdown()

    made._thread = Held()  # type: ignore[assignment]
    return tasks


def test_pages_are_those_at_the_step_that_saved_them() -> None:
    """Steps change the pages before their copies have begun."""
    side, own = LateStream(), pools(1)
    made: Any = StreamCopies(own, side)
    tasks = in_turn(made)
    wanted = [pool[[4, 9, 2]].clone() for pool in own]
    saved = made.save((4, 9, 2))
    for pool in own:
        pool.zero_()
    assert not saved.done() and len(side.waiting) == len(WIDTHS)
    tasks.pop()()
    assert all(map(torch.equal, saved.result(30), wanted))
    assert side.held == 0, "no step waited for a save"
    made.restore((7, 0, 1), saved.result())
    assert all(pool[[7, 0, 1]].equal(pages) for pool, pages in zip(own, wanted, strict=True))
    assert not side.waiting and side.held == len(WIDTHS), "the step that reads them waited"


def test_what_was_saved_is_ordinary_memory_of_its_own() -> None:
    side, own = LateStream(), pools(2)
    made = StreamCopies(own, side)
    filled = tuple(pool.clone() for pool in own)
    settled = tuple(torch.empty_like(pool) for pool in own)
    made.settle(filled, settled).result(30)
    for tensor in filled:
        tensor.zero_()
    assert all(map(torch.equal, settled, own))
    made.close()


def test_a_save_that_is_too_large_for_the_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its copy takes no more than the bound, beside one pool's pages."""
    monkeypatch.setattr(module, "MOST_STAGED", 500)
    side, own = LateStream(), pools(3)
    made: Any = StreamCopies(own, side)
    tasks = in_turn(made)
    saved = []
    for n in range(6):
        blocks = (n, n + 1)
        wanted = [pool[list(blocks)].clone() for pool in own]
        saved.append((made.save(blocks), wanted))
        assert sum(tensor.nbytes for _, tensor in made._staged) <= 500
        for pool in own:
            pool[list(blocks)] = n
    assert side.held > 0
    for task in tasks:
        task()
    for pages, wanted in saved:
        assert all(map(torch.equal, pages.result(30), wanted))
    made._free_staged(0)
    assert not made._staged


@pytest.mark.parametrize("most", [0, 3 * sum(WIDTHS), 6 * sum(WIDTHS)])
def test_saves_wait_for_pinned_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chats that end in one step: each save pins two blocks, and one may be under way."""
    monkeypatch.setattr(module, "MOST_PINNED", most)
    own = pools(6)
    made: Any = StreamCopies(own, LateStream())
    tasks = in_turn(made)
    at_once = max(most // (2 * sum(WIDTHS)), 1)
    saved = [made.save((n, n + 1)) for n in range(at_once)]
    thread = threading.Thread(target=lambda: saved.append(made.save((8, 9))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and len(saved) == at_once, "the next one waits"
    tasks[0]()
    thread.join(30)
    assert not thread.is_alive() and saved[0].done()
    for task in tasks[1:]:
        task()
    assert all(map(torch.equal, saved[-1].result(30), [pool[[8, 9]] for pool in own]))
    made.close()


def test_at_random_as_plain_copies() -> None:
    """Saves, steps, restores and progress in any order, beside copies that are at once complete."""
    rng = random.Random(5)
    late, plain = pools(4), pools(4)
    side = LateStream()
    made, truth = StreamCopies(late, side), Copies(plain)
    saved: list[tuple[Any, Any]] = []
    for n in range(400):
        blocks = rng.sample(range(BLOCKS), rng.randrange(1, 5))
        match rng.randrange(4):
            case 0:
                saved.append((made.save(blocks), truth.save(blocks)))
            case 1 if saved:
                one, other = rng.choice(saved)
                pages = other.result()
                blocks = rng.sample(range(BLOCKS), len(pages[0]))
                made.restore(blocks, one.result(30))
                truth.restore(blocks, pages)
            case _:
                for pool in (*late, *plain):
                    pool[blocks] = n % 100
        assert all(map(torch.equal, late, plain))
    made.close()
    assert len(saved) > 50
    for one, other in saved:
        assert all(map(torch.equal, one.result(), other.result()))


def test_the_thread_of_copies_uses_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's device is the first one until it sets another: a context there takes memory."""
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: used.append((threading.current_thread().name, device)),
    )
    one = torch.device("cuda", 1)
    copies = StreamCopies([SimpleNamespace(device=one)], LateStream())  # type: ignore
    copies.close()
    assert used == [("kv-sessions-copies_0", one)]
    StreamCopies([torch.zeros(2, 64)], LateStream()).close()  # type: ignore
    assert len(used) == 1, "on the CPU there is none"
