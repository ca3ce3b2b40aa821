"""The page in the browser: on 127.0.0.1 alone, at an address with a secret; or as one file."""

import asyncio
import json
import secrets
import urllib.parse
from pathlib import Path

from aiohttp import web

from rl.errors import UserError
from tools.view.answers import Answers

PAGE = Path(__file__).with_name("page.html")
# Nothing is fetched but answers, and no text of a response is ever a script: page.html also writes all text as text.
POLICY = "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:"
HEADERS = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def page(answers: dict[str, object] | None = None) -> tuple[str, str]:
    """Return the page, with the answers if there are any, and its Content-Security-Policy, which it also has itself."""
    nonce = secrets.token_hex(16)
    policy = POLICY.format(nonce)
    data = json.dumps(answers).replace("<", "\\u003c")  # no text can end the element
    return PAGE.read_text().replace("NONCE", nonce).replace("POLICY", policy).replace('"ANSWERS"', data), policy


def as_file(answers: Answers, steps: range, file: Path) -> None:
    """Write the page with all answers about the steps as one file, which needs no server."""
    text, _ = page({path: answers(path) for path in answers.paths(steps)})
    file.write_text(text, errors="backslashreplace")


def application(answers: Answers, secret: str) -> web.Application:
    """Return the server's application: the page and its answers, below /<secret>/."""

    async def show(_: web.Request) -> web.Response:
        text, policy = page()
        return web.Response(text=text, content_type="text/html", headers=HEADERS | {"Content-Security-Policy": policy})

    async def answer(request: web.Request) -> web.Response:
        path = request.match_info["path"] + urllib.parse.unquote(request.rel_url.raw_query_string)  # a text to search
        try:
            found, status = await asyncio.to_thread(answers, path), 200
        except UserError as error:
            found, status = {"error": str(error)}, 404
        return web.json_response(found, status=status, headers=HEADERS)

    app = web.Application()
    app.add_routes([web.get(f"/{secret}/", show), web.get(f"/{secret}/answers/{{path:.*}}", answer)])
    return app


def serve(answers: Answers, port: int) -> None:
    """Serve the page until Ctrl-C. Raise UserError if the port is taken."""
    secret = secrets.token_urlsafe(12)
    print(f"http://127.0.0.1:{port}/{secret}/    (Ctrl-C ends it)", flush=True)
    try:
        web.run_app(application(answers, secret), host="127.0.0.1", port=port, print=None, access_log=None)
    except OSError as error:
        raise UserError(f"--port {port} cannot be used ({error.strerror}). Choose another.") from error
