"""`Decoder`: load a bundle and generate."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftsmith.data import DraftsmithError
from draftsmith.data.chat import chat_ids

from .bundle import Bundle, check_compatible, load_bundle, update_manifest
from .costs import Costs, cost_key, measure_costs, refresh_costs
from .draft import DraftRunner
from .loop import Generation
from .memory import check_memory, expected, usual_context
from .policies import PolicyContext, make_policy
from .runner import Runner, load_runner
from .sampling import GumbelNoise, Noise, SamplingParams
from .stats import Stats, Token
from .target import Target, load_description, load_target
from .text import TextStream

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass
class GenerationOutput:
    """A finished generation. finish_reason: "stop" (end of sequence, stop string or id) or "length"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = "length"
    stats: Stats = field(default_factory=Stats)


@dataclass
class Chunk:
    """A piece of a stream: the tokens of one round, each with the text that became final with it, and the
    output so far."""

    pieces: list[tuple[Token, str]]
    output: GenerationOutput

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


def bundle_costs(bundle: Bundle, runner: Runner, draft: DraftRunner) -> Costs:
    """The bundle's cost table for this device, brought to today's speed; measured and stored where it has none."""
    key = cost_key(runner, draft)
    if key in bundle.manifest.costs:
        with contextlib.suppress(DraftsmithError):  # of another shape: measured anew
            return refresh_costs(Costs.from_json(bundle.manifest.costs[key]), runner, draft)
    costs = measure_costs(runner, draft)
    bundle.manifest.costs[key] = costs.to_json()
    with contextlib.suppress(DraftsmithError):  # a bundle that cannot be written works as well
        update_manifest(bundle.folder, costs=bundle.manifest.costs)
    return costs


