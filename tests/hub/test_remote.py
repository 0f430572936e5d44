"""Publishing over HTTP: one commit or none, whatever goes wrong on the way."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import huggingface_hub
import pytest
from fake_hub import CHUNK, FakeHub
from fake_repos import Blob, RefusalError
from huggingface_hub import constants

from spectrain.bundle import resolve_bundle
from spectrain.errors import SpectrainError
from spectrain.hub.contents import content_digest
from spectrain.hub.remote import send

OLD = {"spectrain.json": b"{}", "old.safetensors": b"0" * 9_000, "medusa_lm_head.safetensors": b"0", "LICENSE": b"free"}


def remote(repo):
    return {path: hashlib.sha256(blob.content).hexdigest() for path, blob in repo.files.items()}


def local(publication):
    return {path: content_digest(content) for path, content in publication.files.items()}


def failing(count, part="/large/", method="PUT"):
    """A fault: the ``count``-th such request is refused, as storage refuses a link that has expired."""
    seen = []

    def fault(verb, path):
        if verb == method and part in path:
            seen.append(path)
            if len(seen) == count:
                raise RefusalError(403, "Request has expired")

    return fault


def refused(publication, match, **options):
    with pytest.raises(SpectrainError, match=match) as caught:
        send(publication, **options)
    assert "hf_" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [(("org/tarqet", "c" * 40), "no such model"), (("org/target", "d" * 40), "no such commit")],
)
def test_a_target_that_nobody_can_fetch_is_named_before_anything_is_sent(hub, publication, changed, named):
    message = refused(replace(publication, target=changed), named)
    assert all(part in message for part in (*changed, "--target-revision"))
    assert not hub.sent()
    assert "org/drafter" not in hub.repos


def test_a_new_repository_gets_one_commit_with_every_file(hub, publication):
    sent = send(publication)
    repo = hub.repos["org/drafter"]
    assert (sent.commit, sent.removed, sent.new) == (repo.head, (), True)
    assert sent.url == f"{hub.url}/org/drafter/tree/{repo.head}"
    assert not repo.private
    assert len(repo.commits) == 2  # the one that the Hub makes, and ours
    there = remote(repo)
    assert there.pop(".gitattributes")
    assert there == local(publication)
    large = {path for path, blob in repo.files.items() if blob.lfs}
    assert {"model.safetensors", "report.png"} <= large < set(publication.files)
    assert not any("xet" in path for _, path, _ in hub.requests)


def test_the_same_again_is_no_commit(hub, publication):
    first = send(publication)
    again = send(publication)
    assert (again.commit, again.new) == (first.commit, False)
    assert len(hub.repos["org/drafter"].commits) == 2


def test_when_the_third_file_fails_nothing_changes_and_a_retry_also_deletes_what_is_stale(hub, publication):
    """C29, huggingface_hub#1801."""
    repo = hub.add("org/drafter", OLD)
    head, before = repo.head, dict(repo.files)
    hub.fault = failing(3)
    said = refused(publication, "Request has expired")
    assert f"branch main is as it was, at {head}" in said
    assert sum(method == "PUT" for method, *_ in hub.requests) >= 3
    assert (repo.head, repo.files, len(repo.commits)) == (head, before, 1)

    hub.fault = lambda method, path: None
    sent = send(publication)
    assert len(repo.commits) == 2
    assert sent.removed == ("medusa_lm_head.safetensors", "old.safetensors")
    assert set(repo.files) == {*publication.files, ".gitattributes", "LICENSE"}


@pytest.mark.parametrize("path", ["/preupload/", "/objects/batch", "/verify", "/commit/", "/api/validate-yaml"])
def test_whatever_request_fails_the_branch_is_as_it_was(hub, publication, path):
    repo = hub.add("org/drafter", OLD)
    head = repo.head
    hub.fault = failing(1, path, "POST")
    refused(publication, "(?s)Request has expired.*branch main is as it was")
    assert (repo.head, len(repo.commits)) == (head, 1)


