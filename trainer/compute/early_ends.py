"""``--min_gen_len N``: a response has at least N tokens, the EOS that ends it counted.

So no id that ends a response may be one of its first N - 1 tokens: there its logit is -inf. The sampler and
every scorer (actor, old actor, reference) do the same, so the policy that is sampled is the one that is
scored. Its other tokens share the probability, in entropy and KL too.
"""

import torch

from trainer.compute.batching import send


class EarlyEnds:
    """least: tokens of the shortest response; ids: those that end a response."""

    def __init__(self, least, ids):
        self.least, self.ids, self.sent = least, tuple(ids), {}

    def forbid_(self, logits, places):
        """Make the logits [n, V] of the ids -inf, in place, in the rows whose token comes too early. places
        [n]: the number of the predicted token in its response, from 0 on. A GPU is not waited for."""
        ids = self._ids(logits.device, logits.shape[1])
        early = (places < self.least - 1)[:, None]
        logits.index_copy_(1, ids, logits.index_select(1, ids).masked_fill(early, -torch.inf))

    def of(self, layout, device):
        """What ``token_logprobs`` is to do with the logits of a ``Layout.of_responses``: a function of
        (logits [n, V], the slice of the wanted tokens that they predict). Rows behind the last wanted token
        are padding and stay as they are."""
        places = layout.on(device)["response"] % layout.shape[1]

        def forbid_(logits, chunk):
            mine = places[chunk]
            self.forbid_(logits[: len(mine)], mine)

        return forbid_

    def _ids(self, device, vocabulary):
        """The ids below ``vocabulary`` on this device: a generation config may name ids that no model has."""
        if (device, vocabulary) not in self.sent:
            ids = [i for i in self.ids if 0 <= i < vocabulary]
            self.sent[device, vocabulary] = send(torch.tensor(ids, dtype=torch.int64), device)
        return self.sent[device, vocabulary]


def early_ends(least, ids):
    """``EarlyEnds``, or None where any response is long enough: each has at least one token."""
    return EarlyEnds(least, ids) if least > 1 else None
