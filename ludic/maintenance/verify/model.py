"""Check model/: the kept files of the run's first model match their fingerprints.

Raises StoreError if the filesystem fails; files that vanish while they are checked are ignored.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress

from ludic.errors import SchemaError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.store import Root
from ludic.store.catalogue import IDENTITY, MODEL, FileName
from ludic.store.records import ModelIdentity
from ludic.store.weights import digest_file, kept_files, read_identity


def check_model(root: Root) -> Iterator[Finding]:
    """Compare each kept file with its fingerprint, reading all of them; weights may be absent from model/."""
    try:
        identity = read_identity(root)
    except SchemaError as error:
        yield Finding(check="model", where=IDENTITY.template, problem=reason_of(error))
        return
    if identity is not None:
        yield from _check_files(root, identity)


def _check_files(root: Root, identity: ModelIdentity) -> Iterator[Finding]:
    kept = set(kept_files(root))
    wanted = {**identity.config, **identity.tokenizer, **identity.weights}
    for name in sorted(kept & wanted.keys()):
        with suppress(FileNotFoundError):
            if digest_file(root.open_file(MODEL.name(FileName(name))), hashlib.sha256()) != wanted[name]:
                problem = "does not match its fingerprint; delete it with identity.json, and start where the model is"
                yield Finding(check="model", where=MODEL.name(FileName(name)), problem=problem)
    for name in sorted((identity.config.keys() | identity.tokenizer.keys()) - kept):
        problem = "is missing; delete identity.json, and start where the model is"
        yield Finding(check="model", where=MODEL.name(FileName(name)), problem=problem)
