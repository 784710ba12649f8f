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
# Two processes of one thread each are faster than one of two: most tests are tiny. Whole runs come first, so that
# the others fill the other core meanwhile; a module's tests stay in one process, since they share fixtures.
export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    python -m pytest -n auto --dist loadscope --no-loadscope-reorder --cov --cov-report=term --cov-fail-under=85 \
        tests/e2e tests
fi
