"""A comparison on a tiny target: measured, killed, resumed, judged and reported."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from draftsmith.data import DraftsmithError
from draftsmith.data.io import write_jsonl
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.evaluation import benchmark, methods
from draftsmith.decode.evaluation.against import Against
from draftsmith.decode.evaluation.energy import Energy
from draftsmith.decode.evaluation.journal import Journal
from draftsmith.decode.evaluation.methods import Answer, ours, work_of
from draftsmith.decode.evaluation.protocol import Comparison, Settings
from draftsmith.decode.evaluation.recipe import load_eval_recipe
from draftsmith.decode.evaluation.results import Results
from draftsmith.decode.evaluation.statistics import of_differences, of_ratios
from draftsmith.decode.evaluation.tasks import TASKS, Chosen, Item, Task

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("eval-*.yaml"))
METHODS = ["ar", "dsd", "mtv", "paper", "goodput", "transformers", "transformers-assisted", "transformers-lookup"]


def write_recipe(folder: Path, bundle: Path, **changes: Any) -> Path:
    write_jsonl(folder / "p.jsonl", [{"id": f"q{i}", "prompt": f"say {i}"} for i in range(14)])
    recipe = {"name": "tiny", "out": str(folder / "out"), "bundle": str(bundle), "methods": METHODS, "max_tokens": 10,
              "tuning": 2, "tuning_tokens": 6, "tasks": {"prompts": {"source": str(folder / "p.jsonl"), "count": 4}}}
    (folder / "eval.yaml").write_text(yaml.safe_dump({**recipe, **changes}))
    return folder / "eval.yaml"


def rows_of(out: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [(r["item"], r["method"]) for r in lines if r.get("what") == "row"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, bundle_folder: Path) -> Path:
    """The output folder of a run of all methods."""
    folder = tmp_path_factory.mktemp("comparison")
    benchmark.run(load_eval_recipe(write_recipe(folder, bundle_folder)))
    return folder / "out"


def test_every_method_answers_every_prompt_once_and_takes_its_turn_at_going_first(whole: Path) -> None:
    rows = rows_of(whole)
    assert Counter(rows) == Counter({(item, m): 1 for item in {r[0] for r in rows} for m in METHODS})
    assert len(rows) == 4 * len(METHODS)
    assert [method for _, method in rows[:: len(METHODS)]] == METHODS[:4]


def test_all_methods_write_the_targets_own_text(whole: Path) -> None:
    results = Results([json.loads(line) for line in (whole / "rows.jsonl").read_text().splitlines()])
    assert not any(row["apart"] for row in results.rows)
    assert results.summary(None, "transformers-assisted")["prompts"] == 4
    for method in ("dsd", "mtv"):
        assert re.fullmatch(r"(fixed|mtv)\([\d,]+\)", results.of(None, method)[0]["policy"])
    assert results.compute(None, "dsd") == 1.0
    assert results.failing() is not None


def test_the_report_can_be_read_anywhere(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    assert not re.search(r'(src|href)="?https?:', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme" in page
    assert page.count("<svg") >= 6
    assert "#010203" not in page
    assert "goodput" in (whole / "report.md").read_text()
    assert json.loads((whole / "report.json").read_text())["summary"]["prompts"]["goodput"]["over_ar"]["n"] == 4
    import pyarrow.parquet as pq

    assert pq.read_table(str(whole / "rows.parquet")).num_rows == 4 * len(METHODS)
    assert list((whole / "tb").glob("events*"))


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_killed_run_goes_on_without_losing_or_repeating_a_row(after: int, tmp_path: Path, bundle_folder: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after some rows, in the middle of writing the next."""
    recipe = load_eval_recipe(write_recipe(tmp_path, bundle_folder, methods=["ar", "dsd", "goodput"]))
    measure, made = Comparison._measure, []

    def dies(self: Comparison, *args: Any) -> None:
        if len(made) == after:
            with (tmp_path / "out/rows.jsonl").open("ab") as file:
                file.write(b'{"what": "row", "task": "prompts", "ite')
            raise KeyboardInterrupt
        made.append(args)
        measure(self, *args)

    monkeypatch.setattr(Comparison, "_measure", dies)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(recipe)
    monkeypatch.undo()
    before = (tmp_path / "out/rows.jsonl").read_bytes()
    benchmark.run(recipe)
    now = (tmp_path / "out/rows.jsonl").read_bytes()
    assert now.startswith(before[: before.rfind(b"\n") + 1])
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(set(rows)) == 12


