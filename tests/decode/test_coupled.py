"""With a seed the text depends on nothing but the seed and the target: Gumbel coupling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_bundle, make_draft
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.bundle import load_bundle
from draftsmith.decode.sampling import GumbelNoise
from draftsmith.decode.target import load_target
from scipy import stats

POLICIES = ["fixed(1)", "fixed(4)", "fixed(16)", "mtv(2,2,2)", "mtv(1,8)", "lookup(4)", "hybrid(4)", "paper", "goodput"]
DRAFTS = {"conftest draft": ([0, 1, 3, 4], 120), "other layers, whole head": ([4, 2, 1, 0], 258)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 11},
    "processed": {"temperature": 0.6, "top_k": 30, "top_p": 0.9, "seed": 12, "min_tokens": 5, "ignore_eos": False},
}
PROMPTS = {"plain": "SELECT name", "processed": "{"}
PROBS = torch.tensor([0.42, 0.3, 0.15, 0.1, 0.03], dtype=torch.float64)
DRAWS = 6000


@pytest.fixture(scope="module")
def decoders(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """Float64, so that passes of different numbers of rows cannot round to different tokens."""
    made = {}
    for i, (name, (layers, head)) in enumerate(DRAFTS.items()):
        target = load_target(str(target_folder), dtype=torch.float64)
        draft = make_draft(target, layers, head)
        folder = make_bundle(tmp_path_factory.mktemp("coupled") / str(i), target, draft, str(target_folder))
        made[name] = Decoder.assemble(target, load_bundle(folder))
    return made


def sample(decoder: Decoder, prompt: str, policy: str, **changes: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **changes})
    return decoder.generate(prompt, params, policy).token_ids


@pytest.fixture(scope="module")
def alone(decoders: dict[str, Decoder]) -> dict[str, list[int]]:
    """What the target writes without a draft, by setting."""
    decoder = decoders["conftest draft"]
    return {name: sample(decoder, PROMPTS[name], "ar", **settings) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_text_is_the_same_for_every_policy_and_draft(
    decoders: dict[str, Decoder],
    alone: dict[str, list[int]],
    draft: str,
    policy: str,
    setting: str,
) -> None:
    assert sample(decoders[draft], PROMPTS[setting], policy, **SETTINGS[setting]) == alone[setting]


def test_drafted_tokens_are_accepted_under_coupling(decoders: dict[str, Decoder]) -> None:
    """Equal text would also come from a loop that never accepts."""
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=3, ignore_eos=True)
    output = decoders["conftest draft"].generate(PROMPTS["plain"], params, "fixed(2)")
    assert output.stats.accepted > 0


def test_another_seed_gives_another_text(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["conftest draft"]
    texts = {tuple(sample(decoder, "x", "fixed(2)", temperature=1.0, seed=seed)) for seed in range(4)}
    assert len(texts) == 4


def test_without_a_seed_texts_differ(decoders: dict[str, Decoder]) -> None:
    texts = {tuple(sample(decoders["conftest draft"], "x", "fixed(2)", temperature=1.0)) for _ in range(3)}
    assert len(texts) == 3


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_gumbel_draws_follow_the_probabilities(seed: int) -> None:
    noise = GumbelNoise(seed, 5)
    counts = np.bincount([noise.draw(PROBS, position) for position in range(DRAWS)], minlength=5)
    assert chi_square(counts, PROBS.numpy()) > 1e-3


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    first = [GumbelNoise(s, 5).draw(PROBS, 3) for s in range(DRAWS // 2)]
    second = [GumbelNoise(s, 5).draw(PROBS, 4) for s in range(DRAWS // 2)]
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (first, second), 1)
    assert chi_square(pairs.ravel(), np.outer(PROBS, PROBS).ravel()) > 1e-3


def test_probability_zero_is_never_drawn() -> None:
    noise = GumbelNoise(5, 5)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {noise.draw(probs, position) for position in range(300)} == {1, 3}


def test_trimmed_head_shares_the_noise_of_its_token_ids() -> None:
    """The draft's draw over a head of ids 1, 3, 4 is the target's draw when only these have probability."""
    head = torch.tensor([1, 3, 4])
    q = PROBS[head] / PROBS[head].sum()
    p = torch.zeros(5, dtype=torch.float64).index_copy_(0, head, q)
    noise = GumbelNoise(9, 5)
    assert [int(head[noise.draw(q, i, head)]) for i in range(200)] == [noise.draw(p, i) for i in range(200)]


def test_noise_of_a_position_does_not_depend_on_what_was_drawn_before() -> None:
    noise = GumbelNoise(4, 5)
    forwards = [noise.draw(PROBS, i) for i in range(200)]
    assert [GumbelNoise(4, 5).draw(PROBS, i) for i in reversed(range(200))] == forwards[::-1]
