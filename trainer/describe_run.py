"""What a PPO run says of itself when it begins: policy, reward, prompts, warm-up, what was chosen for it."""

from model.lora import describe as describe_adapters
from trainer.flags import AUTO
from trainer.rewards.reward_models import SCORE_LIMIT, parse_spec
from trainer.rewards.rules import LENGTHS, THOUGHTS


def describe_run(run):
    """What the run is made of, in a few lines."""
    args, prompts, held_out = run.args, run.prompts, run.held_out
    all_data = (prompts, held_out, run.ptx and run.ptx.data)
    size = sum(p.numel() for p in run.ref.parameters()) / 1e6
    adapters = describe_adapters(run.actor)
    kind = "answers" if args.offline_data_path else "prompts"  # a pair has two answers
    tested = f", {len(held_out)}{'' if kind == 'prompts' else ' prompts'} held out" if held_out else ""
    warmup, quarter = args.critic_warmup_steps, run.total_steps // 4
    if warmup == AUTO and not quarter:
        warmup = 0
    steps = "step 1 trains only" if warmup == 1 else f"steps 1 to {warmup} train only"
    if warmup == AUTO:
        steps = f"as long as its error falls, at most steps 1 to {quarter}, train only"
    return (
        f"policy   {args.model}: {size:.2f}M parameters, {run.actor.config.model_type}\n"
        + (f"lora     {adapters}\n" if adapters else "")
        + f"reward   {describe_reward(args, run.reward)}\n"
        + (f"judge    {describe_judge(args)}\n" if run.judge.names else "")
        + f"{kind}  {prompts.describe()}{tested}"
        + (f"\nptx      {run.ptx.describe()}" if run.ptx else "")
        + "".join(f"\nnote     {data.note}" for data in all_data if data and data.note)
        + describe_advantage(args)
        + (f"\nwarm-up  {steps} the critic (--critic_warmup_steps {warmup})" if warmup else "")
        + (f"\nsystem   {args.system_prompt}" if args.system_prompt else "")
        + (f"\ntemplate with {args.chat_template_kwargs}" if args.chat_template_kwargs else "")
        + (f"\nthinking {describe_thinking(prompts)}" if args.thinking_ratio is not None else "")
        + "".join(f"\n{note}" for note in run.notes)
    )


def describe_thinking(prompts):
    """For which share of the prompts the chat template's switch of thinking is on."""
    share, switches = prompts.thinking.ratio, " and ".join(prompts.thinking.switches)
    return f"{share:.0%} of the prompts are rendered with {switches} true (--thinking_ratio {share:g})"


def describe_advantage(args):
    """How advantages are estimated, and from how many answers to a prompt."""
    many = f"\nanswers  {args.num_generations} to each prompt (--num_generations)"
    many = many if args.num_generations > 1 else ""
    if args.filter_groups and args.kl_target:
        many += "\nnote     --kl_target sees only the answers that --filter_groups keeps"
    if args.advantage == "gae":
        return f"{many}\nlambda   {args.lam:g}, for answers of up to {args.max_gen_len} tokens (--lam)"
    return f"{many}\ncritic   none: --advantage {args.advantage} needs none"


def describe_reward(args, reward):
    """Every part of the score as the metrics call it, its range or weight and its flag, a line each."""
    if args.offline_data_path:
        return f"the scores of {args.offline_data_path}"
    parts, limit = {}, f"clipped to ±{SCORE_LIMIT:g}"
    if args.normalize_reward:
        limit = f"normalised and {limit} (--normalize_reward)"
    if args.reasoning:
        parts |= {"format": "0 or 0.5 (--reasoning)", "marks": "0 to 1 (--reasoning)"}
    if size := args.thinking_reward:
        few, many = THOUGHTS
        about = f"a thought of {few} to {many} characters and one </think>"
        parts["thinking"] = f"{-0.75 * size:g} to {1.25 * size:g} for {about} (--thinking_reward)"
    for spec, (name, (_, weight)) in zip(args.reward_model, reward.models.items(), strict=True):
        parts[name] = f"weight {weight:g}, {limit}: {parse_spec(spec)[0]}"
    if args.reward_fn:
        parts["function"] = f"weight 1, as it is: {args.reward_fn}"
    if args.reward_url:
        parts["server"] = f"weight 1, {limit if args.normalize_reward else 'as it is'}: {args.reward_url}"
    if largest := args.repetition_penalty:
        parts["repetition"] = f"0 to -{largest:g} for repeated trigrams (--repetition_penalty)"
    if size := args.length_reward:
        few, many = LENGTHS
        parts["length_reward"] = f"{size:g} for {few} to {many} characters, else -{size:g} (--length_reward)"
    if (penalty := args.missing_eos_penalty) != 0:
        lost = "minus the scores' standard deviation" if penalty is None else f"-{penalty:g}"
        parts["missing_eos"] = f"{lost} for a response that does not end (--missing_eos_penalty)"
    if reward.overlong:
        longest, buffer, largest = reward.overlong
        first = f"0 up to {longest - buffer} tokens, -{largest:g} at {longest}"
        parts["overlong"] = f"{first} (--overlong_buffer, --overlong_penalty)"
    width = max(map(len, parts))
    return "\n         ".join(["the sum of:", *(f"{name:<{width}}  {text}" for name, text in parts.items())])


def describe_judge(args):
    """A line on the reward of evaluations."""
    sources = ", ".join(filter(None, [*args.eval_reward_model, args.eval_reward_fn]))
    return f"{sources}: only evaluates, as eval/judge"
