"""API keys: the file, the environment, hashes and limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bankfull.cli.app import run_command
from bankfull.errors import ConfigError
from bankfull.serve.guard.keys import Keyring, TokenBucket, keys_of_environment, new_key, parse_line, read_keys


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_found_by_its_secret_and_the_file_holds_only_its_hash(tmp_path: Path) -> None:
    secret, key = new_key("alice", requests=60, tokens=1000, admin=True)
    other, second = new_key("bob")
    file = tmp_path / "keys.txt"
    file.write_text(f"# who may ask\n{key.line}\n\n{second.line}  # a comment\n")
    assert secret not in file.read_text()
    keyring = Keyring(file=file)
    assert keyring.find(secret.encode()) == key
    assert keyring.find(other.encode()) == second
    assert keyring.find(secret.encode()[:-1]) is None
    assert keyring.find(key.digest.encode()) is None, "the hash is not a key"
    assert keyring.find(b"") is None


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice sha256:12",
        "alice md5:" + "0" * 64,
        "al/ice sha256:" + "0" * 64,
        "a" * 65 + " sha256:" + "0" * 64,
        "alice sha256:" + "0" * 64 + " requests=0",
        "alice sha256:" + "0" * 64 + " requests=-1",
        "alice sha256:" + "0" * 64 + " tokens=1e9",
        "alice sha256:" + "0" * 64 + " everything",
        "alice sha256:" + "0" * 64 + " tokens=1 tokens=2",
    ],
)
def test_an_invalid_line_is_refused_in_one_sentence(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_line(line, "keys.txt, line 3")
    assert str(refused.value).startswith("keys.txt, line 3: ") and "\n" not in str(refused.value)


def test_a_name_or_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    _, key = new_key("alice")
    file = tmp_path / "keys.txt"
    for second in (key.line, key.line.replace("alice", "bob"), new_key("alice")[1].line):
        file.write_text(f"{key.line}\n{second}\n")
        with pytest.raises(ConfigError, match="twice"):
            read_keys(file)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Keyring(file=tmp_path / "none.txt")
    (tmp_path / "keys.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring(file=tmp_path / "keys.txt")


def test_an_empty_key_file_refuses_everyone(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("")
    assert Keyring(file=tmp_path / "keys.txt").required
    assert not Keyring().required


def test_keys_of_the_environment_are_hashed_and_short_ones_refused() -> None:
    keys = keys_of_environment({"BANKFULL_API_KEY": "sixteen-letters-1, sixteen-letters-2"})
    assert [key.name for key in keys] == [f"environment-{key.digest[:16]}" for key in keys]
    assert Keyring(keys).find(b"sixteen-letters-2") == keys[1]
    assert "sixteen" not in repr(keys)
    assert keys_of_environment({}) == ()
    for bad in ("short", "sixteen-létters-1", "a" * 513):
        with pytest.raises(ConfigError) as refused:
            keys_of_environment({"BANKFULL_API_KEY": bad})
        assert bad not in str(refused.value), "an error must not print a key"


def test_a_changed_file_is_reloaded_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "keys.txt"
    secret, key = new_key("alice", requests=1)
    file.write_text(key.line)
    keyring = Keyring(file=file, clock=clock)
    spent = keyring.rate_limits(key)
    fresh, second = new_key("bob")
    file.write_text(f"{key.line}\n{second.line}\n")
    os.utime(file, ns=(1, 1))
    assert keyring.find(fresh.encode()) is None, "the file is not checked for every request"
    clock.now += 5
    assert keyring.find(fresh.encode()) == second
    assert keyring.rate_limits(key) is spent, "a change of another key does not refill the bucket"
    file.write_text("broken")
    os.utime(file, ns=(2, 2))
    clock.now += 5
    assert keyring.find(secret.encode()) == key
    file.write_text(second.line)
    os.utime(file, ns=(3, 3))
    clock.now += 5
    assert keyring.find(secret.encode()) is None, "a revoked key is refused"


def test_a_bucket_refills_and_may_be_overdrawn() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    for _ in range(60):
        assert bucket.wait() == 0
        bucket.take(1)
    assert bucket.wait() == pytest.approx(1.0)
    clock.now += 1
    assert bucket.wait() == 0
    bucket.take(31)
    assert bucket.wait() == pytest.approx(31.0)
    clock.now += 1000
    bucket.take(59)
    assert bucket.wait() == 0, "the bucket holds at most one minute's worth"
    bucket.take(1)
    assert bucket.wait() > 0


def test_half_of_the_tokens_of_a_key_are_kept_for_online_calls() -> None:
    clock = Clock()
    _, alice = new_key("alice", tokens=60)
    _, bob = new_key("bob", requests=1)
    keyring = Keyring((alice, bob), clock=clock)
    assert keyring.named("alice") == alice and keyring.named("nobody") is None
    tokens = keyring.rate_limits(alice).tokens
    assert tokens is not None
    tokens.take(30)
    assert keyring.batch_wait("alice") == 0
    tokens.take(10)
    assert keyring.batch_wait("alice") == pytest.approx(10.0) and tokens.wait() == 0, "online calls continue"
    clock.now += 11
    assert keyring.batch_wait("alice") == 0
    assert keyring.batch_wait("bob") == keyring.batch_wait("") == Keyring().batch_wait("nobody") == 0
    assert keyring.batch_wait("nobody") > 0, "its key was revoked, so no key can be charged"


def test_the_command_prints_the_line_and_shows_the_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["key", "alice", "--requests", "5"]) == 0
    printed = capsys.readouterr()
    key = parse_line(printed.out, "stdout")
    assert (key.name, key.requests, key.admin) == ("alice", 5, False)
    secret = printed.err.split()[-1]
    assert secret not in printed.out
    assert Keyring((key,)).find(secret.encode()) == key
    assert run_command(["key", "no/slash"]) == 2


def test_a_key_of_the_environment_is_named_by_its_hash_and_no_key_of_a_file_can_have_its_name() -> None:
    one, two = "sixteen-letters-1", "sixteen-letters-2"
    both = {key.digest: key.name for key in keys_of_environment({"BANKFULL_API_KEY": f"{one},{two}"})}
    for given in (f"{two},{one}", two, one):
        for key in keys_of_environment({"BANKFULL_API_KEY": given}):
            assert both[key.digest] == key.name
    assert len(set(both.values())) == 2
    for name in ("environment-1", *both.values()):
        with pytest.raises(ConfigError, match="choose another"):
            new_key(name)