def test_more_prompts_and_methods_may_be_added_and_another_bundle_may_not(tmp_path: Path, bundle_folder: Path) -> None:
    path = write_recipe(tmp_path, bundle_folder, methods=["ar", "fixed(2)"])
    benchmark.run(load_eval_recipe(path, ["tasks.prompts.count=3"]))
    first = rows_of(tmp_path / "out")
    benchmark.run(load_eval_recipe(path, ["methods=[ar, fixed(2), lookup(2)]"]))
    assert rows_of(tmp_path / "out")[: len(first)] == first
    assert len(rows_of(tmp_path / "out")) == 12
    records = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    results = Results(records, ["ar", "fixed(2)", "lookup(2)"])
    assert {r["apart"] for r in results.rows} == {False}  # of what was added, too
    assert results.split == 0.75  # three of four prompts have rows of two sessions
    write_jsonl(tmp_path / "more.jsonl", [{"id": f"m{i}", "prompt": f"more {i}"} for i in range(8)])
    benchmark.run(load_eval_recipe(path, [f"tasks={{prompts: {{source: {tmp_path}/more.jsonl, count: 2}}}}"]))
    write_jsonl(tmp_path / "p.jsonl", [{"id": f"q{i}", "prompt": f"shout {i}"} for i in range(14)])
    with pytest.raises(DraftsmithError, match="is not what it was when rows were measured"):
        benchmark.run(load_eval_recipe(path))
    with pytest.raises(DraftsmithError, match="rows of another run, which differs in max_tokens"):
        benchmark.run(load_eval_recipe(path, ["max_tokens=9"]))


def biased(decoder: Decoder) -> methods.Method:
    """Plain decoding that now and then writes another token."""
    plain = ours(decoder, "ar")

    def run(prompt: list[int], params: SamplingParams) -> Answer:
        answer = plain(prompt, params)
        return replace(answer, ids=[*answer.ids[:3], (answer.ids[3] + 1) % 200, *answer.ids[4:]])

    return run


def test_a_method_that_changes_the_text_is_caught(tmp_path: Path, decoder: Decoder) -> None:
    items = [Item(f"i{n}", "text", text=f"text {n}") for n in range(4)]
    settings = Settings(["ar", "fixed(3)", "biased"], max_tokens=12)
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    Comparison(decoder, settings, journal, methods={"biased": biased(decoder)}).run(Chosen(TASKS["prompts"], items))
    results = Results(journal.records)
    assert [bool(r["apart"]) for r in results.of(None, "biased")] == [True] * 4
    assert not any(r["apart"] for r in results.of(None, "fixed(3)"))


def test_a_second_turn_goes_on_from_the_first_answer(tmp_path: Path, decoder: Decoder) -> None:
    seen: list[list[int]] = []
    plain = ours(decoder, "ar")

    def watched(prompt: list[int], params: SamplingParams) -> Answer:
        seen.append(prompt)
        return plain(prompt, params)

    items = [Item(f"i{n}", "chat", turns=(f"first {n}", "second")) for n in range(2)]
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    comparison = Comparison(decoder, Settings(["ar", "watched"], max_tokens=6), journal, methods={"watched": watched})
    comparison.run(Chosen(TASKS["prompts"], items))
    row = next(r for r in journal.of("row") if r["method"] == "watched")
    talk = [{"role": "user", "content": f"first {row['item'][1]}"},
            {"role": "assistant", "content": row["texts"][0]}, {"role": "user", "content": "second"}]
    assert decoder.prompt_ids(talk) in seen
    assert row["turns"] == 2


