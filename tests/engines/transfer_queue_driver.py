"""A driver of TransferQueue, in a Python that has it: puts groups, kills a process, or says what the next driver gets.

`python transfer_queue_driver.py JSON` prints a JSON object a line. Groups are made from a seed, so a driver that reads
them knows what was put.
"""

import asyncio
import json
import os
import signal
import sys
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


def contract(task: dict[str, Any]) -> None:
    """Make the calls of NeMo-RL's adapter and of verl's trainers with each backend, and print what each answers."""
    for name in ("memory", "log"):
        queue(task, name, polling=True)
        print(json.dumps({"backend": name, "nemo_rl": as_nemo_rl(), "verl": as_verl()}), flush=True)
        transfer_queue.close()


def as_nemo_rl() -> dict[str, Any]:
    """The calls of its TQDataPlaneClient: a partition's fields are registered by a row that is cleared at once, later
    stages add fields to samples, tasks claim what is ready, and everything is read and cleared by keys."""
    client, partition, names = transfer_queue.get_client(), "step_0", ["a", "b", "c"]
    columns = ("input_ids", "input_lengths", "reward", "text", "advantages")
    placeholder = client.put(
        data=TensorDict({column: torch.zeros(1) for column in columns}, batch_size=[1]), partition_id=partition
    )
    client.clear_samples(metadata=placeholder)
    ragged = [torch.arange(length, dtype=torch.int64) for length in (2, 4, 3)]
    rollouts = {
        "input_ids": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "input_lengths": torch.tensor([2, 4, 3]),
        "reward": torch.tensor([0.5, 1.0, 0.0], dtype=torch.bfloat16),
        "text": NonTensorStack("x", "y", "z"),
    }
    tags = [{"input_lengths": len(row), "group_id": "g"} for row in ragged]
    transfer_queue.kv_batch_put(
        keys=names, partition_id=partition, fields=TensorDict(rollouts, batch_size=3).detach(), tags=tags
    )
    claims = [claim(partition, "train", ["input_ids", "advantages"], 3)]
    for keys, value in (([names[0], names[2]], 1.0), ([names[1]], 2.0)):
        stage = TensorDict({"advantages": torch.full((len(keys), 4), value)}, batch_size=len(keys))
        transfer_queue.kv_batch_put(keys=keys, partition_id=partition, fields=stage, tags=[{} for _ in keys])
        claims.append(claim(partition, "train", ["input_ids", "advantages"], 3))
    claims.append(claim(partition, "log_probs", ["input_ids"], 2))
    consumed = [
        client.check_consumption_status(task_name=task, partition_id=partition) for task in ("train", "log_probs")
    ]
    read = transfer_queue.kv_batch_get(keys=names[::-1], partition_id=partition, select_fields=list(columns))
    listed = transfer_queue.kv_list(partition_id=partition)[partition]
    transfer_queue.kv_clear(keys=list(listed), partition_id=partition)
    left = (transfer_queue.kv_list(partition_id=partition) or {}).get(partition, {})
    return {"claims": claims, "consumed": consumed, "read": plain(read), "listed": listed, "left": left}


def claim(partition: str, task: str, columns: list[str], size: int) -> dict[str, Any]:
    """Claim what is ready for a task."""
    client = transfer_queue.get_client()
    meta = client.get_meta(
        data_fields=columns, batch_size=size, partition_id=partition, task_name=task, mode="fetch", sampling_config={}
    )
    if not meta.size:
        return {"keys": [], "tags": []}
    keys = client.kv_retrieve_keys(global_indexes=list(meta.global_indexes), partition_id=partition)
    return {"keys": keys, "tags": list(meta.custom_meta or [])}


def as_verl() -> dict[str, Any]:
    """The calls of its agent loop and trainer: a prompt's state lies in tags, its sessions are put as they end, and the
    trainer reads and extends what a put's metadata names."""
    partition = "train"
    transfer_queue.kv_batch_put(keys=["p"], partition_id=partition, tags=[{"is_prompt": True, "status": "pending"}])

    async def sessions() -> Any:
        await transfer_queue.async_kv_put(key="p", partition_id=partition, tag={"status": "running"})
        ended = [{"responses": torch.arange(n, dtype=torch.int64), "rm": torch.tensor([float(n)])} for n in (2, 3)]
        columns = {
            "responses": torch.nested.as_nested_tensor([row["responses"] for row in ended], layout=torch.jagged),
            "rm_scores": torch.stack([row["rm"] for row in ended]),
        }
        meta = await transfer_queue.async_kv_batch_put(
            keys=["p_0_0", "p_1_0"],
            partition_id=partition,
            fields=TensorDict(columns, batch_size=2),
            tags=[{"is_prompt": False, "seq_len": 2}, {"is_prompt": False, "seq_len": 3}],
        )
        await transfer_queue.async_kv_put(key="p", partition_id=partition, tag={"status": "finished"})
        return meta

    meta = asyncio.run(sessions())
    read = transfer_queue.kv_batch_get_by_meta(meta, select_fields=["responses", "rm_scores"])
    values = TensorDict({"values": torch.tensor([[1.0], [2.0]])}, batch_size=2)
    transfer_queue.kv_batch_put(keys=list(meta.keys), partition_id=partition, fields=values, tags=[{}, {}])
    again = transfer_queue.kv_batch_get(keys=list(meta.keys), partition_id=partition)
    listed = transfer_queue.kv_list(partition_id=partition)[partition]
    transfer_queue.kv_clear(keys=list(listed), partition_id=partition)
    left = (transfer_queue.kv_list(partition_id=partition) or {}).get(partition, {})
    return {"read": plain(read), "again": plain(again), "listed": listed, "left": left}


def plain(data: TensorDict) -> dict[str, list[Any]]:
    """The rows of each field: dtype, shape and values of tensors, and other values as they are."""
    rows: dict[str, list[Any]] = {}
    for name in sorted(data.keys()):
        rows[name] = [
            [str(row.dtype), list(row.shape), row.tolist()]
            if isinstance(row, torch.Tensor)
            else getattr(row, "data", row)
            for row in data[name]
        ]
    return rows


def main(task: dict[str, Any]) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    if task["do"] == "contract":
        contract(task)
    else:
        queue(task, task["backend"], polling=True)
        {"put": put, "get": get}[task["do"]](task)
    # Ray's own end takes many seconds, and what it waits for is of no use here.
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
