"""Job `distill`: a teacher cache in, a trained elastic draft out.

    deepspeed train/distill.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import encode_prompts
from draftsmith.data.io import atomic_dir, save_tensors, write_json
from draftsmith.data.packing import Batch, collate, pack
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
from draftsmith.distill.losses import forward_kl_sparse
from draftsmith.distill.variants import Variant
from draftsmith.distill.vocab import choose_vocabulary, inverse_map
from draftsmith.train.loop import Settings, ensure_distributed, fit
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import inputs_hash, is_done, load_prompts, mark_done, prompts_hash, run_job, say
from torch import nn

SPAN = 8  # tokens that share a sampled width: the gate's interval


class DistillModule(nn.Module):
    """Loss of one micro-batch: both exits at full width, and full depth at widths sampled per span."""

    def __init__(self, draft: ElasticDraft, recipe: Recipe) -> None:
        super().__init__()
        self.draft, self.d = draft, recipe.distill
        self.widths = torch.tensor([draft.shape.width(Variant(draft.shape.layers, b)) for b in draft.shape.buckets])
        self.inverse = inverse_map(draft.head_ids.cpu(), len(draft.embed))
        self.dtype = training_dtype(recipe.distill.precision, "cuda" if torch.cuda.is_available() else "cpu")

    def forward(self, step_batch: tuple[Batch, int]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Sum of losses over the teacher rows of the batch, with its parts; the int seeds the widths."""
        batch, seed = step_batch
        draft, shape = self.draft, self.draft.shape
        device = draft.embed.device
        ids, position, mask = (t.to(device) for t in (batch.ids_BT, batch.position_BT, batch.attention_mask()))
        # Padding sees itself alone, so that its softmax is defined.
        mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=device)
        rows = batch.row_index_R.to(device)
        teacher = (self.inverse[batch.top_ids_RK].to(device), batch.top_logp_RK.to(device), batch.tail_R.to(device))

        def loss(hidden_BTH: torch.Tensor) -> torch.Tensor:
            # Only rows that carry the loss reach the head.
            logits = draft.logits(hidden_BTH.flatten(0, 1)[rows])
            return forward_kl_sparse(logits.float(), *teacher, self.d.temperature)

        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            exits = draft(ids, position, mask)
            rows_of = {f"kl_{depth}L": loss(hidden) for depth, hidden in exits.items()}
            whole = rows_of[f"kl_{shape.layers}L"].sum() + self.d.exit_weight * rows_of[f"kl_{shape.exit}L"].sum()
            if self.d.narrow_weight > 0:
                widths = self._sample_widths(position, batch, seed)
                narrow = loss(draft(ids, position, mask, widths)[shape.layers])
                whole = whole + self.d.narrow_weight * narrow.sum()
                for bucket, width in zip(shape.buckets, self.widths.tolist(), strict=True):
                    rows_of[f"kl_{shape.layers}L_width_{bucket:g}"] = narrow[widths.flatten()[rows] == width]
        parts = {k: (v.detach().sum(), torch.tensor(len(v))) for k, v in rows_of.items()}
        parts["tokens"] = ((batch.document_BT >= 0).sum(), torch.tensor(1))
        return whole, parts

    def _sample_widths(self, position_BT: torch.Tensor, batch: Batch, seed: int) -> torch.Tensor:
        """A width for each (document, branch, span of 8 positions)."""
        generator = torch.Generator().manual_seed(seed)
        span = batch.position_BT // SPAN + 1009 * batch.branch_BT + 100003 * (batch.document_BT + 1)
        _, index = torch.unique(span, return_inverse=True)
        choice = torch.randint(len(self.widths), (int(index.max()) + 1,), generator=generator)
        return self.widths[choice[index]].to(position_BT.device)


