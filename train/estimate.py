"""`--estimate`: what a recipe will take, before it starts: tokens, hours here, memory and disk, job by job.

Counted from shapes and a sample of the prompts; hours are at a share of the speed that one large product reaches on
this device. An order of magnitude, not a promise.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import BlockManifest
from draftsmith.data.chat import encode_prompts
from draftsmith.data.teacher_cache import CacheManifest
from draftsmith.data.text import stream_sources
from draftsmith.decode.device import training_dtype
from draftsmith.decode.flops import layer_weights
from draftsmith.decode.target import load_description

from .flops import Shape, product_speed, shape_of
from .recipe import Recipe
from .stage import load_split, local_device, shares_of, world_size

SAMPLED = 64  # prompts and documents whose length is measured
USED = 0.3  # of the speed of one large product, that training reaches
ACTIVATION = 40  # bytes a token, layer and hidden unit that a backward pass keeps, in 16-bit products
ADAM = 8  # bytes a weight of the two moments in float32
KEPT = 2  # checkpoints


@dataclass
class Line:
    """One job: what it reads or writes in tokens, its FLOPs, and bytes of memory a rank and of disk."""

    job: str
    tokens: float
    flops: float
    memory: float
    disk: float


def target_shape(recipe: Recipe) -> tuple[Shape, Any]:
    """The target's shape and tokenizer: of the folder that is there, or of the one to be trained."""
    p = recipe.pretrain
    if p is None:
        config, tokenizer = load_description(recipe.target.name, recipe.target.trust_remote_code)
        return shape_of(config), tokenizer
    from .prepare import load_tokenizer

    tokenizer = load_tokenizer(p.tokenizer)
    each = layer_weights(p.hidden, p.intermediate, p.heads, p.kv_heads or p.heads)
    return Shape(each * p.layers, len(tokenizer) * p.hidden, p.hidden, p.layers), tokenizer


def draft_shape(recipe: Recipe, target: Shape) -> Shape:
    d = recipe.draft
    if d.own is None:
        each = target.layers / target.depth
        return Shape(each * d.depth, d.vocab * target.hidden, target.hidden, d.depth)
    each = layer_weights(d.own.hidden, d.own.intermediate, d.own.heads, d.own.kv_heads or d.own.heads)
    return Shape(each * d.depth, d.vocab * d.own.hidden, d.own.hidden, d.depth)


def corpus_tokens(recipe: Recipe, tokenizer: Any) -> float:
    """Of the tokenized corpus where there is one, else by a sample; NaN where its size is not known before."""
    try:
        return float(sum(s["tokens"] for s in BlockManifest.load_complete(recipe.blocks_dir).shards))
    except DraftsmithError:
        pass
    stream = stream_sources(shares_of(recipe.prompts.train), recipe.prompts.schemas, recipe.seed)
    sample = [len(tokenizer(s.text or str(s.messages)).input_ids) + 1 for s in itertools.islice(stream, SAMPLED)]
    if not sample:
        raise DraftsmithError("the sources in prompts.train hold no documents")
    count = float("nan") if recipe.corpus.documents is None else recipe.corpus.documents
    return sum(sample) / len(sample) * count


def cached_tokens(recipe: Recipe, tokenizer: Any) -> tuple[float, float]:
    """Tokens of prompts and answers, and of those the rows that the teacher writes."""
    try:
        shards = CacheManifest.load_complete(recipe.cache_dir).shards
        return float(sum(s["tokens"] for s in shards)), float(sum(s["rows"] for s in shards))
    except DraftsmithError:
        pass
    r = recipe.respond
    some = recipe.prompts.model_copy(update={"train_count": min(SAMPLED, recipe.prompts.train_count)})
    samples = load_split(recipe.model_copy(update={"prompts": some}), "train")
    if r.mode == "score":  # about half of a conversation is the assistant's
        lengths = [len(tokenizer(s.text or "".join(m["content"] for m in s.messages or [])).input_ids) for s in samples]
        mean = sum(min(n, r.max_prompt_tokens) for n in lengths) / len(lengths)
        return mean * recipe.prompts.train_count, mean * recipe.prompts.train_count / 2
    _, prompts = encode_prompts(tokenizer, samples, r.max_prompt_tokens)
    read = sum(map(len, prompts)) / len(prompts) * recipe.prompts.train_count
    written = 0.75 * r.max_tokens * r.answers * recipe.prompts.train_count  # some answers end before the limit
    return read + written, written + (read if r.prompt_rows else 0)


