"""The example: `python -P examples/control/run.py --seed 0` plays, labels, learns, and prints what came of it.

Starts a broker where none is given, two workers, a labeler and a learner, each a process of its own, and stops all of
them. What it wrote stays in --data, and on the broker where that was given.
"""

import argparse
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from infra.broker import open_broker
from infra.config import BrokerConfig
from pipeline.supervisor import RoleSpec, Supervisor
from topics import logs, provisioning
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import RollstreamError

HERE = Path(__file__).resolve().parent
WORKERS = 2


def main() -> int:
    """Run the example; 1 where the return did not rise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--image", action="store_true", help="observe images of 16x16 pixels instead of four numbers")
    parser.add_argument("--versions", type=int, default=12, help="policy versions to learn (default: 12)")
    parser.add_argument("--data", type=Path, default=Path(".rollstream/control"), help="where buffers and logs lie")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    logs.setup("warning")
    try:
        report = play(args)
    except RollstreamError as error:
        print(f"rollstream: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["last_return"] > report["first_return"] else 1


def play(args: argparse.Namespace) -> dict[str, Any]:
    """All of it, on topics of its own; returns the learner's report."""
    run = f"control-{uuid.uuid4().hex[:8]}"
    data = (args.data / run).resolve()
    with open_broker(BrokerConfig(data_dir=args.data.resolve() / "broker")) as broker:
        kafka = KafkaConfig(bootstrap_servers=broker.bootstrap_servers)
        provisioning.apply(kafka, TopicsConfig(partitions=2), run)
        with Supervisor(data / "logs") as supervisor:
            label, learn, *workers = roles(args, kafka, run, data)
            supervisor.start(label, learn)
            supervisor.wait_ready((label.name, learn.name))
            supervisor.start(*workers)
            while not supervisor.finished(learn.name):
                supervisor.poll(0.2)
    report: dict[str, Any] = json.loads((data / "report.json").read_text())
    return {"run": run, "seed": args.seed, "observations": "image" if args.image else "state", **report}


def roles(args: argparse.Namespace, kafka: KafkaConfig, run: str, data: Path) -> list[RoleSpec]:
    """The labeler, the learner, and the workers."""
    where = (kafka.bootstrap_servers, run)
    drawn = ("--seed", str(args.seed), *(("--image",) if args.image else ()))
    # Modules of the example find each other, and the labeler is found, by this path alone.
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}

    def script(name: str, *arguments: str) -> tuple[str, ...]:
        return "-P", str(HERE / f"{name}.py"), *where, *drawn, *arguments

    labelling = ("-P", "-m", "pipeline", "label", "reach:judge", "-b", kafka.bootstrap_servers, "--run", run)
    learning = script("learn", "--versions", str(args.versions), "--data", str(data))
    return [
        RoleSpec(name="label-0", arguments=labelling, environment=environment),
        RoleSpec(name="learn", arguments=learning, environment=environment, finishes=True, restarts=0),
        *(
            RoleSpec(name=f"play-{i}", arguments=script("play", "--ordinal", str(i)), environment=environment)
            for i in range(WORKERS)
        ),
    ]


def text(report: dict[str, Any]) -> str:
    """The report for people."""
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
