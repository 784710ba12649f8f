"""The engine against the machine's floor and against what a user would pick instead, in one interleaved run.

`transformers` runs in a process of its own with its own defaults, and takes turns with ours.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _verdict import ROOT, conclude
from draftsmith.data.io import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams, bench
from draftsmith.decode.batch import write_answers
from draftsmith.decode.costs import Prober
from draftsmith.decode.device import device_name, training_dtype
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.runner import load_runner
from draftsmith.decode.target import load_target, resolve
from draftsmith.train.stage import run_job
from tqdm import tqdm

import torch  # isort: skip  (after ours, which sets its threads)

CONTEXT, TOKENS, ROUNDS = 128, 64, 9
BATCH, BATCH_PROMPT, BATCH_TOKENS, BATCH_ROUNDS, TEACHER_K = 32, 400, 64, 2, 16
# figure -> (bar, goal, whether more is better)
BARS = {
    "t(1 row) / floor": (3.0, 2.0, False),
    "t(16 rows) / floor": (6.5, 4.0, False),
    "our AR / transformers generate": (1.3, 2.5, True),
    "4-layer draft step / t(1 row)": (0.12, 0.06, False),
    "batched respond as it runs / transformers fp32": (2.5, 4.0, True),
    "time outside the forwards, fixed(4)": (0.08, 0.04, False),
    "policy ar / bare loop": (0.98, 1.0, True),
    "peak memory over weights and caches": (1.35, 1.15, False),
}

STOCK = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
for line in sys.stdin:
    job = json.loads(line)
    ids = torch.tensor(job["ids"])
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"],
                       min_new_tokens=job["tokens"], do_sample=False, pad_token_id=0)
    print(json.dumps(time.perf_counter() - start), flush=True)
"""

MEMORY = """
import json, re, sys
import draftsmith.decode, draftsmith.decode.bench, scipy.stats, torch, transformers
def held(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.ones(64, 64) @ torch.ones(64, 64)
base = held("VmRSS")
from draftsmith.decode import Decoder, SamplingParams
decoder = Decoder.load(sys.argv[1])
prompt = list(range(1000, 1448))
decoder.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True), "fixed(4)")
caches = decoder.runner.cache_bytes(1, 512) + decoder.draft.cache_bytes(512)
print(json.dumps([held("VmHWM") - base, decoder.runner.weight_bytes + 4 * decoder.draft.parameters + caches]))
"""


