"""What runs: model runners and caches, sampling, verification, policies, the loop, the bundle."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import Decoder, GenerationOutput
    from .sampling import SamplingParams

__all__ = ["Decoder", "GenerationOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import draftsmith.decode` alone stays quick.
    if name == "SamplingParams":
        from .sampling import SamplingParams
        return SamplingParams
    if name in ("Decoder", "GenerationOutput"):
        from . import decoder
        return getattr(decoder, name)
    raise AttributeError(name)
