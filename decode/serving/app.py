"""The FastAPI application: OpenAI's routes, health, metrics and the playground."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from draftsmith.data import DraftsmithError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..decoder import Decoder
from ..loop import TargetFailure
from ..policies import KNOWN
from ..sampling import SamplingParams
from .answers import Answer, Scribe, TokenTexts
from .engine import Closing, Engine, Event, QueueFull
from .guard import Guard, described, problem
from .protocol import Chat, Completion

PAGE = Path(__file__).parent / "playground"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}


class Gone(Exception):
    """The client has closed the connection."""


class Failed(Exception):
    """An answer ended with an error."""


class Service:
    """What the routes share: the engine, the name that clients call the model by, and tokenizers of its own, since
    encoding changes a tokenizer's settings, and the engine's thread uses the decoder's."""

    def __init__(self, engine: Engine, name: str, policy: str | None) -> None:
        self.engine, self.name, self.policy = engine, name, policy
        self.decoder: Decoder = engine.decoder
        self.tokenizer, self.lock = copy.deepcopy(self.decoder.tokenizer), threading.Lock()
        self.texts = TokenTexts(copy.deepcopy(self.decoder.tokenizer))
        self.started = int(time.time())
        shape = self.decoder.context.shape
        self.alphas = {} if shape is None else {
            v.name: a for v, a in zip(shape.variants(), shape.alphas(), strict=False)}

    def describe(self) -> dict[str, Any]:
        """The model, as `/v1/models` lists it."""
        default = self.policy or self.decoder.context.default
        names = KNOWN if self.decoder.draft is not None else ("goodput", "lookup(4)", "ar")
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "draftsmith",
                "max_model_len": self.engine.context,
                "draftsmith": {"default_policy": default, "policies": list(dict.fromkeys([default, *reversed(names)])),
                               "variants": [{"name": n, "alpha": a} for n, a in self.alphas.items()],
                               "chat": bool(getattr(self.tokenizer, "chat_template", None))}}

    def prepare(self, asked: Completion | Chat) -> tuple[list[list[int]], list[SamplingParams], Scribe]:
        """Token ids, parameters of the answers to each prompt, and who writes the response. Raises `DraftsmithError`
        for what cannot be answered."""
        echo: list[str] | None = None
        with self.lock:
            if isinstance(asked, Chat):
                prompts = [asked.prompt_ids(self.tokenizer)]
            else:
                prompts = [self._ids(prompt) for prompt in asked.prompts()]
                if asked.echo:
                    echo = [text for text in map(self._text, asked.prompts()) for _ in range(asked.n)]
        room, policy = self.engine.context - max(map(len, prompts)), asked.policy or self.policy
        for prompt in prompts:
            self.engine.check(prompt, asked.params(room, [])[0], policy)
        params = asked.params(room, asked.grammars(self.decoder) if isinstance(asked, Chat) else [])
        return prompts, params, Scribe(self.name, self.texts, isinstance(asked, Chat), asked.alternatives,
                                       asked.provenance, self.alphas, asked.n, echo)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        return self.decoder.prompt_ids(prompt)  # checks them

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    async def answer(self, request: Request, asked: Completion | Chat) -> Response:
        if asked.model != self.name:
            return problem(404, f"the model '{asked.model}' does not exist; this server has '{self.name}'",
                           "model_not_found", "model")
        number = asked.n * (1 if isinstance(asked, Chat) else len(asked.prompts()))
        if number > (most := self.engine.slots + self.engine.queue):
            raise DraftsmithError(f"{number} answers are asked for, and this server takes {most} at a time")
        self.engine.require_room(number)  # before any work is done for it
        prompts, params, scribe = await run_in_threadpool(self.prepare, asked)
        events = self.follow(request, prompts, params, asked.policy or self.policy)
        read = sum(map(len, prompts))
        if not asked.stream:
            answers: dict[int, Answer] = {}
            async with contextlib.aclosing(events):
                async for event in events:
                    answers.setdefault(event.index, Answer()).take(event)
            return Response(await run_in_threadpool(lambda: json.dumps(scribe.whole(answers, read))),
                            media_type="application/json")
        first = await anext(events)  # what fails before it has a status of its own
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(stream(events, first, scribe, read if with_usage else None),
                                 media_type="text/event-stream", headers={"Cache-Control": "no-cache",
                                                                          "X-Accel-Buffering": "no"})

    async def follow(self, request: Request, prompts: list[list[int]], params: list[SamplingParams],
                     policy: str | None) -> AsyncGenerator[Event, None]:
        """The events of all answers; whoever stops listening cancels those that are not finished. Raises `Gone` when
        the client is, `Failed` with an answer's error."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        jobs = self.engine.submit(prompts, params, policy, deliver)
        watch = asyncio.create_task(tell_when_gone(request, inbox))
        try:
            left = len(jobs)
            while left:
                event = await inbox.get()
                if event is None:
                    raise Gone
                if event.error is not None:
                    raise Failed from event.error
                left -= event.last
                yield event
        finally:
            watch.cancel()
            self.engine.cancel(jobs)


async def tell_when_gone(request: Request, inbox: asyncio.Queue[Event | None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    inbox.put_nowait(None)


async def stream(events: AsyncGenerator[Event, None], first: Event, scribe: Scribe,
                 read: int | None) -> AsyncIterator[str]:
    """Server-sent events; `read`: tokens of the prompts, where a last chunk is to report usage."""
    def sent(value: Any) -> str:
        return f"data: {json.dumps(value)}\n\n"  # in ASCII: some readers take other characters for ends of lines

    answers: dict[int, Answer] = {}
    async with contextlib.aclosing(events):
        try:
            event: Event | None = first
            while event is not None:
                answers.setdefault(event.index, Answer()).take(event)
                yield sent(scribe.chunk(event))
                event = await anext(events, None)
            if read is not None:
                yield sent(scribe.last(answers, read))
        except Gone:
            return
        except Failed as error:
            status, message = of_failure(error.__cause__)
            yield sent({"error": described(status, message)})
        yield "data: [DONE]\n\n"


def of_failure(error: BaseException | None) -> tuple[int, str]:
    """Status and message; nothing of a program's insides, which the engine has logged."""
    if isinstance(error, Closing):
        return 503, str(error)
    if isinstance(error, DraftsmithError):  # a grammar that cannot be followed, say; to try again does not help
        return 500 if isinstance(error, TargetFailure) else 400, str(error)
    return 500, "the server failed to write this answer; its log says why"


