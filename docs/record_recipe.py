"""Runs a recipe and records what its page shows: `python -m docs.record_recipe dsort3`.

It trains with the recipe's settings on a broker of its own, archives the run, signs an attestation of it, draws
recipes/NAME/curve.svg, and prints the figures as JSON. With `--at-step N` the run is ended after that step, by
`rollstream steer stop`. The recipe of a control task has no batches: of it only the curve is drawn.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil

from rollstream.infra.broker.broker import LocalBroker
from rollstream.pipeline.config import load
from rollstream.pipeline.report.line_chart import HEIGHT, WIDTH, Curve, chart
from rollstream.pipeline.report.run_facts import facts_of

RECIPES = Path(__file__).parents[1] / "recipes"
CONTROL = RECIPES.parent / "examples" / "control" / "run.py"


def record(name: str, directory: Path, settings: list[str], last_step: int | None = None) -> dict[str, Any]:
    """Run a recipe in a directory with some settings replaced, at most to a step; return its figures and the curve
    as SVG."""
    broker = LocalBroker.start(directory / "broker", 0)
    try:
        changes = [
            f"data_dir={directory}",
            f"run={name}",
            f"kafka.bootstrap_servers={broker.bootstrap_servers}",
            *settings,
        ]
        given = ["--config", str(RECIPES / name / "run.toml"), *(f"--set={change}" for change in changes)]
        if last_step is not None:
            _rollstream("topics", "apply", *given)
            _rollstream("steer", "stop", *given, "--at-step", str(last_step))
        figures = _trained(given, directory / "run.log")
        statement = directory / "statement.json"
        key = _rollstream("key", "new", str(directory / "key.pem")).split()[-1]
        archived = _rollstream("archive", *given)
        _rollstream("attest", "sign", *given, "--signing-key", str(directory / "key.pem"), "-o", str(statement))
        _rollstream("attest", "check", *given, str(statement), "--key", key)
        facts = facts_of(load(RECIPES / name / "run.toml", flags=changes))
    finally:
        broker.stop()
    rewards = facts.curves["reward/produced"]
    return {
        **figures,
        "steps": max(rewards.steps),
        "reward": [round(rewards.values[0], 3), round(rewards.values[-1], 3)],
        "statement": json.loads(statement.read_text()),
        "archive": archived.strip(),
        "curve": picture(f"{name}: mean reward of rollouts by learner step", rewards),
    }


def record_control(directory: Path) -> dict[str, Any]:
    """Run the example of a control task in a directory; return its report and the curve of returns as SVG."""
    command = [sys.executable, str(CONTROL), "--json", "--seed", "0", "--data", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{CONTROL} exited with {done.returncode}: {done.stderr[-3000:]}")
    report = json.loads(done.stdout)
    curve = Curve("return", *zip(*((int(version), value) for version, value in report["returns"].items()), strict=True))
    return {**report, "curve": picture("control: mean return of an episode by policy version", curve)}


def _trained(given: list[str], log: Path) -> dict[str, float]:
    """Run until the learner's last step; return what it took: seconds, CPU seconds and memory of all roles together."""
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = 0
    with log.open("w") as output:
        run = psutil.Popen([sys.executable, "-P", "-m", "rollstream", "run", *given], stdout=output, stderr=output)
        while run.poll() is None:
            time.sleep(1)
            with suppress(psutil.Error):
                peak = max(peak, sum(_proportional_size(process) for process in (run, *run.children(recursive=True))))
    if run.returncode:
        raise SystemExit(f"the run exited with {run.returncode}: {log.read_text()[-3000:]}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime
    return {"seconds": round(time.monotonic() - began), "cpu_s": round(cpu_s), "memory_mb": round(peak / 1e6)}


def _proportional_size(process: psutil.Process) -> int:
    """Return the bytes of a process, of which pages shared with others count in part; 0 once it has ended."""
    with suppress(psutil.Error):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.uss))
    return 0


def _rollstream(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "rollstream", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {done.returncode}: {done.stderr}")
    return done.stdout


def picture(title: str, curve: Curve) -> str:
    """Return a curve with a title as an SVG file of its own, with the colours of reports in light and dark."""
    style = files("rollstream.pipeline.report").joinpath("style.css").read_text(encoding="utf-8")
    colours = re.findall(r"--(ground|line|muted|c0): (#\w+)", style)
    # The first definitions are those of light mode, the second those of dark mode.
    of = dict(reversed(colours))
    dark = {name: [colour for key, colour in colours if key == name][1] for name in of}
    rules = (
        f"svg{{background:{of['ground']}}}.grid{{stroke:{of['line']}}}.tick{{fill:{of['muted']};font:11px sans-serif}}"
        f".line{{fill:none;stroke:{of['c0']};stroke-width:2}}@media(prefers-color-scheme:dark){{"
        f"svg{{background:{dark['ground']}}}.grid{{stroke:{dark['line']}}}.tick{{fill:{dark['muted']}}}"
        f".line{{stroke:{dark['c0']}}}}}"
    )
    drawn = chart(title, [curve], 0)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
    return drawn.replace("<svg ", opening, 1).replace("<title", f"<style>{rules}</style><title", 1) + "\n"


def main() -> None:
    """Record a recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(path.parent.name for path in RECIPES.glob("*/run.toml")))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting")
    parser.add_argument("--at-step", type=int, metavar="N", help="end the run after this step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipe-") as directory:
        if args.name == "control":
            figures = record_control(Path(directory))
        else:
            figures = record(args.name, Path(directory), args.set, args.at_step)
            statement = json.dumps(figures.pop("statement"), indent=2)
            (RECIPES / args.name / "statement.json").write_text(statement + "\n")
    (RECIPES / args.name / "curve.svg").write_text(figures.pop("curve"), encoding="utf-8")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
