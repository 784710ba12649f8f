"""The bundle: whole or refused, fitting its target or refused; its exports; and the margin rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bundle, make_draft, make_target_model, make_tokenizer
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.bundle import DRAFT, GATE, MANIFEST, VOCABULARY, check_compatible, load_bundle, update_manifest
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.exports.stock import export_huggingface
from draftsmith.decode.identity import FACTOR, Divergence, compare, last_logits
from draftsmith.decode.runner import load_runner
from draftsmith.decode.target import load_target
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import Variant
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def bundle(bundle_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[Any], None]) -> None:
    value = json.loads((bundle / MANIFEST).read_text())
    change(value)
    (bundle / MANIFEST).write_text(json.dumps(value))


def refused(bundle: Path, *words: str) -> None:
    with pytest.raises(DraftsmithError) as error:
        load_bundle(bundle)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_bundle_comes_back_as_it_was_saved(target: Any, tmp_path: Path) -> None:
    draft, gate = make_draft(target), Gate(128, 8)
    folder = make_bundle(tmp_path / "b", target, draft, "name", gate, paper={"tau": 0.6})
    loaded = load_bundle(folder)
    state = draft.portable_state()
    assert loaded.tensors.keys() == state.keys()
    assert all(torch.equal(loaded.tensors[k], v) for k, v in state.items())
    assert loaded.gate is not None
    assert all(torch.equal(v, loaded.gate.state_dict()[k]) for k, v in gate.state_dict().items())
    assert loaded.shape == draft.shape
    assert loaded.draft_config.to_dict() == draft.config.to_dict()
    assert (loaded.manifest.target["name"], loaded.manifest.policy["paper"]) == ("name", {"tau": 0.6})


def test_saving_again_replaces_the_whole_bundle(target: Any, tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", target, make_draft(target), "old", Gate(128, 8))
    make_bundle(tmp_path / "b", target, make_draft(target), "new")
    loaded = load_bundle(tmp_path / "b")
    assert (loaded.manifest.target["name"], loaded.gate) == ("new", None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [DRAFT, MANIFEST, VOCABULARY]


def test_updating_the_manifest_keeps_the_bundle_valid(bundle: Path) -> None:
    update_manifest(bundle, evaluation={"acceptance": 0.7})
    assert load_bundle(bundle).manifest.evaluation == {"acceptance": 0.7}


@pytest.mark.parametrize("name", [DRAFT, GATE])
def test_a_truncated_file_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[: len(content) // 2])
    refused(bundle, str(bundle / name), "truncated or altered")


@pytest.mark.parametrize("name", [DRAFT, GATE])
def test_one_flipped_bit_is_named(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[-5] ^= 1
    (bundle / name).write_bytes(content)
    refused(bundle, str(bundle / name), "truncated or altered")


@pytest.mark.parametrize("name", [DRAFT, GATE, MANIFEST])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    refused(bundle, str(bundle), name)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", str(tmp_path / "nothing"))


ALTERED: dict[str, Callable[[Any], Any]] = {
    "other schema": lambda m: m.update(schema=2),
    "no schema": lambda m: m.pop("schema"),
    "unknown key": lambda m: m.update(drafts={}),
    "no draft": lambda m: m.pop("draft"),
    "no shape": lambda m: m["draft"].pop("shape"),
    "odd shape": lambda m: m["draft"]["shape"].update(depth=3),
    "no draft file": lambda m: m["files"].pop(DRAFT),
    "other digest": lambda m: m["files"].update({DRAFT: "0" * 64}),
    "other gate": lambda m: m["gate"].update(hidden=9),
    "absolute file": lambda m: m["files"].update({"/etc/hostname": "0" * 64}),
    "file above": lambda m: m["files"].update({"../bundle/draft.safetensors": m["files"][DRAFT]}),
    "files as list": lambda m: m.update(files=[DRAFT]),
}


@pytest.mark.parametrize("how", ALTERED)
def test_an_altered_manifest_is_refused(bundle: Path, how: str) -> None:
    edit(bundle, ALTERED[how])
    refused(bundle, str(bundle))


def test_a_file_name_leading_outside_is_named(bundle: Path) -> None:
    edit(bundle, ALTERED["file above"])
    refused(bundle, "../bundle/draft.safetensors", "outside")


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"], ids=["empty", "cut off", "a list", "not UTF-8"])
def test_a_manifest_that_is_no_json_object_is_named(bundle: Path, content: str) -> None:
    (bundle / MANIFEST).write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(bundle, MANIFEST)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m["policy"].update(variant="9L"), "9L"),
        (lambda m: m["policy"].update(default="fixd(3)"), "fixd"),
        (lambda m: m["policy"].update(paper={"taw": 0.5}, default="paper"), "taw"),
        (lambda m: m["draft"]["config"].pop("model_type"), "model_type"),
        (lambda m: m["draft"]["shape"].update(layers=3), "layer|norm"),
    ],
    ids=["variant", "default policy", "policy setting", "model type", "layers"],
)
def test_settings_that_cannot_run_are_a_clear_error(bundle: Path, change: Callable[[Any], Any], word: str) -> None:
    """People edit policy defaults by hand."""
    edit(bundle, change)
    with pytest.raises(DraftsmithError, match=word):
        Decoder.load(bundle).generate("Hello", GREEDY)


def permuted_tokenizer() -> Any:
    """Two ids swapped."""
    from transformers import PreTrainedTokenizerFast

    value = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocab = value["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(value)), eos_token="<|end|>")


def save_target(folder: Path, tokenizer: Any, vocab_size: int = 259) -> str:
    """The tiny target, its embedding padded with rows that are never likely."""
    model = make_target_model()
    if vocab_size > 259:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        model.get_input_embeddings().weight[259:] = 0.0
        model.requires_grad_(False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_permuted_vocabulary_is_refused_with_its_first_token(bundle: Path) -> None:
    with pytest.raises(DraftsmithError, match="id 32 is 'A' in one and 'B' in the other"):
        check_compatible(load_bundle(bundle), make_target_model().config, permuted_tokenizer())


def test_the_decoder_refuses_a_permuted_vocabulary_and_names_the_token(bundle: Path, tmp_path: Path) -> None:
    """Naming the first differing token is what tells a retrained tokenizer from a wrong folder."""
    target = save_target(tmp_path / "t", permuted_tokenizer())
    with pytest.raises(DraftsmithError, match="tokenizer is another.*id 32"):
        Decoder.load(bundle, target)


@pytest.mark.parametrize("added", [0, 2], ids=["padded embedding", "padded tokenizer"])
def test_a_vocabulary_padded_at_the_end_is_accepted(bundle: Path, tmp_path: Path, added: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<|extra{i}|>" for i in range(added)], special_tokens=True)
    decoder = Decoder.load(bundle, save_target(tmp_path / "t", tokenizer, 264))
    assert decoder.runner.vocab_size == 264
    outputs = [decoder.generate("Hello", GREEDY, policy) for policy in ("ar", "fixed(3)")]
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "knows 200 tokens, fewer than"),
        ({"hidden_size": 128}, "hidden size is 128"),
    ],
)
def test_a_target_of_another_size_is_refused(bundle: Path, changes: dict[str, int], message: str) -> None:
    config = make_target_model().config
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(DraftsmithError, match=message):
        check_compatible(load_bundle(bundle), config, make_tokenizer())


# Exports


@pytest.fixture(scope="module")
def exported(bundle_folder: Path, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for depth in (4, 2):
        folders[depth] = tmp_path_factory.mktemp("export") / f"{depth}L"
        target = load_target(str(target_folder))
        assert export_huggingface(load_bundle(bundle_folder), target, depth, folders[depth]) < 1e-5
    return folders


@pytest.mark.parametrize("depth", [4, 2])
def test_an_export_reloads_as_the_same_stock_model(
    exported: dict[int, Path], bundle_folder: Path, target: Any, depth: int
) -> None:
    bundle = load_bundle(bundle_folder)
    model = AutoModelForCausalLM.from_pretrained(exported[depth])
    assert model.config.num_hidden_layers == depth
    runner = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, target.model.get_input_embeddings().weight)
    ids = torch.tensor([[5, 9, 33, 60, 2, 91, 14]])
    ours = runner.forward(ids, runner.new_cache(16), Variant(depth))
    assert torch.allclose(model(input_ids=ids).logits[0][:, runner.head_ids], ours, atol=1e-4)
    # The head is the target's whole one again.
    weights = load_file(exported[depth] / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], target.model.get_input_embeddings().weight)


@pytest.mark.parametrize("depth", [4, 2])
def test_an_export_assists_the_target_in_transformers(exported: dict[int, Path], target: Any, depth: int) -> None:
    assistant = AutoModelForCausalLM.from_pretrained(exported[depth])
    ids = torch.tensor([target.tokenizer("Hello world").input_ids])
    alone = target.model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=assistant), alone)


def test_an_export_never_replaces_a_folder_that_holds_something(
    bundle_folder: Path, target: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DraftsmithError, match="exists already"):
        export_huggingface(load_bundle(bundle_folder), target, 4, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_target_outside_the_llama_family_gets_a_llama_shaped_draft_and_its_own_text(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=259, n_positions=128, n_embd=32, n_layer=2, n_head=4, eos_token_id=258)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "t")
    make_tokenizer().save_pretrained(tmp_path / "t")
    loaded = load_target(str(tmp_path / "t"))
    make_bundle(tmp_path / "b", loaded, make_draft(loaded, head=40), str(tmp_path / "t"))
    decoder = Decoder.load(tmp_path / "b")
    texts = {tuple(decoder.generate("zebra", GREEDY, policy).token_ids) for policy in ("ar", "fixed(3)", "goodput")}
    assert len(texts) == 1


# The margin rule


def test_equal_texts_have_no_divergence(target: Any) -> None:
    assert compare(load_runner(target), [1, 2], [3, 4, 5], [3, 4, 5]) is None


@pytest.mark.parametrize("ours", ["changed", "cut off", "too long"])
def test_a_real_mismatch_is_found_and_not_excused(target: Any, ours: str) -> None:
    runner = load_runner(target)
    prompt = target.tokenizer("Hello world, hello all of you").input_ids
    reference: list[int] = []
    while len(reference) < 20:
        reference.append(int(last_logits(runner, [*prompt, *reference], 1).argmax()))
    texts = {
        "changed": [*reference[:7], (reference[7] + 1) % 256, *reference[8:]],
        "cut off": reference[:15],
        "too long": [*reference, 5],
    }
    found = compare(runner, prompt, texts[ours], reference)
    assert found is not None
    assert found.position == {"changed": 7, "cut off": 15, "too long": 20}[ours]
    logits = last_logits(runner, [*prompt, *reference[: found.position]], 1)
    # The wrong token against the best, not the runner-up; a text that merely ends is never excused.
    wrong = {"changed": float(logits.max() - logits[texts[ours][7]])}.get(ours, float("inf"))
    assert found.margin == pytest.approx(wrong)
    assert found.rounding < 1e-3
    assert not found.excused


@pytest.mark.parametrize(("margin", "excused"), [(0.0, True), (FACTOR * 1e-4, True), (FACTOR * 1e-4 + 1e-9, False)])
def test_a_mismatch_is_excused_up_to_four_times_the_rounding(margin: float, excused: bool) -> None:
    assert Divergence(0, margin, 1e-4).excused == excused
    assert FACTOR == 4
