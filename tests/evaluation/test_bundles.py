"""Bundles compared in one run: their names, their target, what is known of them, and a run that was interrupted."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from spectrain.bundle import Belonging, save_drafter
from spectrain.data.conversations import load_conversations
from spectrain.drafters import family_of
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.lookahead import LookaheadConfig
from spectrain.drafters.medusa import MedusaConfig
from spectrain.drafters.ngram import NgramConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation import acceptance
from spectrain.evaluation.bundles import Asked, compare_bundles, evaluate_bundle, parse_baselines
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.document import read_document
from spectrain.evaluation.entrants import names_of, resolve_bundles
from spectrain.evaluation.load_config import LoadConfig
from spectrain.evaluation.memory import weight_bytes
from spectrain.evaluation.training_cost import training_cost
from spectrain.exact.sampler import Sampler
from spectrain.manifest import MANIFEST_FILE, read_manifest
from spectrain.shapes import StaticTree

TREE = StaticTree(((0,), (1,), (0, 0)))
CONFIG = AcceptanceConfig(k=(2, 3), trees=(TREE,), samplers=(Sampler(),), max_new_tokens=5)
EAGLE = Eagle3Config(depths=2, draft_vocab_size=64)
TIMES = {"prefill_s", "draft_s", "verify_s", "overhead_s", "total_s"}


def save(folder, config, target, seed=0):
    torch.manual_seed(seed)
    drafter = family_of(config).build(config, target, torch.arange(target.vocab_size))
    save_drafter(folder, drafter, Belonging.to(target))
    return str(folder)


@pytest.fixture(scope="module")
def bundles(chat_target, tmp_path_factory):
    """Two of one family, and one that drafts two tokens ahead at most."""
    runs = tmp_path_factory.mktemp("bundles") / "runs"
    return [
        save(runs / "a" / "bundle", EAGLE, chat_target),
        save(runs / "b" / "bundle", EAGLE, chat_target, seed=1),
        save(runs / "heads" / "bundle", MedusaConfig(heads=2), chat_target),
    ]


@pytest.fixture(scope="module")
def chats(finished_run):
    return load_conversations([str(finished_run / "heldout.jsonl")])


@pytest.fixture(scope="module")
def compare(bundles, chat_target, chats):
    def compare(output):
        return compare_bundles(
            resolve_bundles(bundles),
            chat_target,
            Asked(
                chats,
                CONFIG,
                output,
                traffic="heldout.jsonl",
                baselines=(NgramConfig(), LookaheadConfig()),
                progress=False,
            ),
        )

    return compare


@pytest.fixture(scope="module")
def compared(compare, tmp_path_factory):
    return compare(tmp_path_factory.mktemp("compared"))


def test_a_context_without_room_for_batches_is_refused_before_anything_is_measured(
    bundles, chat_target, chats, tmp_path
):
    config = CONFIG.model_copy(update={"load": LoadConfig(batch=(1,), context=(256,))})
    with pytest.raises(SpectrainError, match="--context 256: with 4 tokens to verify that is 260"):
        evaluate_bundle(
            Path(bundles[0]), chat_target, Asked(chats, config, tmp_path, traffic="heldout.jsonl", progress=False)
        )
    assert list(tmp_path.iterdir()) == []


def test_batches_measured_with_other_settings_are_refused_before_anything_else_is_measured(
    bundles, chat_target, chats, tmp_path
):
    (tmp_path / "evaluation").mkdir()
    for name in ("load.json", "load.jsonl"):
        (tmp_path / "evaluation" / name).write_text("{}\n", encoding="utf-8")
    config = CONFIG.model_copy(update={"load": LoadConfig(batch=(1,))})
    with pytest.raises(SpectrainError, match=r"load\.jsonl was measured with other settings"):
        evaluate_bundle(
            Path(bundles[0]), chat_target, Asked(chats, config, tmp_path, traffic="heldout.jsonl", progress=False)
        )
    assert not list(tmp_path.rglob("samples*"))


def refusal(call, *arguments):
    with pytest.raises(SpectrainError) as error:
        call(*arguments)
    return str(error.value)


DRAFTERS = ["ngram", "lookahead", "eagle3 (runs/a)", "eagle3 (runs/b)", "medusa"]


def test_every_drafter_is_measured_and_ranked_in_one_document(compared):
    document = read_document(compared)
    (block,) = document["samplers"]
    names = [c["contender"] for c in block["contenders"]]
    drafts = ("k=2", "k=3", "tree of 3")
    expected = [f"{drafter} {draft}" for drafter in DRAFTERS for draft in drafts]
    expected.remove("medusa k=3")
    assert names == ["plain", *expected]
    board = block["leaderboard"]
    assert sorted(row["contender"] for row in board["ranked"]) == sorted(names)
    assert {row["rank"] for row in board["ranked"]} == {1}  # four conversations decide nothing
    assert all(entry["equal"] == 4 for entry in block["exactness"])
    assert set(block["verdict"]["by_drafter"]) == set(DRAFTERS)
    assert document["context"]["drafter"]["name"] == "eagle3 (runs/a), eagle3 (runs/b), medusa"
    assert list(document["context"]["drafters"]) == [*DRAFTERS[2:], *DRAFTERS[:2]]
    assert document["context"]["traffic"]["chose_the_step"] is False  # nothing says that they were trained with it
    assert "also chose the training step" not in (compared.parent / "report.md").read_text(encoding="utf-8")


def test_what_a_drafter_cannot_fill_is_noted(compared):
    reason = "k=3 has depth 3, medusa drafts at most 2 tokens ahead"
    left_out = {"drafter": "medusa", "draft": "k=3", "reason": reason}
    assert read_document(compared)["context"]["left_out"] == [left_out]
    for name in ("report.md", "report.html"):
        assert f"Left out: medusa k=3: {reason}." in (compared.parent / name).read_text(encoding="utf-8")


def test_rows_know_memory_and_acceptance(compared, chat_target):
    rows = {row["contender"]: row for row in read_document(compared)["samplers"][0]["leaderboard"]["ranked"]}
    eagle, medusa = rows["eagle3 (runs/a) k=3"], rows["medusa k=2"]
    drafter = family_of(EAGLE).build(EAGLE, chat_target, torch.arange(chat_target.vocab_size))
    assert eagle["drafter_bytes"] == weight_bytes(drafter)
    assert eagle["state_bytes"] > medusa["state_bytes"] > 0
    assert rows["ngram k=2"]["drafter_bytes"] == rows["ngram k=2"]["state_bytes"] == 0
    for row in rows.values():
        assert (row["alpha"] is None) == (row["drafter"] in ("plain", "ngram", "lookahead"))
        assert row["training_seconds"] is None
    assert eagle["alpha"] != rows["eagle3 (runs/b) k=3"]["alpha"]


def timeless(output):
    lines = [json.loads(line) for line in (output / "evaluation" / "samples.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def test_an_interrupted_comparison_goes_on_to_the_same_samples(compare, compared, monkeypatch, tmp_path):
    real, calls = acceptance.generate_plain, []

    def third_fails(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:  # one to warm up, one conversation, and the second
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    with monkeypatch.context() as context:
        context.setattr(acceptance, "generate_plain", third_fails)
        with pytest.raises(KeyboardInterrupt):
            compare(tmp_path)
    assert not (tmp_path / "acceptance.json").exists()
    assert len({line["conversation"] for line in timeless(tmp_path)}) == 1
    document, whole = read_document(compare(tmp_path)), read_document(compared)
    assert timeless(tmp_path) == timeless(compared.parent)
    assert document["teacher_forced"] == whole["teacher_forced"]
    assert document["context"] == whole["context"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in compared.parent.iterdir()}


def test_an_output_of_other_bundles_is_refused(bundles, compared, chat_target, chats, tmp_path):
    output = Path(shutil.copytree(compared.parent, tmp_path / "out"))
    before = (output / "acceptance.json").read_bytes()

    def again():
        compare_bundles(
            resolve_bundles(bundles[:2]), chat_target, Asked(chats, CONFIG, output, traffic="t", progress=False)
        )

    message = refusal(again)
    assert "measured with other settings" in message
    assert str(output) in message
    assert (output / "acceptance.json").read_bytes() == before


def test_a_bundle_by_itself_leaves_out_what_it_cannot_fill_and_has_no_leaderboard(
    bundles, chat_target, chats, tmp_path, capsys
):
    path = evaluate_bundle(
        Path(bundles[2]),
        chat_target,
        Asked(
            chats[:1],
            CONFIG.model_copy(update={"trees": ()}),
            tmp_path,
            traffic="t",
            baselines=(NgramConfig(),),
            progress=False,
        ),
    )
    document = read_document(path)
    names = [c["contender"] for c in document["samplers"][0]["contenders"]]
    assert names == ["plain", "ngram k=2", "ngram k=3", "medusa k=2"]
    assert document["samplers"][0]["leaderboard"] is None
    assert "note: medusa k=3 is left out" in capsys.readouterr().out


def test_the_settings_tell_the_draft_vocabulary_that_the_bundle_has(bundles, chat_target, chats, tmp_path):
    """More tokens may be asked for than the target has; of what came as asked for there is one row."""
    wanted = Eagle3Config(depths=2, draft_vocab_size=32000)
    folders = {"large": save(tmp_path / "large", wanted, chat_target), "small": bundles[0]}
    rows = {}
    for name, folder in folders.items():
        output = tmp_path / f"report-{name}"
        evaluate_bundle(
            Path(folder),
            chat_target,
            Asked(chats[:1], CONFIG.model_copy(update={"trees": ()}), output, traffic="t", progress=False),
        )
        lines = (output / "report.md").read_text(encoding="utf-8").splitlines()
        rows[name] = [line for line in lines if line.startswith("| drafter draft vocab size")]
    taken = f"| drafter draft vocab size | {chat_target.tokenizer_size} |"
    assert rows["large"] == [taken, "| drafter draft vocab size asked for | 32000 |"]
    assert rows["small"] == ["| drafter draft vocab size | 64 |"]


# --- which bundles ------------------------------------------------------------------------------------------------


def test_a_bundle_of_another_target_is_named(bundles, chat_target, tmp_path):
    other = Path(shutil.copytree(bundles[2], tmp_path / "other"))
    manifest = json.loads((other / MANIFEST_FILE).read_text())
    manifest["target"]["weights_digest"] = "0" * 64
    (other / MANIFEST_FILE).write_text(json.dumps(manifest))
    message = refusal(resolve_bundles, [*bundles[:2], str(other), bundles[2]])
    own = read_manifest(bundles[0]).target.weights_digest
    assert message == (
        f"{other} does not belong to the target of {bundles[0]} (target weights_digest: {own} against {'0' * 64}); "
        "compare bundles of one target"
    )


def test_a_bundle_that_is_given_twice_is_named(bundles):
    again = f"{bundles[0]}/../bundle"
    message = refusal(resolve_bundles, [bundles[0], bundles[1], again])
    assert message == f"bundle {again} is given twice (before as {bundles[0]}); give every bundle once"
    assert "is given twice" in refusal(resolve_bundles, [bundles[0], bundles[0]])


@pytest.mark.parametrize(
    ("bundles", "families", "names"),
    [
        (["runs/a", "runs/b"], ["eagle3", "medusa"], ["eagle3", "medusa"]),
        (["runs/a", "runs/b", "c"], ["eagle3", "eagle3", "medusa"], ["eagle3 (runs/a)", "eagle3 (runs/b)", "medusa"]),
        (["/x/runs/a/bundle", "/x/runs/b/bundle"], ["m", "m"], ["m (runs/a)", "m (runs/b)"]),
        (["a/same/bundle", "b/same/bundle"], ["m", "m"], ["m (a)", "m (b)"]),
        (["1/x/a", "2/x/a", "y/b"], ["m", "m", "m"], ["m (1/x/a)", "m (2/x/a)", "m (y/b)"]),
        (["a", "x/a"], ["m", "m"], ["m (a)", "m (x/a)"]),
        (["org/draft", "runs/a"], ["m", "m"], ["m (org/draft)", "m (runs/a)"]),
        (["a", "b", "c", "d"], ["m", "e", "m", "e"], ["m (a)", "e (b)", "m (c)", "e (d)"]),
    ],
)
def test_names_are_short_and_tell_bundles_apart(bundles, families, names):
    assert names_of(bundles, families) == names


def test_a_folder_cannot_pass_for_a_lossy_rule():
    assert "LOSSY marks rules that change the output; rename the folder" in refusal(
        names_of, ["runs/LOSSY", "runs/a"], ["eagle3", "eagle3"]
    )
    assert names_of(["runs/LOSSY"], ["eagle3"]) == ["eagle3"]


def test_baselines_are_those_without_training():
    assert parse_baselines("ngram,lookahead") == (NgramConfig(), LookaheadConfig())
    assert parse_baselines("none") == ()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("eagle3", "'eagle3' is none"),
        ("ngram,", "'' is none"),
        ("", "'' is none"),
        ("ngram,ngram", "one is there twice"),
    ],
)
def test_other_baselines_are_named(text, what):
    expected = f"--baselines {text!r}: {what}; expected some of lookahead, ngram, or none"
    assert refusal(parse_baselines, text) == expected


# --- what training took -------------------------------------------------------------------------------------------


@pytest.fixture
def run(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run / "run", tmp_path / "run"))


def steps(run):
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def chosen(run):
    """The checkpoint that the run's bundle is: of its best step."""
    checkpoints = run / "training" / "checkpoints"
    return checkpoints / json.loads((checkpoints / "best.json").read_text())["checkpoint"]


