"""Centring a reward model: the mean score of a reference policy's answers becomes the zero of its scores.

The loss of pairs fixes only differences between scores, not their level. This file shifts the scores so that
the reference's samples have mean 0. (Ziegler et al. 2019, arXiv:1909.08593, section 2.1, set their variance
to 1 as well; here the scores keep their unit.) A linear head without a bias cannot hold the shift, so it is
written to config.json as ``reward_offset``, and ``ClassifierRewardModel`` (rewards/reward_models.py)
subtracts it from every score.
"""

import shutil
from dataclasses import dataclass

import torch

from atomic_files import writing
from dataset.prompt_template import set_template
from dataset.tokenization import encode, prompt_text
from errors import InputError
from model.compatibility import check_tokenizer, eos_ids, most_positions
from model.loading import load_policy, load_tokenizer, tokenizer_source
from model.saving import save_directory
from trainer.evaluation import BATCH, EVAL_STEP
from trainer.generation.engine import Sampler
from trainer.generation.results import response_texts
from trainer.generation.sampling_noise import noise_keys
from trainer.policy_checks import check_sampling
from trainer.rewards.reward_models import load_reward_model
from trainer.rewards.rules import after_thinking, answer_text
from trainer.runs.distributed import share_of
from trainer.runs.fingerprints import short_hash, weights_hash
from trainer.runs.metrics import Metrics


@dataclass
class Reference:
    """The policy whose answers define the zero. It stays on the CPU until it samples once, after training."""

    model: torch.nn.Module
    tokenizer: object
    prompts: list  # [(messages or text, token ids)]
    max_gen_len: int

    def fingerprint(self):
        return short_hash([weights_hash(self.model), eos_ids(self.tokenizer, self.model), self.prompts])

    def answers(self, world, dtype, seed):
        """Sample answers to this process' share of the prompts, as PPO does -> [(prompt, response text)],
        without the thoughts that PPO does not show to a reward model."""
        sampler = Sampler(self.model.to(world.device), dtype)
        ends, found = eos_ids(self.tokenizer, self.model), []
        mine = share_of([(i, *pair) for i, pair in enumerate(self.prompts)], world)
        for first in range(0, len(mine), BATCH):
            places, prompts, ids = zip(*mine[first : first + BATCH], strict=True)
            keys = noise_keys(seed, EVAL_STEP, list(places))
            rollout = sampler.sample(list(ids), keys, ends, self.max_gen_len, 1.0)
            texts = response_texts(rollout, self.tokenizer)
            said = [text if answer_text(text) is not None else after_thinking(text) for text in texts]
            found += zip(prompts, said, strict=True)
        self.model.to("cpu")
        return found


def load_reference(args):
    """--reference -> its policy and tokenizer, with the template of the flags. Raises InputError."""
    beside = args.tokenizer and args.reference.endswith(".pth")
    source = args.tokenizer if beside else tokenizer_source(args.reference)
    policy = load_policy(args.reference, args.trust_remote_code)
    tokenizer = load_tokenizer(source, args.trust_remote_code)
    set_template(tokenizer, args.prompt_template)
    return policy, tokenizer


def make_reference(model, tokenizer, records, count, max_gen_len):
    """A policy and its tokenizer -> ``Reference``.

    It gets those of the first ``count`` prompts of ``records`` (a Subset of a reward dataset) that leave room
    for ``max_gen_len`` tokens. Raises InputError if there are none, or if the policy cannot be sampled from.
    """
    check_tokenizer(tokenizer, model)
    check_sampling(model)
    limit, prompts = most_positions(model.config) - max_gen_len, []
    for place in list(records.indices)[:count]:
        prompt = records.dataset.prompt(place)
        ids = encode(tokenizer, [prompt_text(tokenizer, prompt)])[0]
        if 0 < len(ids) <= limit:
            prompts.append((prompt, ids))
    if not prompts:
        raise InputError(f"--max_gen_len {max_gen_len}: the reference has no room for any prompt; lower it")
    eos_ids(tokenizer, model)
    return Reference(model, tokenizer, prompts, max_gen_len)


def write_centred(run, path, reference):
    """Write a classifier's directory with its ``reward_offset`` -> (mean, standard deviation of the scores).

    Both are of the reference's answers, and 0 without a reference. The answers are scored by the written
    files, loaded as PPO loads them, so that the offset fits what PPO will compute.
    """
    world, draft, mean, std = run.world, path.with_name(f".{path.name}.draft"), 0.0, 0.0
    try:
        with world.all_or_none():
            if world.is_main and reference:
                with writing(draft):
                    save_directory(run.model, run.tokenizer, draft)
        if reference:
            with world.all_or_none():
                reward_model = load_reward_model(str(draft), world.device, dtype=run.dtype)
                scores = reward_model(reference.answers(world, run.dtype, run.args.seed)).double()
            sums = Metrics()
            sums.add_all({"mean": scores.sum(), "square": scores.square().sum()}, len(scores))
            mean, square = sums.means(world).values()
            std = max(square - mean**2, 0.0) ** 0.5
        with world.all_or_none():
            if world.is_main:
                with writing(path):
                    save_directory(run.model, run.tokenizer, path, reward_offset=mean)
    finally:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
    return mean, std
