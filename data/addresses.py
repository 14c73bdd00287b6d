"""Addresses of stores and servers: what may stand in one. They are recorded in manifests and logs, so no secret may."""

from urllib.parse import urlsplit


class StoreError(OSError):
    """The store cannot be read or written; the message names the address, the reason and the fix."""


def require_no_secret(url: str, what: str) -> None:
    """Raises StoreError, without the secret, for user:password@host and for query strings such as signed ones."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    # A secret key may hold a slash, which ends what a URL calls its host; a bucket's name holds no colon.
    split_key = parts.scheme in ("s3", "s3a") and ":" in parts.netloc and not parts.netloc.startswith("arn:")
    if at or user or split_key:
        hidden = f"{parts.scheme}://***@{url.rpartition('@')[2]}" if "@" in url else f"{parts.scheme}://***"
        raise StoreError(f"{what} {hidden!r}: holds credentials, and URLs are recorded; {MOVE_THEM}")
    if parts.scheme not in ("", "file") and parts.query:
        hidden = url.partition("?")[0]
        raise StoreError(f"{what} {hidden + '?***'!r}: has a query, which may hold a secret; leave it out. {MOVE_THEM}")


def without_password(url: str) -> str:
    """postgresql://me:secret@host/db -> postgresql://me:***@host/db, for messages."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    return parts._replace(netloc=f"{name}:***@{host}").geturl() if colon else url


def require_endpoint(url: str) -> None:
    """Raises StoreError unless the URL is that of an S3 service."""
    require_no_secret(url, "store endpoint")
    if not url.startswith(("http://", "https://")) or not urlsplit(url).netloc:
        raise StoreError(f"store endpoint {url!r}: must begin with http:// or https://, as in http://127.0.0.1:9000")


def require_plain(url: str, key: str) -> None:
    """Raises ValueError unless it is an address of a server and nothing more. key: the variable for its secret."""
    parts = urlsplit(url)
    if "@" in url or parts.query:
        raise ValueError(
            f"{parts.scheme}://***: holds credentials or a query, and URLs are recorded; write "
            f"http://host:port, and put the server's key into the environment variable {key}"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url!r}: must begin with http:// or https://, as in http://10.0.0.7:30000")


MOVE_THEM = "credentials go into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile named by AWS_PROFILE"
