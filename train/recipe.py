"""Recipes: strict YAML. A key that is not in the schema is an error that names the nearest one that is.

The sections are in `sections`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from draftsmith.data import DraftsmithError
from draftsmith.data.io import nearest
from draftsmith.decode.costs import MAX_DRAFT
from draftsmith.distill.variants import DraftShape
from pydantic import BaseModel, Field, ValidationError, model_validator

from .sections import (
    BundleSection,
    CorpusSection,
    DistillSection,
    DraftSection,
    GateSection,
    PretrainSection,
    PromptsSection,
    RespondSection,
    Section,
    TargetSection,
    TraceSection,
    ValidateSection,
)


class Recipe(Section):
    name: str
    out: str = Field(description="folder for everything that the jobs write")
    seed: int = 0
    target: TargetSection
    prompts: PromptsSection = PromptsSection()
    corpus: CorpusSection = CorpusSection()
    pretrain: PretrainSection | None = None
    respond: RespondSection = RespondSection()
    draft: DraftSection
    distill: DistillSection
    trace: TraceSection = TraceSection()
    gate: GateSection = GateSection()
    bundle: BundleSection = BundleSection()
    validate_: ValidateSection = Field(ValidateSection(), alias="validate")

    @model_validator(mode="after")
    def _exit(self) -> Recipe:
        if self.draft.exit >= self.draft.depth:
            raise ValueError(f"draft.exit is {self.draft.exit}, but the draft has {self.draft.depth} layers")
        found = re.fullmatch(r"fixed\((\d+)(?:,\s*(.+))?\)", self.bundle.policy)
        shape = DraftShape(self.draft.depth, self.draft.exit, tuple(self.draft.buckets), 1, 1, 1)
        names = [v.name for v in shape.variants()]
        if found and (not 1 <= int(found[1]) <= MAX_DRAFT or found[2] not in (None, *names)):
            raise ValueError(f"bundle.policy '{self.bundle.policy}': k is 1 to {MAX_DRAFT}, variants are "
                             f"{', '.join(names)}")
        return self

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser()

    @property
    def cache_dir(self) -> Path:
        return self.folder / "teacher"

    @property
    def blocks_dir(self) -> Path:
        return self.folder / "tokens"

    @property
    def target_dir(self) -> Path:
        """Where train/target.py writes the target; a recipe that uses it names it in target.name."""
        return self.folder / "target"

    @property
    def draft_dir(self) -> Path:
        return self.folder / "draft"

    @property
    def trace_file(self) -> Path:
        return self.folder / "traces.parquet"

    @property
    def bundle_dir(self) -> Path:
        return self.folder / "bundle"


def _keys_at(location: Sequence[Any]) -> list[str]:
    """The valid keys of the section that holds the last part of an error's location."""
    model: Any = Recipe
    for part in location[:-1]:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        # A section may be optional: X | None.
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if model is None:
            return []
    return [f.alias or name for name, f in model.model_fields.items()]


def _explain(path: str, error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        location, key = item["loc"], ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key '{key}'{nearest(str(location[-1]), _keys_at(location))}")
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


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise DraftsmithError(f"{where}{line}: {error.problem or 'not valid YAML'}") from error
    except yaml.YAMLError as error:  # control characters and the like
        raise DraftsmithError(f"{where}: not valid YAML ({str(error).splitlines()[0]})") from error


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, with `section.key=value` overrides. Raises `DraftsmithError` naming file and key."""
    path = Path(path)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("recipes")
        raise DraftsmithError(f"{path}: no such recipe{nearest(path.name, [p.name for p in folder.glob('*.yaml')])}")
    try:
        value = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
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
        at[last] = _parse_yaml(text, f"override '{override}'")
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        raise DraftsmithError(_explain(str(path), error)) from error


def parse_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line shared by all jobs; `args.recipe` is loaded."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", required=True, help="recipe file, such as recipes/quickstart.yaml")
    parser.add_argument("--estimate", action="store_true", help="say what the recipe's jobs will take, and end")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe values")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    args = parser.parse_args(argv)
    args.recipe_path, args.recipe = args.recipe, load_recipe(args.recipe, args.overrides)
    if args.estimate:
        from .estimate import describe
        from .stage import rank

        if rank() == 0:
            print(describe(args.recipe))
        sys.exit(0)
    return args
