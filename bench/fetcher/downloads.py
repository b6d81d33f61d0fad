"""Downloads one model with one client, as a process whose time is measured.

    python bench/fetcher/downloads.py CLIENT ENDPOINT DIRECTORY

CLIENT is `argosy-hub`, `argosy-bucket`, `obstore` or `boto3`. Only Argosy's clients check hashes and force what they
write to disk.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loopback_servers import BUCKET, MODEL

KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}


def with_argosy(uri: str, environment: dict[str, str], directory: Path) -> None:
    from argosy_fetcher.progress import Progress
    from argosy_fetcher.pull import pull_model
    from argosy_fetcher.source_uri import parse

    pull_model(parse(uri), progress=Progress(), download_dir=str(directory), environment=environment)


def with_obstore(endpoint: str, directory: Path) -> None:
    """Stream each object into a file, eight at a time."""
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region=KEYS["AWS_REGION"],
        client_options={"allow_http": True},
    )

    def download(key: str) -> None:
        with (directory / key).open("wb") as file:
            for chunk in store.get(key).stream(min_chunk_size=1 << 20):
                file.write(chunk)

    keys = [entry["path"] for batch in store.list() for entry in batch]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(download, keys))


def with_boto3(endpoint: str, directory: Path) -> None:
    """Download each object with its defaults: parts of 8 MiB, ten at a time."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_REGION"],
    )
    for entry in client.list_objects_v2(Bucket=BUCKET)["Contents"]:
        client.download_file(BUCKET, entry["Key"], str(directory / entry["Key"]))


def main() -> None:
    client, endpoint, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if client == "argosy-hub":
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(directory / "hub-home")}
        with_argosy(f"hf://{MODEL}", environment, directory)
    elif client == "argosy-bucket":
        with_argosy(f"s3://{BUCKET}", {**KEYS, "AWS_ENDPOINT_URL": endpoint}, directory)
    elif client == "obstore":
        with_obstore(endpoint, directory)
    elif client == "boto3":
        with_boto3(endpoint, directory)
    else:
        sys.exit(f"unknown client {client}")


if __name__ == "__main__":
    main()
