"""Answers by a real server on the loopback address: ids as sampled where it gives them, no row lost or doubled."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import serving as faults
from serving import Serving, running, status

from spectrain.config import load_recipe
from spectrain.data.conversations import encode_all, load_conversations, parse_conversation, render_prompt
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.regenerate import RegenerateConfig, ServerConfig, client, empties, regenerate

TEXTS = ("hello", "Count to 12.", "What is this?", "hello hello hello", "1 2 3", "a", "b", "1 + 1?")
SECRET = "The launch code is 8417 and the key lies under the third stone."
GREEDY = {"max_new_tokens": 10, "seed": 3}


def chats(texts=TEXTS):
    return [parse_conversation({"id": f"c{i}", "kind": "chat", "prompt": t}, f"row {i}") for i, t in enumerate(texts)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No waiting between tries, and no proxy between two ends of one machine."""
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def serve(chat_target):
    """A function that starts a server of a given personality; ``url`` is its address."""
    with ExitStack() as stack:

        def start(**personality):
            serving = Serving(chat_target, **personality)
            serving.url = stack.enter_context(running(serving))
            return serving

        yield start


@pytest.fixture(scope="module")
def local(chat_target, tmp_path_factory):
    """Answers of the local target."""
    folder = tmp_path_factory.mktemp("local")
    return regenerate(chat_target, "w" * 64, chats(), RegenerateConfig(**GREEDY), folder / "x.jsonl", progress=False)


@pytest.fixture
def answer(chat_target, tmp_path):
    def answer(serving=None, name="train.jsonl", conversations=None, *, progress=False, settings=GREEDY, **server):
        config = RegenerateConfig(**settings)
        if serving is not None:
            server = {"url": serving.url, "model": "tiny", "concurrency": 3, "timeout": 30, **server}
            config = config.model_copy(update={"server": ServerConfig(**server)})
        return regenerate(chat_target, "w" * 64, conversations or chats(), config, tmp_path / name, progress=progress)

    return answer


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def record(path):
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


# --- what the server can do ---------------------------------------------------------------------------------------


def test_a_server_with_ids_gives_what_the_local_target_gives(answer, serve, local):
    serving = serve()
    served = answer(serving)
    assert served.read_bytes() == local.read_bytes()
    assert {row["finished"] for row in read(served)} == {"eos", "budget"}
    assert len(serving.bodies) == len(TEXTS)
    assert all("prompt" in body for body in serving.bodies)
    assert record(served)["server"] == {
        "model": "tiny",
        "dialect": {"endpoint": "completions", "extended": True, "token_ids": True},
    }


def test_the_record_of_local_answers_has_no_trace_of_servers(answer):
    """Prepared data of earlier versions stays valid."""
    found = record(answer())
    assert list(found) == ["prompts", "prompt_ids", "eos_ids", "model", "config", "dtype"]
    assert list(found["config"]) == ["sampler", "max_new_tokens", "seed"]


PERSONALITIES = {
    "text": ({"give_ids": False}, "completions", True),
    "strict text": ({"give_ids": False, "strict": True}, "completions", False),
    "chat": ({"give_ids": False, "endpoints": ("chat/completions",)}, "chat/completions", True),
    "no ids in": ({"take_ids": False, "give_ids": False, "strict": True}, "chat/completions", False),
}


@pytest.mark.parametrize("personality", PERSONALITIES)
def test_without_ids_the_text_is_tokenized_in_its_turn_and_the_row_says_so(
    answer, serve, chat_target, local, personality, capsys
):
    changes, endpoint, extended = PERSONALITIES[personality]
    path = answer(serve(**changes), progress=True)
    assert record(path)["server"]["dialect"] == {"endpoint": endpoint, "extended": extended, "token_ids": False}
    tokenizer = chat_target.tokenizer
    for row, own in zip(read(path), read(local), strict=True):
        assert row["retokenized"] is True
        assert (row["messages"], row["finished"], row["prompt_ids"]) == (
            own["messages"], own["finished"], own["prompt_ids"]
        )  # fmt: skip
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        shown = row["prompt_ids"] + row["answer_ids"]
        # Up to the end of turn and its line break; a cut answer never sampled the end of turn.
        assert shown == whole[:-1] if row["finished"] == "eos" else shown == whole[:-2]
    assert f"{len(TEXTS)} of {len(TEXTS)} answers carry no sampled ids" in capsys.readouterr().out


