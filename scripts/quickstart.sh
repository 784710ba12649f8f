#!/usr/bin/env bash
# From nothing to a validated, faster decoder for SmolLM2-135M-Instruct: about 15 minutes on two CPU cores.
# Safe to run again: finished stages are skipped and an interrupted one resumes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup
recipe="${1:-recipes/quickstart.yaml}"
export HF_HUB_OFFLINE=1
out="$(python -c 'import sys; from draftsmith.train.recipe import load_recipe; print(load_recipe(sys.argv[1]).out)' "$recipe")"

for job in respond distill trace gate; do
    echo "== $job" >&2
    deepspeed --num_accelerators 1 --log_level error "train/$job.py" --recipe "$recipe"
done
echo "== validate" >&2
python scripts/validate_acceptance.py "$out/bundle" --recipe "$recipe"
