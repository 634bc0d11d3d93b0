"""Rewards over HTTP from a real server: what is sent, what is retried, what is refused in one line."""

import json
import random
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from tiny import flags, read_jsonl, refused, request_of, run_files
from tiny_tokenizers import TOKENIZERS, ids_of

from dataset.lm_dataset import Prompt
from errors import InputError
from trainer import train_ppo
from trainer.compute.batch import Batch
from trainer.generation.stops import HALF, decode
from trainer.rewards import reward_server
from trainer.rewards.reward_server import PAUSES, RewardServer
from trainer.rollout import with_sampled_space

SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 2, "critic_warmup_steps": 0}


def count_a(request):
    """Half of them; JSON has whole numbers as well."""
    counts = [text.split().count("a") for text in request["responses"]]
    return [n / 2 if n % 2 else n // 2 for n in counts]


@contextmanager
def server(*first_replies):
    """-> (its URL, the requests it has got). It replies first with these functions, then as it should."""
    requests, replies = [], list(first_replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(request)
            reply = replies.pop(0) if replies else lambda h, r: send(h, {"rewards": count_a(r)})
            reply(self, request)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()  # seconds to its end
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/reward", requests
    finally:
        httpd.shutdown()
        httpd.server_close()


def send(handler, reply, code=200):
    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(reward_server, "PAUSES", (0.01, 0.02, 0.04, 0.08))


def ask(url, count=3, timeout=10.0):
    """The server's scores of ``count`` responses: a, a a, a a a, … to b 1, b 2, b 3, …"""
    responses = [" ".join("a" * n) for n in range(1, count + 1)]
    prompts = [f"b {n}" for n in range(1, count + 1)]
    texts = [f"user {prompt} </s> assistant " for prompt in prompts]  # as the policy reads them
    asked = request_of(prompts, responses, ["c"] + [None] * (count - 1), texts=texts)
    return RewardServer(url, timeout)(asked)


def test_what_is_sent_is_what_openrlhf_sends_and_large_batches_go_in_pieces(monkeypatch):
    with server() as (url, requests):
        assert ask(url) == [0.5, 1.0, 1.5]
    (request,) = requests
    said = {"b 1": "a", "b 2": "a a", "b 3": "a a a"}
    assert request["prompts"] == [f"user {b} </s> assistant " for b in said]  # as the policy reads them
    assert request["query"] == [f"user {b} </s> assistant {a}" for b, a in said.items()]
    assert request["labels"] == ["c", None, None]
    assert request["messages"] == list(said)
    assert request["responses"] == list(said.values())
    monkeypatch.setattr(reward_server, "BATCH", 4)
    with server() as (url, requests):
        assert ask(url, count=10) == [n / 2 for n in range(1, 11)]
    assert [len(r["query"]) for r in requests] == [4, 4, 2]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_prompt_and_response_are_the_text_that_was_sampled(kind):
    """Also where the first token begins with a space that the text of the response does not have."""
    tokenizer, generator, spaces = TOKENIZERS[kind](), random.Random(0), 0
    for _ in range(200):
        asked, ids = ids_of(tokenizer, generator, 6), ids_of(tokenizer, generator, 6)
        whole, text, said = (decode(tokenizer, part) for part in (asked + ids, asked, ids))
        if HALF in whole or HALF in text or text.endswith(" ") or not text:
            continue
        tokens, sizes = torch.tensor([asked + ids]), (torch.tensor([6]), torch.tensor([6]))
        prompts = [Prompt(0, text, None, asked, {}, text)]
        finished, logprobs = torch.tensor([False]), torch.zeros(1, 6)
        batch = Batch(tokens, *sizes, finished, logprobs, prompts, ["the last turn"])
        (prompt,) = with_sampled_space(batch, tokenizer, [said])
        assert prompt.text + said == whole, (asked, ids)
        assert prompt.text in (text, text + " ") and prompt.prompt == text
        spaces += prompt.text != text
    assert spaces > 10 or kind == "byte level"


FAULTS = {str(code): lambda h, r, code=code: send(h, {}, code) for code in (500, 408, 429)}
FAULTS |= {"no JSON": lambda h, r: send(h, b"<html>please wait</html>")}
FAULTS |= {"hangs up": lambda h, r: h.connection.close()}
FAULTS |= {"hangs": lambda h, r: time.sleep(1) or send(h, {"rewards": [9, 9, 9]})}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_pass_is_asked_again(fault, capsys):
    with server(FAULTS[fault]) as (url, requests):
        assert ask(url, timeout=0.5 if fault == "hangs" else 60.0) == [0.5, 1.0, 1.5]
    assert len(requests) == 2
    assert capsys.readouterr().err.count("asking again in") == 1


def test_pauses_grow(monkeypatch):
    assert PAUSES == (1.0, 2.0, 4.0, 8.0)
    pauses = []
    monkeypatch.setattr(reward_server.time, "sleep", pauses.append)
    for url in ("http://127.0.0.1:9/", "http://[bad/"):  # no server listens there; no URL
        refused("5 times; is the server running", ask, url)
    assert pauses == [0.01, 0.02, 0.04, 0.08] * 2


LISTS = [None, 3, [1.0, 2.0], [1.0, "good", 2.0], [1.0, True, 2.0], [[1.0], [2.0], [3.0]]]


def test_a_refusal_or_an_answer_of_another_form_is_one_line_and_not_asked_again():
    replies = [({}, code) for code in (400, 401, 499)]
    replies += [(reply, 200) for reply in ({}, [], None, *({"rewards": found} for found in LISTS))]
    with server(*(lambda h, r, reply=reply: send(h, *reply) for reply in replies)) as (url, requests):
        for _, code in replies:
            says = "a number for each of 3 responses" if code == 200 else f"it refuses the request \\({code}"
            refused(f"--reward_url http.*{says}", ask, url)
    assert len(requests) == len(replies)


def test_a_server_that_goes_away_leaves_a_run_that_resumes(tmp_path, capsys):
    """Every sample has the server's score of it."""
    files = run_files(tmp_path)
    files = {"model": files["model"], "data_path": files["data_path"], "missing_eos_penalty": 1}
    argv = flags(**files, **SIZES, out_dir=tmp_path, run_name="r", device="cpu", dtype="float32")

    def nothing(handler, request):
        send(handler, {"rewards": [float("nan")] * len(request["query"])})

    refusal = pytest.raises(InputError, match="--reward_url: the score nan")
    with server(lambda h, r: send(h, {"rewards": count_a(r)}), nothing) as (url, before), refusal:
        train_ppo.main([*argv, "--reward_url", url])
    assert "step_1\n" in capsys.readouterr().out
    with server() as (url, after):  # at another port: a server may move
        train_ppo.main([*argv, "--reward_url", url, "--resume", "auto"])
    assert [m["step"] for m in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == [0, 1, 2]
    requests = [before[0], *after]
    assert sum(len(request["query"]) for request in requests) == 16
    asked = {pair for r in requests for pair in zip(r["messages"], r["responses"], strict=True)}
    for sample in read_jsonl(tmp_path / "r" / "samples.jsonl"):
        assert (sample["prompt"], sample["response"]) in asked
        assert sample["parts"]["server"] == sample["response"].split().count("a") / 2
