"""A real server with OpenAI's endpoints on the loopback address, which answers from a tiny target, with faults."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from spectrain.data.template import ChatTemplate
from spectrain.decoding import generate_plain
from spectrain.exact.sampler import Sampler

KNOWN = {"model", "max_tokens", "temperature", "top_p", "seed", "prompt", "messages"}
PROBE_TOKENS = 2
LOCK, RUNS = threading.Lock(), {}  # one model, and the same few prompts in every test


def generation(target, prompt, body):
    """What the target answers, computed once."""
    sampler, budget, seed = Sampler(body["temperature"]), body["max_tokens"], body["seed"]
    key = (id(target), tuple(prompt), sampler, budget, 0 if sampler.greedy else seed)
    with LOCK:
        if key not in RUNS:
            RUNS[key] = generate_plain(target, prompt, sampler=sampler, max_new_tokens=budget, seed=seed)
        return RUNS[key]


def _read(call):
    """A tool call with its arguments as an object, as vLLM gives it to templates."""
    return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}


class Serving:
    """What the server knows and saw. Personality: does it ``take_ids`` as prompts, ``give_ids`` of answers, refuse
    fields beyond OpenAI's (``strict``), and which ``endpoints`` it has."""

    def __init__(self, target, *, take_ids=True, give_ids=True, strict=False, model="tiny",
                 endpoints=("completions", "chat/completions"), delay=0.0):  # fmt: skip
        self.target, self.take_ids, self.give_ids, self.strict = target, take_ids, give_ids, strict
        self.model, self.endpoints, self.delay = model, endpoints, delay
        self.faults = deque()  # of the next real requests: a status, or a function of the handler and the answer
        self.change = lambda answer: answer
        self.prefix = []  # ids that its chat template has and the local one does not
        self.bodies, self.probes, self.headers = [], [], []
        self.running = self.most_running = 0
        self.broken = None  # what every request for an answer is answered with: a status and words

    def prompt(self, body):
        if "prompt" in body:
            return body["prompt"]
        turns = [turn | {"tool_calls": list(map(_read, turn.get("tool_calls", [])))} for turn in body["messages"]]
        return self.prefix + ChatTemplate(self.target.tokenizer).render(turns, True, body.get("tools"))

    def answer(self, body):
        """The JSON of either endpoint, as vLLM forms it."""
        prompt = self.prompt(body)
        run = generation(self.target, prompt, body)
        time.sleep(self.delay)
        text = self.target.tokenizer.decode(run.tokens, skip_special_tokens=True)
        choice = {"index": 0, "finish_reason": {"eos": "stop", "budget": "length"}[run.finished]}
        found = {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(run.tokens)}}
        choice |= {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        if self.give_ids and body.get("return_token_ids"):
            choice["token_ids"] = list(run.tokens)
            (choice if "prompt" in body else found)["prompt_token_ids"] = prompt
        return self.change(found)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    @property
    def serving(self) -> Serving:
        return self.server.serving

    def send(self, status, value, **headers):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.send(200, {"object": "list", "data": [{"id": self.serving.model}, {"id": "other"}]})
        return self.send(404, {"detail": "Not Found"})

    def do_POST(self):
        serving, body = self.serving, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.removeprefix("/v1/") not in serving.endpoints:
            return self.send(404, {"detail": "Not Found"})
        if serving.strict and set(body) - KNOWN:
            return self.send(422, {"detail": f"Unexpected fields in the request: {sorted(set(body) - KNOWN)}"})
        if "prompt" in body and not serving.take_ids:
            return self.send(400, {"error": {"message": "prompt must be a string", "code": 400}})
        probe = body["max_tokens"] == PROBE_TOKENS
        (serving.probes if probe else serving.bodies).append(body)
        serving.headers.append(dict(self.headers))
        if serving.broken:
            return status(*serving.broken)(self, None)
        serving.running += 1
        serving.most_running = max(serving.running, serving.most_running)
        try:
            fault = serving.faults.popleft() if serving.faults and not probe else None
            if fault is None:
                return self.send(200, serving.answer(body))
            return fault(self, serving.answer(body))
        finally:
            serving.running -= 1


def status(code, message="busy", **headers):
    return lambda handler, _: handler.send(code, {"error": {"message": message}}, **headers)


def broken_off(handler, answer):
    """The connection ends in the middle of the body."""
    data = json.dumps(answer).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True


def hung_up(handler, _):
    """The connection ends without a word."""
    handler.close_connection = True


def slow(handler, answer):
    time.sleep(4.0)
    with_reader_gone(handler, answer)


def with_reader_gone(handler, answer):
    try:
        handler.send(200, answer)
    except OSError:
        handler.close_connection = True


def malformed(handler, _):
    handler.send(200, b'{"choices": [{"text": "a')


def without_choices(handler, answer):
    handler.send(200, answer | {"choices": []})


def aborted(handler, answer):
    handler.send(200, answer | {"choices": [answer["choices"][0] | {"finish_reason": "abort"}]})


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # clients that time out or are killed
        pass


@contextmanager
def running(serving):
    """Serve on a free port; yields the address up to /v1."""
    server = _Quiet(("127.0.0.1", 0), Handler)
    server.serving = serving
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
