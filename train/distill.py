"""Job `distill`: a teacher cache in, a trained elastic draft out.

    deepspeed train/distill.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import encode_prompts
from draftsmith.data.io import atomic_dir, save_tensors, write_json
from draftsmith.data.packing import Batch, Families, Unit, collate, merge, pack
from draftsmith.data.teacher_cache import TeacherCache
from draftsmith.decode.device import training_dtype
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.loop import Generation
from draftsmith.decode.policies import Fixed
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.sampling import Noise, SamplingParams
from draftsmith.decode.target import Target, load_target
from draftsmith.distill.elastic import ElasticDraft
from draftsmith.distill.init import build_draft
from draftsmith.distill.losses import headed_loss, mixture, sparse_events
from draftsmith.distill.variants import Variant
from draftsmith.distill.vocab import choose_vocabulary, inverse_map
from draftsmith.train.loop import Settings, ensure_distributed, fit, whole_weights
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import from_first, inputs_hash, is_done, load_prompts, mark_done, prompts_hash, run_job, say
from torch import nn

SPAN = 8  # tokens that share a sampled width: the gate's interval


@dataclass
class MicroBatch:
    """A batch with the step it belongs to and its number in the whole run, which seeds its widths."""

    batch: Batch
    step: int
    number: int

    def emptied(self) -> MicroBatch:
        """The same tokens without a row to learn from."""
        b = self.batch
        return replace(self, batch=replace(b, row_index_R=b.row_index_R[:0], top_ids_RK=b.top_ids_RK[:0],
                                           top_logp_RK=b.top_logp_RK[:0], tail_R=b.tail_R[:0]))


class DistillModule(nn.Module):
    """Loss of one micro-batch: both exits at full width, and full depth at widths sampled per span."""

    def __init__(self, draft: ElasticDraft, recipe: Recipe) -> None:
        super().__init__()
        self.draft, self.d, self.seed = draft, recipe.distill, recipe.seed
        self.widths = torch.tensor([draft.shape.width(Variant(draft.shape.layers, b)) for b in draft.shape.buckets])
        self.inverse = inverse_map(draft.head_ids.cpu(), len(draft.embed))
        self.dtype = training_dtype(recipe.distill.precision, "cuda" if torch.cuda.is_available() else "cpu")

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Sum of losses over the teacher rows of the batch, with its parts."""
        batch = micro.batch
        draft, shape, device = self.draft, self.draft.shape, self.draft.embed.device
        ids, position, rows = (t.to(device) for t in (batch.ids_BT, batch.position_BT, batch.row_index_R))
        teacher = (self.inverse[batch.top_ids_RK].to(device), batch.top_logp_RK.to(device), batch.tail_R.to(device))
        seen = self._what_is_seen(batch)

        weights = self.d.loss_at(micro.step)

        def of_rows(logits_RD: torch.Tensor, ids_RK: torch.Tensor, logp_RK: torch.Tensor,
                    tail_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            events = sparse_events(logits_RD, ids_RK, logp_RK, tail_R, self.d.temperature)
            return mixture(weights, events), events.acceptance()

        def loss(hidden_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Only rows that carry the loss reach the head.
            return headed_loss(of_rows, hidden_BTH.flatten(0, 1)[rows], draft.head, *teacher)

        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            rows_of = {f"{depth}L": loss(hidden) for depth, hidden in draft(ids, position, **seen).items()}
            whole = rows_of[f"{shape.layers}L"][0].sum() + self.d.exit_weight * rows_of[f"{shape.exit}L"][0].sum()
            if self.d.narrow_weight > 0 and micro.number % self.d.narrow_every == 0:
                widths = self._sample_widths(position, batch, self.seed * 1_000_003 + micro.number)
                narrow = loss(draft(ids, position, width_BT=widths, **seen)[shape.layers])
                whole = whole + self.d.narrow_weight * narrow[0].sum()
                for bucket, width in zip(shape.buckets, self.widths.tolist(), strict=True):
                    here = widths.flatten()[rows] == width
                    rows_of[f"{shape.layers}L_width_{bucket:g}"] = narrow[0][here], narrow[1][here]
        parts = {f"{what}_{name}": (values.detach().sum(), torch.tensor(len(values)))
                 for name, pair in rows_of.items() for what, values in zip(("loss", "acceptance"), pair, strict=True)}
        parts["tokens"] = ((batch.document_BT >= 0).sum(), torch.tensor(1))
        return whole, parts

    def _what_is_seen(self, batch: Batch) -> dict[str, Any]:
        """Runs on a CPU; on a GPU a mask, with which one kernel does it all."""
        device = self.draft.embed.device
        if device.type == "cpu":
            return {"runs": batch.segments()}
        mask = batch.attention_mask().to(device)
        # Padding sees itself alone, so that its softmax is defined.
        return {"mask_B1TT": mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=device)}

    def _sample_widths(self, position_BT: torch.Tensor, batch: Batch, seed: int) -> torch.Tensor:
        """A width for each (document, branch, span of 8 positions)."""
        generator = torch.Generator().manual_seed(seed)
        span = batch.position_BT // SPAN + 1009 * batch.branch_BT + 100003 * (batch.document_BT + 1)
        _, index = torch.unique(span, return_inverse=True)
        choice = torch.randint(len(self.widths), (int(index.max()) + 1,), generator=generator)
        return self.widths[choice[index]].to(position_BT.device)


class PackedData:
    """Packed blocks in an order that depends on (seed, epoch) alone, split over ranks by block.

    In every epoch the documents of a family (prompts that begin alike) are merged anew, as many as a block holds.
    """

    def __init__(self, cache: TeacherCache, recipe: Recipe, rank: int, world: int) -> None:
        self.cache, self.d, self.seed, self.rank, self.world = cache, recipe.distill, recipe.seed, rank, world
        self.per_step = self.d.micro_batch * self.d.accumulation * world
        self.starts = [0]  # number of the first block of each epoch packed so far
        self.packed: tuple[int, list[list[Unit]]] = (-1, [])
        documents = [cache[i] for i in range(len(cache))]
        # A document whose prompt fills a block has no row left to learn from.
        self.kept = [i for i, doc in enumerate(documents) if doc.row_token[0] < self.d.block]
        if not self.kept:
            raise DraftsmithError(f"every prompt is longer than a block of {self.d.block} tokens: raise distill.block")
        cut = sum(len(documents[i].tokens) > self.d.block for i in self.kept)
        if len(self.kept) < len(documents) or cut:
            say(f"distill: {len(documents) - len(self.kept)} documents left out and {cut} cut, being longer than a "
                f"block of {self.d.block} tokens (distill.block)")
        self.families = Families({i: documents[i] for i in self.kept})

    def _epoch(self, epoch: int) -> list[list[Unit]]:
        if self.packed[0] != epoch:
            units = self.families.units(self.d.block, np.random.default_rng([self.seed, epoch]))
            blocks = pack([unit.length for unit in units], self.d.block)
            self.packed = (epoch, [[units[i] for i in block] for block in blocks])
        return self.packed[1]

    def _block(self, number: int) -> list[Unit]:
        """What stands in the n-th block of the endless stream of epochs."""
        while number >= self.starts[-1]:
            self.starts.append(self.starts[-1] + len(self._epoch(len(self.starts) - 1)))
        epoch = bisect.bisect_right(self.starts, number) - 1
        return self._epoch(epoch)[number - self.starts[epoch]]

    def batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step."""
        out = []
        for a in range(self.d.accumulation):
            first = step * self.per_step + (a * self.world + self.rank) * self.d.micro_batch
            blocks = [[merge([self.cache[i] for i in unit.documents], unit.shared) for unit in self._block(first + b)]
                      for b in range(self.d.micro_batch)]
            out.append(MicroBatch(collate(blocks, self.d.block), step, first // self.d.micro_batch))
        return out


def heldout_acceptance(runner: Runner, draft: ElasticDraft, state: dict[str, torch.Tensor], target: Target,
                       recipe: Recipe) -> dict[str, float]:
    """True acceptance by the production loop, greedy, on held-out prompts, for the largest variant and the exit.

    `state`: the draft's weights as they are."""
    d = recipe.distill
    live = DraftRunner(draft.config, draft.shape, state, target.embedding, target.head)
    out = {}
    samples = load_prompts(recipe, "heldout")
    _, prompts = encode_prompts(target.tokenizer, samples, runner.context - d.eval_tokens)
    for variant in (draft.shape.variants()[-1], draft.shape.variants()[0]):
        accepted = rejected = steps = emitted = 0
        for prompt in prompts[: d.eval_prompts]:
            generation = Generation(prompt, SamplingParams(max_tokens=d.eval_tokens), Fixed(d.eval_k, variant), runner,
                                    live, Noise(), target.eos_ids)
            tokens = generation.prefill()
            while generation.emitted < generation.max_tokens and not target.eos_ids & {t.id for t in tokens}:
                tokens = generation.round()
            s = generation.stats
            accepted, rejected = accepted + s.accepted, rejected + s.rejected
            steps, emitted = steps + s.steps, emitted + generation.emitted - 1
        out[f"heldout/acceptance_{variant.name}"] = accepted / max(1, accepted + rejected)
        out[f"heldout/tokens_per_step_{variant.name}"] = emitted / max(1, steps)
    return out


def calibration_batches(cache: TeacherCache, tokens: int) -> list[torch.Tensor]:
    """Whole documents' first texts (prompt and first answer) up to about `tokens` tokens."""
    out, seen = [], 0
    # From all over the cache: neighbours may be questions about one schema.
    for i in np.random.default_rng(0).permutation(len(cache)).tolist():
        document = cache[i]
        ids = document.tokens[document.branch <= 1].astype(np.int64)
        out.append(torch.from_numpy(ids)[None])
        seen += len(ids)
        if seen >= tokens:
            break
    return out


def make_draft(recipe: Recipe, target: Target, cache: TeacherCache) -> ElasticDraft:
    """The draft before training: vocabulary from the answers, layers from the target."""
    torch.manual_seed(recipe.seed)
    vocab_size = len(target.model.get_input_embeddings().weight)
    answers, prompts = cache.token_counts(vocab_size)
    head_ids = choose_vocabulary(answers, recipe.draft.vocab, target.eos_ids, prompts)
    return build_draft(target.model, recipe.draft.init_layers, recipe.draft.exit, tuple(recipe.draft.buckets), head_ids,
                       calibration_batches(cache, recipe.draft.calibration_tokens))


def save_draft(recipe: Recipe, draft: ElasticDraft, state: dict[str, torch.Tensor], inputs: str,
               figures: dict[str, float]) -> None:
    with atomic_dir(recipe.draft_dir) as aside:
        save_tensors(aside / "draft.safetensors", state)
        write_json(aside / "draft.json", {"config": draft.config.to_dict(), "shape": draft.shape.to_json(),
                                          "heldout": figures, "recipe": recipe.model_dump(
                                              mode="json", include={"target", "draft", "distill"})})
        mark_done(aside / "stage.json", inputs)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    d = recipe.distill
    cache = TeacherCache(recipe.cache_dir, {"temperature": d.temperature, "k": recipe.respond.k,
                                            "corpus_hash": prompts_hash(recipe, "train")})
    inputs = inputs_hash(recipe, ["target", "draft", "distill"], cache=[s["sha256"] for s in cache.manifest.shards],
                         exclude={"save_every", "eval_every", "eval_prompts", "eval_tokens", "eval_k"})
    if is_done(recipe.draft_dir / "stage.json", inputs):
        say(f"distill: {recipe.draft_dir} is up to date, nothing to do")
        return
    ensure_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    target = load_target(recipe.target.name, trust_remote_code=recipe.target.trust_remote_code)
    for key, value in target.fingerprint().items():
        if cache.manifest.target[key] != value:
            raise DraftsmithError(f"{recipe.cache_dir}: made for another target ('{cache.manifest.target['name']}', "
                                  f"its {key} differs); run train/respond.py for this one")
    draft = make_draft(recipe, target, cache)
    draft.recompute = d.recompute
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    say(f"distill: {trained / 1e6:.1f} M trained weights, head of {draft.shape.head} tokens, {len(cache)} documents")
    runner = load_runner(target)
    data = PackedData(cache, recipe, rank, world)
    settings = Settings("distill", d.steps, d.lr, d.warmup, d.final_lr, d.betas, d.weight_decay, d.clip, d.accumulation,
                        d.zero_stage, d.save_every, d.max_skipped)
    figures: dict[str, float] = {}

    def weights() -> dict[str, torch.Tensor]:
        with whole_weights(draft, settings):
            return draft.portable_state()

    def evaluate(step: int) -> dict[str, float]:
        if d.eval_prompts == 0:
            return {}
        state = weights()
        if rank != 0:
            return {}
        figures.update(heldout_acceptance(runner, draft, state, target, recipe))
        top = draft.shape.variants()[-1].name
        say(f"distill: step {step}: held-out acceptance {figures[f'heldout/acceptance_{top}']:.3f}, "
            f"{figures[f'heldout/tokens_per_step_{top}']:.2f} tokens per step at k = {d.eval_k}")
        return figures

    def rows(micro: MicroBatch) -> int:
        return len(micro.batch.tail_R)

    fit(DistillModule(draft, recipe), data.batches, rows, settings, recipe.folder, inputs, d.micro_batch, evaluate,
        d.eval_every, emptied=MicroBatch.emptied)
    if from_first(not figures):  # resumed after the last evaluation
        evaluate(d.steps)
    state = weights()
    if rank == 0:
        save_draft(recipe, draft, state, inputs, figures)
        say(f"distill: draft written to {recipe.draft_dir}")


if __name__ == "__main__":
    run_job(main, "distill")
