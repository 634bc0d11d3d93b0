"""Runs the benchmarks against other libraries (`make bench`); prints tables, writes results/*.json.

    python benchmarks                            # all of SUITE, on a GPU if there is one, else on the CPU
    python benchmarks generation update          # only these
    python benchmarks --device cpu generation    # on the CPU, though there is a GPU
    python benchmarks gpu                        # a GPU's smoke test, tests and benchmarks, by worth: gpu.py

In each case this program and the peer run alternately in one process, several times. The tables have medians
with the least and the most. Results are written after each case; a case that fails is an "error" there, and
the next one is measured. Scripts that are run by themselves: busy.py, chaos.py, demo.py, large_files.py,
later_turns.py, learning.py, learning_environments.py, learning_rates.py, peers.py, plan.py, preferences.py,
real_model.py, real_model_tools.py, recipes.py, shared_prompts.py.
"""

import importlib
import sys
import time
import traceback

BEGUN = time.monotonic()  # before the imports that take long

import torch
from common import ROOT, machine, table, write_results

SUITE = ("generation", "update", "end_to_end", "memory", "phases")
# These run only when they are named: they take long, compare with no peer, or need a GPU.
ASKED_FOR = ("smoke", "generation_peers", "continuous", "lora", "demo", "cards", "kernel_times")


def run(name, device):
    """Measure the cases of a benchmark, one after the other -> whether all of them could be measured."""
    file, cases_of = {
        "memory": ("end_to_end", "memory_cases"),
        "generation_peers": ("generation", "peer_cases"),
    }.get(name, (name, "cases"))
    module = importlib.import_module(file)
    cases = getattr(module, cases_of)(device)
    facts = {"limits": module.rates(device)} if name == "phases" else {}
    results = []
    try:
        for case in cases:
            try:
                found = case()
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
                print(f"error: a case of {name}: {found['error'].splitlines()[0]}", flush=True)
            results += found if isinstance(found, list) else [found]
            write_results(f"{name}_{device}", {**facts, "results": results})
    finally:  # also of what was measured before this process was interrupted
        good = [result for result in results if "error" not in result or name in ("smoke", "cards")]
        shown = good if name == "memory" else list(module.rows(good))
        print(f"\n## {name}, {device}\n\n{table(shown)}\n", flush=True)
    failed = any("error" in result for result in results)
    if name == "phases" and device == "cpu" and not failed:
        module.draw(results, ROOT / "docs" / "phases.png")
    return not failed


def main(argv):
    if argv[:1] == ["gpu"]:
        if not torch.cuda.is_available():
            raise SystemExit("error: gpu: torch sees no GPU here; `python benchmarks` measures on the CPU")
        import gpu

        return gpu.main(argv[1:], BEGUN)
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
    failed = [name for name in names if not run(name, device)]
    if failed:
        raise SystemExit(f"error: not all could be measured: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
