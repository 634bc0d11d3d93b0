"""The zero of a reward model: the mean score of what a reference policy answers.

Pairs fix differences of scores and no level. Ziegler et al. 2019 (arXiv:1909.08593, section 2.1) shift theirs
until the samples of the reference have mean 0; so do we. A linear head without a bias cannot hold the shift:
``reward_offset`` in config.json does, and PPO's ``ClassifierRewardModel`` takes it off.
"""

import shutil
from dataclasses import dataclass

import torch

from dataset.conversations import encode, for_tokenizer, render
from errors import InputError
from files import writing
from model.checks import check_tokenizer, eos_ids, most_positions
from model.saving import save_directory
from trainer.evaluation import BATCH, share_of
from trainer.inputs import check_sampling
from trainer.noise import noise_keys
from trainer.reward_models import load_reward_model
from trainer.rollout import Sampler, response_texts
from trainer.run_folder import short_hash, weights_hash
from trainer.tracking import Metrics

STEP = -1  # of the sampling noise: no training step has this number


@dataclass
class Reference:
    """A policy that answers prompts once, after training; until then it waits on the CPU."""

    model: torch.nn.Module
    tokenizer: object
    prompts: list  # [(messages or text, token ids)]
    max_gen_len: int

    def fingerprint(self):
        return short_hash([weights_hash(self.model), eos_ids(self.tokenizer, self.model), self.prompts])

    def answers(self, world, dtype, seed):
        """-> [(prompt, response text)] of this process' share of the prompts, as PPO would sample them."""
        sampler = Sampler(self.model.to(world.device), dtype)
        ends, found = eos_ids(self.tokenizer, self.model), []
        mine = share_of([(i, *pair) for i, pair in enumerate(self.prompts)], world)
        for first in range(0, len(mine), BATCH):
            places, prompts, ids = zip(*mine[first : first + BATCH], strict=True)
            keys = noise_keys(seed, STEP, list(places))
            rollout = sampler.sample(list(ids), keys, ends, self.max_gen_len, 1.0)
            found += zip(prompts, response_texts(rollout, self.tokenizer), strict=True)
        self.model.to("cpu")
        return found


def make_reference(model, tokenizer, records, count, max_gen_len):
    """A policy and its tokenizer, the first ``count`` prompts of ``records`` (a Subset of a reward dataset)
    that leave room for an answer -> ``Reference``. Raises InputError where there is none, or it cannot be
    sampled from."""
    check_tokenizer(tokenizer, model)
    check_sampling(model)
    limit, prompts = most_positions(model.config) - max_gen_len, []
    for place in list(records.indices)[:count]:
        prompt = records.dataset.prompt(place)
        asked = for_tokenizer(tokenizer, prompt)
        text = asked if isinstance(asked, str) else render(tokenizer, asked, generate=True)
        ids = encode(tokenizer, [text])[0]
        if 0 < len(ids) <= limit:
            prompts.append((prompt, ids))
    if not prompts:
        raise InputError(f"--max_gen_len {max_gen_len}: the reference has no room to answer; lower it")
    eos_ids(tokenizer, model)
    return Reference(model, tokenizer, prompts, max_gen_len)


def write_centred(stage, path, reference):
    """Write a classifier's directory with its ``reward_offset`` -> (offset, spread of the reference's
    scores), (0, 0) without a reference. Scored is what has been written, through PPO's own door."""
    world, draft, mean, std = stage.world, path.with_name(f".{path.name}.draft"), 0.0, 0.0
    try:
        with world.all_or_none():
            if world.is_main and reference:
                with writing(draft):
                    save_directory(stage.model, stage.tokenizer, draft)
        if reference:
            with world.all_or_none():
                judge = load_reward_model(str(draft), world.device, dtype=stage.dtype)
                scores = judge(reference.answers(world, stage.dtype, stage.args.seed)).double()
            sums = Metrics()
            sums.add_all({"mean": scores.sum(), "square": scores.square().sum()}, len(scores))
            mean, square = sums.means(world).values()
            std = max(square - mean**2, 0.0) ** 0.5
        with world.all_or_none():
            if world.is_main:
                with writing(path):
                    save_directory(stage.model, stage.tokenizer, path, reward_offset=mean)
    finally:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
    return mean, std
