"""The server as OpenAI's own client sees it, over a socket."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import END, assemble, make_tokenizer, save_target
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.serving.answers import TokenTexts
from prometheus_client.parser import text_string_to_metric_families
from serving import NAME, Server, serving

MESSAGES: list[Any] = [{"role": "user", "content": "Hello world"}]
PROMPT = "SELECT a FROM b"


@pytest.fixture(scope="module")
def decoder(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return assemble(printable, tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="module")
def server(decoder: Decoder) -> Iterator[Server]:
    with serving(decoder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def answer(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 20, **options})


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 20, **options})


def test_a_completion_is_the_decoders(client: openai.OpenAI, decoder: Decoder) -> None:
    found, expected = answer(client), decoder.generate(PROMPT, SamplingParams(max_tokens=20), "ar")
    [choice] = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), len(expected.token_ids))
    assert found.object == "text_completion"
    assert not (choice.model_extra or {}).get("draftsmith")


def test_a_chat_is_the_decoders(client: openai.OpenAI, decoder: Decoder) -> None:
    found, expected = chat(client), decoder.generate(MESSAGES, SamplingParams(max_tokens=20), "ar")
    [choice] = found.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert found.object == "chat.completion"
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert chat(client, messages=[{"role": "user", "content": parts}]).choices[0].message.content == expected.text


def test_without_a_limit_a_chat_may_fill_the_context(decoder: Decoder) -> None:
    with serving(decoder, context=64) as small:
        found = chat(small.client(), max_tokens=openai.omit, extra_body={"ignore_eos": True})
        assert found.usage.total_tokens == 64
        assert found.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="context is 64 tokens"):
            answer(small.client(), max_tokens=60)


@pytest.mark.parametrize("policy", ["ar", "fixed(3)", "mtv(3,2,1)", "goodput"])
def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, policy: str) -> None:
    body = {"policy": policy}
    whole = chat(client, extra_body=body).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, extra_body=body))
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 20)
    assert len({c.id for c in chunks}) == 1


def test_a_completion_streams_with_its_prompt_where_asked(client: openai.OpenAI) -> None:
    whole = answer(client, echo=True).choices[0].text
    assert whole == PROMPT + answer(client).choices[0].text
    assert "".join(c.choices[0].text for c in answer(client, echo=True, stream=True)) == whole


def test_a_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    whole = answer(client).choices[0].text
    found = answer(client, stop=[whole[6:8]]).choices[0]
    assert (found.text, found.finish_reason) == (whole[: whole.index(whole[6:8])], "stop")


def test_a_seed_gives_its_text_whatever_the_policy(client: openai.OpenAI) -> None:
    texts = {answer(client, temperature=1, seed=7, extra_body={"policy": policy}).choices[0].text
             for policy in ("ar", "fixed(4)", "goodput")}
    assert len(texts) == 1
    assert answer(client, temperature=1, seed=8).choices[0].text not in texts


def test_several_answers_to_several_prompts_keep_their_order(client: openai.OpenAI, decoder: Decoder) -> None:
    prompts = ["Hello", decoder.prompt_ids("world")]
    for prompt in (["Hello", "world"], [decoder.prompt_ids(p) for p in ("Hello", "world")], [prompts[1]]):
        found = answer(client, prompt=prompt, n=2, temperature=1, seed=3).choices
        assert [c.index for c in found] == list(range(2 * len(prompt)))
        for i, each in enumerate(prompt):
            alone = decoder.generate_batch([each], SamplingParams(max_tokens=20, temperature=1, seed=3, n=2))[0]
            assert [c.text for c in found[2 * i : 2 * i + 2]] == [output.text for output in alone]
    streamed: dict[int, str] = {}
    for chunk in answer(client, prompt=["Hello", "world"], stream=True):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert streamed == {i: answer(client, prompt=p).choices[0].text for i, p in enumerate(("Hello", "world"))}


def test_logprobs_are_the_targets(client: openai.OpenAI, decoder: Decoder) -> None:
    expected = decoder.generate(PROMPT, SamplingParams(max_tokens=20, logprobs=2), "ar").tokens
    found = answer(client, logprobs=2).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx([t.logprob for t in expected])
    assert [len(top) for top in found.logprobs.top_logprobs] == [2] * 20
    assert "".join(found.logprobs.tokens) == found.text
    assert [found.text[at] for at in found.logprobs.text_offset] == found.logprobs.tokens
    entries = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(e.top_logprobs) == 3 and bytes(e.bytes).decode() == e.token for e in entries)
    assert all(e.logprob == pytest.approx(max(t.logprob for t in e.top_logprobs)) for e in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["ab", "cd"]}, "n": {"type": "boolean"}},
              "required": ["kind", "n"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = chat(client, max_tokens=80, response_format=asked, stream=stream, temperature=1)
    text = ("".join(c.choices[0].delta.content for c in found) if stream else found.choices[0].message.content)
    assert json.loads(text)["kind"] in ("ab", "cd")


def test_provenance_says_where_every_token_came_from(client: openai.OpenAI) -> None:
    body = {"policy": "fixed(3)", "provenance": True}
    choice = answer(client, extra_body=body).choices[0]
    found = choice.draftsmith
    assert "".join(t["text"] for t in found["tokens"]) == choice.text
    sources = [t["source"] for t in found["tokens"]]
    assert sources.count("accepted") == found["stats"]["accepted"] > 0
    assert {t["variant"] for t in found["tokens"] if t["source"] == "accepted"} == {"4L"}
    thrown = sum(len(t["replaced"]) for t in found["tokens"])
    assert thrown == found["stats"]["rejected"] + found["stats"]["wasted"] > 0
    assert all(t["replaced"] for t in found["tokens"] if t["source"] == "correction")
    chunks = [c.choices[0].draftsmith for c in answer(client, stream=True, extra_body=body)]
    assert [t for c in chunks for t in c["tokens"]] == found["tokens"]
    rounds = [c["round"] for c in chunks if c["round"]]
    assert len(rounds) == found["stats"]["steps"]
    assert chunks[0]["round"] is None
    assert sum(r["accepted"] for r in rounds) == found["stats"]["accepted"]
    assert {r["alpha"] for r in rounds} <= {1.5, None}


def test_the_model_says_what_it_can_do(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, client.models.retrieve(NAME).id) == (NAME, NAME)
    assert model.draftsmith["default_policy"] == "fixed(3)"
    assert [v["name"] for v in model.draftsmith["variants"]] == ["2L", "4L@0.75", "4L@1", "4L@1.25", "4L"]
    for policy in model.draftsmith["policies"]:
        assert answer(client, max_tokens=3, extra_body={"policy": policy}).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "the model 'gpt-4' does not exist; this server has 'tiny'"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "field 'temprature'; did you mean 'temperature'"),
        ({"extra_body": {"suffix": "x"}}, openai.BadRequestError, "'suffix' is not supported"),
        ({"extra_body": {"policy": "goodputt"}}, openai.BadRequestError, "did you mean 'goodput'"),
        ({"temperature": 3}, openai.BadRequestError, "temperature: .*less than or equal to 2"),
        ({"temperature": 1e-9}, openai.BadRequestError, "temperature must be 0"),
        ({"prompt": ""}, openai.BadRequestError, "the prompt is empty"),
        ({"prompt": []}, openai.BadRequestError, "the prompt is empty"),
        ({"prompt": [4, 999]}, openai.BadRequestError, "token id 999 is outside"),
        ({"prompt": "x" * 600}, openai.BadRequestError, "the target's context is 512"),
        ({"max_tokens": 500}, openai.BadRequestError, "context is 512 tokens, and 15 of prompt and 500"),
        ({"logit_bias": {"999": 1}}, openai.BadRequestError, "logit_bias names token id 999"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias maps token ids to numbers"),
        ({"n": 128}, openai.BadRequestError, "128 answers are asked for, and this server takes 67"),
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "needs stream"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"stop": "x" * 2000}, openai.BadRequestError, "stop"),
        ({"prompt": ["x"] * 100}, openai.BadRequestError, "100 answers are asked for"),
        ({"extra_body": {"policy": f"fixed({'9' * 5000})"}}, openai.BadRequestError, "a policy's name of 5007"),
        ({"extra_body": {"policy": f"fixed({'9' * 200})"}}, openai.BadRequestError, "needs k from 1 to 16"),
    ],
)
def test_a_mistake_is_named(client: openai.OpenAI, options: dict[str, Any], error: type[openai.APIStatusError],
                            message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        answer(client, **options)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools' is not supported"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
         "the grammar is not valid"),
        ({"max_completion_tokens": 4}, "not both"),
    ],
)
def test_a_mistake_in_a_chat_is_named(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, **options)


def test_what_changes_nothing_is_accepted(client: openai.OpenAI) -> None:
    body = {"metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": None, "top_k": None, "top_p": None,
            "modalities": ["text"]}
    texts = {chat(client, **more).choices[0].message.content for more in ({"user": "me", "extra_body": body}, {})}
    assert len(texts) == 1


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI) -> None:
    """With all the fields that say nothing, as people append it to a conversation."""
    message = chat(client).choices[0].message
    for form in (message, message.model_dump()):
        assert chat(client, messages=[*MESSAGES, form, *MESSAGES]).choices[0].message.content


def test_the_text_of_a_token_is_what_it_adds_to_a_text() -> None:
    """Also where a tokenizer drops the space that a text begins with, and where a token is half a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {"<unk>": 0, "a": 1, "\u2581": 2, "\u2581world": 3, "<0xE2>": 4}
    inner = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert [texts(i) for i in (1, 2, 3, 4)] == [b"a", b" ", b" world", b"\xe2"]
    byte_level = TokenTexts(make_tokenizer())
    text = "na\u00efve \u20ac"
    assert b"".join(byte_level(i) for i in make_tokenizer()(text).input_ids).decode() == text
    assert byte_level(END) == b"<|end|>"


