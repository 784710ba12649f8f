"""Tiny real models: a Llama-shaped target with a byte-level tokenizer, and a bundle with a random draft."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import pytest
import torch

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ["<|pad|>", "<|start|>", "<|end|>"]
END = 258


def make_tokenizer() -> Any:
    """256 bytes, then <|pad|> 256, <|start|> 257, <|end|> 258 (end of sequence)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TARGET_SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": END,
    "initializer_range": 0.2,
}


def make_target_model(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    """A random model of 5 layers, hidden 64, vocabulary 259; sharpened so that greedy text varies."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**TARGET_SHAPE, "pad_token_id": 256, "tie_word_embeddings": True, **changes}
    config = AutoConfig.for_model(family, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def save_model(folder: Path, model: Any = None, tokenizer: Any = None) -> Path:
    """A Hugging Face folder of a tiny model; the usual one unless another is given."""
    (model or make_target_model()).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target saved as a Hugging Face folder."""
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def target(target_folder: Path) -> Any:
    from draftsmith.decode.target import load_target

    return load_target(str(target_folder))


def make_draft(target: Any, layers: list[int] | None = None, head: int = 120) -> Any:
    """An undistilled elastic draft of 4 target layers whose head holds the first `head` ids and the end."""
    from draftsmith.distill.init import build_draft

    ids = torch.tensor([*range(head), END])
    return build_draft(
        target.model, layers or [0, 1, 3, 4], 2, (0.75, 1.0, 1.25, 1.5), ids, [torch.arange(32, 126)[None]]
    )


def make_bundle(folder: Path, target: Any, draft: Any, name: str, gate: Any = None, **policy: Any) -> Path:
    from draftsmith.decode.bundle import Manifest, save_bundle

    settings = {
        "default": "fixed(3)",
        "variant": "4L",
        "use_gate": gate is not None,
        "paper": {},
        "goodput": {},
        **policy,
    }
    manifest = Manifest(
        target={"name": name, **target.fingerprint()},
        draft={"config": draft.config.to_dict(), "shape": draft.shape.to_json()},
        policy=settings,
        gate={"features": gate.inner.in_features, "hidden": gate.inner.out_features} if gate else {},
    )
    save_bundle(folder, manifest, draft.portable_state(), gate, target.tokenizer)
    return folder


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A bundle with a random gate whose draft was copied from target layers and not distilled."""
    from draftsmith.decode.target import load_target
    from draftsmith.distill.gate import Gate

    loaded = load_target(str(target_folder))
    torch.manual_seed(1)
    return make_bundle(
        tmp_path_factory.mktemp("bundle") / "bundle", loaded, make_draft(loaded), str(target_folder), Gate(2 * 64, 8)
    )


@pytest.fixture
def decoder(bundle_folder: Path) -> Any:
    from draftsmith.decode import Decoder

    return Decoder.load(bundle_folder)


PRINTABLE = 94  # ids below it are the characters ! to ~


def save_target(folder: Path, tokenizer: Any = None, **changes: Any) -> Path:
    """A tiny target that writes printable characters only, so that its text can hold stop strings."""
    model = make_target_model(**changes)
    model.get_input_embeddings().weight[PRINTABLE:] *= 0.05
    return save_model(folder, model, tokenizer)


def assemble(folder: Path, out: Path, draft: Any = None, **policy: Any) -> Any:
    """In float64: rounding must not decide between two tokens."""
    from draftsmith.decode import Decoder
    from draftsmith.decode.bundle import load_bundle
    from draftsmith.decode.target import load_target

    target = load_target(str(folder), dtype=torch.float64)
    bundle = make_bundle(out, target, draft or make_draft(target), str(folder), **policy)
    return Decoder.assemble(target, load_bundle(bundle))


@pytest.fixture(scope="session")
def printable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("printable"))


@pytest.fixture(scope="session")
def plain(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return assemble(printable, tmp_path_factory.mktemp("plain") / "bundle")
