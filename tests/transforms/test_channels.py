"""The texts that name channels, and one clear error for each that does not."""

import pytest

from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms import (
    EF21,
    QSGD,
    Compressed,
    Diana,
    DownLink,
    ErrorFeedback,
    Float16,
    RandK,
    Sign,
    TopK,
    channel,
    channels,
    down_link,
    register,
)

NAMES = {
    "topk:0.01": Compressed(TopK(0.01)),
    "randk:0.1": Compressed(RandK(0.1)),
    "qsgd:4": Compressed(QSGD(4)),
    "sign": Compressed(Sign()),
    "float16": Compressed(Float16()),
    "topk:0.01+ef": ErrorFeedback(TopK(0.01)),
    "qsgd:4+ef": ErrorFeedback(QSGD(4)),
    "sign+ef": ErrorFeedback(Sign()),
    "float16+ef": ErrorFeedback(Float16()),
    "topk:0.01+ef21": EF21(TopK(0.01)),
    "randk:0.1+ef21": EF21(RandK(0.1)),
    "randk:0.1+diana": Diana(RandK(0.1)),
    "qsgd:4+diana": Diana(QSGD(4)),
    "qsgd:4+diana:0.5": Diana(QSGD(4), 0.5),
}


@pytest.mark.parametrize("text", NAMES)
def test_texts_and_channels_name_each_other(text: str) -> None:
    assert channel(text) == NAMES[text]
    assert str(NAMES[text]) == text
    assert channel(f" {text} ") == NAMES[text]


def test_shares_keep_all_their_digits() -> None:
    third = Compressed(TopK(1 / 3))
    assert channel(str(third)) == third


def test_short_names() -> None:
    assert channel("diana") == Diana(QSGD(4))
    assert channel("none") is None
    assert down_link("none") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:0", r"the share of topk is 0\.0, but must be in \(0, 1\]"),
        ("randk:1.5", r"the share of randk is 1\.5, but must be in \(0, 1\]"),
        ("topk:few", "'topk:few' cannot be read: write 'topk:SHARE'"),
        ("qsgd:1", "the number of bits of qsgd is 1, but must be a whole number from 2 to 16"),
        ("qsgd:4.5", "'qsgd:4.5' cannot be read: write 'qsgd:BITS'"),
        ("qsgd", "'qsgd' is incomplete or has too much: write 'qsgd:BITS'"),
        ("sign:2", "'sign:2' is incomplete or has too much: write 'sign'"),
        ("topc:0.1", "unknown compressor 'topc'. Did you mean 'topk'"),
        ("", "unknown compressor ''"),
        ("topk:0.1+diana", r"topk:0\.1 is biased\. Use 'topk:0\.1\+ef21'"),
        ("sign+ef+ef21", r"has 2 kinds of memory.*write 'sign\+ef' or 'sign\+ef21'"),
        ("sign+feedback", "unknown memory 'feedback'"),
        ("sign+", "unknown memory ''"),
        ("sign+ef:2", r"has too much after 'ef': write 'sign\+ef'"),
        ("qsgd:4+diana:2", r"alpha of diana is 2\.0, but must be in \(0, 1\]"),
        ("qsgd:4+diana:a", r"write 'qsgd:4\+diana:ALPHA'"),
        ("diana+ef", r"'diana' stands alone"),
        ("none+ef", r"'none' stands alone"),
    ],
)
def test_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message) as error:
        channel(text)
    assert "\n" not in str(error.value)


def test_down_links() -> None:
    assert down_link("topk:0.1") == DownLink(TopK(0.1))
    assert str(down_link("topk:0.1")) == "topk:0.1"
    with pytest.raises(FedShuffleError, match=r"always fed back: write 'topk:0\.1'"):
        down_link("topk:0.1+ef")
    with pytest.raises(FedShuffleError, match="always fed back: write 'qsgd:4'"):
        down_link("diana")
    with pytest.raises(FedShuffleError, match="of type Compressor"):
        DownLink("topk")  # type: ignore[arg-type]


def test_a_compressor_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_MAKERS", dict(channels._MAKERS))
    register("coarse:BITS", lambda text: QSGD(int(text)))
    assert channel("coarse:2+diana") == Diana(QSGD(2))
    with pytest.raises(FedShuffleError, match="write 'coarse:BITS'"):
        channel("coarse")
    register("wrong", lambda _: "no compressor")  # type: ignore[arg-type,return-value]
    with pytest.raises(FedShuffleError, match="the compressor 'wrong' must be of type Compressor"):
        channel("wrong")
    for taken in ("topk:SHARE", "none", "diana"):
        with pytest.raises(FedShuffleError, match="is taken"):
            register(taken, lambda _: Sign())
    with pytest.raises(FedShuffleError, match="cannot be the name"):
        register("a+b", lambda _: Sign())
