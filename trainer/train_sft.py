"""Stage 1, supervised fine-tuning: a language model learns to answer as the demonstrations do.

    for each batch of (prompt, answer), padded on the right:
        logits = model(tokens)                             # a causal model needs no mask for right padding
        loss = mean over answer tokens of -log p(token | everything before)
        backward, clip the gradient, AdamW step, learning rate: warm-up, then cosine to 0

Only what the assistant says is learned, its end-of-turn token included; prompts are context. The last
``--eval_size`` records of the file are never trained on; their loss tells when to stop.

    python trainer/train_sft.py                                          # the demo's policy, from nothing
    python trainer/train_sft.py --model PATH --data_path mine.jsonl      # a model you have

It writes ``<out_dir>/full_sft_<hidden_size>.pth`` (fp16), which train_ppo.py starts from, and the same model
as a Hugging Face directory. One process, one device; left out on purpose: packing, LoRA, resuming.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dataset.lm_dataset import SFTDataset, length_batches, right_pad
from errors import FlagParser, InputError, run_script
from model.checks import check_tokenizer
from model.loading import load_policy, load_tokenizer
from model.saving import save_policy


def parse_args(argv=None):
    parser = FlagParser(
        description="supervised fine-tuning", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flag = parser.add_argument
    # files
    flag("--data_path", default=str(ROOT / "dataset/demo/sft.jsonl"), help="demonstrations, JSONL")
    flag("--out_dir", default=str(ROOT / "out"), help="where full_sft_<hidden_size>.pth goes")
    flag("--hf_dir", help="the Hugging Face directory to write; default: the .pth without its suffix")
    # model
    flag(
        "--model",
        help=".pth, directory or hub name to start from; default: random weights of the sizes below",
    )
    flag("--tokenizer", default=str(ROOT / "dataset/demo/tokenizer"), help="directory or hub name")
    flag("--hidden_size", type=int, default=128)
    flag("--num_hidden_layers", type=int, default=4)
    flag("--max_seq_len", type=int, default=128, help="longer conversations are dropped and counted")
    # optimisation
    flag("--epochs", type=int, default=3)
    flag("--batch_size", type=int, default=32)
    flag("--learning_rate", type=float, default=2e-3)
    flag("--weight_decay", type=float, default=0.1)
    flag("--grad_clip", type=float, default=1.0)
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flag("--seed", type=int, default=0)
    # watching
    flag(
        "--eval_size", type=int, default=256, help="records at the end of the file kept for the held-out loss"
    )
    flag("--log_interval", type=int, default=100, help="steps between printed lines")
    args = parser.parse_args(argv)
    for name in (
        "epochs",
        "batch_size",
        "eval_size",
        "log_interval",
        "learning_rate",
        "grad_clip",
        "max_seq_len",
    ):
        if getattr(args, name) <= 0:
            raise InputError(f"--{name} must be positive, not {getattr(args, name)}")
    return args


def new_model(hidden_size, num_hidden_layers, tokenizer):
    """A Llama with random weights, by MiniMind 2's conventions: 8 heads, 2 key-value, tied embeddings."""
    if hidden_size % 16 or hidden_size < 16 or num_hidden_layers < 1:
        raise InputError(
            "--hidden_size must be a multiple of 16 (8 heads of even size), --num_hidden_layers >= 1"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=64 * ((int(hidden_size * 8 / 3) + 63) // 64),
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        initializer_range=hidden_size
        ** -0.5,  # keeps the size of what passes; 0.02 learns slowly at this width
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def collate(samples, device):
    """[(ids, mask)] -> tokens [B, T] int64 and loss mask [B, T] bool, padded on the right."""
    tokens, mask = right_pad([ids for ids, _ in samples]), right_pad([mask for _, mask in samples])
    return tokens.to(device), mask.bool().to(device)


def answer_loss(model, tokens, mask):
    """Mean cross-entropy of the masked tokens. Logits are computed only where one is predicted."""
    hidden = model.base_model(tokens).last_hidden_state[:, :-1]  # [B, T - 1, H]
    predicts = mask[:, 1:]
    logits = model.get_output_embeddings()(hidden[predicts])  # [N, V]
    return F.cross_entropy(logits.float(), tokens[:, 1:][predicts])


@torch.no_grad()
def held_out_loss(model, samples, batch_size, device):
    """Mean loss per answer token over ``samples``."""
    total = count = 0
    for first in range(0, len(samples), batch_size):
        tokens, mask = collate(samples[first : first + batch_size], device)
        n = int(mask[:, 1:].sum())
        total, count = total + float(answer_loss(model, tokens, mask)) * n, count + n
    return total / count


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.tokenizer)
    if args.model is None:
        model = new_model(args.hidden_size, args.num_hidden_layers, tokenizer)
    else:
        model = load_policy(args.model)
    check_tokenizer(tokenizer, model)
    model = model.to(args.device).train()

    data = SFTDataset(args.data_path, tokenizer, args.max_seq_len)
    if len(data) <= args.eval_size:
        raise InputError(f"--eval_size {args.eval_size} leaves nothing to train on: {len(data)} records fit")
    train, held_out = data.samples[: -args.eval_size], data.samples[-args.eval_size :]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(train)} demonstrations ({data.dropped} too long), {parameters / 1e6:.2f}M parameters")

    lengths = [len(ids) for ids, _ in train]
    steps = args.epochs * -(-len(train) // args.batch_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, min(100, steps // 10), steps)
    before = held_out_loss(model, held_out, args.batch_size, args.device)
    step = 0
    bar = tqdm(total=steps, desc="sft", disable=None)  # None: no bar where the output is not a terminal
    for epoch in range(args.epochs):
        for rows in length_batches(lengths, args.batch_size, args.seed, epoch):
            tokens, mask = collate([train[i] for i in rows], args.device)
            loss = answer_loss(model, tokens, mask)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            schedule.step()
            step += 1
            bar.update()
            if step % args.log_interval == 0:
                bar.write(f"step {step}/{steps}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.1e}")
        after = held_out_loss(model, held_out, args.batch_size, args.device)
        bar.write(f"epoch {epoch + 1}/{args.epochs}  held-out loss {after:.4f}")
    bar.close()
    save(model, tokenizer, args)
    print(f"held-out loss {before:.4f} -> {after:.4f}")
    return {"before": before, "after": after}


def save(model, tokenizer, args):
    """Write the fp16 .pth and the Hugging Face directory."""
    path = Path(args.out_dir) / f"full_sft_{model.config.hidden_size}.pth"
    save_policy(model, tokenizer, path)
    folder = Path(args.hf_dir) if args.hf_dir else path.with_suffix("")
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"saved {path} and {folder}")


if __name__ == "__main__":
    run_script(main)
