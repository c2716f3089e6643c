# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: the README is the first page; links to files outside ``docs/`` become text.

``tests/test_docs.py`` checks those links; the site has no such files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    readme = re.sub(r"\]\((?!\w+:|#)", "](../", (ROOT / "README.md").read_text("utf-8"))
    files.append(File.generated(config, "index.md", content=readme.replace("](../docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"(?<!!)\[([^]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
