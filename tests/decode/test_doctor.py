"""`draftsmith doctor`: what it says of pairs that work, that work in part, and that cannot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_target_model, make_tokenizer, save_model
from draftsmith.data import DraftsmithError
from draftsmith.decode import doctor
from draftsmith.decode.bundle import update_manifest
from draftsmith.decode.doctor import Diagnosis, diagnose, run_doctor
from draftsmith.decode.payoff import best_length, lowest_break_even, speedup

FLAT = np.ones(9)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of two layers for the tiny target."""
    return save_model(tmp_path_factory.mktemp("small"), make_target_model(num_hidden_layers=2))


def saved(folder: Path, tokenizer: Any = None, **changes: Any) -> str:
    return str(save_model(folder, make_target_model(num_hidden_layers=2, **changes), tokenizer))


def levels(found: Diagnosis) -> dict[str, str]:
    return {f.subject: f.level for f in found.findings}


def text_of(found: Diagnosis, subject: str) -> str:
    return next(f.describe() for f in found.findings if f.subject == subject)


def permuted() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    value = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocab = value["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(value)), eos_token="<|end|>")
    made.chat_template = "{{ messages }}"
    return made


# Pairs


def test_a_pair_of_one_family_works_everywhere(target_folder: Path, small: Path) -> None:
    found = diagnose(str(target_folder), str(small))
    assert found.verdict == "works"
    assert text_of(found, "tokenizer") == "[ok] tokenizer: the same 259 tokens"
    for engine in ("transformers (assistant_model)", "vLLM (draft_model) and SGLang (STANDALONE)", "llama.cpp"):
        assert text_of(found, engine) == f"[ok] {engine}: would take the pair"
    assert found.target.runner.startswith("lean: chains and trees")
    # Counted from the configuration; a pass reads all of them where the embedding is the head too.
    parameters = [sum(p.numel() for p in make_target_model(num_hidden_layers=n).parameters()) for n in (5, 2)]
    assert [found.target.parameters, found.draft.parameters] == parameters
    assert found.payoffs[0].ratio == pytest.approx(parameters[1] / parameters[0])


def test_an_embedding_that_is_not_the_head_is_not_read(tmp_path: Path, target_folder: Path) -> None:
    found = diagnose(str(target_folder), saved(tmp_path / "d", tie_word_embeddings=False))
    assert found.draft.parameters - found.draft.read["whole"] == 259 * 64


def test_the_weights_are_never_read(tmp_path: Path, target_folder: Path) -> None:
    folder = Path(saved(tmp_path / "d"))
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    assert diagnose(str(target_folder), str(folder)).works


def test_a_permuted_vocabulary_does_not_work(tmp_path: Path, target_folder: Path) -> None:
    found = diagnose(str(target_folder), saved(tmp_path / "d", permuted()))
    assert found.verdict == "does not work"
    assert "2 of 259 shared ids mean another token; the first: id 32 is 'A' in one and 'B'" in found.describe()
    assert "would not take the pair: other tokens" in text_of(found, "llama.cpp")
    assert found.payoffs == [], "costs of a pair that cannot run are of no use"


def test_a_padded_vocabulary_works_here_and_not_in_vllm(tmp_path: Path, target_folder: Path) -> None:
    found = diagnose(str(target_folder), saved(tmp_path / "d", vocab_size=320))
    assert found.verdict == "works, with remarks"
    assert levels(found)["tokenizer"] == "ok"
    assert "would not take the pair: rows of the vocabularies differ (259 and 320)" in text_of(
        found, "vLLM (draft_model) and SGLang (STANDALONE)")
    assert levels(found)["llama.cpp"] == "ok", "61 rows of padding are within its 128"
    wide = diagnose(str(target_folder), saved(tmp_path / "wide", vocab_size=400))
    assert "by more than 128" in text_of(wide, "llama.cpp")


def test_a_tokenizer_with_more_tokens_is_a_remark(tmp_path: Path, target_folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)
    found = diagnose(str(target_folder), saved(tmp_path / "d", tokenizer, vocab_size=260))
    assert "the target has 259 and the draft 260" in text_of(found, "tokenizer")
    assert found.works


def test_a_shorter_draft_context_is_a_remark(tmp_path: Path, target_folder: Path) -> None:
    found = diagnose(str(target_folder), saved(tmp_path / "d", max_position_embeddings=128))
    assert found.verdict == "works, with remarks"
    assert "the draft's is 128: past it the target decodes alone" in text_of(found, "context")


def test_another_end_of_sequence_and_a_draft_as_large_are_remarks(tmp_path: Path, target_folder: Path) -> None:
    folder = save_model(tmp_path / "d", make_target_model(eos_token_id=257))
    found = diagnose(str(target_folder), str(folder))
    assert "ids [258] of the target, [257, 258] of the draft" in text_of(found, "end of sequence")
    assert "other end of sequence" in text_of(found, "llama.cpp")
    assert levels(found)["size"] == "remark"
    assert "even at an acceptance of 0.9 no speed-up is predicted" in text_of(found, "gain")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_recurrent_model_does_not_work(tmp_path: Path, target_folder: Path, role: str) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, eos_token_id=258))
    mamba = str(save_model(tmp_path / "m", model))
    found = diagnose(*((mamba, str(target_folder)) if role == "target" else (str(target_folder), mamba)))
    assert not found.works
    assert "keeps a recurrent state, which cannot be rolled back" in text_of(found, role)
    assert getattr(found, role).cache == "recurrent state"
    assert "recurrent state" in text_of(found, "transformers (assistant_model)")


