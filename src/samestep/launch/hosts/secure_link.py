"""The connection between the controller and an agent on another host: both prove that they know the run's secret.

    agent                                          controller
                                     <-  {"protocol": 2, "nonce": a}
      {"nonce": b, "about": …,       ->
       "proof": mac(token, "agent", a, b, about)}
                                     <-  {"proof": mac(token, "head", a, b)}    or {"refused": why}
    then frames both ways (samestep.launch.link), each with mac(mac(token, "key", a, b), direction, number, frame)

mac is HMAC-SHA256 (RFC 2104). The secret never travels; fresh nonces, the number and the direction keep messages from
being repeated, dropped, reordered or sent back. Nothing is encrypted: torch's own connections are not either.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from samestep.errors import RendezvousError
from samestep.launch.link import Link, Message
from samestep.schema import parse_object

PROTOCOL = 2
MOST_PENDING = 2048  # and never more than a share of the descriptors this process may have
SHARE, AT_ONCE = 4, 64  # of the descriptors; pending peers let in before the controller's loop goes on
HANDSHAKE_S = 5.0  # seconds a peer may take
MOST_LINE, MOST_FRAME = 1 << 16, 1 << 24  # bytes of one line of the handshake, of one frame
MOST_WAITING = 1 << 28  # bytes sent that the other side has not taken: more ends the connection, before memory does
RETRANSMITS, PROBES, LAST_ACK = 2, 3, 56  # where struct tcp_info has tcpi_…; the last in milliseconds
TRY_S = 3.0  # seconds for one address to answer
_NUMBER, MAC = struct.Struct("!Q"), 32


def new_token() -> str:
    return secrets.token_hex(32)


def _mac(key: bytes, *parts: str | bytes) -> bytes:
    """Authenticates parts, each with its length, so that no two lists of parts are alike."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part  # JSON may hold half a pair
        digest.update(_NUMBER.pack(len(raw)) + raw)
    return digest.digest()


def _canonical(about: Any) -> str:
    """Returns the one text of what JSON makes of `about`: number keys become strings before they are sorted."""
    return json.dumps(json.loads(json.dumps(about)), sort_keys=True)


