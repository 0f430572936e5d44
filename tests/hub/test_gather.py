"""What leaves and what does not: every refusal comes before a byte is sent."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tiny import build_tokenizer

from spectrain.bundle import read_bundle
from spectrain.drafters.ranks import read_ranks
from spectrain.errors import SpectrainError
from spectrain.files import file_digest
from spectrain.hub.contents import content_digest, gather
from spectrain.hub.privacy import check_places, check_traffic, without_places
from spectrain.manifest import MANIFEST_FILE, read_manifest

FILES = {
    "README.md", "acceptance.json", "chat_template.jinja", "config.json", "model.safetensors", "ranks.json",
    "report.png", "spectrain.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


def edit(path: Path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refuse(request, match):
    with pytest.raises(SpectrainError, match=match) as caught:
        gather(request)
    return str(caught.value)


def read(publication, name):
    content = publication.files[name]
    return content.read_bytes() if isinstance(content, Path) else content


def write_out(publication, folder):
    folder.mkdir()
    for name in publication.files:
        (folder / name).write_bytes(read(publication, name))
    return folder


def test_the_files_are_those_of_the_manifest_the_card_the_report_and_its_picture(publication, bundle, request_of):
    assert set(publication.files) == FILES
    assert json.loads(read(publication, "ranks.json")) == read_ranks(bundle)
    (bundle / "ranks.json").write_text('{"note": "mine"}')
    refuse(request_of(), r"ranks\.json: .*expected what spectrain tree writes")
    (bundle / "ranks.json").unlink()
    assert set(gather(request_of()).files) == FILES - {"ranks.json"}
    assert publication.sizes["model.safetensors"] == (bundle / "model.safetensors").stat().st_size


def test_what_is_published_is_a_bundle_that_loads(publication, bundle, tmp_path):
    folder = write_out(publication, tmp_path / "fetched")
    contents = read_bundle(folder)
    assert contents.manifest.target.name == "org/target"
    assert contents.manifest.recipe["training"] == read_manifest(bundle).recipe["training"]
    assert contents.settings.verifier_name == "org/target"  # a server would fetch it by this name
    again = {
        name: content_digest(content) for name, content in publication.files.items() if name in contents.manifest.files
    }
    assert again == contents.manifest.files


def test_no_place_of_this_machine_is_in_any_file(publication, run, bundle):
    assert str(run.parent.parent).encode() not in b"".join(read(publication, name) for name in publication.files)
    recorded = read_manifest(bundle).target.name
    assert recorded.startswith("/")
    assert all(recorded.encode() not in read(publication, name) for name in publication.files)
    recipe = json.loads(read(publication, MANIFEST_FILE))["recipe"]
    assert recipe["data"]["train"] == ["train.jsonl"]
    assert (recipe["target"]["name"], recipe["output"]) == ("org/target", "run")


def test_places_in_other_settings_are_refused(bundle, request_of, run):
    edit(bundle / "acceptance.json", lambda d: d["context"]["traffic"].update(name=f"{run}/run/bundle"))
    refuse(request_of(), r"acceptance\.json names .*a folder of this machine")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/me/chats.jsonl", "chats.jsonl"),
        ("~/chats/a.jsonl", "a.jsonl"),
        ("../data/a.jsonl", "a.jsonl"),
        ("runs/eagle3/bundle", "bundle"),
        ("C:\\chats\\a.jsonl", "a.jsonl"),
        ("http://10.0.0.7:8000/v1", "http://…"),
        ("org/model", "org/model"),
        ("forward_kl", "forward_kl"),
        ("here", "org/target"),
        (["/a/b", 3, None], ["b", 3, None]),
        ({"chat_template_kwargs": {"x": "/a/b"}}, {"chat_template_kwargs": {"x": "/a/b"}}),
    ],
)
def test_places_are_cut_to_names(value, expected):
    assert without_places(value, {"here": "org/target"}) == expected


def test_a_local_target_needs_a_name_and_a_commit(request_of, bundle):
    """C27 (speculators#1065, vllm#38111)."""
    before = (bundle / MANIFEST_FILE).read_bytes()
    hint = "--target ORG/NAME --target-revision COMMIT"
    assert hint in refuse(request_of(target=None, revision=None), "not a Hub id")
    assert hint in refuse(request_of(target="./model"), "not a Hub id")
    assert hint in refuse(request_of(revision=None), "has no revision")
    assert hint in refuse(request_of(revision="main"), "'main' can move")
    gather(request_of())
    assert (bundle / MANIFEST_FILE).read_bytes() == before  # the bundle here still finds its target


def test_an_unknown_architecture_key_is_an_error(request_of, bundle):
    """C27: no server may load what it reads another way."""
    edit(bundle / "config.json", lambda config: config.update(logit_scale=2.0))
    digest = file_digest(bundle / "config.json")
    edit(bundle / MANIFEST_FILE, lambda manifest: manifest["files"].update({"config.json": digest}))
    refuse(request_of(), "unknown key 'logit_scale'")


def test_without_its_own_report_no_bundle_leaves(request_of, bundle, tmp_path):
    report = bundle / "acceptance.json"
    moved = Path(shutil.move(report, tmp_path / "elsewhere.json"))
    assert "spectrain evaluate" in refuse(request_of(), "is not there, so nobody can tell whether .* pays")
    gather(request_of(report=moved))
    for part in ("drafter", "target"):
        shutil.copy(moved, report)
        edit(report, lambda d, part=part: d["context"][part].update(weights="f" * 64))
        assert "spectrain evaluate" in refuse(
            request_of(), f"measured on another {part}: its weights have the digest f"
        )
        edit(report, lambda d, part=part: d["context"][part].pop("weights"))
        refuse(request_of(), f"does not say which {part} was measured")


@pytest.mark.parametrize(
    "change",
    [
        {"verification": "typical_lossy"},
        {"verification": "typical_lossy", "lossy": True},
        {"lossy": True},
        {"contender": "eagle3 LOSSY"},
    ],
)
def test_a_lossy_rule_must_be_called_so(request_of, bundle, change):
    edit(bundle / "acceptance.json", lambda d: d["samplers"][0]["contenders"][-1].update(change))
    refuse(request_of(), "must be called LOSSY")


def test_lossy_rows_are_shown_and_are_no_results(request_of, bundle):
    def add(document):
        contenders = document["samplers"][0]["contenders"]
        name = "eagle3 k=2 LOSSY typical"
        contenders.append({**contenders[-1], "contender": name, "verification": "typical_lossy", "lossy": True})

    edit(bundle / "acceptance.json", add)
    card = gather(request_of()).card
    assert "| eagle3 k=2 LOSSY typical |" in card
    assert "Not exact: eagle3 k=2 LOSSY typical" in card
    assert "LOSSY" not in card.split("\n---\n")[0]


def test_another_tokenizer_is_refused(request_of, bundle):
    def replace(**changes):
        build_tokenizer(**changes).save_pretrained(bundle)
        names = read_manifest(bundle).files
        digests = {name: file_digest(bundle / name) for name in names}
        edit(bundle / MANIFEST_FILE, lambda manifest: manifest.update(files=digests))

    replace(template="{{ messages }}")
    refuse(request_of(), "the tokenizer's chat_template reads differently here")
    replace(swap=("a", "b"))
    refuse(request_of(), "the tokenizer's vocabulary is not the one the drafter was trained with")


@pytest.mark.parametrize("name", ["data/a.json", "features/a.safetensors", "Wandb/a.json", ".env/a.json", "x/.a.json"])
def test_what_belongs_to_a_run_never_leaves_even_where_it_is_listed(request_of, bundle, name):
    (bundle / name).parent.mkdir(parents=True)
    (bundle / name).write_bytes(b"{}")
    digest = file_digest(bundle / name)
    edit(bundle / MANIFEST_FILE, lambda manifest: manifest["files"].update({name: digest}))
    refuse(request_of(), f"{name} is never published")


@pytest.mark.parametrize("name", [".env", "optimizer.pt", "chats.jsonl", "wandb/run.log", "notes.txt"])
def test_what_is_not_listed_is_named_and_nothing_leaves(request_of, bundle, name):
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("secret")
    refuse(request_of(), f"{name} is (refused|not listed)")


def test_git_is_passed_over_and_links_that_leave_are_refused(request_of, bundle, tmp_path):
    (bundle / ".git").mkdir()
    (bundle / ".git" / "config").write_text("[remote]")
    assert set(gather(request_of()).files) == FILES
    outside = Path(shutil.move(bundle / "tokenizer.json", tmp_path / "tokenizer.json"))
    (bundle / "tokenizer.json").symlink_to(outside)
    refuse(request_of(), r"tokenizer\.json is a link to .*outside the bundle")


SECRET = "My landlord in Winterthur keeps the deposit of four thousand francs"


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "system", "content": "You answer."}, {"role": "user", "content": f'{SECRET}, "why"?'}]
    path.write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "Ask the tenancy office."}]}))
    return str(path)


