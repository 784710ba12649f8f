"""Recipes of comparisons: which tasks, which methods, how many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.data import DraftsmithError
from draftsmith.data.strict import Section, load_strict
from pydantic import Field, field_validator, model_validator

from .methods import OUTSIDE
from .tasks import find_task


class TaskSection(Section):
    source: str | None = Field(None, description="folder, file, or hf:NAME[:CONFIGURATION]; the task's own dataset of "
                               "the hub by default")
    count: int = Field(60, ge=2, description="prompts")


class EvalRecipe(Section):
    name: str
    out: str = Field(description="folder for rows and report")
    bundle: str = Field(description="bundle folder")
    target: str | None = Field(None, description="folder or hub name, instead of the one named in the bundle")
    trust_remote_code: bool = False
    tasks: dict[str, TaskSection] = Field(min_length=1)
    methods: list[str] = Field(["ar", "dsd", "mtv", "paper", "goodput"], min_length=1, description="dsd and mtv are "
                               "the best fixed length and tree on other prompts of the task; any policy by name; "
                               "transformers, transformers-assisted, transformers-lookup")
    max_tokens: int | None = Field(None, ge=2, description="of an answer; the task's own limit by default")
    tuning: int = Field(4, ge=1, description="prompts a task on which lengths and trees are chosen")
    tuning_tokens: int = Field(64, ge=2)
    temperature: float = Field(0.0, ge=0)
    seed: int = 0

    @field_validator("tasks")
    @classmethod
    def _known(cls, value: dict[str, TaskSection]) -> dict[str, TaskSection]:
        for name in value:
            try:
                find_task(name)
            except DraftsmithError as error:
                raise ValueError(str(error)) from error
        return value

    @field_validator("methods")
    @classmethod
    def _plain(cls, value: list[str]) -> list[str]:
        if "ar" not in value:
            raise ValueError("methods must contain ar, with which the others are compared")
        if len(set(value)) < len(value):
            raise ValueError("a method is named twice")
        return value

    @model_validator(mode="after")
    def _greedy_outside(self) -> EvalRecipe:
        if self.temperature and (found := [m for m in self.methods if m in OUTSIDE]):
            raise ValueError(f"{found[0]} is measured greedy: leave it out, or set temperature to 0")
        return self

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser()


def load_eval_recipe(path: str | Path, overrides: Sequence[str] = ()) -> EvalRecipe:
    """Load a recipe, with `section.key=value` overrides. Raises `DraftsmithError` naming file and key."""
    return load_strict(path, EvalRecipe, overrides)
