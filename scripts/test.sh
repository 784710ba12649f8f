#!/usr/bin/env bash
# Sets up .venv and runs the linter, the type checker and the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup
export HF_HUB_OFFLINE=1
ruff check .
mypy -p draftsmith.data -p draftsmith.distill -p draftsmith.train -p draftsmith.decode
rm -f .coverage*
python -m pytest --cov=draftsmith --cov-report= "$@"
