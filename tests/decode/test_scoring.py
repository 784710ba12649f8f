"""Scorers on answers that models give, and a sandbox that nothing in a candidate harms."""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path

import pytest
from draftsmith.data import DraftsmithError
from draftsmith.data.io import write_json, write_jsonl
from draftsmith.decode.evaluation import scoring
from draftsmith.decode.evaluation.sandbox import Limits, runs_through
from draftsmith.decode.evaluation.tasks import TASKS, Source, choose, find_task, score_sql, text_to_sql

QUICK = Limits(seconds=2.0, memory=1 << 29)


@pytest.mark.parametrize(("source", "fine"), [
    ("assert 1 + 1 == 2", True),
    ("from collections import namedtuple\nfrom dataclasses import dataclass\nfrom typing import *\nimport math, re\n"
     "P = namedtuple('P', 'x y')\nassert P(1, 2).x == 1", True),
    ("print('x' * 10**8)", True),
    ("assert 1 == 2", False),
    ("import sys; sys.exit(0)", False),
    ("import os; os._exit(0)", False),
    ("raise SystemExit", False),
    ("def f(:", False),
    ("while True: pass", False),
    ("import time; time.sleep(60)", False),
    ("x = [0] * 10**10", False),
    ("x = 'a'\nwhile True: x += x", False),
    ("import os\nwhile True: os.fork()", False),
    ("import subprocess; subprocess.run(['true'])", False),
    ("import os; os.system('true')", False),
    ("import socket; socket.socket()", False),
    ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", False),
    ("import ctypes; ctypes.CDLL(None)", False),
    ("import os; os.kill(os.getppid(), 9)", False),
    ("import threading\nfor _ in range(50): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
     False),
    ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); x = [0] * 10**10", False),
])  # fmt: skip
def test_a_candidate_passes_or_fails_and_nothing_else_happens(source: str, fine: bool) -> None:
    started = time.monotonic()
    assert runs_through(source, QUICK) == fine
    assert time.monotonic() - started < 20
    assert runs_through("assert True", QUICK)


@pytest.mark.parametrize("act", ["open({path!r}, 'w').write('x')", "import os; os.remove({path!r})",
                                 "import os; os.rename({path!r}, {path!r} + '2')",
                                 "import shutil; shutil.rmtree({folder!r})",
                                 "import pathlib; pathlib.Path({path!r}).write_text('x')",
                                 "import os; os.open({path!r}, os.O_WRONLY | os.O_TRUNC)"])
def test_a_candidate_changes_no_file(act: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    assert not runs_through(act.format(path=str(path), folder=str(tmp_path)), QUICK)
    assert path.read_text() == "mine"


def test_no_process_of_a_candidate_is_left() -> None:
    import psutil

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    assert not runs_through("while True: pass", QUICK)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(("text", "number"), [
    ("so she has 1,234 apples.", "1234"), ("It is $18.\n#### 18\n\nAnd 5 more", "18"), ("#### -3.50", "-3.50"),
    ("costs 2.50 and 3.", "3"), ("none", None), ("", None), ("a .5 share", ".5")])  # fmt: skip
def test_the_last_number_of_an_answer(text: str, number: str | None) -> None:
    assert scoring.last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("answer", "valid"), [
    ('{"a": "x"}', 1.0), ('```json\n{"a": "x"}\n```', 1.0), ('{"a": 1}', 0.0), ("{}", 0.0), ("no", 0.0), ("", 0.0),
    ("[" * 100_000, 0.0), ('Here: {"a": "x"}', 0.0)])  # fmt: skip
def test_json_that_fits_its_schema(answer: str, valid: float) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert scoring.valid_json(answer, schema) == valid


SCHEMA = "CREATE TABLE singer (\n  id NUMBER PRIMARY KEY,\n  name TEXT,\n  age NUMBER\n);\n"


