#!/usr/bin/env bash
# Check the GPU side on this machine in under six minutes: correctness against CPU fp32, FlashAttention against
# SDPA, tokens/s with and without graphs, and random-weight Llama shapes of 1B and 7B. Prints a short table last
# and writes runs/proofs/gpu.json. Needs one CUDA device; installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" tests/proofs/gpu.py "$@"
