"""Folders of repositories on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from classwise.core.errors import InputError, one_line

T = TypeVar("T")


def is_repository(name: str) -> bool:
    """Whether a name has the form ``org/name``."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name, re.ASCII) is not None


def from_hub(
    repository: str,
    files: Sequence[str],
    read: Callable[[Path], T | None],
    *,
    kind: Literal["model", "dataset"] = "model",
    revision: str | None = None,
    owner: str = "",
    hint: str = "",
) -> T:
    """Return what ``read`` finds in the folder of a repository: in the hub's cache, else after downloading ``files``.

    ``read`` returns a false value, or raises, if files are missing. ``owner`` begins the error of a
    download; ``hint`` ends it and says what to do without network access.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # The cache is tried first, so that no later run needs the network.
    for offline in (True, False):
        try:
            folder = snapshot_download(
                repository, repo_type=kind, revision=revision, allow_patterns=list(files), local_files_only=offline
            )
            if found := read(Path(folder)):
                return found
        except Exception as error:  # the hub, the network and the disk raise many kinds of exceptions
            if not offline:
                problem = f"cannot download {repository} from the Hugging Face hub: {one_line(error, 120)}"
                if isinstance(error, LocalEntryNotFoundError):
                    problem = f"cannot reach the Hugging Face hub to download {repository}"
                raise InputError(f"{owner}{problem}{hint and f'. Without network access, {hint}'}") from error
    raise InputError(f"{owner}{repository} on the Hugging Face hub has no files {', '.join(files)}")
