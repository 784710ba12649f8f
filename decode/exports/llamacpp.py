"""Exporting a variant as a GGUF file for llama.cpp, with the tokenizer of the target's own GGUF.

llama.cpp compares the vocabularies of target and draft, and whoever runs it has the target's GGUF: its
`tokenizer.*` keys are copied as they are. The file is read back, and run by llama.cpp itself where that is
installed, before it is called done.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir
from draftsmith.data.vocabulary import first_difference, vocabulary
from draftsmith.distill.variants import Variant

from ..bundle import Bundle
from ..stack import head_shape, sliding_window
from ..target import PRESETS, Target, preset_gguf
from .parity import Parity, compare, compare_written, held_ids, stock_logits
from .stock import Say, fresh_folder, stock_model, tell, write_usage
from .use import settings_for

# Model type of the draft -> llama.cpp's architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
QUANTS = ("f32", "f16", "q8_0")
LLAMA_POSITIONS = 64  # of text that llama.cpp reads for the comparison
# How far llama.cpp's logits may be from ours over the same weights: it rounds activations to the weights' kind.
# Measured on a distilled draft of SmolLM2: 1e-6, 5e-4 and 1e-2; a tiny one of random weights goes further.
LLAMA_LIMITS = {"f32": 1e-4, "f16": 2e-2, "q8_0": 2e-1}


def require_gguf() -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise DraftsmithError("a GGUF export needs the gguf package: pip install 'draftsmith[gguf]'")
    import gguf

    return gguf


def architecture(config: Any) -> str:
    """llama.cpp's name for the draft's architecture; `DraftsmithError` for what this writer does not know."""
    if config.model_type not in ARCHITECTURES:
        raise DraftsmithError(f"a draft of type '{config.model_type}' cannot be written as GGUF; "
                              f"{', '.join(ARCHITECTURES)} can. Export it with --format hf and convert that with "
                              "llama.cpp's convert_hf_to_gguf.py")
    arch, kind = ARCHITECTURES[config.model_type], config.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "linear") and not (kind == "llama3" and arch == "llama"):
        raise DraftsmithError(f"the draft's rotary embedding is of type '{kind}', which this GGUF writer does not know "
                              f"for {arch}; export it with --format hf and convert that with llama.cpp")
    return arch


def find_target_gguf(name: str, given: str | None) -> Path:
    """The target's own GGUF: the file that was given, or a preset's."""
    if given is not None:
        file = Path(given).expanduser()
        if not file.is_file():
            raise DraftsmithError(f"--target-gguf {given}: no such file")
        return file
    if name.lower() not in PRESETS:
        raise DraftsmithError("a GGUF draft takes its tokenizer from the target's own GGUF: give --target-gguf FILE, "
                              f"the file of '{name}' that llama.cpp runs (any quantisation)")
    return preset_gguf(name)


def read_tokenizer(file: Path, target: Target) -> dict[str, Any]:
    """The `tokenizer.*` fields of the target's GGUF by key; `DraftsmithError` where its tokens are not the target's."""
    gguf = require_gguf()
    try:
        fields = {k: v for k, v in gguf.GGUFReader(file).fields.items() if k.startswith("tokenizer.")}
        tokens = list(fields["tokenizer.ggml.tokens"].contents())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DraftsmithError(f"{file}: no GGUF file with a tokenizer ({type(error).__name__}: {error})") from error
    ours = vocabulary(target.tokenizer)
    if difference := first_difference(ours, tokens):
        raise DraftsmithError(f"{file}: not the tokenizer of target '{target.name}': token {difference}")
    rows = target.config.vocab_size  # a tokenizer may know more, which the model cannot write
    if not min(len(ours), rows) <= len(tokens) <= rows:
        raise DraftsmithError(f"{file}: has {len(tokens)} tokens; target '{target.name}' has {len(ours)} and {rows} "
                              "rows for them")
    return fields


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from halves (x1.. y1..) to pairs (x1 y1 ..), as llama.cpp rotates them."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rotated_heads(name: str, arch: str, config: Any) -> int | None:
    """Heads of a tensor whose rows are permuted; None for the others."""
    queries, keys, _ = head_shape(config)
    if arch != "llama":
        return None
    return queries if ".q_proj." in name else keys if ".k_proj." in name else None


def named_tensors(model: Any, arch: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(stock name, GGUF name, weight) of a stock model's tensors; a head that is the embedding is left out."""
    gguf = require_gguf()
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise DraftsmithError(f"llama.cpp's {arch} has no place for the draft's tensor '{name}'")
        yield name, found, tensor


def write_gguf(file: Path, model: Any, tokenizer: dict[str, Any], quant: str, name: str) -> None:
    """`model`: a stock model in float32 with a row for each token; `tokenizer`: fields of the target's GGUF."""
    gguf, config, arch = require_gguf(), model.config, architecture(model.config)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type({"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16,
                          "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, config)
    for key, field in tokenizer.items():
        writer.add_key_value(key, field.contents(), field.types[0],
                             field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None)
    for ours, theirs, tensor in named_tensors(model, arch):
        heads = rotated_heads(ours, arch, config)
        weight = (permute(tensor, heads) if heads else tensor).contiguous().numpy()
        kind = gguf.GGMLQuantizationType.F32
        if weight.ndim == 2 and quant != "f32":
            whole = weight.shape[1] % 32 == 0  # a block of Q8_0
            kind = gguf.GGMLQuantizationType.Q8_0 if quant == "q8_0" and whole else gguf.GGMLQuantizationType.F16
        writer.add_tensor(theirs, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: Any) -> None:
    """Sizes and the rotary embedding."""
    gguf, rope = require_gguf(), config.rope_parameters
    queries, keys, size = head_shape(config)
    writer.add_block_count(config.num_hidden_layers)
    # llama.cpp has no window in these architectures: within it, the model computes the same.
    context = config.max_position_embeddings
    writer.add_context_length(min(context, sliding_window(config) or context))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(queries)
    writer.add_head_count_kv(keys)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config).numpy())


