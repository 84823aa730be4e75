"""Asking a running pipeline over HTTP for what only its operator may ask: the command `call`."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Final

from proto.errors import InvalidRequest, OmniError
from proto.params import Json

GRACE_S: Final = 15.0
"""How long after a call's own deadline its answer is waited for."""


def ask(
    url: str, stage: str, method: str, args: Mapping[str, Json], replicas: Sequence[int], timeout_s: float
) -> Mapping[str, Json]:
    """The answers by replica. Raises `InvalidRequest` for what the pipeline refused as asked, another `OmniError` for what
    it could not do, `OSError`, `HTTPException` or `ValueError` where no pipeline answers."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("a URL is http://HOST:PORT")
    body = {"stage": stage, "method": method, "args": dict(args), "timeout_s": timeout_s}
    if replicas:
        body["replicas"] = list(replicas)
    request = urllib.request.Request(
        f"{url.rstrip('/')}/admin/call", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s + GRACE_S) as answer:
            answers: Mapping[str, Json] = json.load(answer)["answers"]
            return answers
    except urllib.error.HTTPError as error:
        raise _told(error) from None
    except KeyError:
        raise ValueError("what listens there is no pipeline, or one of another version") from None


def _told(error: urllib.error.HTTPError) -> Exception:
    """What the pipeline said instead of an answer."""
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ValueError(f"it answers {error.code} {error.reason}")
    return InvalidRequest(message) if error.code < 500 else OmniError(message)
