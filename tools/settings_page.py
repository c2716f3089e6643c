# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/SETTINGS.md`` from the settings' models: ``python tools/settings_page.py``."""

import json
from pathlib import Path

from vllm_cascade.policies.arguments import FIELDS, FLAGS, default_of, settings_of
from vllm_cascade.policies.registry import POLICIES
from vllm_cascade.policies.settings import KVPolicyConfig

PAGE = Path(__file__).resolve().parent.parent / "docs/SETTINGS.md"
HEAD = """# Reference of settings

Generated from the code by `python tools/settings_page.py`; do not edit. [POLICIES.md](POLICIES.md)
explains how settings are given and which policy to choose.

Other pages have `--kv-sessions...` and the request keys `kv_session` and `kv_session_release`
([SESSIONS.md](SESSIONS.md)), `--kv-policy-check` ([GPU.md](GPU.md)), and the request keys
`kv_policy`, `kv_budget`, `kv_keep_prompt` and `kv_recall` ([POLICIES.md](POLICIES.md)).
"""


def page() -> str:
    """The page, Markdown."""
    parts = [HEAD, "## Every policy\n", table(KVPolicyConfig)]
    for name, cls in POLICIES.items():
        parts += [
            f"## `{name}`\n",
            f"{cls.__doc__.splitlines()[0]}\n".replace("``", "`"),
            f"{cls.paper}\n",
        ]
        if settings_of(cls):
            parts.append(table(cls))
    return "\n".join(parts)


def table(cls: type[KVPolicyConfig]) -> str:
    """The settings that a class adds, or gives another default."""
    flags = {id(field): f"`{FLAGS.name(argument)}`" for argument, field in FIELDS.items()}
    schema = cls.model_json_schema()["properties"]
    lines = ["| setting | flag | type | default | meaning |", "|---|---|---|---|---|"]
    for key, field in settings_of(cls).items():
        cells = (
            f"`{key}`",
            flags.get(id(field), ""),
            typed(schema[key]),
            default_of(field),
            field.description or "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def typed(schema: dict) -> str:
    """A type in words: ``integer, at least 1``, or the values to choose from."""
    if "anyOf" in schema:
        return " or ".join(map(typed, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")])
        )
    words = [schema.get("type", "any")]
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    bounds["exclusiveMaximum"] = "below"
    words += [f"{text} {schema[key]}" for key, text in bounds.items() if key in schema]
    return ", ".join(words)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