def test_sliding_windows_are_told(tmp_path: Path, small: Path) -> None:
    mistral = str(save_model(tmp_path / "m", make_target_model(family="mistral", sliding_window=64)))
    found = diagnose(mistral, str(small))
    assert (found.target.cache, found.works) == ("sliding window of 64", True)
    mixed = make_target_model(family="qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=2)
    found = diagnose(str(save_model(tmp_path / "q", mixed)), str(small))
    assert found.target.cache == "sliding window of 32 in 3 of 5 layers"
    assert found.target.runner == "module: chains only, one request at a time"


# Bundles


def test_a_bundle_is_priced_by_variant_with_its_trimmed_head(
    target_folder: Path, bundle_folder: Path, bundle: Any
) -> None:
    found = diagnose(str(target_folder), str(bundle_folder))
    assert found.verdict == "works"
    prices = {p.variant: p.ratio for p in found.payoffs}
    assert list(prices) == ["2L", "4L@0.75", "4L@1", "4L@1.25", "4L"]
    assert list(prices.values()) == sorted(prices.values())
    layers = sum(t.numel() for k, t in bundle.tensors.items() if k.startswith("layers."))
    assert found.draft.read["4L"] == layers + 121 * 64
    # Half the neurons of 4 layers are 3 projections of 48 rows less each.
    assert found.draft.read["4L"] - found.draft.read["4L@0.75"] == 4 * 3 * 48 * 64
    assert "scripts/export.py" in text_of(found, "other engines")


@pytest.fixture
def bundle(bundle_folder: Path) -> Any:
    from draftsmith.decode.bundle import load_bundle

    return load_bundle(bundle_folder)


def test_a_bundles_own_acceptance_is_used(target_folder: Path, bundle_folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(bundle_folder, tmp_path / "b"))
    update_manifest(copy, evaluation={"heldout": {"heldout/acceptance_2L": 0.8, "heldout/acceptance_4L": 0.81}})
    found = diagnose(str(target_folder), str(copy))
    price = next(p for p in found.payoffs if p.variant == "2L")
    k, gain = price.best["0.8"]
    assert text_of(found, "acceptance") == (
        f"[ok] acceptance: 0.80 by the bundle's figures for 2L: {gain:.2f} times plain decoding at {k} drafted tokens "
        "a round")


def test_a_bundle_for_another_target_does_not_work(bundle_folder: Path, tmp_path: Path) -> None:
    other = str(save_model(tmp_path / "t", make_target_model(hidden_size=128)))
    found = diagnose(other, str(bundle_folder))
    assert not found.works
    assert "hidden size is 128" in text_of(found, "bundle")


# Costs


def test_measured_costs_are_timed(target_folder: Path, small: Path, bundle_folder: Path) -> None:
    found = diagnose(str(target_folder), str(small), measure=True)
    assert found.costs.startswith("Measured on ")
    assert "target in fp32, draft in fp32" in found.costs
    assert all(p.ratio > 0 for p in found.payoffs)
    assert len(diagnose(str(target_folder), str(bundle_folder), measure=True).payoffs) == 5


def test_estimates_on_a_cpu_say_what_they_leave_out(
    target_folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for kind, words in (("cpu", "not on a CPU: use --measure"), ("cuda", "as where memory is the limit")):
        monkeypatch.setattr(doctor, "default_device", lambda kind=kind: torch.device(kind))
        assert words in diagnose(str(target_folder), str(small)).costs


def test_a_predicted_speedup_is_the_formulas() -> None:
    assert speedup(0.5, 2, 0.1, FLAT) == pytest.approx(1.75 / 1.2)
    assert speedup(1.0, 3, 0.0, FLAT) == 4
    assert speedup(0.5, 1, 0.1, np.array([1.0, 1.5])) == pytest.approx(1.5 / 1.6)
    assert best_length(0.9, 0.01, FLAT)[0] == 8
    assert best_length(0.4, 0.3, FLAT)[0] == 1


def test_break_even_is_where_the_speedup_is_one() -> None:
    rising = np.linspace(1, 2, 9)
    acceptance, k = lowest_break_even(0.1, rising)
    assert speedup(acceptance, k, 0.1, rising) == pytest.approx(1)
    assert all(speedup(acceptance - 0.01, other, 0.1, rising) < 1 for other in range(1, 9))
    assert lowest_break_even(1.5, FLAT)[0] == 1, "a step dearer than a pass never pays"


def test_a_pair_that_cannot_pay_is_told_so(target_folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "estimated", lambda *_: ("estimated", {"whole": (1.2, FLAT)}))
    found = diagnose(str(target_folder), str(small))
    assert levels(found)["gain"] == "remark"
    assert "never" in found.describe()


# The command


def args(target: Any, draft: Any, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"target": str(target), "draft": str(draft), "measure": False, "json": False,
                                 "trust_remote_code": False, **more})


def test_the_verdict_stands_first_and_json_holds_the_same(
    target_folder: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_doctor(args(target_folder, small))
    assert capsys.readouterr().out.splitlines()[0] == f"{small} as a draft for {target_folder}: works"
    run_doctor(args(target_folder, small, json=True))
    value = json.loads(capsys.readouterr().out)
    assert (value["verdict"], value["works"], value["target"]["tokens"]) == ("works", True, 259)
    assert len(value["payoffs"][0]["break_evens"]) == 8


def test_a_pair_that_does_not_work_fails_after_it_was_described(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DraftsmithError, match="does not work as a draft for .*2 of 259 shared ids"):
        run_doctor(args(target_folder, saved(tmp_path / "d", permuted())))
    assert "does not work" in capsys.readouterr().out.splitlines()[0]


def bert(folder: Path) -> str:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return str(save_model(folder, BertForMaskedLM(BertConfig(vocab_size=259, **shape))))


def translator(folder: Path) -> str:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return str(save_model(folder, T5ForConditionalGeneration(T5Config(vocab_size=259, **shape))))


def remote(folder: Path) -> str:
    save_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="newest", auto_map={"AutoConfig": "new.NewConfig", "AutoModelForCausalLM": "new.New"})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def empty(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: str(folder), "no such folder"),
        (lambda folder: "no-such-name", "cannot be loaded"),
        (empty, "cannot be loaded"),
        (bert, r"is no causal language model \(bert, BertForMaskedLM\)"),
        (translator, "is no causal language model"),
        (remote, "custom code"),
    ],
    ids=["missing", "unknown name", "no model", "encoder", "encoder-decoder", "remote code"],
)
def test_what_cannot_be_looked_at_is_one_clear_line(
    tmp_path: Path, target_folder: Path, role: str, make: Any, message: str
) -> None:
    bad = make(tmp_path / "bad")
    pair = (bad, str(target_folder)) if role == "target" else (str(target_folder), bad)
    with pytest.raises(DraftsmithError, match=message) as error:
        diagnose(*pair)
    assert str(error.value).startswith(f"{role} '{bad}'")
    assert "\n" not in str(error.value)


def test_a_folder_without_safetensors_does_not_work(tmp_path: Path, target_folder: Path) -> None:
    folder = Path(saved(tmp_path / "d"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    found = diagnose(str(target_folder), str(folder))
    assert "holds no safetensors" in text_of(found, "draft")
    assert not found.works


def test_a_damaged_bundle_is_named(tmp_path: Path, target_folder: Path, bundle_folder: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(bundle_folder, tmp_path / "b"))
    (copy / "draft.safetensors").write_bytes(b"short")
    with pytest.raises(DraftsmithError, match="truncated or altered"):
        diagnose(str(target_folder), str(copy))
