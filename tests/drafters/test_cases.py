"""Faults that other trainers had, of drafters and their draft vocabularies: each must not come back.

Shapes: V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import copy

import pytest
import torch

from spectrain.bundle import Belonging, load_drafter, save_drafter
from spectrain.drafters import FAMILIES, TrainableDrafter
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.errors import SpectrainError

OWN_OR_NOT = [config for config in FAMILIES if "embedding" in config.model_fields]
VOCAB = 100


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", vocab=VOCAB, padding=4, dtype=torch.float32)


def counts_of(ids, target):
    counts_V = torch.zeros(target.vocab_size, dtype=torch.long)
    counts_V[list(ids)] = torch.arange(1, len(list(ids)) + 1)
    return counts_V


def eagle3(target, ids, size=32, *, seed=0, **settings):
    """A drafter whose answers held these tokens, with weights that no other has."""
    torch.manual_seed(seed)
    drafter = Eagle3Drafter.build(Eagle3Config(draft_vocab_size=size, **settings), target, counts_of(ids, target))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


# --- draft vocabularies -----------------------------------------------------------------------------------------------


def test_fewer_distinct_tokens_than_columns_still_fill_the_vocabulary(target):
    """20 distinct supervised tokens, a draft vocabulary of 32 of 100: 32 unique ascending ids and as many marks; asked
    for 48 next, the 32 are not used again."""
    seen = range(50, 90, 2)
    for size in (32, 48, 32):
        drafter = eagle3(target, seen, size)
        ids = (torch.arange(size) + drafter.d2t).tolist()
        assert ids == sorted(set(ids))
        assert len(ids) == size == drafter.columns
        assert set(seen) <= set(ids) <= set(range(VOCAB))
        assert drafter.t2d.nonzero()[:, 0].tolist() == ids
        assert drafter.lm_head.weight.shape[0] == size


def test_a_warm_start_keeps_the_draft_vocabulary_whatever_was_counted(target):
    """On data with other token frequencies d2t and t2d are bit-equal to the checkpoint's, beside the head they name."""
    old, new = eagle3(target, range(0, 60, 2)), eagle3(target, range(1, 99, 3), seed=1)
    want = {name: value.clone() for name, value in old.state_dict().items()}
    assert not torch.equal(new.d2t, old.d2t)
    assert new.warm_start(old, target) == ()
    assert new.state_dict().keys() == want.keys()
    for name, value in new.state_dict().items():
        assert torch.equal(value, want[name]), name
    assert torch.equal(new.vocabulary()[1], old.vocabulary()[1])


@pytest.mark.parametrize("size", [16, 48])
def test_another_size_of_draft_vocabulary_is_refused_with_both_sizes(target, size):
    old, new = eagle3(target, range(0, 60, 2)), eagle3(target, range(0, 60, 2), size, seed=1)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    message = refusal(new.warm_start, old, target)
    assert f"draft vocabulary has 32 tokens, this recipe asks for {size}" in message
    assert "drafter.draft_vocab_size=32" in message
    assert "warm_start.remap=true" in message
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())


@pytest.mark.parametrize("size", [16, 32, 48])
def test_a_remapped_head_takes_rows_by_token(target, size):
    """Tokens in both vocabularies keep their row, wherever it now stands; new ones begin with the target's."""
    old, new = eagle3(target, range(0, 60, 2)), eagle3(target, range(1, 99, 3), size, seed=1)
    wanted = new.vocabulary()[1].tolist()
    row_of = {token: row for row, token in enumerate(old.vocabulary()[1].tolist())}
    both = set(wanted) & set(row_of)
    assert 0 < len(both) < size
    (note,) = new.warm_start(old, target, remap=True)
    assert note.startswith(f"{size - len(both)} of {size} tokens")
    assert new.vocabulary()[1].tolist() == (torch.arange(size) + new.d2t).tolist() == wanted
    assert new.t2d.nonzero()[:, 0].tolist() == wanted
    for column, token in enumerate(wanted):
        want = old.lm_head.weight[row_of[token]] if token in both else target.head_weight[token]
        assert torch.equal(new.lm_head.weight[column], want)
    mine, theirs = new.state_dict(), old.state_dict()
    for name in mine.keys() - {"lm_head.weight", "d2t", "t2d"}:
        assert torch.equal(mine[name], theirs[name]), name


def test_remapping_is_refused_where_there_is_no_draft_vocabulary(target):
    drafters = [EagleDrafter.build(EagleConfig(), target, counts_of([1], target)) for _ in range(2)]
    assert "no draft vocabulary to remap" in refusal(drafters[0].warm_start, drafters[1], target, remap=True)


