"""Streamed chat completions from an OpenAI-compatible server, and when their pieces came.

Standard library only. What a request comes to is a `Reply`; one that fails holds its error and all that came before it.
An error begins with its kind: "HTTP 500", "stalled", "dropped", "malformed", "error in the stream", "not a stream",
"unreachable". The clock starts when the request is sent, on a connection that stands; every request has its own.
"""

import argparse
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mlx_dflash.benchmarks.metrics import has_loop, record_hash

from mlx_dflash.errors import RequestError

# Flag -> the fields that carry it, its value where it is not given (which changes nothing but the mode: greedy).
SAMPLER: dict[str, tuple[tuple[str, ...], Any]] = {
    "temp": (("temperature",), 0.0),
    "top_p": (("top_p",), 1.0),
    "top_k": (("top_k",), 0),
    "min_p": (("min_p",), 0.0),
    "repetition_penalty": (("repetition_penalty", "repeat_penalty"), 1.0),
    "presence_penalty": (("presence_penalty",), 0.0),
    "frequency_penalty": (("frequency_penalty",), 0.0),
    "seed": (("seed",), 0),
}
BEYOND_OPENAI = {"top_k", "min_p", "repetition_penalty", "repeat_penalty"}

PIECE = 65536  # bytes read at most at once
SHOWN = 200  # characters of what a server said that an error keeps
QUICK = 5.0  # seconds for what is asked beside the measured requests


