# SPDX-License-Identifier: Apache-2.0
"""Reads settings as users write them: flags, ``additional_config`` and a request's arguments.

All three are mappings with some of the keys ``ARGUMENTS``. Flags and ``LLM`` arguments are one
source. The arguments and their types come from the fields of ``KVPolicyConfig``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from vllm_cascade.policies.registry import CHOICES, POLICIES, policy_class
from vllm_cascade.policies.settings import (
    CONFIG_KEY,
    DEFAULT_BUDGET,
    EngineDefault,
    Given,
    KVPolicyConfig,
    KVPolicyError,
    describe,
    did_you_mean,
    shown,
)

KEYS = {CONFIG_KEY: "name", **{f"kv_{key}": key for key in KVPolicyConfig.own_arguments}}
"""Arguments that are one setting each, and the setting. A request may have these."""
FIELDS = {f"kv_{key}": KVPolicyConfig.model_fields[key] for key in KVPolicyConfig.own_arguments}
OTHERS = f"{CONFIG_KEY}_config"
"""The argument with all other settings, an object."""
ARGUMENTS = (*KEYS, OTHERS)
"""Names of ``LLM`` arguments and keys of ``additional_config``; flags have dashes."""
CHECK = f"{CONFIG_KEY}_check"
"""The argument that says when kernels are checked; it is no setting of a policy."""
CHECK_MODES = ("off", "once", "always")
_types: Any = {a: (Annotated[f.annotation, *f.metadata], None) for a, f in FIELDS.items()}
_types[OTHERS] = (dict[str, Any], None)
Arguments: type[BaseModel] = create_model("Arguments", __config__=ConfigDict(strict=True), **_types)
"""The model of a mapping's arguments."""


@dataclass(frozen=True)
class Source:
    """A place where users write settings.

    Attributes:
        argument: template of an argument's name there.
        inside: template of the name of a key in an argument.
        objects: the arguments that may be objects of settings.
    """

    argument: str
    inside: str = ""
    objects: tuple[str, ...] = ()

    def name(self, argument: str) -> str:
        is_flag = self.argument.startswith("--")
        return self.argument.format(argument.replace("_", "-") if is_flag else argument)


FLAGS = Source("--{}", "{}.{}", (OTHERS,))
CONFIG = Source('additional_config["{}"]', '{}["{}"]', (CONFIG_KEY, OTHERS))
REQUEST = Source("{}")


def parse(values: Any, source: Source = CONFIG) -> Given | None:
    """The settings of an engine; None for stock vLLM, which is also policy ``full``.

    Args:
        values: flags, or ``additional_config``, whose other keys are ignored.

    Raises:
        KVPolicyError: no policy is named or it is unknown, a setting is given twice, or a key is
            mistyped or misplaced.
    """
    if not isinstance(values, dict):
        return None
    if source is CONFIG:
        _check_keys(values)
    if isinstance(values.get(CONFIG_KEY), Given):
        return values[CONFIG_KEY]  # was parsed as flags
    written = [source.name(argument) for argument in ARGUMENTS if argument in values]
    if not written:
        return None
    given = collect(values, source)
    if "name" not in given:
        policies = "|".join(CHOICES[1:])
        raise KVPolicyError(
            f"no policy is named for {', '.join(written)}; add {given.name('name')} {policies}"
        )
    if given["name"] == "full":
        if len(given) > 1:
            extra = ", ".join(given.name(key) for key in given if key != "name")
            raise KVPolicyError(
                f"{given.name('name')} full is stock vLLM and takes no settings; remove {extra}, "
                "or choose another policy"
            )
        return None
    policy_class(given["name"], given.name("name"))
    return given


def collect(values: Mapping[str, Any], source: Source) -> Given:
    """The settings in ``values``. An argument that is None is ignored, as are other keys.

    Raises:
        KVPolicyError: an argument has a wrong type, or a setting is given twice.
    """
    arguments = ARGUMENTS if source.objects else tuple(KEYS)
    taken = {key: values[key] for key in arguments if values.get(key) is not None}
    try:
        Arguments.model_validate(taken)
    except ValidationError as error:
        raise KVPolicyError(describe(error, source.name)) from None
    given = Given()
    given.names = names = {key: source.name(argument) for argument, key in KEYS.items()}
    given.template = source.inside.format(source.name(OTHERS), "{}") or given.template
    for argument, value in taken.items():
        place = source.name(argument)
        if argument in source.objects and isinstance(value, dict):
            found = {key: (source.inside.format(place, key), one) for key, one in value.items()}
        elif argument == CONFIG_KEY and not isinstance(value, str):
            what = " or an object of settings" if argument in source.objects else ""
            raise KVPolicyError(f"{place} = {shown(value)}: it must be the name of a policy{what}")
        else:
            found = {KEYS[argument]: (place, value)}
        for key, (name, one) in found.items():
            if key in given:
                raise KVPolicyError(f"{given.name(key)} and {name} are the same; remove one")
            given[key], names[key] = one, name
    return given


def plain_key(key: str) -> str:
    """Normalise a key: lower case, underscores, no spaces around it."""
    return key.strip().lower().replace("-", "_")


def _check_keys(additional_config: dict[str, Any]) -> None:
    """Reject mistyped or misplaced keys of this plugin; ignore keys of other plugins."""
    if (mode := additional_config.get(CHECK)) not in (None, *CHECK_MODES):
        yaml = '; in YAML, write "off" in quotes' if mode is False else ""
        modes = ", ".join(CHECK_MODES)
        raise KVPolicyError(f"{CHECK} = {shown(mode)}: choose from {modes}{yaml}")
    settings = {key for cls in POLICIES.values() for key in cls.model_fields} | {"name"}
    for key in additional_config.keys() - {*ARGUMENTS, CHECK}:
        hint = did_you_mean(plain_key(str(key)), (*ARGUMENTS, CHECK), cutoff=0.85)
        if not hint and CONFIG_KEY in additional_config and key in settings:
            hint = f'; write {{"{CONFIG_KEY}": {{"name": ..., "{key}": ...}}}}'
        if hint:
            raise KVPolicyError(f"{CONFIG.name(key)} has no effect{hint}")


def settings_of(cls: type[KVPolicyConfig]) -> dict[str, FieldInfo]:
    """The fields that a policy adds to the shared ones, or whose default it changes."""
    shared = {} if cls is KVPolicyConfig else KVPolicyConfig.model_fields
    return {
        key: field
        for key, field in cls.model_fields.items()
        if key not in shared or shared[key].default != field.default
    }


def default_of(field: FieldInfo) -> str:
    """The default of a field, for help texts."""
    for mark in field.metadata:
        if isinstance(mark, EngineDefault):
            return mark.text
    if field.is_required():
        return f"{DEFAULT_BUDGET}, or the largest that fits the model's positions"
    return json.dumps(field.default)
