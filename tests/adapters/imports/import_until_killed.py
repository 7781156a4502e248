"""Import a verl file into a root, and die without farewell after the first file of rollouts: ROOT FILE."""

import os
import signal
import sys

from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.models.chat import load_tokenizer
from ludic.store import Root
from ludic.store.root import Root as _Root

root = Root.open(sys.argv[1])
put_if_absent = _Root.put_if_absent


def die_after_the_first(self: Root, name: str, data: bytes) -> bool:
    created = put_if_absent(self, name, data)
    if name.startswith("rollouts/"):
        os.kill(os.getpid(), signal.SIGKILL)
    return created


_Root.put_if_absent = die_after_the_first
model = root.record.model
import_file(
    root,
    sys.argv[2],
    load_format("verl"),
    env_name="cats",
    tokenizer=model,
    get_tokenizer=lambda: load_tokenizer(model),
)
