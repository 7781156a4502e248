"""What a user reads when a filesystem refuses: the URL, the cause, and no secret."""

import errno
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from s3_proxy import Refuse, Reply, S3Proxy

from ludic.errors import ConfigError, StoreError
from ludic.root.root import SCHEMES, Root, check_scheme
from ludic.root.rows.writer import RolloutWriter
from ludic.root.storage import failures
from ludic.root.storage.filesystem import Storage
from ludic.run.run_json import put_run, run_of

SECRET = "sesame-open-up"


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A disk of 1 MB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True).returncode:
        pytest.skip("mounting is for root, and not in every container")


def test_a_path_below_a_file_is_refused(tmp_path, run_config):
    (tmp_path / "file").write_text("I am no folder")
    url = str(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match=rf"^{url}/run\.json: NotADirectoryError: "):
        put_run(url, run_config)


def test_a_file_that_is_not_there_yet_is_not_looked_through_for_secrets(tmp_path, run_config, monkeypatch):
    root, searched = put_run(str(tmp_path / "run"), run_config), []
    monkeypatch.setattr(failures, "mask", searched.append)
    with pytest.raises(FileNotFoundError):
        root.read("policies/LATEST")
    assert searched == []


def test_a_failure_that_is_shown_whole_has_no_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    failure = failures.diagnose(OSError(f"refused {SECRET}"))
    assert SECRET not in repr(failure)
    assert failure.cause == "OSError: refused ***"


def test_a_folder_that_became_a_file_stops_no_worker_silently(tmp_path, run_config, next_batch):
    root = put_run(str(tmp_path / "run"), run_config)
    (tmp_path / "run" / "rollouts").write_text("I am no folder")
    writer = RolloutWriter(root, "w0")
    writer.append(next_batch())
    with pytest.raises(StoreError, match=r"run/rollouts/version=0/env=moar_cats/w0-0\.parquet: NotADirectoryError"):
        writer.flush()
    (tmp_path / "run" / "rollouts").unlink()
    writer.close()
    assert root.list("rollouts") == ["rollouts/version=0/env=moar_cats/w0-0.parquet"]


@pytest.mark.parametrize("scheme", sorted({*known_implementations, "nosuch", "abfss"}))
def test_a_run_is_at_the_schemes_of_the_documentation_and_all_others_are_refused_by_name(run_config, scheme):
    table = Path(__file__, "../../../docs/storage.md").resolve().read_text()
    url = f"{scheme}://bucket/run"
    if scheme in SCHEMES:
        check_scheme(url)
        assert f"`{scheme}://" in table or scheme in ("local", "s3a", "gcs", "abfss")  # other names of the same
        return
    for call in (lambda: put_run(url, run_config), lambda: Root.open(url, writable=True)):
        with pytest.raises(
            ConfigError, match=rf"^{url}: a run can't be stored at {scheme}://, .*; wanted a folder, s3://, gs"
        ):
            call()


def test_a_filesystem_that_the_program_has_registered_is_tried(run_config):
    fsspec.register_implementation("mine", MemoryFileSystem, clobber=True)
    assert put_run("mine://registered/run", run_config).url == "mine://registered/run"


def test_a_filesystem_that_is_registered_by_the_name_of_its_class_is_tried(run_config, monkeypatch):
    monkeypatch.setitem(known_implementations, "named", {"class": "fsspec.implementations.memory.MemoryFileSystem"})
    assert put_run("named://registered/run", run_config).url == "named://registered/run"


def test_a_filesystem_that_cannot_be_reached_is_named():
    with pytest.raises(StoreError, match=r"ftp://127\.0\.0\.1:1/run: .*refused"):
        Storage.connect("ftp://127.0.0.1:1/run")


def test_a_password_in_the_url_is_refused_and_not_shown(run_config):
    with pytest.raises(ConfigError, match=r"gs://host/run contains a user, a password or a key") as caught:
        put_run(f"gs://me:{SECRET}@host/run", run_config)
    assert SECRET not in str(caught.value)


def test_a_secret_in_the_query_is_refused_and_not_shown(run_config):
    with pytest.raises(ConfigError, match=r"^az://container/run contains") as caught:
        put_run(f"az://container/run?sv=2024&sig={SECRET}", run_config)
    assert SECRET not in str(caught.value)


def test_a_full_disk_is_named_and_holds_nothing_half_written(tiny_disk, run_config):
    root = put_run(str(tiny_disk / "run"), run_config)
    with pytest.raises(StoreError, match=r"run/a\.bin: .*No space left.*; the disk or the quota is full: free some"):
        root.put_if_absent("a.bin", bytes(2 << 20))
    with pytest.raises(StoreError, match="the disk or the quota is full"):
        root.put("policies/LATEST", bytes(2 << 20))
    assert root.list("") == ["run.json"]
    assert root.put_if_absent("a.bin", bytes(1 << 10))


