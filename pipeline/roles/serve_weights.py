"""The role `serve-weights`: keeps third-party engines, such as vLLM and SGLang, on the newest policy version."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from rollstream.consumers.serving.fleet import EngineFleet
from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, run_until_stopped
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.producers.metrics_publisher import MetricsPublisher


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role serve-weights`."""
    set_handler(
        parser,
        run,
        example="rollstream role serve-weights --run main --engine vllm --url http://127.0.0.1:8000",
        role=True,
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="an engine to update; may be repeated (serving.urls)"
    )
    parser.add_argument(
        "--engine",
        dest="serving.engine=",
        action=Setting,
        metavar="NAME",
        help="vllm, vllm-lora, sglang, vllm-plugin, or a class: package.module:Class",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Update the engines until stopped."""
    serving = replace(config.serving, urls=tuple(args.url)) if args.url else config.serving
    wait_for_broker(config)
    fleet = EngineFleet(
        config.kafka,
        config.run,
        serving,
        directory=Path(serving.directory or config.run_dir / "serving"),
        weights=config.learner.weights,
        tokenizer=config.learner.pretrained,
    )
    run_until_stopped(lambda stop: _serve(config, fleet, stop))
    return 0


async def _serve(config: RunConfig, fleet: EngineFleet, stop: asyncio.Event) -> None:
    publisher = MetricsPublisher(
        config.kafka,
        config.run,
        "serve-weights",
        "serve-weights",
        fleet.metrics,
        interval_s=config.serving.metrics_interval_s,
    )
    async with publisher:
        await fleet.serve_until(stop, on_ready=announce_ready, on_wait=announce_progress)
