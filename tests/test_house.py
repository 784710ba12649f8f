"""The house rules: which room may import which, and which test covers each kind of bad input."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARROWS = {
    "data": set(),
    "distill": {"data"},
    "decode": {"data", "distill"},
    "train": {"data", "distill", "decode"},
}

# Every kind of bad input (DESIGN, section 11) and the test that covers it.
BAD_INPUT = {
    "unknown or mistyped recipe key": "train/test_recipes.py::test_an_unknown_key_is_named_with_the_nearest_valid_one",
    "recipe key missing": "train/test_recipes.py::test_a_missing_key_is_named",
    "recipe value of the wrong type": "train/test_recipes.py::test_a_wrong_value_is_shown_with_its_key",
    "recipe file missing": "train/test_recipes.py::test_a_missing_recipe_suggests_the_nearest",
    "malformed override": "train/test_recipes.py::test_a_bad_override_is_explained",
    "truncated shard": "data/test_teacher_cache.py::test_a_damaged_shard_is_named_and_refused",
    "cache that does not fit the recipe": (
        "data/test_teacher_cache.py::test_reading_a_cache_that_does_not_fit_names_the_field_and_both_values"
    ),
    "truncated trace file": "data/test_traces.py::test_a_truncated_file_is_named",
    "truncated checkpoint": (
        "train/test_training.py::test_a_damaged_checkpoint_is_named_and_the_one_before_is_used"
    ),
    "truncated bundle": "decode/test_bundle.py::test_a_truncated_file_is_named",
    "killed while writing": "data/test_io.py::test_killed_between_writing_and_renaming_leaves_the_old_content",
    "interrupted run resumes bitwise": (
        "train/test_training.py::test_interrupted_runs_end_bitwise_like_the_uninterrupted_one"
    ),
    "empty prompt": "decode/test_loop.py::test_an_empty_prompt_is_refused",
    "over-long prompt": "decode/test_loop.py::test_a_prompt_longer_than_the_context_is_refused_with_numbers",
    "prompt beyond the draft's context": (
        "decode/test_loop.py::test_past_the_drafts_context_the_target_decodes_alone"
    ),
    "zero tokens asked": "decode/test_loop.py::test_max_tokens_is_never_overshot",
    "NaN logits": "decode/test_loop.py::test_logits_that_are_not_numbers_are_named_with_their_position",
    "NaN loss": "train/test_training.py::test_a_loss_that_stays_not_finite_ends_the_job",
    "missing end-of-sequence id": (
        "decode/test_loop.py::test_a_target_without_end_of_sequence_writes_to_the_limit"
    ),
    "full disk, any file": "data/test_io.py::test_a_full_disk_is_a_clear_error_and_keeps_the_old_content",
    "full disk, checkpoint": (
        "train/test_training.py::test_a_full_disk_ends_with_a_message_and_keeps_the_earlier_checkpoint"
    ),
    "another tokenizer": (
        "decode/test_bundle.py::test_the_decoder_refuses_a_permuted_vocabulary_and_names_the_token"
    ),
    "mistakes on the command line": "decode/test_cli.py::test_mistakes_get_one_clear_line",
    "mistakes of a client": "decode/test_server.py::test_a_mistake_is_named",
    "nonsense of a client": "decode/test_serverfaults.py::test_no_request_makes_the_server_fail",
    "client that goes away": "decode/test_serverfaults.py::test_a_client_that_goes_away_frees_its_slot",
    "pass that fails": (
        "decode/test_serverfaults.py::test_a_failed_pass_ends_its_answers_and_says_nothing_of_the_insides"
    ),
    "draft of another kind of model": "decode/test_doctor.py::test_a_recurrent_model_does_not_work",
}


def imported_rooms(path: Path) -> set[str]:
    """Rooms of ours that a file imports, wherever in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        rooms |= {n.split(".")[1] for n in names if n.startswith("draftsmith.")}
    return rooms


@pytest.mark.parametrize("room", ARROWS)
def test_imports_follow_the_arrows(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        assert imported_rooms(path) <= ARROWS[room] | {room}, path


def test_decoding_needs_none_of_the_training_extras() -> None:
    """The extras are made impossible to import, then everything that a person who decodes uses is loaded."""
    code = """
import sys
for name in ("deepspeed", "datasets", "accelerate", "pydantic", "pyarrow", "tensorboard"):
    sys.modules[name] = None
import draftsmith.decode
from draftsmith.decode import Decoder, SamplingParams, bundle, cli, identity, report, runner, validate
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("case", BAD_INPUT)
def test_every_kind_of_bad_input_has_its_test(case: str) -> None:
    file, name = BAD_INPUT[case].split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
