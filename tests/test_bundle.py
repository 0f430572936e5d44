from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import configuration_utils

from spectrain import bundle, interop
from spectrain.bundle import (
    Belonging,
    Trained,
    check_pairing,
    load_drafter,
    read_bundle,
    resolve_bundle,
    save_bundle,
    save_drafter,
)
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.errors import SpectrainError
from spectrain.files import file_digest, json_digest
from spectrain.identity import TargetIdentity, tokenizer_identity
from spectrain.interop import speculators_eagle3
from spectrain.manifest import (
    MANIFEST_FILE,
    chose_the_step,
    public_target,
    publishable,
    read_manifest,
    target_of,
    target_record,
    template_kwargs,
    with_target,
)

TARGET = TargetIdentity("LlamaForCausalLM", "c" * 64, "w" * 64, "org/target", "abc")


@pytest.fixture
def save(make_eagle3, make_tokenizer):
    def save(folder, *, target=TARGET, tokenizer=None, eos_ids=(), eagle3=None, **changes):
        settings, tensors = eagle3 or make_eagle3()
        config, tensors = speculators_eagle3.to_checkpoint(settings, tensors)
        return save_bundle(
            folder,
            config=config,
            tensors={**tensors, **changes.pop("tensors", {})},
            drafter={"type": "eagle3", "depths": 3},
            belongs=Belonging(target, tokenizer or make_tokenizer(), eos_ids),
            trained=Trained({"temperature": 0.0}, {"optim": {"lr": 1e-4}}, {"train": "d" * 64}),
            **changes,
        )

    return save


@pytest.fixture
def folder(save, tmp_path):
    save(tmp_path / "bundle")
    return tmp_path / "bundle"


def edit_manifest(folder, change):
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refuse(folder, match):
    with pytest.raises(SpectrainError, match=match):
        read_bundle(folder)


def test_what_is_saved_is_read_back(folder, make_eagle3, make_tokenizer):
    settings, tensors = make_eagle3()
    contents = read_bundle(folder)
    assert contents.settings == settings
    assert set(contents.tensors) == set(tensors)
    assert all(torch.equal(contents.tensors[name], tensors[name]) for name in tensors)
    manifest = contents.manifest
    assert manifest.target.identity == TARGET
    assert (manifest.taps, manifest.tap_convention) == ((2, 4, 5), speculators_eagle3.TAP_CONVENTION)
    assert manifest.storage_dtype == "float32"
    assert manifest.drafter == {"type": "eagle3", "depths": 3}
    assert manifest.recipe == {"optim": {"lr": 1e-4}}
    assert {"torch", "transformers"} <= set(manifest.versions)
    files = {path.name for path in folder.iterdir()}
    assert files - {MANIFEST_FILE} == set(manifest.files)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert manifest.files["config.json"] == file_digest(folder / "config.json")
    identity = tokenizer_identity(make_tokenizer())
    assert manifest.tokenizer.decode_digest == identity.decode_digest
    assert contents.notes == ()


def test_a_drafter_comes_back_bound_to_its_target_and_to_no_other(chat_target, tmp_path):
    drafter = EagleDrafter.build(EagleConfig(depths=2), chat_target, None)
    trained = Trained({"temperature": 0.0}, {"data": {"chat_template_kwargs": {"x": 1}}})
    save_drafter(tmp_path / "b", drafter, Belonging.to(chat_target), trained)
    loaded, contents, notes = load_drafter(tmp_path / "b", chat_target)
    assert (notes, loaded.training) == ((), False)
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in drafter.state_dict().items()
    }
    assert loaded.head().data_ptr() == chat_target.head_weight.data_ptr()
    manifest = contents.manifest
    assert template_kwargs(manifest) == {"x": 1}
    assert target_record(tmp_path / "b", manifest) == manifest.target
    edit_manifest(tmp_path / "b", lambda manifest: manifest["target"].update(weights_digest="0" * 64))
    with pytest.raises(SpectrainError, match=r"does not fit this target .*weights_digest"):
        load_drafter(tmp_path / "b", chat_target)