def test_answers_are_scored_and_cut_at_the_tasks_stop(tmp_path: Path, decoder: Decoder) -> None:
    whole = decoder.generate("text 0", SamplingParams(max_tokens=12)).text
    stop = whole[4:6]
    task = Task("stops", lambda source: [], lambda item, answer: float(stop not in answer), "cut", 12, (stop,))
    items = [Item(f"i{n}", "text", text=f"text {n}") for n in range(2)]
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    Comparison(decoder, Settings(["ar", "fixed(2)", "transformers"]), journal).run(Chosen(task, items))
    results = Results(journal.records)
    assert {r["score"] for r in results.rows} == {1.0}
    assert results.by["stops", "i0", "ar"]["texts"] == [whole[: whole.find(stop)]]
    assert len({tuple(results.by["stops", "i0", m]["texts"]) for m in ("ar", "fixed(2)", "transformers")}) == 1


def test_references_that_accept_blocks_are_cut_where_plain_decoding_ends(tmp_path: Path, decoder: Decoder) -> None:
    """A stop string may lie inside a block, with accepted tokens after it."""
    whole = decoder.generate("text 0", SamplingParams(max_tokens=24)).text
    task = Task("stops", lambda source: [], lambda item, answer: None, "", 24, (whole[6:8],))
    items = [Item(f"i{n}", "text", text="text 0") for n in range(2)]
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    names = ["ar", "transformers", "transformers-assisted", "transformers-lookup"]
    Comparison(decoder, Settings(names), journal).run(Chosen(task, items))
    results = Results(journal.records)
    assert not any(r["apart"] for r in results.rows)
    assert len({(tuple(r["texts"]), r["tokens"]) for r in results.rows}) == 1


def test_sampled_texts_are_compared_too(tmp_path: Path, decoder: Decoder) -> None:
    items = [Item(f"i{n}", "text", text=f"text {n}") for n in range(3)]
    settings = Settings(["ar", "fixed(3)", "goodput", "biased"], max_tokens=12, temperature=0.8)
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    Comparison(decoder, settings, journal, methods={"biased": biased(decoder)}).run(Chosen(TASKS["prompts"], items))
    results = Results(journal.records)
    assert [bool(r["apart"]) for r in results.of(None, "biased")] == [True] * 3
    assert not any(r["apart"] for m in ("fixed(3)", "goodput") for r in results.of(None, m))
    assert len({tuple(r["ids"][0]) for r in results.of(None, "ar")}) == 3


def test_a_score_that_fails_is_no_score_and_equal_texts_have_equal_ones(tmp_path: Path, decoder: Decoder) -> None:
    calls: list[str] = []

    def score(item: Item, answer: str) -> float:
        calls.append(answer)
        if item.id == "i1":
            raise ValueError("unforeseen")
        return float(len(calls))

    items = [Item(f"i{n}", "text", text=f"text {n}") for n in range(2)]
    journal = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    task = Task("scored", lambda source: [], score, "", 8)
    Comparison(decoder, Settings(["ar", "fixed(2)", "mtv(2,1)"]), journal).run(Chosen(task, items))
    assert [r["score"] for r in Results(journal.records).rows] == [1.0] * 3 + [None] * 3
    assert len(calls) == 2


@pytest.mark.parametrize(("acceptance", "speed", "sign"), [
    (0.1, 0.2, 1), (-0.1, 0.2, 1), (0.1, -0.2, -1), (0.1, 0.0, 1), (-0.1, 0.0, -1), (0.0, 0.0, 0)])  # fmt: skip
def test_a_faster_draft_is_the_better_one(acceptance: float, speed: float, sign: int) -> None:
    noise = np.linspace(-0.02, 0.02, 20)
    found = Against(of_differences(acceptance + noise), of_ratios(np.exp(speed + noise), np.ones(20)))
    assert (found.sign, found.better, found.worse) == (sign, sign > 0, sign < 0)
    assert str(found).startswith("The draft is " + {1: "better", -1: "worse", 0: "not measurably"}[sign])