def training_memory(shape: Shape, ends_trained: int, tokens: int, stage: int, world: int, recompute: bool) -> float:
    """Weights, gradients and two moments in float32, spread by ZeRO's stages, and the activations of a pass.

    `ends_trained`: how many of embedding and head are weights of their own: 0, 1 (tied) or 2.
    """
    weights = shape.layers + ends_trained * shape.ends
    moments, grads, own = (1 / world if stage >= n else 1 for n in (1, 2, 3))
    kept = ACTIVATION * tokens * shape.hidden * (2 if recompute else shape.depth)
    frozen = 0 if ends_trained else 4 * 2 * shape.ends
    return weights * (ADAM * moments + 4 * grads + 4 * own) + frozen + kept


def estimate(recipe: Recipe, world: int) -> list[Line]:
    """A line a job, in the order in which they are run."""
    target, tokenizer = target_shape(recipe)
    draft, d, p = draft_shape(recipe, target), recipe.distill, recipe.pretrain
    lines, online = [], d.teacher == "online"
    weights = target.layers + target.ends
    half = 2 if training_dtype(d.precision, local_device()) == torch.bfloat16 else 4
    if online:
        corpus = corpus_tokens(recipe, tokenizer)
        lines.append(Line("prepare", corpus, 0.0, 0.0, corpus * (2 if target.ends / target.hidden <= 65536 else 4)))
    if p is not None:
        tokens = float(p.steps) * p.micro_batch * p.accumulation * world * p.block
        lines.append(Line("target", tokens, target.flops(tokens, tokens, True),
                          training_memory(target, 1, p.micro_batch * p.block, p.zero_stage, world, p.recompute),
                          KEPT * (4 + ADAM) * weights + 4 * weights))
    if online:
        each, rows, cache = corpus, 1.0, 0.0
    else:
        each, cached = cached_tokens(recipe, tokenizer)
        rows, cache = cached / each, cached * (8 * recipe.respond.k + 4) + 8 * each
        lines.append(Line("respond", each, target.flops(each, cached, False), half * weights, cache))
    blocks = d.steps * d.micro_batch * d.accumulation * world if d.steps else (d.epochs or 0) * each / d.block
    tokens = blocks * d.block
    own = recipe.draft.own is not None
    flops = draft.flops(tokens, 2 * rows * tokens, True, own)
    if d.narrow_weight:
        flops += draft.flops(tokens, rows * tokens, True, own) / d.narrow_every
    if online:
        flops += target.flops(tokens, tokens, False)
    ends = 2 if own else 0
    memory = training_memory(draft, ends, d.micro_batch * d.block, d.zero_stage, world, d.recompute) + half * weights
    lines.append(Line("distill", tokens, flops, memory, KEPT * (4 + ADAM) * (draft.layers + ends * draft.ends)))
    return lines


def describe(recipe: Recipe) -> str:
    """The estimate as a table."""
    world, device = world_size(), local_device()
    rate, rows = product_speed(device), []
    for line in estimate(recipe, world):
        hours = line.flops / (rate * USED * world * 3600)
        cells = [_number(line.tokens), _fixed(line.flops / 1e15), _fixed(hours), _fixed(line.memory / 2**30),
                 _fixed(line.disk / 2**30)]
        rows.append(f"{line.job:10}" + "".join(f"{cell:>12}" for cell in cells))
    head = f"{'job':10}" + "".join(f"{name:>12}" for name in ("tokens", "PFLOP", "hours", "GiB/rank", "GiB disk"))
    return "\n".join([head, *rows, f"Hours at {USED:.0%} of this {device.type}'s {rate / 1e12:.2f} TFLOP/s, on {world} "
                                   "rank(s); an order of magnitude. Traces, gate and validation take minutes."])


def _fixed(value: float) -> str:
    return "?" if value != value else f"{value:,.2f}"


def _number(value: float) -> str:
    """1.2k, 3.4M, 5.6G; a question mark where it is not known."""
    if value != value:
        return "?"
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