@pytest.mark.parametrize(("answer", "right"), [
    ("SELECT name FROM singer WHERE age > 3", 1.0),
    ("```sql\nselect name from singer where age>3;\n```", 1.0),
    ("The query is: SELECT name FROM singer WHERE age > 3; it lists names.", 1.0),
    ("SELECT name FROM singer WHERE age > 3 ORDER BY name", 1.0),
    ("SELECT name FROM singer", 0.0),
    ("SELECT nothing FROM singer", 0.0),
    ("", 0.0),
    ("SELECT name FROM singer WHERE age > 3 UNION SELECT name FROM singer WHERE age > 3", 0.0),
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n", 0.0),
    ("SELECT zeroblob(2000000000)", 0.0),
])  # fmt: skip
def test_queries_are_compared_by_what_they_return(answer: str, right: float,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SQL_SECONDS", 0.5)
    gold = "SELECT name FROM singer WHERE age > 3"
    assert scoring.same_result(answer, gold, scoring.example_database(SCHEMA, ("3",))) == right


def test_an_order_counts_only_where_it_is_asked_for() -> None:
    database = scoring.example_database(SCHEMA)
    up, down = "SELECT name FROM singer ORDER BY id", "SELECT name FROM singer ORDER BY id DESC"
    assert scoring.same_result(down, up, database) == 0.0
    assert scoring.same_result(down, "SELECT name FROM singer", database) == 1.0


@pytest.mark.parametrize("query", ["DROP TABLE singer", "DELETE FROM singer", "PRAGMA user_version = 3",
                                   "ATTACH DATABASE '/tmp/other' AS o", "INSERT INTO singer VALUES (99, 'x', 1)"])
def test_a_query_changes_nothing(query: str) -> None:
    database = scoring.example_database(SCHEMA)
    before = scoring.run_query(database, "SELECT * FROM singer")
    assert before
    assert scoring.run_query(database, query) is None
    assert scoring.run_query(database, "SELECT * FROM singer") == before


def test_conditions_on_a_querys_constants_select_something() -> None:
    gold = "SELECT age FROM singer WHERE name = 'Joe Sharp' OR age = 41"
    assert scoring.literals_of(gold) == ("Joe Sharp", "41")
    assert scoring.run_query(scoring.example_database(SCHEMA, scoring.literals_of(gold)), gold)


def test_where_nothing_is_known_there_is_no_score() -> None:
    database = scoring.example_database(SCHEMA)
    nothing = "SELECT name FROM singer WHERE age > 1000"
    assert scoring.same_result("SELECT 1", nothing, database, invented=True) is None
    assert scoring.same_result("SELECT 1", nothing, database) == 0.0
    assert scoring.same_result("SELECT 1", "SELECT broken FROM nowhere", database) is None


def test_joins_over_invented_rows_find_something() -> None:
    schema = SCHEMA + ("CREATE TABLE song (title TEXT, singer_id NUMBER, FOREIGN KEY (singer_id) REFERENCES singer(id))"
                       ";")
    gold = "SELECT count(*), name FROM song JOIN singer ON song.singer_id = singer.id GROUP BY name"
    assert scoring.run_query(scoring.example_database(schema), gold)


def test_rouge_and_numbers() -> None:
    assert scoring.rouge_l("the cat sat", "the cat sat") == 1.0
    assert scoring.rouge_l("dogs", "the cat sat") == 0.0
    assert scoring.numbers_kept("Revenue was 1,200 and 7.", "| 1200 | 9 |") == 0.5
    assert scoring.numbers_kept("No figures.", "| 1200 |") is None


def test_spider_uses_real_databases_where_they_are(tmp_path: Path) -> None:
    import sqlite3

    write_jsonl(tmp_path / "dev.jsonl", [{"db_id": "music", "question": "How many?", "query": "SELECT count(*) FROM "
                                          "singer"}])
    write_json(tmp_path / "schemas.json", {"music": SCHEMA})
    (made_up,) = text_to_sql(Source(str(tmp_path)))
    assert score_sql(made_up, "SELECT 12") == 1.0  # of twelve invented rows
    file = tmp_path / "database/music/music.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as database:
        database.executescript(SCHEMA + "INSERT INTO singer VALUES (1, 'a', 2);")
    (real,) = text_to_sql(Source(str(tmp_path)))
    assert score_sql(real, "SELECT 12") == 0.0
    assert score_sql(real, "SELECT 1") == 1.0


def test_a_count_goes_on_from_a_smaller_one_and_tuning_prompts_stay_apart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), "prompt": f"p {i}"} for i in range(20)])
    few, more, all_ = (choose(TASKS["prompts"], str(tmp_path / "p.jsonl"), n, 3, 0) for n in (4, 9, 99))
    assert few.items == more.items[:4]
    assert few.tuning == more.tuning == all_.tuning
    assert len(all_.items) == 17
    assert not set(all_.items) & set(all_.tuning)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="unknown task 'gsm8'; did you mean 'gsm8k'"):
        find_task("gsm8")
    with pytest.raises(DraftsmithError, match="say where it is"):
        choose(TASKS["sql"], None, 4, 1, 0)
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}])
    with pytest.raises(DraftsmithError, match="holds 1 prompts; 2 are needed"):
        choose(TASKS["prompts"], str(tmp_path / "p.jsonl"), 4, 1, 0)
    with pytest.raises(DraftsmithError, match=r"has none of HumanEval.jsonl, test.jsonl, test\*.parquet"):
        choose(TASKS["humaneval"], str(tmp_path), 4, 1, 0)
    write_jsonl(tmp_path / "test.jsonl", [{"wrong": 1}])
    write_jsonl(tmp_path / "train.jsonl", [])
    with pytest.raises(DraftsmithError, match="gsm8k: a row without 'question'; it has"):
        choose(TASKS["gsm8k"], str(tmp_path), 4, 1, 0)
