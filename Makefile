# `make train` trains the demo, `make test` runs the tests, `make proofs` the slowest ones. All of them first build
# .venv from requirements*.txt.
# To give flags to the trainer: make train ARGS="--seed 1 --run_name mine"
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: train train-tools test proofs mutations bench demo-assets lint clean

train: .venv/train.stamp
	$(BIN)/python trainer/train_ppo.py $(ARGS)

# A tiny model that has a calculator and mostly guesses, or calls it in a wrong way (docs/environments.md).
train-tools: .venv/train.stamp
	$(BIN)/python trainer/train_ppo.py --model model/demo/tools_policy --data_path dataset/demo/tools_ppo.jsonl \
		--eval_data_path dataset/demo/tools_eval.jsonl --tools dataset/demo/calculator.py:calculate \
		--reward_fn dataset/demo/calculator.py:is_right --max_gen_len 192 --epochs 2 \
		--max_steps 36 --out_dir out/tools $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest $(ARGS)

# The tests that take longest, which `make test` leaves out.
proofs: .venv/dev.stamp
	$(BIN)/python -m pytest -m slow $(ARGS)

# Makes one line of the formulas wrong at a time, and demands that a fast test fails. Another file:
# make mutations ARGS="chat.py --tests tests/test_chat.py"
mutations: .venv/dev.stamp
	$(BIN)/python tests/mutations.py $(ARGS)

# Compares speed and memory with transformers and TRL. One part only: make bench ARGS="generation".
# What the demo learns, with several seeds: python benchmarks/demo.py
bench: .venv/bench.stamp
	$(BIN)/python benchmarks $(ARGS)

# Makes all files of the demos from a seed: data, tokenizers, policies (stage 1), reward model (stage 2). The reward
# model's backbone is first trained on what raters take for right answers. fp32 gives the same models on every
# machine, and is faster than bf16 at this size.
SMALL := --dtype float32 --max_seq_len 128 --seed 0
demo-assets: .venv/train.stamp
	$(BIN)/python dataset/demo/make_data.py
	$(BIN)/python dataset/demo/make_tools.py
	rm -rf model/demo/policy model/demo/reward model/demo/tools_policy
	$(BIN)/python trainer/train_sft.py $(SMALL) --epochs 3 --hf_dir model/demo/policy
	$(BIN)/python trainer/train_sft.py $(SMALL) --epochs 3 --learning_rate 1.5e-3 --model model/demo/policy \
		--data_path dataset/demo/references.jsonl --out_dir out/demo_backbone
	$(BIN)/python dataset/demo/make_reward.py $(SMALL) --epochs 5 --batch_size 24 \
		--model out/demo_backbone/full_sft_128 \
		--data_path dataset/demo/preferences.jsonl --eval_data_path dataset/demo/preferences_eval.jsonl \
		--hf_dir model/demo/reward
	$(BIN)/python trainer/train_sft.py $(SMALL) --epochs 2 --hf_dir model/demo/tools_policy \
		--data_path out/demo_tools/sft.jsonl --tokenizer out/demo_tools/tokenizer --out_dir out/demo_tools

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train.stamp: requirements.txt constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -r requirements.txt
	touch $@

.venv/bench.stamp: requirements-bench.txt .venv/train.stamp
	$(BIN)/python -m pip install -q -c constraints.txt -r requirements-bench.txt
	touch $@

.venv/dev.stamp: requirements-dev.txt .venv/train.stamp
	$(BIN)/python -m pip install -q -c constraints.txt -r requirements-dev.txt
	touch $@
