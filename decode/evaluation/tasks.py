"""Tasks: where prompts come from, how they are put, where an answer ends, and how it is scored.

A task is one object; `TASKS` knows them by name. A source is a folder, a file, or a dataset of the hub.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from draftsmith.data import DraftsmithError
from draftsmith.data.io import nearest, read_json, read_jsonl
from draftsmith.data.text import HUB, read_parquet, read_samples, stream_hub

from . import scoring

SHOTS = 5


@dataclass(frozen=True)
class Item:
    """One prompt: user turns of a chat, with what the system says before them, or a raw text to go on from.
    `reference`: what its scorer needs."""

    id: str
    kind: str
    turns: tuple[str, ...] = ()
    text: str | None = None
    reference: Any = None
    system: str | None = None


@dataclass(frozen=True)
class Source:
    """Where a task's rows are: `hf:NAME[:CONFIGURATION]`, a folder of files, or one file."""

    place: str

    def rows(self, split: str, *names: str) -> list[dict[str, Any]]:
        """Rows of a split: of the hub's, in its own order; of the first of `names`, SPLIT.jsonl and SPLIT*.parquet that
        is in a folder; or of the one file."""
        if self.place.startswith(HUB):
            return list(stream_hub(f"{self.place.removeprefix(HUB)}@{split}", None))
        path = Path(self.place).expanduser()
        if path.is_dir():
            wanted = [path / name for name in (*names, f"{split}.jsonl")]
            shards = sorted([*path.glob(f"{split}*.parquet"), *path.glob(f"*/{split}*.parquet")])
            path = next((p for p in wanted if p.is_file()), path)
            if path.is_dir():
                if not shards:
                    raise DraftsmithError(f"{path}: has none of {', '.join(p.name for p in wanted)}, {split}*.parquet")
                return [row for shard in shards for row in read_parquet(shard)]
        return read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)

    def beside(self, name: str) -> Path:
        """A file or folder of that name in the source's folder."""
        path = Path(self.place).expanduser()
        return (path if path.is_dir() else path.parent) / name


@dataclass(frozen=True)
class Task:
    """`read` gives its items; `score` judges the last turn's answer. `stop` ends one; `hub`: the task's dataset;
    `needs`: packages that its scorer imports."""

    name: str
    read: Callable[[Source], list[Item]]
    score: Callable[[Item, str], float | None]
    metric: str
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    hub: str | None = None
    needs: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `DraftsmithError` where a package is missing: before an hour's work, not after."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                raise scoring.needed(package)


def cell(row: dict[str, Any], key: str, where: str) -> Any:
    if key not in row:
        raise DraftsmithError(f"{where}: a row without '{key}'; it has {sorted(row)}")
    return row[key]


def gsm8k(source: Source) -> list[Item]:
    """5-shot, as text: the shots are the first training questions with their answers."""
    path = Path(source.place).expanduser()
    # One file holds the test questions: those must not be the shots.
    train = Source(str(source.beside("train.jsonl"))) if path.is_file() else source
    shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in train.rows("train")[:SHOTS])
    return [Item(f"gsm8k/{i}", "maths", text=f"{shots}Question: {cell(r, 'question', 'gsm8k')}\nAnswer:",
                 reference=cell(r, "answer", "gsm8k")) for i, r in enumerate(source.rows("test"))]


def humaneval(source: Source) -> list[Item]:
    """0-shot: the function's head and docstring, to be gone on from."""
    return [Item(str(cell(r, "task_id", "humaneval")), "code", text=cell(r, "prompt", "humaneval"),
                 reference={k: cell(r, k, "humaneval") for k in ("prompt", "test", "entry_point")})
            for r in source.rows("test", "HumanEval.jsonl")]


def cnndm(source: Source) -> list[Item]:
    rows = source.rows("test", "cnndm_specbench_80.jsonl")
    return [Item(f"cnndm/{r.get('id', i)}", "summary",
                 (f"Summarize this article in three sentences.\n\n{cell(r, 'article', 'cnndm')}",),
                 reference=cell(r, "highlights", "cnndm")) for i, r in enumerate(rows)]


