"""Corpora of prompts, chat templates with loss masks, and comparing vocabularies."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import END, make_tokenizer
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import assistant_mask, chat_ids, encode_prompts, prompt_ids
from draftsmith.data.io import write_jsonl
from draftsmith.data.text import Sample, corpus_hash, parse_row, read_samples, read_sources
from draftsmith.data.vocabulary import first_difference, tokenizer_hash, vocabulary

QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4 é €"}  # characters of two and three bytes
# Drops the reasoning of earlier turns, as templates of reasoning models do.
REWRITING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_rows_of_each_form(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.jsonl",
        {"messages": [QUESTION, {**ANSWER, "weight": 1}], "id": "m", "kind": "sql"},
        {"prompt": "2+2?"},
        {"text": "a document", "id": 7},
    )
    assert read_samples(path) == [
        Sample("m", "sql", messages=[QUESTION, ANSWER]),
        Sample("1", "text", messages=[QUESTION]),
        Sample("7", "text", text="a document"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"prompt": 3},
        {"text": None},
        {"question": "2+2?"},
        {"messages": []},
        {"messages": "2+2?"},
        {"messages": ["2+2?"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [QUESTION, {"content": "4"}]},
    ],
)
def test_a_row_that_is_no_prompt_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(DraftsmithError, match=r"a\.jsonl, row 2: "):
        read_samples(path)


def test_plain_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\nstill one\n\n\n\n  two  \n")
    assert [s.text for s in read_samples(path)] == ["one\nstill one", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_or_missing_corpus_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(DraftsmithError, match=f"{name}: no such file"):
        read_samples(path)
    path.write_text("\n\n\n")
    with pytest.raises(DraftsmithError, match=f"{name}: holds no prompts"):
        read_samples(path)


def test_the_corpus_hash_follows_content_and_order_only() -> None:
    a, b = Sample("1", "sql", messages=[QUESTION]), Sample("2", "sql", text="2+2?")
    assert corpus_hash([a, b]) == corpus_hash([Sample("x", "json", messages=[QUESTION]), Sample("y", "z", text="2+2?")])
    assert len({corpus_hash(s) for s in ([a, b], [b, a], [a], [a, a], [a, Sample("2", "sql", text="2+3?")])}) == 5


def test_chat_prompts_equal_the_template_with_its_generation_prompt(tokenizer: Any) -> None:
    messages = [QUESTION, ANSWER, QUESTION]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_ids(tokenizer, messages) == expected
    assert prompt_ids(tokenizer, Sample("0", "text", messages=messages)) == expected


def test_text_prompts_and_a_single_turn_without_a_template_are_the_raw_text() -> None:
    tokenizer = make_tokenizer()
    raw = tokenizer("2+2?").input_ids
    assert prompt_ids(tokenizer, Sample("0", "text", text="2+2?")) == raw
    tokenizer.chat_template = None
    assert chat_ids(tokenizer, [QUESTION]) == raw
    with pytest.raises(DraftsmithError, match="no chat template"):
        chat_ids(tokenizer, [QUESTION, ANSWER, QUESTION])


def test_messages_that_the_template_refuses_are_a_clear_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DraftsmithError, match="template refuses.*roles must alternate"):
        chat_ids(tokenizer, [QUESTION, QUESTION])


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, ANSWER],
        [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "still 4"}],
        [{"role": "system", "content": "be brief"}, QUESTION, ANSWER, QUESTION],
        [QUESTION, {"role": "assistant", "content": ""}],
    ],
    ids=["one turn", "two turns", "ends with the user", "empty answer"],
)
def test_the_mask_marks_exactly_the_assistants_tokens_and_their_end(
    messages: list[dict[str, str]], tokenizer: Any
) -> None:
    """The reference is built turn by turn, without rendering the whole conversation."""
    expected_ids: list[int] = []
    expected_mask: list[bool] = []
    for message in messages:
        head = tokenizer(f"<|start|>{message['role']}\n").input_ids
        body = [*tokenizer(message["content"]).input_ids, END]
        newline = tokenizer("\n").input_ids
        expected_ids += head + body + newline
        expected_mask += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False] * len(newline)
    assert assistant_mask(tokenizer, messages) == (expected_ids, expected_mask)


def test_a_conversation_without_the_assistant_has_an_all_false_mask(tokenizer: Any) -> None:
    ids, mask = assistant_mask(tokenizer, [QUESTION])
    assert len(ids) == len(mask)
    assert not any(mask)


def test_a_template_that_rewrites_earlier_turns_masks_the_row_with_a_warning() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REWRITING
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        ids, mask = assistant_mask(tokenizer, [QUESTION, thought, QUESTION, ANSWER])
    assert len(mask) == len(ids) > 0
    assert not any(mask)
    with warnings.catch_warnings():  # nothing was rewritten here
        warnings.simplefilter("error")
        assert any(assistant_mask(tokenizer, [QUESTION, thought])[1])


class Table:
    """A tokenizer reduced to its vocabulary, which is all that the comparison reads."""

    def __init__(self, *tokens: str | None) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if token is not None}


def test_a_padded_vocabulary_agrees_either_way() -> None:
    short, padded = Table("a", "b", None, "d"), Table("a", "b", None, "d", "<extra_0>", "<extra_1>")
    assert first_difference(vocabulary(short), vocabulary(padded)) is None
    assert first_difference(vocabulary(padded), vocabulary(short)) is None
    assert first_difference(vocabulary(short), vocabulary(Table("a", "b", "<unused>", "d"))) is None
    assert tokenizer_hash(short) != tokenizer_hash(padded)


def test_a_permuted_vocabulary_is_refused_by_its_first_difference() -> None:
    ours, theirs = Table("a", "b", "c", "d"), Table("a", "c", "b", "d")
    assert first_difference(vocabulary(ours), vocabulary(theirs)) == "id 1 is 'b' in one and 'c' in the other"
    assert tokenizer_hash(ours) != tokenizer_hash(theirs)


def test_the_tokenizer_hash_is_of_the_content(tokenizer: Any) -> None:
    again = make_tokenizer()
    assert tokenizer_hash(tokenizer) == tokenizer_hash(again)
    assert first_difference(vocabulary(tokenizer), vocabulary(again)) is None
    again.add_tokens(["<|extra|>"])
    assert tokenizer_hash(tokenizer) != tokenizer_hash(again)
    assert first_difference(vocabulary(tokenizer), vocabulary(again)) is None


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Figures are paired by id: a second prompt of the same name would be judged against the first one's text."""
    write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    with pytest.raises(DraftsmithError, match="row 2: the id 'a' occurs twice"):
        read_samples(tmp_path / "p.jsonl")


