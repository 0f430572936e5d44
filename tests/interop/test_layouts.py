"""Checkpoints of others: every layout out and in without a changed byte; strict where one is silent or says twice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from families import TRAINABLE, named, small_config
from safetensors.torch import load_file, save_file

from spectrain import generate, interop, load_bundle
from spectrain.bundle import ADDED_LATER, Belonging, load_drafter, read_bundle, save_drafter
from spectrain.drafters import FAMILIES
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.exchange import export_checkpoint, import_checkpoint
from spectrain.interop.layouts import LAYOUTS, TargetParts, layout_named
from spectrain.manifest import MANIFEST_FILE
from spectrain.reload import answers
from spectrain.shapes import StaticTree

DRAFTERS = {
    "eagle3": (Eagle3Drafter, Eagle3Config(depths=2, draft_vocab_size=64)),
    "eagle3 other taps": (Eagle3Drafter, Eagle3Config(draft_vocab_size=64, tap_layers=(0, 3, 7))),
    "eagle3 own embedding": (Eagle3Drafter, Eagle3Config(draft_vocab_size=64, embedding="own")),
    "eagle": (EagleDrafter, EagleConfig()),
    "eagle own embedding": (EagleDrafter, EagleConfig(embedding="own")),
    "medusa shared": (MedusaDrafter, MedusaConfig(heads=2, layers=2)),
    "medusa own": (MedusaDrafter, MedusaConfig(heads=2, head="own")),
    "language_model": (LanguageModelDrafter, LanguageModelConfig(layers=(0, 7))),
}
# A family that is not among them comes as it is by default.
DRAFTERS |= {named(kind): (FAMILIES[kind], small_config(kind)) for kind in TRAINABLE
             if FAMILIES[kind] not in {kind for kind, _ in DRAFTERS.values()}}  # fmt: skip
WAYS = [
    (drafter, layout.NAME)
    for drafter, (kind, _) in DRAFTERS.items()
    for layout in LAYOUTS
    if layout.FORMAT in {format_.NAME for format_ in interop.FORMATS if format_.DRAFTER is kind}
    and (drafter, layout.NAME) != ("eagle3 own embedding", "sglang-eagle3")
]


@pytest.fixture(scope="module")
def bundles(chat_target, tmp_path_factory):
    """A bundle of each kind, its weights nothing that a fresh drafter would have."""
    folder = tmp_path_factory.mktemp("bundles")
    for name, (kind, config) in DRAFTERS.items():
        torch.manual_seed(0)
        drafter = kind.build(config, chat_target, torch.ones(chat_target.vocab_size))
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        save_drafter(folder / name, drafter, Belonging.to(chat_target))
    return folder


@pytest.fixture
def write(bundles, chat_target, tmp_path):
    """A function that exports a bundle; the folder, which may be written to."""

    def write(drafter, layout) -> Path:
        export_checkpoint(bundles / drafter, layout, tmp_path / "exported", chat_target, verify=False)
        return tmp_path / "exported"

    return write


@pytest.fixture
def read(chat_target, tmp_path):
    """A function that imports a checkpoint; its manifest and notes."""

    def read(folder, **changes):
        return import_checkpoint(folder, tmp_path / "imported", chat_target, changes=changes, verify=False)

    return read


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder, change, name="model.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


@pytest.mark.parametrize(("drafter", "layout"), WAYS)
def test_out_in_and_out_again_are_the_same_bytes_and_the_same_drafter(
    bundles, write, read, chat_target, tmp_path, drafter, layout
):
    exported = write(drafter, layout)
    manifest, notes = read(exported)
    assert manifest.imported_from.layout == layout
    assert any("which target" in note for note in notes)
    export_checkpoint(tmp_path / "imported", layout, tmp_path / "again", chat_target, verify=False)
    assert files(exported) == files(tmp_path / "again")
    assert {"config.json", "tokenizer.json"} < set(files(exported))
    assert MANIFEST_FILE not in files(exported)
    parts, laws = TargetParts.of(chat_target), []
    for folder in (bundles / drafter, tmp_path / "imported"):
        loaded, _, _ = load_drafter(folder, chat_target)
        laws.append(answers(loaded, parts))
    assert laws[0].keys() == laws[1].keys()
    assert all(torch.equal(laws[0][name], laws[1][name]) for name in laws[0])


def test_reports_and_pictures_stay_with_the_bundle(bundles, tmp_path, chat_target):
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles / "eagle3", bundle)
    for name in ADDED_LATER:
        (bundle / name).write_text("{}")
    export_checkpoint(bundle, "sglang-eagle3", tmp_path / "exported", chat_target, verify=False)
    assert not ADDED_LATER & {path.name for path in (tmp_path / "exported").iterdir()}


def test_half_precision_stays_as_it_is(bundles, read, chat_target, tmp_path, write):
    exported = write("eagle3", "sglang-eagle3")
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in
              load_file(exported / "model.safetensors").items()}  # fmt: skip
    save_file(halves, exported / "model.safetensors", metadata={"format": "pt"})
    change_config(exported, torch_dtype="bfloat16")
    manifest, _ = read(exported)
    assert manifest.storage_dtype == "bfloat16"
    export_checkpoint(tmp_path / "imported", "sglang-eagle3", tmp_path / "again", chat_target, verify=False)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_what_the_published_layouts_look_like(write, tmp_path, bundles, chat_target):
    config = json.loads((write("eagle3", "sglang-eagle3") / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & set(config)  # the default is not told
    names = set(load_file(tmp_path / "exported/model.safetensors"))
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "norm.weight", "d2t", "t2d"} < names
    export_checkpoint(bundles / "eagle", "eagle", tmp_path / "eagle", chat_target, verify=False)
    tensors = load_file(tmp_path / "eagle/model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], chat_target.embedding_weight)
    assert json.loads((tmp_path / "eagle/config.json").read_text())["bias"] is True
    assert not tensors["fc.bias"].any()
    export_checkpoint(bundles / "medusa shared", "medusa", tmp_path / "medusa", chat_target, verify=False)
    tensors = load_file(tmp_path / "medusa/medusa_lm_head.safetensors")
    ends = {"0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight"}
    assert set(tensors) == {f"{i}.{end}" for i in range(2) for end in ends}
    assert torch.equal(tensors["1.2.weight"], chat_target.head_weight)


def test_the_library_gets_the_embedding_that_it_would_take_for_zeros(write, bundles, chat_target):
    assert "embed_tokens.weight" not in load_file(bundles / "eagle3" / "model.safetensors")
    tensors = load_file(write("eagle3", "vllm-eagle3") / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], chat_target.embedding_weight)


def test_layer_ids_are_written_for_both_ways_to_count(write, read):
    exported = write("eagle3 other taps", "sglang-eagle3")
    config = json.loads((exported / "config.json").read_text())
    key = "eagle_aux_hidden_state_layer_ids"
    assert config[key] == [0, 3, 7]  # inputs
    assert config["eagle_config"][key] == [-1, 2, 6]  # outputs
    change_config(exported, **{key: ...})
    manifest, notes = read(exported)
    assert manifest.taps == (0, 3, 7)
    assert any("as SGLang reads it" in note for note in notes)
    change_config(exported, **{key: [-1, 2, 6]})
    with pytest.raises(SpectrainError, match=r"which are the inputs of \[0, 3, 7\].*--set eagle_config=null"):
        read(exported)
    manifest, _ = read(exported, eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert manifest.taps == (1, 2, 3)
    change_config(exported, eagle_config=..., **{key: [0, 3, 9]})
    with pytest.raises(SpectrainError, match="target with 8 layers"):
        read(exported)


def test_shallow_targets_have_no_default_taps(write, tiny_target, tmp_path):
    shallow = tiny_target("llama", layers=4, vocab=272, dtype=torch.float32)
    with pytest.raises(SpectrainError, match="a target of 4 layers has no default; give their inputs with --set"):
        import_checkpoint(write("eagle3", "sglang-eagle3"), tmp_path / "x", shallow, verify=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("drafter", "layout", "changes", "match"),
    [
        ("eagle3", "sglang-eagle3", {"attention_dropuot": 0}, "unknown key 'attention_dropuot'.*Did you mean"),
        ("eagle3", "sglang-eagle3", {"norm_before_residual": True}, "norm_before_residual is True; only false"),
        ("eagle3", "sglang-eagle3", {"rope_theta": 7.0}, "rope_parameters is .*rope_theta say"),
        ("eagle3", "sglang-eagle3", {"draft_vocab_size": ...}, "--set draft_vocab_size=ROWS"),
        ("eagle3", "sglang-eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2; only 1"),
        ("eagle3", "sglang-eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "not EAGLE-3"),
        ("eagle3", "vllm-eagle3", {"norm_before_residual": ...}, "--set norm_before_residual=false"),
        ("eagle3", "vllm-eagle3", {"something": 1}, "unknown key 'something'"),
        ("eagle", "eagle", {"bais": True}, "unknown key 'bais'.*Did you mean 'bias'"),
        ("eagle", "eagle", {"bias": False}, "unknown tensor fc.bias"),
        ("medusa own", "medusa", {"medusa_num_heads": 3}, r"tensor 2\.0\.linear\.weight is missing"),
        ("medusa own", "medusa", {"medusa_num_head": 3}, "unknown key 'medusa_num_head'"),
        ("language_model", "transformers", {"hidden_sizes": 3}, "unknown key 'hidden_sizes'"),
    ],
)
def test_wrong_and_silent_keys_are_named(write, read, tmp_path, drafter, layout, changes, match):
    exported = write(drafter, layout)
    change_config(exported, **changes)
    with pytest.raises(SpectrainError, match=match):
        read(exported)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("drafter", "layout"), [("eagle3", "sglang-eagle3"), ("eagle3", "vllm-eagle3"), ("eagle", "eagle"),
                            ("eagle", "vllm-eagle")]
)  # fmt: skip
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": {}},
        {"hidden_size": "8"},
        {"head_dim": 1.5},
        {"vocab_size": [272]},
        {"max_position_embeddings": True},
        {"hidden_act": "gleu"},
        {"hidden_act": 3},
        {"rms_norm_eps": "small"},
        {"rope_parameters": [1]},
        {"rope_parameters": []},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "other"}},
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_settings_of_a_layer_that_are_none_are_named(write, read, drafter, layout, changes):
    """Each is an error of the checkpoint, with its key, before a layer is made of it."""
    exported, (key,) = write(drafter, layout), changes
    inner = json.loads((exported / "config.json").read_text()).get("transformer_layer_config")
    old = {} if inner else {"rope_theta": ..., "rope_scaling": ...}
    change_config(exported, **({"transformer_layer_config": {**inner, **changes}} if inner else {**old, **changes}))
    with pytest.raises(SpectrainError, match=rf"exported.*{key}"):
        read(exported)


@pytest.mark.parametrize("found", [3, None, ["x"]])
@pytest.mark.parametrize("key", ["transformer_layer_config", "speculators_config", "draft_vocab_size"])
def test_parts_of_a_configuration_that_are_none(write, read, key, found):
    exported = write("eagle3", "vllm-eagle3")
    change_config(exported, **{key: found if key != "draft_vocab_size" or found != 3 else "3"})
    with pytest.raises(SpectrainError, match=f"config.json.*({key}|malformed)"):
        read(exported)


@pytest.mark.parametrize(
    ("drafter", "layout", "file", "name"),
    [
        ("eagle3", "sglang-eagle3", "model.safetensors", "midlayer.mlp.up_proj.weight"),
        ("medusa own", "medusa", "medusa_lm_head.safetensors", "1.0.linear.bias"),
        ("language_model", "transformers", "model.safetensors", "model.layers.1.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_named(write, read, drafter, layout, file, name, value):
    """As a training that diverged leaves them: the drafter would be no drafter."""
    exported = write(drafter, layout)
    change_tensors(exported, lambda tensors: tensors[name].view(-1)[0].fill_(float(value)), file)
    with pytest.raises(SpectrainError, match=f"tensor {name} holds values that are not finite"):
        read(exported)


def test_what_is_silent_can_be_said(write, read):
    exported = write("eagle3", "vllm-eagle3")
    change_config(exported, norm_before_residual=...)
    assert read(exported, norm_before_residual=False)[0].imported_from.layout == "vllm-eagle3"


def test_what_the_speculators_library_saves(write, read, chat_target, tmp_path):
    """Its own class's name, the target's config.json as the layer's, without what is transformers' default, and a copy
    of the target's embedding."""
    exported = write("eagle3", "vllm-eagle3")
    layer = json.loads((exported / "config.json").read_text())["transformer_layer_config"]
    less = {key: value for key, value in layer.items() if key not in {"hidden_act", "mlp_bias", "attention_bias"}}
    change_config(exported, architectures=["Eagle3DraftModel"], auto_map={"": "config.Eagle3SpeculatorConfig"},
                  target_hidden_size=None,
                  transformer_layer_config={**less, "use_cache": True, "unk_token_id": 0})  # fmt: skip
    embedding = {"embed_tokens.weight": chat_target.embedding_weight.clone()}
    change_tensors(exported, lambda tensors: tensors.update(embedding))
    read(exported)
    contents = read_bundle(tmp_path / "imported")
    assert contents.config["architectures"] == ["Eagle3Speculator"]
    assert contents.config["transformer_layer_config"] == layer
    assert contents.config["target_hidden_size"] == layer["hidden_size"]
    assert "embed_tokens.weight" not in contents.tensors
    change_tensors(exported, lambda tensors: tensors["embed_tokens.weight"].mul_(2))
    manifest, notes = read(exported)
    assert manifest.drafter["embedding"] == "own"
    assert any("not this target's either" in note for note in notes)


