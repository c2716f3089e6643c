# SPDX-License-Identifier: Apache-2.0
"""Sessions over ranks and stages: byte-equal to a stream that was never interrupted.

Each rank keeps its own layers and heads. A session is found only if every rank has its part.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.chats import ask, chat, flush, index_of, says, uninterrupted, wait_for_files
from tests.engine.pool import EnginePool, pool_usage
from tests.engine.test_pipeline_parallel import cores
from tests.engine.test_sessions import CASES, NEXT, check_chat, engine

pytestmark = pytest.mark.slow  # an engine of several processes takes long to start

SIZES = {"2 ranks": (2, 1), "2 stages": (1, 2), "2 stages of 2 ranks": (2, 2)}


def spread(
    pool: EnginePool, name: str, sizes: tuple[int, int], folder: str | None = None, **kwargs: Any
) -> Any:
    ranks, stages = sizes
    return engine(
        pool,
        CASES[name],
        folder,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        distributed_executor_backend="mp",
        env=cores(ranks * stages),
        **kwargs,
    )


def policies_over_ranks() -> list[Any]:
    """All policies on all sizes that do not refuse them."""
    over_stages = {"dgc", "dgc-heads"}  # scores from token ids, which only the first stage has
    over_ranks = {"dgc-cluster"}  # needs the keys of every rank
    return [
        pytest.param(policy, sizes, id=f"{policy}-{name}")
        for policy in CASES
        for name, sizes in SIZES.items()
        if not (policy in over_stages and sizes[1] > 1)
        and not (policy in over_ranks and sizes[0] > 1)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), policies_over_ranks())
def test_a_resumed_chat_is_the_uninterrupted_one(
    name: str, sizes: tuple[int, int], engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    check_chat(spread(engine_pool, name, sizes), book_tokens, turns=4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_new_engine_on_the_folder_and_a_missing_part(
    sizes: tuple[int, int], engine_pool: EnginePool, book_tokens: list[int], tmp_path: Path
) -> None:
    """Every rank reads its file; without one of the files the chat is read again."""
    world = sizes[0] * sizes[1]
    llm = spread(engine_pool, "recall", sizes, str(tmp_path))
    truth = uninterrupted(llm, book_tokens, 4)
    answers = chat(llm, book_tokens, 3, between=lambda: time.sleep(0.2))
    flush(llm)
    wait_for_files(tmp_path, 3 * world)
    engine_pool.close()

    llm = spread(engine_pool, "recall", sizes, str(tmp_path))
    index = index_of(llm)
    assert index.held == {"memory": 0, "disk": 3}
    history = [token for n in range(3) for token in says(book_tokens, n) + answers[n][0]]
    cached, last = ask(llm, history + says(book_tokens, 3))
    assert cached == len(history) - 1 and index.counters.hits == {"disk": 1}
    assert [*answers, last] == truth and pool_usage(llm) == 0.0

    # The second turn's session: its last rank's file is gone.
    known = len(history) - len(says(book_tokens, 2) + answers[2][0]) - 1
    (second,) = (one for one in index._sessions.values() if one.num_tokens == known)
    (tmp_path / f"{second.id}.{world - 1}of{world}.session").unlink()
    cached, _ = ask(llm, [*history[: known + 1], *NEXT], max_tokens=1)
    flush(llm)
    assert cached < known and index.counters.lost["missing"] == 1
    assert second not in index._sessions.values() and index.counters.hits["disk"] <= 2
    deadline = time.monotonic() + 20
    while list(tmp_path.glob(f"{second.id}*")):
        assert time.monotonic() < deadline, "the other ranks' files are removed"
        time.sleep(0.05)
    engine_pool.close()
