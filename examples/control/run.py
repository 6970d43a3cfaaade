"""The example: `python examples/control/run.py --seed 0` plays, labels, learns, and prints a report.

It starts what a user would start by hand, and stops it at the end: a broker unless one is given, `rollstream run` with
two collecting processes and a labeler, and the learner. Buffers and logs stay in --data, topics on a given broker.
"""

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "recipes" / "control" / "run.toml"
ROLLSTREAM = (sys.executable, "-P", "-m", "rollstream")


def main() -> int:
    """Run the example; return 1 if the return did not rise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice (default: 0)")
    parser.add_argument("--image", action="store_true", help="observe images of 16x16 pixels instead of four numbers")
    parser.add_argument("--versions", type=int, default=12, help="policy versions to learn (default: 12)")
    parser.add_argument("--data", type=Path, default=Path(".rollstream/control"), help="directory of buffers and logs")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    try:
        with broker(args.data.resolve() / "broker") as servers:
            report = play(args, servers)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd[:4]))} ... exited with {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["last_return"] > report["first_return"] else 1


@contextmanager
def broker(directory: Path) -> Iterator[str]:
    """Yield the addresses of the given brokers, or of a broker that runs until the block ends."""
    if given := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield given
        return
    command = (*ROLLSTREAM, "broker", "start", "--data", directory, "--port", "0", "--json")
    started = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    try:
        yield json.loads(started.stdout)["bootstrap_servers"]
    finally:
        subprocess.run((*ROLLSTREAM, "broker", "stop", "--data", directory), stdout=subprocess.DEVNULL, check=True)


@contextmanager
def running(*command: str | Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it with SIGTERM when the block ends. Its standard error goes to a file."""
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def play(args: argparse.Namespace, servers: str) -> dict[str, Any]:
    """Run everything on topics of a new run; return the learner's report."""
    run = f"control-{uuid.uuid4().hex[:8]}"
    data = (args.data / run).resolve()
    logs = data / "logs"
    logs.mkdir(parents=True)
    settings = (
        *("--config", CONFIG, "--run", run, "-b", servers, "--set", f"data_dir={data}"),
        *("--set", f"collect.player={HERE / 'play.py'}:play", "--set", f"collect.seed={args.seed}"),
        *("--set", f"labeling.labeler={HERE / 'reach.py'}:judge"),
        *(("--set", "collect.options.image=true") if args.image else ()),
    )
    options = ("--seed", str(args.seed), "--versions", str(args.versions), *(("--image",) if args.image else ()))
    learn = (sys.executable, HERE / "learn.py", servers, run, "--data", data, *options)
    subprocess.run((*ROLLSTREAM, "topics", "apply", *settings), stdout=subprocess.DEVNULL, check=True)
    with running(*learn, log=logs / "learn.log") as learner:
        assert learner.stdout is not None
        # The learner is ready once version 0 is on the log, so that players have a policy.
        if learner.stdout.readline() == "ready\n":
            with running(*ROLLSTREAM, "run", *settings, log=logs / "run.log"):
                learner.wait()
        if learner.wait():
            sys.stderr.write((logs / "learn.log").read_text())
            raise subprocess.CalledProcessError(learner.returncode, learn)
    report: dict[str, Any] = json.loads((data / "report.json").read_text())
    return {"run": run, "seed": args.seed, "observations": "image" if args.image else "state", **report}


def text(report: dict[str, Any]) -> str:
    """Format the report for people."""
    last = f"version {report['versions'] - 1}"
    by_worker = ", ".join(f"{count} by {name}" for name, count in sorted(report["trajectories"].items()))
    windows, slices = report["windows"], report["slices"]
    return "\n".join(
        (
            f"{report['run']}, seed {report['seed']}, observations: {report['observations']}",
            f"{report['updates']} updates and {report['versions']} versions in {report['seconds']} s",
            "",
            f"mean return of an episode    version 0  {last:>10}",
            f"  as played, exploring     {report['first_return']:11.3f}  {report['last_return']:10.3f}",
            f"  without exploring        {report['first_greedy_return']:11.3f}  {report['last_greedy_return']:10.3f}",
            "",
            f"episodes      {report['episodes']['policy']} of the policy, {report['episodes']['human']} of the expert",
            f"trajectories  {by_worker}; {report['refused']} refused",
            f"windows       {windows['window_samples']} steps to draw from, {windows['stored_bytes']} bytes on disk",
            f"slices        {slices['auto']['size']} steps of the policy, {slices['hil']['size']} of the expert",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
