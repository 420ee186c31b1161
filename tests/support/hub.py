"""A hub on localhost: the requests that huggingface_hub makes to list and download a model, answered out of a dict."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40
NAME = "tiny-org/tiny-moe"


class Hub:
    """The server's state, which a test changes while it runs.

    files: name -> contents, of every revision. revisions: those that exist. refusal: (status, X-Error-Code) of every
    answer, or None. gated: files themselves are refused. cut: file -> how many of its GETs break off half way.
    requests: "METHOD path" of all that came.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT}
        self.refusal: tuple[int, str] | None = None
        self.is_gated = False
        self.cut: dict[str, int] = {}
        self.requests: list[str] = []
        self.url = ""

    def downloaded(self) -> set[str]:
        """Names of files whose contents were asked for."""
        return {line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line}


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub that holds one model, ``NAME``."""
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        api, resolve = f"/api/models/{NAME}/", f"/{NAME}/resolve/"
        if hub.refusal is not None:
            return self._refuse(*hub.refusal)
        if path.startswith(api):
            kind, _, revision = path.removeprefix(api).partition("/")
        elif path.startswith(resolve):
            kind, (revision, _, name) = "resolve", path.removeprefix(resolve).partition("/")
        else:
            return self._refuse(404, "RepoNotFound")
        if revision not in hub.revisions:
            return self._refuse(404, "RevisionNotFound")
        if kind == "revision":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in hub.files.items()]
            return self._json({"id": NAME, "modelId": NAME, "sha": hub.revisions[revision], "siblings": siblings})
        if kind == "tree":
            return self._json(
                [
                    {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                    for file, data in hub.files.items()
                ]
            )
        if hub.is_gated:
            return self._refuse(403, "GatedRepo")
        if name not in hub.files:
            return self._refuse(404, "EntryNotFound")
        return self._file(name, hub.files[name], hub.revisions[revision])

    def _file(self, name: str, data: bytes, commit: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut.get(name, 0):
            self.hub.cut[name] -= 1
            self.wfile.write(data[start : (start + len(data)) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def _json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
