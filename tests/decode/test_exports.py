"""Exports: every format is the bundle's variant, says how it is used, and is not left behind when it is not."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bundle, make_draft, make_target_model, save_model
from draftsmith.data import DraftsmithError
from draftsmith.decode.bundle import Bundle, load_bundle
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.exports import stock as exporting
from draftsmith.decode.exports.stock import choose_variant, export
from draftsmith.decode.exports.use import known_acceptance
from draftsmith.decode.target import load_target
from draftsmith.distill.variants import Variant
from transformers import AutoModelForCausalLM, GenerationConfig

gguf = pytest.importorskip("gguf", reason="GGUF exports need the gguf package: pip install 'draftsmith[gguf]'")

IDS = torch.tensor([[5, 9, 33, 60, 2, 91, 14, 77, 40, 8]])


@pytest.fixture
def bundle(bundle_folder: Path) -> Bundle:
    return load_bundle(bundle_folder)


def quiet(message: str) -> None:
    """Progress is not looked at."""


def ours(bundle: Bundle, target: Any, variant: Variant) -> torch.Tensor:
    runner = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, target.embedding)
    return runner.forward(IDS, runner.new_cache(16), variant)


def tokenizer_gguf(file: Path, tokens: list[str], **more: str) -> Path:
    """What a target's GGUF says of its tokenizer; llama.cpp wants at least one merge."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def target_gguf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return tokenizer_gguf(tmp_path_factory.mktemp("gguf") / "target.gguf", tokenizer.convert_ids_to_tokens(range(259)))


# Choosing a variant


@pytest.mark.parametrize(
    ("name", "alpha", "expected"),
    [
        ("4layer", None, Variant(4)),
        ("2layer", None, Variant(2)),
        ("4layer", 1.5, Variant(4)),
        ("4layer", 0.8, Variant(4, 1.0)),  # rounded up to the next bucket
        ("4layer", 0.7, Variant(4, 0.75)),
        ("2layer", 0.6, Variant(2)),
    ],
)
def test_alpha_selects_the_width_that_the_gate_would(
    bundle: Bundle, name: str, alpha: float | None, expected: Variant
) -> None:
    assert choose_variant(bundle.shape, name, alpha) == expected


@pytest.mark.parametrize(
    ("name", "alpha", "message"),
    [
        ("3layer", None, "no variant '3layer' in this bundle; there are 4layer and 2layer"),
        ("4layer", 0.6, r"--alpha 0.6 selects the 2-layer variant \(below 0.7\), not 4layer"),
        ("2layer", 1.0, r"--alpha 1 selects the 4-layer variant \(from 0.7\), not 2layer"),
        ("4layer", 1.6, r"--alpha must be in \[0.7, 1.5\], not 1.6"),
        ("4layer", float("nan"), "--alpha must be in"),
    ],
)
def test_a_variant_that_is_not_there_is_explained(
    bundle: Bundle, name: str, alpha: float | None, message: str
) -> None:
    with pytest.raises(DraftsmithError, match=message):
        choose_variant(bundle.shape, name, alpha)


# Hugging Face folders


@pytest.mark.parametrize(("variant", "width"), [(Variant(4, 1.0), 64), (Variant(4, 0.75), 48)])
def test_a_narrow_export_is_the_narrow_variant(
    bundle: Bundle, target: Any, tmp_path: Path, variant: Variant, width: int
) -> None:
    assert "4L@" in export(bundle, target, variant, tmp_path / "out", say=quiet)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.intermediate_size, model.config.num_hidden_layers) == (width, 4)
    expected = ours(bundle, target, variant)
    found = model(input_ids=IDS).logits[0].detach()[:, bundle.tensors["head_ids"]]
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    # The full variant is another function, which a comparison this close would notice.
    assert float((ours(bundle, target, Variant(4)) - expected).abs().max()) > 1e-2 * float(expected.abs().max())


