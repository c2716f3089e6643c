# SPDX-License-Identifier: Apache-2.0
"""Supports a request's ``seed`` when its prompt takes several steps.

vLLM samples every row of a step, discards the samples of unfinished prompts and rewinds the
generators of those requests. CPU generators cannot be rewound: vLLM 0.32.0 stops the server with
``CPU Generator does not use offset``. Here these rows do not draw from their generators, which
gives the same samples.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@contextmanager
def unfinished_prompts_draw_nothing(runner: GPUModelRunner) -> Iterator[None]:
    """While a step is sampled, hide the generators of rows with discarded samples."""
    batch = runner.input_batch
    unfinished = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
    hidden = {
        row: batch.generators.pop(row) for row in unfinished.tolist() if row in batch.generators
    }
    try:
        yield
    finally:
        batch.generators.update(hidden)
