"""Server options and limits: names, defaults and help texts, from which the flags are made.

Frozen, and each value is valid once it exists. Knows nothing of the engine's own options.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapless.config import parse_bytes
from gapless.core.params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS
from gapless.errors import ConfigError
from gapless.text import reasoning
from gapless.text.tools import find as tool_formats


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server listens, what it allows, and how long it waits."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = _option(8000, "port to listen on; 0 picks a free one")
    served_model_name: tuple[str, ...] = _option((), "name of the model for clients; repeatable")
    api_key: tuple[str, ...] = _option((), "key that clients must send; repeatable; also from GAPLESS_API_KEY")
    api_key_file: str | None = _option(None, "file with one key per line")
    cors_origin: tuple[str, ...] = _option((), "origin whose pages may call the server from a browser; repeatable")
    allowed_host: tuple[str, ...] = _option((), "further name to allow in the Host header; * is any")
    ssl_certfile: str | None = _option(None, "certificate chain in PEM format, for HTTPS")
    ssl_keyfile: str | None = _option(None, "private key of the certificate; default: in the same file")
    log_file: str | None = _option(None, "append the JSON log to this file; default: standard error")
    record_trace: str | None = _option(None, "append lengths, times and prefix hashes of requests, for `gapless sim`")
    max_queue: int = _option(1024, "most waiting requests, beyond those that run; further ones get status 429")
    max_per_client: int = _option(0, "most running and waiting requests of one key, or address; 0 is no limit")
    max_body: str = _option("4MiB", "largest request body")
    max_n: int = _option(16, f"largest n and best_of of one request, up to {MAX_CHOICES}")
    max_choices: int = _option(1024, "most prompts of one request times n, or best_of")
    max_output_tokens: int = _option(2**20, "largest max_tokens of one request")
    default_max_tokens: int = _option(4096, "max_tokens of chats and responses that do not set it; less if less fits")
    max_logprobs: int = _option(20, f"largest top_logprobs of one request, up to {MAX_LOGPROBS}")
    max_stop: int = _option(16, f"most stop strings of one request, up to {MAX_STOP_STRINGS}")
    max_stop_length: int = _option(256, "most characters of one stop string")
    request_timeout: float = _option(600.0, "seconds that one request may take, queue included")
    header_timeout: float = _option(10.0, "seconds that a client may take to send the headers of a request")
    body_timeout: float = _option(30.0, "seconds that a client may take to send its request body")
    write_timeout: float = _option(60.0, "seconds without a byte read from a stream before its client counts as gone")
    chat_template: str | None = _option(None, "file with a chat template to use instead of the model's own")
    tool_format: str = _option("auto", f"how the model writes calls of tools: auto, {', '.join(tool_formats.NAMES)}")
    reasoning_format: str = _option("auto", f"tags of reasoning: auto, none, {', '.join(reasoning.NAMES)}")
    template_timeout: float = _option(2.0, "seconds that the chat template may take to render a conversation")
    health_timeout: float = _option(10.0, "seconds that the engine may take to answer /health")
    load_timeout: float = _option(120.0, "seconds without progress of a load before the engine is killed and restarted")
    step_timeout: float = _option(60.0, "seconds without the end of a step before the engine is killed and restarted")
    drain_timeout: float = _option(30.0, "seconds that running requests have to finish after SIGTERM")

    def __post_init__(self) -> None:
        parse_bytes("max_body", self.max_body)
        _whole("port", self.port, 0, 65535)
        _whole("max_queue", self.max_queue, 0, 2**20)
        _whole("max_per_client", self.max_per_client, 0, 2**20)
        for name in ("max_choices", "max_output_tokens", "default_max_tokens", "max_stop_length"):
            _whole(name, getattr(self, name), 1, 2**31 - 1)
        _whole("max_n", self.max_n, 1, MAX_CHOICES)
        _whole("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        _whole("max_stop", self.max_stop, 0, MAX_STOP_STRINGS)
        tool_formats.find_format(None, self.tool_format)
        reasoning.find_reasoning(None, lambda tag: False, self.reasoning_format)
        if "" in self.served_model_name:
            raise ConfigError("served_model_name must not be empty")
        for name in ("request", "header", "body", "write", "template", "health", "load", "step"):
            _seconds(f"{name}_timeout", getattr(self, f"{name}_timeout"), above_zero=True)
        _seconds("drain_timeout", self.drain_timeout, above_zero=False)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes("max_body", self.max_body)

    @property
    def default_limit(self) -> int:
        """Tokens of an answer to a client that sets no limit."""
        return min(self.default_max_tokens, self.max_output_tokens)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def allowed_hosts(self, *, has_keys: bool) -> frozenset[str]:
        """Names that the Host header may have; an empty set allows any.

        This stops DNS rebinding. A page of a foreign site can point its own name at the loopback address, and then has
        the same origin as a server there. Its browser still sends the name. With a key, or on a server that others can
        reach anyway, names are checked only if some are given.
        """
        if "*" in self.allowed_host or not (self.allowed_host or (self.is_loopback and not has_keys)):
            return frozenset()
        return frozenset(host.lower() for host in ("localhost", "127.0.0.1", "::1", self.host, *self.allowed_host))

    def check_tls(self) -> None:
        """Raise ConfigError unless certificate and key can be used."""
        if self.ssl_certfile is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
            except OSError as error:
                files = " and ".join(name for name in (self.ssl_certfile, self.ssl_keyfile) if name is not None)
                raise ConfigError(f"ssl_certfile {files}: {error}") from error


def read_keys(options: ServerOptions, from_environment: str | None) -> tuple[str, ...]:
    """All keys: flags, the file's lines, and the environment's. Raises ConfigError."""
    lines: list[str] = []
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {options.api_key_file}: {error}") from error
    keys = [*options.api_key, *(line.strip() for line in lines), *([from_environment] if from_environment else [])]
    found = tuple(key for key in keys if key)
    if not found and (options.api_key or options.api_key_file is not None):
        raise ConfigError("an API key was asked for, but none is given: the flag or the file is empty")
    return found


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number between {low} and {high}, got {value!r}")


def _seconds(name: str, value: Any, *, above_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 10**9 or (above_zero and value == 0):
        raise ConfigError(f"{name} must be a number of seconds{' above 0' if above_zero else ''}, got {value!r}")
