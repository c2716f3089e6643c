# SPDX-License-Identifier: Apache-2.0
"""The package's logger, which uses vLLM's log format and settings."""

from vllm.logger import init_logger

logger = init_logger("vllm.plugins.vllm_cascade")
