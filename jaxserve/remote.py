"""A running OpenAI server, as its clients here see it: where it is, and what it says.

Knows HTTP's statuses and OpenAI's error object.  Does not know what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

CONNECT_TIMEOUT_S = 10.0
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class RemoteServer:
    """Where a server is, and how it is asked."""

    url: str
    """With or without the "/v1" that OpenAI's clients want."""
    api_key: str | None = None
    timeout_s: float = 600.0
    """Seconds of silence after which a request has failed."""

    @property
    def base_url(self) -> str:
        """Without "/v1"."""
        return self.url.rstrip("/").removesuffix("/v1")

    def client(self) -> httpx.AsyncClient:
        """A client without a bound on its connections; paths begin with "/v1".

        Raises:
            ValueError: the address is none.
        """
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        try:
            return httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.url!r} is no address of a server: {error}") from error


async def first_model(client: httpx.AsyncClient) -> str:
    """The first model that a server lists.

    Raises:
        ValueError: it cannot be reached, or lists none.
    """
    try:
        reply = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ValueError(f"no server answers at {client.base_url}: {reason(error)}") from error
    if reply.status_code != 200:
        raise ValueError(
            f"{client.base_url} does not list its models: "
            f"{error_text(reply.status_code, reply.content)}"
        )
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{client.base_url} lists no model; name one") from None


def reason(error: Exception) -> str:
    """Kind and message of an error, of which some have none."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def error_object(content: bytes) -> dict[str, Any]:
    """OpenAI's error object of an answer; one with the text as message if it has none."""
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    text = str(error) if error else content.decode(errors="replace")
    return {"message": " ".join(text.split())[:_LONGEST_MESSAGE]}


def error_text(status: int, content: bytes) -> str:
    """What an answer of another status than 200 says, in a line."""
    return f"status {status}: {error_object(content)['message']}".rstrip(": ")
