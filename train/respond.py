"""Job `respond`: prompts in; the target's own answers with its top-k distributions out (a teacher cache).

    deepspeed train/respond.py --recipe recipes/quickstart.yaml

Mode `score` takes existing text instead: documents, or conversations of which the assistant's turns carry
the loss.
"""

from __future__ import annotations

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import assistant_mask, encode_prompts, prompt_ids
from draftsmith.data.teacher_cache import CacheManifest, CacheWriter, Document, teacher_rows
from draftsmith.data.text import Sample, corpus_hash
from draftsmith.decode.batch import Answer, generate_batch
from draftsmith.decode.linear import training_dtype
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.target import Target, load_target
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import load_prompts, rank, run_job, say
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


def respond(recipe: Recipe, target: Target, runner: Runner, writer: CacheWriter, samples: list[Sample]) -> None:
    """Generate answers shard by shard, from the first shard that is not yet written."""
    r = recipe.respond
    _, prompts = encode_prompts(target.tokenizer, samples, min(r.max_prompt_tokens, runner.context - r.max_tokens))
    if skipped := len(samples) - len(prompts):
        say(f"respond: left out {skipped} empty or over-long prompts (respond.max_prompt_tokens)")
    done = writer.documents
    left = prompts[done:]
    shard_of = [j // r.shard_documents for j in range(len(left))]
    waiting: dict[int, dict[int, list[Answer]]] = {}
    next_shard = 0
    bar = tqdm(total=len(prompts) * r.answers, initial=done * r.answers, desc="respond", unit="answer")
    # Two shards in flight: rows refill across a shard's end, and prompts are still sorted by length.
    for start in range(0, len(left), 2 * r.shard_documents):
        part = left[start : start + 2 * r.shard_documents]
        for answer in generate_batch(runner, part, r.answers, r.temperatures, r.max_tokens, target.eos_ids, r.batch,
                                     recipe.seed, r.k, recipe.distill.temperature, done + start):
            job = start + answer.job
            waiting.setdefault(shard_of[job], {}).setdefault(job, []).append(answer)
            bar.update()
        while next_shard in waiting:
            documents = waiting.pop(next_shard)
            writer.write_shard([answers_to_document(left[j], sorted(documents[j], key=lambda a: a.index))
                                for j in sorted(documents)])
            next_shard += 1
    bar.close()


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


@torch.no_grad()
def score(recipe: Recipe, target: Target, runner: Runner, writer: CacheWriter, samples: list[Sample]) -> None:
    """Teacher rows over existing text, shard by shard."""
    r = recipe.respond

    done = writer.manifest.shards[-1]["read"] if writer.manifest.shards else 0
    batch: list[Document] = []
    empty = 0
    bar = tqdm(samples[done:], desc="score", unit="text", initial=done, total=len(samples))
    for read, sample in enumerate(bar, done + 1):
        if sample.messages is not None:
            ids, mask = assistant_mask(target.tokenizer, sample.messages)
        else:
            ids = prompt_ids(target.tokenizer, sample)
            mask = [True] * len(ids)
        limit = min(r.max_prompt_tokens, runner.context)
        document = score_document(runner, ids[:limit], mask[:limit], r.k, recipe.distill.temperature)
        empty += document is None
        batch += [document] if document is not None else []
        if batch and (len(batch) == r.shard_documents or read == len(samples)):
            writer.write_shard(batch, read)
            batch = []
    if empty:
        say(f"score: left out {empty} texts without a token to learn from")
    if not writer.documents:
        raise DraftsmithError("no text has a token to learn from")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    if rank() != 0:  # one writer; the launcher may have started more
        return
    samples = load_prompts(recipe, "train")
    dtype = training_dtype(recipe.respond.precision, "cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(recipe.target.name, dtype, trust_remote_code=recipe.target.trust_remote_code)
    fingerprint = target.fingerprint()
    manifest = CacheManifest(
        target={"name": recipe.target.name, **fingerprint}, tokenizer_hash=fingerprint["tokenizer_hash"],
        corpus_hash=corpus_hash(samples), k=recipe.respond.k, temperature=recipe.distill.temperature,
        settings={"seed": recipe.seed, "weights": target.signature,
                  **recipe.respond.model_dump(mode="json", exclude={"batch", "shard_documents"}), "dtype": str(dtype)},
    )
    writer = CacheWriter(recipe.cache_dir, manifest)
    if writer.manifest.complete:
        say(f"respond: {recipe.cache_dir} is complete ({writer.documents} documents), nothing to do")
        return
    runner = load_runner(target)
    (respond if recipe.respond.mode == "generate" else score)(recipe, target, runner, writer, samples)
    writer.finish()
    rows = sum(s["rows"] for s in writer.manifest.shards)
    say(f"respond: {writer.documents} documents, {rows} teacher rows in {recipe.cache_dir}")


if __name__ == "__main__":
    run_job(main, "respond")
