"""All commands that change a run while it runs, and the state that they ask for.

A command only writes a record to the run's topic `control`. `rollstream run` and the roles follow that topic and carry
the command out. So a command works wherever the run's processes are, even before they start.

The command line and the page of a run use the same two functions: `record` checks and records a command, and `state`
returns the state asked for.
"""

import difflib
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any

from rollstream.consumers.weights.manifests import versions_of
from rollstream.pipeline.deployment.description import ENV, EVAL, GATEWAY, GROUP, INFER, LEARN, ROLES
from rollstream.producers.flow.mixture_states import environments_played
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control import steering
from rollstream.topics.control.named_records import REASON_LIMIT, write
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import (
    DesiredProcesses,
    DrainRequest,
    EvaluationRequest,
    MixtureWeight,
    PausedEnvironment,
    RequestAnswer,
    StopRequest,
)
from rollstream.topics.wire.catalogue import topic_name

MOST_WEIGHT = 1e6
"""Largest weight of an environment."""
REPLICAS = f"{ENV}:"
"""What precedes the name of an environment whose number of workers may be changed."""
SCALED = (ENV, GROUP, INFER, GATEWAY, EVAL)
"""Roles whose number of processes may be changed while the run runs."""
MOST = 512
"""Largest number of processes of a role, except `group`, which is limited by the number of partitions."""


_ANSWER_S = 10.0
"""How long to wait for the answer of the process that supervises the run."""


class Refused(StateRefused):
    """The run does not follow a command."""

    exit_code = 1


def record(kafka: KafkaConfig, run: str, command: Mapping[str, Any]) -> None:
    """Check a command and record it.

    `command` has the command's name under `command`, and its arguments under their names, as docs/steering.md lists
    them. Raises ConfigurationError, which names the remedy, if the command cannot be carried out, Refused if the run
    answers that it does not follow it, and TopicError, BrokerUnavailable or DeliveryError if it cannot be recorded.
    """
    name = command.get("command")
    if name not in COMMANDS:
        raise ConfigurationError(f"there is no command {name!r}; commands are {', '.join(COMMANDS)}")
    arguments = {key: value for key, value in command.items() if key != "command"}
    clients.check_broker(kafka)
    COMMANDS[str(name)](kafka, run, arguments)


def check_run(kafka: KafkaConfig, run: str) -> None:
    """Raise TopicError, which names a run of a similar name, if there is no such run."""
    topic_admin.partitions_of(kafka, topic_name(run, "control"))


def state(kafka: KafkaConfig, run: str) -> dict[str, Any]:
    """Return the state that commands ask for in a run, as plain values for JSON. Raises BrokerUnavailable."""
    state = steering.desired_state(kafka, run)
    return {
        "processes": state.numbers,
        "paused": {name: pause.reason for name, pause in sorted(state.paused.items())},
        "weights": dict(sorted(state.weights.items())),
        "stop_at_step": state.last_step,
        "drain": (steering.DONE if state.drained else steering.WANTED) if state.draining else None,
        "evaluate_version": request.version if (request := state.evaluation_request) else None,
    }


