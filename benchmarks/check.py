"""What `shoal check` takes for a large repository: seconds and memory.

    python benchmarks/check.py [--num 200]

The repository holds NUM models: 40 ensembles of four Python models each, as the tests plant their mistakes in. It is
checked in processes of their own, five times; a process also starts Python and imports. The result goes to
benchmarks/results/check-DATE.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import typer

from shoal.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.planted import BASE, write

ROOT = Path(__file__).parents[1]
ONCE = """
import json, pathlib, sys, time
start = time.perf_counter()
from shoal.check import check
imported = time.perf_counter()
findings = check(sys.argv[1], target="embedded")
end = time.perf_counter()
peak = pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # getrusage keeps the parent's
heavy = sorted({"torch", "transformers", "treelite", "cupy", "sklearn"} & sys.modules.keys())
print(json.dumps({"findings": len(findings), "import_seconds": imported - start, "check_seconds": end - imported,
    "memory_mib": int(peak) / 1024, "heavy_modules": heavy}))
"""


def main(num: int = 200) -> None:
    """Measure and record."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        names = {path.split("/")[0] for path in BASE}
        for number in range(num // len(names)):
            for path, content in BASE.items():
                assert isinstance(content, str)
                renamed = content
                for model in names:
                    renamed = renamed.replace(f'"{model}"', f'"{model}-{number}"')
                model, _, rest = path.partition("/")
                write(Path(name) / f"{model}-{number}" / rest, renamed)
        turns = [json.loads(subprocess.check_output([sys.executable, "-c", ONCE, name], text=True)) for _ in range(5)]
    result = {
        "date": datetime.now().strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("protobuf", "tritonclient"),
        "models": num,
        "turns": turns,
        "median_check_seconds": statistics.median(turn["check_seconds"] for turn in turns),
    }
    path = ROOT / "benchmarks" / "results" / f"check-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{result['median_check_seconds']:.2f} s, {max(turn['memory_mib'] for turn in turns):.0f} MiB: {path}")


if __name__ == "__main__":
    typer.run(main)
