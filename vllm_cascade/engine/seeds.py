# SPDX-License-Identifier: Apache-2.0
"""A request's own ``seed`` when its prompt takes several steps.

vLLM samples every row of a step and throws away the samples of unfinished prompts; a request's
generator is then set back by the draw. A CPU generator cannot be set back: vLLM 0.32.0 dies with
``CPU Generator does not use offset``, and one user's request must not stop a server. Here those
rows do not draw from their generators in the first place, which is the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@contextmanager
def unfinished_prompts_draw_nothing(runner: GPUModelRunner) -> Iterator[None]:
    """Hide the generators of rows whose samples are thrown away while a step is sampled."""
    batch = runner.input_batch
    unfinished = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
    hidden = {
        row: batch.generators.pop(row) for row in unfinished.tolist() if row in batch.generators
    }
    try:
        yield
    finally:
        batch.generators.update(hidden)
