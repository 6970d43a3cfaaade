"""Signatures after records: only the holder of a key is obeyed, whatever else is tried."""

import stat
import subprocess
from pathlib import Path

import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import ConfigurationError, RecordError, StateRefused
from rollstream.topics.records import Mark
from rollstream.topics.records import same as same_record
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import decode, encode, frame_of, framed_for_registry
from rollstream.topics.wire.signatures import (
    ROLLOUT,
    MarkSigner,
    Signer,
    check_public_key,
    is_signed_by,
    mark_context,
    parse_environment_keys,
    write_key,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Signer]:
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        write_key(folder / name)
    return [Signer(f"file:{folder / name}", "signing_key") for name in "ab"]


def test_a_signed_record_reads_as_the_plain_one(keys: list[Signer]) -> None:
    rollout = example_rollout("a")
    signed = keys[0].signed(rollout, ROLLOUT)
    assert same_record(decode(signed), rollout)
    assert codec.kind_of(signed) == "Rollout"
    assert is_signed_by(signed, ROLLOUT, [keys[1].public, keys[0].public])
    in_registry = framed_for_registry(signed, 7)
    assert is_signed_by(in_registry, ROLLOUT, [keys[0].public])
    assert same_record(decode(in_registry), rollout)
    assert frame_of(in_registry) == signed


def test_no_bit_of_a_signed_record_can_be_changed(keys: list[Signer]) -> None:
    signed = keys[0].signed(Mark(kind="drain", wall_time=1.0, author="a"), mark_context(3))
    for bit in range(8 * len(signed)):
        forged = bytearray(signed)
        forged[bit // 8] ^= 1 << bit % 8
        assert not is_signed_by(bytes(forged), mark_context(3), [keys[0].public]), f"bit {bit}"


def test_a_signature_is_of_one_key_for_one_use(keys: list[Signer]) -> None:
    mark = Mark(kind="drain")
    signed = keys[0].signed(mark, mark_context(3))
    assert not is_signed_by(signed, mark_context(3), [keys[1].public])
    assert not is_signed_by(signed, mark_context(3), [])
    assert not is_signed_by(signed, mark_context(4), [keys[0].public])
    assert not is_signed_by(signed, ROLLOUT, [keys[0].public])
    assert not is_signed_by(encode(mark), mark_context(3), [keys[0].public])
    # A signature behind another one covers the first.
    twice = codec.signed_frame(signed, signed[-64:])
    assert not is_signed_by(twice, mark_context(3), [keys[0].public])


@pytest.mark.parametrize("rest", [b"x", codec.SIGNATURE_MAGIC, b"\x00" * codec.SIGNATURE_SIZE, b"\xc3\x53" * 40])
def test_other_bytes_behind_a_record_are_an_error(rest: bytes) -> None:
    with pytest.raises(RecordError, match="bytes follow the Mark"):
        decode(encode(Mark(kind="drain")) + rest)


def test_a_key_is_written_once_for_its_owner_and_openssl_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    public = write_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigurationError, match="no key was written"):
        write_key(path)
    assert Signer(f"file:{path}", "signing_key").public == public
    shown = subprocess.run(["openssl", "pkey", "-in", path, "-text_pub", "-noout"], capture_output=True, check=True)
    assert "".join(shown.stdout.decode().split("pub:")[1].split()).replace(":", "") == public


def test_bad_keys_are_named_without_being_shown(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigurationError, match=r"kafka\.signing_key must name a private key") as caught:
        Signer(f"file:{tmp_path / 'other'}", "kafka.signing_key")
    assert "secret" not in str(caught.value)
    subprocess.run(["openssl", "genrsa", "-out", tmp_path / "rsa", "2048"], capture_output=True, check=True)
    with pytest.raises(ConfigurationError, match="not of the kind Ed25519"):
        Signer(f"file:{tmp_path / 'rsa'}", "kafka.signing_key")
    for wrong in ("", "ab", "A" * 64, "g" * 64, "0" * 63):
        with pytest.raises(ConfigurationError, match="is not a public key"):
            check_public_key(wrong, "grouping.mark_keys")
    for text in ("ab", ":" + "0" * 64, "env:" + "0" * 63):
        with pytest.raises(ConfigurationError, match=r"grouping\.environment_keys"):
            parse_environment_keys([text])
    assert parse_environment_keys([f"a:b:{'0' * 64}", f"a:b:{'1' * 64}"]) == {"a:b": ("0" * 64, "1" * 64)}


def test_a_process_whose_marks_would_not_be_obeyed_says_so(keys: list[Signer], tmp_path: Path) -> None:
    MarkSigner().check(())
    with pytest.raises(StateRefused, match=r"name the private key of one of them in grouper\.signing_key"):
        MarkSigner().check((keys[0].public,))
    path = tmp_path / "key.pem"
    public = write_key(path)
    own = MarkSigner(f"file:{path}")
    own.check((keys[0].public, public))
    with pytest.raises(StateRefused, match=f"its public key is {public}"):
        own.check((keys[0].public,))
