"""The trainer: one script for each stage of training, what they share, and four folders.

train_ppo.py       stage 3, PPO: the training loop, written to be read from top to bottom; start here
train_sft.py       stage 1, supervised fine-tuning
train_reward.py    stage 2, the reward model

ppo.py             PPO's formulas as pure functions: KL, token rewards, advantages, whitening, losses
build_run.py       flags and a loaded policy -> all models of a PPO run
ppo_models.py      ``PpoRun``: the models of a PPO run, and what is saved, compared and printed of them
start_facts.py     facts of data, templates and reward models, for the checks of a run's start
describe_run.py    what a PPO run says of itself when it begins
replay.py          the last batches, learned from again
ptx.py             demonstrations, mixed into the actor's optimizer steps
offline.py         logged answers instead of samples: offline PPO
batch.py           what a step collects: prompts, responses, scores
filter_groups.py   prompts whose answers all score the same are sampled again
step_metrics.py    what a PPO step logs
step_rewards.py    rewards of steps inside a response: from characters to tokens
value_scale.py     running scales of values and advantages: rewards of any size are learned alike
critic_warmup.py   the first batches, in which only the critic trains
endings.py         what ends the responses of a run: EOS ids, stop strings, a least length
entropy_top.py     the tokens of high entropy, of which the policy loss is
missing_eos.py     what a response without an EOS loses, where --missing_eos_penalty is not given
kl_controller.py   the weight of the KL, constant or moved so that the KL stays at a target
inputs.py          loading and checking of PPO's flags, policy, tokenizer and prompts
policy_checks.py   can this causal LM be trained here? tried before anything else is built
memory_plan.py     how much memory a PPO run needs, part by part
memory_check.py    whether there is enough, and which flags would help
response_stats.py  what a batch's responses look like: repetition, equal ones, whether long ones score more
evaluation.py      PPO's evaluation on held-out prompts
shard_run.py       --shard 1: which models are split over processes, and what does not go with it
best.py            the weights of the best evaluation, kept
ema.py             a moving average of the actor's weights
supervised.py      what stages 1 and 2 share: flags, training loop, evaluation
reward_offset.py   centring a reward model on the reference's answers (stage 2)
flags.py           the flag parser, and the flags that all scripts have
peer_flags.py      flag names of MiniMind, TRL and OpenRLHF, and their names here

generation/        sampling responses: engine, KV cache, CUDA graphs, sampling noise
rewards/           scoring responses: rules, reward models, a user's function, a server
compute/           forward passes: batching, packing, attention, log-probs, values, precision, memory
runs/              a run: folder, checkpoints, resuming, several processes, optimizer steps, logs
"""
