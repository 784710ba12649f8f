"""Whether a model that was written is still the bundle's variant: logits and choices over held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.quickstart_prompts import build
from draftsmith.distill.variants import Variant

from ..bundle import Bundle
from ..draft import DraftRunner
from ..target import Target

POSITIONS = 320  # of text that both read
PROMPTS = 24  # held-out ones that it is cut from

# By how the weights are held: how far one may be off, as a share of the largest of its tensor (half a step of
# rounding); how far a logit, as a share of the largest; and at how many positions both must choose the same token.
# The first is the sharp one below float32. Of the other two, a distilled draft of SmolLM2 has 9e-4 (f16), 4e-3
# (bfloat16), 8e-3 (q8_0) and 98.8 % and more; a tiny one of random weights carries rounding twenty times as far.
LIMITS = {"float32": (0.0, 1e-4, 0.99), "float16": (2**-11, 2e-2, 0.97), "bfloat16": (2**-8, 1e-1, 0.9),
          "f32": (0.0, 1e-4, 0.99), "f16": (2**-11, 2e-2, 0.97), "q8_0": (1 / 200, 2e-1, 0.85)}


@dataclass(frozen=True)
class Parity:
    """difference: the largest of two logits, as a share of the largest logit. agreement: of the positions, the share
    at which both choose the same token. weights: the largest difference of two weights, as a share of the largest
    weight of the tensor."""

    difference: float
    agreement: float
    positions: int
    weights: float = 0.0

    def describe(self) -> str:
        return (f"logits differ by at most {self.difference:.1e} of the largest, the same token is chosen at "
                f"{100 * self.agreement:.1f} % of {self.positions} positions")

    def require(self, kind: str, what: str) -> None:
        """Raise `DraftsmithError` where this is more than what weights held as `kind` explain (`LIMITS`)."""
        weights, difference, agreement = LIMITS[kind]
        # "not <=": a difference that is no number is a drift too.
        if not self.weights <= weights:
            raise DraftsmithError(f"{what} differs from the bundle's draft, so nothing was written: weights differ by "
                                  f"up to {self.weights:.1e} of the largest, {kind} explains {weights:.1e}")
        if not self.difference <= difference or self.agreement < agreement:
            raise DraftsmithError(f"{what} differs from the bundle's draft, so nothing was written: {self.describe()}; "
                                  f"{kind} explains up to {difference:.0e} and must agree at {100 * agreement:.0f} %")


def held_ids(bundle: Bundle, target: Target) -> torch.Tensor:
    """Token ids [1, N] of held-out text that both models have the context for."""
    text = "\n".join(message["content"] for prompt in build("heldout", PROMPTS) for message in prompt["messages"])
    limits = [getattr(config, "max_position_embeddings", None) or POSITIONS
              for config in (bundle.draft_config, target.config)]
    return torch.tensor([target.tokenizer(text).input_ids[: min(POSITIONS, *limits)]])


@torch.no_grad()
def bundle_logits(bundle: Bundle, target: Target, variant: Variant, ids_1N: torch.Tensor) -> torch.Tensor:
    """Logits [N, D] of our own runner over the head's ids."""
    runner = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, target.embedding)
    return runner.forward(ids_1N, runner.new_cache(ids_1N.shape[1]), variant)


@torch.no_grad()
def stock_logits(model: Any, bundle: Bundle, ids_1N: torch.Tensor) -> torch.Tensor:
    """Logits [N, D] of a stock model over the head's ids."""
    logits: torch.Tensor = model(input_ids=ids_1N).logits[0]
    return logits[:, bundle.tensors["head_ids"]]


def compare(ours_ND: torch.Tensor, theirs_ND: torch.Tensor, weights: float = 0.0) -> Parity:
    agreement = (ours_ND.argmax(-1) == theirs_ND.argmax(-1)).float().mean()
    difference = (ours_ND - theirs_ND).abs().max() / ours_ND.abs().max()
    return Parity(float(difference), float(agreement), len(ours_ND), weights)


def compare_written(written: Any, own: Any, bundle: Bundle, target: Target, variant: Variant) -> Parity:
    """A stock model read from what was written, against `own`, which was to be written, and our own runner."""
    ids = held_ids(bundle, target)
    return compare(bundle_logits(bundle, target, variant, ids), stock_logits(written, bundle, ids),
                   weight_difference(own, written))


@torch.no_grad()
def weight_difference(own: Any, written: Any) -> float:
    """The largest difference of two weights, as a share of the largest weight of its tensor; NaN stays NaN."""
    others = written.state_dict()
    shares = [(tensor - others[name]).abs().max() / tensor.abs().max().clamp(min=1e-30)
              for name, tensor in own.state_dict().items()]
    return float(torch.stack(shares).max())
