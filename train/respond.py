"""Job `respond`: prompts in; the target's own answers with its top-k distributions out (a teacher cache).

    deepspeed train/respond.py --recipe recipes/quickstart.yaml

Mode `score` takes existing text instead: documents, or conversations of which the assistant's turns carry
the loss.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from draftsmith.data.chat import assistant_mask, encode_prompts, prompt_ids
from draftsmith.data.prefixes import common_prefix, families
from draftsmith.data.teacher_cache import CacheManifest, CacheWriter, Document, teacher_rows
from draftsmith.data.text import Sample, corpus_hash
from draftsmith.decode.batch import Answer, write_answers
from draftsmith.decode.device import training_dtype
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.target import Target
from draftsmith.train.flops import Paced
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import (
    first_makes,
    gather,
    load_prompts,
    local_device,
    own_folder,
    rank,
    ranks_together,
    run_job,
    say,
    shared_target,
    wait_for_all,
    world_size,
)
from tqdm import tqdm


def answers_to_document(prompt: list[int], answers: list[Answer]) -> Document:
    """A prompt with its answers in the teacher-cache layout; the answers share the prompt's last row."""
    tokens, branch = [*prompt], [0] * len(prompt)
    row_token, rows = [len(prompt) - 1], [(answers[0], 0)]
    for number, answer in enumerate(answers, 1):
        start = len(tokens)
        tokens += answer.ids
        branch += [number] * len(answer.ids)
        row_token += range(start, start + len(answer.ids) - 1)
        rows += [(answer, i) for i in range(1, len(answer.ids))]
    return Document(np.array(tokens), np.array(branch), np.array(row_token),
                    np.stack([a.top_ids[i] for a, i in rows]), np.stack([a.top_logp[i] for a, i in rows]),
                    np.array([a.tail[i] for a, i in rows]))


