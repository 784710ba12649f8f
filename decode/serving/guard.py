"""What a request has to get past before its body is read: host, key, kind and size. And how refusals are worded."""

from __future__ import annotations

import hmac
import json
from typing import Any

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/health", "/playground/")  # and the page itself


def problem(status: int, message: str, code: str | None = None, param: str | None = None,
            headers: dict[str, str] | None = None) -> Response:
    """An error as OpenAI's clients read it."""
    body = json.dumps({"error": described(status, message, code, param)})  # in ASCII, whatever was quoted in it
    return Response(body, status, headers, "application/json")


def described(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def host_name(headers: Headers) -> str:
    """What the client calls the server, without the port."""
    host = headers.get("host", "").lower()
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


class Guard:
    """ASGI middleware. Everything but the page and `/health` needs the key, where there is one."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int, hosts: frozenset[str] | None) -> None:
        """`max_body` in bytes. `hosts`: names that the server may be called by, None for any."""
        self.app, self.api_key, self.max_body, self.hosts = app, api_key, max_body, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if self.hosts is not None and (name := host_name(headers)) not in self.hosts:
            # A page of another host may have had its name resolved to this machine.
            refusal = problem(400, f"this server is not called '{name}'", "unknown_host")
            await refusal(scope, receive, send)
            return
        if not (path == "/" or path.startswith(OPEN) or self._knows_key(headers)):
            refusal = problem(401, "a key is needed: Authorization: Bearer KEY", "invalid_api_key",
                              headers={"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":  # what a form of another page cannot send
            await problem(415, "the request's Content-Type must be application/json")(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body:
            await problem(413, self._too_large, "request_too_large")(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the request is larger than the {self.max_body:,} bytes that this server reads"

    def _knows_key(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        return self.api_key is None or (kind.lower() == "bearer" and hmac.compare_digest(
            key.strip().encode("latin-1"), self.api_key.encode()))  # the header's own bytes

    def _counted(self, receive: Receive) -> Receive:
        """A body may come in chunks of which no header tells the sum."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body:
                raise HTTPException(413, self._too_large)
            return message

        return counted
