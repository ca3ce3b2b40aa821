"""An OpenAI-compatible endpoint that is rude on request: what it does with a question hangs on the response that it judges."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROMPT_TOKENS, COMPLETION_TOKENS = 7, 2  # of each answer


def mark_of(text: str) -> str:
    """The mark around the data of a question to the judge: the last one, as data may imitate others."""
    return re.findall(r"^----- end (\w+) -----$", text, re.M)[-1]


def part(text: str, name: str) -> str:
    """What a question to the judge holds under this name."""
    mark = mark_of(text)
    return re.search(rf"^----- {name} {mark} -----\n(.*?)\n----- end {mark} -----$", text, re.M | re.S)[1]


class Judge:
    """What the endpoint's threads share. It answers "yes" if the response has the reference answer in it, "no" otherwise."""

    def __init__(self, models=("judge",), takes_choices=True, rubbish="\0"):
        """rubbish: what a response has in it that makes no answer a word of the rubric."""
        self.models, self.takes_choices, self.rubbish = list(models), takes_choices, rubbish
        self.asked: list[dict] = []  # the bodies of all questions
        self.seen: dict[str, int] = {}  # how often each response was asked about
        self.at_once, self.most_at_once = 0, 0
        self.crowd = threading.Barrier(1)  # questions about "crowd" are answered once that many are there
        self.closed, self.lock = threading.Event(), threading.Lock()

    def answer(self, body: dict) -> tuple[int, dict, bytes | None]:
        """(status, headers, body; None cuts the connection)."""
        text = body["messages"][-1]["content"]
        response = part(text, "response")
        with self.lock:
            self.asked.append(body)
            self.seen[response] = times = self.seen.get(response, 0) + 1
        if not self.takes_choices and "structured_outputs" in body:
            return 400, {}, b'{"error": {"message": "unknown field structured_outputs"}}'
        for word, status, headers in (("500", 500, {}), ("429", 429, {"Retry-After": "0.01"}), ("401", 401, {})):
            if response.startswith(word) and (response.endswith("always") or times <= 2):
                return status, headers, b'{"error": {"message": "not now"}}'
        if response == "cut" or (response == "cut once" and times == 1):
            return 200, {}, None
        if response == "garbage":
            return 200, {}, b"<html>\x00 this is no JSON"
        if response == "no choices":
            return 200, {}, b"{}"
        if response == "hang":
            self.closed.wait(600)
        if response == "crowd":
            self.crowd.wait(120)
        word = "yes" if part(text, "reference answer") in response else "no"
        word = "no idea" if self.rubbish in response else word
        said = {"rubbish": "I would say that it is fine.", "both": "yes, no", "nothing": None, "loud": "**YES.**"}.get(
            response, word
        )
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS, "total_tokens": 9}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        full = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
        return 200, {}, json.dumps(full).encode()


@contextlib.contextmanager
def serve(judge: Judge) -> Iterator[str]:
    """The endpoint's URL while it serves."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "me"} for name in judge.models]
            self._send(200, {}, json.dumps({"object": "list", "data": models}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] not in judge.models:
                return self._send(404, {}, b'{"error": {"message": "The model does not exist.", "code": 404}}')
            text = body["messages"][-1]["content"]
            if not part(text, "response"):  # the question about nothing, at the start
                mark = mark_of(text)
                body["messages"][-1]["content"] += f"\n----- reference answer {mark} -----\nx\n----- end {mark} -----"
            self._send(*judge.answer(body))

        def _send(self, status, headers, body):
            if body is None:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size, daemon_threads = 256, True

        def handle_error(self, *_):
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            judge.closed.set()
            server.shutdown()