@pytest.mark.parametrize("variant", [Variant(4), Variant(2), Variant(4, 0.75)], ids=lambda v: v.name)
def test_assisted_generation_writes_the_targets_own_text(
    bundle: Bundle, target: Any, tmp_path: Path, variant: Variant
) -> None:
    export(bundle, target, variant, tmp_path / "out", say=quiet)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=258, pad_token_id=256)
    for text in ("Hello world", "SELECT name"):
        ids = torch.tensor([target.tokenizer(text).input_ids])
        alone = target.model.generate(ids, generation_config=settings)
        assert torch.equal(target.model.generate(ids, generation_config=settings, assistant_model=assistant), alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_written_and_held_to_its_own_limit(
    bundle: Bundle, target: Any, tmp_path: Path, dtype: str
) -> None:
    export(bundle, target, Variant(4), tmp_path / "out", dtype=dtype, say=quiet)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == getattr(torch, dtype)


PLANTED = {
    "a weight perturbed": lambda model: model.model.layers[1].mlp.up_proj.weight.data.mul_(1.001),
    "two layers swapped": lambda model: model.model.layers.insert(0, model.model.layers.pop(1)),
    "a weight not a number": lambda model: model.model.norm.weight.data[:1].fill_(float("nan")),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_drift_after_writing_is_caught_and_nothing_is_left(
    bundle: Bundle, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    compare = exporting.compare_folder

    def damaged(folder: Path, *args: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder)
        PLANTED[fault](model)
        model.save_pretrained(folder)
        return compare(folder, *args)

    monkeypatch.setattr(exporting, "compare_folder", damaged)
    with pytest.raises(DraftsmithError, match="float32 differs from the bundle's draft, so nothing was written"):
        export(bundle, target, Variant(4), tmp_path / "out", say=quiet)
    assert list(tmp_path.iterdir()) == []


# Instructions


def use(folder: Path) -> str:
    return (folder / "USE.md").read_text(encoding="utf-8")


def test_vllms_settings_are_the_exported_folders(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    export(bundle, target, Variant(4), tmp_path / "out", "vllm", say=quiet)
    text = use(tmp_path / "out")
    found = re.search(r"--speculative-config '(.*)'", text)
    assert found is not None
    settings = json.loads(found.group(1))
    assert settings == {"method": "draft_model", "model": str(tmp_path / "out"), "num_speculative_tokens": 4}
    assert target.name in text
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, "USE.md", "exec")
    assert "no acceptance figure" in text


def test_sglangs_settings_verify_one_more_than_is_drafted(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    export(bundle, target, Variant(2), tmp_path / "out", "sglang", say=quiet)
    text = use(tmp_path / "out")
    assert f"--speculative-draft-model-path {tmp_path / 'out'}" in text
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1" in text
    assert "--speculative-num-draft-tokens 5" in text


def test_the_snippet_for_transformers_runs(bundle: Bundle, target: Any, tmp_path: Path, capsys: Any) -> None:
    export(bundle, target, Variant(4), tmp_path / "out", say=quiet)
    block = re.search(r"```python\n(.*?)```", use(tmp_path / "out"), re.DOTALL)
    assert block is not None
    exec(compile(block.group(1), "USE.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Hello")


def test_acceptance_of_the_bundle_is_told_and_decides_the_length(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    lengths = {}
    for acceptance in (0.3, 0.95):
        bundle.manifest.evaluation = {"heldout": {"heldout/acceptance_2L": acceptance}}
        folder = tmp_path / str(acceptance)
        export(bundle, target, Variant(2), folder, "sglang", say=quiet)
        assert f"Acceptance by the bundle's figures: {acceptance:.2f}" in use(folder)
        found = re.search(r"--speculative-num-steps (\d+)", use(folder))
        assert found is not None
        lengths[acceptance] = int(found.group(1))
    assert lengths[0.3] < lengths[0.95]


def test_a_draft_that_reads_nearly_what_the_target_does_promises_no_gain(
    bundle: Bundle, target: Any, tmp_path: Path
) -> None:
    bundle.manifest.evaluation = {"heldout": {"heldout/acceptance_4L": 0.2}}
    export(bundle, target, Variant(4), tmp_path / "out", "vllm", say=quiet)
    assert "**That is no gain**" in use(tmp_path / "out")


# GGUF


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0"])
def test_a_gguf_file_read_by_transformers_is_the_variant(
    bundle: Bundle, target: Any, tmp_path: Path, target_gguf: Path, quant: str
) -> None:
    """Its reader is not ours: it knows the names and undoes the permutation by itself."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    export(bundle, target, Variant(4), tmp_path / "out", "gguf", quant=quant, target_gguf=str(target_gguf), say=quiet)
    file = tmp_path / "out" / f"draft-4L-{quant}.gguf"
    model = exporting.stock_model(bundle, target, Variant(4))
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    assert loaded["config"]["num_hidden_layers"] == 4
    assert loaded["config"]["head_dim"] == 16
    state = model.state_dict()
    for name, tensor in loaded["tensors"].items():
        limit = {"f32": 0.0, "f16": 1e-3, "q8_0": 1e-2}[quant] * float(state[name].abs().max())
        assert float((tensor - state[name]).abs().max()) <= limit, name
    assert set(state) - set(loaded["tensors"]) == {"lm_head.weight"}, "a tied head is the embedding"


def test_a_gguf_file_has_the_targets_tokenizer_and_the_quantisation_asked_for(
    bundle: Bundle, target: Any, tmp_path: Path, target_gguf: Path
) -> None:
    # 4L@1.25 has 80 neurons, no multiple of the 32 of a block.
    export(bundle, target, Variant(4, 1.25), tmp_path / "out", "gguf", quant="q8_0", target_gguf=str(target_gguf),
           say=quiet)
    found, own = gguf.GGUFReader(tmp_path / "out" / "draft-4L-1.25-q8_0.gguf"), gguf.GGUFReader(target_gguf)
    keys = [key for key in own.fields if key.startswith("tokenizer.")]
    assert len(keys) == 7
    assert all(found.fields[key].contents() == own.fields[key].contents() for key in keys)
    kinds = {t.name: t.tensor_type.name for t in found.tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == kinds["blk.3.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert found.fields["llama.feed_forward_length"].contents() == 80
    assert "--spec-type draft-simple --spec-draft-n-max 4" in use(tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_llama_cpp_computes_the_same(tmp_path: Path, target_gguf: Path, family: str) -> None:
    """Names, permutation and rotary embedding as the real program understands them."""
    pytest.importorskip("llama_cpp", reason="runs llama.cpp where its Python binding is: pip install llama-cpp-python")
    model = make_target_model(family=family, tie_word_embeddings=False)
    target = load_target(str(save_model(tmp_path / "t", model)))
    bundle = load_bundle(make_bundle(tmp_path / "b", target, make_draft(target), str(tmp_path / "t")))
    done = export(bundle, target, Variant(4), tmp_path / "out", "gguf", quant="f32", target_gguf=str(target_gguf),
                  say=quiet)
    assert "run by llama.cpp: logits differ by at most" in done


def test_llama_cpp_notices_a_missing_permutation(
    bundle: Bundle, target: Any, tmp_path: Path, target_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back alone would not: it would undo the same mistake."""
    pytest.importorskip("llama_cpp", reason="runs llama.cpp where its Python binding is: pip install llama-cpp-python")
    from draftsmith.decode.exports import llamacpp

    monkeypatch.setattr(llamacpp, "permute", lambda weight, heads: weight)
    monkeypatch.setattr(llamacpp, "unpermute", lambda weight, heads: weight)
    with pytest.raises(DraftsmithError, match="llama.cpp computes something else"):
        export(bundle, target, Variant(4), tmp_path / "out", "gguf", quant="f32", target_gguf=str(target_gguf),
               say=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0"])
def test_a_drift_in_a_gguf_file_is_caught_and_nothing_is_left(
    bundle: Bundle, target: Any, tmp_path: Path, target_gguf: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    from draftsmith.decode.exports import llamacpp

    def damaged(file: Path, model: Any, *args: Any) -> None:
        other = copy.deepcopy(model)
        other.model.layers[1].mlp.up_proj.weight.data[3] *= 1.02
        write(file, other, *args)

    write = llamacpp.write_gguf
    monkeypatch.setattr(llamacpp, "write_gguf", damaged)
    with pytest.raises(DraftsmithError, match=f"draft-4L-{quant}.gguf differs from the bundle's draft"):
        export(bundle, target, Variant(4), tmp_path / "out", "gguf", quant=quant, target_gguf=str(target_gguf),
               say=quiet)
    assert list(tmp_path.iterdir()) == []


def test_padding_that_the_gguf_does_not_have_is_left_out(tmp_path: Path, target_gguf: Path) -> None:
    """llama.cpp wants as many rows as tokens."""
    model = make_target_model()
    model.resize_token_embeddings(264, mean_resizing=False)
    target = load_target(str(save_model(tmp_path / "t", model.requires_grad_(False))))
    bundle = load_bundle(make_bundle(tmp_path / "b", target, make_draft(target), str(tmp_path / "t")))
    export(bundle, target, Variant(2), tmp_path / "out", "gguf", target_gguf=str(target_gguf), say=quiet)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "draft-2L-f16.gguf").tensors}
    assert tensors["token_embd.weight"].shape.tolist() == [64, 259]


# Refusals


def refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(DraftsmithError, match=message):
        export(*args, say=quiet, **options)


def test_a_gguf_needs_the_targets_own_file(bundle: Bundle, target: Any, tmp_path: Path, tokenizer: Any) -> None:
    out, tokens = tmp_path / "out", tokenizer.convert_ids_to_tokens(range(259))
    refused("give --target-gguf FILE", bundle, target, Variant(4), out, "gguf")
    refused("nowhere.gguf: no such file", bundle, target, Variant(4), out, "gguf", target_gguf="nowhere.gguf")
    (tmp_path / "text.gguf").write_text("no model, but long enough to have a header that can be read as one")
    refused("no GGUF file with a tokenizer", bundle, target, Variant(4), out, "gguf",
            target_gguf=str(tmp_path / "text.gguf"))
    tokens[65], tokens[66] = tokens[66], tokens[65]
    swapped = tokenizer_gguf(tmp_path / "swapped.gguf", tokens)
    refused("not the tokenizer of target .*: token id 65 is", bundle, target, Variant(4), out, "gguf",
            target_gguf=str(swapped))
    fewer = tokenizer_gguf(tmp_path / "fewer.gguf", tokenizer.convert_ids_to_tokens(range(250)))
    refused("has 250 tokens; target .* has 259", bundle, target, Variant(4), out, "gguf", target_gguf=str(fewer))
    assert not out.exists()


def test_options_of_another_format_are_refused(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("--dtype is for Hugging Face folders", bundle, target, Variant(4), out, "gguf", dtype="float16")
    refused("--quant and --target-gguf are for --format gguf", bundle, target, Variant(4), out, "vllm", quant="f16")
    refused("--quant q4 is not one of f32, f16, q8_0", bundle, target, Variant(4), out, "gguf", quant="q4")
    refused("--dtype int8 is not one of", bundle, target, Variant(4), out, dtype="int8")
    refused("format 'onnx' is not one of", bundle, target, Variant(4), out, "onnx")


def test_a_draft_that_llama_cpp_has_no_writer_for_is_refused(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    bundle.draft_config.model_type = "gemma"
    refused("type 'gemma' cannot be written as GGUF; llama, mistral, qwen2, qwen3 can", bundle, target, Variant(4),
            tmp_path / "out", "gguf")
    bundle.draft_config.model_type = "llama"
    bundle.draft_config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    refused("rotary embedding is of type 'yarn'", bundle, target, Variant(4), tmp_path / "out", "gguf")


def test_a_cost_table_of_another_release_is_passed_over(bundle: Bundle, target: Any, tmp_path: Path) -> None:
    bundle.manifest.costs = {"some machine": {"verify": "no table"}}
    bundle.manifest.evaluation = {"heldout": {"heldout/acceptance_4L": 0.7}}
    assert "transformers" in export(bundle, target, Variant(4), tmp_path / "out", say=quiet)
    assert "a target pass that costs the same for any few rows" in use(tmp_path / "out")


def test_a_narrow_variants_acceptance_is_the_measured_one_scaled_by_the_traces(bundle: Bundle) -> None:
    """Traces give every variant a figure, of other text than the held-out one."""
    bundle.manifest.policy["goodput"] = {"acceptance": {"4L": 0.8, "4L@0.75": 0.7, "2L": 0.5}}
    assert known_acceptance(bundle.manifest, Variant(4, 0.75)) == 0.7
    bundle.manifest.evaluation = {"heldout": {"heldout/acceptance_4L": 0.6}}
    assert known_acceptance(bundle.manifest, Variant(4)) == 0.6
    assert known_acceptance(bundle.manifest, Variant(4, 0.75)) == pytest.approx(0.6 * 0.7 / 0.8)
    assert known_acceptance(bundle.manifest, Variant(4, 1.0)) is None
    assert known_acceptance(bundle.manifest, Variant(2)) == 0.5
