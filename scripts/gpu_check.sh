#!/usr/bin/env bash
# Check the GPU side on this machine in under six minutes: correctness against CPU fp32, FlashAttention against
# SDPA, tokens/s with and without graphs, and random-weight Llama shapes of 1B and 7B. Prints a short table last
# and writes runs/proofs/gpu.json. Needs one CUDA device; installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1
python="${PYTHON:-python3}"
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
if ! "$python" -c "import draftsmith.decode, torch" 2>/dev/null; then
    echo "gpu_check: $python has no torch or no draftsmith; install with: $python -m pip install -e '.[train,gguf]'" >&2
    exit 2
fi
exec "$python" tests/proofs/gpu.py "$@"