def test_a_file_that_only_looks_like_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(DraftsmithError, match="not .json"):
        read_samples(tmp_path / "p.json")


def test_a_conversation_is_prompted_up_to_its_last_answer(tokenizer: Any) -> None:
    whole = Sample("1", "chat", messages=[QUESTION, ANSWER])
    assert prompt_ids(tokenizer, whole) == prompt_ids(tokenizer, Sample("1", "chat", messages=[QUESTION]))


def test_unusable_prompts_are_left_out_and_none_left_is_an_error(tokenizer: Any) -> None:
    samples = [Sample(str(i), "text", text=t) for i, t in enumerate(["", "short", "x" * 50])]
    kept, ids = encode_prompts(tokenizer, samples, 10)
    assert [s.id for s in kept] == ["1"]
    assert [len(i) for i in ids] == [5]
    with pytest.raises(DraftsmithError, match="none of 3 prompts has 1 to 2 tokens"):
        encode_prompts(tokenizer, samples, 2)


# --- several files


def questions(path: Path, name: str, count: int) -> str:
    write_jsonl(path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(count)])
    return str(path / f"{name}.jsonl")


def test_files_are_mixed_in_their_shares_and_a_larger_count_continues_a_smaller_one(tmp_path: Path) -> None:
    shares = {questions(tmp_path, "a", 50): 2.0, questions(tmp_path, "b", 50): 1.0}
    found = read_sources(shares, None, seed=3, count=30)
    ids = [s.id for s in found]
    assert len(set(ids)) == 30
    assert sum(i.startswith("a/") for i in ids) == 20
    assert sum(i.startswith("a/") for i in ids[:9]) == 6, "mixed from the start"
    assert ids != sorted(ids), "drawn, not the first of each file"
    assert [s.id for s in read_sources(shares, None, 3, 40)][:30] == ids
    assert [s.id for s in read_sources(shares, None, 4, 30)] != ids