def create_app(engine: Engine, name: str, policy: str | None = None, api_key: str | None = None,
               max_body: int = 4 << 20, origins: tuple[str, ...] = (), hosts: frozenset[str] | None = None) -> FastAPI:
    """`name`: what clients call the model. `policy`: of requests that name none. `max_body`: bytes. `origins`: pages of
    other hosts that may call; `hosts`: names that this one may be called by, None for any. The engine is closed when
    the application ends."""
    service = Service(engine, name, policy)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.close)

    # The pages that FastAPI makes load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="Draftsmith", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=api_key, max_body=max_body, hosts=hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    _add_routes(app, service)
    _add_handlers(app)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/v1/completions")
    async def completions(request: Request, asked: Completion) -> Response:
        """Continue a text."""
        return await service.answer(request, asked)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: Chat) -> Response:
        """Answer a conversation."""
        return await service.answer(request, asked)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe()]}

    @app.get("/v1/models/{model:path}")
    def model(model: str) -> Response:
        if model != service.name:
            return problem(404, f"the model '{model}' does not exist; this server has '{service.name}'",
                           "model_not_found", "model")
        return JSONResponse(service.describe())

    @app.get("/health")
    async def health() -> Response:
        status = {"status": "ok" if engine.alive else "stopping", "model": service.name,
                  "running": len(engine.running), "waiting": len(engine.waiting), "slots": engine.slots}
        return JSONResponse(status, 200 if engine.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/playground", StaticFiles(directory=PAGE))


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        place = ".".join(str(part) for part in found["loc"][1:]) if found["type"] != "json_invalid" else ""
        message = found["msg"].removeprefix("Value error, ")
        return problem(400, f"{place}: {message}" if place else message, param=place or None)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    @app.exception_handler(DraftsmithError)
    async def impossible(request: Request, error: DraftsmithError) -> Response:
        return problem(400, str(error))

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> Response:
        return problem(429, str(error), "queue_full", headers={"Retry-After": "1"})

    @app.exception_handler(Closing)
    async def closing(request: Request, error: Closing) -> Response:
        return problem(503, str(error), headers={"Retry-After": "5"})

    @app.exception_handler(Failed)
    async def failed(request: Request, error: Failed) -> Response:
        return problem(*of_failure(error.__cause__))

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return problem(500, "the server failed; its log says why")
