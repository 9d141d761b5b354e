"""Push an export to a repository of the Hugging Face hub, with the token that `hf auth login` or HF_TOKEN has given."""

import sys
from pathlib import Path

from muown_train.data.hub.retry import describe_cause, is_transient
from muown_train.runtime.redaction import HIDDEN, redact


def check_push(name: str) -> None:
    """Check that something can be pushed to the repository OWNER/NAME at all; no request is made.

    Raises:
        ValueError: the name is not one of a repository with its owner, there is no token, or HF_ENDPOINT is no address.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        is_valid = all(name.partition("/"))
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"--push {name} must be OWNER/NAME, a user or an organization of the hub and a name of letters, digits and "
            "- _ . for the repository"
        )
    if not constants.ENDPOINT.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={constants.ENDPOINT} must be an address such as https://huggingface.co")
    if not get_token():
        raise ValueError(
            "--push needs a token of the Hugging Face hub that may write: give one to `hf auth login`, or in HF_TOKEN"
        )


def push_folder(folder: Path, name: str, private: bool, message: str) -> str:
    """Upload the files of a folder to the model repository OWNER/NAME in one commit, and return its address.

    A repository that is not there is made; one that is there keeps its visibility and its other files.

    Args:
        private: whether a repository that is made shows to its owner alone.
        message: of the commit.

    Raises:
        ConnectionError: the hub cannot be reached, or fails at the moment.
        ValueError: the hub refuses the token, the name or the files.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    token, hub = get_token(), redact(f"the hub at {constants.ENDPOINT}")
    api = HfApi(token=token)
    try:
        url = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
        return url
    except Exception as error:  # there are many kinds, of HTTP and of the hub
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = redact(describe_cause(error)).replace(token or HIDDEN, HIDDEN)
        kept = f"; the export is in {folder}, and the same command pushes it"
        if is_transient(error):
            raise ConnectionError(f"{name} cannot be pushed to {hub} now ({reason}){kept}") from error
        if status == 401:
            reason = "it does not know the token: give another to `hf auth login`, or in HF_TOKEN"
        elif status == 403:
            reason = f"the token may not write to {name}: give one that may to `hf auth login`, or in HF_TOKEN"
        raise ValueError(f"{hub} refuses the push to {name} ({reason}){kept}") from error