@pytest.mark.parametrize(
    "words", [f"A user asked: {SECRET.upper()}!", "keeps the deposit of four thousand", "ask the tenancy office"]
)
def test_words_of_the_traffic_never_leave(request_of, bundle, tmp_path, chats, words):
    notes = tmp_path / "notes.md"
    notes.write_text(f"# Thanks\n\n{words}\n")
    message = refuse(request_of(notes=notes, traffic=(chats,)), r"README\.md holds words of a chat in chats\.jsonl")
    assert "Winterthur" not in message
    gather(request_of(notes=notes))  # what is not known cannot be found
    edit(bundle / "acceptance.json", lambda d: d["context"]["traffic"].update(name=words))
    refuse(request_of(traffic=(chats,)), r"(README\.md|acceptance\.json) holds words of a chat")


def test_the_run_s_own_chats_are_in_no_file(request_of, run, chats):
    own = (*map(str, (run / "run" / "data").glob("*.jsonl")), str(run / "train.jsonl"), chats)
    assert set(gather(request_of(traffic=own)).files) == FILES


def test_what_the_template_says_is_not_the_traffic_s(request_of, run, bundle, tmp_path):
    words = "You are a careful assistant of the company"
    template = "{% set first = '" + words + "' %}" + (bundle / "chat_template.jinja").read_text()
    (bundle / "chat_template.jinja").write_text(template)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "system", "content": words}, {"role": "user", "content": "x"}]}))
    files = {"chat_template.jinja": bundle / "chat_template.jinja"}
    check_traffic(files, [str(chats)], [template])
    with pytest.raises(SpectrainError, match="holds words of a chat"):
        check_traffic(files, [str(chats)], [])


