"""Commands of `rollstream`: the module and summary of each, in the order in which --help lists them."""

from collections.abc import Mapping

SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Train": {
        "demo": ("launch.demo", "train a small model through a local Kafka and print a report"),
        "run": ("launch.run", "run all roles under one supervisor until interrupted or their work is done"),
        "env": ("tools.env", "environments of your own: new, check, serve"),
    },
    "Look into a run": {
        "top": ("tools.top", "show the state of a run on one screen"),
        "ui": ("ui.command", "show runs in a browser: rollouts, groups, curves, drops, weights, ledger"),
        "show": ("tools.show", "show one rollout as a person reads it, with its group and its fate"),
        "lineage": ("tools.lineage", "show where something came from and what became of it"),
        "report": ("tools.report", "write one HTML file that shows how a run went, and how to verify it"),
        "runs": ("tools.runs", "list the runs that are on the brokers"),
        "cat": ("tools.cat", "print the records of a topic, decoded, one per line"),
    },
    "Prove": {
        "ledger": ("tools.ledger", "prove from the topics alone that every record is in exactly one place"),
        "verify": ("tools.verify", "compute batches again from the log and compare them bit for bit"),
        "replay": ("tools.replay", "fold the recorded log again, as it was or under another configuration"),
        "retrain": (
            "tools.retrain",
            "execute recorded steps again from a checkpoint and the log, and compare parameters",
        ),
        "rescore": (
            "tools.rescore",
            "score old rollouts with another verifier, and show which steps trained on wrong advantages",
        ),
        "attest": ("tools.attest", "sign what a model was trained on, and check it from an archive alone"),
    },
    "Change a run": {
        "steer": ("", "a run while it runs: its processes, environments, end, exclusions, learners"),
        "fork": (
            "tools.fork",
            "start from a recorded step: a learner on the same batches, or a run with another number of partitions",
        ),
        "weights": ("tools.weights", "policy versions: list, show, export, verify, compare, roll back"),
        "dlq": ("tools.dlq", "dead letters: ls, show, redrive"),
        "prune": ("tools.prune", "delete what recovery, verification and learners no longer need"),
    },
    "Copy": {
        "archive": ("tools.archive", "copy new records of the run's topics into Parquet files, each once"),
        "restore": ("tools.restore", "fill the topics of a new run from an archive, every record at the offset it had"),
        "sql": ("tools.sql", "query the archive with DuckDB; without a query, show its tables"),
        "sink": ("tools.sink", "fill trackio, Weights & Biases or another tracker from the log: steps and traces"),
        "groups": ("tools.groups", "write new groups of the run into Parquet files, in a group store"),
        "trajectories": ("tools.trajectories", "saved trajectory buffers: show, merge, split"),
        "import": (
            "tools.importer",
            "copy chats, rollouts of the old form, or samples of a TransferQueue into a run or new files",
        ),
    },
    "Set up": {
        "doctor": ("tools.doctor", "check what a role can see and do on the brokers, with a remedy for each fault"),
        "topics": ("tools.topics", "the topics of a run: plan, apply, describe"),
        "broker": ("tools.broker", "a local Kafka: start, stop, status; on any Kafka: end hanging transactions"),
        "deploy": ("tools.deploy", "a run for compose, Helm or Slurm; dashboard and alerts; a fit onto TPUs"),
        "role": ("", "one process of a run, started by itself: env, group, learn, infer and the others"),
        "key": ("tools.key", "private keys with which marks and rollouts are signed: new, show"),
        "completion": ("tools.completion", "print the script that lets a shell complete commands and flags"),
    },
}
"""Module, below rollstream.pipeline, and summary of each command, by section of the help; most used first."""
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "steer": {
        "scale": ("tools.scale", "change how many processes of each role a run has"),
        "environment": ("tools.environment", "pause, resume and weigh the environments of a run"),
        "stop": ("tools.stop", "end a run after a given step as if its work were done, or with nothing in flight"),
        "evaluate": ("tools.evaluate", "have the newest policy version of a run evaluated now"),
        "exclude": (
            "tools.exclude",
            "quarantine rollouts: drop those not yet batched, and let learners leave out the batched ones",
        ),
        "learner": (
            "tools.learner",
            "retire a learner, so that nothing is kept for it, or let it train again",
        ),
    },
    "role": {
        "env": ("roles.env", "play the environment and publish rollouts"),
        "group": ("roles.group", "group rollouts into training batches, exactly once"),
        "learn": ("roles.learn", "train on the batches and publish policy versions"),
        "infer": ("roles.infer", "serve completions from the newest policy version"),
        "engine": ("roles.engine", "run the vLLM of another Python environment with the newest policy version"),
        "serve-weights": ("roles.serve_weights", "keep engines such as vLLM and SGLang on the newest policy version"),
        "gateway": ("roles.gateway", "capture the model calls of any agent, and write them as rollouts"),
        "label": (
            "roles.label",
            "label trajectories that wait for their rewards, exactly once",
        ),
        "eval": ("roles.eval", "evaluate the held-out split at every K-th policy version"),
        "collect": ("roles.collect", "play a control task and publish trajectories"),
        "fill": ("roles.fill", "fill a trajectory buffer on disk from the log"),
    },
}
"""Module and summary of each command below another one."""
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