def test_a_file_that_is_used_up_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    shares = {questions(tmp_path, "a", 3): 1.0, questions(tmp_path, "b", 9): 1.0}
    found = read_sources(shares, None, 0, 10)
    assert sum(s.id.startswith("a/") for s in found) == 3
    assert len(found) == 10
    assert len(read_sources(shares, None, 0, 99)) == 12


def test_ids_of_one_file_stay_as_they_are(tmp_path: Path) -> None:
    assert {s.id for s in read_sources({questions(tmp_path, "a", 3): 1.0}, None, 0, 3)} == {"0", "1", "2"}


def test_a_question_with_its_tables_reads_like_one_with_a_schema() -> None:
    tables = "CREATE TABLE t (a TEXT);"
    own = parse_row({"question": "How many?", "context": tables}, "here", 0)
    named = parse_row({"question": "How many?", "db_id": "d"}, "here", 0, {"d": tables})
    assert own.messages == named.messages == [
        {"role": "user", "content": f"{tables}\n\nWrite one SQL query, nothing else: How many?"}]
    assert own.kind == "sql"


CONVERSATION = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def test_sharegpt_conversations_become_messages() -> None:
    turns = [{"from": "system", "value": "Be brief."}, *CONVERSATION]
    sample = parse_row({"id": "x", "conversations": turns}, "here", 0)
    assert [(m["role"], m["content"]) for m in sample.messages or []] == [
        ("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")]


def test_sharegpt_conversations_that_begin_with_an_answer_lose_it() -> None:
    odd = [{"from": "gpt", "value": "Welcome"}, *CONVERSATION]
    assert parse_row({"conversations": odd}, "here", 0).messages == parse_row(
        {"conversations": CONVERSATION}, "here", 0).messages
    assert parse_row({"conversations": odd[:1]}, "here", 0).messages == []
    assert prompt_ids(make_tokenizer(), parse_row({"conversations": []}, "here", 0)) == []


@pytest.mark.parametrize(("turns", "message"), [
    ("hello", "must be a list"), ([{"from": "human"}], "must be a list"),
    ([{"from": "parrot", "value": "hi"}], "unknown speaker 'parrot'; known: human"),
])
def test_conversations_that_cannot_be_read_are_named(turns: Any, message: str) -> None:
    with pytest.raises(DraftsmithError, match=f"^row 7: .*{message}"):
        parse_row({"conversations": turns}, "row 7", 0)


def test_ultrachat_and_sharegpt_merge_into_one_set_read_from_parquet_and_jsonl(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    chats = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}] for i in range(6)]
    table = pa.table({"prompt_id": [str(i) for i in range(6)], "messages": chats})
    pq.write_table(table, tmp_path / "ultrachat.parquet")
    write_jsonl(tmp_path / "sharegpt.jsonl", [{"id": i, "conversations": CONVERSATION} for i in range(6)])
    shares = {str(tmp_path / "ultrachat.parquet"): 1.0, str(tmp_path / "sharegpt.jsonl"): 1.0}
    found = read_sources(shares, None, 0, 12)
    assert sorted(s.id.split("/")[0] for s in found) == ["sharegpt"] * 6 + ["ultrachat"] * 6
    assert {m["role"] for s in found for m in s.messages or []} == {"user", "assistant"}


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DraftsmithError, match=r"x\.parquet: not a readable Parquet file"):
        read_samples(tmp_path / "x.parquet")
    with pytest.raises(DraftsmithError, match=r"absent\.parquet: no such file"):
        read_samples(tmp_path / "absent.parquet")


def test_a_dataset_of_the_hub_is_streamed_and_its_absence_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub stands in as a folder, which `datasets` reads by the same call; without one there is no network here."""
    write_jsonl(tmp_path / "corpus" / "train.jsonl", [{"text": f"document {i}"} for i in range(30)])
    found = read_sources({f"hf:{tmp_path / 'corpus'}": 1.0}, None, 3, 10)
    assert len({s.text for s in found}) == 10
    assert [s.text for s in found] != [f"document {i}" for i in range(10)], "drawn, not the first"
    assert read_sources({f"hf:{tmp_path / 'corpus'}@train": 1.0}, None, 3, 10) == found
    with pytest.raises(DraftsmithError, match="^hf:nobody/nothing: cannot be read"):
        read_sources({"hf:nobody/nothing": 1.0}, None, 0, 1)
