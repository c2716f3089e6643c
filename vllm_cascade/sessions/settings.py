# SPDX-License-Identifier: Apache-2.0
"""Settings of sessions, which travel in ``additional_config`` beside those of the policy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from vllm_cascade.policies.arguments import CONFIG, FLAGS, Source
from vllm_cascade.policies.settings import (
    EngineDefault,
    KVPolicyError,
    describe,
    did_you_mean,
    shown,
)

SESSIONS = "kv_sessions"
"""The argument that turns sessions on; the other arguments begin with it."""
NAME, RELEASE = SESSION_ARGUMENTS = ("kv_session", "kv_session_release")
"""Request arguments: the name that pins a session; whether to drop it when the request ends."""
ENGINE_FOLDER = "engine-"
"""Begins the names of the folders of data-parallel engines but the first, inside the folder."""
GIB = 2**30
LEAST_GIB, MOST_GIB = 2**-10, 2**20
"""A bound of memory or disk is at least a MiB and at most a PiB; others are typing errors."""


class SessionSettings(BaseModel):
    """Where sessions are kept, and how long."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    memory: float = Field(
        4.0, ge=LEAST_GIB, le=MOST_GIB, description="GiB of host memory for sessions"
    )
    dir: str | None = Field(None, description="folder for sessions that outlive the server")
    disk: float = Field(64.0, ge=LEAST_GIB, le=MOST_GIB, description="GiB of that folder")
    ttl: float = Field(86400.0, ge=0, description="seconds without use until a session is dropped")
    prompts: Annotated[bool | None, EngineDefault("with --reasoning-parser")] = Field(
        None,
        description="also keep the state before each answer, for chats whose next prompt leaves "
        "its thoughts out",
    )

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, given: str | None) -> str | None:
        """Refuse what is no folder's name, such as an empty variable of a shell."""
        if given is not None and (not given.strip() or "\0" in given):
            raise ValueError("name a folder")
        try:
            Path(given or "").expanduser()
        except RuntimeError:
            raise ValueError("there is no such user; name a folder") from None
        return given

    def folder(self, engine: int = 0) -> Path | None:
        """The folder of a data-parallel engine; engines have different sessions."""
        if self.dir is None:
            return None
        path = Path(self.dir).expanduser()
        return path / f"{ENGINE_FOLDER}{engine}" if engine else path

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * GIB)

    @property
    def disk_bytes(self) -> int:
        return 0 if self.dir is None else int(self.disk * GIB)

    @classmethod
    def of(cls, values: Any, source: Source = CONFIG) -> Self | None:
        """The settings among flags or in ``additional_config``; None: sessions are off.

        Raises:
            KVPolicyError: a setting is wrong or without effect; names it and the fix.
        """
        if not isinstance(values, Mapping):
            return None
        _check_keys(values, source)
        taken = {key: values[key] for key in ARGUMENTS if values.get(key) is not None}
        on = taken.pop(SESSIONS, False)
        if not isinstance(on, bool):
            raise KVPolicyError(f"{source.name(SESSIONS)} = {shown(on)}: it must be true or false")
        if not on and taken:
            names = ", ".join(map(source.name, taken))
            raise KVPolicyError(f"{names} has no effect without {source.name(SESSIONS)}; add it")
        if not on:
            return None
        given = {key.removeprefix(f"{SESSIONS}_"): value for key, value in taken.items()}
        if "disk" in given and "dir" not in given:
            disk, folder = (source.name(f"{SESSIONS}_{key}") for key in ("disk", "dir"))
            raise KVPolicyError(f"{disk} has no effect without {folder}; add it")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise KVPolicyError(
                describe(error, lambda key: source.name(f"{SESSIONS}_{key}"))
            ) from None


FIELDS: dict[str, FieldInfo] = {
    f"{SESSIONS}_{key}": field for key, field in SessionSettings.model_fields.items()
}
ARGUMENTS = (SESSIONS, *FIELDS)
"""Names of ``LLM`` arguments and keys of ``additional_config``; flags have dashes."""


def _check_keys(values: Mapping[str, Any], source: Source) -> None:
    """Reject mistyped keys of ``additional_config``."""
    for key in map(str, values):
        if source is not FLAGS and key.startswith(NAME) and key not in ARGUMENTS:
            raise KVPolicyError(
                f"{source.name(key)} has no effect{did_you_mean(key, ARGUMENTS, cutoff=0)}"
            )
