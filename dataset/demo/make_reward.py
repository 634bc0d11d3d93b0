"""Trains the demo's reward model: stage 2 (trainer/train_reward.py), with what so tiny a model needs besides.

    python dataset/demo/make_reward.py --model out/demo_backbone/full_sft_128 …   flags: train_reward.py's

- Two new layers on top of the model's: only the last layer of a policy knows which token should come next, so
  no layer is left to compare this with the token that did come. The new layers can compare them. They start
  as the identity (their output matrices are zero), so the policy's knowledge is kept.
- The pair loss also at the token where the two answers part: the loss at the end would have to find it.
- The next-token loss of the chosen answer from there on, so that the policy's knowledge stays.
- A penalty on squared scores.
"""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from errors import run_script
from trainer.compute.threads import set_up_threads

if __name__ == "__main__":
    set_up_threads()  # OpenMP reads the environment when torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer import train_reward
from trainer.compute.logprobs import token_logprobs
from trainer.compute.precision import autocast
from trainer.runs.metrics import Metrics
from trainer.session import open_session
from trainer.supervised import Items, train

EXTRA_LAYERS = 2
PARTING_COEF = 1.0  # of the pair loss where the answers part
LM_COEF = 1.0  # of the next-token loss
SCORE_PENALTY = 0.0045  # of squared scores


def first_difference(chosen: list[int], rejected: list[int]) -> int:
    """The first place at which two lists of ids differ; if there is none, the last of the shorter list."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)


def deepened(policy: PreTrainedModel, extra_layers: int) -> PreTrainedModel:
    """A copy of a Llama with new layers on top, which compute nothing yet."""
    layers = policy.config.num_hidden_layers
    sizes = policy.config.to_dict() | {"num_hidden_layers": layers + extra_layers}
    sizes.pop("layer_types", None)  # one entry per layer; the config makes the list again
    deeper = AutoModelForCausalLM.from_config(type(policy.config).from_dict(sizes), dtype=torch.float32)
    deeper.load_state_dict(policy.state_dict(), strict=False)
    for layer in deeper.base_model.layers[layers:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper


class DemoRun(train_reward.RewardRun):
    """A run on pairs with the additional losses."""

    script = "../dataset/demo/make_reward.py"  # from trainer/

    def start_from(self, policy: PreTrainedModel) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed)
            deeper = deepened(policy, EXTRA_LAYERS)
        model = super().start_from(deeper)
        self.language_head = copy.deepcopy(policy.get_output_embeddings())
        if policy.config.tie_word_embeddings:
            self.language_head.weight = model.get_input_embeddings().weight
        model.language_head = self.language_head  # it trains as well
        # What the additional losses are of: the states [N, H] of all tokens, and the scores of the last ones.
        model.base_model.register_forward_hook(self.keep_states)
        self.head = model.get_submodule("score")
        self.head.register_forward_hook(self.keep_scores)
        return model

    def keep_states(self, backbone: torch.nn.Module, given: tuple, output: Any) -> None:
        self.hidden = output.last_hidden_state.flatten(0, 1)

    def keep_scores(self, head: torch.nn.Module, given: tuple, output: Tensor) -> None:
        self.kept_scores = output

    def save_result(self, logger: Any) -> None:
        """Without the head that predicts tokens."""
        del self.model.language_head
        super().save_result(logger)
        self.model.language_head = self.language_head

    def places(self, items: Sequence[tuple]) -> list[int]:
        """[B]: where the chosen answers begin to differ; at least 1, as nothing predicts a first token."""
        return [max(first_difference(chosen, rejected), 1) for chosen, rejected, _ in items]

    def loss_counts(self, items: Items) -> list[float]:
        """[pairs, tokens of the chosen answers from where they differ from the rejected ones]."""
        predicted = [len(item[0]) - start for item, start in zip(items, self.places(items), strict=True)]
        return [len(items), sum(predicted)]

    def loss(self, items: Items, totals: list[float], kind: str = "train") -> tuple[torch.Tensor, Metrics]:
        pairs, language_tokens = totals
        total, metrics = super().loss(items, totals, kind)
        if kind == "eval":
            return total, metrics
        total = total + SCORE_PENALTY * self.kept_scores.square().sum() / pairs
        rows = [item[0] for item in items] + [item[1] for item in items]
        starts = [sum(map(len, rows[:i])) for i in range(len(rows))]  # their first places among all tokens
        parts = [a + first_difference(*item[:2]) for a, item in zip(starts, items * 2, strict=True)]
        chosen, rejected = self.head(self.hidden[self.ids(parts)]).squeeze(-1).chunk(2)
        part_loss = -F.logsigmoid(chosen - rejected).sum()
        metrics.add("train/parting_loss", part_loss, len(items))
        total = total + PARTING_COEF * part_loss / pairs
        if language_tokens:
            nll = self.language_nll(items, self.hidden, starts)
            metrics.add("train/lm_loss", nll.sum(), len(nll))
            total = total + LM_COEF * nll.sum() / language_tokens
        return total, metrics

    def language_nll(self, items: list[tuple], states: Tensor, starts: list[int]) -> Tensor:
        """-log p [N] of the N tokens of the chosen answers, each from where it differs from the rejected."""
        places: list[int] = []
        targets = []
        for (chosen, *_), part, first in zip(items, self.places(items), starts, strict=False):
            places += range(first + part - 1, first + len(chosen) - 1)
            targets += chosen[part:]
        with autocast(states.device, self.dtype):
            found = states.index_select(0, self.ids(places))
            return -token_logprobs(self.language_head, found, self.ids(targets), 1.0)[0]

    def ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.world.device)


def main(argv: list[str] | None = None) -> None:
    with open_session(DemoRun, train_reward.parse_args(argv)) as session:
        train(session)


if __name__ == "__main__":
    run_script(main)
