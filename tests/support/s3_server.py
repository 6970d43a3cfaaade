"""An S3 server for tests: moto's, which answers on a port as AWS does and keeps objects in memory."""

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "weights"


@contextmanager
def s3_server(secret: str = "nothing") -> Iterator[str]:
    """Serve a bucket; this process and those it starts find server and credentials in the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    # Cached clients have the address of an earlier server.
    S3FileSystem.clear_instance_cache()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        settings = {"ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": secret, "DEFAULT_REGION": "us-east-1"}
        for name, value in {**settings, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(f"AWS_{name}", value)
        patch.delenv("AWS_PROFILE", raising=False)
        # Objects of an earlier server of this process are kept otherwise.
        urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset", b"", timeout=60).close()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        try:
            yield f"s3://{BUCKET}"
        finally:
            server.stop()


@contextmanager
def wrong_keys() -> Iterator[None]:
    """Have the server check the keys of each request; it does not know those of this process."""

    def check_after(requests: str) -> None:
        url, form = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, requests.encode(), form), timeout=60).close()

    check_after("0")
    try:
        yield
    finally:
        check_after("inf")


def objects() -> dict[str, int]:
    """Sizes of the bucket's objects by key, as the server says."""
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}


def content_of(key: str) -> bytes:
    """The bytes of an object."""
    content: bytes = boto3.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return content
