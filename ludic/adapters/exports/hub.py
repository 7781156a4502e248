"""Push a run to the Hugging Face Hub: its weights as a model, its rollouts as a data set, each with a card.

The data set is a root of its own: run.json, the rollouts with their partitions, the ledger and what belongs to them
(`SHARED` of the catalogue). Weights, users' code, claims of processes and logs are left out. Folders of settings are
shortened to their last part, and secrets are masked; whatever else names hosts, users and folders is counted and shown.
Reads any root; writes a local folder, and sends it with the user's own login, which is never stored. Raises ConfigError
for a wrong name, a target that exists, or a public push that names machines; StoreError if the Hub refuses.
"""

import getpass
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.adapters.exports.cards import CardFacts, Config, dataset_card, model_card
from ludic.app import Pushed
from ludic.base import LUDIC, installed_version, mask, public_values, require, temporary_folder
from ludic.errors import ConfigError, StoreError, one_line
from ludic.eval import Chosen, MeasureConfig, numbers, stored_versions
from ludic.root import (
    ANSWERS,
    ATTEMPTS,
    CARD,
    IDENTITY,
    PICTURE,
    RUN,
    SHARED,
    WORKERS,
    Root,
    decode_json,
    encode_json,
    newest_attempt,
)
from ludic.root.sql import ask, connect, figure, open_duckdb, open_result
from ludic.root.storage import follow_umask
from ludic.root.weights import read_identity, read_policy

if TYPE_CHECKING:
    from ludic.app import Run

_MODEL, _DATASET = "model", "dataset"
"""Folders of what is pushed."""
_CURVES = ("reward_mean", "response_length_mean", "entropy")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_TABLES = ("answers", "rollouts", "evals", "batches", "metrics", "requests", "scores", "labels", "token_stats")
"""Tables of the data set, the default one first."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""What may be in an address."""
_HOMES = r"/(home|Users)/[^/\s\"'\\]+"


def push(
    run: "Run",
    repo: str,
    *,
    to: str | None = None,
    version: int | None = None,
    parts: Literal["all", "model", "rollouts"] = "all",
    public: bool = False,
    personal: bool = False,
    license: str | None = None,
    model: str | None = None,
) -> Pushed:
    """Write the folders of a run, and send them unless `to` is given. See `Run.push`."""
    require("huggingface_hub", "hub", "ludic push")
    for name, value in (("version", version), ("model", model)):
        if parts == "rollouts" and value is not None:
            raise ConfigError(f"{name} chooses the weights, and parts is rollouts; leave out one of them")
    dataset_repo = _check_names(repo)
    target = None if to is None else _new_folder(to)
    kinds = {"all": [_MODEL, _DATASET], "model": [_MODEL], "rollouts": [_DATASET]}[parts]
    repos = {_MODEL: repo, _DATASET: dataset_repo}
    if target is None:
        _check_remote({kind: repos[kind] for kind in kinds}, public)
    with temporary_folder("push", beside=None if target is None else target.parent) as scratch:
        facts = _write(run, scratch, repos, kinds, version, model, license)
        found = _find_personal(run.root, scratch)
        if public and found and not personal and target is None:
            raise ConfigError(_refusal(found))
        for folder in (scratch / kind for kind in kinds):
            for path in (folder, *folder.rglob("*")):
                follow_umask(path)
        sizes = {
            kind: [each.stat().st_size for each in (scratch / kind).rglob("*") if each.is_file()] for kind in kinds
        }
        message = f"ludic push of run {run.root.run_id}"
        urls: dict[str, str | None] = dict.fromkeys(kinds)
        if target is None:
            urls |= _send({kind: (repos[kind], scratch / kind) for kind in kinds}, public, message)
        else:
            _move(scratch, target)
    return Pushed(
        root=run.url,
        sent=[
            {"kind": kind, "repo": repos[kind], "url": urls[kind], "num_files": len(each), "size_bytes": sum(each)}
            for kind, each in sizes.items()
        ],
        personal=found,
        folder=None if target is None else str(target),
        version=facts.provenance["version"],
    )


# --- Names ----------------------------------------------------------------------------------------------