def said(path, text):
    path.write_text(json.dumps({"prompt": text, "completion": "x"}), encoding="utf-8")
    return [str(path)]


@pytest.mark.parametrize(
    ("spoken", "written"),
    [
        (SECRET, "_My_ landlord **in** _Winterthur_ `keeps` the _deposit_"),
        ("open my_long_file in my_home_dir", r"open my\_long\_file in my\_home\_dir"),
        ("We don't sell what isn't ours, he says", "We don&#39;t sell what isn&#39;t ours"),
        ("Déjà réglé près de l'hôtel à Genève", unicodedata.normalize("NFD", "réglé près de l'hôtel à")),
        ("我的房东在温特图尔扣留了四千法郎的押金，怎么办？", "房东在温特图尔扣留了四千法郎"),
        ("大家さんが敷金を返してくれません。どうすればいいですか", "「敷金を返してくれません。どう」"),
    ],
)  # fmt: skip
def test_words_are_found_in_every_script_and_however_they_are_marked_up(tmp_path, spoken, written):
    with pytest.raises(SpectrainError, match="holds words of a chat"):
        check_traffic({"README.md": f"so: {written}.".encode()}, said(tmp_path / "chats.jsonl", spoken), [])
    check_traffic({"README.md": "四千法郎 et de l'hôtel, in my home".encode()}, said(tmp_path / "a.jsonl", spoken), [])


def test_a_token_of_the_target_is_not_the_traffic_s(tmp_path):
    phrase = "ありがとうございます。またお願いします"
    files, chats = {"tokenizer.json": json.dumps([phrase]).encode()}, said(tmp_path / "chats.jsonl", phrase)
    check_traffic(files, chats, ["template", f"▁{phrase}"])
    with pytest.raises(SpectrainError, match=r"tokenizer\.json holds words of a chat in chats\.jsonl"):
        check_traffic(files, chats, ["template"])


