# SPDX-License-Identifier: Apache-2.0
"""What cannot be tested in ``.venv-next``: new Python files of vLLM over older compiled ones."""

import sys
from pathlib import Path

IS_BORROWED = Path(sys.prefix).name == ".venv-next"
"""Whether this is the environment of ``tools/next_vllm.py``."""

CANNOT_RUN: dict[str, str] = {
    "tests/patches/test_families.py::test_the_page_is_up_to_date": (
        "docs/MODELS.md lists the models of the vLLM that has a CPU build"
    ),
}
"""Tests (``FILE``, or ``FILE::TEST``), each with what keeps it from running there."""


def why_not(node: str) -> str | None:
    """Why a test, as pytest names it, cannot run in ``.venv-next``; None: it can."""
    name = node.partition("[")[0]
    return CANNOT_RUN.get(name) or CANNOT_RUN.get(name.partition("::")[0])
