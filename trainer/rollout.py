"""Rollout: prompts -> responses of a policy, drawn by the sampler (generation/engine.py), as a ``Batch``.

With --env or --tools a response has several turns: ``RolloutEngine.in_turns``, trainer/environments.
The batch has the sampler's log-probs. Whether the old actor computes its own as well: ``evaluate_tokens`` in
train_ppo.py, ``Models.sampler_has_scored`` and ``single_update`` in models.py.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.lm_dataset import Prompt
from trainer.compute.batch import Batch
from trainer.compute.memory import free_unused_memory
from trainer.environments.conversation import MultiTurn
from trainer.generation.engine import Sampler
from trainer.generation.stops import Endings, decode, response_texts


@dataclass
class RolloutEngine:
    """Samples responses from the weights of one model at a time.

    with engine.weights_of(old_actor):
        batch = engine.respond(prompts, keys, temperature)
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    endings: Endings  # what ends a response
    args: Namespace  # max_gen_len and min_gen_len
    sharded: bool  # --shard 1: a whole copy of the weights is in memory only while it samples
    turns: MultiTurn | None = None  # --env, --tools

    @contextmanager
    def weights_of(self, model: PreTrainedModel) -> Iterator[None]:
        """In this block ``respond`` samples from this model's weights."""
        if self.sharded:
            free_unused_memory()  # the gaps that the last update has left
        self.sampler.load(model)
        try:
            yield
        finally:
            if self.sharded:
                self.sampler.release()
                self.sampler.copy.unload()

    def respond(
        self, prompts: list[Prompt], keys: Tensor, temperature: float, greedy: Sequence[bool] = ()
    ) -> Batch:
        """Prompts -> their responses, not scored. keys [B]: of ``noise_keys``; greedy: as in ``sample``."""
        if self.turns:
            return self.in_turns(self.turns, prompts, keys, temperature, greedy)
        batch = self.sample([prompt.prompt_ids for prompt in prompts], keys, temperature, greedy)
        batch.prompts = prompts
        batch.texts = response_texts(batch, self.tokenizer, self.endings.stops)
        return batch

    def in_turns(
        self,
        turns: MultiTurn,
        prompts: list[Prompt],
        keys: Tensor,
        temperature: float,
        greedy: Sequence[bool] = (),
    ) -> Batch:
        """``respond`` where environments or tools answer each turn of the policy, until all conversations are
        over. The turns of all that go on are sampled together. Their keys and values stay in the sampler's
        cache where it has room: a later turn computes only its new tokens, where these are few."""
        device = self.sampler.copy.model.device
        conversations = turns.begin(prompts, keys)
        while rows := [i for i, conversation in enumerate(conversations) if not conversation.over]:
            going_on = [conversations[i] for i in rows]
            turn = self.sample(
                [conversation.context for conversation in going_on],
                keys[rows],
                temperature,
                greedy=[greedy[i] for i in rows] if greedy else (),
                first_places=[len(conversation.ids) for conversation in going_on],
            )
            turns.reply(going_on, turn)  # runs calls or ``step``; observations go behind the turns
        return turns.as_batch(conversations, device)

    def end_turns(self, batch: Batch) -> None:
        """Close the environments of all responses so far, once they are scored. The batch keeps none."""
        if self.turns:
            self.turns.close()
            batch.dialogues = [dialogue._replace(environment=None) for dialogue in batch.dialogues]

    def sample(
        self,
        prompt_ids: list[list[int]],
        keys: Tensor,
        temperature: float,
        greedy: Sequence[bool] = (),
        first_places: Sequence[int] = (),
    ) -> Batch:
        """One response or turn to each of these, as ``Sampler.sample``."""
        return self.sampler.sample(
            prompt_ids,
            keys,
            eos_ids=self.endings.eos,
            max_gen_len=self.args.max_gen_len,
            temperature=temperature,
            min_gen_len=self.args.min_gen_len,
            stops=self.endings.stops,
            textless=self.endings.forbidden.textless,
            greedy=greedy,
            first_places=first_places,
        )


def with_sampled_space(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Prompt]:
    """The batch's prompts. texts: of its responses, all turns of each.

    Some tokenizers (Llama 2's) decode a response without the space with which it begins. There the prompt's
    text ends with that space. So prompt and response together are the text that was sampled."""
    prompts = []
    for prompt, ids, text in zip(batch.prompts, batch.responses(), texts, strict=True):
        before = decode(tokenizer, prompt.prompt_ids)
        behind = decode(tokenizer, [*prompt.prompt_ids, *ids])[len(before) :]
        space = behind.startswith(" " + text) and not prompt.text.endswith(" ")
        prompts.append(replace(prompt, text=prompt.text + " ") if space else prompt)
    return prompts
