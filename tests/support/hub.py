"""A stand-in for the Hugging Face hub on this machine, and the layout of its shared cache.

with HubServer() as hub:
    hub.repos["owner/name"] = Repo({"config.json": b"{}"})
    # HF_ENDPOINT = hub.url
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Files at `revisions`. Files of a `gated` one, and all of a `private` one, need a token."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    private: bool = False
    status: int = 0  # what it answers whatever is asked
    lost: tuple[str, ...] = ()  # listed, and not there when asked for

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class HubServer:
    """Answers as the hub does; `requests` are the methods and paths that it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    token: str = "hf_right"

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(body=True)

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def answer(self, body: bool) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                authorized = self.headers.get("Authorization") == f"Bearer {hub.token}"
                status, headers, data = hub.answer(unquote(urlsplit(self.path).path), authorized)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, authorized: bool) -> tuple[int, Mapping[str, str], bytes]:
        words = path.strip("/").split("/")
        is_api = words[:2] == ["api", "models"]
        words = words[2:] if is_api else words
        repo = self.repos.get("/".join(words[:2]))
        if repo is not None and repo.status:
            return repo.status, {}, b"no"
        if repo is None or (repo.private and not authorized):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        verb, revision, rest = words[2] if len(words) > 2 else "", words[3] if len(words) > 3 else "main", words[4:]
        if verb in ("revision", "tree"):  # a revision with a slash has no rest there
            revision, rest = "/".join([revision, *rest]), []
        if revision not in (*repo.revisions, repo.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if verb == "tree":
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repo.files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()
        if is_api:
            info = {"id": "/".join(words[:2]), "sha": repo.commit}
            siblings = [{"rfilename": name} for name in repo.files]
            return 200, {"Content-Type": "application/json"}, json.dumps({**info, "siblings": siblings}).encode()
        if repo.gated and not authorized:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = "/".join(rest)
        if name not in repo.files or name in repo.lost:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}, b""
        data = repo.files[name]
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": repo.commit}, data


def fill_cache(cache: Path, repo: str, files: Mapping[str, bytes], *, revision: str = "main") -> Path:
    """Put files into a cache as huggingface_hub lays them out; the snapshot's folder."""
    storage = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(repr((repo, revision)).encode()).hexdigest()
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    reference = storage / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    blobs = storage / "blobs"
    blobs.mkdir(exist_ok=True)
    for name, data in files.items():
        blob = blobs / hashlib.sha1(data).hexdigest()
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return snapshot
