"""The example: `python -P examples/control/run.py --seed 0` plays, labels, learns, and prints what came of it.

Starts a broker where none is given, two collecting processes and a labeller as `rollstream run` would, and the learner
beside them, and stops all of them. What it wrote stays in --data, and on the broker where that was given.
"""

import argparse
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from consumers.labelling.config import LabellingConfig
from infra.broker import open_broker
from infra.config import BrokerConfig
from pipeline import plan
from pipeline.config import RunConfig
from pipeline.supervisor import RoleSpec, Supervisor
from producers.config import CollectConfig
from topics import logs, provisioning
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import RollstreamError

HERE = Path(__file__).resolve().parent


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
        config = configuration(args, KafkaConfig(bootstrap_servers=broker.bootstrap_servers), run, data)
        provisioning.apply(config.kafka, config.topics, run)
        roles, learn = plan.control_plan(config, plan.write(config)), learner(args, config)
        with Supervisor(data / "logs", environment=environment()) as supervisor:
            supervisor.start(*roles.consumers, learn)
            supervisor.wait_ready(spec.name for spec in (*roles.consumers, learn))
            supervisor.start(*roles.collectors)
            while not supervisor.finished(learn.name):
                supervisor.poll(0.2)
    report: dict[str, Any] = json.loads((data / "report.json").read_text())
    return {"run": run, "seed": args.seed, "observations": "image" if args.image else "state", **report}


def configuration(args: argparse.Namespace, kafka: KafkaConfig, run: str, data: Path) -> RunConfig:
    """What a file for `rollstream run` would say. The learner fills buffers of its own, so no other process does."""
    return RunConfig(
        run=run,
        data_dir=data,
        kafka=kafka,
        topics=TopicsConfig(partitions=2),
        collect=CollectConfig(
            processes=2,
            player="play:play",
            environment="reach",
            steps=20,
            max_episode_length=24,  # reach.MAX_STEPS
            seed=args.seed,
            options={"image": "true"} if args.image else {},
        ),
        labelling=LabellingConfig(processes=1, labeler="reach:judge"),
    )


def learner(args: argparse.Namespace, config: RunConfig) -> RoleSpec:
    """The learner, a script beside this one."""
    drawn = ("--seed", str(args.seed), *(("--image",) if args.image else ()))
    where = (config.kafka.bootstrap_servers, config.run, "--data", str(config.data_dir))
    arguments = ("-P", str(HERE / "learn.py"), *where, *drawn, "--versions", str(args.versions))
    return RoleSpec(name="learn", arguments=arguments, finishes=True, restarts=0)


def environment() -> dict[str, str]:
    """Variables of all processes: modules of the example are found by PYTHONPATH alone."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": path}


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