def respond(recipe: Recipe, target: Target, runner: Runner, writer: CacheWriter, samples: list[Sample]) -> int:
    """Generate answers for this rank's share of the missing shards; returns the number of shards in all."""
    r = recipe.respond
    _, prompts = encode_prompts(target.tokenizer, samples, min(r.max_prompt_tokens, runner.context - r.max_tokens))
    if skipped := len(samples) - len(prompts):
        say(f"respond: left out {skipped} empty or over-long prompts (respond.max_prompt_tokens)")
    # Those that begin alike into the same shard, where what they share is read once.
    prompts = [prompts[j] for family in families(prompts) for j in family]
    shards = -(-len(prompts) // r.shard_documents)
    missing = set(writer.missing(shards))
    # Two shards in flight: rows refill across a shard's end, and prompts are still sorted by length. The same two
    # after an interruption, since what shares a pass decides how it rounds.
    mine = share(range(shards))
    pairs = [pair for pair in (mine[i : i + 2] for i in range(0, len(mine), 2)) if missing & set(pair)]

    def jobs_of(shard: int) -> range:
        return range(shard * r.shard_documents, min(len(prompts), (shard + 1) * r.shard_documents))

    waiting: dict[int, list[Answer]] = {}

    def document_of(job: int, answers: list[Answer]) -> Document:
        document = answers_to_document(prompts[job], sorted(answers, key=lambda a: a.index))
        if not r.prompt_rows:
            return document
        known = common_prefix(prompts[job - 1], prompts[job]) if job else 0
        return with_prompt_rows(runner, document, known, r.k, recipe.distill.temperature)

    bar = progress(sum(len(jobs_of(shard)) for pair in pairs for shard in pair) * r.answers, "respond", "answer")
    for pair in pairs:
        jobs = [job for shard in pair for job in jobs_of(shard)]
        for answer in write_answers(runner, [prompts[j] for j in jobs], r.answers, r.temperatures, r.max_tokens,
                                     target.eos_ids, r.batch, recipe.seed, r.k, recipe.distill.temperature, jobs):
            waiting.setdefault(jobs[answer.job], []).append(answer)
            bar.update()
            for shard in pair:
                if all(len(waiting.get(job, ())) == r.answers for job in jobs_of(shard)):
                    done = {job: waiting.pop(job) for job in jobs_of(shard)}
                    if shard in missing:
                        writer.write_shard(shard, [document_of(job, answers) for job, answers in done.items()])
    bar.close()
    return shards


@torch.no_grad()
def score_document(runner: Runner, ids: list[int], mask: list[bool], k: int, temperature: float) -> Document | None:
    """Teacher rows for the positions whose next token is in `mask`; None when there are none."""
    rows = [i for i in range(len(ids) - 1) if mask[i + 1]]
    if not rows:
        return None
    cache = runner.new_cache(1, len(ids))
    _, logits = runner.forward(torch.tensor([ids], device=runner.device), cache, len(ids) - rows[0])
    picked = logits[0, torch.tensor(rows, device=runner.device) - rows[0]]
    top_ids, top_logp, tail = (x.cpu().numpy() for x in teacher_rows(picked, k, temperature))
    # Prompt tokens are branch 0 and the rest branch 1, so that only written tokens count for the vocabulary.
    branch = np.zeros(len(ids), np.int64)
    branch[rows[0] + 1 :] = 1
    return Document(np.array(ids), branch, np.array(rows), top_ids, top_logp, tail)


def with_prompt_rows(runner: Runner, document: Document, known: int, k: int, temperature: float) -> Document:
    """A document with teacher rows of its prompt, too, but for its first `known` tokens, which have theirs in another
    document."""
    prompt = document.tokens[document.branch == 0].tolist()
    scored = score_document(runner, prompt, [i > known for i in range(len(prompt))], k, temperature)
    if scored is None:
        return document
    return replace(document, **{name: np.concatenate([getattr(scored, name), getattr(document, name)])
                                for name in ("row_token", "top_ids", "top_logp", "tail")})


def score(recipe: Recipe, target: Target, runner: Runner, writer: CacheWriter, samples: list[Sample]) -> int:
    """Teacher rows over existing text, for this rank's share of the missing shards; returns the number of all."""
    r = recipe.respond
    limit = min(r.max_prompt_tokens, runner.context)
    shards = -(-len(samples) // r.shard_documents)
    missing = set(writer.missing(shards))
    todo, empty = [n for n in share(range(shards)) if n in missing], 0
    bar = progress(len(todo), "score", "shard")
    for shard in todo:
        documents: list[Document] = []
        for sample in samples[shard * r.shard_documents : (shard + 1) * r.shard_documents]:
            if sample.messages is not None:
                ids, mask = assistant_mask(target.tokenizer, sample.messages) if sample.messages else ([], [])
            else:
                ids = prompt_ids(target.tokenizer, sample)
                mask = [True] * len(ids)
            document = score_document(runner, ids[:limit], mask[:limit], r.k, recipe.distill.temperature)
            empty += document is None
            documents += [document] if document is not None else []
        if documents:
            writer.write_shard(shard, documents)
        else:
            writer.skip_shard(shard)
        bar.update()
    bar.close()
    if empty := sum(gather([empty])):
        say(f"score: left out {empty} texts without a token to learn from")
    return shards


def share(shards: range) -> list[int]:
    """This rank's part of the shards: by number, whatever the other ranks have written meanwhile."""
    return [n for n in shards if n % world_size() == rank()]


def progress(total: int, what: str, unit: str) -> tqdm:
    return tqdm(total=total, desc=what, unit=unit, disable=rank() != 0)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    samples = load_prompts(recipe, "train")
    with ranks_together():
        own_folder(recipe)
        run(recipe, samples)


def run(recipe: Recipe, samples: list[Sample]) -> None:
    dtype = training_dtype(recipe.respond.precision, local_device())
    target = shared_target(recipe, dtype)
    writer = open_cache(recipe, target, samples, str(dtype))
    if writer.manifest.complete:
        documents = sum(s["documents"] for s in writer.manifest.shards)
        say(f"respond: {recipe.cache_dir} is complete ({documents} documents), nothing to do")
        return
    runner = Paced(load_runner(target))
    shards = (respond if recipe.respond.mode == "generate" else score)(recipe, target, runner, writer, samples)
    if runner.tokens:
        say(f"respond: {runner.report(target.config)}" + (", of each rank" if world_size() > 1 else ""))
    wait_for_all()
    if rank() == 0:
        finish(writer, shards, recipe)


def open_cache(recipe: Recipe, target: Target, samples: list[Sample], dtype: str) -> CacheWriter:
    """The cache to write; the first rank makes it, or finds what is wrong with it, for all."""
    fingerprint = target.fingerprint()
    manifest = CacheManifest(
        target={"name": recipe.target.name, **fingerprint}, tokenizer_hash=fingerprint["tokenizer_hash"],
        corpus_hash=corpus_hash(samples), k=recipe.respond.k, temperature=recipe.distill.temperature,
        settings={"seed": recipe.seed, "weights": target.signature,
                  **recipe.respond.model_dump(mode="json", exclude={"batch"}), "dtype": dtype},
    )
    return first_makes(lambda: CacheWriter(recipe.cache_dir, manifest))


def finish(writer: CacheWriter, shards: int, recipe: Recipe) -> None:
    writer.finish(shards)
    written = writer.manifest.shards
    say(f"respond: {sum(s['documents'] for s in written)} documents, {sum(s['rows'] for s in written)} teacher rows in "
        f"{recipe.cache_dir}")


if __name__ == "__main__":
    run_job(main, "respond")
