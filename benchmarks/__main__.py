"""Runs the benchmarks against other libraries (`make bench`); prints tables, writes results/*.json.

    python benchmarks                            # all of SUITE, on a GPU if there is one, else on the CPU
    python benchmarks generation update          # only these
    python benchmarks --device cpu generation    # on the CPU, though there is a GPU
    python benchmarks gpu                        # a GPU's tests, then its benchmarks, in 25 minutes: gpu.py

In each case this program and the peer run alternately in one process, several times. The tables have medians
with the least and the most. Scripts that are run by themselves: busy.py, chaos.py, demo.py, large_files.py,
learning.py, learning_rates.py, plan.py, preferences.py, recipes.py.
"""

import sys

import torch
from common import ROOT, machine, table, write_results

SUITE = ("generation", "update", "end_to_end", "memory", "phases")
# These run only when they are named: they compare with no peer, or need a GPU.
ASKED_FOR = ("lora", "demo", "cards", "kernel_times")


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


def main(argv):
    if argv[:1] == ["gpu"]:
        if not torch.cuda.is_available():
            raise SystemExit("error: gpu: torch sees no GPU here; `python benchmarks` measures on the CPU")
        import gpu

        return gpu.main(argv[1:])
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if argv[:1] == ["--device"]:
        device, argv = argv[1], argv[2:]
    names = argv or SUITE
    unknown = set(names) - {*SUITE, *ASKED_FOR}
    if unknown:
        raise SystemExit(
            f"error: {', '.join(sorted(unknown))}: choose from {', '.join((*SUITE, *ASKED_FOR))}; or gpu"
        )
    print(machine())
    for name in names:
        write_results(f"{name}_{device}", {"results": run(name, device)})
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
