"""Recipes: strict YAML. A key that is not in the schema is an error that names the nearest one that is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from draftsmith.data import DraftsmithError
from draftsmith.data.io import nearest
from draftsmith.decode.costs import MAX_DRAFT
from draftsmith.decode.paper import PaperSettings
from draftsmith.distill.variants import DraftShape
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML 1.1 reads `yes` as true, which would quietly become 1, and 1e2 as text, which is a number."""
        if info.field_name is None or cls.model_fields[info.field_name].annotation not in (int, float):
            return value
        if isinstance(value, bool):
            raise ValueError(f"expected a number, not {str(value).lower()}")
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value


class TargetSection(Section):
    name: str = Field(description="folder, hub name or preset of the target")
    trust_remote_code: bool = False


class PromptsSection(Section):
    """Where prompts come from: files, or the prompts written for the quickstart."""

    train: str | dict[str, Annotated[float, Field(gt=0)]] = Field(
        "quickstart", description="JSONL, Parquet or text file, hf:NAME of the hub, several with the share of each, "
        "or 'quickstart'")
    heldout: str | dict[str, Annotated[float, Field(gt=0)]] = Field("quickstart", description="the same")
    schemas: str | None = Field(None, description="JSON of CREATE TABLE texts by database id, for Spider's rows")
    train_count: int = Field(480, ge=1)
    heldout_count: int = Field(48, ge=1)


class RespondSection(Section):
    """Target-written answers with teacher rows, or teacher rows over existing text."""

    mode: Literal["generate", "score"] = "generate"
    answers: int = Field(3, ge=1, description="answers a prompt (mode generate)")
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 0.7], min_length=1,
                                                              description="answer i is sampled at entry i, in rotation")
    max_tokens: int = Field(64, ge=1)
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are left out, and counted")
    batch: int = Field(32, ge=1)
    k: int = Field(16, ge=1, description="teacher tokens kept a row; the rest is one exact tail mass")
    shard_documents: int = Field(64, ge=1)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="of the target while it writes; auto is "
                                                       "bf16 where the device has units for it")


class DraftSection(Section):
    init_layers: list[int] = Field(min_length=2)
    exit: int = Field(2, ge=1)
    buckets: list[float] = [0.75, 1.0, 1.25, 1.5]
    vocab: int = Field(8192, ge=1, description="rows of the draft's head; fewer where the text has fewer tokens")
    calibration_tokens: int = Field(4096, ge=1, description="tokens over which neuron importance is measured")

    @model_validator(mode="after")
    def _buckets(self) -> DraftSection:
        if 1.5 not in self.buckets or any(not 0.7 <= b <= 1.5 for b in self.buckets):
            raise ValueError("draft.buckets must lie in [0.7, 1.5] and contain 1.5, the full width")
        return self


LossName = Literal["kl", "reverse_kl", "jsd", "tv", "lk", "hybrid", "hard"]
Loss = dict[LossName, Annotated[float, Field(gt=0)]]


class DistillSection(Section):
    temperature: float = Field(0.5, gt=0, description="divides the teacher's and the draft's logits")
    loss: Loss = Field({"kl": 1.0}, min_length=1, description="losses with their weights; any T^2 is to be in them")
    finish: Loss = Field({}, description="the same, for the end of training; empty: the same as before")
    finish_share: float = Field(0.2, gt=0, le=1, description="of the steps")
    steps: int = Field(ge=1)
    block: int = Field(512, ge=16, description="tokens a packed block")
    micro_batch: int = Field(2, ge=1, description="blocks a rank and forward pass")
    accumulation: int = Field(1, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(20, ge=0)
    final_lr: float = Field(0.05, ge=0, le=1, description="share of lr at the last step (cosine)")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.98)
    clip: float = Field(1.0, ge=0)
    exit_weight: float = Field(0.5, ge=0, description="weight of the early exit's loss")
    narrow_weight: float = Field(0.5, ge=0, description="weight of the pass with sampled widths")
    narrow_every: int = Field(1, ge=1, description="one micro-batch in so many has that pass")
    zero_stage: int = Field(0, ge=0, le=3)
    recompute: bool = Field(False, description="gradient checkpointing: less memory, a third more time")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="of matrix products; weights stay fp32")
    save_every: int = Field(100, ge=1)
    max_skipped: int = Field(10, ge=1, description="steps in a row without a finite loss that end the job")
    eval_every: int = Field(100, ge=1)
    eval_prompts: int = Field(8, ge=0)
    eval_tokens: int = Field(48, ge=1)
    eval_k: int = Field(4, ge=1, le=16)

    def loss_at(self, step: int) -> dict[str, float]:
        """The mixture of losses of a step, counted from 0."""
        late = self.finish and step >= round(self.steps * (1 - self.finish_share))
        return {str(name): weight for name, weight in (self.finish if late else self.loss).items()}


