"""Stage 2, the reward model: a language model learns which of two responses people prefer.

    for each batch of pairs (chosen, rejected), padded on the right:
        score = one number a conversation, read at its last token
        loss = -log sigmoid(score chosen - score rejected)              # Bradley-Terry
             + parting_coef * the same, read where the two part         # the fault is named
             + score_penalty * (score chosen^2 + score rejected^2)      # scores stay centred and small
             + lm_coef * next-token loss on chosen, from there on       # the backbone learns what is right
        backward, clip the gradient, AdamW step, learning rate: warm-up, then cosine to 0

A pair only fixes a difference of scores; without the penalty their level drifts and their scale grows with
every epoch. 0.0045 settles between 1.5 and 2 on either side of 0, inside the +-3 at which PPO clips.

    python trainer/train_reward.py                                       # from the demo's policy and pairs
    python trainer/train_reward.py --model PATH --data_path pairs.jsonl  # from a model you have

It writes a Hugging Face directory for AutoModelForSequenceClassification with one label, its tokenizer beside
it. One process, one device; left out on purpose: several raters, margins, resuming.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, get_cosine_schedule_with_warmup

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dataset.lm_dataset import PreferenceDataset, length_batches, right_pad
from errors import FlagParser, InputError, run_script
from model.checks import check_tokenizer
from model.loading import load_policy, load_tokenizer
from trainer.ppo import length_mask


def parse_args(argv=None):
    parser = FlagParser(
        description="reward model from preference pairs",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = parser.add_argument
    # files
    flag("--data_path", default=str(ROOT / "dataset/demo/preferences.jsonl"), help="preference pairs, JSONL")
    flag("--eval_data_path", default=str(ROOT / "dataset/demo/preferences_eval.jsonl"), help="held-out pairs")
    flag("--out_dir", default=str(ROOT / "out/reward"), help="the Hugging Face directory to write")
    # model
    flag("--model", default=str(ROOT / "model/demo/policy"), help=".pth, directory or hub name to start from")
    flag("--tokenizer", default=str(ROOT / "dataset/demo/tokenizer"), help="directory or hub name")
    flag("--extra_layers", type=int, default=0, help="new layers on top (for Llama, Qwen and their like)")
    flag("--max_seq_len", type=int, default=128, help="pairs with a longer conversation are dropped")
    # optimisation
    flag("--epochs", type=int, default=4)
    flag("--batch_size", type=int, default=24, help="pairs")
    flag("--learning_rate", type=float, default=1e-3)
    flag("--weight_decay", type=float, default=0.1)
    flag("--score_penalty", type=float, default=0.0045, help="weight of the squared scores")
    flag("--parting_coef", type=float, default=1.0, help="weight of the pair loss where responses part")
    flag("--lm_coef", type=float, default=1.0, help="weight of the next-token loss on chosen responses")
    flag("--grad_clip", type=float, default=1.0)
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flag("--seed", type=int, default=0)
    # watching
    flag("--log_interval", type=int, default=50, help="steps between printed lines")
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "log_interval", "learning_rate", "grad_clip", "max_seq_len"):
        if getattr(args, name) <= 0:
            raise InputError(f"--{name} must be positive, not {getattr(args, name)}")
    return args


def reward_from(policy, tokenizer, extra_layers):
    """A causal LM -> a one-label sequence classifier: its backbone, ``extra_layers`` more, a new score head.

    The policy's last layer knows which token should come next, too late to compare it with the one that did.
    The extra layers can. They start as the identity (their outputs are zero), so nothing is lost.
    """
    sizes = policy.config.to_dict()
    sizes["num_hidden_layers"] += extra_layers
    if extra_layers:
        sizes.pop("layer_types", None)  # one a layer; the config derives it anew
    config = type(policy.config).from_dict(sizes)
    config.num_labels = 1
    # The score is read at the last token that is not padding, so that batched and single scores agree.
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    try:
        reward = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise InputError(f"--model: no sequence classifier exists for {config.model_type} models") from error
    parts = dict(reward.named_children())
    if not isinstance(parts.get("score"), torch.nn.Linear):
        raise InputError(f"--model: {type(reward).__name__} has no linear score head to train")
    reward.base_model.load_state_dict(policy.base_model.state_dict(), strict=extra_layers == 0)
    if extra_layers:
        for layer in reward.base_model.layers[policy.config.num_hidden_layers :]:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return reward


def collate(pairs, pad_id, device):
    """[(chosen ids, rejected ids)] -> tokens [2B, T], right-padded: the chosen rows first."""
    return right_pad([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs], pad_id).to(device)


def pair_loss(scores, score_penalty):
    """scores [2B], chosen then rejected -> (Bradley-Terry loss with the penalty, pair accuracy)."""
    chosen, rejected = scores.float().chunk(2)
    loss = -F.logsigmoid(chosen - rejected).mean() + score_penalty * (chosen**2 + rejected**2).mean()
    return loss, (chosen > rejected).float().mean()


def parting_loss(scores, tokens):
    """Bradley-Terry loss of the scores at the first token that differs. scores, tokens [2B, T] -> scalar.

    A score at the very end would have to find the fault through the whole model; here it is named.
    """
    parted = (tokens[: len(tokens) // 2] != tokens[len(tokens) // 2 :]).int().argmax(1)  # [B]
    chosen, rejected = scores.float().gather(1, parted.repeat(2)[:, None]).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def language_loss(hidden, tokens, lengths, lm_head):
    """Next-token loss on the chosen half, from the first token that the rejected response does not share.

    hidden [2B, T, H], tokens [2B, T], lengths [B] of the chosen ones -> scalar.
    """
    chosen, rejected = tokens.chunk(2)
    parted = (chosen != rejected).cumsum(1) > 0
    predicts = (parted & length_mask(lengths, tokens.shape[1]))[:, 1:]  # [B, T - 1]
    logits = lm_head(hidden[: len(chosen), :-1][predicts])  # [N, V]
    loss = F.cross_entropy(logits.float(), chosen[:, 1:][predicts], reduction="sum")
    return loss / predicts.sum().clamp(min=1)


@torch.no_grad()
def evaluate(model, pairs, batch_size, device):
    """-> {pair_accuracy, chosen_mean, rejected_mean} over held-out pairs."""
    scores = []
    for first in range(0, len(pairs), batch_size):
        tokens = collate(pairs[first : first + batch_size], model.config.pad_token_id, device)
        scores.append(model(tokens).logits.float().view(2, -1))
    chosen, rejected = torch.cat(scores, dim=1)
    return {
        "pair_accuracy": (chosen > rejected).float().mean().item(),
        "chosen_mean": chosen.mean().item(),
        "rejected_mean": rejected.mean().item(),
    }


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.tokenizer)
    policy = load_policy(args.model)
    check_tokenizer(tokenizer, policy)
    model, lm_head = reward_from(policy, tokenizer, args.extra_layers), policy.get_output_embeddings()
    lm_head.weight = (
        model.get_input_embeddings().weight if policy.config.tie_word_embeddings else lm_head.weight
    )
    model, lm_head = model.to(args.device).train(), lm_head.to(args.device)
    pad_id = model.config.pad_token_id

    train = PreferenceDataset(args.data_path, tokenizer, args.max_seq_len)
    held_out = PreferenceDataset(args.eval_data_path, tokenizer, args.max_seq_len)
    print(f"{len(train)} pairs ({train.dropped} too long), {len(held_out)} held out")

    longest = [max(map(len, pair)) for pair in train]
    steps = args.epochs * -(-len(train) // args.batch_size)
    parameters = list(torch.nn.ModuleList([model, lm_head]).parameters())  # a tied head is counted once
    optimizer = torch.optim.AdamW(
        parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, min(100, steps // 10), steps)
    before = evaluate(model, held_out, args.batch_size, args.device)
    step = 0
    bar = tqdm(total=steps, desc="reward", disable=None)  # None: no bar where the output is not a terminal
    for epoch in range(args.epochs):
        for rows in length_batches(longest, args.batch_size, args.seed, epoch):
            tokens = collate([train[i] for i in rows], pad_id, args.device)
            output = model(tokens, output_hidden_states=True)
            loss, accuracy = pair_loss(output.logits[:, 0], args.score_penalty)
            hidden = output.hidden_states[-1]  # [2B, T, H]
            total = loss + args.parting_coef * parting_loss(model.score(hidden).squeeze(-1), tokens)
            lengths = torch.tensor([len(train[i][0]) for i in rows], device=tokens.device)
            total = total + args.lm_coef * language_loss(hidden, tokens, lengths, lm_head)
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(parameters, args.grad_clip)
            optimizer.step()
            schedule.step()
            step += 1
            bar.update()
            if step % args.log_interval == 0:
                bar.write(f"step {step}/{steps}  loss {loss.item():.4f}  pair accuracy {accuracy.item():.3f}")
        after = evaluate(model, held_out, args.batch_size, args.device)
        bar.write(
            f"epoch {epoch + 1}/{args.epochs}  held-out "
            + "  ".join(f"{k} {v:.3f}" for k, v in after.items())
        )
    bar.close()
    model.half().save_pretrained(args.out_dir)
    tokenizer.save_pretrained(args.out_dir)
    print(f"held-out pair accuracy {before['pair_accuracy']:.3f} -> {after['pair_accuracy']:.3f}")
    print(f"saved {args.out_dir}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    run_script(main)
