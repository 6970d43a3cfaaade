"""Adapters in a vLLM: which files a request reads, before, during and after an update, and what is removed."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineFailed, EngineHttp, VllmLoraEngine
from tests.support.producing import serving_http

FILE = "adapter_model.safetensors"


class VllmStandIn:
    """Adapters as vLLM 0.32 keeps them. A request has the number and the path of its adapter. vLLM reads the path if it
    does not hold the number, or at each step if the adapter was loaded with `load_inplace`."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[int, str, bool]] = {}
        self.held: dict[int, str] = {}
        self.label = ""
        self._count = 0

    def read(self, path: str) -> str:
        if not (text := (Path(path) / FILE).read_text()):
            raise web.HTTPInternalServerError(text="the file is empty")
        return text

    def request(self) -> Callable[[], str]:
        """A request for the policy; each of its steps returns the adapter that the step is computed with."""
        number, path, in_place = self.names["policy"]

        def step() -> str:
            if number not in self.held or in_place:
                self.held[number] = self.read(path)
            return self.held[number]

        return step

    async def handle(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        match request.path:
            case "/v1/load_lora_adapter":
                name, in_place = body["lora_name"], body.get("load_inplace", False)
                if name in self.names and not in_place:
                    raise web.HTTPBadRequest(text="has already been loaded")
                if name not in self.names:
                    self._count += 1
                number = self.names[name][0] if name in self.names else self._count
                self.held[number] = self.read(body["lora_path"])
                self.names[name] = number, body["lora_path"], in_place
                return web.Response(body=b"Success: LoRA adapter added successfully.")
            case "/v1/unload_lora_adapter":
                del self.names[body["lora_name"]]
                return web.Response(body=b"Success: LoRA adapter removed successfully.")
            case "/v1/models":
                return web.json_response({"data": [{"id": n, "root": path} for n, (_, path, _) in self.names.items()]})
            case "/collective_rpc" if body["method"] == "list_loras":
                return web.json_response({"results": [str(set(self.held))]})
            case "/collective_rpc":
                [number] = body["args"]
                return web.json_response({"results": [str(self.held.pop(number, None) is not None)]})
            case "/update_weight_version":
                self.label = body["new_version"]
                return web.json_response({})
        raise AssertionError(request.path)


def version(root: Path, number: int) -> Path:
    directory = root / f"version-{number}"
    directory.mkdir(parents=True)
    (directory / FILE).write_text(f"adapter {number}")
    return directory


@contextmanager
def loading(stand_in: VllmStandIn) -> Iterator[Callable[[Path, str], None]]:
    with serving_http(stand_in.handle) as url:

        def load(directory: Path, label: str) -> None:
            async def main() -> None:
                async with EngineHttp(url, ServingConfig()) as http:
                    await VllmLoraEngine(http).load(directory, label)

            asyncio.run(main())

        yield load


def test_requests_in_flight_and_new_ones_are_computed_with_the_version_of_the_label_also_once_its_files_are_removed(
    tmp_path: Path,
) -> None:
    vllm, steps = VllmStandIn(), []
    with loading(vllm) as load:
        for number in range(3):
            directory = version(tmp_path, number)
            load(directory, str(number))
            shutil.rmtree(directory)
            steps.append(vllm.request())
            assert [step() for step in (*steps, *reversed(steps))] == [f"adapter {vllm.label}"] * 2 * len(steps)
    assert set(vllm.names) == {"policy"}
    link, files = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert link.resolve() == files


def test_a_step_reads_no_file_if_no_version_came(tmp_path: Path) -> None:
    vllm = VllmStandIn()
    with loading(vllm) as load:
        load(version(tmp_path, 0), "0")
        step = vllm.request()
        step()
        shutil.rmtree(tmp_path)
        assert step() == "adapter 0"


def test_a_damaged_adapter_is_refused_and_the_version_before_stays(tmp_path: Path) -> None:
    vllm = VllmStandIn()
    with loading(vllm) as load:
        load(version(tmp_path, 0), "0")
        step = vllm.request()
        damaged = version(tmp_path, 1)
        (damaged / FILE).write_text("")
        with pytest.raises(EngineFailed, match="the file is empty"):
            load(damaged, "1")
        assert (step(), vllm.request()(), vllm.label) == ("adapter 0", "adapter 0", "0")
        load(version(tmp_path, 2), "2")
        assert (step(), vllm.label) == ("adapter 2", "2")


def test_two_engines_that_have_different_versions_read_different_files(tmp_path: Path) -> None:
    late, early = VllmStandIn(), VllmStandIn()
    with loading(late) as load_late, loading(early) as load_early:
        load_late(version(tmp_path, 0), "0")
        load_early(version(tmp_path, 1), "1")
    late.held.clear()
    assert (late.request()(), early.request()()) == ("adapter 0", "adapter 1")


def test_an_engine_that_another_run_gave_an_adapter_reads_the_files_of_this_one(tmp_path: Path) -> None:
    vllm = VllmStandIn()
    with loading(vllm) as load:
        load(version(tmp_path / "other", 0), "0")
        load(version(tmp_path / "this", 5), "5")
    assert vllm.request()() == "adapter 5"