def test_a_disk_that_is_mounted_read_only_is_named_and_can_be_read(tiny_disk, run_config):
    root = put_run(str(tiny_disk / "run"), run_config)
    _mount("-o", "remount,ro", str(tiny_disk))
    with pytest.raises(StoreError, match=r"run/a\.bin: .*the disk is mounted read-only: mount it for writing"):
        root.put_if_absent("a.bin", b"1")
    with pytest.raises(StoreError, match="mounted read-only"):
        Root.open(str(tiny_disk / "run"), writable=True)
    with pytest.raises(StoreError, match="mounted read-only"):
        put_run(str(tiny_disk / "other"), run_config)
    assert run_of(Root.open(str(tiny_disk / "run"))) == run_config


def test_a_folder_of_somebody_else_is_named(tmp_path, run_config, monkeypatch):
    """Root may write anywhere, so the operating system's answer is given in its place."""

    def refuse(source, target, **folders):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"run\.json: PermissionError: .*this user may not write to the folder: check"):
        put_run(str(tmp_path), run_config)


def test_a_file_where_a_folder_is_listed_is_named(tmp_path, run_config, caplog):
    root = put_run(str(tmp_path), run_config)
    (tmp_path / "rollouts").write_text("I am no folder")
    assert root.list("rollouts") == []
    assert f"skipped: {root.path}/rollouts is not a folder, wanted one: delete it, or move it" in caplog.text


@pytest.fixture
def refusing(s3_proxy, s3_bucket, run_config, tmp_path):
    """refusing(reaction): each thing one can do to a root, once its server reacts like this."""
    root = put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    (tmp_path / "file").write_bytes(b"1")

    def acts(reaction):
        s3_proxy.react = lambda method, path: reaction
        return {
            "run.json": [
                lambda: Root.open(root.url),
                lambda: root.read("run.json"),
                lambda: root.open_file("run.json"),
            ],
            "a.bin": [
                lambda: root.put_if_absent("a.bin", b"1"),
                lambda: root.put_file_if_absent(tmp_path / "file", "a.bin"),
                lambda: root.put("a.bin", b"1"),
                lambda: root.exists("a.bin"),
                lambda: root.delete("a.bin"),
            ],
            "rollouts": [
                lambda: root.list("rollouts"),
                lambda: root.sizes("rollouts"),
                lambda: root.folders("rollouts"),
            ],
        }

    yield root, acts
    s3_proxy.react = lambda method, path: None


REFUSALS = [
    (
        Refuse(403, "AccessDenied", "Access Denied"),
        "these credentials may not (read|write to) bucket ludic-tests: get",
    ),
    (Refuse(403, "InvalidAccessKeyId", "No such key."), "the credentials are wrong: check AWS_ACCESS_KEY_ID and"),
    (Refuse(403, "SignatureDoesNotMatch", "No."), "the credentials are wrong: check AWS_ACCESS_KEY_ID and"),
    (Refuse(400, "ExpiredToken", "Too old."), "the credentials have expired: log in again"),
    (Refuse(404, "NoSuchBucket", "No such bucket."), "create bucket ludic-tests, or correct the URL"),
    (
        Refuse(400, "AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong; expecting 'eu-west-1'"),
        "expecting 'eu-west-1'; bucket ludic-tests is in another region: set AWS_DEFAULT_REGION",
    ),
    (
        Refuse(301, "PermanentRedirect", "Elsewhere."),
        "bucket ludic-tests is in another region: set AWS_DEFAULT_REGION",
    ),
]
"""What a server answers, and what a user is told of it."""


