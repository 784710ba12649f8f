"""The training loop, shared by all training jobs. Read it from top to bottom."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import write_text
from torch import nn
from tqdm import tqdm

from .checkpoint import load_checkpoint, newest_checkpoint, of_other_ranks, save_checkpoint
from .flops import product_speed
from .stage import Terminated, rank, say, world_size


@dataclass
class Settings:
    """What the loop needs of a recipe; learning rate and clipping as in `recipe.DistillSection`."""

    name: str
    steps: int
    lr: float
    warmup: int = 0
    final_lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulation: int = 1
    zero_stage: int = 0
    save_every: int = 10**9
    max_skipped: int = 10


class Termination:
    """Turns SIGTERM, which a cluster sends before it takes a machine back, into a checkpoint and an end."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def _ask(self, *_: object) -> None:
        self.asked = True


def ensure_distributed() -> None:
    """Set up one rank when the launcher has not: `python train/X.py` works as `deepspeed train/X.py` does."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed

    deepspeed.logger.setLevel("WARNING")
    if os.environ["WORLD_SIZE"] == "1":
        # One rank has nobody to share memory with: without this DeepSpeed compiles its collective for it.
        known = getattr(deepspeed.ops, "__compatible_ops__", {})
        known.update({name: False for name in known if "shm" in name})
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(dist_backend=None if torch.cuda.is_available() else "gloo", verbose=False)
    _forget_shared_memory()


def _forget_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Take the names of DeepSpeed's shared buffers away once every rank has them open: the memory then goes with the
    ranks, however they end. DeepSpeed leaves 70 MB a rank behind."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        return
    torch.distributed.barrier()
    own = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_*"
    for path in folder.glob(own) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else ():
        path.unlink(missing_ok=True)


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine from lr to final_lr * lr at the last step; a function of the step alone."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    low = settings.lr * settings.final_lr
    return low + (settings.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_engine(module: nn.Module, settings: Settings, micro_batch: int, universal: bool = False) -> Any:
    """`universal`: it will load what another number of ranks has written."""
    import deepspeed

    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay,
                                  fused=True)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": settings.clip,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": universal},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


@contextlib.contextmanager
def whole_weights(module: nn.Module, settings: Settings) -> Iterator[None]:
    """Within, parameters that ZeRO 3 has spread over the ranks are whole on every rank. All ranks must enter."""
    if settings.zero_stage < 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        yield


Figures = Mapping[str, float | str]  # what is logged of a step, by name


class Log:
    """Scalars and texts to TensorBoard and one JSON line a step, from the first rank; resumed logs lose no step."""

    def __init__(self, folder: Path, name: str, step: int) -> None:
        self.active = rank() == 0
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(folder / "tb" / name), purge_step=step + 1)
        path = folder / f"{name}.jsonl"
        kept = []
        if step and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    continue  # the last line of a killed run
        if path.is_file():
            write_text(path, "".join(line + "\n" for line in kept))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Figures) -> None:
        if self.active:
            for key, value in values.items():
                if isinstance(value, str):
                    self.board.add_text(key, value, step)
                else:
                    self.board.add_scalar(key, value, step)
            try:
                self.file.write(json.dumps({"step": step, **values}) + "\n")
                self.file.flush()
            except OSError as error:
                raise DraftsmithError(f"cannot write the log {self.file.name}: {error.strerror or error}") from error

    def close(self) -> None:
        if self.active:
            self.board.close()
            self.file.close()


class Speed:
    """How fast a job has trained, and what share of this machine's products that is."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0.0
        self.seconds = self.units = 0.0
        self.done: dict[str, float] = {}

    def add(self, seconds: float, units: float, done: dict[str, float]) -> dict[str, float]:
        """Count a step of all ranks; what to log of it."""
        self.seconds, self.units = self.seconds + seconds, self.units + units
        for name, value in done.items():
            self.done[name] = self.done.get(name, 0.0) + value
        if "flops" not in done:
            return {}
        if not self.peak:
            try:
                self.peak = product_speed(self.device) * world_size()
            except RuntimeError:  # no memory left for it: a figure is not worth a job
                self.peak = math.inf
        return {"train/peak_share": done["flops"] / seconds / self.peak}

    def __str__(self) -> str:
        if "flops" not in self.done or not self.seconds:
            return ""
        rate = self.done["flops"] / self.seconds
        tokens, rows = self.done.get("tokens", 0.0) / self.seconds, self.units / self.seconds
        return (f"{tokens:,.0f} tokens and {rows:,.0f} rows a "
                f"second, {rate / 1e9:,.0f} GFLOP/s, {rate / self.peak:.0%} of what large products reach here")


