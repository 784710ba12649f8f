"""What runs: model runners and caches, sampling, verification, policies, the loop, the bundle."""

import os
from typing import TYPE_CHECKING, Any

# Thread settings, read when torch loads its OpenMP library. A worker that waits for its next share spins for
# some milliseconds before it sleeps: between two products of a pass there is too little time to wake it from
# sleep, and a pass of one row is up to a fifth slower for it. Several ranks on one machine would spin against
# each other.
if int(os.environ.get("WORLD_SIZE", "1")) == 1:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000000")

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