def test_a_target_in_the_bundle_has_an_origin_and_has_to_be_whole(save, tmp_path):
    def write_more(folder):
        (folder / "target").mkdir()
        (folder / "target" / "config.json").write_text("{}")

    origin = TargetIdentity("LlamaForCausalLM", "c" * 64, "o" * 64, "org/origin", "1")
    folder = tmp_path / "own"
    save(folder, target=origin)
    manifest = read_manifest(folder)
    assert target_of(folder, manifest) == "org/origin"
    assert public_target(manifest) == manifest.target
    assert template_kwargs(manifest) == {}
    write_more(folder)
    digest = file_digest(folder / "target" / "config.json")
    edit_manifest(folder, lambda manifest: manifest["files"].update({"target/config.json": digest}))
    refuse(folder, "derived_from and the files of target/ belong together")
    edit_manifest(
        folder, lambda manifest: manifest.update(derived_from={**manifest["target"], "weights_digest": "n" * 64})
    )
    manifest = read_manifest(folder)
    assert target_of(folder, manifest) == target_record(folder, manifest).name == str(folder / "target")
    assert public_target(manifest) == manifest.derived_from != manifest.target
    (folder / "target" / "config.json").unlink()
    with pytest.raises(
        SpectrainError, match=r"is incomplete: target/config\.json, a file of its own target, is missing"
    ):
        target_of(folder, manifest)


def test_half_precision_is_recorded(save, make_eagle3, tmp_path):
    assert save(tmp_path / "b", eagle3=make_eagle3(dtype=torch.bfloat16)).storage_dtype == "bfloat16"
    assert read_bundle(tmp_path / "b").tensors["fc.weight"].dtype == torch.bfloat16


def test_card_and_report_may_be_added_but_nothing_else(folder):
    (folder / "README.md").write_text("card")
    (folder / "acceptance.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").write_text("left by a download")
    read_bundle(folder)
    (folder / "notes.txt").write_text("x")
    refuse(folder, r"notes\.txt is not listed in spectrain\.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "a.pkl", "modeling.py", "sub/x.ckpt"])
def test_pickles_and_code_are_refused_even_when_listed(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    refuse(folder, f"{name} is refused: a bundle holds no pickles, code")
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: file_digest(folder / name)}))
    refuse(folder, f"{name} is refused: a bundle holds no pickles, code")


def test_every_missing_or_changed_file_is_named(save, tmp_path):
    names = sorted(save(tmp_path / "good").files)
    for name in names:
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "good", broken)
        with (broken / name).open("ab") as file:
            file.write(b" ")
        refuse(broken, f"{name} was changed after it was written: SHA-256")
        (broken / name).unlink()
        refuse(broken, f"{name} is missing; spectrain.json lists it")
        shutil.rmtree(broken)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", "a\\..\\b.json"])
def test_paths_that_escape_are_refused(folder, name):
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: "0" * 64}))
    refuse(folder, "lies outside the bundle")


def test_links_that_escape_are_refused_and_those_of_the_hub_cache_are_not(folder, tmp_path):
    cache = tmp_path / "models--org--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copy(file, cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert read_bundle(snapshot).manifest == read_manifest(folder)
    outside = tmp_path / "outside.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)
    refuse(folder, r"model\.safetensors is a link to .*outside the bundle")
    (folder / "model.safetensors").unlink()
    shutil.move(outside, folder / "model.safetensors")
    (folder / "extra.json").symlink_to(tmp_path, target_is_directory=True)
    refuse(folder, r"extra\.json is a link to")


def rewrite_weights(folder, change):
    """Change the weights and make the manifest's hash agree, so that only deeper checks can object."""
    tensors = interop.read_tensors(folder)
    change(tensors)
    interop.write_checkpoint(folder, interop.read_config(folder), tensors)
    hashes = {name: file_digest(folder / name) for name in ("config.json", "model.safetensors")}
    edit_manifest(folder, lambda manifest: manifest["files"].update(hashes))


def test_a_tensor_removed_is_named(folder):
    rewrite_weights(folder, lambda tensors: tensors.pop("norm.weight"))
    refuse(folder, r"tensor norm\.weight is missing")


def test_another_draft_vocabulary_is_refused(folder):
    def change(tensors):
        tensors["d2t"][-1] += 1
        tensors["t2d"][93], tensors["t2d"][94] = False, True

    rewrite_weights(folder, change)
    refuse(folder, "draft_vocabulary_digest is")


