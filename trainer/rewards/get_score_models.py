"""Reward models with code of their own: ``get_score(tokenizer, messages)``, as internlm2-reward has it.

Their code runs as its authors ran it: weights in the dtype of the checkpoint, no autocast. Only a score head
is made fp32. If the code also has ``get_scores(tokenizer, conversations)`` and both agree on a first batch,
conversations are scored in batches.
"""

import sys

import torch
from tqdm import tqdm
from transformers import AutoModel

from dataset.formats import to_messages
from dataset.tokenization import conversation_ids
from errors import InputError
from model.half_precision import make_score_heads
from model.loading import as_input_error, load_tokenizer
from model.pretrained import check_report, fill_buffers, load_pretrained
from progress_bar import phase
from trainer.compute.batching import tokens_per_pass
from trainer.compute.memory import each_micro_batch

CHECKED = 8  # conversations that are scored both ways
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}  # of a score between -1 and 1


class RemoteRewardModel:
    """A reward model whose own code has ``get_score(tokenizer, messages)``.

    ``batched``: whether ``get_scores`` is used; None until the first call, which decides. Checkpoints keep it
    (``state_dict``), so that a resumed run scores in the same way.
    """

    def __init__(self, path, device, weights):
        self.tokenizer = load_tokenizer(path, trust_remote_code=True)
        # No cache of keys and values: it would only take memory, and the one of transformers 4 is gone.
        self.model, report = load_pretrained(AutoModel, path, True, weights, use_cache=False)
        check_report(report)
        run_as_outside_code(self.model, device, weights)
        if not callable(getattr(self.model, "get_score", None)):
            raise InputError("its code has no get_score(tokenizer, messages)")
        self.batched = None if callable(getattr(self.model, "get_scores", None)) else False

    @torch.no_grad()
    def __call__(self, conversations):
        """N pairs (prompt, response) -> scores [N], fp32 on the CPU. InputError if its code fails."""
        chats = [
            [*to_messages(prompt), {"role": "assistant", "content": response}]
            for prompt, response in conversations
        ]
        if not chats or self.batched is False:
            return self._one_by_one(chats)
        lengths = [len(ids) for ids in conversation_ids(self.tokenizer, conversations)]
        if self.batched is None:
            order = sorted(range(len(chats)), key=lambda i: lengths[i])
            some = order[:: -(-len(chats) // CHECKED)]  # of all lengths
            difference = self._disagreement([chats[i] for i in some], [lengths[i] for i in some])
            self.batched = not difference
            if difference:
                tqdm.write(f"note: --reward_model: {difference}: scoring one at a time", file=sys.stderr)
        return self._in_batches(chats, lengths) if self.batched else self._one_by_one(chats)

    def _one_by_one(self, chats):
        scores = []
        bar = phase("reward model", len(chats), "sequences")
        with as_input_error("--reward_model: its get_score failed"), bar as counted:
            for chat in chats:
                scores.append(float(self.model.get_score(self.tokenizer, chat)))
                counted.done += 1
        return torch.tensor(scores, dtype=torch.float32)

    def _in_batches(self, chats, lengths):
        """lengths: of the conversations in tokens, about; similar ones share a batch, which is halved where
        memory runs out."""
        scores = torch.empty(len(chats))

        def fill(rows):
            found = self.model.get_scores(self.tokenizer, [chats[row] for row in rows])
            scores[rows] = torch.as_tensor(found).float().cpu().reshape(len(rows))  # some return one as 0-d

        with as_input_error("--reward_model: its get_scores failed"):
            each_micro_batch(lengths, tokens_per_pass(self.model.device), fill, "reward model")
        return scores

    def _disagreement(self, chats, lengths):
        """What get_scores does otherwise than get_score, '' if nothing."""
        expected = self._one_by_one(chats)
        try:
            found = self._in_batches(chats, lengths)
        except InputError as error:
            return str(error).removeprefix("--reward_model: ")
        gap = (found - expected).abs()
        if (gap <= TOLERANCE.get(self.model.dtype, 1e-3) * expected.abs().clamp_min(1)).all():
            return ""
        return f"its get_scores and get_score differ by {gap.max():.2g}"

    def state_dict(self):
        """What a checkpoint keeps."""
        return {"batched": self.batched}

    def load_state_dict(self, state):
        """Take over what ``state_dict`` returned; an empty one leaves the decision open."""
        if self.batched is None:
            self.batched = dict(state).get("batched")


def run_as_outside_code(model, device, weights):
    """Make a loaded model of code from outside ready to score: on its device, its score head in fp32.

    weights: what ``load_pretrained`` was asked for. fp16 that nobody asked for becomes fp32 on a CPU: the
    numbers are the same, and CPUs compute in fp16 slowly or not at all.
    """
    if weights == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model.float()
        fill_buffers(model, fill=True)
    model.to(device).eval().requires_grad_(False)
    make_score_heads(model)
