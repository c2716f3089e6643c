# SPDX-License-Identifier: Apache-2.0
"""Start a script of this folder with the code of a checkout."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # The scheduler visits sets of request ids: their order decides which pages snapshots take.
    "PYTHONHASHSEED": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}


def start(
    checkout: Path,
    script: str,
    *,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a script, which gets the checkout as its argument and talks by stdin and stdout.

    Args:
        environment: variables beside those of ``ENVIRONMENT``.
        prefix: a command that runs the command, such as ``taskset``.
    """
    python, path = checkout / ".venv/bin/python", Path(__file__).with_name(script)
    return subprocess.Popen(
        [*prefix, python, "-P", path, checkout],
        cwd=checkout,
        env={**os.environ, **ENVIRONMENT, **(environment or {}), "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