def test_large_files_go_in_chunks_where_the_hub_wants_it(hub, publication):
    hub.multipart_from = 10_000
    send(publication)
    sizes = publication.sizes
    weights = hashlib.sha256(hub.repos["org/drafter"].files["model.safetensors"].content).hexdigest()
    assert sorted(hub.parts[weights]) == list(range(1, -(-sizes["model.safetensors"] // CHUNK) + 1))
    assert max(size for method, _, size in hub.requests if method == "PUT") <= CHUNK
    assert remote(hub.repos["org/drafter"]) == {
        **local(publication),
        ".gitattributes": remote(hub.repos["org/drafter"])[".gitattributes"],
    }


def test_a_missing_part_changes_nothing(hub, publication):
    repo = hub.add("org/drafter", OLD)
    hub.multipart_from = 10_000
    hub.fault = failing(4)
    refused(publication, "branch main is as it was")
    assert len(repo.commits) == 1


def test_tokens_that_do_not_do(hub, publication, monkeypatch):
    hub.add("org/drafter", OLD)
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "hf auth login" in refused(publication, "does not know your token")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert "branch main is as it was" in refused(publication, "can write to org/drafter")
    monkeypatch.delenv("HF_TOKEN")
    before = len(hub.requests)
    refused(publication, "set HF_TOKEN, or log in")
    assert len(hub.requests) == before
    assert len(hub.repos["org/drafter"].commits) == 1


def test_a_token_that_may_not_make_repositories(hub, publication, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    refused(publication, "403.*Nothing was sent")
    assert set(hub.repos) == {"org/target"}


def test_another_model_is_not_overwritten(hub, publication):
    repo = hub.add("org/drafter", {"pytorch_model.bin": b"theirs", "README.md": b"theirs"})
    refused(publication, r"holds something else than a bundle \(pytorch_model\.bin")
    assert len(repo.commits) == 1
    assert not hub.sent()


def test_a_repository_with_a_card_alone_is_free(hub, publication):
    hub.add("org/drafter", {"README.md": b"soon", "LICENSE": b"free"})
    send(publication)
    assert hub.repos["org/drafter"].files["README.md"].content == publication.files["README.md"]


def test_private_is_made_private_and_a_public_one_is_not_taken_for_it(hub, publication):
    send(publication, private=True)
    assert hub.repos["org/drafter"].private
    hub.add("org/open", OLD)
    open_one = replace(publication, repo="org/open")
    refused(open_one, "org/open is there and public", private=True)
    assert len(hub.repos["org/open"].commits) == 1


def test_a_branch_has_to_be_there(hub, publication):
    refused(publication, "org/drafter is not on the Hub.*no branch next", branch="next")
    assert set(hub.repos) == {"org/target"}
    repo = hub.add("org/drafter", OLD)
    refused(publication, r"no branch next \(it has main\).*hf repos branch create org/drafter next", branch="next")
    assert not hub.sent()
    repo.branches["next"] = repo.head
    head, sent = repo.head, send(publication, branch="next")
    assert repo.branches == {"main": head, "next": sent.commit}


def test_a_commit_in_between_is_told_and_kept(hub: FakeHub, publication):
    repo = hub.add("org/drafter", OLD)

    def other_commit(method, path):
        if "/commit/" in path:
            hub.fault = lambda method, path: None
            repo.commit("main", {**repo.files, "theirs.txt": Blob(b"x")}, "theirs")

    hub.fault = other_commit
    assert "branch main has moved" in refused(publication, "changed at the same time")
    assert repo.messages[-1] == "theirs"


def test_a_commit_whose_answer_was_lost_is_told(hub: FakeHub, publication, monkeypatch):
    repo, original = hub.add("org/drafter", OLD), FakeHub._at
    moved = []

    def lost(self, request, name, revision, write=False):
        found = original(self, request, name, revision, write)
        if "/commit/" in request.path and not moved:
            moved.append(repo.commit("main", {**repo.files}, "ours, as it seems"))
            raise RefusalError(500, "the answer was lost")
        return found

    monkeypatch.setattr(FakeHub, "_at", lost)
    refused(publication, "branch main has moved from")


def test_what_reads_back_otherwise_is_an_error(hub: FakeHub, publication):
    def damaged(method, path):
        repo = hub.repos.get("org/drafter")
        if repo and "/tree/" in path and len(repo.commits) == 2:
            repo.files["model.safetensors"] = Blob(b"1" * 9_000, lfs=True)

    hub.fault = damaged
    refused(publication, r"model\.safetensors of commit \w{40} is not what was sent")


def test_a_hub_without_xet_says_what_to_do(hub, publication, monkeypatch):
    """Newer clients ask for Xet alone, older ones ask what there is and go on."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    if int(huggingface_hub.__version__.split(".")[0]) > 1:
        assert "branch main is as it was" in refused(publication, "wants HF_HUB_DISABLE_XET=1")
        assert len(hub.repos["org/drafter"].commits) == 1
    else:
        send(publication)
        assert remote(hub.repos["org/drafter"]).items() >= local(publication).items()


def test_a_hub_that_does_not_answer(hub, publication):
    hub.close()
    refused(publication, "publishing to org/drafter failed.*Nothing was sent")


def test_bundles_are_fetched_by_id_and_revision(hub, publication):
    repo = hub.add("org/drafter", OLD)
    sent = send(publication)
    folder = resolve_bundle("org/drafter", sent.commit)
    assert (folder / "spectrain.json").read_bytes() == publication.files["spectrain.json"]
    assert not (folder / "report.png").exists()  # a picture is nothing to load
    repo.branches["next"] = sent.commit
    assert resolve_bundle("org/drafter", "next") == folder
    with pytest.raises(SpectrainError, match="did not give it at revision gone: org/drafter has no revision gone"):
        resolve_bundle("org/drafter", "gone")