def test_the_next_turn_is_read_from_where_the_last_one_ended(decoder: Decoder) -> None:
    talk = [{"role": "user", "content": "Hello world, how are you today?"}]
    with serving(decoder) as server:
        first = chat(server.client(), messages=talk)
        talk.append({"role": "assistant", "content": first.choices[0].message.content})
        talk.append({"role": "user", "content": "And?"})
        second = chat(server.client(), messages=talk, stream=True, stream_options={"include_usage": True})
        usage = [chunk.usage for chunk in second][-1]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.total_tokens - 2 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize("kind", ["lookup alone", "another model as the draft", "one request at a time"])
def test_a_target_without_a_bundle_is_served_too(printable: Path, tmp_path: Path, kind: str) -> None:
    """With every policy that the model says it has."""
    target = save_target(tmp_path, family="gpt_neox") if kind == "one request at a time" else printable
    decoder = Decoder.pair(str(target), str(printable) if kind == "another model as the draft" else None)
    with serving(decoder, slots=2) as server:
        policies = server.client().models.list().data[0].draftsmith["policies"]
        assert ("fixed(4)" in policies) == (kind == "another model as the draft")
        texts = {answer(server.client(), extra_body={"policy": policy}).choices[0].text for policy in policies}
        assert texts == {decoder.generate(PROMPT, SamplingParams(max_tokens=20), "ar").text}


def test_metrics_add_up(decoder: Decoder) -> None:
    with serving(decoder) as server:
        client = server.client()
        found = [answer(client, extra_body={"policy": "fixed(3)", "provenance": True}) for _ in range(2)]
        text = client.with_options(base_url=server.url).get("/metrics", cast_to=str)
        values = {s.name + "".join(f",{v}" for v in s.labels.values()): s.value
                  for family in text_string_to_metric_families(text) for s in family.samples}
    stats = [f.choices[0].draftsmith["stats"] for f in found]
    assert values["draftsmith_requests_total,length"] == 2
    assert values["draftsmith_completion_tokens_total"] == sum(s["emitted"] for s in stats) == 40
    assert values["draftsmith_drafted_tokens_total,accepted"] == sum(s["accepted"] for s in stats)
    assert values["draftsmith_target_passes_total"] == sum(s["steps"] for s in stats)
    assert values["draftsmith_acceptance_count"] == 2
    assert values["draftsmith_slots"] == 3
    assert values["draftsmith_running"] == values["draftsmith_waiting"] == 0
    assert not any(math.isnan(v) for v in values.values())
