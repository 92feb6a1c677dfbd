"""Google's own client works on the server."""

from __future__ import annotations

import pytest
from gcs.server import GcsServer
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.cloud import storage


@pytest.fixture
def bucket(gcs: GcsServer) -> storage.Bucket:
    return storage.Client(project=None).bucket("bucket")


def test_small_objects_with_preconditions_and_metadata(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a/b c")
    blob.metadata = {"k": "v"}
    blob.upload_from_string(b"data", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"other", if_generation_match=0)
    found = bucket.get_blob("a/b c")
    assert (found.size, found.metadata, found.generation) == (4, {"k": "v"}, blob.generation)
    assert found.download_as_bytes(if_generation_match=found.generation) == b"data"
    found.content_type = "text/plain"
    found.patch(if_metageneration_match=1)
    assert bucket.get_blob("a/b c").metageneration == 2
    found.delete(if_generation_match=found.generation)
    with pytest.raises(NotFound):
        found.reload()


@pytest.mark.slow
def test_listing_with_delimiter_and_pages(bucket: storage.Bucket) -> None:
    for name in ("a/1", "a/2", "b", "c/1"):
        bucket.blob(name).upload_from_string(b"")
    listing = bucket.list_blobs(delimiter="/", page_size=1)
    assert [blob.name for blob in listing] == ["b"]
    assert listing.prefixes == {"a/", "c/"}
