"""Serve a model over HTTP, and change its weights between requests whenever the trainer publishes new ones.

    python examples/serve_published.py s3://bucket/runs --port 8000
    curl localhost:8000/version
    curl 'localhost:8000/act?observation=3'

The model is the policy that `rl_publish.py` trains. A thread fetches and verifies each new version while requests are
answered, waits for the request in progress, and changes the tensors. So each answer comes from one version, also if
the trainer dies while it publishes.
"""

import argparse
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import torch
from rl_publish import OBSERVATIONS, Policy

from headrace.checkpoint import Subscriber
from headrace.dataio.core.errors import HeadraceError


def digest_of(model: torch.nn.Module) -> str:
    """A digest of all weights."""
    tensors = [tensor.view(torch.uint8).numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(tensors)).hexdigest()[:16]


class Served:
    """The model, and the lock that a request or a change of its weights holds."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.model, self.version = Policy().bfloat16().requires_grad_(False), {}
        self.subscriber, self.lock = subscriber, threading.Lock()

    def update(self) -> None:
        """Wait for a new version, and change the weights to it."""
        version = self.subscriber.wait()
        prepared = version.prepare(self.model.state_dict())  # the model may be used meanwhile
        with self.lock:
            prepared.commit()
            self.version = {"number": version.number, "step": version.step, "weights": digest_of(self.model)}
        print(f"version {version.number}, step {version.step}", flush=True)

    def follow(self) -> None:
        """Update for ever. If that fails, serve the weights that are there, and try again."""
        while True:
            try:
                self.update()
            except HeadraceError as error:
                print(f"no new version: {error}", flush=True)
                time.sleep(5)

    def act(self, observation: int) -> dict:
        """Choose an action, and tell the weights that chose it."""
        with self.lock:
            action = self.model(torch.tensor([observation])).logits.argmax().item()
            return {"action": action, "number": self.version["number"], "weights": digest_of(self.model)}


class Handler(BaseHTTPRequestHandler):
    served: Served
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        url, status, answer = urlsplit(self.path), 200, self.served.version
        try:
            if url.path != "/version":
                answer = self.served.act(int(parse_qs(url.query)["observation"][0]) % OBSERVATIONS)
        except (KeyError, ValueError):
            status, answer = 400, {"error": "there are /version and /act?observation=3"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="where the trainer writes its checkpoints")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with Subscriber(args.runs, "policy", poll=0.2) as subscriber:
        served = Handler.served = Served(subscriber)
        served.update()  # the first version is written as it is read, so nothing is served before
        threading.Thread(target=served.follow, daemon=True).start()
        server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
        print(f"serving on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
