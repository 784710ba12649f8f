"""A real server in a thread of the test process, for tests that talk to it over a socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn
from draftsmith.decode import Decoder
from draftsmith.decode.serving.app import create_app
from draftsmith.decode.serving.engine import Engine
from draftsmith.decode.serving.run import Address
from draftsmith.decode.serving.run import Server as OurServer

NAME = "tiny"


@dataclass
class Server:
    url: str
    engine: Engine
    decoder: Decoder
    stop: Callable[[], None]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def idle(self, seconds: float = 10) -> bool:
        """Whether nothing is running any more, within some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self.engine.running or self.engine.waiting):
            time.sleep(0.01)
        return not self.engine.running and not self.engine.waiting


@contextlib.contextmanager
def serving(decoder: Decoder, slots: int = 3, queue: int = 64, context: int | None = None, grace: int = 1,
            **options: Any) -> Iterator[Server]:
    engine = Engine(decoder, slots, context, queue)
    with Address("127.0.0.1", 0) as address:
        options.setdefault("hosts", address.names)
        config = uvicorn.Config(create_app(engine, NAME, **options), log_level="error", timeout_graceful_shutdown=grace)
        server = OurServer(config, engine)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]})
        thread.start()
        end = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)

        def stop() -> None:
            server.should_exit = True

        try:
            yield Server(address.url, engine, decoder, stop)
        finally:
            stop()
            thread.join(20)
            assert not thread.is_alive()
            assert not engine.thread.is_alive()
