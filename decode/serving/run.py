"""`draftsmith serve`."""

from __future__ import annotations

import argparse
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

GRACE = 10  # seconds that answers have to end in, once the server is told to stop
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Address:
    """A listening socket. Raises `DraftsmithError` for an address that is taken or not this machine's."""

    def __init__(self, host: str, port: int) -> None:
        if not 0 <= port <= 65535:
            raise DraftsmithError(f"--port must be from 0 to 65535, not {port}")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise DraftsmithError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host "
                                  "or --port") from error
        self.host, self.port = host, self.socket.getsockname()[1]

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __enter__(self) -> Address:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.socket.close()


def serve(decoder: Decoder, address: Address, args: argparse.Namespace) -> None:
    """Until SIGINT or SIGTERM. Raises `DraftsmithError` for options that make no sense."""
    key = args.api_key or os.environ.get("DRAFTSMITH_API_KEY") or None
    name = args.name or Path(decoder.target.name).name
    if args.max_body <= 0:
        raise DraftsmithError(f"--max-body must be above 0, not {args.max_body}")
    make_policy(args.policy, decoder.context)
    engine = Engine(decoder, args.slots, args.context, args.queue)
    app = create_app(engine, name, args.policy, key, int(args.max_body * (1 << 20)), tuple(args.allow_origin),
                     LOCAL_NAMES if address.local else ("*",))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE, server_header=False)
    if not address.local and key is None:
        print("draftsmith: anybody who reaches this address may use it; --api-key asks for a key", file=sys.stderr)
    print(f"Serving '{name}' with {args.slots} slots of {engine.context} tokens: {address.url}/v1 for OpenAI clients, "
          f"{address.url}/ for people; Ctrl+C stops", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[address.socket])
