"""What is proposed in a round: a chain, with one-hot side branches, as one tree of at most 16 nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from draftsmith.distill.variants import Variant


@dataclass
class Draft:
    """The nodes of a round's tree: first the chain, then the side nodes.

    Chain (`tokens`, target ids): drawn from the draft, or its likeliest tokens under greedy. For each the
    probability it was proposed with, the draft's confidence (softmax at temperature 1), its top-2 margin and
    the likeliest other tokens there. `rows[i]` are the raw logits at index i, one more than tokens where the
    draft looked further than it proposed. `q_rows[i]` is the processed distribution over the head and
    `kept[i]` marks the tokens that early rejection would have let through; both have one more entry when the
    last sampled token was dropped. `cut`: early rejection ended the draft, by dropping a sampled token
    (`dropped`) or, under greedy, before proposing one.

    Side nodes (`side`, (parent, token) each): proposed with certainty, given what they follow. `parent` counts
    nodes of the whole tree; -1 is the text so far.
    """

    source: str = ""  # which proposer
    variant: Variant | None = None
    tokens: list[int] = field(default_factory=list)
    side: list[tuple[int, int]] = field(default_factory=list)
    q_at: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    others: list[list[tuple[int, float]]] = field(default_factory=list)  # (token, its q), likeliest first
    rows: list[torch.Tensor] = field(default_factory=list)
    q_rows: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor | None] = field(default_factory=list)
    dropped: bool = False
    cut: bool = False
    read: int = 0  # committed tokens that the draft had to read first
    lag: int = 0  # positions before those, of which only the deep layers had to catch up
    steps: int = 0  # passes of the draft, that reading included
    matched: int = 0  # tokens that a lookup's match had in common with the text's end

    @property
    def nodes(self) -> list[int]:
        """Tokens of all nodes."""
        return [*self.tokens, *(token for _, token in self.side)]

    @property
    def parents(self) -> list[int]:
        """Parent of every node; -1 is the text so far."""
        return [*range(-1, len(self.tokens) - 1), *(parent for parent, _ in self.side)]

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.nodes) - 1))

    @property
    def name(self) -> str:
        return self.variant.name if self.variant else self.source

    def thrown_away(self, kept: int) -> list[int]:
        """What was drafted in a row after the first `kept` tokens: of the chain, or of a lookup's path."""
        return (self.tokens or self.nodes)[kept:]

    def children(self) -> dict[int, dict[int, int]]:
        """Node -> token -> the child node with it; of equal siblings the first."""
        found: dict[int, dict[int, int]] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.nodes, strict=True)):
            found.setdefault(parent, {}).setdefault(token, node)
        return found


def branch(draft: Draft, widths: list[int], budget: int) -> None:
    """Give the chain side branches: at index i its likeliest other tokens, widths[i] - 1 of them, as leaves.

    Greedy clustering: the chain is one path and comes first; of the branches, the likeliest paths that `budget`
    nodes in all have room for. A path's value is the product of the draft's confidences along it: of chain
    tokens, which are verified in any case, and of the branch, known before anything is sampled there
    (DESIGN, section 7, exactness 2). A leaf's parent is in the chain, so parents are always kept.
    """
    found, reach = [], 1.0
    for i in range(len(draft.tokens)):
        for token, q in draft.others[i][: max(0, (widths[i] if i < len(widths) else 1) - 1)]:
            found.append((-reach * q, i - 1, token))
        reach *= draft.confidences[i]
    room = max(0, budget - len(draft.tokens))
    draft.side += [(parent, token) for _, parent, token in sorted(found)[:room]]