@pytest.mark.slow
def test_whatever_one_does_a_refusal_is_one_line_with_url_cause_and_advice(refusing):
    root, acts = refusing
    for reaction, said in REFUSALS:
        told = rf".*({reaction.code}|HTTP {reaction.status}).*"
        for name, act in [(name, act) for name, doings in acts(reaction).items() for act in doings]:
            with pytest.raises(StoreError, match=rf"^{root.url}/{name}: {told}") as caught:
                act()
            answered_a_head = reaction.code not in str(caught.value)  # without a body, so only the status is known
            assert re.search(said, str(caught.value)) or answered_a_head, str(caught.value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 500


def test_a_deletion_in_bulk_that_is_refused_for_one_file_is_an_error(s3_proxy, s3_bucket, run_config):
    """S3 answers such a request with 200, and lists the refusals."""
    root = put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    root.put("a/b.bin", b"")
    key = f"{root.path.partition('/')[2]}/a/b.bin"
    error = f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    s3_proxy.react = lambda method, path: (
        Reply(200, f"<DeleteResult>{error}</DeleteResult>") if method == "POST" else None
    )
    with pytest.raises(StoreError, match=r"/a: .*AccessDenied"):
        root.delete("a")
    s3_proxy.react = lambda method, path: None
    root.delete("a")
    assert root.list("a") == []


def test_a_missing_bucket_is_named(s3_proxy, run_config):
    for act in (
        lambda: put_run("s3://no-such-bucket/run", run_config),
        lambda: Root.open("s3://no-such-bucket/run"),
    ):
        with pytest.raises(StoreError, match=r"^s3://no-such-bucket/run/run\.json: .*create bucket no-such-bucket, or"):
            act()


def test_a_bucket_deleted_under_a_worker_is_named(s3_server, run_config, next_batch):
    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket="short-lived")
    root = put_run("s3://short-lived/run", run_config)
    client.delete_object(Bucket="short-lived", Key="run/run.json")
    client.delete_bucket(Bucket="short-lived")
    writer = RolloutWriter(root, "w0")
    writer.append(next_batch())
    with pytest.raises(StoreError, match=r"run\.json: .*create bucket short-lived"):
        writer.flush()
    with pytest.raises(StoreError, match="create bucket short-lived"):
        writer.close()


def test_an_endpoint_that_is_down_is_named(s3_proxy, monkeypatch, run_config):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"^s3://bucket/run/run\.json: .*http://127\.0\.0\.1:1.*; check the network"):
        put_run("s3://bucket/run", run_config)


def test_missing_credentials_are_named(s3_proxy, monkeypatch, run_config, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match=r"run\.json: NoCredentialsError: .*; set AWS_PROFILE or AWS_ACCESS_KEY_ID"):
        put_run("s3://bucket/run", run_config)


def test_keys_come_from_the_profile_in_the_home_folder(s3_proxy, s3_bucket, monkeypatch, run_config, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    keys = f"aws_access_key_id = AKIDOFPROFILE\naws_secret_access_key = {SECRET}"
    (tmp_path / "credentials").write_text(f"[team]\n{keys}\n")
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    signed = {headers["authorization"].partition(", ")[0] for headers in s3_proxy.headers}
    assert len(signed) == 1
    assert re.search(r"AKIDOFPROFILE/\d{8}/eu-west-1/s3", signed.pop())


@pytest.mark.slow
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_a_region_that_nobody_names_is_that_of_the_bucket(s3_server, monkeypatch, run_config, region):
    client = boto3.client("s3", endpoint_url=s3_server, region_name=region)
    options = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    client.create_bucket(Bucket=f"ludic-in-{region}", **options)
    proxy = S3Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    root = put_run(f"s3://ludic-in-{region}/{uuid.uuid4()}", run_config)
    proxy.headers.clear()
    assert root.list("") == ["run.json"]
    assert f"/{region}/s3/" in proxy.headers[0]["authorization"]
    proxy.close()


def test_no_message_shows_a_key_a_signature_or_a_token(s3_proxy, s3_bucket, run_config):
    root = put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    message = (
        f"AKIAIOSFODNN7EXAMPLE may not; see https://host/x?X-Amz-Credential={SECRET}&amp;X-Amz-Signature={SECRET} "
        f"and https://me:{SECRET}@host/ with Authorization: Bearer {SECRET}"
    )
    s3_proxy.react = lambda method, path: Refuse(403, "AccessDenied", message)
    with pytest.raises(StoreError, match=r"AccessDenied .*may not; see https://host/x\?") as caught:
        root.read("a.bin")
    assert SECRET not in str(caught.value)
    assert "AKIAIOSFODNN7EXAMPLE" not in str(caught.value)


def test_a_server_that_refuses_without_naming_the_condition_keeps_its_promise(s3_proxy, s3_bucket, run_config):
    """S3 names If-None-Match in its 412; servers that only imitate it may not."""
    puts = []

    def refuse_the_second(method: str, path: str) -> Refuse | None:
        if method == "PUT":
            puts.append(path)
        return Refuse(412, "PreconditionFailed") if method == "PUT" and len(puts) == 2 else None

    s3_proxy.react = refuse_the_second
    put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    assert len(puts) == 2


def test_a_server_that_overwrites_is_refused(s3_proxy, s3_bucket, run_config):
    s3_proxy.react = lambda method, path: Reply(200)
    with pytest.raises(StoreError, match="S3 overwrites existing files even in create-only mode"):
        put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