def _check_names(repo: str) -> str:
    """Return the name of the data set. Raises ConfigError for a name that the Hub does not take."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    dataset_repo = f"{repo}-rollouts"
    try:
        validate_repo_id(dataset_repo)
    except HFValidationError as error:
        raise ConfigError(f"repo is {repo!r}, which the Hub does not take: {one_line(error)}") from None
    if repo.count("/") != 1:
        raise ConfigError(f"repo is {repo!r}, wanted OWNER/NAME, such as ann/cats")
    return dataset_repo


def _new_folder(to: str) -> Path:
    folder = Path(to)
    if "://" in to:
        raise ConfigError(f"to is {to}, wanted a folder of this machine")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{to} exists and is not an empty folder; choose a new one, or delete it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{to} can't be written: {one_line(error)}") from error
    return folder


def _move(scratch: Path, target: Path) -> None:
    try:
        follow_umask(scratch)
        scratch.rename(target)
    except OSError as error:  # another process may have filled it
        raise ConfigError(f"{target} can't be made: {one_line(error)}") from error


# --- The folders ----------------------------------------------------------------------------------------


def _write(
    run: "Run",
    scratch: Path,
    repos: Mapping[str, str],
    kinds: Sequence[str],
    version: int | None,
    model: str | None,
    license: str | None,
) -> CardFacts:
    """Write all folders with their cards."""
    root = run.root
    if _MODEL in kinds:
        from ludic.adapters.exports.weights import export_weights  # which needs torch, and a data set does not

        exported = export_weights(root, str(scratch / _MODEL), version=version, model=model)
        version = int(exported.source.rpartition("=")[2])
    configs = _write_dataset(root, scratch / _DATASET) if _DATASET in kinds else {}
    with connect(root) as con:
        has_steps = any(ask(con, root, "select 1 from metrics where kind = 'train' limit 1"))
        measured = numbers(root, MeasureConfig(), Chosen()).rows if stored_versions(con, root, None) else []
        provenance = _provenance(con, root, version)
    if has_steps:
        curves = run.plot(*_CURVES)
        for kind in kinds:
            curves.savefig(scratch / kind / PICTURE.template, dpi=110)
    facts = CardFacts(
        repo=repos[_MODEL],
        dataset_repo=repos[_DATASET],
        settings=_settings(root),
        base_model=_base_model(root),
        license=license,
        provenance=provenance,
        code=_code(root),
        measures=measured,
        confidence=MeasureConfig().confidence,
        picture=PICTURE.template if has_steps else None,
        configs=configs,
        has_model=_MODEL in kinds,
        has_dataset=_DATASET in kinds,
    )
    for kind, card in ((_MODEL, model_card), (_DATASET, dataset_card)):
        if kind in kinds:
            (scratch / kind / CARD.template).write_text(card(facts), encoding="utf-8")
    return facts


def _write_dataset(root: Root, folder: Path) -> dict[str, Config]:
    """Copy the files of SHARED, records of settings without folders; return how `datasets` reads the tables."""
    names = [name for kind in SHARED for name in kind.names(root) if not name.endswith(_WEIGHTS)]
    try:
        root.copy_all({name: PurePosixPath(name) for name in names}, folder)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{root.url}: a file was deleted while it was copied, so try again: {one_line(error)}"
        ) from None
    for name in (RUN.template, *(name for name in names if name.startswith((IDENTITY.template, ATTEMPTS.folder)))):
        (folder / name).write_bytes(encode_json(_without_folders(public_values(decode_json(root.read(name))))))
    answers = folder / ANSWERS.below() / "answers.parquet"
    answers.parent.mkdir()
    with open_result([root], figure("answers")) as rows, pq.ParquetWriter(answers, rows.schema) as writer:
        for batch in rows:
            writer.write_batch(batch)
    return {
        table: _config(table, files) for table in _TABLES if (files := sorted(folder.glob(f"{table}/**/*.parquet")))
    }


def _config(table: str, files: Sequence[Path]) -> Config:
    """Return how `datasets` reads a table: the columns that all files have with one type. It knows no maps."""
    schemas = [pq.read_schema(file) for file in files]
    features = {field.name: _feature(field.type) for field in schemas[0] if "map<" not in str(field.type)}
    for schema in schemas:  # of files of older versions
        others = {field.name: _feature(field.type) for field in schema if field.name in features}
        features = {name: feature for name, feature in features.items() if others.get(name) == feature}
    return Config(pattern=f"{table}/**/*.parquet", features=[{"name": name, **of} for name, of in features.items()])


def _feature(type_: pa.DataType) -> dict[str, Any]:
    """Return an Arrow type as `datasets` writes it into YAML."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = _feature(type_.value_type)
        return {"list": inner.get("dtype") or inner.get("struct") or inner}
    if pa.types.is_map(type_):
        return {"map": str(type_)}
    if pa.types.is_struct(type_):
        return {"struct": [{"name": field.name, **_feature(field.type)} for field in type_]}
    names = {pa.float32(): "float32", pa.float64(): "float64", pa.float16(): "float16"}
    return {"dtype": names.get(type_, str(type_))}


