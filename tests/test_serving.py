"""The commands that serve a bundle: words that a shell takes as they are meant, with the k of the report."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from simulator import DRAFTERS, Simulator

from spectrain import cli
from spectrain.bundle import Belonging, save_drafter
from spectrain.checkpoint_commands import serve_command
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.evaluation.summary import summarise
from spectrain.files import write_json
from spectrain.identity import TargetIdentity
from spectrain.interop import WEIGHTS_FILE, Served, medusa
from spectrain.manifest import read_manifest
from spectrain.serving import invocations, shell

HUB = TargetIdentity("LlamaForCausalLM", "c" * 64, "w" * 64, "org/it's a target", "abc")
CHAINS = tuple(DRAFTERS)


@pytest.fixture
def bundle(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run / "run/bundle", tmp_path / "a bundle"))


def serve_commands(bundle, k=None):
    return shell(invocations(bundle, k))


def words(text, start):
    """The words of the command that starts so."""
    (line,) = [found for found in text.split("\n# ") if start in found]
    return shlex.split(line[line.index(start) :])


def save(kind, config, target, folder, identity=HUB):
    drafter = kind.build(config, target, torch.ones(target.vocab_size))
    save_drafter(folder, drafter, Belonging(identity, target.tokenizer))
    return folder


def measure(bundle, eagle3, ngram=None, contenders=None):
    """Put a report beside the bundle: of drafts that are accepted with such a probability; returns its verdict."""
    kinds = {"desk": {"eagle3": eagle3} | ({} if ngram is None else {"ngram": ngram})}
    samples = Simulator().samples(kinds, conversations=12, more=(Simulator.tree,))
    chosen = [s for s in samples if s["contender"] in (contenders or CHAINS)]
    manifest, context = read_manifest(bundle), json.loads(json.dumps(Simulator.context))
    context["drafter"]["weights"] = manifest.files[WEIGHTS_FILE]
    context["target"]["weights"] = manifest.target.weights_digest
    document = summarise(chosen, context=context)
    write_json(bundle / "acceptance.json", document)
    return document["samplers"][0]["verdict"]


def test_the_report_says_how_many_tokens(bundle, chat_folder):
    assert measure(bundle, 0.9, contenders=("plain", "eagle3 k=3"))["overall"]["decision"] == "on"
    text = serve_commands(bundle)
    assert text.startswith("# 3 draft tokens a round: acceptance.json says on, with eagle3 k=3 (")
    found = words(text, "vllm serve")
    assert found[:3] == ["vllm", "serve", str(chat_folder)]
    assert json.loads(found[-1]) == {"method": "eagle3", "model": str(bundle), "num_speculative_tokens": 3}
    export, found = text.split("# SGLang\n")[1].split("\n")[:2]
    assert shlex.split(export) == ["spectrain", "export", str(bundle), "sglang-eagle3", f"{bundle}-sglang-eagle3"]
    found = shlex.split(found)
    assert found[found.index("--speculative-num-steps") + 1] == "3"
    assert found[found.index("--speculative-num-draft-tokens") + 1] == "4"
    assert found[found.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert "# transformers' generate has no eagle3 drafters" in text
    assert "is a folder of this machine" in text


def test_the_report_may_lie_elsewhere(bundle, tmp_path, capsys):
    measure(bundle, 0.9, contenders=("plain", "eagle3 k=3"))
    elsewhere = tmp_path / "report" / "acceptance.json"
    elsewhere.parent.mkdir()
    (bundle / "acceptance.json").rename(elsewhere)
    for given in (elsewhere, elsewhere.parent):
        assert serve_command([str(bundle), "--report", str(given)]) == 0
        assert capsys.readouterr().out.startswith("# 3 draft tokens a round: acceptance.json says on, with ")
    with pytest.raises(SpectrainError, match=r"none\.json is not there"):
        serve_command([str(bundle), "--report", str(tmp_path / "none.json")])


@pytest.mark.parametrize("part", ["drafter", "target"])
@pytest.mark.parametrize("given", [True, False])
def test_a_report_has_to_be_this_bundles_wherever_it_lies(bundle, tmp_path, part, given):
    """A bundle that was trained again keeps no earlier one's recommendation, nor has it one of another target."""
    measure(bundle, 0.9)
    path = bundle / "acceptance.json"
    report, options = json.loads(path.read_text()), ["--report", str(path)] if given else []
    report["context"][part]["weights"] = "f" * 64
    write_json(path, report)
    with pytest.raises(SpectrainError, match=rf"was measured on another {part}: .*spectrain evaluate .*, or --k"):
        serve_command([str(bundle), *options])
    del report["context"][part]["weights"]
    write_json(path, report)
    with pytest.raises(SpectrainError, match=f"does not say which {part} was measured"):
        serve_command([str(bundle), *options])
    assert serve_command([str(bundle), *options, "--k", "2"]) == 0


def test_more_tokens_than_the_drafter_was_trained_on_are_remarked_on(bundle):
    depths = read_manifest(bundle).drafter["depths"]
    assert "was trained" not in serve_commands(bundle, depths)
    assert f"# the drafter was trained {depths} deep: of {depths + 1} draft tokens" in serve_commands(
        bundle, depths + 1
    )


@pytest.mark.parametrize("k", [None, 3])
def test_a_bundle_that_was_changed_is_not_served(bundle, k):
    measure(bundle, 0.9)
    file = bundle / WEIGHTS_FILE
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(SpectrainError, match=f"{WEIGHTS_FILE} was changed after it was written"):
        serve_commands(bundle, k)