def test_unknown_and_missing_keys_are_errors(folder, save, tmp_path):
    edit_manifest(folder, lambda manifest: manifest.update({"tapz": [1]}))
    refuse(folder, r"spectrain\.json: tapz: Extra inputs are not permitted")
    for key in json.loads((folder / MANIFEST_FILE).read_text()):
        if key not in {"tapz", "format_version", "derived_from", "imported_from"}:
            save(tmp_path / "b")
            edit_manifest(tmp_path / "b", lambda manifest, key=key: manifest.pop(key))
            refuse(tmp_path / "b", f"{key}: Field required")
    save(tmp_path / "b")
    edit_manifest(tmp_path / "b", lambda manifest: manifest["target"].update({"branch": "main"}))
    refuse(tmp_path / "b", r"target\.branch: Extra inputs")
    (tmp_path / "b" / MANIFEST_FILE).write_text("{")
    refuse(tmp_path / "b", r"spectrain\.json is not JSON")
    (tmp_path / "b" / MANIFEST_FILE).unlink()
    refuse(tmp_path / "b", r"is no bundle: it has no spectrain\.json")


def test_an_unknown_architecture_key_is_an_error(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["logit_scale"] = 2.0
    path.write_text(json.dumps(config))
    edit_manifest(folder, lambda manifest: manifest["files"].update({"config.json": file_digest(path)}))
    refuse(folder, "unknown key 'logit_scale'")


def test_taps_and_convention_are_required_and_must_agree(folder):
    edit_manifest(folder, lambda manifest: manifest.update(taps=None))
    refuse(folder, "taps and tap_convention belong together")
    edit_manifest(folder, lambda manifest: manifest.update(tap_convention=None))
    refuse(folder, r"taps is \(2, 4, 5\) in the checkpoint, None")
    edit_manifest(folder, lambda manifest: manifest.update(taps=[2, 4, 5], tap_convention="layer output"))
    refuse(folder, "tap_convention is 'layer input")
    edit_manifest(folder, lambda manifest: manifest.update(format_version=2))
    refuse(folder, "format_version: Input should be 1")


def replace_tokenizer(folder, tokenizer):
    tokenizer.save_pretrained(folder)
    names = [path.name for path in folder.iterdir() if path.name != MANIFEST_FILE]
    hashes = {name: file_digest(folder / name) for name in names}
    edit_manifest(folder, lambda manifest: manifest.update(files=hashes))


@pytest.mark.parametrize("kind", ["medusa", None, "llama"])
def test_a_tokenizer_is_read_without_a_word_on_the_config_beside_it(make_tokenizer, tmp_path, kind, monkeypatch):
    """Servers have kinds of config that transformers knows nothing of."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} if kind else {"speculators_model_type": "x"}))
    said = []
    monkeypatch.setattr(configuration_utils.logger, "warning", lambda text, *_: said.append(text))
    found = bundle.load_tokenizer(tmp_path)
    assert not said
    assert type(found) is type(tokenizer)
    assert tokenizer_identity(found).digests == tokenizer_identity(tokenizer).digests


def test_swapped_ids_are_refused(folder, make_tokenizer):
    replace_tokenizer(folder, make_tokenizer(swap=("a", "b")))
    refuse(folder, "the tokenizer's vocabulary is not the one the drafter was trained with")


def test_a_traffic_difference_is_noted(folder, make_tokenizer):
    replace_tokenizer(folder, make_tokenizer(template="other"))
    (note,) = read_bundle(folder).notes
    assert note.startswith("the tokenizer's chat_template reads differently here")


def test_pairing(folder, make_tokenizer):
    contents = read_bundle(folder)
    same = tokenizer_identity(make_tokenizer())
    assert check_pairing(contents, same, TARGET) == ()
    (note,) = check_pairing(contents, tokenizer_identity(make_tokenizer(template="{{ messages }}")), TARGET)
    assert note.startswith("chat_template: ")
    assert "harmless" in note
    swapped = tokenizer_identity(make_tokenizer(swap=("a", "b")))
    with pytest.raises(SpectrainError, match=r"does not fit this target .*token 'a': id 64 against 65"):
        check_pairing(contents, swapped)
    other = TargetIdentity("LlamaForCausalLM", "c" * 64, "x" * 64, "org/target", "abc")
    with pytest.raises(SpectrainError, match="target weights_digest: www"):
        check_pairing(contents, same, other)


def test_the_eos_list_is_part_of_the_identity(save, make_tokenizer, tmp_path):
    save(tmp_path / "b", eos_ids=(263,))
    contents = read_bundle(tmp_path / "b")
    assert contents.manifest.tokenizer.eos_ids == (263,)
    check_pairing(contents, tokenizer_identity(make_tokenizer(), (263,)))
    with pytest.raises(SpectrainError, match="special_ids: eos"):
        check_pairing(contents, tokenizer_identity(make_tokenizer()))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["save_file", "write_json"])
def test_an_interrupted_save_leaves_the_old_bundle_or_nothing(save, tmp_path, monkeypatch, error, place):
    save(tmp_path / "old")
    before = {path.name: file_digest(path) for path in (tmp_path / "old").iterdir()}

    def fail(value, path, **_):
        (path if place == "save_file" else value).write_bytes(b"half")
        raise error

    monkeypatch.setattr(interop._checkpoint if place == "save_file" else bundle, place, fail)
    for name in ("old", "new"):
        with pytest.raises(type(error)):
            save(tmp_path / name, target=TargetIdentity("Other", "c", "w"))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert {path.name: file_digest(path) for path in (tmp_path / "old").iterdir()} == before
    monkeypatch.undo()
    assert read_bundle(tmp_path / "old").manifest.target.architecture == "LlamaForCausalLM"


def test_bad_input_writes_nothing(save, tmp_path):
    with pytest.raises(SpectrainError, match=r"tensor norm\.weight is \[9\]"):
        save(tmp_path / "b", tensors={"norm.weight": torch.ones(9)})
    assert not list(tmp_path.iterdir())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    with pytest.raises(SpectrainError, match="exists and is no bundle"):
        save(tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "x"
    with pytest.raises(SpectrainError, match="exists and is no bundle"):
        save(tmp_path / "home" / "thesis.txt")


def test_a_tokenizer_that_changes_when_saved_is_refused(save, make_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "load_tokenizer", lambda folder: make_tokenizer(drop_merge=True))
    with pytest.raises(SpectrainError, match="the tokenizer changes when saved: model"):
        save(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_a_local_target_cannot_be_published_until_it_is_named(save, tmp_path):
    for name in (str(tmp_path), "./out", "~/models/x", "a/b/c", None):
        manifest = save(tmp_path / "b", target=TargetIdentity("L", "c", "w", name))
        read_bundle(tmp_path / "b")
        assert "not a Hub id" in str(publishable(manifest))
    manifest = save(tmp_path / "b", target=TargetIdentity("L", "c", "w", "org/target"))
    assert "has no revision" in str(publishable(manifest))
    named = with_target(manifest, "org/target", "abc")
    assert publishable(named) is None
    assert (named.target.revision, named.target.identity.digest) == ("abc", manifest.target.identity.digest)


def test_a_folder_that_looks_like_a_hub_id_is_local(save, tmp_path, monkeypatch):
    manifest = save(tmp_path / "b")
    assert publishable(manifest) is None
    (tmp_path / "org" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "not a Hub id" in str(publishable(manifest))


def test_bundles_are_found_in_a_folder_or_on_the_hub(folder, monkeypatch):
    assert resolve_bundle(folder) == folder
    with pytest.raises(SpectrainError, match="is a local folder: it has no revision"):
        resolve_bundle(folder, "main")
    calls = {}

    def download(name, **options):
        calls.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(bundle, "snapshot_download", download)
    assert resolve_bundle("org/name", "abc") == folder
    assert (calls["name"], calls["revision"]) == ("org/name", "abc")
    assert "*.safetensors" in calls["allow_patterns"]
    assert not any(".bin" in pattern or ".py" in pattern for pattern in calls["allow_patterns"])

    def offline(name, **_):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(bundle, "snapshot_download", offline)
    with pytest.raises(SpectrainError, match=r"at revision abc: .*LocalEntryNotFoundError: offline"):
        resolve_bundle("org/name", "abc")


def test_names_that_are_neither_are_refused():
    with pytest.raises(SpectrainError, match="neither a folder nor a Hub id"):
        resolve_bundle("./not/a/folder")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("type", "medusa", "drafter.type: Input should be 'eagle3'"), ("depths", "x", "drafter.depths: Input should be")],
)
def test_settings_of_a_drafter_that_do_not_fit_are_named(folder, key, value, named):
    """What the manifest says of its drafter is read when the drafter is made."""
    edit_manifest(folder, lambda manifest: manifest["drafter"].update({key: value}))
    contents = read_bundle(folder)
    with pytest.raises(SpectrainError, match=f"spectrain.json: {named}"):
        speculators_eagle3.to_drafter(contents.settings, contents.tensors, contents.manifest.drafter)


def test_a_manifest_of_an_older_version_knows_fewer_components(folder):
    """What was not recorded is not held against the tokenizer; what was, is."""

    def record(change):
        def edit(manifest):
            change(manifest["tokenizer"]["components"])
            manifest["tokenizer"]["traffic_digest"] = json_digest(manifest["tokenizer"]["components"])

        edit_manifest(folder, edit)

    record(lambda components: [components.pop(name) for name in ("texts", "frame")])
    assert read_bundle(folder).notes == ()
    record(lambda components: components.update(decoder="0" * 64))
    refuse(folder, "the tokenizer's decoder is not the one")


def test_components_taken_out_of_a_manifest_are_missed(folder):
    edit_manifest(folder, lambda manifest: manifest["tokenizer"].update(components={}))
    refuse(folder, "tokenizer: .*do not add up to traffic_digest")


@pytest.mark.parametrize("section", ["target", "data", "training"])
def test_a_recipe_has_sections(folder, section):
    edit_manifest(folder, lambda manifest: manifest["recipe"].update({section: "x"}))
    refuse(folder, f"recipe.{section} is 'x', expected an object")


@pytest.mark.parametrize(
    ("training", "digests", "chose"),
    [
        ({"select": "best", "patience": None}, {"heldout": "h"}, True),
        ({"select": "best", "patience": None}, {"heldout": "anew", "heldout_asked": "h"}, True),
        ({"select": "last", "patience": 3}, {"heldout": "h"}, True),  # they chose where it ended
        ({"select": "last", "patience": None}, {"heldout": "h"}, False),
        ({"select": "best", "patience": None}, {"heldout": "other", "train": "h"}, False),
        ({"select": "best", "patience": None}, {}, False),
        ({"select": "best", "patience": None, "anew": True}, {"heldout": "h"}, True),
        ({"select": "best", "patience": None, "anew": True}, {"heldout": "anew"}, None),  # an earlier version's
        ({"select": "last", "patience": None, "anew": True}, {"heldout": "anew"}, False),
        ({"select": "best", "patience": None, "anew": True}, {"heldout": "anew", "heldout_asked": "x"}, False),
        (None, {"heldout": "h"}, False),
    ],
)
def test_a_manifest_tells_which_conversations_chose_the_step(folder, training, digests, chose):
    recipe = {} if training is None else {"training": training}
    recipe |= {"regenerate": {"max_new_tokens": 4}} if training and training.pop("anew", False) else {}
    edit_manifest(folder, lambda manifest: manifest.update(recipe=recipe, data_digests=digests))
    assert chose_the_step([read_manifest(folder)], "h") is chose


def test_one_of_several_that_chose_with_them_is_enough_and_one_that_cannot_tell_leaves_it_open(folder):
    def manifest(digests, regenerate=None):
        recipe = {"training": {"select": "best"}, "regenerate": regenerate}
        return read_manifest(folder).model_copy(update={"recipe": recipe, "data_digests": digests})

    chose, other, unsaid = manifest({"heldout": "h"}), manifest({"heldout": "x"}), manifest({"heldout": "x"}, {"k": 1})
    assert chose_the_step([unsaid, chose, other], "h") is True
    assert chose_the_step([other, unsaid], "h") is None
    assert chose_the_step([other], "h") is False
