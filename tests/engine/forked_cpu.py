# SPDX-License-Identifier: Apache-2.0
"""``vllm`` whose processes are forked, so that a server imports vLLM once instead of three times.

vLLM's CPU platform has every process spawned: importing vLLM again takes most of a small server's
start. Tests of ``vllm serve`` itself (``test_serve.py``) keep what users run.
"""

import os
import sys
from typing import Any


def check_and_update_config(original: Any) -> classmethod:
    def with_forks(cls: type, config: Any) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    return classmethod(with_forks)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    CpuPlatform.check_and_update_config = check_and_update_config(original)
    sys.exit(main())
