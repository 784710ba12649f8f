"""`draftsmith serve`."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import socket
import sys
from pathlib import Path
from types import TracebackType

import uvicorn
from draftsmith.data import DraftsmithError

from ..decoder import Decoder
from ..policies import make_policy
from .app import create_app
from .engine import Engine

GRACE = 10.0  # seconds that answers have to end in, once the server is told to stop
LAST_WORDS = 1.0  # seconds before that, when those that have not are ended and their clients told


class Address:
    """A listening socket. Raises `DraftsmithError` for an address that is taken or not this machine's."""

    def __init__(self, host: str, port: int) -> None:
        if not 0 <= port <= 65535:
            raise DraftsmithError(f"--port must be from 0 to 65535, not {port}")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self.socket = socket.create_server((host, port), family=family)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise DraftsmithError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
        self.host, self.port = host, self.socket.getsockname()[1]

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    @property
    def names(self) -> frozenset[str] | None:
        """What it may be called by: where only this machine reaches it, by this machine's own names."""
        own = {"localhost", "127.0.0.1", "::1", self.host.lower(), self.socket.getsockname()[0]}
        return frozenset(f"[{name}]" if ":" in name else name for name in own) if self.local else None

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __enter__(self) -> Address:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.socket.close()


class Server(uvicorn.Server):
    """Tells the clients of answers that do not end in time, before their connections are cut."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, grace = asyncio.get_running_loop(), self.config.timeout_graceful_shutdown or GRACE
        loop.call_later(max(0.0, grace - LAST_WORDS), lambda: loop.run_in_executor(None, self.engine.close))
        await super().shutdown(sockets)


def serve(decoder: Decoder, address: Address, args: argparse.Namespace) -> None:
    """Until SIGINT or SIGTERM. Raises `DraftsmithError` for options that make no sense."""
    key = args.api_key if args.api_key is not None else os.environ.get("DRAFTSMITH_API_KEY")
    if key is not None and not key.strip():
        raise DraftsmithError("--api-key (or DRAFTSMITH_API_KEY) is empty: leave it out to ask for none")
    name = args.name or Path(decoder.target.name).name
    if not 0 < args.max_body < 2**20:
        raise DraftsmithError(f"--max-body must be above 0 and below 2^20 (MiB), not {args.max_body}")
    make_policy(args.policy, decoder.context)
    engine = Engine(decoder, args.slots, args.context, args.queue)
    app = create_app(engine, name, args.policy, key, int(args.max_body * (1 << 20)), tuple(args.allow_origin),
                     address.names)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(GRACE), server_header=False)
    if not address.local and key is None:
        print("draftsmith: anybody who reaches this address may use it; --api-key asks for a key", file=sys.stderr)
    print(f"Serving '{name}' with {args.slots} slots of {engine.context} tokens: {address.url}/v1 for OpenAI clients, "
          f"{address.url}/ for people; Ctrl+C stops", file=sys.stderr, flush=True)
    try:
        Server(config, engine).run(sockets=[address.socket])
    finally:
        engine.close()
