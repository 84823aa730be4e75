"""The nearest valid name, for error messages. Pure; no state."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was most likely meant to be, or None if none is near."""
    folded = {one.lower(): one for one in valid}
    found = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def hint(name: str, valid: Iterable[str], noun: str) -> str:
    """The end of a sentence that refuses `name`: the nearest valid name, or all of them."""
    names = list(valid)
    meant = nearest(name, names)
    if meant is not None:
        return f"did you mean {meant!r}?"
    return f"{noun}: {', '.join(names)}" if names else f"there are no {noun}"
