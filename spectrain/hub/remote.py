"""One commit with everything, or none: the Hub's side of publishing. Tokens come from the environment or the login."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from spectrain.errors import SpectrainError
from spectrain.hub.contents import Content, Publication, content_digest
from spectrain.manifest import MANIFEST_FILE

# What the transport raises when it gets no answer: its name depends on the version of huggingface_hub.
_NO_ANSWER = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
_FAILURES: tuple[type[BaseException], ...] = (cast(type[Exception], _NO_ANSWER), OSError, ValueError, RuntimeError)
_STAY = {".gitattributes", "LICENSE", "NOTICE"}  # the Hub's own, and what owners put beside a model by hand
_MAIN = "main"


@dataclass(frozen=True)
class Sent:
    """The commit that holds the bundle; ``removed`` are files of an earlier one; not ``new``: all of it was there."""

    url: str
    commit: str
    removed: tuple[str, ...]
    new: bool


def send(publication: Publication, *, private: bool = False, branch: str | None = None) -> Sent:
    """Publish in one commit on top of what the branch holds now, then read every digest back.

    Files that an earlier bundle left are deleted in the same commit. Raises SpectrainError, with the branch as it was,
    where the token, the repository or the branch does not allow it, another commit came between, or a file fails.
    """
    repo, branch, api = publication.repo, branch or _MAIN, HfApi()
    if get_token() is None:
        raise SpectrainError("the Hub asks who you are: set HF_TOKEN, or log in with hf auth login")
    with _explained(repo, lambda: "nothing was sent"):
        _check_target(api, *publication.target)
        head = _head(api, repo, private, branch)
        there = _files(api, repo, head)
    _check_ours(repo, branch, there)
    stale = sorted(there.keys() - publication.files.keys() - _STAY)
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationDelete(path_in_repo=name, is_folder=False) for name in stale),
        *(CommitOperationAdd(path_in_repo=n, path_or_fileobj=c) for n, c in publication.files.items()),
    ]
    with _explained(repo, lambda: _outcome(api, repo, branch, head)):
        commit = api.create_commit(
            repo, operations, commit_message="Publish the drafter with spectrain", revision=branch, parent_commit=head
        ).oid
    _verify(api, publication, commit)
    return Sent(f"{api.endpoint}/{repo}/tree/{commit}", commit, tuple(stale), commit != head)


def _check_target(api: HfApi, name: str, revision: str) -> None:
    """A drafter whose target nobody can fetch is of no use to anybody."""
    try:
        api.model_info(name, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = "commit" if isinstance(error, RevisionNotFoundError) else "model"
        raise SpectrainError(
            f"the target {name} at {revision} is not on the Hub, or your token does not see it (no such {what}); "
            "correct --target and --target-revision"
        ) from None


def _head(api: HfApi, repo: str, private: bool, branch: str) -> str:
    """The commit to build on; a repository that is not there is made, one more public than asked for is refused."""
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        if branch != _MAIN:
            raise SpectrainError(
                f"{repo} is not on the Hub, or your token does not see it, so it has no branch {branch}; publish to "
                "main first"
            ) from None
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.model_info(repo)
    if private and not info.private:
        raise SpectrainError(f"{repo} is there and public: make it private on the Hub, or publish without --private")
    try:
        return str(api.model_info(repo, revision=branch).sha)
    except RevisionNotFoundError:
        known = ", ".join(found.name for found in api.list_repo_refs(repo).branches)
        raise SpectrainError(
            f"{repo} has no branch {branch} (it has {known}); make it first: hf repos branch create {repo} {branch}"
        ) from None


def _files(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _check_ours(repo: str, branch: str, there: Mapping[str, RepoFile]) -> None:
    """Another model's files must not be deleted as if they were stale."""
    others = sorted(there.keys() - _STAY - {"README.md"})
    if others and MANIFEST_FILE not in there:
        raise SpectrainError(
            f"{repo} at {branch} holds something else than a bundle ({others[0]}, and no {MANIFEST_FILE}); choose "
            "another name or branch"
        )


def _verify(api: HfApi, publication: Publication, commit: str) -> None:
    """Every file of the commit by the digest that the Hub keeps of it, and none besides."""
    repo = publication.repo
    with _explained(repo, lambda: f"commit {commit} is there, but could not be read back; publish again"):
        there = _files(api, repo, commit)
    for name, content in publication.files.items():
        found = there.get(name)
        if found is None or not _same(found, content):
            raise SpectrainError(
                f"{repo}: {name} of commit {commit} is {'missing' if found is None else 'not what was sent'}; publish "
                "again, and do not use this commit"
            )
    extra = next(iter(sorted(there.keys() - publication.files.keys() - _STAY)), None)
    if extra is not None:
        raise SpectrainError(f"{repo}: commit {commit} still holds {extra}; publish again, and do not use this commit")


def _same(found: RepoFile, content: Content) -> bool:
    if found.lfs is not None:
        return bool(found.lfs.sha256 == content_digest(content))
    raw = content.read_bytes() if isinstance(content, Path) else content
    return bool(found.blob_id == git_hash(raw))


def _outcome(api: HfApi, repo: str, branch: str, head: str) -> str:
    """What the Hub holds after a failure: a commit may have gone through although its answer was lost."""
    try:
        now = api.model_info(repo, revision=branch).sha
    except _FAILURES:
        return f"what the branch {branch} holds now could not be asked; it was at {head}"
    if now == head:
        return f"the branch {branch} is as it was, at {head}; the same command starts again"
    return f"the branch {branch} has moved from {head} to {now}: look at it, then publish again on top of it"


@contextlib.contextmanager
def _explained(repo: str, outcome: Callable[[], str]) -> Iterator[None]:
    """Failures of the Hub and on the way to it, in words, with what is there now; without tokens or signed links."""
    try:
        yield
    except SpectrainError:
        raise
    except _FAILURES as error:
        now = outcome()
        raise SpectrainError(
            f"publishing to {repo} failed: {_reason(error, repo)}. {now[0].upper()}{now[1:]}"
        ) from error


def _reason(error: BaseException, repo: str) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
    if not isinstance(cause, HfHubHTTPError):
        advice = "; a Hub that does not know Xet wants HF_HUB_DISABLE_XET=1" if "/xet-" in str(error) else ""
        return f"{error}{advice}"
    status, file = cause.response.status_code, "" if cause is error else f"{error} "
    reasons = {
        401: "the Hub does not know your token, or it does not see the repository; set HF_TOKEN, or hf auth login",
        403: f"it is forbidden; take a token that can write to {repo}",
        409: "it was changed at the same time",
        412: "it was changed at the same time",
    }
    hint = reasons.get(status) if cause is error else None  # storage has reasons of its own
    parts = (f"status {status}", hint, cause.server_message)
    return f"{file}{': '.join(part for part in parts if part)}"