class PackedData:
    """Packed blocks in an order that depends on (seed, epoch) alone, split over ranks by block."""

    def __init__(self, cache: TeacherCache, recipe: Recipe, rank: int, world: int) -> None:
        self.cache, self.d, self.seed, self.rank, self.world = cache, recipe.distill, recipe.seed, rank, world
        self.per_step = self.d.micro_batch * self.d.accumulation * world
        self.starts = [0]  # number of the first block of each epoch packed so far
        self.packed: tuple[int, list[list[int]]] = (-1, [])
        documents = [cache[i] for i in range(len(cache))]
        # A document whose prompt fills a block has no row left to learn from.
        self.kept = [i for i, doc in enumerate(documents) if doc.row_token[0] < self.d.block]
        self.lengths = [len(documents[i].tokens) for i in self.kept]
        if not self.kept:
            raise DraftsmithError(f"every prompt is longer than a block of {self.d.block} tokens: raise distill.block")
        cut = sum(n > self.d.block for n in self.lengths)
        if len(self.kept) < len(documents) or cut:
            say(f"distill: {len(documents) - len(self.kept)} documents left out and {cut} cut, being longer than a "
                f"block of {self.d.block} tokens (distill.block)")

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self.packed[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.kept))
            blocks = pack([self.lengths[i] for i in order], self.d.block)
            self.packed = (epoch, [[self.kept[order[i]] for i in block] for block in blocks])
        return self.packed[1]

    def _block(self, number: int) -> list[int]:
        """Documents of the n-th block of the endless stream of epochs."""
        while number >= self.starts[-1]:
            self.starts.append(self.starts[-1] + len(self._epoch(len(self.starts) - 1)))
        epoch = bisect.bisect_right(self.starts, number) - 1
        return self._epoch(epoch)[number - self.starts[epoch]]

    def batches(self, step: int) -> list[tuple[Batch, int]]:
        """This rank's micro-batches of a step, each with the seed of its widths."""
        out = []
        for a in range(self.d.accumulation):
            first = step * self.per_step + (a * self.world + self.rank) * self.d.micro_batch
            blocks = [[self.cache[i] for i in self._block(first + b)] for b in range(self.d.micro_batch)]
            out.append((collate(blocks, self.d.block), self.seed * 1_000_003 + first))
        return out


def heldout_acceptance(runner: Runner, draft: ElasticDraft, target: Target, recipe: Recipe) -> dict[str, float]:
    """True acceptance by the production loop, greedy, on held-out prompts, for the largest variant and the exit."""
    d = recipe.distill
    live = DraftRunner(draft.config, draft.shape, draft.portable_state(), target.embedding, target.head)
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
    for i in range(len(cache)):
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


def save_draft(recipe: Recipe, draft: ElasticDraft, inputs: str, figures: dict[str, float]) -> None:
    with atomic_dir(recipe.draft_dir) as aside:
        save_tensors(aside / "draft.safetensors", draft.portable_state())
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
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    say(f"distill: {trained / 1e6:.1f} M trained weights, head of {draft.shape.head} tokens, {len(cache)} documents")
    runner = load_runner(target)
    data = PackedData(cache, recipe, rank, world)
    settings = Settings("distill", d.steps, d.lr, d.warmup, d.final_lr, d.betas, d.weight_decay, d.clip, d.accumulation,
                        d.zero_stage, d.save_every)
    figures: dict[str, float] = {}

    def evaluate(step: int) -> dict[str, float]:
        if d.eval_prompts == 0 or rank != 0:
            return {}
        figures.update(heldout_acceptance(runner, draft, target, recipe))
        top = draft.shape.variants()[-1].name
        say(f"distill: step {step}: held-out acceptance {figures[f'heldout/acceptance_{top}']:.3f}, "
            f"{figures[f'heldout/tokens_per_step_{top}']:.2f} tokens per step at k = {d.eval_k}")
        return figures

    def rows(step_batch: Any) -> int:
        return len(step_batch[0].tail_R)

    fit(DistillModule(draft, recipe), data.batches, rows, settings, recipe.folder, inputs, d.micro_batch, evaluate,
        d.eval_every)
    if rank == 0:
        if not figures:  # resumed after the last evaluation
            evaluate(d.steps)
        save_draft(recipe, draft, inputs, figures)
        say(f"distill: draft written to {recipe.draft_dir}")


if __name__ == "__main__":
    run_job(main, "distill")