def refusal(read, folder):
    """Why a checkpoint is not imported; None: it is."""
    try:
        read(folder)
    except SpectrainError as error:
        return str(error)


def own_matrix(tensors, target):
    """The name of a weight that is no copy of the target's embedding or head, which may be left out or be another's."""
    borrowed = {tuple(target.embedding_weight.shape), tuple(target.head_weight.shape)}
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2 and tuple(tensor.shape) not in borrowed]
    assert names, "the checkpoint has no matrix of its own to leave out"
    return max(names)


@pytest.mark.parametrize(("drafter", "layout"), WAYS)
def test_missing_extra_and_misshapen_tensors_are_named(write, read, chat_target, drafter, layout):
    exported, file = write(drafter, layout), layout_named(layout).WEIGHTS
    good = load_file(exported / file)
    name = own_matrix(good, chat_target)
    for change, what, match in (
        (lambda tensors: tensors.pop(name), f"without {name}", re.escape(name)),
        (lambda tensors: tensors.update({f"{name}s": torch.zeros(2)}), f"with {name}s", re.escape(f"{name}s")),
        (lambda tensors: tensors.update({"extra": torch.zeros(2)}), "with a tensor more", "extra"),
        (lambda tensors: tensors.update({name: torch.zeros(2, 3)}), f"{name} of another shape",
         rf"{re.escape(name)} is \[2, 3\]"),
    ):  # fmt: skip
        save_file(good, exported / file)
        change_tensors(exported, change, file)
        message = refusal(read, exported)
        assert message, f"{layout} {what} was imported: to_native has to refuse what is missing, extra or misshapen"
        assert re.search(match, message), f"{layout} {what}: the message has to name the tensor: {message}"


