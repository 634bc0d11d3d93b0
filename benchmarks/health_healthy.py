"""The healthy runs of health.py: the demo with other flags, and two tasks of learning.py.

``HEALTHY``: {name: (what is changed, flags)}, from the files of ``make_files``. ``TASKS_RUN``: runs of
learning.py's tasks. Their inputs are made when they are needed (``task_flags``): those of (c) take minutes.
"""

from health_files import CALCULATES
from learning_run import flags_of
from learning_tasks import prepare

TRAINED = {
    "max_steps": 24,
    "batch_size": 32,
    "mini_batch_size": 8,
    "eval_interval": 12,
    "save_interval": 1000,
    "device": "cpu",
}
# {name: (task, rates of actor and critic, samples, seed)}; docs/learning.md has the same rates and samples.
TASKS_RUN = {
    **{f"three tokens, start {n}": ("a", (1e-3, 3e-3), 6400, n) for n in range(3)},
    **{f"long answers, seed {n}": ("c", (4e-5, 1e-3), 1024, n) for n in range(2)},
}


def HEALTHY(f):
    """The files of ``make_files`` -> the healthy runs."""

    def fn(name, **more):
        return {"reward_fn": f"{f['rewards']}:{name}", **more}

    changes = {
        **{f"seed {n}": {"seed": n} for n in (42, 1, 2)},
        "fp32": {"dtype": "float32"},
        "lam 1": {"lam": 1},
        "KL in the reward": {"kl_in": "reward"},
        "LoRA": {"lora_r": 8},
        "normalised": {"normalize_reward": 1},
        "batch 64": {"batch_size": 64, "mini_batch_size": 16},
        "2 PPO epochs": {"ppo_epochs": 2},
        "critic from actor": {"critic_init": "actor"},
        "old actor every 2": {"update_old_actor_freq": 2},
        "replay": {"replay_batches": 2},
        "constant rate": {"lr_schedule": "constant", "learning_rate": 3e-4},
        "target_kl 0.02": {"target_kl": 0.02},
        "96 tokens": {"max_gen_len": 96},
        "temperature 0.8": {"temperature": 0.8},
        "right answers": fn("right"),
        "right answers, no format": fn("right", reasoning=0),
        "near answers": fn("near"),
        "no value clip": {"cliprange_value": 0},
        "long, of small batches": {
            "batch_size": 16,
            "mini_batch_size": 16,
            "max_steps": 120,
            "eval_interval": 40,
            "seed": 5,
            "ppo_epochs": 2,
        },
    }
    words = {
        name: " ".join(f"--{n} {x}" for n, x in flags.items() if n != "reward_fn")
        for name, flags in changes.items()
    }
    found = {
        name: ((f"a reward function {words[name]}" if "reward_fn" in flags else words[name]).strip(), flags)
        for name, flags in changes.items()
    }
    return found | {"calculator": ("the demo with a calculator", CALCULATES)}


def task_flags(name, folder, dreams):
    """A run of a task of learning.py -> its flags, with three evaluations. Writes its inputs into ``folder``.

    dreams: the folder of the model of task (c).
    """
    task, rates, samples, seed = TASKS_RUN[name]
    files = prepare(task, folder, seed, dreams)
    request = {"who": "ours", "task": task, "rates": rates, "samples": samples, "seed": seed, "files": files}
    flags = flags_of(request, folder)
    own = ("out_dir", "run_name")  # health.py has its own
    return {n: x for n, x in flags.items() if n not in own} | {"eval_interval": flags["max_steps"] // 2}
