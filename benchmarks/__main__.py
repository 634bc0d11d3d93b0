"""Runs the benchmarks against other libraries (`make bench`); prints tables, writes results/*.json.

    python benchmarks                            # all of SUITE, on the CPU and on a GPU if there is one
    python benchmarks generation update          # only these

In each case this program and the peer run alternately in one process, several times. The tables have medians
with the least and the most. Scripts that are run by themselves: busy.py, chaos.py, demo.py, large_files.py,
learning_rates.py, preferences.py, recipes.py.
"""

import sys

import torch
from common import ROOT, machine, table, write_results

SUITE = ("generation", "update", "end_to_end", "memory", "phases")
ASKED_FOR = ("lora",)  # runs only when named: it compares with no peer, and its demo runs take minutes


def run(name, device):
    if name == "memory":
        import end_to_end

        results = end_to_end.memory(device)
        shown = [results]
    elif name == "phases":
        import phases

        results = {"limits": phases.rates(device), "settings": phases.run(device)}
        shown = results["settings"]
        if device == "cpu":
            phases.draw(shown, ROOT / "docs" / "phases.png")
    else:
        module = __import__(name)
        results = module.run(device)
        shown = list(module.rows(results))
    print(f"\n## {name}, {device}\n\n{table(shown)}\n", flush=True)
    return results


def main():
    names = sys.argv[1:] or SUITE
    unknown = set(names) - {*SUITE, *ASKED_FOR}
    if unknown:
        raise SystemExit(
            f"error: {', '.join(sorted(unknown))}: choose from {', '.join((*SUITE, *ASKED_FOR))}"
        )
    print(machine())
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name in names:
            write_results(f"{name}_{device}", {"results": run(name, device)})


if __name__ == "__main__":
    main()
