"""Which sequences have reached a stop string, while they are sampled. stops.py says where a response ends.

After each check of the engine the host looks at the tokens that are new, and marks the sequences that have
ended as done. A GPU is not waited for: the tokens are copied behind the steps of one check and read at the
next one, as done_flags.py does it. A sequence may so get a few tokens more. They are cut off at the end, when
every response is looked at as a whole (``finish``): so it does not matter when a stop string was noticed.
"""

import torch

from trainer.compute.batching import send
from trainer.generation.stops import StopScan


class StopChecks:
    """The responses of one call of an engine. stops: ``StopStrings``; least: tokens of the shortest response;
    engine: has its prompts already; recent: the most tokens that a sequence gets between two checks."""

    def __init__(self, stops, least, engine, recent):
        self.stops, self.engine, self.late = stops, engine, engine.graphs.asynchronous
        self.scans = [StopScan(stops, least) for _ in engine.prompt_ids]
        self.stopped = torch.zeros(engine.unread_row + 1, dtype=torch.bool, device=engine.device)
        # What the host has seen: the tokens of each row, and how many
        self.tokens = torch.zeros(engine.tokens.shape, dtype=torch.int64) if self.late else engine.tokens
        self.counts = torch.zeros(len(self.tokens), dtype=torch.int64)
        self.columns, self.recent = torch.arange(-recent, 0), torch.arange(-recent, 0, device=engine.device)
        self.copy, self.copied, self.sent = torch.zeros(engine.slots, 2 + recent, dtype=torch.int64), None, 0
        if engine.device.type == "cuda":
            self.copy, self.copied = self.copy.pin_memory(), torch.cuda.Event()

    def check(self):
        """Mark the sequences as done that have reached a stop string, as far as the host knows it."""
        row, count, tokens = self._received().tensor_split([1, 2], 1)
        columns = count + self.columns
        suspected = (self.stops.may_complete(tokens) & (columns >= self.counts[row])).any(1)
        self.counts[row] = count
        if self.late:  # columns below 0 are copies of the first token
            self.tokens[row, columns.clamp(min=0)] = tokens
        suspects = torch.cat([row, count], 1)[suspected].tolist()
        ended = [i for i, count in suspects if self.scans[i].look(self.tokens[i, :count].tolist())]
        if ended:  # by row: sequences may have moved to other slots since their tokens were sent
            self.stopped.index_fill_(0, send(torch.tensor(ended), self.engine.device), True)
            self.engine.done |= self.stopped[self.engine.row]

    def _received(self):
        """[n, 2 + recent]: of each live sequence its row, its number of tokens and the last of them; on a GPU
        as they were at the check before, while the present ones are on their way."""
        live = self.engine.live
        row, count = self.engine.row[:live, None], self.engine.count[:live, None]
        now = torch.cat([row, count, self.engine.tokens[row, (count + self.recent).clamp(min=0)]], 1)
        if not self.late:
            return now
        if self.copied and self.sent:
            self.copied.synchronize()
        before = self.copy[: self.sent].clone()
        self.sent = live
        self.copy[:live].copy_(now, non_blocking=True)
        if self.copied:
            self.copied.record()
        return before

    def finish(self, tokens, logprobs, response_len, finished):
        """The results of all B rows -> the same, with the responses cut that have a stop string."""
        rows = zip(self.scans, tokens.tolist(), response_len.tolist(), strict=True)
        ended = [i for i, (scan, ids, count) in enumerate(rows) if scan.look(ids[:count])]
        place = send(torch.tensor(ended, dtype=torch.int64), response_len.device)
        ends = send(torch.tensor([self.scans[i].end for i in ended], dtype=torch.int64), response_len.device)
        response_len = response_len.index_copy(0, place, ends)
        return tokens, logprobs, response_len, finished.index_fill(0, place, True)
