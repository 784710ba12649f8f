"""How a model runs on a device: every choice that depends on the hardware is made here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from draftsmith.data import DraftsmithError

PRECISIONS = ("auto", "fp32", "bf16", "int8")
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FLASH_HEAD_DIM = 256  # the largest head that FlashAttention takes


@dataclass(frozen=True)
class Engine:
    """linear: "plain", and on a CPU "blocked" (few rows at memory speed, with AVX-512), "packed" (once at load, by
    oneDNN), "int8" (rows quantised one by one) or "int8_draft".
    attention: "sdpa" or "flash". graphs: replay CUDA graphs for passes of few rows."""

    device: torch.device
    dtype: torch.dtype
    linear: str = "plain"
    attention: str = "sdpa"
    graphs: bool = False

    @property
    def precision(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return "int8" if self.linear.startswith("int8") else name


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AMX): several times float32 there, and
    slower than float32 everywhere else."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported is not None and supported())


def has_avx512() -> bool:
    return bool(torch.cpu._is_avx512_supported())


def training_dtype(precision: str, device: torch.device | str) -> torch.dtype:
    """The dtype that a recipe's `precision` means here: "auto" is bfloat16 where the device has units for it."""
    fast = torch.device(device).type == "cuda" or has_bf16_units()
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and fast) else torch.float32


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_flash() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def choose_engine(device: torch.device | str | None = None, precision: str = "auto",
                  dtype: torch.dtype | None = None, head_dim: int = 0) -> Engine:
    """The engine for a device: float32 on a CPU; bfloat16, CUDA graphs and, where it is installed,
    FlashAttention on a GPU. An explicit `dtype` wins over what `precision` implies.

    Raises `DraftsmithError` for int8 on a GPU, where no operator here computes it row by row.
    """
    where = torch.device(device) if device is not None else default_device()
    if precision not in PRECISIONS:
        raise DraftsmithError(f"precision '{precision}' is not one of {', '.join(PRECISIONS)}")
    if where.type == "cpu":
        dtype = dtype or (torch.bfloat16 if precision == "bf16" else torch.float32)
        fast = "blocked" if dtype == torch.float32 and has_avx512() else "packed"
        return Engine(where, dtype, "int8" if precision == "int8" else fast)
    if precision == "int8":
        raise DraftsmithError(f"precision int8 runs on a CPU only, not on {where.type}")
    dtype = dtype or (torch.float32 if precision == "fp32" else torch.bfloat16)
    half = dtype in (torch.bfloat16, torch.float16)
    cuda = where.type == "cuda"
    flash = cuda and half and head_dim <= FLASH_HEAD_DIM and has_flash()
    return Engine(where, dtype, "plain", "flash" if flash else "sdpa", cuda)


def draft_engine(device: torch.device, dtype: torch.dtype, int8: bool, head_dim: int) -> Engine:
    """The engine of a draft beside a target of this device and dtype. On a CPU a draft runs one row at a time, which
    plain weights serve best; int8 ones go with bfloat16 activations."""
    if device.type == "cpu":
        return Engine(device, torch.bfloat16, "int8_draft") if int8 else Engine(device, dtype)
    return choose_engine(device, dtype=dtype, head_dim=head_dim)


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name() -> str:
    """A name for the machine's compute device, under which its cost table is stored."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        import platform

        model = platform.processor()
    return f"{model or 'CPU'} ({torch.get_num_threads()} threads)"
