"""What a server has to survive: clients that go away, a full queue, failed passes, a dead worker, strangers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import http.client
import json
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import openai
import pytest
import schemathesis
import torch
from conftest import assemble
from draftsmith.decode import Decoder, SamplingParams
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from serving import NAME, Server, serving

LONG = {"model": NAME, "prompt": "x", "temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def decoder(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return assemble(printable, tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture
def server(decoder: Decoder) -> Iterator[Server]:
    with serving(decoder, slots=2, queue=2) as running:
        yield running


def post(server: Server, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any], Any]:
    """Status, JSON body and headers of a request made by hand."""
    connection = http.client.HTTPConnection(urlparse(server.url).netloc, timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, raw, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, json.loads(response.read()), response.headers


def short(server: Server, **options: Any) -> str:
    asked = {"model": NAME, "prompt": "Hello", "temperature": 0, "max_tokens": 8, **options}
    return str(server.client().completions.create(**asked).choices[0].text)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> str:
    return decoder.generate("Hello", SamplingParams(max_tokens=8), "ar").text


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_slot(server: Server, streams: bool, expected: str) -> None:
    """Also in the queue, where nothing is sent that could fail."""
    connections = []
    for _ in range(4):  # two run, two wait
        connection = http.client.HTTPConnection(urlparse(server.url).netloc)
        body = {**LONG, "stream": streams, "ignore_eos": True}
        body.pop("extra_body")
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connections.append(connection)
    engine, end = server.engine, time.monotonic() + 10
    while (len(engine.running), len(engine.waiting)) != (2, 2):
        assert time.monotonic() < end
        time.sleep(0.005)
    for connection in connections:
        connection.close()
    assert server.idle(5)
    assert server.engine.metrics.requests.labels("cancelled")._value.get() == 4
    assert short(server) == expected


def test_a_full_queue_answers_429_at_once(server: Server, expected: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: server.client().completions.create(**LONG, stream=True), range(2)))
        waiting = [pool.submit(short, server) for _ in range(2)]
        while len(server.engine.waiting) < 2:
            time.sleep(0.005)
        with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
            short(server)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.body["code"] == "queue_full"
        for stream in streams:
            stream.close()
        assert [w.result() for w in waiting] == [expected] * 2


def fail_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next pass fails."""
    forward, failed = decoder.runner.forward, []

    def failing(*args: Any, **more: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("secret: out of memory at 0x7f")
        return forward(*args, **more)

    monkeypatch.setattr(decoder.runner, "forward", failing)
    return failed


@pytest.mark.parametrize("streams", [True, False])
def test_a_failed_pass_ends_its_answers_and_says_nothing_of_the_insides(
    server: Server, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, streams: bool, expected: str) -> None:
    fail_once(decoder, monkeypatch)
    with pytest.raises(openai.InternalServerError) as caught:
        list(server.client().completions.create(**LONG, stream=streams))
    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert short(server) == expected


def test_a_failure_in_mid_stream_is_told_in_the_stream(
    server: Server, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    stream = iter(server.client().completions.create(**LONG, stream=True))
    next(stream)
    fail_once(decoder, monkeypatch)
    with pytest.raises(openai.APIError, match="the server failed to write this answer"):
        list(stream)
    assert short(server) == expected


def kill(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def test_slots_that_cannot_be_made_anew_are_tried_for_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    """After a failure for want of memory there may be none for the new caches, either. Nobody waits for ever."""
    make, left = server.engine._new_batch, [MemoryError("secret")]

    def scarce() -> Any:
        if left:
            raise left.pop()
        return make()

    monkeypatch.setattr(server.engine, "_new_batch", scarce)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        streams = [iter(server.client().completions.create(**LONG, stream=True)) for _ in range(2)]
        waiting = pool.submit(short, server)
        while not server.engine.waiting:
            time.sleep(0.005)
        kill(server.engine.thread)
        for stream in streams:
            with pytest.raises(openai.APIError, match="the server failed"):
                list(stream)
        with pytest.raises(openai.InternalServerError):
            waiting.result()
    assert short(server) == expected
    assert left == []


@pytest.mark.parametrize("where", ["finished", "labels"])
def test_whatever_fails_at_an_answers_end_its_client_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, where: str, expected: str) -> None:
    metrics, killed = server.engine.metrics, []
    owner = metrics if where == "finished" else metrics.requests
    original = getattr(owner, where)

    def dies(*args: Any) -> Any:
        if not killed:
            killed.append(1)
            raise SystemExit
        return original(*args)

    monkeypatch.setattr(owner, where, dies)
    with pytest.raises(openai.InternalServerError):
        short(server)
    assert short(server) == expected


def test_a_failed_pass_keeps_nothing_alive(server: Server, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the collector comes either: what did not fit the memory is what the next pass needs."""
    forward, watched = decoder.runner.forward, []

    def failing(*args: Any, **more: Any) -> Any:
        rows = torch.zeros(1000)
        watched.append(weakref.ref(rows))
        raise RuntimeError("secret")

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(decoder.runner, "forward", failing)
            with pytest.raises(openai.InternalServerError):
                short(server)
        monkeypatch.setattr(decoder.runner, "forward", forward)
        short(server)
        assert [found for found in watched if found() is not None] == []
    finally:
        gc.enable()


def test_clients_are_told_when_the_server_stops(decoder: Decoder) -> None:
    """Those whose answers do not end in time: the stream with an error, the one that waits with a status."""
    with serving(decoder, slots=1, grace=2) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = {**LONG, "max_tokens": 500, "logit_bias": {"1": 0.0}, "extra_body": {"ignore_eos": True, "policy": "ar"}}
        round_of, hold = server.engine.batch.step, threading.Event()

        def slowly() -> Any:
            hold.wait(0.1)
            return round_of()

        server.engine.batch.step = slowly
        stream = iter(server.client().completions.create(**slow, stream=True))
        next(stream)
        waiting = pool.submit(short, server)
        while not server.engine.waiting:
            time.sleep(0.005)
        server.stop()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            waiting.result()


def test_a_killed_worker_ends_its_answers_and_the_server_goes_on(server: Server, expected: str) -> None:
    stream = iter(server.client().completions.create(**LONG, stream=True))
    next(stream)
    kill(server.engine.thread)
    with pytest.raises(openai.APIError, match="the server failed"):
        list(stream)
    assert short(server) == expected
    assert server.client().with_options(base_url=server.url).get("/health", cast_to=object)["status"] == "ok"
    assert server.engine.metrics.restarts._value.get() == 1


def test_strangers_are_kept_out(decoder: Decoder, expected: str) -> None:
    with serving(decoder, api_key="sesame") as server:
        for key in ("wrong", ""):
            status, body, headers = post(server, {}, Authorization=f"Bearer {key}")
            assert (status, body["error"]["type"]) == (401, "authentication_error")
            assert headers["WWW-Authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        asked = {"model": NAME, "prompt": "Hello", "temperature": 0, "max_tokens": 8}
        assert server.client("sesame").completions.create(**asked).choices[0].text == expected
        for path, status in (("/health", 200), ("/", 200), ("/playground/playground.js", 200), ("/metrics", 401),
                             ("/openapi.json", 401), ("/playground/../app.py", 404)):
            connection = http.client.HTTPConnection(urlparse(server.url).netloc)
            connection.request("GET", path)
            assert connection.getresponse().status == status, path


def test_requests_that_are_too_large_or_no_json_are_refused(decoder: Decoder) -> None:
    with serving(decoder, max_body=2000) as server:
        body = {"model": NAME, "prompt": "x" * 3000}
        assert post(server, body)[0] == 413
        raw = json.dumps(body).encode()
        chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (raw[:1500], raw[1500:])) + b"0\r\n\r\n"
        connection = http.client.HTTPConnection(urlparse(server.url).netloc, timeout=10)
        connection.putrequest("POST", "/v1/completions")
        for name, value in (("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")):
            connection.putheader(name, value)
        connection.endheaders(chunked)
        response = connection.getresponse()
        assert (response.status, "2,000 bytes" in response.read().decode()) == (413, True)
        for raw in (b"{", b"\xff", b"[]", b"null", b"[" * 1000):
            status, body, _ = post(server, raw)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        for path in ("/v1/nothing", "/v1/models/other"):
            connection.close()
            connection.request("GET", path)
            assert json.loads(connection.getresponse().read())["error"]["type"] == "invalid_request_error"


def test_pages_of_other_hosts_cannot_call(decoder: Decoder) -> None:
    """Neither by rebinding a name, nor by a form, nor by script unless they are named."""
    asked = {"model": NAME, "prompt": "Hello", "max_tokens": 1}
    with serving(decoder, origins=("https://app.example",)) as server:
        connection = http.client.HTTPConnection(urlparse(server.url).netloc)
        connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (400, "unknown_host")
        for name in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1"):
            connection.request("GET", "/health", headers={"Host": name})
            assert (response := connection.getresponse()).status == 200
            response.read()
        assert post(server, asked, **{"Content-Type": "text/plain"})[0] == 415
        assert post(server, asked, **{"Content-Type": "application/json; charset=utf-8"})[0] == 200
        assert "access-control-allow-origin" not in post(server, asked, Origin="https://evil.example")[2]
        assert post(server, asked, Origin="https://app.example")[2]["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_server_fail(decoder: Decoder, mode: GenerationMode) -> None:
    """Neither one that the server's own schema allows nor one that it forbids."""
    with serving(decoder, context=96) as server:
        schema, statuses = schemathesis.openapi.from_url(f"{server.url}/openapi.json"), set[int]()
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) == 6
        for operation in operations:
            @settings(max_examples=40, deadline=None, derandomize=True, database=None,
                      suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def probe(case: Any) -> None:
                if isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = NAME  # or none would get past it
                response = case.call()
                statuses.add(response.status_code)
                assert response.status_code < 500, response.text

            with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
                probe()
        assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
        for text in ("\ud800", "\ud800x"):
            for body in ({"model": NAME, "prompt": text}, {"model": text, "prompt": "x"}, {text: 1},
                         {"model": NAME, "prompt": "x", "policy": text}, {"model": NAME, "prompt": "x", "stop": text}):
                assert post(server, body)[0] in (400, 404)


def live_bytes() -> int:
    """Of all tensors."""
    gc.collect()
    found = (o for o in gc.get_objects() if type(o) is torch.Tensor and o.layout == torch.strided)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def test_many_clients_that_come_and_go(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 clients x 20 requests, a third of them broken off, a failed pass and a killed worker on the way: what is
    completed is what plain decoding says, nothing hangs, memory returns."""
    prompts = ["Hello", "SELECT a", "x", "A longer prompt than the others"]
    sizes = (3, 9, 16)
    texts = {(p, n): decoder.generate(p, SamplingParams(max_tokens=n), "ar").text for p in prompts for n in sizes}
    with serving(decoder, slots=4, queue=64) as server:
        short(server)
        before = live_bytes()

        def client(number: int) -> list[str]:
            dice, mine = random.Random(number), server.client()
            return [one(mine, dice) for _ in range(20)]

        def one(mine: openai.OpenAI, dice: random.Random) -> str:
            prompt, size = dice.choice(prompts), dice.choice(sizes)
            asked = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": size,
                     "extra_body": {"policy": dice.choice(["fixed(3)", "goodput", "ar"])}}
            try:
                if dice.random() < 0.33:
                    with mine.completions.create(**asked, stream=True) as stream:
                        for _, _ in zip(range(dice.randrange(3)), stream, strict=False):
                            pass
                    return "left"
                found = mine.completions.create(**asked).choices[0].text
                assert found == texts[prompt, size]
                return "answered"
            except (openai.APIConnectionError, openai.RateLimitError, openai.BadRequestError):
                raise  # nobody waits for ever, and nobody is refused
            except openai.APIError:
                return "failed"

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            work = [pool.submit(client, number) for number in range(16)]
            time.sleep(0.5)
            failed = fail_once(decoder, monkeypatch)
            time.sleep(0.5)
            kill(server.engine.thread)
            results = [outcome for job in work for outcome in job.result(timeout=120)]
        assert server.idle(10)
        assert live_bytes() < before + (1 << 20)
        assert server.engine.metrics.restarts._value.get() == 1
    assert len(results) == 320
    assert failed == [1]
    assert results.count("answered") > 150
    assert 1 <= results.count("failed") <= 2 * 4  # those of a pass, and those of a worker