def test_training_is_known_from_the_run_that_a_bundle_lies_in(run):
    rows, bundle = steps(run)[: int(chosen(run).name.removeprefix("step-"))], run / "bundle"
    found = training_cost(bundle, read_manifest(bundle))
    assert found == {
        "seconds": pytest.approx(rows[-1]["seconds"]),
        "answer_tokens": sum(row["supervised"] for row in rows),
        "curve": [
            {
                "seconds": row["seconds"],
                "step": row["step"],
                "answer_tokens": sum(r["supervised"] for r in rows[: row["step"]]),
                "tokens_per_round": row["validation"]["tokens_per_round"],
                "alpha": row["validation"]["alpha"][0],
            }
            for row in rows
            if "validation" in row
        ],
    }
    assert found["curve"]
    assert found["answer_tokens"] > 0


def test_a_checkpoint_knows_its_own_part_of_the_training(run):
    first, *_, last = sorted((run / "training" / "checkpoints").glob("step-*"))
    step = int(first.name.removeprefix("step-"))
    found = training_cost(first / "bundle", read_manifest(first / "bundle"))
    assert found["answer_tokens"] == sum(row["supervised"] for row in steps(run)[:step])
    assert found["seconds"] == pytest.approx(steps(run)[step - 1]["seconds"])
    assert found["seconds"] < training_cost(last / "bundle", read_manifest(last / "bundle"))["seconds"]


