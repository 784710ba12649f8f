"""Recipes: every shipped one loads, and every mistake in one is named by file, key and what was meant."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.data import DraftsmithError
from draftsmith.train.recipe import Recipe, load_recipe, parse_args
from draftsmith.train.sections import DistillSection
from draftsmith.train.stage import inputs_hash, load_prompts

RECIPES = [p for p in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")) if not p.name.startswith("eval-")]
BASE: dict[str, Any] = {
    "name": "tiny",
    "out": "runs/tiny",
    "target": {"name": "some/model"},
    "prompts": {"train_count": 6, "heldout_count": 4},
    "respond": {"k": 8},
    "pretrain": {"tokenizer": "some/tokenizer", "steps": 10},
    "draft": {"init_layers": [0, 1, 3, 4]},
    "distill": {"steps": 10},
    "trace": {"k": 4},
    "gate": {"hidden": 8},
    "bundle": {"policy": "paper", "paper": {"tau": 0.6}},
    "validate": {"count": 8, "thresholds": {"acceptance": 0.5}},
}


def write(folder: Path, value: Any, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, BASE)


def changed(dotted: str, new: Any, remove: bool = False) -> dict[str, Any]:
    """BASE with one dotted key set or removed."""
    recipe = copy.deepcopy(BASE)
    *sections, last = dotted.split(".")
    at = recipe
    for section in sections:
        at = at.setdefault(section, {})
    if remove:
        del at[last]
    else:
        at[last] = new
    return recipe


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(DraftsmithError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.out.startswith("runs/")
    assert Recipe.model_validate(recipe.model_dump(by_alias=True)) == recipe


def test_there_are_recipes() -> None:
    assert "quickstart.yaml" in [p.name for p in RECIPES]


def test_values_arrive_and_the_rest_has_defaults(base: Path) -> None:
    recipe = load_recipe(base)
    assert (recipe.respond.k, recipe.draft.init_layers) == (8, [0, 1, 3, 4])
    assert recipe.validate_.thresholds.acceptance == 0.5
    assert (recipe.distill.temperature, recipe.draft.buckets) == (0.5, [0.75, 1.0, 1.25, 1.5])
    assert recipe.cache_dir == Path("runs/tiny/teacher")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("nmae", "name"),
        ("distil", "distill"),
        ("validate_", "validate"),
        ("target.nam", "name"),
        ("prompts.trian_count", "train_count"),
        ("respond.temperature", "temperatures"),
        ("draft.bucket", "buckets"),
        ("distill.warm_up", "warmup"),
        ("corpus.docments", "documents"),
        ("pretrain.laers", "layers"),
        ("draft.own.hiden", "hidden"),
        ("trace.promts", "prompts"),
        ("gate.hiden", "hidden"),
        ("bundle.polciy", "policy"),
        ("bundle.paper.tua", "tau"),
        ("validate.cuont", "count"),
        ("validate.thresholds.aceptance", "acceptance"),
    ],
)
@pytest.mark.parametrize("by", ["file", "override"])
def test_an_unknown_key_is_named_with_the_nearest_valid_one(key: str, meant: str, by: str, tmp_path: Path) -> None:
    in_file = by == "file"
    message = refusal(write(tmp_path, changed(key, 1) if in_file else BASE), *([] if in_file else [f"{key}=1"]))
    assert "tiny.yaml" in message
    assert f"'{key}'" in message
    assert f"did you mean '{meant}'" in message


def test_a_key_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, changed("gate.zzz", 1)))
    assert re.search(r"unknown key 'gate\.zzz'; known: batch, heldout, hidden, k, lr, steps", message)


@pytest.mark.parametrize("key", ["name", "out", "target", "target.name", "draft", "distill", "pretrain.steps"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    assert f"tiny.yaml: '{key}' is missing" in refusal(write(tmp_path, changed(key, None, remove=True)))


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("distill.steps", "many", "'many'"),
        ("distill.steps", 2.5, "2.5"),
        ("distill.steps", 0, "0"),
        ("distill.lr", -1, "-1"),
        ("distill.lr", float("nan"), "nan"),
        ("distill.precision", "fp8", "'fp8'"),
        ("name", 7, "7"),
        ("seed", [1], "[1]"),
        ("target", "some/model", "'some/model'"),
        ("respond", None, "None"),
        ("pretrain.heads", 0, "0"),
        ("validate.thresholds.acceptance", 60, "60"),
        ("prompts.train_count", "1e2x", "'1e2x'"),
        ("bundle.paper.tau", "high", "'high'"),
    ],
)
def test_a_wrong_value_is_shown_with_its_key(key: str, value: Any, shown: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, changed(key, value)))
    assert message.startswith(str(tmp_path / "tiny.yaml"))
    assert f"{key}: " in message
    assert f"(got {shown}" in message


def test_a_wrong_entry_of_a_list_is_named_by_its_place(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, changed("draft.init_layers", [0, "x"])))
    assert "draft.init_layers.1: " in message
    assert "(got 'x')" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distill.steps", True),
        ("respond.temperatures", []),
        ("respond.temperatures", [0.0, -1.0]),
        ("bundle.policy", "goodputt"),
        ("bundle.policy", "fixed"),
    ],
)
def test_a_value_that_would_fail_a_later_job_or_mean_something_else_is_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    """`steps: yes` is no number, and a misspelt policy must not wait until the draft is trained."""
    assert key in refusal(write(tmp_path, changed(key, value)))


@pytest.mark.parametrize("policy", ["ar", "paper", "goodput", "fixed(4)"])
def test_every_policy_can_be_a_bundles_default(policy: str, base: Path) -> None:
    assert load_recipe(base, [f"bundle.policy={policy}"]).bundle.policy == policy


def test_several_mistakes_are_all_reported(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, changed("distill", {"stepz": 10, "lr": "x"})))
    assert all(part in message for part in ("'distill.stepz'", "did you mean 'steps'?", "distill.lr"))


@pytest.mark.parametrize(("key", "value", "reason"), [
    ("distill", {}, "needs either steps or epochs"),
    ("distill", {"steps": 3, "epochs": 2}, "needs either steps or epochs"),
    ("draft", {"init_layers": [0]}, "must name 2 or more layers"),
    ("draft", {}, "must name 2 or more layers"),
    ("draft", {"init_layers": [0, 1], "own": {"hidden": 64, "heads": 4, "intermediate": 8}}, "exclude each other"),
    ("draft", {"own": {"hidden": 60, "heads": 8, "intermediate": 8}}, "even multiple of draft.own.heads"),
    ("pretrain", {"tokenizer": "t", "steps": 1, "heads": 16, "kv_heads": 3}, "heads one of kv_heads"),
])
def test_settings_that_do_not_fit_together_are_said_without_the_whole_section(
    key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    message = refusal(write(tmp_path, changed(key, value)))
    assert key in message
    assert reason in message
    assert "(got {" not in message
    assert len(message.splitlines()) == 1


def test_the_loss_changes_for_the_last_steps() -> None:
    section = DistillSection.model_validate(
        {"epochs": 1, "loss": {"kl": 1.0}, "finish": {"hybrid": 0.5, "tv": 1}, "finish_share": 0.25})
    assert [section.loss_at(step, 8) for step in (0, 5)] == [{"kl": 1.0}] * 2
    assert [section.loss_at(step, 8) for step in (6, 7)] == [{"hybrid": 0.5, "tv": 1.0}] * 2
    assert DistillSection.model_validate({"steps": 8}).loss_at(7, 8) == {"kl": 1.0}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("draft.buckets", [0.75, 1.0], "1.5"),
        ("draft.buckets", [0.5, 1.5], r"\[0\.7, 1\.5\]"),
        ("draft.exit", 4, "draft.exit is 4, but the draft has 4 layers"),
    ],
)
def test_a_draft_that_cannot_be_built_is_refused(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    assert re.search(f"tiny.yaml: .*{reason}", refusal(write(tmp_path, changed(key, value))))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("name: a\nout: b\nname: c\n", 3, "key 'name' is given twice"),
        ("name: a\ndistill:\n  steps: 1\n  lr: 1\n  steps: 2\n", 5, "key 'steps' is given twice"),
        ("name: a\nout: [b\n", 3, ""),
        ("name: a\n\tout: b\n", 2, ""),
        ("name: a\nout: b: c\n", 2, ""),
        ("name: a\n---\nname: b\n", 2, ""),
    ],
)
def test_malformed_yaml_is_named_by_its_line(text: str, line: int, reason: str, tmp_path: Path) -> None:
    assert re.search(rf"tiny\.yaml, line {line}: .*{reason}", refusal(write(tmp_path, text)))


@pytest.mark.parametrize(
    "content",
    [b"name: \x00\n", b"name: caf\xe9\n", b"\x93NUMPY\x01\x00v\x00"],
    ids=["control character", "not utf-8", "a binary file"],
)
def test_a_file_that_is_not_text_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_bytes(content)
    assert "tiny.yaml" in refusal(path)


@pytest.mark.parametrize("text", ["", "- name\n", "just text\n"])
def test_a_file_without_sections_is_refused(text: str, tmp_path: Path) -> None:
    assert "tiny.yaml: a recipe is a mapping of sections" in refusal(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("distill.lr=1e-3", 1e-3),
        ("distill.lr=2.5E-4", 2.5e-4),
        ("distill.lr=1", 1.0),
        ("distill.steps=25", 25),
        ("distill.steps=1e2", 100),
        ("seed=7", 7),
        ("name=other", "other"),
        ("out=/tmp/a=b", "/tmp/a=b"),
        ("respond.temperatures=[0.0, 1e-1]", [0.0, 0.1]),
        ("target.trust_remote_code=true", True),
        ("validate.thresholds.acceptance=0.25", 0.25),
        ("bundle.paper.tau=8e-1", 0.8),
    ],
)
def test_an_override_sets_the_value(override: str, expected: Any, base: Path) -> None:
    dumped = load_recipe(base, [override]).model_dump(by_alias=True)
    for part in override.partition("=")[0].split("."):
        dumped = dumped[part]
    assert dumped == expected
    assert type(dumped) is type(expected)


def test_the_last_override_wins_and_sections_may_be_new(base: Path, tmp_path: Path) -> None:
    assert load_recipe(base, ["seed=1", "seed=2"]).seed == 2
    without = write(tmp_path, changed("trace", None, remove=True), "without.yaml")
    assert load_recipe(without, ["trace.k=7"]).trace.k == 7


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("distill.steps", "an override is section.key=value"),
        ("", "an override is section.key=value"),
        ("name.first=x", "'name' is not a section"),
        ("distill.steps.more=x", "'steps' is not a section"),
        ("distill.betas=[0.9", "override"),
        ("distill.steps=ten", r"distill\.steps: .*got 'ten'"),
        ("=3", "unknown key ''"),
    ],
)
def test_a_bad_override_is_explained(override: str, reason: str, base: Path) -> None:
    assert re.search(reason, refusal(base, override))


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", "1.0e-3"])
def test_every_way_to_write_a_number_is_a_number(number: str, tmp_path: Path) -> None:
    text = yaml.safe_dump(changed("distill", {"steps": 10})).replace("steps: 10", f"steps: 10\n  lr: {number}")
    assert load_recipe(write(tmp_path, text)).distill.lr == 1e-3


@pytest.mark.parametrize("name", ["1e3", "7b-model", "3 targets: first", "2 tested #1"])
def test_quoted_text_stays_as_it_is_written(name: str, tmp_path: Path) -> None:
    text = yaml.safe_dump(BASE).replace("name: tiny", f'name: "{name}"')
    assert load_recipe(write(tmp_path, text)).name == name


def test_a_missing_recipe_suggests_the_nearest(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"tinny\.yaml: no such recipe; did you mean 'tiny\.yaml'", refusal(base.with_name("tinny.yaml")))
    monkeypatch.chdir(Path(__file__).parents[2])
    assert "did you mean 'quickstart.yaml'" in refusal(Path("recipe/quikstart.yaml"))


def test_the_command_line_of_a_job(base: Path) -> None:
    args = parse_args("a job", ["--recipe", str(base), "distill.steps=3", "out=runs/other", "--local_rank=1"])
    assert (args.recipe.distill.steps, args.recipe.out, args.recipe_path) == (3, "runs/other", str(base))


def test_the_hash_of_inputs_follows_the_sections_that_matter(base: Path) -> None:
    def of(*overrides: str) -> str:
        return inputs_hash(load_recipe(base, overrides), ["draft", "distill"], data="d")

    assert of() == of("name=other", "gate.steps=3", "out=elsewhere")
    assert len({of(), of("distill.steps=11"), of("draft.vocab=100"), of("seed=1")}) == 4


# --- prompts


def prompts_recipe(base: Path, train: str, heldout: str, *overrides: str) -> Recipe:
    for name, text in (("train", train), ("heldout", heldout)):
        (base.parent / f"{name}.jsonl").write_text(text)
    return load_recipe(base, [*(f"prompts.{n}={base.parent}/{n}.jsonl" for n in ("train", "heldout")), *overrides])


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "two"}\n',
        '{"messages": [{"role": "user", "content": "two"}], "kind": "other"}\n',
    ],
    ids=["same form", "other form"],
)
def test_a_heldout_prompt_that_is_also_trained_on_is_refused(row: str, split: str, base: Path) -> None:
    recipe = prompts_recipe(
        base, '{"prompt": "one"}\n{"prompt": "two"}\n', '{"prompt": "three"}\n{"id": "h2", ' + row[1:]
    )
    with pytest.raises(DraftsmithError, match="held-out prompt 'h2' is also a training prompt"):
        load_prompts(recipe, split)


def test_prompts_beyond_the_count_are_not_trained_on(base: Path) -> None:
    train = '{"prompt": "one"}\n{"prompt": "two"}\n'
    recipe = prompts_recipe(base, train, '{"text": "two"}\n', "prompts.train_count=1")
    assert [s.messages for s in load_prompts(recipe, "train")] == [[{"role": "user", "content": "one"}]]
    assert [s.text for s in load_prompts(recipe, "heldout")] == ["two"]


def test_quickstart_prompts_by_count(base: Path) -> None:
    recipe = load_recipe(base)
    assert [len(load_prompts(recipe, split)) for split in ("train", "heldout")] == [6, 4]


def test_more_quickstart_prompts_than_there_are_is_a_clear_error(base: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"0 to 2400.*not 100000"):
        load_prompts(load_recipe(base, ["prompts.train_count=100000"]), "train")
