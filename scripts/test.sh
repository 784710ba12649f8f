#!/usr/bin/env bash
# Sets up .venv and runs the linter, the type checker and the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup
export HF_HUB_OFFLINE=1
ruff check .
# The type checker reads the package as installed: the folders alone are not named draftsmith.
rm -rf build .venv/typed  # a stale build keeps modules that are gone
python -m pip install --quiet --no-deps --target .venv/typed .
MYPYPATH=.venv/typed mypy -p draftsmith.data -p draftsmith.distill -p draftsmith.train -p draftsmith.decode
rm -f .coverage*
if [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    python -m pytest --cov --cov-report=term --cov-fail-under=85
fi
