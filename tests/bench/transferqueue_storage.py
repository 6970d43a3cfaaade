"""TransferQueue with its default storage, or on the log of a run, in a Python that has it, for rows of streams.

Controller and storage are actors of Ray in processes of their own; by default, data stays in their memory. A group of
rollouts is put at once, and later got by its keys.
"""

import json
import sys
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.bench.measure import Stopwatch, Timing

_PARTITION = "rollouts"


def measure(rollouts: int, length: int, size: int) -> Timing:
    """Put rollouts of `length` tokens in groups of `size`, then get them.

    One more group goes first and is not counted: it connects the client.
    """
    groups, kinds = max(1, rollouts // size), [_group(seed, length, size) for seed in range(8)]

    def put_and_get(numbers: range) -> int:
        for number in numbers:
            transfer_queue.kv_batch_put(_keys(number, size), _PARTITION, kinds[number % len(kinds)])
        return sum(len(transfer_queue.kv_batch_get(_keys(number, size), _PARTITION)) for number in numbers)

    put_and_get(range(1))
    watch = Stopwatch()
    got = put_and_get(range(1, groups + 1))
    if got != groups * size:
        raise RuntimeError(f"{got} rollouts came back instead of {groups * size}")
    return watch.timing(got)


def _keys(group: int, size: int) -> list[str]:
    return [f"{group}.{member}" for member in range(size)]


def _group(seed: int, length: int, size: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "tokens": torch.randint(0, 32_000, (size, length), dtype=torch.int32, generator=generator),
        "logprobs": -torch.empty(size, length).exponential_(generator=generator),
        "loss_mask": (torch.arange(length) >= length // 8).expand(size, length).contiguous(),
        "reward": (torch.arange(size) % 2).to(torch.float64).unsqueeze(1),
    }
    return TensorDict(fields, batch_size=size)


def main(arguments: dict[str, Any]) -> None:
    """Print the timing, as `in_child` expects it."""
    print("ready", flush=True)
    # Ray starts no more actors than there are processors; the queue has a controller and two storages.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    if arguments["run"]:
        import rollstream.consumers.trainers.transfer_queue  # noqa: F401 -- makes the backend known

        ours = {"run": arguments["run"], "kafka": {"bootstrap_servers": arguments["bootstrap_servers"]}}
        transfer_queue.init(OmegaConf.create({"backend": {"storage_backend": "Rollstream", "Rollstream": ours}}))
    else:
        transfer_queue.init()
    try:
        print(json.dumps(measure(*(arguments[name] for name in ("rollouts", "tokens", "group_size")))._asdict()))
    finally:
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
