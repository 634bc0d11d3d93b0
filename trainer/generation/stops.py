"""What ends a response while it is decoded.

- An EOS, any of ``eos_ids`` (model/loading.py): ``finished`` is True. It is a token of the response.
- ``--stop``: the first token whose text completes a stop string (``StopScan``); ``finished`` is True.
- Its length: a response of ``max_gen_len`` tokens is cut, and ``finished`` is False. It is trained on like
any other.
- Not before ``--min_gen_len`` tokens (``EarlyEnds``).

EOS and length are looked at on the device, in every step (``Engine._sample_and_store``). Stop strings are
looked for by the host (``StopChecks``). The text of k tokens is what the tokenizer decodes them to, all at
once and without special tokens. So it does not matter how the tokens cut a stop string: it may begin and end
inside of tokens, and a character may be made of several. Nor does it matter when anyone looks.
"""

import torch

from trainer.compute.batching import send

HALF = "\ufffd"  # what an incomplete character decodes to


class EarlyEnds:
    """``--min_gen_len``: a response has at least ``least`` tokens, the EOS that ends it counted.

    So no id that ends a response (``ids``) may be one of its first least - 1 tokens: there its logit is -inf.
    The sampler and every scorer (actor, old actor, reference) do the same, so the policy that is sampled is
    the one that is scored. Its other tokens share the probability, in entropy and KL too.
    """

    def __init__(self, least, ids):
        self.least = least
        self.ids = tuple(ids)
        self.sent = {}  # {(device, vocabulary): the ids there}

    def forbid_(self, logits, places):
        """Make the logits [n, V] of the ids -inf, in place, in the rows whose token comes too early. places
        [n]: the number of the predicted token in its response, from 0 on. A GPU is not waited for."""
        key = logits.device, logits.shape[1]
        if key not in self.sent:  # a generation config may name ids that no model has
            ids = [i for i in self.ids if 0 <= i < logits.shape[1]]
            self.sent[key] = send(torch.tensor(ids, dtype=torch.int64), logits.device)
        ids = self.sent[key]
        early = (places < self.least - 1)[:, None]
        logits.index_copy_(1, ids, logits.index_select(1, ids).masked_fill(early, -torch.inf))

    def of(self, layout):
        """What ``token_logprobs`` is to do with the logits of a ``Layout.of_responses``: a function of
        (logits [n, V], the slice of the wanted tokens that they predict). Rows behind the last wanted token
        are padding and stay as they are."""
        places = layout.response % layout.shape[1]

        def forbid_(logits, chunk):
            mine = places[chunk]
            self.forbid_(logits[: len(mine)], mine)

        return forbid_


def early_ends(least, ids):
    """``EarlyEnds``, or None where any response is long enough: each has at least one token."""
    return EarlyEnds(least, ids) if least > 1 else None


class HostCopy:
    """Rows of a tensor on the device, as the host knows them, without waiting for a GPU.

    There, reading means waiting until all queued steps are computed, and then the GPU has nothing to do until
    the host has queued more. So rows are copied behind the steps of one check (``send``) and read at the next
    (``receive``), when further steps are queued already: they are a check too old. On a CPU they are not.
    rows [slots, …]: what is as large as the most that is sent; late: whether the check before is read.
    """

    def __init__(self, rows, late):
        self.late = late
        self.sent = 0
        self.copy = torch.zeros(rows.shape, dtype=rows.dtype)
        self.copied = None
        if rows.is_cuda:  # a copy to pinned memory does not wait; the event says when it is there
            self.copy = self.copy.pin_memory()
            self.copied = torch.cuda.Event()

    def send(self, rows):
        """Start to copy these rows [n, …] to the host."""
        if self.late:
            self.sent = len(rows)
            self.copy[: self.sent].copy_(rows, non_blocking=True)
            if self.copied:
                self.copied.record()

    def receive(self, rows):
        """-> the rows that were sent last, on the host; where nothing is late, ``rows``, the present ones."""
        if not self.late:
            return rows
        if self.copied and self.sent:
            self.copied.synchronize()
        return self.copy[: self.sent].clone()


