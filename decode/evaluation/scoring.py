"""How good an answer is: a number from 0 to 1, None where an answer cannot be judged without a judge."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftsmith.data import DraftsmithError

from .sandbox import Limits, runs_through

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
SQL_SECONDS, SQL_ROWS, SQL_VALUE = 5.0, 100_000, 10_000_000  # of a query; bytes of a value


def needed(package: str) -> DraftsmithError:
    return DraftsmithError(f"this task needs the package {package}: pip install 'draftsmith[eval]'")


def fenced(text: str) -> str:
    """What stands in the first fenced block, else all of the text."""
    found = re.search(r"```[a-zA-Z]*\s*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return found[1] if found else text


def last_number(text: str) -> Decimal | None:
    """The number after '####', as GSM8K's answers have it, else the last one in the text."""
    marked = text.rsplit("####", 1)
    found = NUMBER.findall(marked[1]) if len(marked) > 1 else []
    found = found[:1] or NUMBER.findall(text)[-1:]
    try:
        return Decimal(found[0].replace(",", "").rstrip(".")) if found else None
    except InvalidOperation:
        return None


def exact_number(answer: str, reference: str) -> float:
    """1 where the answer's number is the reference's."""
    right = last_number(reference)
    return float(right is not None and last_number(answer) == right)


def passes_tests(prompt: str, completion: str, test: str, entry_point: str, limits: Limits | None = None) -> float:
    """1 where a completed function passes its tests (HumanEval's pass@1), run in the sandbox."""
    return float(runs_through(f"{prompt}{completion}\n{test}\ncheck({entry_point})\n", limits))


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L, its F-measure, stemmed, sentences on lines of their own (rougeLsum)."""
    return float(_rouge().score(reference, answer)["rougeLsum"].fmeasure)


@lru_cache(maxsize=1)
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise needed("rouge-score") from error
    return RougeScorer(["rougeLsum"], use_stemmer=True)


def valid_json(answer: str, schema: dict[str, Any]) -> float:
    """1 where the answer, or its first fenced block, is JSON that the schema accepts."""
    try:
        import jsonschema
    except ImportError as error:
        raise needed("jsonschema") from error
    try:
        value = json.loads(fenced(answer).strip())
    except (ValueError, RecursionError):
        return 0.0
    return float(jsonschema.Draft202012Validator(schema).is_valid(value))


def numbers_kept(answer: str, table: str) -> float | None:
    """The share of the answer's numbers that stand in the table; None where it names none."""
    known = {n.replace(",", "").rstrip(".") for n in NUMBER.findall(table)}
    told = [n.replace(",", "").rstrip(".") for n in NUMBER.findall(answer)]
    return sum(n in known for n in told) / len(told) if told else None


def statements(answer: str) -> list[str]:
    """What may be the SQL in an answer: of its first fenced block, from each SELECT or WITH to the next semicolon."""
    text = fenced(answer)
    starts = [found.start() for found in re.finditer(r"\b(?:select|with)\b", text, re.IGNORECASE)]
    return [text[at:].split(";")[0].strip() for at in starts]


def same_result(answer: str, gold: str, database: sqlite3.Connection, invented: bool = False) -> float | None:
    """1 where both queries return the same rows; in the same order where the gold query asks for one.

    None where the gold query fails, or finds nothing in `invented` rows: then nothing is known.
    """
    right = run_query(database, gold)
    if right is None or (invented and not right):
        return None
    found = next((rows for s in statements(answer) if (rows := run_query(database, s)) is not None), None)
    if found is None:
        return 0.0
    if re.search(r"\border\s+by\b", gold, re.IGNORECASE):
        return float(right == found)
    return float(Counter(right) == Counter(found))


def run_query(database: sqlite3.Connection, query: str) -> list[tuple[Any, ...]] | None:
    """The rows of one reading query, values rounded so that sums in another order agree; None where it is not one,
    fails, or takes too long."""
    reads = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
    end = time.monotonic() + SQL_SECONDS
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY)
    database.set_progress_handler(lambda: int(time.monotonic() > end), 1000)
    if hasattr(database, "setlimit"):  # Python 3.11 and later
        database.setlimit(getattr(sqlite3, "SQLITE_LIMIT_LENGTH"), SQL_VALUE)  # noqa: B009 (absent before)
    try:
        rows = database.execute(query).fetchmany(SQL_ROWS)
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError):
        return None
    finally:
        database.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
        database.set_progress_handler(None, 0)
    return [tuple(_plain(value) for value in row) for row in rows]


def _plain(value: Any) -> Any:
    return round(float(value), 6) if isinstance(value, (int, float)) else value


ROWS = 12  # invented ones a table
WORDS = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Haven")


@lru_cache(maxsize=32)
def example_database(schema: str, literals: tuple[str, ...] = ()) -> sqlite3.Connection:
    """A database with a schema's tables and a few invented rows, the same every time.

    `literals` (constants of the queries that will be compared) are among the values of every column, so that a
    condition on one selects something. Where the real databases are at hand, use those: on invented rows a wrong
    query may still return what the right one does.
    """
    database = sqlite3.connect(":memory:")
    database.executescript(schema)
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    database.execute("PRAGMA foreign_keys = OFF")
    texts = [*(x for x in literals if not _is_number(x)), *WORDS]
    numbers = [*(float(x) for x in literals if _is_number(x)), *range(1, 9)]
    columns = {table: database.execute(f"PRAGMA table_info({_quoted(table)})").fetchall() for table in tables}
    keys = {(table.lower(), found[3].lower()): (found[2].lower(), (found[4] or "").lower()) for table in tables
            for found in database.execute(f"PRAGMA foreign_key_list({_quoted(table)})").fetchall()}
    places = {(table.lower(), column[1].lower()): (t, c, column) for t, table in enumerate(tables)
              for c, column in enumerate(columns[table])}

    def value(place: tuple[str, str], row: int, depth: int = 0) -> Any:
        """Of a column's row; a foreign key's is one of the column that it names."""
        t, c, (_, _, kind, _, _, key) = places[place]
        if keys.get(place) in places and depth < 8:
            return value(keys[place], (5 * row + c) % ROWS, depth + 1)
        pool: list[Any] = texts if "CHAR" in kind.upper() or "TEXT" in kind.upper() else numbers
        if key:
            return row + 1 if pool is numbers else pool[row] if row < len(pool) else f"Row {row}"
        return pool[(row * (c + 2) + t + row * row // 3) % len(pool)]

    for table in tables:
        names = [(table.lower(), column[1].lower()) for column in columns[table]]
        marks = ", ".join("?" * len(names))
        database.executemany(f"INSERT OR IGNORE INTO {_quoted(table)} VALUES ({marks})",
                             [[value(name, row) for name in names] for row in range(ROWS)])
    database.commit()
    return database


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def literals_of(query: str) -> tuple[str, ...]:
    """The constants of a query, without quotes and wildcards."""
    found = [a or b for a, b in re.findall(r"'([^']*)'|\"([^\"]*)\"", query)]
    return tuple(dict.fromkeys([*(x.strip("%") for x in found if x.strip("%")),
                                *re.findall(r"(?<![\w.'\"])\d+(?:\.\d+)?(?![\w.'\"])", query)]))


@lru_cache(maxsize=8)
def real_database(path: Path) -> sqlite3.Connection:
    """A SQLite file, opened for reading."""
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        database.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as error:
        raise DraftsmithError(f"{path}: not a readable SQLite database ({error})") from error
    database.text_factory = lambda data: data.decode(errors="replace")
    return database
