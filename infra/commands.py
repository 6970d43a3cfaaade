"""`rollstream broker start|stop|status`: a local Kafka as a daemon, identified by its data directory.

`register` adds these commands to the application's parser. Each handler prints text, or JSON with --json, and returns
the exit status. `status` exits 0 if the broker, or every node of a cluster, answers, else 1.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.broker_state import read_cluster
from rollstream.infra.broker.cluster import LocalCluster
from rollstream.infra.broker.ports import accepts_connections
from rollstream.infra.broker.providers import external_kafka
from rollstream.infra.config import PROVIDERS, BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable

DEFAULT_PORT = 9092
DEFAULT_DATA_DIR = BrokerConfig().data_dir


def register(broker: argparse.ArgumentParser) -> "argparse._SubParsersAction[Any]":
    """Add the commands of `broker`. Each sets `run`, a function from the parsed arguments to the exit status.

    Returns the group to which more commands of `broker` can be added.
    """
    commands = broker.add_subparsers(dest="broker_command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--data", type=Path, default=DEFAULT_DATA_DIR, metavar="DIR", help="data directory (default: %(default)s)"
    )
    common.add_argument("--json", action="store_true", help="print JSON")

    start = commands.add_parser("start", parents=[common], help="start a broker and leave it running")
    start.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port for clients, 0 for any free one (default: %(default)s)"
    )
    start.add_argument(
        "--host",
        default=BrokerConfig.host,
        help="address that the broker listens on and advertises (default: %(default)s)",
    )
    start.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="number of nodes of a cluster, which keep up to three replicas of every topic and use the ports from "
        "--port upwards (default: the number that the data has, else 1)",
    )
    start.add_argument(
        "--provider", choices=PROVIDERS, default="auto", help="program that runs the broker (default: %(default)s)"
    )
    start.set_defaults(run=run_start)

    stop = commands.add_parser("stop", parents=[common], help="stop the broker of a data directory; its data stays")
    stop.set_defaults(run=run_stop)

    status = commands.add_parser(
        "status", parents=[common], help="show whether a broker runs and answers, and its address"
    )
    status.set_defaults(run=run_status)
    return commands


def run_start(args: argparse.Namespace) -> int:
    """Start a broker or a cluster, unless KAFKA_BOOTSTRAP_SERVERS names one that answers.

    Raises BrokerUnavailable if one already runs on this data, or if the named one does not answer.
    """
    given = external_kafka()
    if given:
        if not accepts_connections(given.bootstrap_servers):
            raise BrokerUnavailable(
                f"KAFKA_BOOTSTRAP_SERVERS is set to {given.bootstrap_servers}, where nothing accepts connections; "
                "unset it to start a broker here"
            )
        _print(
            args,
            {"state": "external", "bootstrap_servers": given.bootstrap_servers},
            f"KAFKA_BOOTSTRAP_SERVERS is set: using {given.bootstrap_servers}, nothing to start",
        )
        return 0
    cluster = read_cluster(BrokerLayout(root=args.data))
    nodes = args.nodes or (cluster.nodes if cluster else 1)
    config = BrokerConfig(data_dir=args.data, host=args.host, port=args.port, provider=args.provider)
    broker: LocalBroker | LocalCluster
    if nodes > 1 or cluster:
        broker = LocalCluster.start(args.data, nodes, config=config)
        fields = _cluster_fields(broker)
        pids = ", ".join(str(node["pid"]) for node in fields["nodes"])
        text = f"Kafka is ready at {broker.bootstrap_servers} ({nodes} nodes, pids {pids}, data {args.data})"
    else:
        broker = LocalBroker.start(config=config)
        fields = _fields(broker)
        text = f"Kafka is ready at {broker.bootstrap_servers} (pid {broker.pid}, data {args.data}, log {broker.log})"
    stop = "rollstream broker stop" + ("" if args.data == DEFAULT_DATA_DIR else f" --data {args.data}")
    hint = f"export KAFKA_BOOTSTRAP_SERVERS={broker.bootstrap_servers}   # for other commands; stop Kafka with: {stop}"
    _print(args, fields, f"{text}\n{hint}")
    return 0


def run_stop(args: argparse.Namespace) -> int:
    """Stop the broker, or all nodes, of the data directory. Succeeds if none runs."""
    cluster = LocalCluster.find(args.data)
    if cluster is not None:
        pids = [node.pid for node in cluster.nodes if node is not None]
        cluster.stop()
        text = f"stopped {cluster.bootstrap_servers} (pids {', '.join(map(str, pids))}); the data stays in {args.data}"
        _print(args, {"state": "stopped", "data": str(args.data), "pids": pids}, text)
        return 0
    broker = LocalBroker.find(args.data)
    if broker is None:
        _print(args, {"state": "stopped", "data": str(args.data)}, f"no broker runs on {args.data}")
        return 0
    broker.stop()
    _print(
        args,
        {"state": "stopped", "data": str(args.data), "pid": broker.pid},
        f"stopped {broker.bootstrap_servers} (pid {broker.pid}); its data stays in {args.data}",
    )
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print whether the broker of the data directory, or each of its nodes, runs and answers."""
    cluster = LocalCluster.find(args.data)
    if cluster is not None:
        fields = _cluster_fields(cluster)
        lines = [
            f"node {node['node']} {node['bootstrap_servers']} {node['state']}"
            + (f" (pid {node['pid']}, log {node['log']})" if node["pid"] else "")
            for node in fields["nodes"]
        ]
        _print(args, fields, "\n".join([f"{cluster.bootstrap_servers} {fields['state']} (data {args.data})", *lines]))
        return 0 if fields["state"] == "running" else 1
    broker = LocalBroker.find(args.data)
    if broker is None:
        _print(args, {"state": "stopped", "data": str(args.data)}, f"no broker runs on {args.data}")
        return 1
    answers = broker.answers()
    fields = {**_fields(broker), "state": "running" if answers else "silent"}
    state = "answers" if answers else f"runs but does not answer (log: {broker.log})"
    _print(args, fields, f"{broker.bootstrap_servers} {state} (pid {broker.pid}, {broker.provider}, data {args.data})")
    return 0 if answers else 1


def _fields(broker: LocalBroker) -> dict[str, Any]:
    return {
        "state": "running",
        "bootstrap_servers": broker.bootstrap_servers,
        "port": broker.port,
        "pid": broker.pid,
        "provider": broker.provider,
        "data": os.fspath(broker.data_dir),
        "log": os.fspath(broker.log),
    }


def _cluster_fields(cluster: LocalCluster) -> dict[str, Any]:
    """Return the state of a cluster: running if every node answers, degraded if some do, silent if none does."""
    answering = cluster.answers()
    nodes = []
    for index, (node, address) in enumerate(zip(cluster.nodes, cluster.bootstrap_servers.split(","), strict=True)):
        runs = node is not None and node.running
        nodes.append(
            {
                "node": index + 1,
                "state": "running" if index in answering else "silent" if runs else "stopped",
                "bootstrap_servers": address,
                "pid": node.pid if node and runs else None,
                "log": os.fspath(node.log) if node else None,
            }
        )
    return {
        "state": "running" if len(answering) == len(nodes) else "degraded" if answering else "silent",
        "bootstrap_servers": cluster.bootstrap_servers,
        "data": os.fspath(cluster.data_dir),
        "nodes": nodes,
    }


def _print(args: argparse.Namespace, fields: dict[str, Any], text: str) -> None:
    print(json.dumps(fields) if args.json else text)
