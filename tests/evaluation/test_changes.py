"""What would change a verdict: it is said of the contender that the verdict is about."""

from spectrain.evaluation.changes import would_change

NUMBERS = {
    "cost": {
        "break_even_tokens_per_round": 1.5,
        "proposed_per_round": 2.0,
        "draft_cost_per_token": 0.1,
        "draft_cost_per_round": 0.2,
        "verify_cost_per_round": 1.2,
        "overhead_cost_per_round": 0.1,
    },
    "tokens_per_round": {"value": 1.4},
}
VERDICT = {"decision": "off", "best": {"contender": "ngram k=3", "k": 3, "conversations": 8}, "up_to_batch": None,
           "conversations_needed": 45}  # fmt: skip


def advice(*paying):
    rows = [{"batch": batch, "decision": "on" if name else "off", "contender": name} for batch, name in paying]
    return would_change(VERDICT, NUMBERS, {"by_batch": rows})


def test_nobody_is_sent_from_single_requests_to_batches_of_one():
    assert advice((1, "ngram k=3"), (8, None)) == "about 37 more conversations"


def test_larger_batches_that_paid_are_named_with_whom_they_paid_for():
    assert advice((1, "eagle3 k=3"), (2, "eagle3 k=3"), (4, "eagle3 k=3"), (8, "ngram k=3"), (16, None)) == (
        "about 37 more conversations; batches of 2, 4, where eagle3 k=3 was measured to pay; "
        "batches of 8, where it was measured to pay"
    )
