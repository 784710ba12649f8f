"""Job `prepare`: a corpus in; one long stream of token ids on disk out (token blocks).

    deepspeed train/prepare.py --recipe recipes/paper-owt.yaml

For recipes that train on text as it is (`distill.teacher: online`, `train/target.py`). Every rank reads the whole
stream and tokenizes its own share of the shards; a killed job goes on with the shards that are missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import BlockManifest, BlockWriter
from draftsmith.data.chat import prompt_ids, render
from draftsmith.data.io import sha256_file
from draftsmith.data.text import Sample, stream_sources
from draftsmith.data.vocabulary import tokenizer_hash
from draftsmith.decode.target import load_description
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import (
    first_makes,
    gather,
    own_folder,
    rank,
    ranks_together,
    resolve_together,
    run_job,
    say,
    shares_of,
    world_size,
)
from tqdm import tqdm


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the loaders raise a dozen unrelated types; all mean "cannot load this"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DraftsmithError(f"pretrain.tokenizer '{name}' cannot be loaded: {reason}") from error


def shards_of(samples: Iterator[Sample], count: int | None, size: int) -> Iterator[tuple[int, list[Sample]]]:
    """Numbered shards of `size` samples, the last one smaller."""
    samples = itertools.islice(samples, count)
    for number in itertools.count():
        shard = list(itertools.islice(samples, size))
        if not shard:
            return
        yield number, shard


def document_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of a document or of a whole conversation, with the end-of-sequence token where there is one."""
    if sample.messages is not None:
        if not sample.messages:
            return []
        text = render(tokenizer, sample.messages, generation_prompt=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    ids, end = prompt_ids(tokenizer, sample), getattr(tokenizer, "eos_token_id", None)
    return ids if not ids or end is None or ids[-1] == end else [*ids, end]


def prepare(recipe: Recipe, tokenizer: Any, writer: BlockWriter) -> int:
    """Write this rank's share of the missing shards; returns the number of shards in all."""
    c, source = recipe.corpus, shares_of(recipe.prompts.train)
    number, skipped = -1, 0
    stream = stream_sources(source, recipe.prompts.schemas, recipe.seed)
    bar = tqdm(desc="prepare", unit="document", disable=rank() != 0, total=c.documents)
    for number, samples in shards_of(stream, c.documents, c.shard_documents):
        bar.update(len(samples))
        if number % world_size() != rank() or not writer.missing_one(number):
            continue
        documents = [ids for sample in samples if (ids := document_ids(tokenizer, sample))]
        skipped += len(samples) - len(documents)
        if documents:
            writer.write_shard(number, documents)
        else:
            writer.skip_shard(number)
    bar.close()
    if skipped := sum(gather([skipped])):
        say(f"prepare: left out {skipped} empty documents")
    return number + 1


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    if "quickstart" in shares_of(recipe.prompts.train):
        raise DraftsmithError("prepare takes a corpus of texts: name files or datasets in prompts.train")
    with ranks_together():
        own_folder(recipe)
        run(recipe)


def run(recipe: Recipe) -> None:
    if recipe.pretrain:
        tokenizer, vocabulary = load_tokenizer(recipe.pretrain.tokenizer, recipe.target.trust_remote_code), 0
    else:
        resolve_together(recipe.target.name)
        config, tokenizer = load_description(recipe.target.name, recipe.target.trust_remote_code)
        vocabulary = int(config.vocab_size)
    files = {path: sha256_file(path) for path in shares_of(recipe.prompts.train) if Path(path).expanduser().is_file()}
    manifest = BlockManifest(
        {"seed": recipe.seed, "sources": recipe.prompts.model_dump(mode="json", include={"train", "schemas"}),
         "files": files,
         **recipe.corpus.model_dump(mode="json")},
        tokenizer_hash=tokenizer_hash(tokenizer), vocab_size=max(len(tokenizer), vocabulary))
    writer = first_makes(lambda: BlockWriter(recipe.blocks_dir, manifest))
    if writer.manifest.complete:
        say(f"prepare: {recipe.blocks_dir} is complete, nothing to do")
        return
    shards = max(gather([prepare(recipe, tokenizer, writer)]))
    if rank() == 0:
        writer.finish(shards)
        tokens = sum(s["tokens"] for s in writer.manifest.shards)
        say(f"prepare: {sum(s['documents'] for s in writer.manifest.shards)} documents, {tokens:,} tokens in "
            f"{recipe.blocks_dir}")


if __name__ == "__main__":
    run_job(main, "prepare")
