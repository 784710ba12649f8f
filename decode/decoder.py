"""`Decoder`: load a bundle and generate."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.data import DraftsmithError
from draftsmith.data.chat import chat_ids

from .bundle import Bundle, check_compatible, load_bundle, update_manifest
from .costs import Costs, cost_key, measure_costs, refresh_costs
from .draft import DraftRunner
from .loop import Generation, check_request
from .memory import check_memory, expected, usual_context
from .policies import Policy, PolicyContext, make_policy
from .runner import DraftModel, Runner, load_runner
from .sampling import GumbelNoise, Noise, SamplingParams
from .schedule import Batch, Request
from .stock import StockDraft
from .target import Target, load_description, load_target
from .transcript import Chunk, GenerationOutput, Transcript

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


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

    def __init__(self, target: Target, runner: Runner, draft: DraftModel | None,
                 bundle: Bundle | None, costs: Costs | None) -> None:
        self.target, self.runner, self.draft, self.bundle, self.costs = target, runner, draft, bundle, costs
        self.tokenizer, self.eos_ids = target.tokenizer, target.eos_ids
        settings = bundle.manifest.policy if bundle else {}
        shape = draft.shape if draft else None
        variant = shape.variants()[-1] if shape else None
        self.context = PolicyContext(
            shape, bundle.gate if bundle and settings.get("use_gate") else None, costs,
            settings.get("default", "goodput" if costs else "ar"),
            shape.find(settings["variant"]) if shape and "variant" in settings else variant,
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
    def pair(cls, target: str, draft: str | None = None, trust_remote_code: bool = False, precision: str = "auto",
             draft_precision: str = "auto") -> Decoder:
        """A decoder without a bundle: a target with any smaller model of the same tokenizer as its draft, or with
        prompt lookup alone. Names are folders or hub names. Costs are measured at every load."""
        loaded, stock = load_target(target, trust_remote_code=trust_remote_code, precision=precision), None
        check_memory(loaded, expected(loaded))
        if draft is not None:
            precision = "auto" if draft_precision == "plain" else draft_precision
            model = load_target(draft, trust_remote_code=trust_remote_code, precision=precision)
            check_memory(model, expected(model))
            stock = StockDraft(model, loaded)
        runner = load_runner(loaded)
        loaded.release()
        return cls(loaded, runner, stock, None, measure_costs(runner, stock))

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

    def beside(self, folder: str | os.PathLike[str], draft_precision: str = "auto") -> Decoder:
        """A decoder of the same loaded target with another bundle's draft. Raises `DraftsmithError` for a bundle that
        does not fit the target."""
        bundle = load_bundle(folder)
        check_compatible(bundle, self.target.config, self.tokenizer)
        draft = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, self.target.embedding, self.target.head,
                            draft_precision)
        bundle.tensors.clear()
        return Decoder(self.target, self.runner, draft, bundle, bundle_costs(bundle, self.runner, draft))

    def describe_costs(self) -> str:
        assert self.costs is not None
        text = f"a target pass takes {1e3 * self.costs.rows(1):.0f} ms"
        if self.draft is not None:
            text += f", a draft step {1e3 * min(self.costs.step.values()):.1f} ms and more ({self.draft.precision})"
        return text

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text (as it is), of chat messages (through the chat template), or ids themselves."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if not isinstance(prompt, Sequence):
            raise DraftsmithError(f"a prompt is a text, a list of token ids, or a list of messages, not {prompt!r}")
        if all(isinstance(m, dict) for m in prompt) and prompt:
            return chat_ids(self.tokenizer, list(prompt))  # type: ignore[arg-type]
        if not all(isinstance(i, int) for i in prompt):
            raise DraftsmithError("a prompt is a text, a list of token ids, or a list of messages")
        ids: list[int] = list(prompt)  # type: ignore[arg-type]
        if bad := [i for i in ids if not 0 <= i < self.runner.vocab_size]:
            raise DraftsmithError(f"token id {bad[0]} is outside the target's vocabulary of {self.runner.vocab_size}")
        return ids

    def generate(self, prompt: Prompt, params: SamplingParams | None = None,
                 policy: str | Policy | None = None) -> GenerationOutput:
        """Generate one answer. `policy`: a name, see `policies.make_policy` (default: the bundle's), or an object,
        which goes on from what it has learned."""
        output = GenerationOutput()
        for chunk in self.stream(prompt, params, policy):
            output = chunk.output
        return output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, policy: str | Policy | None = None,
               noise: Noise | None = None) -> Iterator[Chunk]:
        """Generate in chunks of whole characters; stop iterating to cancel. The last chunk is complete."""
        params = params or SamplingParams()
        started = time.perf_counter()
        generation = self.start(prompt, params, policy, noise)
        yield from self.run(generation, started)

    def start(self, prompt: Prompt, params: SamplingParams, policy: str | Policy | None = None,
              noise: Noise | None = None) -> Generation:
        """The loop for one request, not yet run."""
        if params.n != 1:
            raise DraftsmithError(f"n = {params.n}: generate_batch gives several answers, generate and stream give one")
        return Generation(self.prompt_ids(prompt), params, self._policy(policy), self.runner,
                          self.draft, noise or self._noise(params), self.eos_ids, self.costs)

    def run(self, generation: Generation, started: float | None = None) -> Iterator[Chunk]:
        """Drive a loop to its end, cutting at stop ids, stop strings and max_tokens."""
        answer = Transcript(generation, self.tokenizer, started)
        try:
            while not answer.done:
                yield answer.take(generation.round() if answer.output.tokens else generation.prefill())
            if not answer.output.tokens:
                yield Chunk([], answer.output)
        finally:
            generation.close()

    def generate_batch(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
                       policy: str | None = None, slots: int = 8) -> list[list[GenerationOutput]]:
        """Answer several prompts, `params.n` answers each; up to `slots` requests share every target pass.

        `params` may differ by prompt. Each answer has the distribution, and with a seed or under greedy the text
        (up to rounding), that it has alone; answer i to a prompt with a seed draws its own noise. The first error
        of a request is raised once all others are done.
        """
        if isinstance(prompts, str):
            raise DraftsmithError("generate_batch takes a list of prompts; generate takes one")
        if slots < 1:
            raise DraftsmithError(f"slots must be 1 or more, not {slots}")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise DraftsmithError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        requests = [[self.request(prompt, p, policy, choice, group=prompt) for choice in range(p.n)]
                    for prompt, p in zip(ids, each, strict=True)]
        longest = max((len(prompt) + p.max_tokens for prompt, p in zip(ids, each, strict=True)), default=1)
        batch = Batch(self.runner, self.tokenizer, max(1, min(slots, sum(map(len, requests)))), longest)
        for request in (request for group in requests for request in group):
            batch.submit(request)
        while batch.busy:
            batch.step()
        if failed := next((r.error for group in requests for r in group if r.error), None):
            raise failed
        return [[r.answer.output for r in group if r.answer] for group in requests]

    def request(self, prompt: list[int], params: SamplingParams, policy: str | None = None, choice: int = 0,
                group: object = None) -> Request:
        """A request for a `Batch`: answer number `choice` to a prompt."""

        def start(cache: Any, slot: int) -> Generation:
            return Generation(prompt, params, self._policy(policy), self.runner, self.draft,
                              self._noise(params, choice), self.eos_ids, self.costs, cache=cache, slot=slot)

        return Request(start, group, prompt)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise `DraftsmithError` for a request that could not be answered, before it is made."""
        check_request(prompt, params, self.runner)

    def _policy(self, policy: str | Policy | None) -> Policy:
        return make_policy(policy, self.context) if policy is None or isinstance(policy, str) else policy

    def _noise(self, params: SamplingParams, choice: int = 0) -> Noise:
        return Noise() if params.seed is None else GumbelNoise(params.seed, self.runner.vocab_size, choice)
