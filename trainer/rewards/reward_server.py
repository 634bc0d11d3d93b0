"""A reward server: responses are scored over HTTP, in the JSON that OpenRLHF's remote reward models use.

    POST {"query": [prompt + response], "prompts": [prompt], "labels": [answer, a list of them, or null]}
      -> {"rewards": [number, …]}

Prompts are texts as the policy reads them, chat template included, and the space behind them where the policy
sampled one that the text of the response does not have. The request also has "responses" (texts) and
"messages" (prompts as they stand in the data), for servers that need the two apart. A response in several
turns is all of it as one text, results of tools included; "completions" are its messages.
``Reward.score_parts`` (combine.py) calls it.
"""

import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError

from tqdm import tqdm

from dataset.formats import plain_messages
from errors import InputError, first_line
from trainer.rewards.reward_function import Request

BATCH = 64  # responses in one request
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before the second try of a request, the third …


@dataclass
class RewardServer:
    """Call it with a ``Request`` of B responses -> B scores. timeout: ``--reward_timeout``, the seconds
    without a byte of the reply, 0 for no limit. What may pass is asked again after 1, 2, 4 and 8 seconds.

    Raises InputError after the last try; at once if the server refuses the request; and for a reply that does
    not have one number per response. The run then saves and ends; it can be resumed, also with another URL.
    """

    url: str
    timeout: float

    def __call__(self, request: Request) -> list[float]:
        rewards: list[float] = []
        for start in range(0, len(request.responses), BATCH):
            rows = slice(start, start + BATCH)
            prompts = request.prompts[rows]
            responses = [*(request.whole_texts or request.responses)[rows]]
            texts = [prompt.text for prompt in prompts]
            body = {
                "query": [text + response for text, response in zip(texts, responses, strict=True)],
                "prompts": texts,
                "labels": [prompt.answer for prompt in prompts],
                "responses": responses,
                "messages": [prompt.prompt for prompt in prompts],
            }
            if request.dialogues:
                body["completions"] = [
                    plain_messages(dialogue.messages) for dialogue in request.dialogues[rows]
                ]
            reply = self._post_until_it_works(json.dumps(body).encode())
            match reply:
                case {"rewards": [*scores]} if [*map(type, scores)] == [float] * len(responses):
                    rewards += scores
                case _:
                    raise InputError(
                        f"--reward_url {self.url}: the answer {json.dumps(reply)[:100]} is not "
                        f'{{"rewards": [a number for each of {len(responses)} responses]}}'
                    )
        return rewards

    def _post_until_it_works(self, data):
        for pause in (*PAUSES, None):
            try:
                request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=self.timeout or None) as reply:
                    return json.loads(reply.read(), parse_int=float)
            except HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 429):  # timeout, too many requests: try again
                    raise InputError(f"--reward_url {self.url}: it refuses the request ({reason})") from None
            except (OSError, HTTPException, ValueError) as error:  # ValueError: the reply is not JSON
                reason = first_line(error)
            if pause:
                tqdm.write(f"note: --reward_url: {reason}; asking again in {pause:g} s", file=sys.stderr)
                time.sleep(pause)
        raise InputError(
            f"--reward_url {self.url}: {reason}, {len(PAUSES) + 1} times; is the server running?"
        )
