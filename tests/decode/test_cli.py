"""What the `draftsmith` command prints."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import make_tokenizer
from draftsmith.decode import Decoder, cli
from draftsmith.decode.decoder import Chunk, GenerationOutput
from draftsmith.decode.loop import Token


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
