"""Messages over a stream: a JSON object, and bytes beside it; nothing that is read here can run.

A message is two lengths of 4 bytes, of the JSON and of the payload, then the JSON, {"kind": …, …}, then the payload.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

CHUNK = 1 << 18  # bytes read at a time
HEAD = struct.Struct("!II")


@dataclass(frozen=True)
class Message:
    kind: str
    body: dict[str, Any]
    payload: bytes = b""


def frame(message: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return HEAD.pack(len(text), len(payload)) + text + payload


class Link:
    """One end of a connection that both sides trust: a socket pair between a process and its fork."""

    _proof_size = 0  # bytes in front of a frame

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._socket = stream
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> int:
        return len(self._outgoing)

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends one message, now or when :meth:`flush` can."""
        self._outgoing += self._wrap(frame(message, payload))
        self.flush()

    def _wrap(self, frame: bytes) -> bytes:
        return frame

    def flush(self) -> None:
        try:
            while self._outgoing and not self.closed:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._fail()

    def _fail(self) -> None:
        self.closed = True
        self._outgoing.clear()

    def receive(self) -> list[Message]:
        """Returns what has come in whole; notes in `closed` that the other side has gone."""
        try:
            while data := self._socket.recv(CHUNK):
                self._incoming += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return self._unwrap()

    def _unwrap(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._incoming) >= self._proof_size + HEAD.size:
            text, payload = HEAD.unpack_from(self._incoming, self._proof_size)
            end = self._proof_size + HEAD.size + text + payload
            if not self._allows(end) or len(self._incoming) < end:
                break
            proof, frame = bytes(self._incoming[: self._proof_size]), bytes(self._incoming[self._proof_size : end])
            if not self._proves(proof, frame):
                break
            del self._incoming[:end]
            body = json.loads(frame[HEAD.size : HEAD.size + text])
            messages.append(Message(body.pop("kind"), body, frame[HEAD.size + text :]))
        return messages

    def _allows(self, size: int) -> bool:  # noqa: ARG002
        return True

    def _proves(self, proof: bytes, frame: bytes) -> bool:  # noqa: ARG002
        return True

    def drain(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._outgoing and not self.closed and (left := until - time.monotonic()) > 0:
            self.wait(left)
            self.flush()

    def wait(self, seconds: float, *, reads: bool = False) -> None:
        """Waits until the socket takes what is left to send or, where it `reads`, something has come."""
        poller = select.poll()  # select(2) knows the first 1024 descriptors only
        poller.register(self._socket, (select.POLLOUT if self._outgoing else 0) | (select.POLLIN if reads else 0))
        poller.poll(1000 * seconds)

    def close(self) -> None:
        self._socket.close()