def _without_folders(value: Any) -> Any:
    """Return values in which a text that is an absolute path is its last part, in any depth."""
    if isinstance(value, Mapping):
        return {_without_folders(name): _without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, str) and value.startswith(("/", "~/", "file:/")):
        return value.rstrip("/").rpartition("/")[2] or value
    return value


# --- What the cards say ---------------------------------------------------------------------------------


def _settings(root: Root) -> dict[str, Any]:
    """Return the settings of the run and of its newest trainer, without secrets and folders."""
    attempt = newest_attempt(root)
    own = decode_json(root.read(RUN.template))
    trained: Mapping[str, Any] = {} if attempt is None else attempt.config
    values = {name: value for name, value in {**own, **trained}.items() if name not in ("run_id", "digest")}
    return {name: value for name, value in _without_folders(public_values(values)).items() if value not in ([], {})}


def _base_model(root: Root) -> str | None:
    """Return the id on the Hub of the model that was trained; None for another one. A root may name anything."""
    identity = read_identity(root)
    source = identity.source if identity is not None and identity.revision is not None else None
    return source if source is not None and _HUB_ID.fullmatch(source) else None


def _provenance(con: Any, root: Root, version: int | None) -> dict[str, Any]:
    policy = None if version is None else read_policy(root, version)
    counts = "select count(distinct step) as steps, (select count(*) from rollouts) as rollouts from batches"
    (counted,) = ask(con, root, counts)
    return {
        "run_id": root.run_id,
        "version": version,
        "step": None if policy is None else policy.step,
        "num_steps_in_ledger": counted["steps"],
        "num_rollouts": counted["rollouts"],
        "schema_version": root.record.schema_version,
        "ludic": installed_version(LUDIC),
    }


def _code(root: Root) -> list[Mapping[str, Any]]:
    """Return role, name and digest of the code that sampled and trained, each once."""
    records = [record for process in _processes(root) for record in process.code]
    rows = {(each.get("role"), _without_folders(each.get("name")), each.get("sha256")): None for each in records}
    return [dict(zip(("role", "name", "sha256"), row, strict=True)) for row in rows]


def _processes(root: Root) -> Iterator[Any]:
    """Yield the records of all trainers and workers: attempts, and claims of slots."""
    records = (kind.read(root, *name) for kind in (ATTEMPTS, WORKERS) for name in kind.listed(root))
    return (each for each in records if each is not None)


# --- What names machines and people -----------------------------------------------------------------------


def _find_personal(root: Root, folder: Path) -> list[dict[str, Any]]:
    """Return where hosts, users and folders are named in what is to be sent; texts of models among it."""
    patterns = _patterns(root)
    counts: Counter[tuple[str, str]] = Counter()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        counts.update((found, "names of files") for found, pattern in patterns.items() if re.search(pattern, file.name))
        if file.suffix in (".json", ".md", ".jinja", ".txt") and file.name != "tokenizer.json":
            text = file.read_text(encoding="utf-8", errors="replace")
            where = file.relative_to(folder)
            counts.update(
                (found, f"{where.parts[0]}/{where.parts[1] if len(where.parts) > 2 else where.name}")
                for found, pattern in patterns.items()
                if re.search(pattern, text)
            )
    with open_duckdb() as con:
        for table in _TABLES:
            for file in folder.glob(f"{_DATASET}/{table}/**/*.parquet"):
                counts.update(_in_file(con, file, table, patterns))
    return [{"found": found, "where": where, "num_places": count} for (found, where), count in sorted(counts.items())]


