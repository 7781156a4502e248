"""Load the tokenizer of a run's model, or another one, for texts that have no tokens.

Reads the small files of a model in the root, or a folder, a Hugging Face id or a URL. Raises ModelError.
"""

from contextlib import ExitStack

from ludic.errors import ModelError
from ludic.models.chat import read_tokenizer
from ludic.models.tokenizer import Tokenizer
from ludic.root import Root
from ludic.root.weights import first_config, first_small_files, local_folder, stop_tokens_of


def tokenizer_of(root: Root, source: str | None) -> Tokenizer:
    """Load a tokenizer. source: folder, Hugging Face id or URL; None means the run's own, stored in its root."""
    if source is not None:
        with local_folder(source, with_weights=False) as folder:
            return read_tokenizer(str(folder))
    with first_small_files(root) as folder:
        tokenizer = read_tokenizer(str(folder))
    tokenizer.name_or_path = root.record.model  # for errors
    return tokenizer


def read_stop_tokens(root: Root, source: str | None) -> tuple[int, ...]:
    """Return the tokens at which a tokenizer's model stops; none if its folder has no configuration."""
    with ExitStack() as stack:
        try:
            opened = first_config(root) if source is None else local_folder(source, with_weights=False)
            return stop_tokens_of(stack.enter_context(opened))
        except ModelError:
            return ()