def mt_bench(source: Source) -> list[Item]:
    rows = source.rows("train", "question.jsonl")
    return [Item(f"mt-bench/{r.get('question_id', r.get('prompt_id', i))}", "chat",
                 tuple(r["turns"] if "turns" in r else cell(r, "prompt", "mt-bench"))) for i, r in enumerate(rows)]


def spec_bench(source: Source) -> list[Item]:
    """The Spec-Bench file; MT-Bench's categories count as one, as there."""
    six = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return [Item(f"spec-bench/{cell(r, 'question_id', 'spec-bench')}",
                 r["category"] if r.get("category") in six else "multi-turn", tuple(cell(r, "turns", "spec-bench")))
            for r in source.rows("test", "question.jsonl")]


def text_to_sql(source: Source) -> list[Item]:
    """Spider's development questions with their schema; `database/ID/ID.sqlite` beside them is used where it is."""
    schemas, items = read_json(source.beside("schemas.json")), []
    for i, row in enumerate(source.rows("dev")):
        name = cell(row, "db_id", "sql")
        if name not in schemas:
            raise DraftsmithError(f"{source.beside('schemas.json')}: no schema for database '{name}'")
        file = source.beside("database") / name / f"{name}.sqlite"
        items.append(Item(f"sql/{i}", "sql",
                          (f"{schemas[name]}\n\nWrite one SQL query, nothing else: {cell(row, 'question', 'sql')}",),
                          reference={"query": cell(row, "query", "sql"), "schema": schemas[name],
                                     "file": str(file) if file.is_file() else None}))
    return items


def json_extraction(source: Source) -> list[Item]:
    """Dialogues and the slots to fill from them, as a JSON schema (Schema-Guided Dialogue); or a schema alone, of
    which an example is asked."""
    items = []
    for i, row in enumerate(source.rows("test", "sgd_state_test.jsonl")):
        if "slots" in row:
            schema = slots_schema(row["slots"])
            ask = ("Extract what the user wants from this dialogue as JSON that fits the schema. Answer with the JSON "
                   f"alone.\n\nSchema: {json.dumps(schema)}\n\nDialogue:\n{cell(row, 'dialogue', 'json')}")
        else:
            schema = cell(row, "schema", "json")
            ask = f"Write an example of JSON that fits this schema. Answer with the JSON alone.\n\n{json.dumps(schema)}"
        items.append(Item(f"json/{row.get('dialogue_id', row.get('name', i))}", "json", (ask,), reference=schema))
    return items