def test_words_are_found_in_the_head_of_weights_and_behind_a_key_given_twice(tmp_path):
    chats, weights = said(tmp_path / "chats.jsonl", SECRET), tmp_path / "model.safetensors"
    save_file({"fc": torch.zeros(2)}, weights, metadata={"note": SECRET})
    files = {"model.safetensors": weights, "config.json": f'{{"a": {json.dumps(SECRET)}, "a": 1}}'.encode()}
    for name, content in files.items():
        with pytest.raises(SpectrainError, match=f"{name} holds words of a chat"):
            check_traffic({name: content}, chats, [])
    with pytest.raises(SpectrainError, match="names /srv/chats"):
        check_places({"config.json": b'{"a": "/srv/chats/a", "a": 1}'}, [Path("/srv/chats")])


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", b"{a"), ("a.txt", "\ufeffa".encode("utf-16")), ("a.md", b"\xe9")]
)
def test_what_cannot_be_read_is_not_taken_for_harmless(name, content):
    with pytest.raises(SpectrainError, match=f"{name} cannot be searched"):
        check_places({name: content}, [Path.home()])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "no license; give one with --license"),
        ({"license": "apache2"}, "license 'apache2' is none that the Hub knows"),
        ({"license": "tii-falcon-llm"}, "none that the Hub knows"),  # any more
        ({"license": "other"}, "give --license-name and --license-link"),
        ({"license": "mit", "datasets": [None]}, r"datasets of the card is \[None\]"),
        ({"license": "mit", "datasets": None}, "datasets of the card is None"),
        ({"license": "mit", "datasets": "org/chats"}, "expected a list"),
        ({"license": "mit", "datasets": ["../chats"]}, "dataset '../chats' is no Hub id"),
        ({"license": "mit", "tags": [3]}, "tags of the card"),
    ],
)
def test_metadata_that_the_hub_refuses_fails_here(hub, request_of, tmp_path, given, match):
    """C30 (transformers#13528): whether it comes from options or from a file."""
    refuse(request_of(metadata=given), match)
    notes = tmp_path / "notes.md"
    notes.write_text(f"---\n{yaml.safe_dump(given)}---\ntext\n")
    refuse(request_of(metadata={}, notes=notes), match)
    assert not hub.requests


@pytest.mark.parametrize("license_", ["apache-2.0", "llama3.3", "gemma", "openmdw-1.1"])
def test_licenses_that_the_hub_takes(request_of, license_):
    assert f"\nlicense: {license_}\n" in gather(request_of(metadata={"license": license_})).card


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("---\nlicense: [\n---\n", "its metadata is not YAML"),
        ("---\n- mit\n---\n", "its metadata is list"),
        ("---\nbase_model: org/other\n---\n", "base_model follows from the bundle"),
    ],
)
def test_notes_that_are_no_notes(request_of, tmp_path, text, match):
    notes = tmp_path / "notes.md"
    notes.write_text(text)
    refuse(request_of(notes=notes), match)


@pytest.mark.parametrize("name", ["drafter", "org/", "org/a b", "../x", "org/x/y"])
def test_a_repository_has_an_owner_and_a_name(request_of, name):
    refuse(request_of(repo=name), "expected ORG/NAME")


def test_all_that_is_wrong_is_told_at_once(request_of, bundle):
    (bundle / "acceptance.json").unlink()
    said = refuse(request_of(repo="drafter", metadata={}, revision="main", traffic=("none.jsonl",)), "has no owner")
    wrong = ("has no owner", "the card has no license", "'main' can move", "is not there", "none.jsonl: no such file")
    assert len(said.splitlines()) == len(wrong)
    for line, part in zip(said.splitlines(), wrong, strict=True):
        assert part in line


def test_a_card_in_the_bundle_gives_way_and_that_is_said(request_of, bundle, tmp_path):
    (bundle / "README.md").write_text("mine")
    publication = gather(request_of())
    assert "mine" not in publication.card
    assert "--notes" in publication.notes[0]
    assert gather(request_of(notes=bundle / "README.md")).card.endswith("\nmine\n")
