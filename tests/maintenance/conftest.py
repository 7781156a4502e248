"""The roots and files of the store's tests."""

from store.conftest import failures_surface_at_once, next_batch, put_file, root_url, s3_proxy, unreliable_root

__all__ = ["failures_surface_at_once", "next_batch", "put_file", "root_url", "s3_proxy", "unreliable_root"]