@pytest.mark.parametrize("give_ids", [True, False])
def test_an_end_that_was_not_sampled_is_not_trained_on(answer, serve, chat_target, give_ids):
    path = answer(serve(give_ids=give_ids))
    rows, dropped = encode_all(load_conversations(path), chat_target.tokenizer)
    assert dropped.total == 0
    ended = [row["finished"] == "eos" for row in read(path)]
    assert set(ended) == {True, False}
    for row, end in zip(rows, ended, strict=True):
        supervised = [token for token, on in zip(row.ids, row.mask, strict=True) if on]
        assert row.mask[-1] == 1
        assert (
            sum(token in chat_target.eos_ids for token in supervised) == end == (supervised[-1] in chat_target.eos_ids)
        )


def test_a_chat_server_with_ids_is_taken_at_its_ids(answer, serve, local):
    path = answer(serve(endpoints=("chat/completions",)))
    assert path.read_bytes() == local.read_bytes()
    assert record(path)["server"]["dialect"]["endpoint"] == "chat/completions"


def test_a_server_that_reads_lists_of_numbers_as_something_else_is_asked_by_chat(answer, serve):
    serving = serve(give_ids=False)
    real = serving.prompt
    serving.prompt = lambda body: real(body)[:1] if "prompt" in body else real(body)
    assert record(answer(serving))["server"]["dialect"]["endpoint"] == "chat/completions"


def test_another_chat_template_at_the_server_is_an_error_by_its_first_difference(answer, serve, tmp_path):
    serving = serve(endpoints=("chat/completions",))
    serving.prefix = [7]
    message = refusal(answer, serving)
    assert "at token 0 it has id 7" in message
    assert list(tmp_path.iterdir()) == []


def test_without_ids_another_template_shows_in_the_count(answer, serve, capsys):
    serving = serve(endpoints=("chat/completions",), give_ids=False)
    serving.prefix = [7]
    answer(serving, progress=True)
    assert f"in {len(TEXTS)} requests; is its chat template the local one?" in capsys.readouterr().out


def test_a_prompt_that_differs_later_names_its_conversation(answer, serve):
    serving = serve()
    serving.change = lambda found: (
        found if found["usage"]["completion_tokens"] <= 2
        else found | {"choices": [found["choices"][0] | {"prompt_token_ids": [1, 2]}]}
    )  # fmt: skip
    message = refusal(answer, serving)
    assert message.startswith("conversation 'c")
    assert "2 tokens against" in message


def test_a_stop_token_that_the_server_leaves_out_is_put_back(answer, serve, local):
    serving = serve()

    def without_end(found):
        choice = found["choices"][0]
        if choice["finish_reason"] == "stop":
            choice["token_ids"] = choice["token_ids"][:-1]
        return found

    serving.change = without_end
    assert answer(serving).read_bytes() == local.read_bytes()


def test_ids_beyond_the_tokenizer_are_another_model(answer, serve, chat_target):
    serving = serve()
    serving.change = lambda found: found | {"choices": [found["choices"][0] | {"token_ids": [99999]}]}
    assert "the server sampled id 99999" in refusal(answer, serving)


TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}({{ c.function.arguments.x }})]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tool_calls_without_ids_are_kept_and_rendered_by_the_template(answer, serve, chat_target, monkeypatch):
    monkeypatch.setattr(chat_target.tokenizer, "chat_template", TOOLS)
    serving = serve(endpoints=("chat/completions",), give_ids=False)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 12}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    serving.change = lambda found: found | {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    for row in read(answer(serving)):
        assert row["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert chat_target.tokenizer.decode(row["answer_ids"]) == "[add(12)]<|im_end|>"
        assert row["finished"] == "eos"


def test_tools_and_the_templates_settings_are_sent_where_the_server_renders(answer, serve, chat_target, monkeypatch):
    monkeypatch.setattr(chat_target.tokenizer, "chat_template", TOOLS)
    monkeypatch.setattr(chat_target.tokenizer, "spectrain_template_settings", {"mood": "calm"}, raising=False)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 12}}}
    turns = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "13", "tool_call_id": "1"}]  # fmt: skip
    serving = serve(endpoints=("chat/completions",), give_ids=False)
    rows = [{"id": "a", "messages": turns, "tools": tools}, {"id": "b", "prompt": "hello"}]
    path = answer(serving, conversations=[parse_conversation(row, "row") for row in rows])
    with_tools, plain = sorted(serving.bodies, key=lambda body: "tools" not in body)
    assert with_tools["tools"] == tools
    assert with_tools["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 12}'
    assert "tools" not in plain
    assert all(body["chat_template_kwargs"] == {"mood": "calm"} for body in serving.bodies)
    assert read(path)[0]["tools"] == tools
    assert [chat.tools is not None for chat in load_conversations(path)] == [True, False]


# --- what it is asked ---------------------------------------------------------------------------------------------


def test_the_whole_sampler_is_sent_and_each_conversation_has_its_seed(answer, serve):
    serving = serve()
    settings = {**GREEDY, "sampler": Sampler(0.7, top_k=5, top_p=0.9)}
    path = answer(serving, settings=settings)
    for body in serving.bodies:
        assert (body["temperature"], body["top_k"], body["top_p"], body["max_tokens"]) == (0.7, 5, 0.9, 10)
    seeds = {str(body["prompt"]): body["seed"] for body in serving.bodies}
    assert len(set(seeds.values())) == len(TEXTS)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    again = serve()
    assert answer(again, "again.jsonl", settings=settings, concurrency=1).read_bytes() == path.read_bytes()
    assert {str(body["prompt"]): body["seed"] for body in again.bodies} == seeds
    assert record(path)["config"]["sampler"] == {"temperature": 0.7, "top_k": 5, "top_p": 0.9}


def test_a_servers_own_defaults_are_overruled(answer, serve):
    serving = serve()
    answer(serving)
    wanted = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert all(body.items() >= wanted.items() for body in serving.bodies)


def test_top_k_that_the_server_does_not_take_is_an_error(answer, serve, tmp_path):
    settings = {**GREEDY, "sampler": Sampler(0.7, top_k=5)}
    message = refusal(answer, serve(strict=True), settings=settings)
    assert "does not take top_k" in message
    assert "Unexpected fields" in message
    assert list(tmp_path.iterdir()) == []


def test_requests_run_together_up_to_the_limit(answer, serve):
    serving = serve(delay=0.2)
    answer(serving)
    assert serving.most_running == 3


def test_a_model_that_is_not_served_is_an_error_that_names_those_that_are(answer, serve, tmp_path):
    message = refusal(answer, serve(model="tiny-v2"))
    assert "does not serve 'tiny'" in message
    assert "'tiny-v2', 'other'" in message
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_any_endpoint_is_an_error_with_its_words(answer, serve):
    assert "404 Not Found" in refusal(answer, serve(endpoints=()))


def test_the_key_is_sent_and_shown_to_nobody(answer, serve, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_TEST_KEY", "sk-12345")
    serving = serve()
    answer(serving, api_key_env="SPECTRAIN_TEST_KEY")
    assert {headers["Authorization"] for headers in serving.headers} == {"Bearer sk-12345"}
    serving.faults.append(status(401, "wrong key: sk-12345"))
    message = refusal(answer, serving, "other.jsonl", api_key_env="SPECTRAIN_TEST_KEY")
    assert "401 Unauthorized: wrong key: ***" in message
    serving = serve()
    answer(serving, "third.jsonl")
    assert all("Authorization" not in headers for headers in serving.headers)
    monkeypatch.delenv("SPECTRAIN_TEST_KEY")
    message = refusal(answer, serving, "fourth.jsonl", api_key_env="SPECTRAIN_TEST_KEY")
    assert "SPECTRAIN_TEST_KEY, which is not set" in message


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://a/v1", "http://me:secret@host/v1", "http://host/v1?key=1"])
def test_addresses_are_plain(url):
    with pytest.raises(ValueError, match="url"):
        ServerConfig(url=url, model="m")
    assert ServerConfig(url="http://host/v1/", model="m").url == "http://host/v1"


def test_a_recipe_names_the_server_and_a_misspelt_key_is_found(make_recipe, tmp_path):
    path, key = make_recipe(tmp_path), "regenerate.server"
    recipe = load_recipe(path, [f"{key}.url=http://host/v1", f"{key}.model=m"])
    assert recipe.regenerate.server == ServerConfig(url="http://host/v1", model="m")
    assert load_recipe(path).regenerate.server is None
    assert f"did you mean '{key}.retries'?" in refusal(load_recipe, path, [f"{key}.retry=3"])
    assert f"{key}.url: found 'host:80'" in refusal(load_recipe, path, [f"{key}.url=host:80", f"{key}.model=m"])


# --- faults -------------------------------------------------------------------------------------------------------

PASSING = {
    "429": status(429, Retry_After="0.05"),
    "429 by date": status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "500": status(500),
    "503": status(503),
    "broken off": faults.broken_off,
    "hung up": faults.hung_up,
    "malformed": faults.malformed,
    "no choices": faults.without_choices,
    "aborted": faults.aborted,
}


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_leave_no_trace(answer, serve, local, fault):
    serving = serve()
    serving.faults.extend([None, PASSING[fault], None, PASSING[fault], PASSING[fault]])
    path = answer(serving)
    assert path.read_bytes() == local.read_bytes()
    assert len(serving.bodies) == len(TEXTS) + 3
    assert serving.faults == type(serving.faults)()


def test_an_answer_that_takes_too_long_is_asked_for_again(answer, serve, local):
    serving = serve()
    serving.faults.append(faults.slow)
    path = answer(serving, timeout=2)
    assert path.read_bytes() == local.read_bytes()
    assert len(serving.bodies) > len(TEXTS)


def test_the_server_says_how_long_to_wait(answer, serve):
    serving = serve()
    serving.faults.append(status(429, Retry_After="0.7"))
    started = time.monotonic()
    answer(serving, conversations=chats(TEXTS[:1]))
    assert time.monotonic() - started >= 0.7


EMPTY = {"choices": [{"text": "", "finish_reason": "stop"}]}


def test_an_empty_text_is_an_answer_of_the_end_alone(answer, serve, chat_target, capsys):
    serving = serve(give_ids=False)
    serving.change = lambda found: EMPTY if found["usage"]["prompt_tokens"] % 2 else found
    path = answer(serving, progress=True)
    empty = [row for row in read(path) if row["messages"][-1]["content"] == ""]
    assert 0 < len(empty) < len(TEXTS)
    assert all(row["answer_ids"] == [chat_target.tokenizer.eos_token_id] for row in empty)
    assert len(load_conversations(path)) == len(TEXTS)
    first = f"the first of conversation {empty[0]['id']!r}"
    assert f"{len(empty)} of {len(TEXTS)} answers are empty, {first}: only" in capsys.readouterr().out


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize(
    ("endpoint", "said"),
    [("completions", {"text": ""}), ("completions", {"text": None}), ("completions", {"text": "", "token_ids": []}),
     ("chat/completions", {"message": {"role": "assistant", "content": ""}}),
     ("chat/completions", {"message": {"role": "assistant", "content": None}})],
)  # fmt: skip
def test_nothing_but_empty_answers_is_an_error_and_none_is_kept(answer, serve, local, tmp_path, count, endpoint, said):
    serving = serve(endpoints=(endpoint,), give_ids=False)
    serving.change = lambda found: {"choices": [said | {"finish_reason": "stop"}]}
    talk = chats([f"{TEXTS[0]} {i}" for i in range(count)])
    message = refusal(answer, serving, conversations=talk, concurrency=2)
    asked = min(count, empties.FIRST)
    assert f"all of the first {asked} answers are empty" in message
    assert "'c0' at row 0" in message
    assert asked <= len(serving.bodies) <= asked + 2
    assert (tmp_path / "train.jsonl.partial").read_bytes() == b""
    serving.change = lambda found: found
    assert len(read(answer(serving, conversations=talk))) == count


def test_an_empty_start_is_kept_once_something_is_said(answer, serve, local):
    serving = serve()
    serving.change = lambda found: EMPTY if len(serving.bodies) <= 3 else found
    rows = read(answer(serving, concurrency=1))
    assert [row["messages"][-1]["content"] == "" for row in rows[:3]] == [True] * 3
    assert rows[3:] == read(local)[3:]


@pytest.mark.parametrize(
    ("fault", "named"),
    [(status(500, "out of memory"), "500 Internal Server Error: out of memory"), (faults.malformed, "not JSON"),
     (faults.without_choices, "no choices"), (faults.broken_off, "RemoteProtocolError")],
)  # fmt: skip
def test_what_does_not_pass_is_an_error_with_what_was_seen_last(answer, serve, fault, named):
    serving = serve()
    serving.faults.extend([fault] * 100)
    message = refusal(answer, serving, retries=2)
    assert named in message
    assert f"{serving.url}/completions" in message
    assert "asked 3 times" in message
    assert " has no answer, nor have 'c" in message
    assert all(f"'c{i}' at row {i}" in message for i in range(3))
    assert message.endswith("answers so far are kept, and the same command goes on with the others")


def test_a_server_that_always_fails_is_one_error_of_what_was_done(answer, serve, tmp_path):
    """From its first request on: nothing was asked, and nothing is said of answers that there are none of."""
    serving = serve()
    serving.broken = 500, "out of memory"
    message = refusal(answer, serving, retries=2)
    assert f"{serving.url}/chat/completions: asked 3 times" in message
    assert "HTTP 500 Internal Server Error: out of memory" in message
    assert "(4 ways of asking were tried, each as often)" in message
    assert f"none of the {len(TEXTS)} conversations was asked yet, from 'c0' at row 0 on, and nothing" in message
    for contradicted in ("refuses", "accepted", "kept", "goes on"):
        assert contradicted not in message
    assert len(serving.probes) == 12
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_begins_to_fail_loses_nothing(answer, serve, local, tmp_path):
    serving = serve()
    serving.faults.extend([None] * 4 + [status(500)] * 100)
    message = refusal(answer, serving, retries=1, concurrency=1)
    assert message.startswith(f"conversation 'c4' at row 4 has no answer: {serving.url}/completions: asked 2 times")
    assert len(read(tmp_path / "train.jsonl.partial")) == 4
    serving.faults.clear()
    assert answer(serving).read_bytes() == local.read_bytes()


def test_nobody_there_is_an_error_without_a_file(answer, serve, tmp_path):
    serving = serve()
    serving.url = "http://127.0.0.1:9/v1"  # the discard port, which nothing listens on
    message = refusal(answer, serving, retries=1)
    assert "http://127.0.0.1:9/v1/models: asked 2 times in vain; the last time: ConnectError" in message
    assert "regenerate.server.url is its address" in message
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_not_repeated_and_its_words_never_hold_the_prompt(answer, serve):
    for words in (f"bad input: {{'messages': {SECRET!r}}}", "too long"):
        serving = serve(endpoints=("chat/completions",))
        serving.faults.extend([status(400, words)])
        message = refusal(answer, serving, conversations=chats([SECRET]))
        assert len(serving.bodies) == 1
        assert "conversation 'c0'" in message
        assert "400 Bad Request: " in message
        assert ("repeats the prompt" in message) == ("bad input" in words)
        assert "stone" not in message


def test_ids_of_a_prompt_are_not_shown_either(answer, serve, chat_target):
    serving, ids = serve(), render_prompt(chats([SECRET])[0].prompt, chat_target.tokenizer)
    serving.faults.append(status(400, f"prompt {ids} is odd"))
    message = refusal(answer, serving, conversations=chats([SECRET]))
    assert "repeats the prompt" in message
    assert str(ids)[1:-1] not in message


# --- interruptions ------------------------------------------------------------------------------------------------


def test_after_a_failure_the_rest_is_answered_and_nothing_twice(answer, serve, local, tmp_path):
    serving = serve()
    serving.faults.extend([None] * 4 + [status(400, "no")])
    refusal(answer, serving, concurrency=1)
    kept = read(tmp_path / "train.jsonl.partial")
    assert len(kept) == 4
    other = serve()  # the same model at another address
    path = answer(other)
    assert path.read_bytes() == local.read_bytes()
    asked = [body["prompt"] for body in other.bodies]
    assert len(asked) == len(TEXTS) - 4
    assert not any(row["prompt_ids"] in asked for row in kept)
    assert other.probes == []  # asked as the others were
    assert sorted(p.name for p in tmp_path.glob("train*")) == ["train.json", "train.jsonl"]


def test_a_finished_file_needs_no_server(answer, serve):
    serving = serve()
    path = answer(serving)
    serving.url = "http://127.0.0.1:9/v1"
    assert answer(serving) == path
    assert "server.model: 'tiny' against 'tiny-v2'" in refusal(answer, serving, model="tiny-v2")


def test_answers_of_the_local_target_and_a_servers_are_not_mixed(answer, serve):
    answer(name="local.jsonl")
    assert "made with other settings" in refusal(answer, serve(), "local.jsonl")
    answer(serve())
    assert "made with other settings" in refusal(answer)


CLIENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
from spectrain.data.conversations import load_conversations
from spectrain.regenerate import RegenerateConfig, regenerate
from spectrain.target import load_target
folder, chats, output, url = sys.argv[1:]
server = {"url": url, "model": "tiny", "concurrency": 4}
config = RegenerateConfig(max_new_tokens=10, seed=3, server=server)
regenerate(load_target(folder), "w" * 64, load_conversations(chats), config, Path(output), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_is_killed_loses_and_doubles_nothing(serve, answer, chat_folder, tmp_path, blow):
    count, serving = 40, serve(delay=0.3)
    conversations = chats([f"{i} + {i}?" for i in range(count)])
    files = tmp_path / "chats.jsonl"
    rows = ({"id": c.id, "kind": "chat", "prompt": c.messages[0].content} for c in conversations)
    files.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial = tmp_path / "train.jsonl.partial"
    command = [sys.executable, "-c", CLIENT, str(chat_folder), str(files), str(tmp_path / "train.jsonl"), serving.url]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_bytes().count(b"\n") >= 8):
        assert run.poll() is None, run.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(blow)
    run.wait(timeout=120)
    kept = len(partial.read_bytes().splitlines())
    assert 8 <= kept < count
    serving.bodies.clear()
    serving.delay = 0
    path = answer(serving, conversations=conversations)
    assert len(serving.bodies) == count - kept
    assert [row["id"] for row in read(path)] == [c.id for c in conversations]
    assert path.read_bytes() == answer(name="local.jsonl", conversations=conversations).read_bytes()
