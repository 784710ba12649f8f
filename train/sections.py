"""The sections of a recipe: one class each, every key with its default and what it means."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from draftsmith.data.io import nearest
from draftsmith.data.strict import Section
from draftsmith.decode.paper import PaperSettings
from pydantic import Field, field_validator, model_validator


class TargetSection(Section):
    name: str = Field(description="folder, hub name or preset of the target")
    trust_remote_code: bool = False


class PromptsSection(Section):
    """Where prompts come from: files, or the prompts written for the quickstart."""

    train: str | dict[str, Annotated[float, Field(gt=0)]] = Field(
        "quickstart", description="JSONL, Parquet or text file, hf:NAME[:CONFIGURATION][@SPLIT] of the hub, several "
        "with the share of each, or 'quickstart'")
    heldout: str | dict[str, Annotated[float, Field(gt=0)]] = Field("quickstart", description="the same")
    text_words: int | None = Field(None, ge=1, description="words of a text that make a prompt; all by default")
    schemas: str | None = Field(None, description="JSON of CREATE TABLE texts by database id, for Spider's rows")
    train_count: int = Field(480, ge=1)
    heldout_count: int = Field(48, ge=1)


class CorpusSection(Section):
    """Text that is trained on as it is, tokenized by train/prepare.py."""

    documents: int | None = Field(None, ge=1, description="of the sources in prompts.train; all by default")
    shard_documents: int = Field(4096, ge=1)


def check_heads(section: Any, name: str) -> None:
    """Rotary positions need heads of an even size; key-value heads are shared by equal numbers of heads."""
    if section.hidden % (2 * section.heads) or section.heads % (section.kv_heads or section.heads):
        raise ValueError(f"{name}.hidden must be an even multiple of {name}.heads, and heads one of kv_heads")


class PretrainSection(Section):
    """A Llama-shaped target trained from scratch by train/target.py."""

    tokenizer: str = Field(description="folder or hub name")
    layers: int = Field(12, ge=1)
    heads: int = Field(16, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="as many as heads by default")
    hidden: int = Field(1024, ge=1)
    intermediate: int = Field(2816, ge=1)
    block: int = Field(1024, ge=16, description="tokens a block, and the target's context")
    steps: int = Field(ge=1)
    micro_batch: int = Field(8, ge=1)
    accumulation: int = Field(1, ge=1)
    lr: float = Field(6e-4, gt=0)
    warmup: int = Field(200, ge=0)
    final_lr: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    clip: float = Field(1.0, ge=0)
    zero_stage: int = Field(0, ge=0, le=2)
    recompute: bool = False
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    heldout_blocks: int = Field(32, ge=1, description="at the corpus's end, never trained on")
    save_every: int = Field(500, ge=1)
    eval_every: int = Field(500, ge=1)
    max_skipped: int = Field(10, ge=1)

    @model_validator(mode="after")
    def _heads(self) -> PretrainSection:
        check_heads(self, "pretrain")
        return self


class RespondSection(Section):
    """Target-written answers with teacher rows, or teacher rows over existing text."""

    mode: Literal["generate", "score"] = "generate"
    answers: int = Field(3, ge=1, description="answers a prompt (mode generate)")
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 0.7], min_length=1,
                                                              description="answer i is sampled at entry i, in rotation")
    prompt_rows: bool = Field(False, description="teacher rows of the prompts' own text, too (mode generate)")
    max_tokens: int = Field(64, ge=1)
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are left out, and counted")
    batch: int = Field(32, ge=1)
    k: int = Field(16, ge=1, description="teacher tokens kept a row; the rest is one exact tail mass")
    shard_documents: int = Field(64, ge=1)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="of the target while it writes; auto is "
                                                       "bf16 where the device has units for it")


class OwnShape(Section):
    """A draft of other sizes than the target's, with fresh weights and an embedding and a head of its own."""

    hidden: int = Field(ge=2)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(None, ge=1, description="as many as heads by default")
    intermediate: int = Field(ge=1)

    @model_validator(mode="after")
    def _heads(self) -> OwnShape:
        check_heads(self, "draft.own")
        return self