def test_without_a_recommendation_k_has_to_be_given(bundle):
    measure(bundle, 0.1)
    with pytest.raises(SpectrainError, match=r"says to leave it off \(.*\): slower than plain decoding; .*give --k"):
        serve_commands(bundle)
    measure(bundle, 0.9, contenders=("plain", Simulator.tree))
    with pytest.raises(SpectrainError, match=f"recommends the tree {Simulator.tree}"):
        serve_commands(bundle)
    (bundle / "acceptance.json").unlink()
    with pytest.raises(SpectrainError, match=r"acceptance\.json is not there, so nobody .*--report DIR/.*, or --k"):
        serve_commands(bundle)
    assert serve_commands(bundle, 3).startswith("# 3 draft tokens a round: as given")
    with pytest.raises(SpectrainError, match="--k 0: expected a whole number from 1"):
        serve_commands(bundle, 0)


def test_the_headlines_length_is_served_where_it_is_about_this_drafter(bundle):
    """Of two verdicts that name different lengths, as older reports have them, the one that people read counts."""
    verdict = measure(bundle, 0.9)
    path = bundle / "acceptance.json"
    document = json.loads(path.read_text())
    block = document["samplers"][0]
    assert verdict["overall"]["k"] == 5
    shorter = next(c for c in block["contenders"] if c["contender"] == "eagle3 k=3")
    pooled = shorter["pooled"]
    own = block["verdict"]["by_drafter"]["eagle3"]["overall"]
    own |= {"contender": "eagle3 k=3", "k": 3, "adjusted": pooled["speedup"]["decode"]}
    own["best"] |= {key: shorter[key] for key in ("contender", "k", "depth", "nodes")}
    own["best"] |= {key: pooled[key] for key in ("conversations", "tokens_per_round")}
    own["best"] |= {f"{part}_speedup": pooled["speedup"][part] for part in ("decode", "total")}
    write_json(path, document)
    assert serve_commands(bundle).startswith("# 5 draft tokens a round: acceptance.json says on, with eagle3 k=5 (")
    assert "; its verdict)" in serve_commands(bundle)
    verdict = measure(bundle, 0.8, ngram=0.95)
    assert verdict["overall"]["contender"] == "ngram k=5"
    own = verdict["by_drafter"]["eagle3"]["overall"]
    text = serve_commands(bundle)
    assert text.startswith(f"# {own['k']} draft tokens a round: acceptance.json says on, with {own['contender']} (")
    assert "; its verdict on eagle3 by itself)" in text


def test_a_report_that_says_off_is_an_answer_and_no_mistake(bundle, capsys):
    measure(bundle, 0.1)
    assert cli.guarded(serve_command, [str(bundle)], "spectrain serve-command") == 1
    said = capsys.readouterr()
    assert said.out.startswith("# ")
    assert "says to leave it off" in said.out
    assert said.err == ""
    assert cli.guarded(serve_command, [str(bundle), "--json"], "spectrain serve-command") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["k"], found["servers"]) == (0, {})
    assert cli.guarded(serve_command, [str(bundle), "--k", "2"], "spectrain serve-command") == 0
    (bundle / "acceptance.json").unlink()
    assert cli.guarded(serve_command, [str(bundle)], "spectrain serve-command") == 2


def test_draft_models_and_revisions(chat_target, tmp_path):
    folder = save(LanguageModelDrafter, LanguageModelConfig(layers=(0, 7)), chat_target, tmp_path / "bundle")
    text = serve_commands(folder, 2)
    found = words(text, "vllm serve")
    assert found[2:5] == ["org/it's a target", "--revision", "abc"]
    assert json.loads(found[-1])["method"] == "draft_model"
    assert "STANDALONE" in text
    assert "spectrain export" not in text
    program = words(text, "python -c")[2]
    compile(program, "it", "exec")
    assert """from_pretrained("org/it's a target", revision='abc')""" in program
    assert "num_assistant_tokens = 2" in program
    assert "folder of this machine" not in text


def test_medusa_has_so_many_heads(chat_target, tmp_path):
    folder = save(MedusaDrafter, MedusaConfig(heads=2), chat_target, tmp_path / "bundle")
    assert "# SGLang has no medusa drafters" in serve_commands(folder, 2)
    with pytest.raises(SpectrainError, match="--k 3: expected a whole number from 1 to 2, the number of heads"):
        serve_commands(folder, 3)


def test_what_a_server_does_not_take_is_said(chat_target, tmp_path, monkeypatch):
    folder = save(MedusaDrafter, MedusaConfig(heads=2), chat_target, tmp_path / "bundle")
    monkeypatch.setattr(medusa, "SERVED", Served(None, "MEDUSA"))
    text = serve_commands(folder, 2)
    assert "# vLLM has no medusa drafters" in text
    assert "vllm serve" not in text
    assert words(text, "python -m sglang")[-1] == "3"


def test_drafters_that_no_server_takes_have_no_command(chat_target, tmp_path, monkeypatch):
    """A command that cannot work is worse than none."""
    folder = save(MedusaDrafter, MedusaConfig(heads=2), chat_target, tmp_path / "bundle")
    monkeypatch.setattr(medusa, "SERVED", Served(None, None))
    with pytest.raises(SpectrainError, match=r"neither vLLM nor SGLang nor .* takes medusa drafters; .*load_bundle"):
        serve_commands(folder, 2)


def test_a_target_of_its_own_is_what_is_served(chat_target, tmp_path, monkeypatch):
    def write_more(self, folder):
        chat_target.model.save_pretrained(folder / "target")

    monkeypatch.setattr(MedusaDrafter, "write_more", write_more)
    folder = save(MedusaDrafter, MedusaConfig(heads=2), chat_target, tmp_path / "bundle")
    text = serve_commands(folder, 2)
    found = words(text, "vllm serve")
    assert found[2] == str(folder / "target")
    assert "--revision" not in found
    assert "# the target is the bundle's own, trained with the drafter" in text
