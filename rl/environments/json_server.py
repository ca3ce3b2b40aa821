"""HTTP requests with JSON bodies: the base of an episode's endpoint and of the gateway for all episodes."""

import hmac
import json
import socket
import socketserver
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

LARGEST, LARGEST_OF_STRANGERS = 1 << 26, 1 << 16  # bytes of a request with a valid key, and of one without
BODY_SECONDS = 60.0  # time limit for receiving the whole body
PART = 1 << 20  # bytes of the body that are read at once


def set_deadline(connection: socket.socket, deadline: float) -> None:
    """Let the next read of the connection wait until the deadline. Raise TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


class Refused(Exception):
    """A request that cannot be answered: its HTTP status and error body."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server with a thread for each connection. key: the one that requests must have; None if it was checked elsewhere."""

    daemon_threads, block_on_close, request_queue_size, allow_reuse_address = True, False, 128, True
    key: str | None = None
    closes = False  # whether to close each connection after one request

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a client that breaks its connection affects nobody else."""


class Handler(BaseHTTPRequestHandler):
    """A client's connection."""

    protocol_version, server_version = "HTTP/1.1", "policy"
    wbufsize = 1 << 16  # without a buffer, the second packet of an answer would wait for the first one's acknowledgement
    server: Server
    routes: Mapping[str, str]  # "POST /v1/path" -> name of a method: body -> answer, or None if it has sent one

    def do_GET(self) -> None:
        self._respond(read=False)

    def do_POST(self) -> None:
        self._respond(read=True)

    def _respond(self, read: bool) -> None:
        try:
            refused = self.wrong_key()
            text = self._body(LARGEST_OF_STRANGERS if refused and refused.status == 401 else LARGEST) if read else b""
            if refused:
                raise refused
            name = self.routes.get(f"{self.command} {self.path.partition('?')[0]}")
            if name is None:
                raise Refused(404, f"there are {', '.join(self.routes)} here")
            try:
                body = json.loads(text or b"{}")
            except (ValueError, RecursionError) as error:
                raise Refused(400, f"the request is not JSON: {error}") from None
            if not isinstance(body, dict):
                raise Refused(400, "the request is not a JSON object")
            answer = getattr(self, name)(body)
        except Refused as refused:
            self.send(refused.status, refused.body)
            return
        if answer is not None:
            self.send(200, answer)

    @property
    def given_key(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def wrong_key(self) -> Refused | None:
        """Return the refusal of a request with a wrong key; None if the key is right."""
        key = self.server.key
        if key is None or hmac.compare_digest(self.given_key.encode(), key.encode()):
            return None
        return Refused(401, "the key is not this session's OPENAI_API_KEY", "invalid_api_key")

    def _body(self, most: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > most:
            self.close_connection = True
            raise Refused(413 if length.isdecimal() else 411, f"Content-Length: must be a number up to {most}")
        deadline, body = time.monotonic() + BODY_SECONDS, bytearray()
        try:
            while missing := int(length) - len(body):
                set_deadline(self.connection, deadline)
                part = self.rfile.read1(min(missing, PART))
                if not part:
                    break
                body += part
        finally:
            self.connection.settimeout(None)
        return bytes(body)

    def is_open(self) -> bool:
        """Return whether the client still has the connection open."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, status: int, body: dict) -> None:
        """Answer with a JSON object."""
        self.write(status, "application/json", json.dumps(body).encode())

    def write(self, status: int, kind: str, data: bytes) -> None:
        """Answer with `data`. kind: its content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.server.closes:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Print nothing: an agent's calls are counted as turns."""
