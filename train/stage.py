"""Stages: what a job made, from what, and whether that is still what the recipe asks for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import read_json, sha256_json, write_json
from draftsmith.data.text import HUB, Sample, corpus_hash, read_sources
from draftsmith.decode.target import Target, load_target, resolve

from .recipe import Recipe

Made = TypeVar("Made")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """The device of this rank, made current: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def resolve_together(name: str) -> str:
    """`resolve` on every rank; the first alone converts a preset."""
    if rank() == 0:
        resolve(name)
    wait_for_all()
    return resolve(name)


def shared_target(recipe: Recipe, dtype: torch.dtype | None = None) -> Target:
    """The recipe's target on this rank's device."""
    resolve_together(recipe.target.name)
    return load_target(recipe.target.name, dtype, str(local_device()), recipe.target.trust_remote_code)


@contextlib.contextmanager
def ranks_together() -> Iterator[None]:
    """A process group for jobs that share work without exchanging tensors; nothing for one rank."""
    if world_size() > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))  # ranks end at different times
    try:
        yield
    finally:
        if world_size() > 1:
            torch.distributed.destroy_process_group()


_held: dict[Path, Any] = {}  # open lock files, given up when the process ends, however it does


def own_folder(recipe: Recipe) -> None:
    """Make this job the only one that writes to the recipe's folder, until `run_job` ends. Every rank calls it, with
    its process group made. Raises `DraftsmithError` where another job writes there."""
    first_makes(lambda: _lock(recipe))


def _lock(recipe: Recipe) -> bool:
    if rank() != 0 or recipe.folder.resolve() in _held:
        return True
    try:
        recipe.folder.mkdir(parents=True, exist_ok=True)
        lock = (recipe.folder / ".lock").open("a+")
    except OSError as error:
        raise DraftsmithError(f"cannot write to {recipe.folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise DraftsmithError(f"{recipe.folder}: another job is writing there (process {lock.read().strip() or '?'}); "
                              "wait for it, or choose another 'out' folder") from error
    except OSError as error:
        say(f"{recipe.folder} cannot be locked ({error.strerror or error}): see that one job at a time writes there")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _held[recipe.folder.resolve()] = lock
    return True


def wait_for_all() -> None:
    if world_size() > 1:
        torch.distributed.barrier()


def gather(items: list[Any]) -> list[Any]:
    """The items of all ranks, on every rank."""
    if world_size() == 1:
        return items
    parts: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def from_first(value: Any) -> Any:
    """What the first rank passes, on every rank."""
    if world_size() > 1:
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0)
        value = held[0]
    return value


def first_makes(make: Callable[[], Made]) -> Made:
    """What `make` returns, on every rank; the first rank makes it before the others, or says for all what is wrong."""
    problem, made = None, None
    if rank() == 0:
        try:
            made = make()
        except DraftsmithError as error:
            problem = str(error)
    if problem := from_first(problem):
        raise DraftsmithError(problem)
    return make() if made is None else made


def say(message: str) -> None:
    """A line of progress, from the first rank only."""
    if rank() == 0:
        print(message, file=sys.stderr, flush=True)


# How a collective fails when the other side of it has died, in the words of gloo and NCCL.
RANK_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
                "remote process exited", "communicator was aborted")


class Terminated(Exception):
    """The job was asked to end, and did so in good order."""