class DraftSection(Section):
    init_layers: list[int] = Field([], description="layers of the target that the draft starts from")
    layers: int = Field(4, ge=2, description="of a draft with a shape of its own")
    own: OwnShape | None = None
    exit: int = Field(2, ge=1)
    buckets: list[float] = [0.75, 1.0, 1.25, 1.5]
    vocab: int = Field(8192, ge=1, description="rows of the draft's head; fewer where the text has fewer tokens")
    calibration_tokens: int = Field(4096, ge=1, description="tokens over which neuron importance is measured")

    @model_validator(mode="after")
    def _buckets(self) -> DraftSection:
        if 1.5 not in self.buckets or any(not 0.7 <= b <= 1.5 for b in self.buckets):
            raise ValueError("draft.buckets must lie in [0.7, 1.5] and contain 1.5, the full width")
        if self.own is None and len(self.init_layers) < 2:
            raise ValueError("draft.init_layers must name 2 or more layers of the target, unless draft.own gives the "
                             "draft a shape of its own")
        if self.own is not None and self.init_layers:
            raise ValueError("draft.init_layers and draft.own exclude each other: layers of the target have its shape")
        return self

    @property
    def depth(self) -> int:
        return len(self.init_layers) or self.layers


LossName = Literal["kl", "reverse_kl", "jsd", "tv", "lk", "hybrid", "hard"]
Loss = dict[LossName, Annotated[float, Field(gt=0)]]


class DistillSection(Section):
    temperature: float = Field(0.5, gt=0, description="divides the teacher's and the draft's logits")
    loss: Loss = Field({"kl": 1.0}, min_length=1, description="losses with their weights; any T^2 is to be in them")
    finish: Loss = Field({}, description="the same, for the end of training; empty: the same as before")
    finish_share: float = Field(0.2, gt=0, le=1, description="of the steps")
    reach: int = Field(1, ge=1, le=16, description="weigh rows by the chance that a draft of so many tokens reaches "
                       "them; 1: all alike")
    focus: float = Field(0.0, ge=0, description="weigh rows by (1 - acceptance) to this power; 0: all alike")
    teacher: Literal["cache", "online"] = Field("cache", description="rows written by train/respond.py, or the target "
                                                "itself over the corpus of train/prepare.py")
    online_k: int = Field(64, ge=1, description="teacher tokens kept a row by the online teacher")
    steps: int | None = Field(None, ge=1, description="or epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the data, instead of steps")
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
    narrow_every: int = Field(1, ge=1, description="one step in so many has that pass")
    zero_stage: int = Field(0, ge=0, le=3)
    recompute: bool = Field(False, description="gradient checkpointing: less memory, a third more time")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="of matrix products; weights stay fp32")
    save_every: int = Field(100, ge=1)
    max_skipped: int = Field(10, ge=1, description="steps in a row without a finite loss that end the job")
    eval_every: int = Field(100, ge=1)
    eval_prompts: int = Field(8, ge=0)
    eval_tokens: int = Field(48, ge=1)
    eval_k: int = Field(4, ge=1, le=16)

    @model_validator(mode="after")
    def _length(self) -> DistillSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("distill needs either steps or epochs")
        return self

    def loss_at(self, step: int, steps: int) -> dict[str, float]:
        """The mixture of losses of a step, counted from 0, of so many."""
        late = self.finish and step >= round(steps * (1 - self.finish_share))
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
    count: int = Field(12, ge=2)
    max_tokens: int = Field(48, ge=2)
    k: int = Field(4, ge=1, le=16, description="of the fixed-length baseline")
    reference: bool = Field(True, description="time transformers' generate as well")
    thresholds: Thresholds = Thresholds()
