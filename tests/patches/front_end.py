# SPDX-License-Identifier: Apache-2.0
"""What a spawned API server of vLLM does first, in a process that has not loaded plugins yet.

Nothing here imports the plugin.
"""

import argparse
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs


def configured(args: argparse.Namespace) -> tuple[Any, str, int, str]:
    """The settings, the worker, the longest stream and vLLM's hash of parsed arguments."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    settings = config.additional_config
    worker, longest = config.parallel_config.worker_cls, config.model_config.max_model_len
    return settings, worker, longest, config.compute_hash()