def test_a_whole_draft_vocabulary_needs_no_maps(write, read, chat_target, tmp_path):
    """Its library writes none where the two vocabularies are one."""
    exported = write("eagle3", "vllm-eagle3")
    layer = json.loads((exported / "config.json").read_text())["transformer_layer_config"]
    rows = layer["vocab_size"]

    def widen(tensors):
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(rows, layer["hidden_size"])

    change_tensors(exported, widen)
    with pytest.raises(SpectrainError, match="d2t"):
        read(exported)
    change_config(exported, draft_vocab_size=rows)
    read(exported)
    drafter, _, _ = load_drafter(tmp_path / "imported", chat_target)
    assert drafter.vocabulary()[1].tolist() == list(range(rows))


@pytest.mark.parametrize("key", ["draft_vocab_size", "target_hidden_size"])
def test_sizes_are_whole_numbers(write, read, key):
    exported = write("eagle3", "vllm-eagle3")
    change_config(exported, **{key: "64"})
    with pytest.raises(SpectrainError, match=f"{key} is '64'; expected a whole number"):
        read(exported)


@pytest.mark.parametrize("layout", ["sglang-eagle3", "vllm-eagle3"])
def test_taps_are_where_the_convention_says_after_an_import_too(write, read, chat_target, tmp_path, layout):
    """CASES C10: tap k is the stream that enters layer k; a bundle that does not say where does not load."""
    manifest, _ = read(write("eagle3 other taps", layout))
    assert manifest.taps == (0, 3, 7)
    drafter, _, _ = load_drafter(tmp_path / "imported", chat_target)
    ids = torch.tensor([[5, 6, 7, 8]])
    streams = chat_target.model(ids, output_hidden_states=True).hidden_states
    chat_target.tap(drafter.tap_layers)
    assert torch.equal(chat_target.forward(ids).taps_BTF, torch.cat([streams[k] for k in (0, 3, 7)], dim=-1))
    path = tmp_path / "imported" / MANIFEST_FILE
    whole = json.loads(path.read_text())
    for silent, match in (("taps", "belong together"), ("tap_convention", "belong together")):
        path.write_text(json.dumps({**whole, silent: None}))
        with pytest.raises(SpectrainError, match=match):
            read_bundle(tmp_path / "imported")


