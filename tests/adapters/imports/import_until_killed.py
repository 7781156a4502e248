"""Import a verl file into a root, or follow a folder, and die without farewell after the first file of rollouts.

Arguments: ROOT FILE, or ROOT FOLDER follow.
"""

import os
import signal
import sys
import threading

from ludic.adapters.imports.following import follow
from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.models.chat import load_tokenizer
from ludic.root.root import Root
from ludic.root.root import Root as _Root

root = Root.open(sys.argv[1])
put_if_absent = _Root.put_if_absent


def die_after_the_first(self: Root, name: str, data: bytes) -> bool:
    created = put_if_absent(self, name, data)
    if name.startswith("rollouts/"):
        os.kill(os.getpid(), signal.SIGKILL)
    return created


_Root.put_if_absent = die_after_the_first
model = root.record.model
if sys.argv[3:] == ["follow"]:
    follow(root, [sys.argv[2]], "verl", threading.Event(), interval_s=0.05)
import_file(
    root,
    sys.argv[2],
    load_format("verl"),
    env_name="cats",
    tokenizer=model,
    get_tokenizer=lambda: load_tokenizer(model),
)
