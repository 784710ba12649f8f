"""Job `distill`: a teacher cache, or a corpus and the target itself, in; a trained elastic draft out.

    deepspeed train/distill.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import TokenBlocks
from draftsmith.data.chat import encode_prompts
from draftsmith.data.io import atomic_dir, save_tensors, sha256_json, write_json
from draftsmith.data.packing import Batch
from draftsmith.data.teacher_cache import TeacherCache
from draftsmith.data.vocabulary import tokenizer_hash
from draftsmith.decode.device import training_dtype
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.loop import Generation
from draftsmith.decode.policies import Fixed
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.sampling import Noise, SamplingParams
from draftsmith.decode.target import Target, load_description, weights_signature
from draftsmith.decode.transcript import Chunk, Transcript
from draftsmith.distill.elastic import ElasticDraft, llama_config
from draftsmith.distill.init import build_draft, fresh_draft
from draftsmith.distill.losses import mixture, row_weights, sparse_events
from draftsmith.distill.variants import Variant
from draftsmith.distill.vocab import choose_vocabulary, inverse_map
from draftsmith.train.batches import MicroBatch, batches_of
from draftsmith.train.flops import shape_of
from draftsmith.train.loop import Figures, Settings, ensure_distributed, fit, whole_weights
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.sections import DistillSection
from draftsmith.train.stage import (
    from_first,
    from_hub,
    inputs_hash,
    is_done,
    load_split,
    local_device,
    mark_done,
    own_folder,
    prompts_hash,
    resolve_together,
    run_job,
    say,
    shared_target,
)
from draftsmith.train.teacher import OnlineTeacher
from torch import nn

SPAN = 8  # tokens that share a sampled width: the gate's interval


class DistillModule(nn.Module):
    """Loss of one micro-batch: both exits at full width, and full depth at widths sampled per span."""

    inverse: torch.Tensor

    def __init__(self, draft: ElasticDraft, recipe: Recipe, steps: int, teacher: OnlineTeacher | None = None) -> None:
        """`steps` in all; without a `teacher` its rows are in the batches."""
        super().__init__()
        self.draft, self.d, self.seed, self.steps, self.teacher = draft, recipe.distill, recipe.seed, steps, teacher
        self.widths = torch.tensor([draft.shape.width(Variant(draft.shape.layers, b)) for b in draft.shape.buckets])
        self.size = shape_of(draft.config, draft.shape.layers, draft.shape.head)
        self.register_buffer("inverse", inverse_map(draft.head_ids.cpu(), len(draft.embed)), persistent=False)
        self.dtype = training_dtype(recipe.distill.precision, "cuda" if torch.cuda.is_available() else "cpu")

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Sum of losses over the teacher rows of the batch, with its parts."""
        batch = micro.batch
        draft, shape, device = self.draft, self.draft.shape, self.draft.embed.device
        ids, position, rows = (t.to(device) for t in (batch.ids_BT, batch.position_BT, batch.row_index_R))
        top_ids, logp, tail = self.teacher(batch) if self.teacher else (
            batch.top_ids_RK, batch.top_logp_RK, batch.tail_R)
        teacher = (self.inverse[top_ids.to(device)], logp.to(device), tail.to(device))
        seen, weights, d = batch.seen(device), self.d.loss_at(micro.step, self.steps), self.d

        follows, trained = batch.follows_R.to(device), draft.head.weight.requires_grad

        def weigh(acceptance_R: torch.Tensor, follows_R: torch.Tensor) -> torch.Tensor | float:
            return row_weights(acceptance_R, follows_R, d.reach, d.focus) if d.reach > 1 or d.focus else 1.0

        def of_rows(logits_RD: torch.Tensor, ids_RK: torch.Tensor, logp_RK: torch.Tensor, tail_R: torch.Tensor,
                    follows_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            events = sparse_events(logits_RD, ids_RK, logp_RK, tail_R, d.temperature)
            value, acceptance = mixture(weights, events), events.acceptance()
            # The gradient of a trained head is summed here, chunk by chunk: whatever rows weigh, they weigh here.
            return value * weigh(acceptance, follows_R) if trained else value, acceptance

        def loss(hidden_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Only rows that carry the loss reach the head.
            value, acceptance = draft.head(of_rows, hidden_BTH.flatten(0, 1)[rows], *teacher, follows)
            return value if trained else value * weigh(acceptance, follows), acceptance

        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            rows_of = {f"{depth}L": loss(hidden) for depth, hidden in draft.exits(ids, position, seen).items()}
            whole = rows_of[f"{shape.layers}L"][0].sum() + self.d.exit_weight * rows_of[f"{shape.exit}L"][0].sum()
            # By step: all ranks must make the same passes, and another number of them the same.
            if self.d.narrow_weight > 0 and micro.step % self.d.narrow_every == 0:
                widths = self._sample_widths(position, batch, micro.number)
                narrow = loss(draft.exits(ids, position, seen, widths)[shape.layers])
                whole = whole + self.d.narrow_weight * narrow[0].sum()
                for bucket, width in zip(shape.buckets, self.widths.tolist(), strict=True):
                    here = widths.flatten()[rows] == width
                    rows_of[f"{shape.layers}L_width_{bucket:g}"] = narrow[0][here], narrow[1][here]
        parts = {f"{what}_{name}": (values.detach().sum(), torch.tensor(len(values)))
                 for name, pair in rows_of.items() for what, values in zip(("loss", "acceptance"), pair, strict=True)}
        tokens = (batch.document_BT >= 0).sum()
        parts["tokens"] = (tokens, torch.tensor(1))
        passes = 1 + (len(rows_of) > 2)  # the narrow one counted as if at full width
        flops = self.size.flops(float(tokens) * passes, float(len(rows)) * (1 + passes), True, trained)
        if self.teacher is not None:
            flops += self.teacher.size.flops(float(ids.numel()), float(len(rows)), False)
        parts["flops"] = (torch.tensor(flops, dtype=torch.float64), torch.tensor(1))
        return whole, parts

    def _sample_widths(self, position_BT: torch.Tensor, batch: Batch, first: int) -> torch.Tensor:
        """A width for each (document, branch, span of 8 positions), drawn by the number of the block."""
        span_BT = batch.position_BT // SPAN + 1009 * batch.branch_BT + 100003 * (batch.document_BT + 1)
        rows = []
        for number, span_T in enumerate(span_BT, first):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            _, index = torch.unique(span_T, return_inverse=True)
            rows.append(torch.randint(len(self.widths), (int(index.max()) + 1,), generator=generator)[index])
        return self.widths[torch.stack(rows)].to(position_BT.device)


def heldout_acceptance(runner: Runner, draft: ElasticDraft, state: dict[str, torch.Tensor], target: Target,
                       d: DistillSection, prompts: list[list[int]]) -> tuple[dict[str, float], str]:
    """True acceptance by the production loop, greedy, on held-out prompts, for the largest variant and the exit; and
    the largest one's first answer, what it drafted in bold.

    `state`: the draft's weights as they are."""
    live = DraftRunner(draft.config, draft.shape, state, target.embedding, target.head)
    out, sample = {}, ""
    for variant in (draft.shape.variants()[-1], draft.shape.variants()[0]):
        accepted = rejected = steps = emitted = 0
        for prompt in prompts:
            generation = Generation(prompt, SamplingParams(max_tokens=d.eval_tokens), Fixed(d.eval_k, variant), runner,
                                    live, Noise(), target.eos_ids)
            tokens, answer = generation.prefill(), Transcript(generation, target.tokenizer)
            marked = told(answer.take(tokens))
            while not answer.done:
                marked += told(answer.take(generation.round()))
            sample, s = sample or marked, generation.stats
            accepted, rejected = accepted + s.accepted, rejected + s.rejected
            steps, emitted = steps + s.steps, emitted + generation.emitted - 1
        out[f"heldout/acceptance_{variant.name}"] = accepted / max(1, accepted + rejected)
        out[f"heldout/tokens_per_step_{variant.name}"] = emitted / max(1, steps)
    return out, sample


def told(chunk: Chunk) -> str:
    """A round's text, with what was drafted in bold."""
    return "".join(f"**{text}**" if token.source == "accepted" and text.strip() else text
                   for token, text in chunk.pieces)


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


def make_draft(recipe: Recipe, target: Target, source: TeacherCache | TokenBlocks) -> ElasticDraft:
    """The draft before training: vocabulary from the text, layers from the target, or fresh ones of its own shape."""
    torch.manual_seed(recipe.seed)
    r, vocab_size = recipe.draft, len(target.model.get_input_embeddings().weight)
    answers, prompts = source.token_counts(vocab_size)
    head_ids = choose_vocabulary(answers, r.vocab, target.eos_ids, prompts)
    if r.own is not None:
        config = llama_config(target.config, r.depth, **r.own.model_dump())
        return fresh_draft(config, r.exit, tuple(r.buckets), head_ids)
    if isinstance(source, TeacherCache):
        texts = calibration_batches(source, r.calibration_tokens)
    else:
        count = min(len(source), -(-r.calibration_tokens // source.length))
        texts = [torch.from_numpy(source.block(n)[0])[None] for n in range(count)]
    return build_draft(target.model, r.init_layers, r.exit, tuple(r.buckets), head_ids, texts)


def save_draft(recipe: Recipe, draft: ElasticDraft, state: dict[str, torch.Tensor], inputs: str,
               figures: dict[str, float], source: dict[str, Any]) -> None:
    """`source`: what the draft was made for and from, for the bundle's manifest."""
    with atomic_dir(recipe.draft_dir) as aside:
        save_tensors(aside / "draft.safetensors", state)
        write_json(aside / "draft.json", {"config": draft.config.to_dict(), "shape": draft.shape.to_json(),
                                          "heldout": figures, "source": source, "recipe": recipe.model_dump(
                                              mode="json", include={"target", "draft", "distill"})})
        mark_done(aside / "stage.json", inputs)


def open_source(recipe: Recipe) -> tuple[TeacherCache | TokenBlocks, list[str]]:
    """What is trained on, and hashes of it: of its shards, and of a teacher that is not in them."""
    d = recipe.distill
    if d.teacher == "online":
        ensure_distributed()
        folder = resolve_together(recipe.target.name)
        config, tokenizer = load_description(recipe.target.name, recipe.target.trust_remote_code)
        blocks = TokenBlocks(recipe.blocks_dir, d.block, tokenizer_hash(tokenizer))
        teacher = weights_signature(folder, config)
        return blocks, [teacher, *(shard["files"]["tokens"]["sha256"] for shard in blocks.manifest.shards)]
    expected: dict[str, Any] = {"temperature": d.temperature, "k": recipe.respond.k}
    if not from_hub(recipe):
        expected["corpus_hash"] = prompts_hash(recipe, "train")
    cache = TeacherCache(recipe.cache_dir, expected)
    return cache, [shard["sha256"] for shard in cache.manifest.shards]


def check_cache(source: TeacherCache, target: Target) -> None:
    """Refuse a cache that was made for another target."""
    made_for = source.manifest.target
    for key, value in target.fingerprint().items():
        if made_for[key] != value:
            raise DraftsmithError(f"{source.directory}: made for another target ('{made_for['name']}', its {key} "
                                  "differs); run train/respond.py for this one")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    d = recipe.distill
    source, hashes = open_source(recipe)
    free = {"save_every", "eval_every", "eval_prompts", "eval_tokens", "eval_k", "max_skipped", "recompute"}
    inputs = inputs_hash(recipe, ["target", "draft", "distill"], cache=hashes, exclude=free)
    if is_done(recipe.draft_dir / "stage.json", inputs):
        say(f"distill: {recipe.draft_dir} is up to date, nothing to do")
        return
    ensure_distributed()
    own_folder(recipe)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    online = d.teacher == "online"
    dtype = training_dtype(d.precision, local_device()) if online else None
    target = shared_target(recipe, dtype)
    if isinstance(source, TeacherCache):
        check_cache(source, target)
    draft = make_draft(recipe, target, source)
    draft.recompute = d.recompute
    data = batches_of(source, d, recipe.seed, rank, world)
    steps = d.steps or max(1, round((d.epochs or 0) * data.each_epoch / data.per_step))
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    say(f"distill: {trained / 1e6:.1f} M trained weights, head of {draft.shape.head} tokens; {steps} steps of "
        f"{data.per_step} blocks, {steps * data.per_step / data.each_epoch:.1f} epochs")
    # Before the runner, which may repack the module's layers.
    teacher = OnlineTeacher(target, d.online_k, d.temperature) if online else None
    runner = load_runner(target)
    settings = Settings("distill", steps, d.lr, d.warmup, d.final_lr, d.betas, d.weight_decay, d.clip, d.accumulation,
                        d.zero_stage, d.save_every, d.max_skipped)
    module = DistillModule(draft, recipe, steps, teacher)
    figures: dict[str, float] = {}
    prompts: list[list[int]] = []
    if rank == 0 and d.eval_prompts:
        limit = runner.context - d.eval_tokens
        prompts = encode_prompts(target.tokenizer, load_split(recipe, "heldout"), limit)[1][: d.eval_prompts]

    def weights() -> dict[str, torch.Tensor]:
        with whole_weights(draft, settings):
            return draft.portable_state()

    def evaluate(step: int) -> Figures:
        if d.eval_prompts == 0:
            return {}
        state = weights()
        if rank != 0:
            return {}
        found, sample = heldout_acceptance(runner, draft, state, target, d, prompts)
        figures.update(found)
        top = draft.shape.variants()[-1].name
        say(f"distill: step {step}: held-out acceptance {figures[f'heldout/acceptance_{top}']:.3f}, "
            f"{figures[f'heldout/tokens_per_step_{top}']:.2f} tokens per step at k = {d.eval_k}")
        return {**figures, "heldout/sample": sample}

    def rows(micro: MicroBatch) -> int:
        return len(micro.batch.tail_R)

    # Another number of ranks may go on with the same blocks a step.
    resumable = inputs_hash(recipe, ["target", "draft", "distill"], cache=hashes, per_step=data.per_step,
                            exclude={*free, "micro_batch", "accumulation"})
    fit(module, data, rows, settings, recipe.folder, resumable, d.micro_batch, evaluate,
        d.eval_every, emptied=MicroBatch.emptied)
    if from_first(not figures):  # resumed after the last evaluation
        evaluate(steps)
    state = weights()
    if rank == 0:
        save_draft(recipe, draft, state, inputs, figures, {
            "target": {"name": recipe.target.name, **target.fingerprint()}, "data": sha256_json(hashes)})
        say(f"distill: draft written to {recipe.draft_dir}")


if __name__ == "__main__":
    run_job(main, "distill")