@pytest.mark.parametrize(
    ("drafter", "layout", "paths", "match"),
    [
        ("medusa own", "medusa", ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)), r"tree path \[0, 0, 0, 0\] has depth 4"),
        ("eagle3", "sglang-eagle3", tuple((rank,) for rank in range(65)), r"tree path \[64\] is beyond the 64 tokens"),
    ],
)
def test_trees_that_an_imported_drafter_cannot_fill_are_named(
    write, read, chat_target, tmp_path, drafter, layout, paths, match
):
    """CASES C20: its heads and its head's columns are those of the checkpoint."""
    read(write(drafter, layout))
    speculator = load_bundle(tmp_path / "imported", target=chat_target)
    with pytest.raises(SpectrainError, match=match):
        generate(speculator, [5, 6, 7], shape=StaticTree(paths), max_new_tokens=4)


def test_offsets_are_offsets(write, read):
    """CASES C13: ids in the place of offsets pick wrong rows of the head."""
    exported = write("eagle3", "sglang-eagle3")
    change_tensors(exported, lambda tensors: tensors["d2t"].add_(torch.arange(64)))
    with pytest.raises(SpectrainError, match=r"exported: t2d\[1\] is True, but d2t says False"):
        read(exported)


def test_pickles_are_read_for_their_tensors_alone(write, read, chat_target, tmp_path):
    exported = write("eagle3", "sglang-eagle3")
    tensors = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    torch.save(tensors, exported / "pytorch_model.bin")
    manifest, _ = read(exported)
    assert manifest.storage_dtype == "float32"
    torch.save({**tensors, "more": Path("x")}, exported / "pytorch_model.bin")
    with pytest.raises(SpectrainError, match=r"pytorch_model\.bin holds more than tensors"):
        read(exported)
    torch.save({**tensors, "step": 3}, exported / "pytorch_model.bin")
    with pytest.raises(SpectrainError, match="step is a int, expected a tensor"):
        read(exported)
    (exported / "pytorch_model.bin").unlink()
    with pytest.raises(SpectrainError, match=r"has none of model\.safetensors"):
        read(exported)