def totals(values: list[float], device: torch.device) -> list[float]:
    """The sums of some values over ranks, which all must pass as many."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor)
    found: list[float] = tensor.tolist()
    return found


def total(value: float, device: torch.device) -> float:
    return totals([value], device)[0]


def fit(
    module: nn.Module, batches: Callable[[int], list[Any]], count: Callable[[Any], int], settings: Settings,
    folder: Path, inputs: str, micro_batch: int = 1, evaluate: Callable[[int], Figures] | None = None,
    eval_every: int = 10**9, discard_stale: bool = False, emptied: Callable[[Any], Any] = lambda batch: batch[:0],
) -> Any:
    """Train `module` for settings.steps steps; returns the engine.

    `batches(step)`: this rank's micro-batches of a step, a function of the step alone (so is the data's
    position on resume). `module(batch)` returns the sum of losses over `count(batch)` units and
    {name: (sum, number)} of what is logged as a mean ("tokens" and "flops" as rates); gradients are normalised by the
    units of all ranks and micro-batches together. A checkpoint of other inputs is refused, or thrown away
    where `discard_stale` says that the job is quickly done again. The rows of a micro-batch whose loss is not
    finite are left out (`emptied(batch)` is one without any); settings.max_skipped such steps in a row are an
    error. SIGTERM ends the job after its step, with a checkpoint.
    """
    checkpoints = folder / "checkpoints" / settings.name
    found = newest_checkpoint(checkpoints, inputs, discard_stale)
    # Without ZeRO every rank has everything, however many there are.
    universal = found is not None and settings.zero_stage > 0 and of_other_ranks(found)
    engine, start = make_engine(module, settings, micro_batch, universal), 0
    if found is not None:
        start = load_checkpoint(engine, found)
        say(f"{settings.name}: resuming after step {start}")
    log = Log(folder, settings.name, start)
    bar = tqdm(range(start, settings.steps), initial=start, total=settings.steps, desc=settings.name, unit="step",
               disable=rank() != 0)
    if evaluate is not None and start == 0:
        log.write(0, evaluate(0))
    skipped, speed = 0, Speed(engine.device)
    with Termination() as termination:
        for step in bar:
            began = time.perf_counter()
            rate = learning_rate(settings, step)
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            parts = batches(step)
            units = total(float(sum(count(b) for b in parts)), engine.device)
            scale = settings.accumulation * world_size() / max(1.0, units)
            means, rates, bad = _step(engine, parts, count, emptied, scale)
            skipped = _note_skipped(settings, step + 1, bad, skipped)
            seconds = time.perf_counter() - began
            done = step + 1
            figures: dict[str, float | str] = {
                **means, "train/lr": rate, "train/rows_per_second": units / seconds, "train/skipped": float(bad),
                **{f"train/{name}_per_second": value / seconds for name, value in rates.items()},
                **speed.add(seconds, units, rates)}
            bar.set_postfix(loss=f"{means.get('train/loss', math.nan):.3f}", refresh=False)
            stop = total(float(termination.asked), engine.device) > 0  # within the seconds that are left
            # Measured and logged before the checkpoint: a job resumed from it has them already.
            if evaluate is not None and not stop and (done % eval_every == 0 or done == settings.steps):
                figures.update(evaluate(done))
            log.write(done, figures)
            last = done == settings.steps
            # What a step without a finite loss has done to the weights is not known yet.
            if last or ((done % settings.save_every == 0 or stop) and not bad):
                save_checkpoint(engine, checkpoints, done, inputs)
            if stop and not last:
                log.close()
                raise Terminated(f"asked to end: stopped after step {done}; run the same command again to go on")
    bar.close()
    log.close()
    if told := str(speed):
        say(f"{settings.name}: {told}")
    return engine


def _note_skipped(settings: Settings, step: int, bad: int, before: int) -> int:
    """How many steps in a row have had a micro-batch without a finite loss; too many are an error."""
    if not bad:
        return 0
    say(f"{settings.name}: step {step}: {bad} micro-batches without a finite loss, left out")
    if before + 1 >= settings.max_skipped:
        raise DraftsmithError(f"{settings.name}: the loss has not been finite for {before + 1} steps (the last is "
                              f"{step}); lower lr, or look at the data")
    return before + 1


def _step(engine: Any, parts: list[Any], count: Callable[[Any], int], emptied: Callable[[Any], Any],
          scale: float) -> tuple[dict[str, float], dict[str, float], int]:
    """One optimiser step over the micro-batches: means of what is logged, sums of what is logged as a rate, and how
    many micro-batches of any rank had to be left out."""
    sums: dict[str, tuple[float, float]] = {}
    bad = 0
    for batch in parts:
        loss, metrics = engine(batch)
        finite = bool(torch.isfinite(loss.detach()))
        if missing := round(total(float(not finite), engine.device)):
            # Once more on every rank, so that all make the same number of passes.
            bad += missing
            loss, metrics = engine(batch if finite else emptied(batch))
        # DeepSpeed divides by the accumulation steps and averages over ranks; undone here, so that
        # every unit weighs the same wherever it was.
        engine.backward(loss * scale)
        engine.step()
        for key, (value, number) in {"loss": (loss.detach(), count(batch) if finite else 0), **metrics}.items():
            before = sums.get(key, (0.0, 0.0))
            sums[key] = (before[0] + float(value), before[1] + float(number))
    summed = totals([x for pair in sums.values() for x in pair], engine.device)
    found = dict(zip(sums, zip(summed[::2], summed[1::2], strict=True), strict=True))
    rates = {str(k): found.pop(k)[0] for k in ("tokens", "flops") if k in found}
    return {f"train/{k}": v / n for k, (v, n) in found.items() if n > 0}, rates, bad