def run_job(main: Callable[[], None], name: str) -> None:
    """Run a job's main function; a user's mistake ends it with one line and exit code 1."""
    try:
        main()
    except DraftsmithError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Terminated as end:
        say(f"{name}: {end}")
        sys.exit(143)
    except RuntimeError as error:
        if world_size() == 1 or not any(sign in str(error) for sign in RANK_IS_GONE):
            raise
        print(f"{name}: rank {rank()}: another rank is gone ({str(error).splitlines()[0][:200]}); its own message says "
              "why. Run the same command again to go on from the last checkpoint", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; run the same command again to go on", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:
        for lock in _held.values():
            lock.close()
        _held.clear()


def inputs_hash(recipe: Recipe, sections: Sequence[str], exclude: Collection[str] = (), **upstream: Any) -> str:
    """Hash of the recipe sections that decide a stage's output, less the keys in `exclude`, and of what it reads."""
    content = recipe.model_dump(mode="json")
    chosen = {s: {k: v for k, v in content[s].items() if k not in exclude} for s in sections}
    return sha256_json({"sections": chosen, "seed": recipe.seed, **upstream})


def is_done(marker: Path, inputs: str) -> bool:
    """Whether `marker` (a JSON file) records a finished stage made from these inputs."""
    return marker.is_file() and read_json(marker).get("inputs") == inputs


def mark_done(marker: Path, inputs: str, **facts: Any) -> None:
    write_json(marker, {"inputs": inputs, **facts})


def load_prompts(recipe: Recipe, split: str) -> list[Sample]:
    """The prompts of a split, "train" or "heldout". Raises if a held-out prompt is also trained on."""
    samples = {s: load_split(recipe, s) for s in ("train", "heldout")}
    seen = {s.content for s in samples["train"] if s.content}
    apart = [s for s in samples["heldout"] if s.content not in seen]
    if len(apart) < len(samples["heldout"]):
        if not recipe.prompts.text_words:
            both = next(s for s in samples["heldout"] if s.content in seen)
            raise DraftsmithError(f"held-out prompt '{both.id}' is also a training prompt")
        # Texts cut to their first words may well begin alike.
        say(f"left out {len(samples['heldout']) - len(apart)} held-out texts that begin as training ones do")
    return apart if split == "heldout" else samples[split]


def from_hub(recipe: Recipe) -> bool:
    """Whether training prompts are streamed, so that reading them only to look at them would be a waste."""
    return any(path.startswith(HUB) for path in shares_of(recipe.prompts.train))


def load_split(recipe: Recipe, split: str, spare: bool = False) -> list[Sample]:
    """The prompts of a split, "train" or "heldout", as they are. `spare`: fewer than asked will do."""
    source: str | dict[str, float] = getattr(recipe.prompts, split)
    count: int = getattr(recipe.prompts, f"{split}_count")
    if source == "quickstart":
        from draftsmith.data.quickstart_prompts import available, build

        if spare:
            count = min(count, available(split, recipe.seed))
        try:
            rows = build(split, count, recipe.seed)
        except ValueError as error:
            raise DraftsmithError(f"prompts.{split}_count: {error}") from error
        return [Sample(r["id"], r["kind"], messages=r["messages"]) for r in rows]
    samples = read_sources(shares_of(source), recipe.prompts.schemas, recipe.seed, count)
    if words := recipe.prompts.text_words:
        samples = [s if s.text is None else replace(s, text=" ".join(s.text.split()[:words])) for s in samples]
    return samples


def shares_of(source: str | dict[str, float]) -> dict[str, float]:
    return source if isinstance(source, dict) else {source: 1.0}


def prompts_hash(recipe: Recipe, split: str) -> str:
    return corpus_hash(load_prompts(recipe, split))


def load_trace_prompts(recipe: Recipe) -> list[Sample]:
    """Prompts for traces: those of the training source after the ones that were trained on; of the held-out source
    after the held-out ones, where the corpus was trained on as a whole.

    Acceptance on text that the draft has seen would flatter it. Where the source has no more prompts,
    training prompts are used, and that is said.
    """
    train, count = recipe.prompts.train_count, recipe.trace.prompts
    if recipe.distill.teacher == "online":
        used = recipe.prompts.heldout_count
        more = recipe.prompts.model_copy(update={"heldout_count": used + count})
        fresh = load_split(recipe.model_copy(update={"prompts": more}), "heldout")[used:]
        if len(fresh) < count:
            say(f"trace: only {len(fresh)} texts beyond the held-out ones; filling up with those")
            fresh += load_split(recipe, "heldout")[: count - len(fresh)]
        return fresh
    fresh = load_split(recipe.model_copy(update={"prompts": recipe.prompts.model_copy(
        update={"train_count": train + count})}), "train", spare=True)[train:]
    held = {s.content for s in load_split(recipe, "heldout")}
    fresh = [s for s in fresh if s.content not in held]
    if len(fresh) < count:
        say(f"trace: only {len(fresh)} prompts beyond the training ones; filling up with training prompts, whose "
            "acceptance is flattering")
        fresh += load_prompts(recipe, "train")[-(count - len(fresh)) :]
    return fresh
