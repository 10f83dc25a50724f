"""Models of the Hugging Face hub, through its own client: its cache, its token, its offline mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoserve.core.errors import PullError

WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]  # never a pickle
UNWANTED = ["*/*", "consolidated*"]  # folders hold exports to other tools; consolidated files are second copies


def fetch_hub(name: str, revision: str | None) -> Path:
    """`name`: `org/name`, or `org/name:FILE.gguf`. A folder of safetensors, or a .gguf file. PullError says why not."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, file = name.partition(":")
    try:
        return Path(hf_hub_download(repo, file, revision=revision)) if file else _fetch_repo(repo, revision)
    except GatedRepoError as error:
        raise PullError(f"{repo} is gated; accept its terms there, then log in or set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise PullError(f"no {repo} there, or it is private; for a private one log in or set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise PullError(f"{repo} has no revision {revision}") from error
    except OfflineModeIsEnabled as error:
        raise PullError("its offline mode is on (HF_HUB_OFFLINE), and its cache has no copy") from error
    except LocalEntryNotFoundError as error:
        raise PullError("it cannot be reached, or its offline mode is on, and its cache has no copy") from error
    except EntryNotFoundError as error:
        raise PullError(f"{repo} has no file {file}") from error
    except _hub_errors() as error:
        first = str(error).partition("\n")[0]
        raise PullError(f"not reached ({type(error).__name__}: {first}), and its cache has no copy") from error


def _fetch_repo(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    try:
        listed = HfApi().model_info(repo, revision=revision).siblings or []
        files = [file.rfilename for file in listed if "/" not in file.rfilename]
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except _hub_errors() as error:  # not reached: what the cache has will do
        try:
            files = [file.name for file in Path(snapshot_download(repo, **wanted, local_files_only=True)).iterdir()]
        except LocalEntryNotFoundError:
            raise error from None
    if any(file.endswith(".safetensors") for file in files):
        return Path(snapshot_download(repo, **wanted))
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if not ggufs:
        raise PullError(f"{repo} has neither safetensors nor GGUF files")
    if len(ggufs) > 1:
        raise PullError(f"{repo} has several GGUF files; say which, as {repo}:FILE, of {', '.join(ggufs)}")
    return Path(hf_hub_download(repo, ggufs[0], revision=revision))


def _hub_errors() -> tuple[type[Exception], ...]:
    """What its client raises otherwise. Errors of its HTTP library, which differs by version, pass through it."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))
