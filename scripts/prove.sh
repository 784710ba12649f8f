#!/usr/bin/env bash
# Prove one promise of the product: prints `PASS|FAIL NAME: figures`, writes runs/proofs/NAME.json, and exits
# 0 or 1. Names: see tests/proofs.
#
#   bash scripts/prove.sh exact               every outcome of the loop, enumerated: the target's distribution
#   bash scripts/prove.sh mutants             planted faults, which that enumeration has to catch
#   bash scripts/prove.sh gumbel [BUNDLE]     with a seed the text is the same for every draft, policy and proposer
#   bash scripts/prove.sh sampling            20,000 texts: a test cannot tell speculative from plain, and tells a bias
#   bash scripts/prove.sh identity [BUNDLE [N [PROMPTS [MAX_TOKENS]]]]   greedy text equals stock transformers'
#   bash scripts/prove.sh resume              five SIGKILLs on two ranks, the same weights and optimiser state
#   bash scripts/prove.sh ranks               one rank and two, ZeRO 0 to 3: the same losses
#   bash scripts/prove.sh memory              the loss over a vocabulary of 128k without its logits
#   bash scripts/prove.sh wheel               the built wheel decodes without the training extras
#   bash scripts/prove.sh engine [BUNDLE]     the engine against the machine's floor and against transformers
#   bash scripts/prove.sh speed BUNDLE [N [KINDS]]   the loop against plain, fixed-length and transformers' decoding
#   bash scripts/prove.sh statistics          the benchmark finds what is planted, and nothing where nothing is
#   bash scripts/prove.sh quickstart          fresh clone to validated decoder within 25 minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
name="${1:-}"
file="tests/proofs/$name.py"
[ -f "$file" ] || file="tests/proofs/${name}_.py"  # where Python has a module of that name
if [ -z "$name" ] || [ ! -f "$file" ]; then
    echo "usage: bash scripts/prove.sh NAME, with NAME one of:" $(cd tests/proofs && ls [a-z]*.py | sed 's/_*\.py//') >&2
    exit 2
fi
shift
setup
export HF_HUB_OFFLINE=1
exec python "$file" "$@"
