"""A reward server: responses are scored over HTTP, in the JSON that OpenRLHF's remote reward models use.

    POST {"query": [prompt + response], "prompts": [prompt], "labels": [answer or null]}
      -> {"rewards": [number, …]}

Prompts are texts as the policy reads them, chat template included. The request also has "responses" (texts)
and "messages" (prompts as they stand in the data), for servers that need the two apart.
"""

import json
import sys
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from tqdm import tqdm

from errors import InputError
from progress_bar import phase
from trainer.rewards.time_limit import TimeUp, time_limit

BATCH = 64  # responses in one request
TRIES = 5  # per request
PAUSE = 1.0  # seconds before the second try; the pause doubles before each further one


class RewardServer:
    """Call it with B prompts (text or messages), the same as the policy reads them, responses and answers ->
    scores [B].

    timeout: ``--reward_timeout``, the seconds that one request may take, 0 for no limit. If the server cannot
    be reached, takes too long or has an error of its own (5xx), the request is repeated after 1, 2, 4 and 8
    seconds. Raises InputError after the last try; at once if the server refuses the request (4xx, except 408
    and 429); and for a reply that does not have one number per response. The run then saves a checkpoint and
    ends with that line (``train`` in train_ppo.py); it can be resumed, also with another URL.
    """

    def __init__(self, url, timeout):
        self.url, self.timeout = url, timeout

    def __call__(self, prompts, texts, responses, answers):
        scores = []
        with phase("reward server", len(responses), "responses") as bar:
            for first in range(0, len(responses), BATCH):
                part = slice(first, first + BATCH)
                scores += self._ask(prompts[part], texts[part], responses[part], answers[part])
                bar.done = len(scores)
        return torch.tensor(scores)

    def _ask(self, prompts, texts, responses, answers):
        query = [text + response for text, response in zip(texts, responses, strict=True)]
        request = {
            "query": query,
            "prompts": texts,
            "labels": answers,
            "responses": responses,
            "messages": prompts,
        }
        reply = self._post_until_it_works(json.dumps(request).encode())
        scores = reply.get("rewards") if isinstance(reply, dict) else None
        if not isinstance(scores, list) or len(scores) != len(responses) or not all(map(_is_number, scores)):
            raise InputError(
                f"--reward_url {self.url}: the answer {json.dumps(reply)[:100]} is not "
                f'{{"rewards": [a number for each of {len(responses)} responses]}}'
            )
        return [float(score) for score in scores]

    def _post_until_it_works(self, data):
        for attempt in range(1, TRIES + 1):
            try:
                return self._post(data)
            except HTTPError as error:
                reason, refused = f"{error.code} {error.reason}", 400 <= error.code < 500
                if refused and error.code not in (408, 429):  # 408 timeout, 429 too many requests: try again
                    raise InputError(f"--reward_url {self.url}: it refuses the request ({reason})") from None
            except (TimeUp, TimeoutError):
                reason = f"no answer after {self.timeout:g} s"
            except (OSError, HTTPException, ValueError) as error:  # ValueError: the reply is not JSON
                reason = str(error) or type(error).__name__
            if attempt < TRIES:
                pause = PAUSE * 2 ** (attempt - 1)
                tqdm.write(f"note: --reward_url: {reason}; asking again in {pause:g} s", file=sys.stderr)
                time.sleep(pause)
        raise InputError(f"--reward_url {self.url}: {reason}, {TRIES} times; is the server running?")

    def _post(self, data):
        request = Request(self.url, data, {"Content-Type": "application/json"}, method="POST")
        # The socket's own limit is for systems where TimeUp cannot end the wait for a reply (time_limit.py).
        with time_limit(self.timeout), urlopen(request, timeout=self.timeout or None) as reply:
            return json.loads(reply.read())


def _is_number(x):
    return isinstance(x, int | float) and not isinstance(x, bool)
