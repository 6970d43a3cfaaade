"""A driver of TransferQueue, in a Python that has it: puts groups, kills a process, or says what the next driver gets.

`python transfer_queue_driver.py JSON` prints a JSON object a line. Groups are made from a seed, so a driver that reads
them knows what was put.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from rollstream.consumers.trainers import transfer_queue as backend

SIZE, PARTITION = 4, "train_0"
STORAGES = {"memory": "ray::SimpleStorageUnit", "checkpoint": "ray::SimpleStorageUnit", "log": "ray::SampleWriter"}
CONTROLLER = "ray::TransferQueueController"


def keys(group: int) -> list[str]:
    return [f"{group}.{member}" for member in range(SIZE)]


def fields(seed: int, group: int) -> TensorDict:
    """Fields of a group: texts, numbers, tensors of one length and of several, and a dtype that numpy lacks."""
    generator = torch.Generator().manual_seed(seed * 1_000 + group)
    lengths = torch.randint(3, 9, (SIZE,), generator=generator).tolist()
    tokens = [torch.randint(0, 32_000, (length,), dtype=torch.int32, generator=generator) for length in lengths]
    columns = {
        "responses": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "rollout_log_probs": -torch.rand(SIZE, 8, generator=generator).to(torch.bfloat16),
        "rm_scores": torch.rand(SIZE, 1, generator=generator),
        "uid": NonTensorStack(*[f"prompt-{group}"] * SIZE),
        "extra": NonTensorStack(*[{"group": group, "member": member} for member in range(SIZE)]),
    }
    return TensorDict(columns, batch_size=SIZE)


def queue(task: dict[str, Any], name: str, polling: bool = False) -> None:
    """Make the queue. Ours takes these lines of configuration."""
    ours = {"run": task["run"], "kafka": {"bootstrap_servers": task["servers"]}, "writers": task.get("writers", 1)}
    storage = {"storage_backend": "Rollstream", "Rollstream": ours} if name == "log" else {}
    transfer_queue.init(OmegaConf.create({"backend": storage, "controller": {"polling_mode": polling}}))


def put(task: dict[str, Any]) -> None:
    """Put groups until one process is killed; print each group that was acknowledged."""
    checkpoint = Path(task["directory"]) / "checkpoint"
    for group in range(task["groups"]):
        transfer_queue.kv_batch_put(keys(group), PARTITION, fields(task["seed"], group), tags=[{"group": group}] * SIZE)
        print(json.dumps({"acknowledged": group}), flush=True)
        if group == task["consume_at"]:
            transfer_queue.kv_clear(keys(0), PARTITION)
            transfer_queue.get_client().get_meta(["responses"], SIZE, PARTITION, task_name="train")
            if task["backend"] != "memory":
                transfer_queue.save_checkpoint(checkpoint)
            print(json.dumps({"cleared": 0, "consumed": 1}), flush=True)
    kill(task["kill"], task["backend"])
    group = task["groups"]
    signal.alarm(20)  # A put that waits for a dead process would wait for minutes.
    transfer_queue.kv_batch_put(keys(group), PARTITION, fields(task["seed"], group), tags=[{"group": group}] * SIZE)
    print(json.dumps({"acknowledged": group, "goes_on": True}), flush=True)


def kill(what: str, name: str) -> None:
    """Kill -9 the controller, a process of the storage, or this driver."""
    if what == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    title = {"controller": CONTROLLER, "storage": STORAGES[name]}[what]
    processes = [p for p in psutil.Process().children(recursive=True) if p.name() == title or title in p.cmdline()[:1]]
    processes[0].kill()


def get(task: dict[str, Any]) -> None:
    """Restore as the backend can; print which groups are there bit for bit, and how many samples are not consumed."""
    checkpoint = Path(task["directory"]) / "checkpoint"
    if task["backend"] == "checkpoint" and checkpoint.exists():
        transfer_queue.load_checkpoint(checkpoint)
    if task["backend"] == "log":
        restored = backend.restore(checkpoint if task.get("from_checkpoint") else None)
        print(json.dumps(vars(restored)), flush=True)
    there = (transfer_queue.kv_list(PARTITION) or {}).get(PARTITION, {})
    whole, torn = [], []
    for group in range(task["groups"] + 1):
        if set(keys(group)) <= set(there):
            got = transfer_queue.kv_batch_get(keys(group), PARTITION)
            (whole if same(got, fields(task["seed"], group)) else torn).append(group)
    ready = 0
    while transfer_queue.get_client().get_meta(["responses"], 1, PARTITION, task_name="train").size:
        ready += 1
    tags = all(there[key] == {"group": group} for group in whole for key in keys(group))
    print(json.dumps({"whole": whole, "torn": torn, "samples": len(there), "ready": ready, "tags": tags}), flush=True)


def same(got: TensorDict, put: TensorDict) -> bool:
    """Whether two groups are equal bit for bit."""
    if set(got.keys()) != set(put.keys()):
        return False
    for name in put.keys():  # noqa: SIM118 -- a TensorDict iterates over its rows
        for one, other in zip(got[name], put[name], strict=True):
            if isinstance(other, torch.Tensor) and (one.dtype != other.dtype or not torch.equal(one, other)):
                return False
            if not isinstance(other, torch.Tensor) and getattr(one, "data", one) != getattr(other, "data", other):
                return False
    return True


def rates(task: dict[str, Any]) -> None:
    """Measure bytes put and got in a second with each backend, in turns, and print the best of each."""
    rows = {"tokens": torch.int32, "logprobs": torch.float32}
    data = TensorDict({n: torch.zeros(task["size"], task["length"], dtype=t) for n, t in rows.items()}, [task["size"]])
    names = [str(number) for number in range(task["size"])]
    size_bytes = sum(data[name].nbytes for name in rows)
    best = {name: {"put": 0.0, "get": 0.0} for name in ("memory", "log")}
    for turn in range(task["turns"]):
        for name, rate in best.items():
            queue(task, name)
            transfer_queue.kv_batch_put(names, "warm", data)
            for repeat in range(task["repeats"]):
                begin = time.perf_counter()
                transfer_queue.kv_batch_put(names, f"turn-{turn}-{repeat}", data)
                middle = time.perf_counter()
                got = transfer_queue.kv_batch_get(names, f"turn-{turn}-{repeat}")
                end = time.perf_counter()
                assert len(got) == task["size"]
                rate["put"] = max(rate["put"], size_bytes / (middle - begin))
                rate["get"] = max(rate["get"], size_bytes / (end - middle))
            transfer_queue.close()
    print(json.dumps({"size_bytes": size_bytes, **best}), flush=True)


def main(task: dict[str, Any]) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    if task["do"] == "rates":
        rates(task)
    else:
        queue(task, task["backend"], polling=True)
        {"put": put, "get": get}[task["do"]](task)
    # Ray's own end takes many seconds, and what it waits for is of no use here.
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