def test_what_the_shapes_of_weights_do_not_tell_is_compared_too(target, tiny_target):
    """Heads of attention, the layers that are read, and rotary settings, of which the last is this target's."""
    old = eagle3(target, range(40))
    narrow = tiny_target("llama", vocab=VOCAB, padding=4, dtype=torch.float32, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=4)  # fmt: skip
    new = eagle3(narrow, range(40), seed=1)
    assert [p.shape for p in new.parameters()] == [p.shape for p in old.parameters()]
    assert "num_attention_heads is 4 in the bundle, 8" in refusal(new.warm_start, old, narrow)
    assert "layers [2, 4, 5], this recipe's drafter [1, 2, 3]; set drafter.tap_layers=[2, 4, 5]" in refusal(
        eagle3(target, range(40), tap_layers=(1, 2, 3)).warm_start, old, target
    )
    rope = {"rope_type": "default", "rope_theta": 500.0}
    far = tiny_target("llama", vocab=VOCAB, padding=4, dtype=torch.float32, rope_parameters=rope)
    new = eagle3(far, range(40), seed=1)
    (note,) = new.warm_start(old, far)
    assert "rope_parameters is this target's" in note
    assert new.layer_config.rope_parameters["rope_theta"] == 500.0


# --- an embedding of its own ------------------------------------------------------------------------------------------


@pytest.fixture(params=OWN_OR_NOT, ids=lambda kind: kind.model_fields["type"].default)
def own(request, tools, target, make_rows):
    """A drafter that trains its embedding, and a batch."""
    rows = make_rows(target, 4)
    drafter = tools.drafter(target, tools.config(request.param, embedding="own"), rows)
    return drafter, tools.batch(target, drafter, rows)


def test_an_own_embedding_starts_as_the_targets_and_is_trained(own, target, tools):
    drafter, batch = own
    embedding, frozen = drafter.embed_tokens.weight, target.embedding_weight
    assert torch.equal(embedding, frozen)
    assert embedding.data_ptr() != frozen.data_ptr()
    before = frozen.clone()
    DrafterLoss(drafter, target.head, LossConfig())(batch, tools.weights(drafter, batch)).backward()
    touched = (embedding.grad.abs().sum(-1) > 0).nonzero()[:, 0].tolist()
    assert set(touched) <= set(batch.ids_BT.flatten().tolist())
    assert len(touched) > 5
    assert frozen.grad is None
    losses = tools.train(drafter, target, batch, 10)
    assert losses[-1] < losses[0]
    assert not torch.equal(drafter.embed_tokens.weight, before)
    assert torch.equal(target.embedding_weight, before)


def test_nothing_supervised_still_gives_it_a_gradient(own, target):
    drafter, batch = own
    empty = type(batch)(**{**vars(batch), "answer_BT": torch.zeros_like(batch.answer_BT)})
    DrafterLoss(drafter, target.head, LossConfig())(empty, [1.0] * len(drafter.shifts())).backward()
    assert drafter.embed_tokens.weight.grad is not None
    assert not drafter.embed_tokens.weight.grad.any()


def test_a_borrowed_embedding_and_an_own_copy_say_the_same(own, target, tools, make_rows):
    drafter, batch = own
    borrowing = tools.drafter(target, drafter.config.model_copy(update={"embedding": "target"}), make_rows(target, 4))
    assert borrowing.embed_tokens is None
    assert "embed_tokens.weight" not in borrowing.state_dict()
    weights = {name: value for name, value in drafter.state_dict().items() if name != "embed_tokens.weight"}
    borrowing.load_state_dict(weights)
    for mine, theirs in zip(drafter.eval()(batch).depths, borrowing.eval()(batch).depths, strict=True):
        assert torch.equal(mine.hidden_BTH, theirs.hidden_BTH)
    old = copy.deepcopy(borrowing)
    (note,) = drafter.warm_start(old, target)
    assert "borrowed its target's embedding" in note
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight)
    assert "set drafter.embedding=own" in refusal(borrowing.warm_start, drafter, target)


@pytest.mark.parametrize("kind", OWN_OR_NOT, ids=lambda kind: kind.model_fields["type"].default)
@pytest.mark.parametrize("embedding", ["target", "own"])
def test_the_bundle_holds_the_embedding_where_it_is_its_own(chat_target, tools, tmp_path, kind, embedding):
    torch.manual_seed(0)
    config = tools.config(kind, embedding=embedding)
    drafter = FAMILIES[kind].build(config, chat_target, counts_of(range(40), chat_target))
    assert isinstance(drafter, TrainableDrafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_drafter(tmp_path / "bundle", drafter, Belonging(chat_target.identity(), chat_target.tokenizer))
    loaded, contents, _ = load_drafter(tmp_path / "bundle", chat_target)
    assert loaded.config == config
    assert ("embed_tokens.weight" in contents.tensors) == (embedding == "own")
    assert contents.config.get("embed_requires_grad", embedding == "own") == (embedding == "own")
    mine, theirs = loaded.state_dict(), drafter.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    ids_BT = torch.tensor([[3, 1, 4]])
    assert torch.equal(loaded.embed(ids_BT), drafter.embed(ids_BT))
