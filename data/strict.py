"""Strict YAML: a key that a schema does not have is an error that names the nearest one that it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from .io import DraftsmithError, nearest


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML 1.1 reads `yes` as true, which would quietly become 1, and 1e2 as text, which is a number."""
        numbers = (int, float, int | None, float | None)
        if info.field_name is None or cls.model_fields[info.field_name].annotation not in numbers:
            return value
        if isinstance(value, bool):
            raise ValueError(f"expected a number, not {str(value).lower()}")
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value


Schema = TypeVar("Schema", bound=Section)


def _keys_at(schema: type[Section], location: Sequence[Any]) -> list[str]:
    """The valid keys of the section that holds the last part of an error's location."""
    model: Any = schema
    for part in location[:-1]:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        if field is None:  # the name of one of several sections, or a place in a list
            continue
        # A section may be optional (X | None), or one of several (dict[str, X]).
        kinds = [field.annotation, *get_args(field.annotation)]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if model is None:
            return []
    return [f.alias or name for name, f in model.model_fields.items()]


def explain(path: str, error: ValidationError, schema: type[Section]) -> str:
    """A line for each thing that is wrong."""
    lines = []
    for item in error.errors():
        location, key = item["loc"], ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key '{key}'{nearest(str(location[-1]), _keys_at(schema, location))}")
        elif item["type"] == "missing":
            lines.append(f"{path}: '{key}' is missing")
        else:
            lines.append(f"{path}: {key + ': ' if key else ''}{item['msg'].removeprefix('Value error, ')}"
                         + (f" (got {item['input']!r})" if key and not isinstance(item["input"], dict) else ""))
    return "\n".join(lines)


class _UniqueKeys(yaml.SafeLoader):
    """YAML with a key given twice refused: the second would silently win."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.MarkedYAMLError(problem=f"key '{key_node.value}' is given twice",
                                       problem_mark=key_node.start_mark)
        seen.add(key_node.value)
    return dict(loader.construct_pairs(node, deep=True))


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise DraftsmithError(f"{where}{line}: {error.problem or 'not valid YAML'}") from error
    except yaml.YAMLError as error:  # control characters and the like
        raise DraftsmithError(f"{where}: not valid YAML ({str(error).splitlines()[0]})") from error


def load_strict(path: str | Path, schema: type[Schema], overrides: Sequence[str] = ()) -> Schema:
    """Load a YAML file, with `section.key=value` overrides. Raises `DraftsmithError` naming file and key."""
    path = Path(path)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("recipes")
        raise DraftsmithError(f"{path}: no such recipe{nearest(path.name, [p.name for p in folder.glob('*.yaml')])}")
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{path}: not a text file ({error})") from error
    if not isinstance(value, dict):
        raise DraftsmithError(f"{path}: a recipe is a mapping of sections")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise DraftsmithError(f"'{override}': an override is section.key=value")
        *sections, last = key.split(".")
        at = value
        for part in sections:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise DraftsmithError(f"override '{override}': '{part}' is not a section")
        at[last] = parse_yaml(text, f"override '{override}'")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise DraftsmithError(explain(str(path), error, schema)) from error
