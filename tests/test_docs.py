# SPDX-License-Identifier: Apache-2.0
"""The documents against the code: every setting and refusal stands there, and no link is broken."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.conftest import ROOT
from tools.settings_page import PAGE, page
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.policies.arguments import default_of
from vllm_cascade.policies.registry import CHOICES, POLICIES
from vllm_cascade.policies.settings import DEFAULT_BUDGET, KVPolicyConfig

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"))
)
SOURCES = ("vllm_cascade", "kernels", "patches", "benchmarks", "tests")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """A document less its code blocks, in which a `#` is a comment."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    starts = [match.start() for match in re.finditer(r"^#+ ", text, flags=re.MULTILINE)]
    for begin, end in pairwise([*starts, len(text)]):
        title, _, body = text[begin:end].partition("\n")
        if title.lstrip("# ") == heading:
            return body
    raise AssertionError(f"no heading {heading!r}")


def rows(body: str) -> dict[str, tuple[str, str]]:
    """Default and meaning of every setting in a section's table."""
    cells = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", body, flags=re.MULTILINE)
    return {name: (default, meaning) for name, default, meaning in cells}


# ---------------------------------------------------------------- POLICIES.md and the registry


def settings_of(cls: type[KVPolicyConfig]) -> dict[str, Any]:
    """The settings that a policy adds, or whose default it changes."""
    shared = KVPolicyConfig.model_fields
    return {
        key: field
        for key, field in cls.model_fields.items()
        if key not in shared or shared[key].default != field.default
    }


def check_rows(found: dict[str, tuple[str, str]], fields: dict[str, Any]) -> None:
    assert set(found) == set(fields)
    for key, field in fields.items():
        default, meaning = found[key]
        default = default.strip("`")
        written = str(DEFAULT_BUDGET) if field.is_required() else default_of(field)
        assert default == written, key
        for value in get_args(field.annotation):
            if isinstance(value, str):
                assert f"`{value}`" in meaning, f"{key} does not say what {value} is"


def test_shared_settings_are_documented() -> None:
    body = section(text_of("docs/POLICIES.md"), "Settings that every policy has")
    check_rows(rows(body), dict(KVPolicyConfig.model_fields))


@pytest.mark.parametrize("name", POLICIES)
def test_every_setting_of_a_policy_is_documented(name: str) -> None:
    cls, body = POLICIES[name], section(text_of("docs/POLICIES.md"), name)
    check_rows(rows(body), settings_of(cls))
    without_effect = "".join(re.findall(r"No\s+effect:([^.]+)", body))
    assert all(f"`{key}`" in without_effect for key in cls.inert_keys)


def test_every_policy_is_in_the_tables() -> None:
    text = text_of("docs/POLICIES.md")
    named = re.findall(r"^\| `(\w+)` \|", section(text, "The policies"), flags=re.MULTILINE)
    assert set(named) == set(CHOICES)
    for cls in POLICIES.values():
        address = re.search(r"https://\S+?(?=[)\s]|$)", cls.paper)
        assert address is None or cls.name == "window" or address[0] in text
    for name in CHOICES:
        assert f"`{name}`" in section(text, "Which policy when")


def test_every_refusal_is_documented() -> None:
    body = section(text_of("docs/OPERATING.md"), "What works, what is refused")
    listed = {
        name.strip()
        for cell in re.findall(r"^\| (.+?) \|", body, flags=re.MULTILINE)
        for name in cell.split(",")
    }
    refused = {refusal.name for device in DEVICES.values() for refusal in device.refusals}
    assert refused == listed - {"refused", "---"}


# ---------------------------------------------------------------------------- links and names


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: make docs"


def test_every_document_has_a_place_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert set(re.findall(r": (\w+\.md)$", text, re.MULTILINE)) == {"index.md"} | {
        path.name for path in ROOT.glob("docs/*.md")
    }


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(name: str) -> list[str]:
    """Targets of a document's links and pictures inside the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(name)))
    return [target for target in found if "://" not in target]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in links(name):
        path, _, place = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), target
        if place:
            assert place in [anchor(heading) for heading in headings(file.read_text("utf-8"))], (
                target
            )


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("benchmarks/")])
def test_named_files_exist(name: str) -> None:
    """Code spans that look like a path of the repository, or of the package, are one."""
    if name == "docs/RESULTS.md":
        pytest.skip("generated: other repositories' and runs' files")
    for span in re.findall(r"`([\w./]+/[\w./]*)`", without_code(text_of(name))):
        if "NAME" in span or span.startswith(("/", "results/")):
            continue
        assert any((root / span).exists() for root in (ROOT, ROOT / "vllm_cascade")), span


def source_files() -> list[Path]:
    endings = {".py", ".cpp", ".h"}
    return [
        file
        for folder in SOURCES
        for file in (ROOT / folder).rglob("*")
        if file.suffix in endings and file != Path(__file__)
    ]


def test_citations_exist() -> None:
    """Docstrings cite documents by their headings' names, and only documents that are here."""
    for file in source_files():
        text = re.sub(r"\s*\n\s*(//|#)?\s*", " ", file.read_text("utf-8"))
        for name, title in re.findall(r'(docs/\w+\.md), "([^"]+)"', text):
            titles = [re.sub(r"^[\d.]+ ", "", heading) for heading in headings(text_of(name))]
            assert title in titles, f"{file} cites {name}, {title!r}"
        assert not re.search(r"\bSEMANTICS\b|\bDESIGN\.md|\bHOUSE\.md", text), file


def test_the_readme_leaves_reference_to_the_documents() -> None:
    assert len(text_of("README.md").splitlines()) <= 110
    linked = {target.partition("#")[0] for target in links("README.md")}
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/[A-Z]*.md")}
    assert pages <= linked


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("docs/")])
def test_a_page_is_short(name: str) -> None:
    assert len(text_of(name).splitlines()) <= 300
