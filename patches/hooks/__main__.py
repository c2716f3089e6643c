# SPDX-License-Identifier: Apache-2.0
"""Write ``patches/hooks.md``."""

from pathlib import Path

from . import page

(Path(__file__).resolve().parent.parent / "hooks.md").write_text(page(), "utf-8")