def test_the_record_of_another_training_is_not_the_bundles(run, bundles, tmp_path):
    manifest = read_manifest(bundles[1])
    assert training_cost(run / "bundle", manifest) is None  # what lies there now was made by another run
    alone = Path(shutil.copytree(run / "bundle", tmp_path / "alone" / "bundle"))
    assert training_cost(alone, read_manifest(alone)) is None


def test_without_every_step_the_tokens_are_not_known(run):
    (run / "training" / "metrics.jsonl").unlink()
    assert training_cost(run / "bundle", read_manifest(run / "bundle"))["answer_tokens"] is None


def test_a_record_that_cannot_be_read_is_named(run):
    last = chosen(run)
    good = (last / "progress.json").read_text()
    for bad in ("{}", '{"step"', json.dumps(json.loads(good) | {"step": "7"})):
        (last / "progress.json").write_text(bad)
        message = refusal(training_cost, run / "bundle", read_manifest(run / "bundle"))
        assert f"checkpoint {last} is damaged (progress.json: " in message  # as the run itself would say
    (last / "progress.json").write_text(good)
    (run / "training" / "metrics.jsonl").write_text("{}\n")
    message = refusal(training_cost, run / "bundle", read_manifest(run / "bundle"))
    assert f"{run / 'training' / 'metrics.jsonl'}: found KeyError('step')" in message
    assert "copy the bundle to a place of its own" in message
