"""The teacher beside the student: rows of the target's distribution for packed blocks, as training needs them."""

from __future__ import annotations

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.packing import Batch
from draftsmith.data.teacher_cache import teacher_rows
from draftsmith.decode.target import Target
from torch.nn import functional as F

from .flops import shape_of

CHUNK_BYTES = 2**28  # of the teacher's logits that exist at once
# What some families do to their logits, which a plain product with the head leaves out.
UNSUPPORTED = ("logit_scale", "logits_scaling")


class OnlineTeacher:
    """Top-k log-probabilities with the exact tail, at a temperature, of every row of a batch.

    What a cache holds, without its disk: 50 epochs over a large corpus would be terabytes. No more than a chunk of
    the rows' logits is in memory at once.
    """

    def __init__(self, target: Target, k: int, temperature: float) -> None:
        self.k, self.temperature, self.size = k, temperature, shape_of(target.config)
        head = target.model.get_output_embeddings()
        # Taken now: a runner may repack the module's layers.
        self.body, self.weight, self.bias = target.model.base_model, head.weight.detach(), getattr(head, "bias", None)
        self.softcap = getattr(target.config, "final_logit_softcapping", None)
        if found := [name for name in UNSUPPORTED if getattr(target.config, name, None) not in (None, 1.0)]:
            raise DraftsmithError(f"target '{target.name}' changes its logits ({found[0]}), which the online teacher "
                                  "does not know; use a teacher cache (train/respond.py)")

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [R, k] int64 over the target's vocabulary, log-probabilities [R, k] and tails [R], on the target's
        device."""
        device, dtype = self.weight.device, self.weight.dtype
        mask = batch.training_mask(device)
        # Additive, which every attention of the library understands.
        seen = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, torch.finfo(dtype).min)
        with torch.autocast(device.type, enabled=False):
            hidden = self.body(input_ids=batch.ids_BT.to(device), position_ids=batch.position_BT.to(device),
                               attention_mask=seen, use_cache=False).last_hidden_state
            rows = hidden.flatten(0, 1)[batch.row_index_R.to(device)]
            size = max(1, CHUNK_BYTES // (4 * len(self.weight)))
            parts = [teacher_rows(self._logits(chunk), self.k, self.temperature) for chunk in rows.split(size)]
        ids, logp, tail = (torch.cat(column) for column in zip(*parts, strict=True))
        return ids.long(), logp, tail

    def _logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden_RH, self.weight, self.bias).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
