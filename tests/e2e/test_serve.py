"""`draftsmith serve` as a person runs it, and its playground in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import assemble
from draftsmith.decode import Decoder, SamplingParams
from serving import Server, serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "draftsmith.decode.cli", "serve", *args]


def test_it_serves_until_it_is_told_to_stop(bundle_folder: Path) -> None:
    options = ("--port", "0", "--name", "mine", "--slots", "2", "--context", "100")
    process = subprocess.Popen(command(str(bundle_folder), *options), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("Serving"))
        assert "'mine' with 2 slots of 100 tokens" in line
        found = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
        assert found
        body = json.dumps({"model": "mine", "prompt": "Hello", "temperature": 0, "max_tokens": 8}).encode()
        asked = urllib.request.Request(f"{found[0]}/completions", body, {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(asked))
        expected = Decoder.load(bundle_folder).generate("Hello", SamplingParams(max_tokens=8), "ar")
        assert answer["choices"][0]["text"] == expected.text
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "{taken}"), "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        (("--port", "99999"), "--port must be from 0 to 65535, not 99999"),
        (("--host", "no.such.host.invalid", "--port", "0"), "cannot listen on no.such.host.invalid"),
        (("--port", "0", "--slots", "0"), "slots must be 1 or more, not 0"),
        (("--port", "0", "--context", "9999"), "a context of 9999 tokens is more than the target's 512"),
        (("--port", "0", "--policy", "goodputt"), "unknown policy 'goodputt'; did you mean 'goodput'?"),
        (("--port", "0", "--slots", "2000000000"), "need"),
    ],
)
def test_a_mistake_is_named_in_one_line(bundle_folder: Path, options: tuple[str, ...], message: str,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith.decode.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(bundle_folder), *(o.format(taken=port) for o in options)]) == 1
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("draftsmith: ")
        assert message.format(taken=port) in last


@pytest.fixture(scope="module")
def server(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(assemble(printable, tmp_path_factory.mktemp("served") / "bundle"), api_key="sesame") as running:
        yield running


@pytest.fixture
def page(server: Server) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        yield page
        assert problems == []
        browser.close()


def enter_key(page: Any) -> None:
    page.fill("#prompt", "Hello world")
    page.press("#prompt", "Control+Enter")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")


def test_a_prompt_is_answered_from_the_keyboard(server: Server, page: Any) -> None:
    """With the key asked for when it is needed; the text is the target's, token by token, on a phone's width."""
    page.wait_for_selector("#run[aria-disabled=false]")
    page.fill("#max-tokens", "24") if page.is_visible("#max-tokens") else None
    enter_key(page)
    page.wait_for_selector("#output .token.accepted")
    page.wait_for_selector("#run[aria-disabled=false]")
    shown = page.locator("#output").text_content()
    messages = [{"role": "user", "content": "Hello world"}]
    tokens = int(page.locator("#figure-tokens").text_content().split()[0])
    expected = server.decoder.generate(messages, SamplingParams(max_tokens=tokens), "ar")
    assert shown == expected.text
    page.focus("#output [tabindex='0']")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#token-popover")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_asked_for_while_the_models_are_fetched_is_not_lost(page: Any) -> None:
    """Neither before the page is ready, nor with a key that is entered before a slow server has refused the last."""
    requests: list[Any] = []

    def every_other_hangs(route: Any) -> None:
        requests.append(route)
        if len(requests) % 2 == 0:
            route.continue_()

    page.route("**/v1/models", every_other_hangs)
    page.reload()
    page.fill("#prompt", "Hello world")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#key")
    page.press("#prompt", "Control+Enter")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#output .token")
    assert len(requests) == 4


def test_a_race_ends_with_a_verdict(page: Any) -> None:
    enter_key(page)
    page.wait_for_selector("#output .token")
    page.wait_for_selector("#run[aria-disabled=false]")
    page.click("#race")
    page.wait_for_selector("#race-result:not(:empty)", timeout=60000)
    assert "the same text" in page.locator("#race-result").text_content()
