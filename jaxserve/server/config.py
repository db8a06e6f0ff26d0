"""What a server is told apart from its engine's configuration.

Knows names, bounds and defaults.  Knows no HTTP library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,*]+")


def _option(default: Any, doc: str) -> Any:
    """A field whose help text the command line reads from its metadata."""
    return field(default=default, metadata={"help": doc, "choices": None})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, names and limits of a server.

    Raises:
        ValueError: a value is out of range, naming the field, the value and the bound.
    """

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one, which a log line names.")
    root_path: str = _option("", "Path under which a proxy in front shows this server.")
    served_model_name: tuple[str, ...] = _option(
        (), 'What requests may call the model in "model"; the model\'s file name if absent.'
    )
    api_key: str | None = _option(
        None, "Bearer token that requests must carry; anyone may ask if absent."
    )
    allowed_origins: tuple[str, ...] = _option(
        (), 'Web pages that may ask from a browser, such as "https://chat.example"; "*" is all.'
    )
    max_queue: int = _option(
        1024, "Samples that may wait for a slot; a request that finds more is told to come back."
    )
    max_body_mib: float = _option(32.0, "Largest body of a request.")
    drain_timeout_s: float = _option(
        30.0, "How long running requests may go on after SIGTERM before they are cut."
    )
    keep_alive_s: int = _option(60, "How long an idle connection is kept open.")
    profiler_dir: str | None = _option(
        None, "Where /start_profile writes traces; without it there is no such endpoint."
    )
    response_template: str | None = _option(
        None,
        "How the model writes reasoning and tool calls: a JSON file, the name of a built-in "
        "template, or none; if absent the tokenizer's own, or what its chat template shows.",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be in [0, 65535]")
        if self.max_queue < 1:
            raise ValueError(f"max_queue={self.max_queue} must be at least 1")
        if not 0 < self.max_body_mib <= 4096:
            raise ValueError(f"max_body_mib={self.max_body_mib} must be in (0, 4096]")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ValueError(f"drain_timeout_s={self.drain_timeout_s} must be at least 0")
        if self.keep_alive_s < 1:
            raise ValueError(f"keep_alive_s={self.keep_alive_s} must be at least 1")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key is empty; leave it out to let anyone ask")
        if any(not name for name in self.served_model_name):
            raise ValueError("served_model_name has an empty name; leave it out")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}; an origin is a scheme, a host and perhaps a "
                    'port, such as "http://localhost:3000", without a path; "*" is every page'
                )

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mib` in bytes."""
        return int(self.max_body_mib * MIB)
