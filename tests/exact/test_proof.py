"""The proof: exact for every lossless rule, and able to fail."""

from fractions import Fraction
from random import Random

import pytest

from spectrain import cli
from spectrain.errors import SpectrainError
from spectrain.exact import proof
from spectrain.exact.law import chain_round, resampled
from spectrain.exact.proof import BIASED, LOSSLESS, Finding, check, prove, random_laws, table


@pytest.fixture(scope="module")
def findings():
    return prove(60, seed=1)


def test_every_lossless_rule_has_the_law_p_and_every_shortcut_is_rejected(findings):
    assert [finding.rule for finding in findings] == [*LOSSLESS, *BIASED]
    for finding in findings:
        assert finding.cases == 60
        assert (finding.differing == 0) == (finding.worst == 0) == finding.lossless
    check(findings)


def test_a_seed_is_a_proof_that_can_be_repeated(findings):
    steps = []
    assert prove(2, seed=3, advance=lambda: steps.append(1)) == prove(2, seed=3) != prove(2, seed=4)
    assert len(steps) == 2


def test_the_cases_of_a_seed_stay_what_they_are():
    """How often, and how far at most, each shortcut was off: fewer or simpler cases would be a weaker proof."""
    found = {finding.rule: (finding.differing, str(finding.worst)) for finding in prove(8, seed=5)}
    assert list(found.values()) == [(0, "0")] * 7 + [
        (8, "15/64"), (7, "23/35"), (3, "1/18"), (7, "719/1064"), (6, "5/8"),
        (4, "1/20"), (6, "1/3"), (5, "13/48"), (4, "1/32"), (8, "1"),
    ]  # fmt: skip


def test_cases_have_zero_probabilities_and_laws_of_their_own_after_every_prefix():
    laws = [random_laws(Random(seed)) for seed in range(20)]
    rows = [law(prefix) for law in laws for prefix in ((), (0,), (2, 1), (1, 1, 2))]
    assert all(sum(row) == 1 for row in rows)
    assert sum(0 in row for row in rows) > 20
    assert len({laws[0](prefix) for prefix in ((), (0,), (1,), (2,), (0, 0), (0, 1))}) > 3


def test_a_rule_that_is_wrongly_called_lossless_fails(monkeypatch):
    monkeypatch.setitem(LOSSLESS, "mine", lambda p, q, _: chain_round(p, q, 2, repair=resampled))
    findings = prove(10)
    with pytest.raises(SpectrainError, match=r"mine: found \d+ of 10 cases with a law other than p, expected none"):
        check(findings)


def test_a_control_that_nothing_rejects_fails():
    with pytest.raises(SpectrainError, match=r"x: found 0 of 5 cases .* give it more cases"):
        check([Finding("x", False, 5, 0, Fraction(0))])


def test_no_cases_prove_nothing():
    with pytest.raises(SpectrainError, match="cases: found 0, expected at least 1"):
        prove(0)


def test_the_table_names_every_rule_and_counts_the_controls(findings):
    text = table(findings)
    assert all(f"{name} " in text for name in [*LOSSLESS, *BIASED])
    assert text.count("0 (exact)") == len(LOSSLESS)
    assert text.endswith(f"negative controls rejected: {len(BIASED)} of {len(BIASED)}")


def test_the_command_prints_the_table_and_fails_when_the_proof_does(capsys, monkeypatch):
    assert cli.guarded(cli.prove, ["--cases", "20", "--seed", "1"], "spectrain prove") == 0
    assert "negative controls rejected: 10 of 10" in capsys.readouterr().out
    monkeypatch.setitem(proof.LOSSLESS, "mine", lambda p, q, _: chain_round(p, q, 2, repair=resampled))
    assert cli.guarded(cli.prove, ["--cases", "5"], "spectrain prove") == 1
    captured = capsys.readouterr()
    assert "mine" in captured.out
    assert "not proved: mine: found" in captured.out