class Decoder:
    """A target with a draft, ready to generate."""

    def __init__(self, target: Target, runner: Runner, draft: DraftRunner | None, bundle: Bundle | None,
                 costs: Costs | None) -> None:
        self.target, self.runner, self.draft, self.bundle, self.costs = target, runner, draft, bundle, costs
        self.tokenizer, self.eos_ids = target.tokenizer, target.eos_ids
        settings = bundle.manifest.policy if bundle else {}
        shape = bundle.shape if bundle else None
        self.context = PolicyContext(
            shape, bundle.gate if bundle and settings.get("use_gate") else None, costs,
            settings.get("default", "goodput") if draft else "ar",
            shape.find(settings["variant"]) if shape and "variant" in settings else None,
            settings.get("paper", {}), settings.get("goodput", {}),
        )

    @classmethod
    def load(cls, bundle: str | os.PathLike[str], target: str | None = None, quiet: bool = True,
             trust_remote_code: bool = False, precision: str = "auto", draft_precision: str = "auto") -> Decoder:
        """Load a bundle with its target (named in the manifest, or `target`: a folder or hub name).

        `precision` of the target: "auto" (fp32 on a CPU, bf16 on a GPU), "fp32", "bf16" or "int8" (CPU); the
        output is that of the target at that precision. `draft_precision`: "plain", "int8", or "auto", the
        faster here. Raises `DraftsmithError` for a damaged bundle, a target that does not fit it, or one
        that does not fit the memory. Costs are measured once a device, and kept in the bundle if it can be
        written.
        """
        started = time.perf_counter()
        found = load_bundle(bundle)
        name = target or found.manifest.target["name"]
        # Checked before the weights are read, which can take minutes.
        check_compatible(found, *load_description(name, trust_remote_code))
        loaded = load_target(name, trust_remote_code=trust_remote_code, precision=precision)
        memory = expected(loaded, found.draft_config, found.shape, found.tensors)
        if not quiet:
            print(f"Loading {loaded.name} in {loaded.engine.precision}: {memory.describe(usual_context(loaded))}",
                  file=sys.stderr, flush=True)
        check_memory(loaded, memory)
        decoder = cls.assemble(loaded, found, draft_precision)
        if not quiet:
            print(f"Loaded in {time.perf_counter() - started:.1f} s; {decoder.describe_costs()}", file=sys.stderr,
                  flush=True)
        return decoder

    @classmethod
    def assemble(cls, target: Target, bundle: Bundle, draft_precision: str = "auto") -> Decoder:
        """A decoder from a target and a bundle, whose tensors it takes; measures costs, or refreshes those the
        bundle has of this device."""
        runner = load_runner(target)
        draft = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, target.embedding, target.head,
                            draft_precision)
        target.release()
        bundle.tensors.clear()  # the runner has them
        return cls(target, runner, draft, bundle, bundle_costs(bundle, runner, draft))

    def describe_costs(self) -> str:
        assert self.costs is not None
        return (f"a target pass takes {1e3 * self.costs.rows(1):.0f} ms, a draft step "
                f"{1e3 * min(self.costs.step.values()):.1f} ms and more ({self.draft.precision if self.draft else ''})")

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text (as it is), of chat messages (through the chat template), or ids themselves."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if all(isinstance(m, dict) for m in prompt) and prompt:
            return chat_ids(self.tokenizer, list(prompt))  # type: ignore[arg-type]
        if not all(isinstance(i, int) for i in prompt):
            raise DraftsmithError("a prompt is a text, a list of token ids, or a list of messages")
        ids: list[int] = list(prompt)  # type: ignore[arg-type]
        if bad := [i for i in ids if not 0 <= i < self.runner.vocab_size]:
            raise DraftsmithError(f"token id {bad[0]} is outside the target's vocabulary of {self.runner.vocab_size}")
        return ids

    def generate(self, prompt: Prompt, params: SamplingParams | None = None,
                 policy: str | None = None) -> GenerationOutput:
        """Generate one answer. `policy`: "ar", "fixed(k)", "paper" or "goodput"; default: the bundle's."""
        output = GenerationOutput()
        for chunk in self.stream(prompt, params, policy):
            output = chunk.output
        return output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, policy: str | None = None,
               noise: Noise | None = None) -> Iterator[Chunk]:
        """Generate in chunks of whole characters; stop iterating to cancel. The last chunk is complete."""
        params = params or SamplingParams()
        started = time.perf_counter()
        generation = self.start(prompt, params, policy, noise)
        yield from self.run(generation, started)

    def start(self, prompt: Prompt, params: SamplingParams, policy: str | None = None,
              noise: Noise | None = None) -> Generation:
        """The loop for one request, not yet run."""
        if noise is None:
            noise = Noise() if params.seed is None else GumbelNoise(params.seed, self.runner.vocab_size)
        return Generation(self.prompt_ids(prompt), params, make_policy(policy, self.context), self.runner,
                          self.draft, noise, self.eos_ids, self.costs)

    def run(self, generation: Generation, started: float | None = None) -> Iterator[Chunk]:
        """Drive a loop to its end, cutting at stop ids, stop strings and max_tokens."""
        started = time.perf_counter() if started is None else started
        params, stats = generation.params, generation.stats
        output = GenerationOutput(stats=stats)
        stream, laps = TextStream(self.tokenizer, tuple(params.stop), generation.stop_ids), generation.laps
        done = generation.max_tokens == 0
        while not done:
            fresh = generation.prefill() if not output.tokens else generation.round()
            laps.start()
            pieces: list[tuple[Token, str]] = []
            for token in fresh:
                ends = token.id in generation.stop_ids
                pieces.append((token, "" if ends else stream.push(token.id)))
                if ends or stream.stopped:
                    done, output.finish_reason = True, "stop"
                    break
            stats.trimmed += len(fresh) - len(pieces)
            output.tokens += [token for token, _ in pieces]
            output.token_ids += [token.id for token, _ in pieces]
            stats.emitted = len(output.tokens)
            done = done or stats.emitted >= generation.max_tokens
            if done:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + stream.finish())
            output.text += "".join(text for _, text in pieces)
            laps.lap("detokenisation")
            if not stats.ttft:
                stats.ttft = time.perf_counter() - started
            stats.seconds = time.perf_counter() - started
            if done:
                stats.policy = generation.policy.report()
                stats.check()
            yield Chunk(pieces, output)
        if not output.tokens:
            yield Chunk([], output)
