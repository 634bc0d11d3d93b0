"""What is PPO's own about its runs: how they are shown, and what a resumed one is compared by."""

from pathlib import Path

from model.lora import describe as describe_adapters
from trainer.precision import round_linears
from trainer.run_folder import short_hash, weights_hash
from trainer.tracking import Look

LINE = (  # (metric, how the line shows it)
    ("reward/score", "score {:.3f}"),
    ("kl/k1", "kl {:.4f}"),
    ("rollout/length", "len {:.1f}"),
    ("rollout/finished", "ended {:.2f}"),
    ("policy/entropy", "entropy {:.3f}"),
    ("policy/clip_fraction", "clip {:.3f}"),
    ("value/explained_variance", "ev {:.2f}"),
    ("perf/samples_per_second", "{:.1f} samples/s"),
)

PANELS = (  # title, [(metric, label)]
    ("reward (rollouts)", (("reward/score", "score"), ("reward/model", "reward model"))),
    (
        "form (rollouts)",
        (("reward/format", "format"), ("reward/marks", "marks"), ("rollout/finished", "ended")),
    ),
    (
        "held-out problems, never rewarded",
        (("eval/accuracy", "sampled accuracy"), ("eval/accuracy_greedy", "greedy accuracy")),
    ),
    ("KL to the reference (nats a token)", (("kl/k1", "k1"), ("kl/k3", "k3"))),
    ("response length (tokens)", (("rollout/length", "mean length"),)),
    (
        "update",
        (("policy/clip_fraction", "clip fraction"), ("value/explained_variance", "explained variance")),
    ),
)


def fingerprints(run):
    """{flag: a short hash of what it names}: the weights that a run starts from and is judged by, the texts
    and tokens of its prompts, the code of its reward function."""
    found = {
        "model": short_hash([weights_hash(run.ref), run.eos]),
        "tokenizer": short_hash(sorted(run.tokenizer.get_vocab().items())),
        "data_path": run.prompts.fingerprint,
    }
    judges = []
    for judge, weight in run.reward.models.values():
        vocabulary = sorted(judge.tokenizer.get_vocab().items())
        config = judge.model.config.to_dict()
        scale = [weight, config.get("reward_offset", 0.0), config.get("pad_token_id")]  # and where it is read
        judges.append([weights_hash(judge.model), vocabulary, judge.tokenizer.chat_template, *scale])
    if judges:
        found["reward_model"] = short_hash(judges)
    if run.args.reward_fn:
        path, _, name = run.args.reward_fn.rpartition(":")
        found["reward_fn"] = short_hash([name, Path(path).read_bytes().hex()])
    return found


def round_frozen(run):
    """Hold the linear layers of what does not train in the type that it computes in, an old actor's in its
    checkpoints as well. Not before ``fingerprints``, which must not depend on the machine; not with adapters,
    for what trains shares those weights then; not in code from outside, which may use weights in other ways.
    """
    if run.args.lora_r or run.args.trust_remote_code:
        return
    for model in (run.ref, run.old_actor, *(judge.model for judge, _ in run.reward.models.values())):
        round_linears(model, run.dtype)


def introduction(run, held_out):
    """What a run is made of, in a few lines."""
    args, actor, prompts = run.args, run.actor, run.prompts
    size = sum(p.numel() for p in run.ref.parameters()) / 1e6
    adapters = describe_adapters(actor)
    tested = f", {len(held_out)} held out" if held_out else ""
    parts = [args.reasoning and "format + marks", *args.reward_model, args.reward_fn, args.reward_url]
    return (
        f"policy   {args.model}: {size:.2f}M parameters, {actor.config.model_type}\n"
        + (f"lora     {adapters}\n" if adapters else "")
        + f"reward   {' + '.join(p for p in parts if p)}\n"
        f"prompts  {prompts.describe()}{tested}"
    )


def describe_evaluation(metrics):
    """``accuracy 0.51 (greedy 0.83) | format …`` of an evaluation's metrics; '' when there is none."""
    texts = []
    for name in ("accuracy", "format_rate", "score", "length"):
        if f"eval/{name}" in metrics:
            texts.append(
                f"{name} {metrics[f'eval/{name}']:.3f} (greedy {metrics[f'eval/{name}_greedy']:.3f})"
            )
    return " | ".join(texts)


def before_after_table(records):
    """The evaluation before any update beside the last one, as a Markdown table; '' without evaluation."""
    records = [r for r in records if "eval/score" in r]
    if len(records) < 2:
        return ""
    before, after = records[0], records[-1]
    rows = ["| held-out | sampled before | after | greedy before | after |", "|---|---|---|---|---|"]
    raw = [name.removeprefix("eval/") for name in after if name.startswith("eval/") and name.endswith("_raw")]
    for name in ("accuracy", "format_rate", "score", *raw, "length", "finished"):
        keys = [f"eval/{name}", f"eval/{name}_greedy"]
        if keys[0] in after:
            cells = " | ".join(f"{before[key]:.3f} | **{after[key]:.3f}**" for key in keys)
            rows.append(f"| {name.replace('_', ' ')} | {cells} |")
    return "\n".join(rows)


LOOK = Look(
    title="ppo",
    folder="run",
    unit="prompts",
    line=LINE,
    bar=("score", "kl", "len", "samples"),
    panels=PANELS,
    best="eval/score",
    evaluation=describe_evaluation,
    table=before_after_table,
    samples=True,
)
