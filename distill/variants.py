"""The runnable sub-networks of an elastic draft, and how alpha chooses among them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

LEAST_ALPHA, FULL_ALPHA = 0.5, 1.5
EXIT_ALPHA = 0.7  # below it the early exit runs instead of a narrower full-depth network


@dataclass(frozen=True)
class Variant:
    """A depth (layers) and a feed-forward width given as alpha (1.5 is the full width)."""

    depth: int
    alpha: float = FULL_ALPHA

    @property
    def name(self) -> str:
        return f"{self.depth}L" if self.alpha == FULL_ALPHA else f"{self.depth}L@{self.alpha:g}"


@dataclass(frozen=True)
class DraftShape:
    """Sizes of an elastic draft: its layers, the depth of its early exit, its width buckets and head."""

    layers: int
    exit: int
    buckets: tuple[float, ...]
    hidden: int
    intermediate: int
    head: int

    def variants(self) -> list[Variant]:
        """From the cheapest to the largest: the early exit, then full depth at each width."""
        return [Variant(self.exit)] + [Variant(self.layers, b) for b in sorted(self.buckets)]

    def alphas(self) -> list[float]:
        """For each of the variants an alpha that selects it: of the early exit the middle of its range."""
        return [(LEAST_ALPHA + EXIT_ALPHA) / 2, *sorted(self.buckets)]

    def width(self, variant: Variant) -> int:
        """Feed-forward neurons of `variant`: the first ceil(alpha / 1.5 * intermediate)."""
        return math.ceil(variant.alpha / FULL_ALPHA * self.intermediate - 1e-9)

    def choose(self, alpha: float) -> Variant:
        """The variant that a gate output selects: alpha is rounded up to the next bucket."""
        if alpha < EXIT_ALPHA:
            return Variant(self.exit)
        return Variant(self.layers, next((b for b in sorted(self.buckets) if b >= alpha), FULL_ALPHA))

    def find(self, name: str) -> Variant:
        """The variant called `name`; ValueError lists the names there are."""
        for variant in self.variants():
            if variant.name == name:
                return variant
        raise ValueError(f"no variant {name!r}; there are {', '.join(v.name for v in self.variants())}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DraftShape:
        return cls(**{**value, "buckets": tuple(value["buckets"])})
