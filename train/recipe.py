"""Recipes: strict YAML. A key that is not in the schema is an error that names the nearest one that is.

The sections are in `sections`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.data.strict import Section, load_strict
from draftsmith.decode.costs import MAX_DRAFT
from draftsmith.distill.variants import DraftShape
from pydantic import Field, model_validator

from .sections import (
    BundleSection,
    CorpusSection,
    DistillSection,
    DraftSection,
    GateSection,
    PretrainSection,
    PromptsSection,
    RespondSection,
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


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, with `section.key=value` overrides. Raises `DraftsmithError` naming file and key."""
    return load_strict(path, Recipe, overrides)


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
