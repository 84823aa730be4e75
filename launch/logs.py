"""Logging of both commands: plain lines on stderr, each with the time and who speaks."""

import logging


def set_up_logs(who: str, verbose: bool, quiet: bool = False) -> None:
    """`who` stands in every line: "master", or the stage's name. `quiet` keeps to warnings."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO,
        format=f"%(asctime)s {who} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    if not verbose:
        for noisy in ("httpx", "httpcore", "urllib3", "asyncio", "transformers", "diffusers"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