class Stock:
    """`transformers` generate in another process, started with the environment a user has."""

    def __init__(self, folder: str, dtype: str = "float32") -> None:
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
        self.process = subprocess.Popen([sys.executable, "-c", STOCK, folder, dtype], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def seconds(self, ids: list[list[int]], tokens: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def random_ids(count: int, length: int) -> list[list[int]]:
    return torch.randint(1000, 40000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def single(decoder: Decoder, stock: Stock) -> dict[str, list[float]]:
    """Figures of one request, interleaved; times in seconds, rates in tokens/s."""
    draft, prompt = decoder.draft, random_ids(1, CONTEXT)[0]
    assert draft is not None
    probe, full = Prober(decoder.runner, draft), draft.shape.variants()[-1]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def ours(policy: str) -> float:
        return TOKENS / decoder.generate(prompt, params, policy).stats.seconds

    def outside() -> float:
        stats = decoder.generate(prompt, params, "fixed(4)").stats
        return 1.0 - (stats.parts["target"] + stats.parts["draft"]) / stats.seconds

    jobs: dict[str, Callable[[], float]] = {
        "bandwidth": lambda: bench.bandwidth(decoder.runner.device, 1),
        "t1": lambda: probe.target_pass(1, CONTEXT), "t16": lambda: probe.target_pass(16, CONTEXT),
        "draft": lambda: probe.draft_step(full, CONTEXT), "ar": lambda: ours("ar"),
        "transformers": lambda: TOKENS / stock.seconds([prompt], TOKENS),
        "bare": lambda: bench.bare_loop(decoder.runner, prompt, TOKENS),
        "loop": lambda: bench.policy_loop(decoder, prompt, TOKENS, "ar"), "outside": outside,
    }
    with torch.no_grad():
        bench.interleaved(jobs, 1)  # warm-up
        return bench.interleaved(jobs, ROUNDS, lambda r: tqdm(r, desc="engine", unit="round"))


def batched(target_name: str, stock: Stock) -> dict[str, list[float]]:
    """Seconds of writing answers for a batch of prompts, ours with the teacher's rows: "job" as respond runs by
    default, and both sides in each precision."""
    prompts = random_ids(BATCH, BATCH_PROMPT)

    def respond(runner: Any) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            list(write_answers(runner, prompts, 1, [0.0], BATCH_TOKENS, frozenset(), BATCH, 0, TEACHER_K, 0.5))
            return time.perf_counter() - start
        return run

    plain = respond(load_runner(load_target(target_name, torch.float32)))
    jobs = {"job": plain, "transformers fp32": lambda: stock.seconds(prompts, BATCH_TOKENS)}
    if (dtype := training_dtype("auto", "cpu")) != torch.float32:
        half = Stock(resolve(target_name), "bfloat16")
        jobs |= {"job": respond(load_runner(load_target(target_name, dtype))), "ours fp32": plain,
                 "transformers bf16": lambda: half.seconds(prompts, BATCH_TOKENS)}
    return bench.interleaved(jobs, BATCH_ROUNDS, lambda r: tqdm(r, desc="batched", unit="round"))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs/quickstart/bundle")
    if not folder.is_dir():
        raise DraftsmithError(f"{folder}: no bundle; run bash scripts/quickstart.sh first, or name one")
    peak, expected = json.loads(subprocess.run([sys.executable, "-c", MEMORY, str(folder)], check=True,
                                               capture_output=True, text=True).stdout)
    decoder = Decoder.load(folder)
    assert isinstance(decoder.draft, DraftRunner)
    stock = Stock(resolve(decoder.target.name))
    runs = single(decoder, stock)
    batches = batched(decoder.target.name, stock)
    stock.process.kill()

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(runs[a], runs[b], strict=True))

    middle = {name: statistics.median(values) for name, values in runs.items()}
    floor = decoder.runner.weight_bytes / middle["bandwidth"]
    figures = {
        "t(1 row) / floor": middle["t1"] / floor, "t(16 rows) / floor": middle["t16"] / floor,
        "our AR / transformers generate": ratio("ar", "transformers"),
        "4-layer draft step / t(1 row)": ratio("draft", "t1"),
        "batched respond as it runs / transformers fp32": statistics.median(
            t / o for t, o in zip(batches["transformers fp32"], batches["job"], strict=True)),
        "time outside the forwards, fixed(4)": middle["outside"], "policy ar / bare loop": ratio("loop", "bare"),
        "peak memory over weights and caches": peak / expected,
    }
    misses = [n for n, value in figures.items() if not (value >= BARS[n][0] if BARS[n][2] else value <= BARS[n][0])]
    print(f"\n{device_name()}; bandwidth {middle['bandwidth'] / 1e9:.1f} GB/s, floor {1e3 * floor:.1f} ms, t(1) "
          f"{1e3 * middle['t1']:.1f} ms, t(16) {1e3 * middle['t16']:.1f} ms, draft step {1e3 * middle['draft']:.2f} ms "
          f"({decoder.draft.precision}), AR {middle['ar']:.1f} tokens/s, transformers {middle['transformers']:.1f}")
    print("batched, s: " + ", ".join(f"{k} {statistics.median(v):.1f}" for k, v in batches.items()))
    print("\n| figure | measured | bar | goal |\n|---|---|---|---|")
    for name, (bar, goal, more) in BARS.items():
        print(f"| {name} | {figures[name]:.3f} | {'>=' if more else '<='} {bar} | {goal} |")
    conclude("engine", not misses, f"{len(BARS) - len(misses)} of {len(BARS)} bars met"
             + (f"; missed: {', '.join(misses)}" if misses else ""), measured=figures, runs=runs, batches=batches,
             machine=device_name())


if __name__ == "__main__":
    run_job(main, "engine")
