# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompt tokens without a float32 row of the vocabulary for each of them.

For ``prompt_logprobs=0`` vLLM turns the logits of a whole step into float32 log-probabilities, of
which one a row is asked for, and then counts ranks. With 49,152 entries and steps of 1,024 tokens
these are 200 MB that leave every cache, and a function that every engine compiles first. Here it
is done some rows at a time, with the same operation on each row, and no rank is counted.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM

ROWS = 64
"""At a time: 12 MB of float32 for a vocabulary of 49,152, which stay in a CPU's cache."""


def install(llm: "LLM") -> None:
    """For an engine in this process that serves ``prompt_logprobs=0`` and no other scores.

    Ranks are 0 from then on.
    """
    llm.collective_rpc(_install)


def _install(worker: Any) -> None:
    sampler = worker.model_runner.sampler
    # ``_gather`` makes log-probabilities a few rows at a time, and so gets the logits as they are.
    sampler.compute_logprobs = lambda logits: logits
    sampler.gather_logprobs = _gather


def _gather(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    """What vLLM's ``Sampler.gather_logprobs`` returns, from logits.

    Raises:
        ValueError: more than the token's own log-probability is asked for.
    """
    from vllm.v1.outputs import LogprobsTensors

    if num_logprobs:
        raise ValueError(f"only prompt_logprobs=0 is scored here, not {num_logprobs}")
    scores = log_probabilities(logits, token_ids)
    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(ids.to(torch.int32), scores.unsqueeze(-1), torch.zeros_like(token_ids))


def log_probabilities(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Of one token a row: float32 ``[rows]``, from logits ``[rows, vocabulary]`` of any dtype."""
    made = [
        -torch.nn.functional.cross_entropy(part.float(), ids, reduction="none")
        for part, ids in zip(logits.split(ROWS), token_ids.split(ROWS), strict=True)
    ]
    return torch.cat(made) if made else logits.new_empty(0, dtype=torch.float32)