def _patterns(root: Root) -> dict[str, str]:
    """Return regular expressions, which Python and DuckDB read alike, by what they find."""
    hosts = {each.owner.rpartition("-")[0] for each in _processes(root)} | {socket.gethostname()}
    words = {f"host {host}": host for host in sorted(hosts - {"", "localhost"})}
    with suppress(KeyError, OSError):  # a container's user may have no name
        if (user := getpass.getuser()) != "root":
            words[f"user {user}"] = user
    # Worker ids have _ for other characters of a host's name.
    found = {
        what: f"(^|[^A-Za-z0-9])({re.escape(word)}|{re.escape(re.sub(r'[^A-Za-z0-9.]', '_', word))})([^A-Za-z0-9]|$)"
        for what, word in words.items()
    }
    identity = read_identity(root)
    folders = {
        "the folder of the run": root.path if root.is_local else "",
        "the folder of the model": root.record.model,
        "the folder of the first model": (identity and identity.folder) or "",
        "your home folder": str(Path.home()),
    }
    found |= {what: re.escape(path) for what, path in folders.items() if path.startswith("/") and path.count("/") > 1}
    return found | {"a home folder": _HOMES}


def _in_file(con: Any, file: Path, table: str, patterns: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Return how many rows of a file name what, by the column that does. con: of DuckDB."""
    columns = [field.name for field in pq.read_schema(file) if "string" in str(field.type)]
    rows = pq.ParquetFile(file).read(columns)
    con.register("rows", rows.rename_columns([f"c{index}" for index in range(len(columns))]))
    keys = [(found, index) for index in range(len(columns)) for found in patterns]
    tests = [
        f"count(*) filter (regexp_matches(cast(c{index} as varchar), ${number}))"
        for number, (_, index) in enumerate(keys, 1)
    ]
    query = f"select {', '.join(tests)} from rows"  # noqa: S608
    (row,) = con.execute(query, [patterns[found] for found, _ in keys]).fetchall()
    return +Counter(
        {(found, f"{columns[index]} of {table}"): count for (found, index), count in zip(keys, row, strict=True)}
    )


def _refusal(found: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{row['found']} in {row['where']} ({row['num_places']:,})" for row in found[:5]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return (
        f"a public push would show {', '.join(shown)}{more}; --to FOLDER shows all of it, --personal sends it, and "
        "without --public only you and your organization see it"
    )


# --- Sending --------------------------------------------------------------------------------------------


def _check_remote(repos: Mapping[str, str], public: bool) -> None:
    """Raise ConfigError without a login or if a repository is public already, StoreError if the Hub can't be asked.

    repos: names by kind, model or dataset.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if get_token() is None:
        raise ConfigError("the Hub has no account on this machine; `hf auth login` stores one, and --to sends nothing")
    api = HfApi()
    for kind, repo in repos.items():
        with _explained(), suppress(RepositoryNotFoundError):
            if not api.repo_info(repo, repo_type=kind).private and not public:
                raise ConfigError(f"the {kind} {repo} is public already; --public says that this is meant")


def _send(folders: Mapping[str, tuple[str, Path]], public: bool, message: str) -> dict[str, str]:
    """Create the repositories that do not exist, and send a folder to each; return their addresses by kind.

    folders: repository and folder by kind.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained():
        for kind, (repo, folder) in folders.items():
            api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
            stale = ["*.safetensors", "*.safetensors.index.json"] if kind == _MODEL else None
            api.upload_folder(
                repo_id=repo, repo_type=kind, folder_path=folder, commit_message=message, delete_patterns=stale
            )
    below = {_MODEL: "", _DATASET: "datasets/"}
    return {kind: f"{api.endpoint}/{below[kind]}{repo}" for kind, (repo, _) in folders.items()}


@contextmanager
def _explained() -> Iterator[None]:
    """Raise StoreError if the Hub refuses or can't be reached; no token is in it."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; `hf auth login` with a token that may write" if status in (401, 403) else ""
        raise StoreError(f"the Hub refused ({status}): {mask(one_line(error))}{advice}") from None
    except (httpx2.HTTPError, OSError) as error:
        raise StoreError(f"the Hub can't be reached: {mask(one_line(error))}") from None
