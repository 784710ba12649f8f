"""What the `draftsmith` command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer
from draftsmith.decode import Decoder, cli
from draftsmith.decode.decoder import Chunk, GenerationOutput
from draftsmith.decode.stats import Token


def test_colour_marks_accepted_tokens_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An accepted token whose character is not complete yet has no text to mark."""
    pieces = [("ar", "one "), ("accepted", "two"), ("accepted", ""), ("correction", " three"), ("bonus", "!")]

    class Stub:
        tokenizer = make_tokenizer()

        def stream(self, *_: Any) -> Any:
            yield Chunk([(Token(0, source, 1.0), text) for source, text in pieces], GenerationOutput())

    monkeypatch.setattr(Decoder, "load", lambda *_: Stub())
    assert cli.main(["generate", "bundle", "hi", "--color"]) == 0
    assert capsys.readouterr().out == f"one {cli.GREEN}two{cli.RESET} three!\n"
    assert cli.main(["generate", "bundle", "hi"]) == 0
    assert capsys.readouterr().out == "one two three!\n"


Capture = pytest.CaptureFixture[str]


def generate(bundle: Path, capsys: Capture, *options: str) -> tuple[str, str]:
    assert cli.main(["generate", str(bundle), "red sea", "--max-tokens", "12", *options]) == 0
    return capsys.readouterr()


def test_every_policy_prints_the_same_text(bundle_folder: Path, capsys: Capture) -> None:
    found = [generate(bundle_folder, capsys, "--policy", p, "--stats") for p in ("ar", "fixed(3)", "paper", "goodput")]
    assert len({out for out, _ in found}) == 1
    assert all("tokens per step" in err for _, err in found)


@pytest.mark.parametrize("draft", ["target", "none"])
def test_any_model_can_be_the_draft_without_a_bundle(
    bundle_folder: Path, target_folder: Path, capsys: Capture, draft: str
) -> None:
    plain, _ = generate(bundle_folder, capsys, "--policy", "ar")
    found, figures = generate(target_folder, capsys, "--draft", draft.replace("target", str(target_folder)), "--stats",
                              "--policy", "fixed(3)" if draft == "target" else "lookup(3)")
    assert found == plain
    assert ("acceptance 1.00" in figures) == (draft == "target"), "a target is its own best draft"


def test_colour_changes_no_text(bundle_folder: Path, capsys: Capture) -> None:
    plain, _ = generate(bundle_folder, capsys, "--policy", "ar", "--color")
    coloured, _ = generate(bundle_folder, capsys, "--policy", "fixed(3)", "--color")
    assert cli.GREEN not in plain
    assert coloured.replace(cli.GREEN, "").replace(cli.RESET, "") == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "nowhere", "hi"), "nowhere: no such bundle folder"),
        (("generate", "{bundle}", ""), "the prompt is empty"),
        (("generate", "{bundle}", "hi", "--policy", "papr"), "did you mean 'paper'?"),
        (("generate", "{bundle}", "hi", "--temperature", "-1"), "temperature must be 0 (greedy), or"),
        (("generate", "{bundle}", "hi", "--min-p", "2"), "min_p must be in [0, 1]"),
        (("generate", "{bundle}", "hi", "--target", "./nowhere"), "no such folder"),
        (("generate", "{bundle}", "hi", "--precision", "int4"), "precision 'int4' is not one of"),
        (("generate", "{bundle}", "hi", "--threads", "0"), "--threads must be 1 or more, not 0"),
        (("generate", "{bundle}", "hi there " * 100), "the target's context is 512"),
        (("generate", "./nowhere", "hi", "--draft", "none"), "no such folder"),
        (("generate", "x", "hi", "--draft", "none", "--target", "y"), "leave out --target"),
        (("bench", "x", "--draft", "none", "--references"), "leave out --draft"),
        (("bench", "{bundle}", "--count", "1"), "--count must be 2 or more"),
        (("bench", "{bundle}", "--max-tokens", "0", "--references"), "--max-tokens must be 1 or more"),
        (("bench", "{bundle}", "--policies", "ar,papr", "--prompts", "{prompts}"), "did you mean 'paper'?"),
        (("bench", "{bundle}", "--prompts", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
    ],
)
def test_mistakes_get_one_clear_line(
    bundle_folder: Path, prompts: Path, arguments: tuple[str, ...], message: str, capsys: Capture
) -> None:
    filled = [a.format(bundle=bundle_folder, prompts=prompts) for a in arguments]
    assert cli.main(filled) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two words", "three")))
    return path


def test_bench_prints_figures_of_this_machine(
    bundle_folder: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["bench", str(bundle_folder), "--max-tokens", "12", "--json", str(tmp_path / "out.json")]
    options = ["--prompts", str(prompts), "--count", "3"]
    assert cli.main([*command, *options, "--policies", "ar,fixed(3,2L),goodput", "--profile"]) == 0
    assert "| fixed(3,2L) |" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())["policies"]
    for name in ("ar", "fixed(3,2L)", "goodput"):
        parts = figures[name]["parts"]
        assert parts["target"] > 0
        assert 0 <= parts["other"] < 0.5, "what no part accounts for is little"
    assert figures["ar"]["parts"]["draft"] == 0
    for option, expected in (("--passes", "Memory bandwidth"), ("--linears", "| gate_up |")):
        assert cli.main([*command, option]) == 0
        assert expected in capsys.readouterr().out
    assert cli.main([*command, *options, "--references"]) == 0
    out = capsys.readouterr().out
    assert "| transformers assisted, our 4-layer draft |" in out
    assert out.count("3 of 3 |") >= 5, "greedy text is the same whoever decodes"
