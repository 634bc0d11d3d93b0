"""Every benchmark of this folder, for `make bench`: prints tables, writes benchmarks/results/*.json.

    python benchmarks                            # on a CPU, and on a GPU where there is one
    python benchmarks generation update          # some of them

Each case runs us and the peer in turns, in one process, several times; medians with the least and the most.
"""

import sys

import torch
from common import ROOT, machine, table, write_results

SUITE = ("generation", "update", "end_to_end", "memory", "phases")
ASKED_FOR = ("lora",)  # only when named: it has no peer beside us, and the demo in it takes minutes


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