def test_a_second_run_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path / "rows.jsonl", {"what": "run"})
    with pytest.raises(DraftsmithError, match="another run is writing to it"):
        Journal(tmp_path / "rows.jsonl", {"what": "run"})
    first.close()
    Journal(tmp_path / "rows.jsonl", {"what": "run"}).close()


def test_the_work_of_plain_decoding_is_that_of_its_positions(decoder: Decoder) -> None:
    prompt = decoder.prompt_ids("count my work")
    stats = decoder.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True), "ar").stats
    c = decoder.target.config
    layer = c.hidden_size * 64 * 2 + c.hidden_size * 32 * 2 + 3 * c.hidden_size * c.intermediate_size
    expected = 2 * (layer * c.num_hidden_layers * (len(prompt) + 4) + c.vocab_size * c.hidden_size * 5)
    assert work_of(decoder, stats).target == expected
    assert work_of(decoder, stats).draft == 0
    drafted = decoder.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True), "fixed(2)").stats
    assert work_of(decoder, drafted).draft > 0


def test_ablations_fill_one_table(tmp_path: Path, bundle_folder: Path) -> None:
    table = benchmark.run(load_eval_recipe(write_recipe(tmp_path, bundle_folder), ["tasks.prompts.count=2"]), True)
    text = table.read_text()
    for parts in benchmark.ABLATIONS.values():
        assert all(f"| {what} |" in text for what in parts)


def test_energy_is_told_where_the_machine_tells_it(tmp_path: Path) -> None:
    assert Energy(tmp_path).joules() is None
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (tmp_path / "intel-rapl:1").mkdir()
    (tmp_path / "intel-rapl:1/name").write_text("psys\n")  # the whole platform, that package included
    (tmp_path / "intel-rapl:1/energy_uj").write_text("1")
    (zone / "max_energy_range_uj").write_text("1000000000")
    (zone / "energy_uj").write_text("990000000")
    energy = Energy(tmp_path)
    (zone / "energy_uj").write_text("5000000")  # wrapped
    assert energy.joules() == pytest.approx(15.0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_shipped_comparison_loads(path: Path) -> None:
    recipe = load_eval_recipe(path)
    assert recipe.out.startswith("runs/")
    assert "ar" in recipe.methods


@pytest.mark.parametrize(("change", "message"), [
    ({"methds": ["ar"]}, "unknown key 'methds'; did you mean 'methods'"),
    ({"methods": ["goodput"]}, "methods must contain ar"),
    ({"methods": ["ar", "ar"]}, "named twice"),
    ({"methods": ["ar", "transformers"], "temperature": 1}, "transformers is measured greedy"),
    ({"tasks": {"gsm8": {}}}, "unknown task 'gsm8'; did you mean 'gsm8k'"),
    ({"tasks": {"gsm8k": {"cuont": 3}}}, "unknown key 'tasks.gsm8k.cuont'; did you mean 'count'"),
    ({"tasks": {}}, "at least 1 item"),
])  # fmt: skip
def test_a_mistake_in_a_comparison_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=re.escape(message)):
        load_eval_recipe(write_recipe(tmp_path, tmp_path, **change))


def test_a_misspelt_policy_is_named_before_anything_is_measured(tmp_path: Path, bundle_folder: Path) -> None:
    path = write_recipe(tmp_path, bundle_folder, methods=["ar", "papper"])
    with pytest.raises(DraftsmithError, match="unknown policy 'papper'; did you mean 'paper'"):
        benchmark.run(load_eval_recipe(path))
    assert not (tmp_path / "out/rows.jsonl").exists()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Journal(path, {"what": "run"}).close()
    damaged = path.read_bytes() + b"\xff{broken\n"
    path.write_bytes(damaged)
    with pytest.raises(DraftsmithError, match="rows.jsonl: damaged"):
        Journal(path, {"what": "run"})
    assert path.read_bytes() == damaged
