"""An HTTP server whose answers a test decides; nothing of it outlives the test."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Reply = Callable[[str, dict[str, Any] | None], tuple[int, bytes]]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for requests under way: they may use what the next test uses


@contextlib.contextmanager
def serving(reply: Reply, *, logins: list[str | None] | None = None, port: int = 0) -> Iterator[str]:
    """The address of a server whose every answer is `reply(path, body)`: a status and bytes; status 0 closes the connection.
    `logins` takes the Authorization of each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self.answer(None)

        def answer(self, body: dict[str, Any] | None) -> None:
            if logins is not None:
                logins.append(self.headers["Authorization"])
            status, content = reply(self.path, body)
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