@dataclass(frozen=True)
class Server:
    """Where the API is. path: before "/models"; timeout: seconds without a byte; key: never part of any text."""

    secure: bool
    host: str
    port: int | None
    path: str
    timeout: float
    key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{host}{port}{self.path}"

    @property
    def root(self) -> str:
        """Before "/metrics": the path without its version."""
        return self.path.removesuffix("/v1")

    @property
    def local(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def connection(self, timeout: float) -> HTTPConnection:
        kind = HTTPSConnection if self.secure else HTTPConnection
        return kind(self.host, self.port, timeout=timeout)

    def headers(self) -> dict[str, str]:
        kinds = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        return kinds if self.key is None else {**kinds, "Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> tuple[int, str]:
        """Status and text. Raises OSError or HTTPException."""
        with closing(self.connection(min(self.timeout, QUICK))) as connection:
            connection.request("GET", path, headers=self.headers())
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def get_json(self, path: str) -> Any:
        """None of anything but a JSON answer with status 200."""
        with suppress(OSError, HTTPException, ValueError):
            status, text = self.get(path)
            return json.loads(text) if status == 200 else None
        return None

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


def server_at(url: str, key: str | None = None, timeout: float = 120.0) -> Server:
    """Raises RequestError for what is no address of an API. Without a path it is "/v1"."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RequestError(f"--url {url} is no address: {error}") from error
    if parts.username or parts.password or parts.query:
        raise RequestError(
            "--url must hold no user, password or query, for it is recorded; a key goes by --api-key-env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"--url must be like http://127.0.0.1:8080/v1, not {url}")
    return Server(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/") or "/v1", timeout, key)


@dataclass
class Reply:
    """What came of one request; times in seconds since it was sent.

    began: seconds since the epoch. arrivals: of each chunk that held text, reasoning or part of a tool call. ended:
    when the chunk with the finish reason came. usage, timings: the server's own, the last that came.
    """

    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    ended: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    error: str | None = None

    def take(self, data: bytes, now: float) -> None:
        """One event's data; `error` says what is wrong with it."""
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.error = f"malformed: {shown(data)}"
            return
        if chunk.get("error") or chunk.get("object") == "error":
            self.error = f"error in the stream: {message_of(chunk)}"
            return
        for name in ("usage", "timings"):
            if isinstance(chunk.get(name), dict):
                setattr(self, name, chunk[name])
        self.fingerprint = chunk.get("system_fingerprint") or self.fingerprint
        try:
            choice = (chunk.get("choices") or [{}])[0]
            text, reason = text_of(choice.get("delta") or {}), choice.get("finish_reason")
        except (AttributeError, KeyError, TypeError):
            self.error = f"malformed: {shown(data)}"
            return
        if text:
            self.arrivals.append(now)
            self.texts.append(text)
        if reason:
            self.finish_reason, self.ended = str(reason), now

    def record(self) -> dict[str, Any]:
        """What a result keeps of it. tokens: as the server counts them, else chunks; arrivals: one a chunk.

        An answer without any text (its only token ends it) arrives with the chunk that ends it.
        """
        text, usage, timings = "".join(self.texts), self.usage, self.timings
        told = whole(usage.get("completion_tokens"))
        came = [self.ended] if told and self.ended is not None and not self.arrivals else self.arrivals
        details = usage.get("prompt_tokens_details")
        cached = whole(details.get("cached_tokens")) if isinstance(details, dict) else None
        record: dict[str, Any] = {
            "prompt_tokens": whole(usage.get("prompt_tokens")) or 0,
            "cached_tokens": whole(timings.get("cache_n")) if cached is None else cached,
            "tokens": len(came) if told is None else told,
            "tokens_from": "chunks" if told is None else "usage",
            "chunks": len(came),
            "finish_reason": self.finish_reason,
            "ttft": round(came[0], 6) if came else None,
            "seconds": round(self.seconds, 6),
            "began": self.began,
            "arrivals": [[round(at, 6), 1] for at in came],
            "error": self.error,
            "loop": has_loop(text.split()),
            "tokens_hash": record_hash(text),
        }
        if (drafted := whole(timings.get("draft_n"))) is not None:
            record |= {"drafted": drafted, "accepted": whole(timings.get("draft_n_accepted")) or 0}
        return record


class Events:
    """Splits a text/event-stream into the data of its events, however its bytes come."""

    def __init__(self) -> None:
        self.rest = b""
        self.data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self.data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"error:"):  # older llama.cpp names the field so
                self.data.append(b'{"error": %s}' % line[6:])
            elif not line and self.data:
                yield b"\n".join(self.data)
                self.data = []


class Client:
    """Sends requests from any number of threads; `close` ends those that run, and none is sent after it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.closed = False
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()

    def ask(self, body: dict[str, Any]) -> Reply:
        """POST to /chat/completions and read the stream to its end; all failures are in the reply."""
        server, reply, start, connected = self.server, Reply(), time.perf_counter(), False
        data = json.dumps(body).encode()
        with closing(server.connection(server.timeout)) as connection:
            try:
                connection.connect()
                connected = True
                with self.open(connection.sock):
                    reply.began, start = time.time(), time.perf_counter()
                    connection.request("POST", f"{server.path}/chat/completions", data, server.headers())
                    with connection.getresponse() as response:
                        receive(response, reply, start)
            except TimeoutError:
                reply.error = f"{'stalled' if connected else 'unreachable'}: no byte for {server.timeout:g} s"
            except (OSError, HTTPException) as error:
                said = shown(str(error) or type(error).__name__)
                reply.error = f"{'dropped' if connected else 'unreachable'}: {said}"
            reply.seconds = time.perf_counter() - start
        if reply.error is not None:
            reply.error = server.without_key(reply.error)
        return reply

    @contextmanager
    def open(self, sock: socket.socket) -> Iterator[None]:
        with self.lock:
            self.sockets.add(sock)
            if self.closed:
                raise ConnectionAbortedError("the client has ended")
        try:
            yield
        finally:
            with self.lock:
                self.sockets.discard(sock)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            for sock in self.sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it


def receive(response: HTTPResponse, reply: Reply, start: float) -> None:
    """Read a stream into the reply up to its end or its first error."""
    if response.status != 200:
        said = b""
        with suppress(OSError, HTTPException):
            said = response.read(4096)
        reply.error = f"HTTP {response.status}: {message_in(said)}"
        return
    events, head = Events(), b""
    while piece := response.read1(PIECE):
        now = time.perf_counter() - start
        head = head or piece[:4096]
        for data in events.feed(piece):
            if data.strip() == b"[DONE]":
                return
            reply.take(data, now)
            if reply.error is not None:
                return
    if reply.finish_reason is None:
        plain = head.lstrip().startswith(b"{")
        reply.error = f"not a stream: {message_in(head)}" if plain else "dropped: the stream ended before its end"


def text_of(delta: dict[str, Any]) -> str:
    """Reasoning, text and pieces of tool calls of a chunk. Some servers give reasoning under two names at once."""
    parts = [delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""]
    if delta.get("tool_calls"):
        parts.append(json.dumps(delta["tool_calls"]))
    return "".join(map(str, parts))


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def message_in(raw: bytes) -> str:
    """What an answer that is no stream says."""
    try:
        return message_of(json.loads(raw))
    except ValueError:
        return shown(raw) or "no text"


def message_of(answer: Any) -> str:
    found = answer.get("error") or answer if isinstance(answer, dict) else answer
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or json.dumps(found)
    return shown(str(found))


def shown(text: str | bytes) -> str:
    """The beginning of a text, on one line."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def add_sampler_flags(parser: argparse.ArgumentParser) -> None:
    """None means not given, so that the origin of a value can be told."""
    add = parser.add_argument
    add("--temp", type=float, default=None, help="sampling temperature; 0 (default) is greedy")
    add("--top-p", type=float, default=None)
    add("--top-k", type=int, default=None, help="0 (default): off")
    add("--min-p", type=float, default=None)
    for name in ("repetition", "presence", "frequency"):
        add(f"--{name}-penalty", type=float, default=None, metavar="X")
    add("--seed", type=seed, default=None, metavar="N|none", help="default 0; none sends no seed")
    add(
        "--send-only-openai",
        action="store_true",
        help="only fields of OpenAI's own API, for servers that refuse others",
    )


def seed(value: str) -> int | str:
    return value if value == "none" else int(value)


def sampling_of(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Value and origin of every sampler field."""
    given = {name: getattr(args, name) for name in SAMPLER}
    values = {name: default if given[name] is None else given[name] for name, (_, default) in SAMPLER.items()}
    values["seed"] = None if values["seed"] == "none" else values["seed"]
    return values, {name: "default" if value is None else "given" for name, value in given.items()}


def fields_of(sampling: dict[str, Any], top_k_off: int, only_openai: bool) -> dict[str, Any]:
    """What every request says of sampling: every field, so that no server's own defaults come in."""
    sent = {field: sampling[name] for name, (fields, _) in SAMPLER.items() for field in fields}
    sent["top_k"] = sent["top_k"] or top_k_off
    return {k: v for k, v in sent.items() if v is not None and not (only_openai and k in BEYOND_OPENAI)}