def test_a_bias_that_does_something_is_refused(write, read):
    exported = write("eagle", "eagle")
    change_tensors(exported, lambda tensors: tensors["fc.bias"].add_(1e-3))
    with pytest.raises(SpectrainError, match=r"fc\.bias is not zero"):
        read(exported)
    change_tensors(exported, lambda tensors: tensors.pop("fc.bias"))
    change_config(exported, bias=...)
    with pytest.raises(SpectrainError, match=r"no key bias, which means true; if .* --set bias=false"):
        read(exported)
    assert read(exported, bias=False)[0].imported_from.layout == "eagle"


def test_an_embedding_that_is_not_the_targets_is_the_drafters_own(write, read):
    exported = write("eagle", "eagle")
    change_tensors(exported, lambda tensors: tensors["embed_tokens.weight"].add_(1e-3))
    assert read(exported)[0].drafter["embedding"] == "own"


def test_formats_refuse_what_they_cannot_hold(bundles, chat_target, tmp_path):
    def refuse(drafter, layout, match):
        with pytest.raises(SpectrainError, match=match):
            export_checkpoint(bundles / drafter, layout, tmp_path / "x", chat_target, verify=False)
        assert not (tmp_path / "x").exists()

    refuse("eagle3 own embedding", "sglang-eagle3", "embedding of its own, which sglang-eagle3 cannot hold")
    refuse("eagle3", "medusa", "medusa holds Medusa heads.* of type 'eagle3'; it can be written as sglang-eagle3")
    refuse("eagle3", "gguf", "there is no format 'gguf'; there are sglang-eagle3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    with pytest.raises(SpectrainError, match="is not empty"):
        export_checkpoint(bundles / "eagle", "eagle", tmp_path / "full", chat_target, verify=False)


def test_another_tokenizer_is_refused_and_none_is_noted(write, read, make_tokenizer, tmp_path):
    exported = write("eagle3", "sglang-eagle3")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (exported / name).unlink()
    manifest, notes = read(exported)
    assert [note for note in notes if "only the size" in note]
    assert len(manifest.imported_from.not_checked) == 2
    told = read_bundle(tmp_path / "imported").notes
    assert told == tuple(f"imported from sglang-eagle3: {what}" for what in manifest.imported_from.not_checked)
    make_tokenizer(swap=("a", "b")).save_pretrained(exported)
    with pytest.raises(SpectrainError, match=r"does not fit .* id"):
        read(exported)


def test_models_as_older_versions_wrote_them(write, read, chat_target, tmp_path):
    """Tied heads stored twice, and the keys of transformers 4 (CASES C26, C27)."""
    exported = write("language_model", "transformers")
    rope = json.loads((exported / "config.json").read_text())["rope_parameters"]
    change_config(exported, rope_parameters=..., dtype=..., torch_dtype="float32", rope_theta=rope["rope_theta"],
                  tie_word_embeddings=True)  # fmt: skip
    change_tensors(
        exported, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    read(exported)
    drafter, contents, _ = load_drafter(tmp_path / "imported", chat_target)
    assert "lm_head.weight" not in contents.tensors
    assert contents.config["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    head = drafter.model.get_output_embeddings().weight
    assert head.data_ptr() == drafter.model.get_input_embeddings().weight.data_ptr()
    assert torch.equal(head, load_file(exported / "model.safetensors")["model.embed_tokens.weight"])
    change_tensors(exported, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(SpectrainError, match=r"unknown tensor lm_head\.weight"):
        read(exported)


def test_every_drafter_of_a_format_and_every_layout_is_run_here():
    """Else what was added would be exported and imported by nobody."""
    left_out = [f.DRAFTER.__name__ for f in interop.FORMATS if f.DRAFTER not in {kind for kind, _ in DRAFTERS.values()}]
    assert not left_out, f"DRAFTERS has none of {left_out}"
    left_out = {layout.NAME for layout in LAYOUTS} - {layout for _, layout in WAYS}
    assert not left_out, f"no drafter of DRAFTERS is written in {left_out}"


def test_a_family_without_layouts_says_so(bundles, chat_target, tmp_path, monkeypatch):
    monkeypatch.setattr("spectrain.exchange.layouts_of", lambda format_name: ())
    with pytest.raises(SpectrainError, match="a drafter of type 'eagle3'; there is no format of others for it"):
        export_checkpoint(bundles / "eagle3", "medusa", tmp_path / "x", chat_target, verify=False)