def _scale(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """Record numbers of processes by role: {"processes": {"env": 8, "group": None}}; None restores the setting."""
    numbers = _only(arguments, "processes")["processes"]
    if not isinstance(numbers, Mapping) or not numbers:
        raise ConfigurationError("name a role and its number of processes, e.g. env=8")
    for role, number in numbers.items():
        _check_scaled(kafka, run, str(role))
        if number is not None:
            _check_number(kafka, run, str(role), number)
    now = time.time()
    _write_numbers(kafka, run, numbers, now)
    _await_answers(kafka, run, [f"{steering.PROCESSES}:{role}" for role, n in numbers.items() if n is not None], now)


def _await_answers(kafka: KafkaConfig, run: str, requests: Collection[str], wall_time: float) -> None:
    """Wait a moment until the process that supervises the run, if one does, has answered these requests.

    Raises Refused with its reasons.
    """
    deadline = time.monotonic() + _ANSWER_S
    with closing(steering.SteeringWatch(kafka, run)) as watch:
        while True:
            answers = [a for key in requests if (a := watch.state.answers.get(key)) and a.wall_time == wall_time]
            if refused := "; ".join(answer.refused for answer in answers if answer.refused):
                raise Refused(f"run {run} refuses this: {refused}")
            waits = watch.state.supervisor is not None and len(answers) < len(requests)
            if not waits or time.monotonic() >= deadline:
                return
            watch.poll(0.2)


def answer(kafka: KafkaConfig, run: str, request: str, wall_time: float, refused: str) -> None:
    """Record the answer to the request of this key and time; `refused` is empty if the run follows it.

    Raises TopicError, BrokerUnavailable or DeliveryError.
    """
    write(kafka, run, steering.ANSWER, {request: RequestAnswer(wall_time=wall_time, refused=refused)})


def _write_numbers(kafka: KafkaConfig, run: str, numbers: Mapping[str, int | None], now: float) -> None:
    records = {
        str(role): None if number is None else DesiredProcesses(role=role, processes=number, wall_time=now)
        for role, number in numbers.items()
    }
    write(kafka, run, steering.PROCESSES, records)


def put_back(kafka: KafkaConfig, run: str, refused: DesiredProcesses, kept: int | None) -> None:
    """Record the number of processes that a run keeps in place of a request that it cannot follow, unless there is
    another request by now, even for the same number: that one is answered, too.

    None stands for the number in the settings. Other processes follow these numbers, too: workers would send requests
    to servers that do not exist. Raises TopicError, BrokerUnavailable or DeliveryError.
    """
    if steering.desired_state(kafka, run).processes.get(refused.role) == refused:
        _write_numbers(kafka, run, {refused.role: kept}, time.time())


def _check_scaled(kafka: KafkaConfig, run: str, role: str) -> None:
    if role in SCALED:
        return
    if role.startswith(REPLICAS):
        _check_environment(kafka, run, role.removeprefix(REPLICAS))
        return
    if role == LEARN:
        raise ConfigurationError(
            "the processes of a learner share one model and start together: set learner.processes and start "
            "`rollstream run` again; the learner goes on from its checkpoint"
        )
    counted = {each.name: each.counted_by for each in ROLES if each.counted_by}
    if role in counted:
        raise ConfigurationError(
            f"{role} cannot be scaled while the run runs: set {counted[role]} and start `rollstream run` again; roles "
            f"that can be scaled: {', '.join(SCALED)}"
        )
    raise ConfigurationError(f"there is no role {role!r}; roles that can be scaled: {', '.join(SCALED)}")


def _check_number(kafka: KafkaConfig, run: str, role: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigurationError(f"{role}={number} is not a number of processes; write e.g. {role}=2, or {role}=auto")
    most = MOST
    if role == GROUP:
        most = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    if number < 1:
        raise ConfigurationError(
            f"{role}={number}: at least one process is needed, otherwise the run would wait forever"
        )
    if number > most:
        why = (
            f"topic {run}.rollouts has {most} partitions, each read by one process; `rollstream fork "
            "--partitions` starts a run with more"
            if role == GROUP
            else f"at most {most} processes are started on a machine"
        )
        raise ConfigurationError(f"{role}={number}: {why}")


def _pause(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """Pause an environment: {"environment": "math", "reason": "its verifier hangs"}."""
    given = _only(arguments, "environment", "reason")
    name, reason = str(given["environment"]), str(given["reason"]).strip()
    if not 0 < len(reason) <= REASON_LIMIT:
        raise ConfigurationError(f"give a reason of 1 to {REASON_LIMIT} characters: the next operator reads it")
    _check_environment(kafka, run, name)
    pause = PausedEnvironment(environment=name, reason=reason, wall_time=time.time())
    write(kafka, run, steering.PAUSED, {name: pause})


def _resume(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """Resume a paused environment: {"environment": "math"}."""
    name = str(_only(arguments, "environment")["environment"])
    paused = steering.desired_state(kafka, run).paused
    if name not in paused:
        names = ", ".join(sorted(paused)) or "none"
        raise ConfigurationError(f"environment {name} of run {run} is not paused; paused environments: {names}")
    write(kafka, run, steering.PAUSED, {name: None})


def _weigh(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """Record weights by environment: {"weights": {"math": 2.0, "sort": None}}; None restores the setting."""
    weights = _only(arguments, "weights")["weights"]
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigurationError("name an environment and its weight, e.g. math=2")
    records: dict[str, object | None] = {}
    for name, weight in weights.items():
        if weight is not None and not (isinstance(weight, int | float) and 0 < weight <= MOST_WEIGHT):
            raise ConfigurationError(
                f"the weight of environment {name} is {weight}; it must be above 0 and at most {MOST_WEIGHT:g}; "
                "`rollstream steer environment pause` takes the environment out of the mixture"
            )
        _check_environment(kafka, run, str(name))
        records[str(name)] = (
            None
            if weight is None
            else MixtureWeight(environment=str(name), weight=float(weight), wall_time=time.time())
        )
    write(kafka, run, steering.WEIGHT, records)


def _stop(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """End learners after a step: {"at_step": 500}; None withdraws the request."""
    at_step = _only(arguments, "at_step")["at_step"]
    if at_step is not None and (not isinstance(at_step, int) or isinstance(at_step, bool) or at_step < 0):
        raise ConfigurationError(f"{at_step!r} is not a step number; write e.g. `rollstream steer stop --at-step 500`")
    request = None if at_step is None else StopRequest(at_step=at_step, wall_time=time.time())
    write(kafka, run, steering.STOP, {steering.AT_STEP: request})


def _drain(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """End the run with nothing in flight: {"wanted": True}; False withdraws the request."""
    wanted = _only(arguments, "wanted")["wanted"]
    if not isinstance(wanted, bool):
        raise ConfigurationError(f"wanted is {wanted!r}; it must be true, or false to withdraw the drain")
    if wanted and steering.desired_state(kafka, run).draining:
        return  # Keep the first request, because the answer refers to the request by its time.
    request = DrainRequest(wall_time=time.time()) if wanted else None
    write(kafka, run, steering.DRAIN, {steering.DONE: None, steering.WANTED: request})


def _evaluate(kafka: KafkaConfig, run: str, arguments: Mapping[str, Any]) -> None:
    """Request an evaluation of the newest policy version; there are no arguments."""
    _only(arguments)
    messages = read_to_end(kafka, topic_name(run, "policies"))
    versions = versions_of(message.key for message in messages if message.key and message.value is not None)
    if not versions:
        raise ConfigurationError(f"run {run} has no policy version yet: start its learner, which publishes version 0")
    request = EvaluationRequest(version=max(versions), wall_time=time.time())
    write(kafka, run, steering.EVALUATE, {steering.NOW: request})
    _await_answers(kafka, run, [f"{steering.EVALUATE}:{steering.NOW}"], request.wall_time)


def _check_environment(kafka: KafkaConfig, run: str, name: str) -> None:
    """Raise ConfigurationError for an environment that no worker plays, once workers have recorded their mixtures."""
    known = environments_played(kafka, run)
    if known and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        raise ConfigurationError(f"run {run} has no environment {name!r}, {hint}")


def _only(arguments: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the arguments. Raises ConfigurationError if an argument in `names` is missing or another is present."""
    for name in (*names, *arguments):
        if name not in names:
            raise ConfigurationError(f"the command has no argument {name!r}; its arguments are {', '.join(names)}")
        if name not in arguments:
            raise ConfigurationError(f"the command needs {name!r}")
    return arguments


COMMANDS: Mapping[str, Callable[[KafkaConfig, str, Mapping[str, Any]], None]] = {
    "scale": _scale,
    "pause_environment": _pause,
    "resume_environment": _resume,
    "weigh": _weigh,
    "stop": _stop,
    "drain": _drain,
    "evaluate": _evaluate,
}
"""Every command by its name; its function checks the arguments and records it."""
