# Two commands do everything: `make train` and `make test`. Both first build .venv from requirements*.txt.
# More flags for the trainer: make train ARGS="--seed 1 --run_name mine"
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: train test bench demo-assets lint clean

train: .venv/train.stamp
	$(BIN)/python trainer/train_ppo.py $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest $(ARGS)

bench: .venv/dev.stamp
	$(BIN)/python benchmarks/demo.py $(ARGS)

demo-assets: .venv/train.stamp
	$(BIN)/python dataset/demo/make_data.py
	@echo TODO

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv out .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train.stamp: requirements.txt | .venv/bin/python
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev.stamp: requirements-dev.txt .venv/train.stamp
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@