class AuthenticatedLink(Link):
    """One end of a connection whose every frame carries a proof of origin and place.

    `peer_info` is what the other side told of itself, `address` where it is; `fault` says why the connection
    was ended here, if it was.
    """

    _proof_size = MAC

    def __init__(self, stream: socket.socket, key: bytes, ours: str, theirs: str, about: dict[str, Any]) -> None:
        self.address: tuple[str, int] = stream.getpeername()[:2]
        self.local_address: str = stream.getsockname()[0]
        super().__init__(stream)
        self.peer_info = about
        self.fault: str | None = None
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    def unacknowledged_s(self) -> float:
        """Returns for how many seconds the other side's kernel has not answered what was sent twice (tcp(7), TCP_INFO).

        A process that stands still is not a network that has failed: its kernel answers, or has nothing to answer.
        """
        raw = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK + 4)
        last = float(struct.unpack_from("=I", raw, LAST_ACK)[0]) / 1000
        return last if raw[RETRANSMITS] or raw[PROBES] else 0.0

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends one message, now or when :meth:`flush` can; to one that has gone, nothing."""
        if self.closed:
            return
        super().send(message, payload)
        if self.pending > MOST_WAITING:
            self._end(f"has left {self.pending} bytes untaken")

    def _wrap(self, frame: bytes) -> bytes:
        if MAC + len(frame) > MOST_FRAME:
            raise ValueError(f"a message of {len(frame)} bytes is more than {MOST_FRAME}: send it in parts")
        proof = _mac(self._key, self._ours, _NUMBER.pack(self._sent), frame)
        self._sent += 1
        return proof + frame

    def receive(self) -> list[Message]:
        found = super().receive()
        if self.closed and self._incoming and self.fault is None:
            self._end("was cut off in the middle of a message")
        return found

    def _allows(self, size: int) -> bool:
        if size > MOST_FRAME:
            self._end(f"sent a frame of {size} bytes")
        return self.fault is None

    def _proves(self, proof: bytes, frame: bytes) -> bool:
        right = _mac(self._key, self._theirs, _NUMBER.pack(self._received), frame)
        if not hmac.compare_digest(proof, right):
            self._end("sent a frame that the other side has not sent, or not at this place")
            return False
        self._received += 1
        return True

    def _end(self, what: str) -> None:
        self.fault = f"{self.address[0]}:{self.address[1]} {what}"
        self._fail()


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@dataclass
class PendingPeer:
    stream: socket.socket
    address: str
    nonce: str
    since: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Where agents come in; a context manager. Watch :meth:`fileno`, then :meth:`accept` until it returns None.

    A peer that has proved nothing cannot make the controller wait: handshakes run beside each other, and their number
    and time are limited.

    Raises:
        RendezvousError: the port is taken, or the address is not this host's.
    """

    def __init__(self, token: str, address: str = "0.0.0.0", port: int = 0) -> None:  # noqa: S104  (others must reach it)
        self._token = _token_key(token)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if port:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise RendezvousError(f"cannot listen at {address}:{port}: {error.strerror}; choose another") from error
        self._socket.listen(MOST_PENDING)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._poll = select.epoll()
        self._poll.register(self._socket.fileno(), select.EPOLLIN)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_PENDING if soft == resource.RLIM_INFINITY else min(MOST_PENDING, max(1, soft // SHARE))
        self._pending: dict[int, PendingPeer] = {}
        self._ready: list[AuthenticatedLink] = []
        self.rejected: list[str] = []  # addresses, and why

    def fileno(self) -> int:
        return self._poll.fileno()

    def accept(self) -> AuthenticatedLink | None:
        for descriptor, _ in self._poll.poll(0):
            if descriptor == self._socket.fileno():
                self._accept_peers()
            elif descriptor in self._pending:
                self._receive(self._pending[descriptor])
        self._expire()
        return self._ready.pop(0) if self._ready else None

    def _accept_peers(self) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError: no more; or one that has gone again
            for _ in range(AT_ONCE):
                stream, (address, _) = self._socket.accept()
                if len(self._pending) >= self._most:
                    self._drop(next(iter(self._pending.values())), "too many came after it")
                stream.setblocking(False)
                _tune(stream)
                peer = PendingPeer(stream, address, secrets.token_hex(32), time.monotonic())
                self._pending[stream.fileno()] = peer
                self._poll.register(stream.fileno(), select.EPOLLIN)
                self._answer(peer, {"protocol": PROTOCOL, "nonce": peer.nonce})

    def _answer(self, peer: PendingPeer, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has gone, and will be found so
            peer.stream.send(json.dumps(message).encode() + b"\n")

    def _receive(self, peer: PendingPeer) -> None:
        try:
            data = peer.stream.recv(MOST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        line, newline, rest = peer.received.partition(b"\n")
        if newline:
            self._check(peer, bytes(line), bytes(rest))
        elif not data or len(peer.received) > MOST_LINE:
            self._drop(peer, "it said nothing that an agent says")

    def _check(self, peer: PendingPeer, line: bytes, rest: bytes) -> None:
        try:
            hello = parse_object(line)
            nonce, about, proof = str(hello["nonce"]), dict(hello["about"]), bytes.fromhex(hello["proof"])
            right = _mac(self._token, "agent", peer.nonce, nonce, _canonical(about))
        except (ValueError, KeyError, TypeError, RecursionError):
            self._drop(peer, "it said nothing that an agent says")
            return
        if rest or not hmac.compare_digest(proof, right):
            self._answer(peer, {"refused": "it uses a different token"})
            self._drop(peer, "it uses a different token")
            return
        self._accept_peer(peer, nonce, about)

    def _accept_peer(self, peer: PendingPeer, nonce: str, about: dict[str, Any]) -> None:
        """Takes in a peer that has proved itself, unless it has left meanwhile: it would connect twice."""
        key = _mac(self._token, "key", peer.nonce, nonce)
        try:
            if _has_left(peer.stream):
                raise ConnectionError
            link = AuthenticatedLink(peer.stream, key, "head", "agent", about)
        except OSError:
            self._drop(peer, "it left before it was heard")
        else:
            self._answer(peer, {"proof": _mac(self._token, "head", peer.nonce, nonce).hex()})
            self._forget(peer)
            self._ready.append(link)

    def _drop(self, peer: PendingPeer, reason: str) -> None:
        self.rejected.append(f"{peer.address}: {reason}")
        del self.rejected[:-100]
        self._forget(peer)
        peer.stream.close()

    def _forget(self, peer: PendingPeer) -> None:
        self._poll.unregister(peer.stream.fileno())
        del self._pending[peer.stream.fileno()]

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in list(self._pending.values()):  # the oldest first
            if now - peer.since < HANDSHAKE_S:
                break
            self._drop(peer, f"it proved nothing in {HANDSHAKE_S:.0f} s")

    def close(self) -> None:
        for peer in list(self._pending.values()):
            self._forget(peer)
            peer.stream.close()
        self._poll.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _has_left(stream: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return stream.recv(1, socket.MSG_PEEK) == b""
    return False


def _token_key(token: str) -> bytes:
    return bytes.fromhex(token) if re.fullmatch(rf"[0-9a-f]{{{2 * MAC}}}", token) else token.encode()


def connect(
    addresses: Sequence[str], port: int, token: str, about: dict[str, Any], *, seconds: float, patient: bool = True
) -> AuthenticatedLink:
    """Returns a connection to the controller, at the first of its addresses that answers.

    `about` describes this side; `patient`: the controller may not be there yet, so a refusal is no answer.

    Raises:
        RendezvousError: no address answered, or not as the controller of this run; says what was tried.
    """
    key = _token_key(token)
    until, reasons = time.monotonic() + seconds, dict[str, str]()
    while True:
        answered = False  # by a process that is not our controller
        for address in addresses:
            try:
                return _reach(address, port, key, about, until)
            except RendezvousError as error:
                reasons[address], answered = str(error), True
            except TimeoutError as error:  # what an earlier try has seen says more
                reasons.setdefault(address, str(error) or "no answer")
            except OSError as error:
                reasons[address] = error.strerror or str(error) or "no answer"
        if answered or not patient or time.monotonic() >= until:
            break
        time.sleep(0.1)
    tried = "; ".join(f"{address}:{port} {reason}" for address, reason in reasons.items())
    lone = answered and len(addresses) == 1
    raise RendezvousError(reasons[addresses[0]] if lone else f"the head of the run cannot be reached: {tried}")


def _reach(address: str, port: int, token: bytes, about: dict[str, Any], until: float) -> AuthenticatedLink:
    seconds = min(TRY_S, max(0.1, until - time.monotonic()))
    with contextlib.closing(socket.create_connection((address, port), seconds)) as stream:
        return _prove(stream, token, about, time.monotonic() + min(HANDSHAKE_S, max(0.1, until - time.monotonic())))


def _prove(stream: socket.socket, token: bytes, about: dict[str, Any], until: float) -> AuthenticatedLink:
    _tune(stream)
    hello = _line(stream, until)
    if hello.get("protocol") != PROTOCOL or not isinstance(hello.get("nonce"), str):
        raise RendezvousError(f"{stream.getpeername()[0]} answers, but not as the head of a run of this version")
    nonce = secrets.token_hex(32)
    proof = _mac(token, "agent", hello["nonce"], nonce, _canonical(about)).hex()
    stream.sendall(json.dumps({"nonce": nonce, "about": about, "proof": proof}).encode() + b"\n")
    proven = str(_line(stream, until).get("proof", "")).encode(errors="surrogatepass")
    if not hmac.compare_digest(proven, _mac(token, "head", hello["nonce"], nonce).hex().encode()):
        raise RendezvousError("the controller uses a different token: set the same SAMESTEP_TOKEN on every host")
    stream.settimeout(None)
    session = _mac(token, "key", hello["nonce"], nonce)
    return AuthenticatedLink(stream.dup(), session, "agent", "head", {})


def _line(stream: socket.socket, until: float) -> dict[str, Any]:
    """Reads one line of the handshake, and nothing behind it: what follows belongs to the frames."""
    received = bytearray()
    while not received.endswith(b"\n"):
        stream.settimeout(max(0.001, until - time.monotonic()))
        there = stream.recv(MOST_LINE, socket.MSG_PEEK)
        if not there or len(received) > MOST_LINE:
            raise OSError(None, "it hung up before it had received who it is")
        received += stream.recv(there.find(b"\n") + 1 or len(there))
        if time.monotonic() > until:
            raise OSError(None, "it took too long to say who it is")
    with contextlib.suppress(ValueError):
        return parse_object(bytes(received))
    raise OSError(None, "something else answers there")