class StopStrings:
    """texts: those that end a response, none of them empty or with U+FFFD in it.

    ``suspects`` [largest id + 2]: True for the ids that may complete a stop string. That only saves time: a
    string that another token completes is found later, at the same place.
    """

    def __init__(self, texts, tokenizer):
        self.texts, self.tokenizer = list(texts), tokenizer
        self.longest = max(map(len, self.texts))
        found = [i for i, text in self._vocabulary() if self._may_complete(text)]
        self.suspects = torch.zeros(max(tokenizer.get_vocab().values()) + 2, dtype=torch.bool)
        self.suspects[found] = True

    def may_complete(self, ids):
        """ids, any shape, on the CPU -> bools: may one of these tokens complete a stop string?"""
        return self.suspects[ids.clamp(max=len(self.suspects) - 1)]  # a model may have ids that no text has

    def decode(self, ids):
        """Token ids -> their text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def start_in(self, text, seen):
        """Where the first stop string begins that ends behind the first ``seen`` characters; -1: nowhere."""
        starts = (text.find(stop, max(0, seen - len(stop) + 1)) for stop in self.texts)
        return min((start for start in starts if start >= 0), default=-1)

    def cut(self, ids):
        """The tokens of a response that has ended -> its text: up to where the stop string begins that the
        last token completes, else without the last token, which is an EOS."""
        whole, before = self.decode(ids), self.decode(ids[:-1])
        start = self.start_in(whole, len(before.rstrip(HALF)))
        return before if start < 0 else whole[:start]

    def _vocabulary(self):
        """(id, its text behind another token) of every id."""
        before = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        length = len(self.decode(before))
        return ((i, self.decode([*before, i])[length:]) for i in sorted(self.tokenizer.get_vocab().values()))

    def _may_complete(self, text):
        if HALF in text and not all(stop.isascii() for stop in self.texts):
            return True
        ends = (stop[i:] for stop in self.texts for i in range(1, len(stop)))
        return any(stop in text for stop in self.texts) or any(text.startswith(end) for end in ends)


class StopScan:
    """One response, token by token. ``end``: its length in tokens if it ends with a stop string, else None.

    least: shorter responses do not end: a stop string that an earlier token completes does not count.

    Only the last tokens are decoded. ``clean`` tokens have been looked at and end with a whole character.
    Behind them the text goes on as that of ids[before:] goes on behind that of ids[before:clean] (``shown``).
    ``tail`` is the end of the text of all ``clean`` tokens, in which a stop string may begin. ``seen``
    characters of tail and what follows it are no news.
    """

    def __init__(self, stops, least=0):
        self.stops, self.least, self.ids, self.end = stops, least, [], None
        self.looked = self.clean = self.before = self.seen = 0
        self.shown = self.tail = ""

    def look(self, ids):
        """Look at all tokens so far; those of the call before are the first of them. -> whether the response
        ends."""
        self.ids = ids
        if self.end is None and self.looked < len(ids):
            self._look_up_to(len(ids))
        return self.end is not None

    def _look_up_to(self, count):
        """Look at the first ``count`` tokens: at once where that is enough, else in two halves."""
        text = self._text(count)
        found = self.stops.start_in(text, self.seen) >= 0
        # Whole characters stay as they are. Incomplete ones may still change, and the text before them too.
        if count - self.looked > 1 and (found or HALF in text[len(self.tail) :]):
            self._look_up_to((self.looked + count) // 2)
            if self.end is None:
                self._look_up_to(count)
        elif found and count >= self.least:
            self.end = count
        else:
            self._settle(count, text)

    def _text(self, count):
        """``tail`` and the text behind it, up to this number of tokens."""
        return self.tail + self.stops.decode(self.ids[self.before : count])[len(self.shown) :]

    def _settle(self, count, text):
        """Nothing ends in the first ``count`` tokens. text: of ``_text``."""
        self.looked, self.seen = count, max(self.seen, len(text.rstrip(HALF)))
        if len(text) > len(self.tail) and not text.endswith(HALF):
            self.before, self.clean = self.clean, count
            self.shown = self.stops.decode(self.ids[self.before : self.clean])
            self.tail = text[len(text) - min(len(text), self.stops.longest - 1) :]
            self.seen = len(self.tail)


class StopChecks:
    """Which responses of one call of an engine have reached a stop string, found while they are sampled.

    After each check of the engine the host looks at the tokens that are new, and marks the sequences that
    have ended as done. On a GPU it sees them a check late (``HostCopy``), so a sequence may get a few tokens
    more. They are cut off when every response is looked at as a whole (``finish``).

    stops: ``StopStrings``; least: tokens of the shortest response; engine: has its prompts already; recent:
    the most tokens that a sequence gets between two checks.
    """

    def __init__(self, stops, least, engine, recent):
        self.stops = stops
        self.engine = engine
        self.scans = [StopScan(stops, least) for _ in engine.prompt_ids]
        self.stopped = torch.zeros(engine.unread_row + 1, dtype=torch.bool, device=engine.device)
        # What the host has seen: the tokens of each row, and how many
        self.tokens = torch.zeros(engine.tokens.shape, dtype=torch.int64)
        self.counts = torch.zeros(len(self.tokens), dtype=torch.int64)
        self.columns = torch.arange(-recent, 0)
        self.recent = torch.arange(-recent, 0, device=engine.device)
        slots = engine.tokens.new_empty(engine.slots, 2 + recent)
        self.host = HostCopy(slots, engine.graphs.asynchronous)

    def check(self):
        """Mark the sequences as done that have reached a stop string, as far as the host knows it."""
        live = self.engine.live
        row, count = self.engine.row[:live, None], self.engine.count[:live, None]
        now = torch.cat([row, count, self.engine.tokens[row, (count + self.recent).clamp(min=0)]], 1)
        row, count, tokens = self.host.receive(now).tensor_split([1, 2], 1)
        self.host.send(now)
        columns = count + self.columns
        suspected = (self.stops.may_complete(tokens) & (columns >= self.counts[row])).any(1)
        self.counts[row] = count
        self.tokens[row, columns.clamp(min=0)] = tokens  # columns below 0 are copies of the first token
        suspects = torch.cat([row, count], 1)[suspected].tolist()
        ended = [i for i, count in suspects if self.scans[i].look(self.tokens[i, :count].tolist())]
        if ended:  # by row: sequences may have moved to other slots since their tokens were sent
            self.stopped.index_fill_(0, send(torch.tensor(ended), self.engine.device), True)
            self.engine.done |= self.stopped[self.engine.row]

    def finish(self, tokens, response_len, finished):
        """Results of all B rows -> response_len [B], finished [B], with the responses cut that have a stop
        string."""
        rows = zip(self.scans, tokens.tolist(), response_len.tolist(), strict=True)
        ended = [i for i, (scan, ids, count) in enumerate(rows) if scan.look(ids[:count])]
        ends = [self.scans[i].end for i in ended]
        place, ends = (send(torch.tensor(x, dtype=torch.int64), response_len.device) for x in (ended, ends))
        return response_len.index_copy(0, place, ends), finished.index_fill(0, place, True)


def response_texts(rollout, tokenizer, stops=None):
    """The responses as B texts, without the EOS or the stop string that ended them and without other special
    tokens. stops: the ``StopStrings`` that they were sampled with, or None."""
    ids, finished = rollout.responses(), rollout.finished.tolist()
    if stops:
        return [stops.cut(r) if ended else stops.decode(r) for r, ended in zip(ids, finished, strict=True)]
    ids = [r[:-1] if ended else r for r, ended in zip(ids, finished, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
