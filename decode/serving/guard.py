"""What a request has to get past before its body is read: key and size. And how refusals are worded."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/health", "/playground/")  # and the page itself


def problem(status: int, message: str, code: str | None = None, param: str | None = None,
            headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": described(status, message, code, param)}, status, headers)


def described(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


class Guard:
    """ASGI middleware. Everything but the page and `/health` needs the key, where there is one."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int) -> None:
        """`max_body` in bytes."""
        self.app, self.api_key, self.max_body = app, api_key, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if not (path == "/" or path.startswith(OPEN) or self._knows_key(headers)):
            refusal = problem(401, "a key is needed: Authorization: Bearer KEY", "invalid_api_key",
                              headers={"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
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
        return self.api_key is None or (kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode(),
                                                                                         self.api_key.encode()))

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
