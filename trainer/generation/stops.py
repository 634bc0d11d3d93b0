"""Stop strings (``--stop``): where the text of a response first has one of them.

The text of k tokens is what the tokenizer decodes them to, all at once and without special tokens. A response
ends with the first token whose text completes a stop string. So it does not matter how the tokens cut the
string: it may begin and end inside of tokens, and a character may be made of several. That depends on the
tokens alone, and not on when anyone looks: stop_checks.py looks now and then, to end a response soon.
"""

import torch

HALF = "\ufffd"  # what an incomplete character decodes to


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
