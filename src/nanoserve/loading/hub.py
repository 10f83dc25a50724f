"""Models of the Hugging Face hub, through its own client: its cache, its token, its offline mode."""

from __future__ import annotations

from pathlib import Path

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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise PullError("it cannot be reached, or is switched off, and its cache has no copy") from error
    except EntryNotFoundError as error:
        raise PullError(f"{repo} has no file {file}") from error
    except _hub_errors() as error:
        raise PullError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _fetch_repo(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        files = [file for file in HfApi().list_repo_files(repo, revision=revision) if "/" not in file]
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except _hub_errors():  # not reached: what the cache has will do
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        files = [file.name for file in folder.iterdir()]
    if any(file.endswith(".safetensors") for file in files):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
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
