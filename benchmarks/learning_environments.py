"""Task (f) of docs/learning.md: a game of several turns whose best policy is known, each estimator's share of it.

    python benchmarks/learning_environments.py                     # our estimators: an hour on one core
    python benchmarks/learning_environments.py --who trl_tool our_group_tool --peer_python ENV/bin/python
    python benchmarks/learning_environments.py --variants          # what wrong masks and returns cost
    python benchmarks/learning_environments.py --table             # the tables of docs/learning.md

The game: guess.py, a number from 1 to 7 in three turns. Turns are texts, or ("_tool") calls of a tool, which
TRL's GRPOTrainer needs. The policy has 300,000 parameters; stage 1 has taught it to play at random. The value
of a policy is computed exactly, over all games that it can play, and so are that of the best policy (by
dynamic programming over what a player has seen) and that of random play. All of them ask the user's class.
Runs are processes of one thread in fp32, as in learning.py. Results, run by run, go into
benchmarks/results/learning_environments.json; a run that is there is not made again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, ROOT, machine, read, table
from guess import TURNS, Guess
from learning_report import middle
from learning_run import FIXED, RATES, Curve, command_line
from learning_tasks import script, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from atomic_files import write_whole
from trainer import advantages, train_ppo
from trainer.models import Models
from trainer.run import PpoRun

FILE = RESULTS / "learning_environments.json"
GAME = ROOT / "benchmarks" / "guess.py"
NUMBERS = range(1, 8)
OPEN, CLOSE = '<tool_call>{"name":"guess","arguments":{"number":', "}}</tool_call>"  # each is one token
WORDS = ["go", "higher", "lower", "won", "lost", "done", OPEN, CLOSE, *map(str, NUMBERS)]
ROLES = ("user", "assistant", "tool")
TEMPLATE = """
{%- for message in messages -%}
{{- '<|' + message.role + '|> ' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name":"' + call.function.name + '","arguments":{' -}}
{%- for name, value in call.function.arguments.items() -%}{{- '"' + name + '": ' + (value | tojson) -}}{%- endfor -%}
{{- ' }}</tool_call>' -}}
{%- endfor -%}
{{- ' <|end|> ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|> ' -}}{%- endif -%}
"""
POINTS = 10  # evaluations of a run, besides the one at its start
SEEDS = (0, 1, 2)
# In both kinds of game: what all trainers get.
SIZES = {
    "batch_size": 128, "mini_batch_size": 32, "ppo_epochs": 1, "max_steps": 200, "kl_coef": 0,
    "missing_eos_penalty": 0, "reasoning": 0,
}  # fmt: skip
TEXT = {"env": f"{GAME}:Guess", "max_turns": TURNS, "max_gen_len": 16}
TOOL = {"env": f"{GAME}:GuessTool", "max_turns": TURNS + 1, "max_gen_len": 32}  # the last turn: no call
FOUR = {"num_generations": 4}  # answers to each prompt, which all have the same number
ESTIMATORS = {
    "our_gae": {},
    "our_rloo": {"advantage": "rloo", **FOUR},
    "our_group": {"advantage": "group", **FOUR},
    "our_reinforce": {"advantage": "reinforce"},
}
WHO = {name: TEXT | flags for name, flags in ESTIMATORS.items()}
WHO |= {f"{name}_tool": TOOL | flags for name, flags in ESTIMATORS.items()}
WHO |= {"trl_tool": TOOL}
