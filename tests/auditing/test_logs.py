"""Logs of rounds: what they show of the objective, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, LocalWork, audit
from fedshuffle.auditing import read_log
from fedshuffle.sampling import resolve

HEADER = "round,client,size,steps,weight\n"


def write(folder: Path, text: str, name: str = "rounds.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_log_of_full_participation(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}\n" for r in range(8) for c in range(3)]
    found, federation = read_log(write(tmp_path, HEADER + "".join(lines)))
    np.testing.assert_allclose(found.effective_weights, np.array([1, 4, 9]) / 14)
    assert federation.sizes.tolist() == [1, 2, 3]
    assert found.exact
    assert found.consistent is False
    assert found.properties.form == "by size"
    assert any("1 to 3" in finding.what for finding in found.findings)


def test_log_with_step_sizes_that_make_up_for_steps(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"round": r, "client": f"c{c}", "size": c, "steps": c, "weight": c, "step_size": 1 / c}
        )
        for r in range(8)
        for c in (1, 2, 3)
    ]
    found, federation = read_log(write(tmp_path, "\n".join(lines), "rounds.jsonl"))
    assert federation.ids == ("c1", "c2", "c3")
    assert found.consistent is True


def test_log_of_sampled_rounds(tmp_path: Path) -> None:
    federation = Federation.from_sizes([2, 4, 6, 9])
    sampling = resolve("uniform:2", federation)
    lines = []
    for r in range(400):
        cohort = sampling.draw(5, r)
        whole = federation.sizes[cohort].sum()
        lines += [
            f"{r},{c},{federation.sizes[c]},3,{float(federation.sizes[c] / whole)!r}\n"
            for c in cohort
        ]
    found, _ = read_log(write(tmp_path, HEADER + "".join(lines)))
    truth = audit(federation, "fedavg", "uniform:2", LocalWork(steps=3)).effective_weights
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()
    assert found.properties.sums_to == pytest.approx(1)
    assert found.inclusion_probabilities.sum() == pytest.approx(2)


def test_log_with_other_objective_weights(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c},1,0.5\n" for r in range(8) for c in (10, 9)]
    path = write(tmp_path, HEADER + "".join(lines))
    assert read_log(path, weights=[1, 1])[0].consistent is True
    assert read_log(path)[1].ids == ("9", "10")  # by number, not as text


def test_a_log_of_a_few_equal_rounds_proves_nothing(tmp_path: Path) -> None:
    rows = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}" for r in range(9) for c in range(3)]
    for rounds, sure in ((2, None), (9, False)):
        path = tmp_path / f"{rounds}.csv"
        path.write_text("\n".join(["round,client,size,steps,weight", *rows[: 3 * rounds]]))
        found, _ = read_log(path)
        assert found.consistent is sure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rounds"),
        (HEADER, "no rounds"),
        ("round,client,size,weight\n0,a,1,1\n", "'steps'"),
        (HEADER + "0,a,1,1,1\n0,b,1,1\n", "line 3: weight"),
        (HEADER + "0,a,1,1,1\n0,b,1,1,1,1\n", "line 3: more entries"),
        (HEADER + "0,a,1,x,1\n", "line 2: steps is 'x'"),
        (HEADER + "0,a,0,1,1\n", "line 2: size is '0'"),
        (HEADER + "0,a,1,1.5,1\n", "line 2: steps is '1.5'"),
        (HEADER + "0,a,1,1,nan\n", "line 2: weight is 'nan'"),
        (HEADER + "0,a,1,1,-1\n", "line 2: weight is '-1'"),
        (HEADER + "0,,1,1,1\n", "line 2: client is ''"),
        (HEADER + "0,a,1,1,1\n\n0,a,1,1,1\n", "line 4: client a .* line 2"),
        (HEADER + "0,a,1,1,1\n1,a,2,1,1\n", "line 3: client a .* line 2"),
        (HEADER + "0,a,1,1,0\n", "sum to 0"),
        ('{"round": 0}\n', "line 1: .*'client'"),
        ('{"round": 0\n', "line 1: no JSON"),
        ('{"round":0,"client":"a","size":1,"steps":1,"weight":1}\n[]\n', "line 2"),
        (
            '{"round":0,"client":null,"size":1,"steps":1,"weight":1}\n',
            "line 1: client is None",
        ),
        (
            '{"round":0,"client":"a","size":true,"steps":1,"weight":1}\n',
            "line 1: size is True",
        ),
        ("round,client,size,steps,weight,weight\n", "'weight'"),
        (HEADER + f"0,a,{10**30},1,1\n", "line 2: size"),
        (
            '{"round":0,"client":"a","size":' + "9" * 400 + ',"steps":1,"weight":1}\n',
            "line 1: size is 9",
        ),
        ('{"round":' + "9" * 5000 + "}\n", "line 1: no JSON"),
        ('{"round":' + "[" * 100_000 + "\n", "line 1: no JSON"),
    ],
)
def test_broken_logs_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        read_log(write(tmp_path, text))


def test_spaces_and_empty_lines_of_a_log_do_not_matter(tmp_path: Path) -> None:
    text = "round, client, size, steps, weight\n0, a, 1, 1, 1 \n  \n0, b, 2, 1, 1\n\n"
    assert read_log(write(tmp_path, text))[1].ids == ("a", "b")


def test_clients_may_have_very_long_names(tmp_path: Path) -> None:
    long = "9" * 5000
    assert read_log(write(tmp_path, HEADER + f"0,{long},1,1,1\n"))[1].ids == (long,)


def test_missing_and_binary_logs(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "b.csv")