def rope_factors(config: Any) -> torch.Tensor:
    """By how much each of the frequencies [D / 2] is slowed down."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plain = copy.deepcopy(config)
    plain.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    return (LlamaRotaryEmbedding(plain).inv_freq / LlamaRotaryEmbedding(config).inv_freq).float()


def read_gguf(file: Path, config: Any) -> Any:
    """The stock model that a file holds, its weights dequantised to float32."""
    from transformers import AutoModelForCausalLM

    gguf, arch = require_gguf(), architecture(config)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    state = {}
    for ours, theirs, tensor in named_tensors(model, arch):
        if theirs not in stored:
            raise DraftsmithError(f"{file.name}: holds no tensor '{theirs}'")
        values = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        weight = torch.from_numpy(values.copy()).view(tensor.shape)
        heads = rotated_heads(ours, arch, config)
        state[ours] = unpermute(weight, heads) if heads else weight
    model.load_state_dict(state, strict=False)
    return model


def run_llama_cpp(file: Path, ids_1N: torch.Tensor) -> torch.Tensor | None:
    """Logits [N, V] of the real llama.cpp; None where its Python binding is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    from llama_cpp import GGML_TYPE_F32, Llama

    ids, threads = ids_1N[0].tolist(), torch.get_num_threads()
    try:
        model = Llama(str(file), n_gpu_layers=0, n_ctx=256, n_batch=len(ids), n_threads=threads,
                      n_threads_batch=threads, logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32,
                      verbose=False)
    except (ValueError, RuntimeError) as error:
        raise DraftsmithError(f"llama.cpp cannot load the exported {file.name}, so nothing was written: "
                              f"{error}") from error
    model.eval(ids)
    return torch.from_numpy(model.scores[: len(ids)].copy())


def check_llama_cpp(file: Path, model: Any, bundle: Bundle, ids_1N: torch.Tensor, quant: str) -> str:
    """Compare llama.cpp with the stock model over the same weights; a sentence on what was found."""
    ids = ids_1N[:, :LLAMA_POSITIONS]
    logits = run_llama_cpp(file, ids)
    if logits is None:
        return "not run by llama.cpp itself, which is not installed here (pip install llama-cpp-python)"
    parity = compare(stock_logits(model, bundle, ids), logits[:, bundle.tensors["head_ids"]])
    if not parity.difference <= LLAMA_LIMITS[quant]:
        raise DraftsmithError(f"llama.cpp computes something else from the exported {file.name}, so nothing was "
                              f"written: {parity.describe()}; {quant} explains up to {LLAMA_LIMITS[quant]:.0e}")
    return f"run by llama.cpp: {parity.describe()}"


def export_gguf(bundle: Bundle, target: Target, variant: Variant, out: str | os.PathLike[str], quant: str = "f16",
                target_gguf: str | None = None, say: Say = tell) -> str:
    """Write a folder with the GGUF file and instructions; returns what was written and how it was checked.

    `quant`: f32, f16 or q8_0. `target_gguf`: the target's own file, for its tokenizer; a preset's is found. Raises
    `DraftsmithError`, and writes nothing, when the file read back differs by more than `quant` explains.
    """
    if quant not in QUANTS:
        raise DraftsmithError(f"--quant {quant} is not one of {', '.join(QUANTS)}")
    require_gguf()
    folder = fresh_folder(out)
    architecture(bundle.draft_config)
    source = find_target_gguf(target.name, target_gguf)
    say(f"Reading the tokenizer of {source.name} ...")
    tokenizer = read_tokenizer(source, target)
    model, name = stock_model(bundle, target, variant), f"draft-{variant.name.replace('@', '-')}-{quant}.gguf"
    settings = settings_for(bundle, target, variant, model, folder, "gguf", file=name, target_gguf=str(source))
    rows = len(tokenizer["tokenizer.ggml.tokens"].data)
    if rows < model.config.vocab_size:  # padding that no token has
        model.resize_token_embeddings(rows, mean_resizing=False)
    with atomic_dir(folder) as aside:
        say(f"Writing {name} ...")
        title = f"Draftsmith draft {variant.name} of {Path(target.name).name}"
        write_gguf(aside / name, model, tokenizer, quant, title)
        say("Reading it back, and comparing ...")
        parity, found = check_gguf(aside / name, model, bundle, target, variant, quant)
        write_usage(aside, settings, f"read back: {parity.describe()}; {found}")
    return f"{variant.name} as {quant} GGUF ({name}), read back; {parity.describe()}; {found}"


def check_gguf(file: Path, own: Any, bundle: Bundle, target: Target, variant: Variant,
               quant: str) -> tuple[Parity, str]:
    """A written file against `own`, the stock model that was to be written, and llama.cpp against the file."""
    model = read_gguf(file, own.config)
    parity = compare_written(model, own, bundle, target, variant)
    parity.require(quant, f"the exported {file.name}")
    return parity, check_llama_cpp(file, model, bundle, held_ids(bundle, target), quant)