def slots_schema(services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A JSON schema of the slots of some services, all of them optional text."""
    return {"type": "object", "additionalProperties": False, "properties": {
        service: {"type": "object", "additionalProperties": False, "properties": {
            slot: {"type": "string", "description": str(facts.get("description", ""))}
            for slot, facts in slots.items()}} for service, slots in services.items()}}


REGIONS, MEASURES = ("North", "South", "East", "West"), ("Revenue", "Orders", "Returns", "Visitors", "Margin")


def kpi(source: Source) -> list[Item]:
    """Dashboards of invented figures, the same every time; the source is not read."""
    items = []
    for i in range(200):
        random = np.random.default_rng([20, i])
        chosen = random.permutation(MEASURES)[: random.integers(2, 5)]
        months = [f"2024-{m:02d}" for m in range(1, 1 + random.integers(3, 7))]
        lines = ["| region | month | " + " | ".join(chosen) + " |", "|---" * (2 + len(chosen)) + "|"]
        for region in REGIONS[: random.integers(2, 5)]:
            lines += [f"| {region} | {month} | " + " | ".join(str(x) for x in random.integers(20, 9000, len(chosen)))
                      + " |" for month in months]
        table = "\n".join(lines)
        items.append(Item(f"kpi/{i}", "kpi", (f"Summarize this dashboard for a manager in four sentences. Name the "
                                              f"figures that matter.\n\n{table}",), reference=table))
    return items


def any_prompts(source: Source) -> list[Item]:
    """A JSONL, Parquet or text file of prompts, as training reads them; the assistant's turns are answered anew."""
    items = []
    for sample in read_samples(source.place):
        said = sample.messages or []
        turns = tuple(m["content"] for m in said if m["role"] == "user")
        system = next((m["content"] for m in said if m["role"] == "system"), None)
        items.append(Item(sample.id, sample.kind, turns, sample.text, system=system))
    return items


def score_code(item: Item, answer: str) -> float:
    r = item.reference
    return scoring.passes_tests(r["prompt"], answer, r["test"], r["entry_point"])


def score_sql(item: Item, answer: str) -> float | None:
    r = item.reference
    if r["file"]:
        return scoring.same_result(answer, r["query"], scoring.real_database(Path(r["file"])))
    database = scoring.example_database(r["schema"], scoring.literals_of(r["query"]))
    return scoring.same_result(answer, r["query"], database, invented=True)


def unscored(item: Item, answer: str) -> None:
    return None


TASKS = {task.name: task for task in (
    Task("gsm8k", gsm8k, lambda item, answer: scoring.exact_number(answer, item.reference), "exact match", 256,
         ("\n\nQuestion:", "\nQuestion:"), "openai/gsm8k:main"),
    Task("humaneval", humaneval, score_code, "pass@1", 256,
         ("\nclass ", "\ndef ", "\n#", "\n@", "\nprint", "\nif ", "\n```", "\nassert "),
         "openai/openai_humaneval"),
    Task("cnndm", cnndm, lambda item, answer: scoring.rouge_l(answer, item.reference), "ROUGE-L", 128, (),
         "abisee/cnn_dailymail:3.0.0", ("rouge_score",)),
    Task("mt-bench", mt_bench, unscored, "", 128, (), "HuggingFaceH4/mt_bench_prompts"),
    Task("sql", text_to_sql, score_sql, "execution match", 128, (), None),
    Task("json", json_extraction, lambda item, answer: scoring.valid_json(answer, item.reference), "valid JSON", 128,
         (), None, ("jsonschema",)),
    Task("kpi", kpi, lambda item, answer: scoring.numbers_kept(answer, item.reference), "numbers kept", 128, (),
         None),
    Task("spec-bench", spec_bench, unscored, "", 128, (), None),
    Task("prompts", any_prompts, unscored, "", 128, (), None),
)}


def find_task(name: str) -> Task:
    """A task by name. Raises `DraftsmithError` with the nearest one."""
    if name not in TASKS:
        raise DraftsmithError(f"unknown task '{name}'{nearest(name, list(TASKS))}")
    return TASKS[name]


@dataclass
class Chosen:
    """A task's items for a run: those that are measured, and others, on which lengths are tuned."""

    task: Task
    items: list[Item]
    tuning: list[Item] = field(default_factory=list)


def choose(task: Task, source: str | None, count: int, tuning: int, seed: int) -> Chosen:
    """`count` items in an order drawn from the seed, a larger count going on from a smaller one; and `tuning` others,
    from the end."""
    place = source or (f"{HUB}{task.hub}" if task.hub else "")
    if not place and task.read is not kpi:
        raise DraftsmithError(f"task '{task.name}': say where it is (tasks.{task.name}.source)")
    items = task.read(Source(place))
    if len(items) < 2:
        raise DraftsmithError(f"task '{task.name}': {place} holds {len(items)} prompts; 2 are needed")
    order = np.random.default_rng([seed, 5]).permutation(len(items))
    picked = [items[i] for i in order]
    tuning = min(tuning, len(picked) // 4)
    return Chosen(task, picked[: min(count, len(picked) - tuning)], picked[len(picked) - tuning :])
