# SPDX-License-Identifier: Apache-2.0
"""Triton for the type checker: kernels are a language of their own, so every name is ``Any``."""

from typing import Any

def __getattr__(name: str) -> Any: ...
