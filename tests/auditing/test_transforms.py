"""What transforms do to the objective: what they declare, and what clipping did along a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Federation, FedShuffleError, audit
from fedshuffle.auditing import clipping_report, measured_clipping
from fedshuffle.auditing.result import print_audit
from fedshuffle.auditing.transforms import print_clipping
from fedshuffle.privacy import AdaptiveClipping, Privacy
from fedshuffle.transforms import Chain, ClientContext, Message, Transform

CLIENTS = Federation.from_sizes([1, 2, 3])


class Declared(Transform):
    """Declares what it does to the mean update, and does nothing."""

    def __init__(self, mean: Any) -> None:
        self.mean = mean

    def client(self, updates: Any, state: Any, context: ClientContext) -> Message:
        return Message(updates)

    def __repr__(self) -> str:
        return f"<{self.mean}>"


@pytest.mark.parametrize("mean", ["unchanged", "unbiased", "restored"])
def test_transforms_that_keep_the_mean_keep_the_objective(mean: str) -> None:
    plain = audit(CLIENTS, "fedshuffle", "uniform:2")
    result = audit(CLIENTS, "fedshuffle", "uniform:2", transforms=[Declared(mean)])
    assert result.consistent is True
    assert result.findings == ()
    np.testing.assert_array_equal(result.effective_weights, plain.effective_weights)
    want = {"unchanged": [], "unbiased": ["variance"], "restored": ["remember"]}[mean]
    assert len(result.notes) == len(want)
    assert all(word in note for word, note in zip(want, result.notes, strict=True))


def test_a_biased_transform_is_a_finding_with_its_remedy() -> None:
    chain = Chain((Declared("unbiased"), Declared("biased")))
    result = audit(CLIENTS, "fedshuffle", transforms=[chain, Declared("model-dependent")])
    assert result.consistent is False
    assert result.total_variation == pytest.approx(0, abs=1e-12)
    assert result.conclusion == ("not consistent", "a transform changes the mean update.")
    biased, clips = result.findings
    assert biased.what.startswith("<biased> changes the mean update")
    assert "+ef" in biased.fix
    assert clips.what.startswith("What <model-dependent> does")
    assert result.to_dict()["keeps_mean"] is False


@pytest.mark.parametrize(
    ("method", "words"), [("fedshuffle", "equally far"), ("fedavg-rr", "client 2 goes 3 times")]
)
def test_clipping_leaves_the_objective_undecided(method: str, words: str) -> None:
    result = audit(CLIENTS, method, transforms=[Declared("model-dependent")])
    assert result.consistent is (None if method == "fedshuffle" else False)
    assert words in result.findings[-1].why
    assert "--clipping" in result.findings[-1].fix
    if method == "fedshuffle":
        assert "transform" in result.conclusion[1]
    else:  # its weights are wrong without the transform
        assert "in the wrong place" in result.conclusion[1]


@pytest.mark.parametrize("noise", [0.5, None], ids=["noise", "epsilon"])
@pytest.mark.parametrize("adaptive", [AdaptiveClipping(count_noise=0.4), None], ids=repr)
def test_privacy_is_clipping_with_noise(
    noise: float | None, adaptive: AdaptiveClipping | None
) -> None:
    """The noise for an epsilon follows from the rounds, so the audit names none."""
    privacy = Privacy(clip=2.0, noise=noise, epsilon=1.0, delta=1e-3, adaptive=adaptive)
    result = audit(CLIENTS, "fedshuffle", "uniform:2", channel="qsgd:4", privacy=privacy)
    assert result.consistent is None
    (found,) = result.findings
    assert ("AdaptiveClip" if noise and adaptive else "Clip(threshold=2.0") in found.what
    assert "QSGD" in result.notes[0]
    noises = [note for note in result.notes if "GaussianNoise(std=0.75)" in note]
    assert len(result.notes) == 1 + len(noises)
    assert bool(noises) == (noise is not None and adaptive is None)


def test_privacy_that_no_run_accepts_is_refused() -> None:
    with pytest.raises(FedShuffleError, match="fixed denominator"):
        audit(CLIENTS, "fedavg", privacy=Privacy(clip=1.0, epsilon=1.0, delta=1e-3))


def test_what_is_no_fault_is_printed() -> None:
    from fedshuffle._terminal import Console

    console = Console(width=100)
    with console.capture() as text:
        print_audit(console, audit(CLIENTS, "fedshuffle", transforms=[Declared("unbiased")]))
    assert "- <unbiased>: unbiased, so the objective is the same" in text.get()


def test_other_things_are_no_transforms() -> None:
    with pytest.raises(FedShuffleError, match="not a Transform"):
        audit(CLIENTS, "fedshuffle", transforms=["topk"])  # type: ignore[list-item]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1e6)), min_size=1, max_size=30),
    st.floats(1e-3, 1e3),
)
def test_factors_are_means_over_a_client_s_rounds(
    rows: list[tuple[int, float]], clip: float
) -> None:
    who, norms = map(list, zip(*rows, strict=True))
    report = measured_clipping(who, norms, CLIENTS, clip)
    for i in range(3):
        own = [1.0 if norm <= clip else clip / norm for client, norm in rows if client == i]
        assert report.times[i] == len(own)
        if own:
            assert report.factors[i] == pytest.approx(np.mean(own))
            if len(own) > 1:
                want = np.std(own, ddof=1) / np.sqrt(len(own))
                assert report.standard_errors[i] == pytest.approx(want, abs=1e-12)
        else:
            assert np.isnan(report.factors[i])
            assert np.isinf(report.effective_errors[i])
    assert report.effective_weights.sum() == pytest.approx(1)
    assert 0 <= report.total_variation < 1


def test_norms_of_a_known_distribution() -> None:
    # For |u| uniform on (0, 2C): E min(1, C/|u|) = 1/2 + (ln 2)/2; for |u| = 4C it is 1/4.
    norms = (np.arange(20_000) + 0.5) / 10_000
    clients = np.repeat([0, 1, 2], [20_000, 1, 1])
    report = measured_clipping(clients, [*norms, 4.0, 0.1], CLIENTS, clip=1.0)
    half = 0.5 + np.log(2) / 2
    np.testing.assert_allclose(report.factors, [half, 0.25, 1.0], rtol=1e-7)
    raw = np.array([1, 2, 3]) * [half, 0.25, 1.0]
    np.testing.assert_allclose(report.effective_weights, raw / raw.sum(), rtol=1e-7)
    assert report.clipped.tolist() == [0.5, 1.0, 0.0]


def test_standard_errors_of_the_weights_are_those_of_many_runs() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        norms = rng.uniform(0.5, [[1], [4], [2]], (3, 50))
        found.append(measured_clipping(np.repeat([0, 1, 2], 50), norms.ravel(), CLIENTS, 1.0))
    spread = np.std([report.effective_weights for report in found], axis=0)
    mean = np.mean([report.effective_errors for report in found], axis=0)
    np.testing.assert_allclose(mean, spread, rtol=0.12)


def test_the_weights_predict_where_clipped_quadratics_settle() -> None:
    # Client i has f_i(x) = h_i/2 |x - t_i|^2 and sends a gradient step, clipped to norm 1. Where
    # the clipped mean update is zero, x minimises sum_i w_i E min(1, 1/|u_i|) f_i: a mean of t.
    h, t, w = np.array([1.0, 0.5, 2.0]), np.array([[0, 0], [4.0, 1], [1, 5.0]]), CLIENTS.weights
    x, clients, norms = np.zeros(2), [], []
    for round in range(3000):
        updates = -h[:, None] * (x - t)
        length = np.linalg.norm(updates, axis=1)
        x = x + 0.3 * w @ (updates / np.maximum(length, 1)[:, None])
        if round >= 2900:
            clients += [0, 1, 2]
            norms += length.tolist()
    report = measured_clipping(clients, norms, CLIENTS, clip=1.0)
    weight = report.effective_weights * h
    np.testing.assert_allclose(x, weight @ t / weight.sum(), rtol=1e-9)
    meant = w * h
    assert np.abs(x - meant @ t / meant.sum()).max() > 0.3  # where it should have settled
    assert report.losing[0] == np.argmax(length)


def test_a_run_that_clips_nothing() -> None:
    report = measured_clipping([0, 1, 2], [0.1, 0.2, 1.0], CLIENTS, clip=1.0)
    assert report.total_variation == 0
    assert "no update was clipped" in repr(report)
    assert len(report.losing) == 0


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    from fedshuffle._terminal import Console

    rounds = [
        {"client": [0, 2], "update_norm": [0.5, 2.0]},
        None,
        {"client": [2, 1], "update_norm": [4.0, 1.0]},
    ]
    records = [
        {"round": r, "per_client": rows} if rows else {"round": r} for r, rows in enumerate(rounds)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    report = clipping_report(tmp_path, CLIENTS, 1.0)
    assert report.factors.tolist() == [1.0, 1.0, 0.375]
    console = Console(width=100)
    with console.capture() as text:
        print_clipping(console, report)
    assert "client 2 counts" in text.get()
    assert report.to_dict()["losing"] == [2]
    one = {"round": 1, "cohort": [1, 2], "per_client": {"update_norm": [2.0, None]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(one))  # clients by the cohort's record
    assert clipping_report(tmp_path, CLIENTS, 1.0).times.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"round": 1}', "record_clients=True"),
        ("{", "line 1"),
        ('{"per_client": {"client": [0]}}', "record_clients=True"),
        ('{"per_client": {"client": [7], "update_norm": [1]}}', "client 7 is not one of the 3"),
        ('{"per_client": {"client": [0, 1], "update_norm": [1]}}', "2 clients and 1 norms"),
        ('{"per_client": {"client": [0], "update_norm": [-1]}}', "negative"),
        ('{"per_client": {"client": [0], "update_norm": [null]}}', "0 clients and 0 norms"),
        ('{"per_client": {"update_norm": [1]}}', "line 1"),
    ],
)
def test_folders_that_do_not_say(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(FedShuffleError, match=words):
        clipping_report(tmp_path, CLIENTS, 1.0)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="cannot read"):
        clipping_report(tmp_path, CLIENTS, 1.0)
    with pytest.raises(FedShuffleError, match="clip is 0"):
        measured_clipping([0], [1.0], CLIENTS, 0)