class TraceSection(Section):
    prompts: int = Field(64, ge=1, description="training prompts that are decoded for traces")
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0)
    k: int = Field(4, ge=1, le=16)
    batch: int = Field(8, ge=1, description="prompts that share the target's passes")


class GateSection(Section):
    hidden: int = Field(64, ge=1)
    steps: int = Field(300, ge=1)
    batch: int = Field(256, ge=1)
    lr: float = Field(1e-3, gt=0)
    k: int = Field(4, ge=1, le=8, description="drafted tokens a round that the objective assumes")
    heldout: float = Field(0.25, gt=0, lt=1, description="share of the trace prompts kept for the report")


class Thresholds(Section):
    """What a bundle must reach to pass `validate_acceptance.py`."""

    acceptance: float = Field(0.6, ge=0, le=1)
    tokens_per_step: float = Field(1.5, ge=1)
    speedup: float = Field(1.0, ge=0, description="lower end of the paired 95 % interval over AR")
    identical: float = Field(1.0, ge=0, le=1, description="share of texts equal to AR's, margin rule applied")


class BundleSection(Section):
    policy: str = Field("goodput", pattern=r"^(ar|paper|goodput|fixed\(\d+(,[^)]+)?\)|(lookup|hybrid)\(\d+\)|"
                                           r"mtv\(\d+(,\d+)*\))$",
                        description="default: ar, fixed(k), fixed(k,variant), mtv(w1,w2,...), lookup(k), hybrid(k), "
                                    "paper or goodput")
    paper: dict[str, float] = Field(default_factory=dict, description="settings of policy paper, such as tau")

    @field_validator("paper")
    @classmethod
    def _settings(cls, value: dict[str, float]) -> dict[str, float]:
        known = [f.name for f in fields(PaperSettings)]
        for key in value:
            if key not in known:
                raise ValueError(f"unknown key 'bundle.paper.{key}'{nearest(key, known)}")
        return value


class ValidateSection(Section):
    count: int = Field(24, ge=2)
    max_tokens: int = Field(64, ge=2)
    k: int = Field(4, ge=1, le=16, description="of the fixed-length baseline")
    reference: bool = Field(True, description="time transformers' generate as well")
    thresholds: Thresholds = Thresholds()


class Recipe(Section):
    name: str
    out: str = Field(description="folder for everything that the jobs write")
    seed: int = 0
    target: TargetSection
    prompts: PromptsSection = PromptsSection()
    respond: RespondSection = RespondSection()
    draft: DraftSection
    distill: DistillSection
    trace: TraceSection = TraceSection()
    gate: GateSection = GateSection()
    bundle: BundleSection = BundleSection()
    validate_: ValidateSection = Field(ValidateSection(), alias="validate")

    @model_validator(mode="after")
    def _exit(self) -> Recipe:
        if self.draft.exit >= len(self.draft.init_layers):
            raise ValueError(f"draft.exit is {self.draft.exit}, but the draft has {len(self.draft.init_layers)} layers")
        found = re.fullmatch(r"fixed\((\d+)(?:,\s*(.+))?\)", self.bundle.policy)
        shape = DraftShape(len(self.draft.init_layers), self.draft.exit, tuple(self.draft.buckets), 1, 1, 1)
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
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
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
                         + (f" (got {item['input']!r})" if key else ""))
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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe values")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # given by the launcher
    args = parser.parse_args(argv)
    args.recipe_path, args.recipe = args.recipe, load_recipe(args.recipe, args.overrides)
    return args
