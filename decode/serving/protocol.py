"""Requests as OpenAI's clients write them, and what they ask of the decoder.

Fields and meanings are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and
`stop_token_ids` are vLLM's; `policy` and `provenance` are our own. A field that is not known is refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from draftsmith.data import DraftsmithError
from draftsmith.data.io import nearest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..decoder import Decoder
from ..grammar import Grammar, json_schema
from ..sampling import LEAST_TEMPERATURE, SamplingParams

MAX_CHOICES, MAX_STOPS, MAX_LOGPROBS = 128, 16, 20
LONGEST_STOP = 1000  # characters
SEED = 2**63 - 1

# What clients may say of a request that changes nothing in the answer.
NOTES = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# OpenAI's, but not here: accepted only where they ask for nothing that is not done anyway.
ABSENT = ("tools", "tool_choice", "functions", "function_call", "audio", "modalities", "prediction", "suffix",
          "web_search_options", "reasoning_effort", "verbosity")
NOTHING: tuple[Any, ...] = ([], {}, "", "none", "auto", ["text"])

Tokens = list[Annotated[int, Field(ge=0)]]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Model):
    include_usage: bool = False


class Asked(Model):
    """What completions and chats have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0.0, le=2.0, description=f"0 is greedy; else from {LEAST_TEMPERATURE}")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-SEED, le=SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int = Field(0, ge=-1, description="0 or -1: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Tokens = []
    policy: str | None = Field(None, description="how to speculate: a name such as goodput, paper, fixed(4), ar")
    provenance: bool = Field(False, description="say of every token where it came from (field `draftsmith`)")

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a surrogate pair, which is no character") from error
        known = set(cls.model_fields)
        asked = {k: v for k, v in value.items()
                 if v is not None and k not in NOTES and not (k in ABSENT and v in NOTHING)}
        for key in asked.keys() - known:
            if key in ABSENT:
                raise ValueError(f"'{key}' is not supported by this server")
            raise ValueError(f"unknown field '{key}'{nearest(key, known)}")
        return asked

    @model_validator(mode="after")
    def _streaming(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each token's log-probability; None: no log-probabilities."""
        raise NotImplementedError

    def limit(self, room: int) -> int:
        """Tokens to complete at most, where the context has room for `room`."""
        raise NotImplementedError

    def params(self, room: int, grammars: list[Grammar]) -> list[SamplingParams]:
        """For each answer. Raises `DraftsmithError` for values that do not go together."""
        def one(grammar: Grammar | None) -> SamplingParams:
            return SamplingParams(
                max_tokens=self.limit(room), temperature=self.temperature, top_p=self.top_p,
                top_k=max(0, self.top_k), min_p=self.min_p,
                seed=self.seed, stop=self.stop or (), stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens, repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
                logit_bias=self.logit_bias or {},  # type: ignore[arg-type]
                logprobs=self.alternatives, logits_processors=(grammar,) if grammar else ())
        return [one(grammars[i] if grammars else None) for i in range(self.n)]


class Completion(Asked):
    """POST /v1/completions"""

    prompt: str | Tokens | list[str] | list[Tokens]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Completion:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported: it may only equal n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo is not supported together with logprobs")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def limit(self, room: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """One or several texts or lists of token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class Part(Model):
    """A piece of a message's content; of text is all that these models read."""

    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Answers come back with fields that say nothing: refusal, annotations, tool_calls, ..."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if k in cls.model_fields or v not in (None, [])}

    def plain(self) -> dict[str, str]:
        """As chat templates expect it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class JsonSchema(Model):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("response_format of type json_schema needs json_schema.schema")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Chat(Asked):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self, room: int) -> int:
        """All that the context holds, unless fewer are asked for."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(0, room) if asked is None else asked

    def grammars(self, decoder: Decoder) -> list[Grammar]:
        """One for each answer, since a parser follows one text. Raises `DraftsmithError` for a schema that is none."""
        schema = self.response_format.schema_of_answer() if self.response_format else None
        if schema is None:
            return []
        first = json_schema(schema, decoder)
        return [first, *(first.another() for _ in range(self.n - 1))]

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """Raises `DraftsmithError` where the target has no chat template, or its template refuses the messages."""
        from draftsmith.data.chat import chat_ids

        if not getattr(tokenizer, "chat_template", None):
            raise DraftsmithError("this model has no chat template: use /v1/completions")
        return chat_ids(tokenizer, [message.plain() for message in self.messages])
